"""The flags, and where the user's command begins."""

import re

import pytest

from hvlaunch import __version__
from hvlaunch.cli.arguments import Answered, parse
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.errors import BadUsage

TRUE = ("true",)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("-np 2 true", "np", 2),
        ("-np=2 true", "np", 2),
        ("--num-proc 2 true", "np", 2),
        ("--num-proc=2 true", "np", 2),
        ("-n 2 true", "np", 2),
        ("-n2 true", "np", 2),
        ("--np=2 true", "np", 2),
        ("-H a:2,b true", "hosts", "a:2,b"),
        ("--hosts a:2 true", "hosts", "a:2"),
        ("-H a:2,b -H c true", "hosts", "a:2,b,c"),
        ("-host a,b true", "hosts", "a,b"),
        ("--host a true", "hosts", "a"),
        ("-hosts a:2 true", "hosts", "a:2"),
        ("-Ha:2 true", "hosts", "a:2"),
        ("-hostfile f true", "hostfile", "f"),
        ("-machinefile f true", "hostfile", "f"),
        ("--machinefile f true", "hostfile", "f"),
        ("--hostfile f true", "hostfile", "f"),
        ("--slots-per-host 3 true", "slots_per_host", 3),
        ("-p 2222 true", "ssh_port", 2222),
        ("-p2222 true", "ssh_port", 2222),
        ("--ssh-port 2222 true", "ssh_port", 2222),
        ("-i key true", "ssh_identity_file", "key"),
        ("--ssh-identity-file key true", "ssh_identity_file", "key"),
        ("--ssh-user me true", "ssh_user", "me"),
        ("--ssh-config f true", "ssh_config", "f"),
        ("true", "host_keys", "strict"),
        ("--host-keys accept-new true", "host_keys", "accept-new"),
        ("--host-keys off true", "host_keys", "off"),
        ("true", "ssh_client", "paramiko"),
        ("--ssh-client openssh true", "ssh_client", "openssh"),
        ("true", "connect_limit", 8),
        ("--connect-limit 2 true", "connect_limit", 2),
        ("--remote-python /opt/python true", "remote_python", "/opt/python"),
        ("true", "start_timeout", 60.0),
        ("--start-timeout 2.5 true", "start_timeout", 2.5),
        ("true", "lease", 10.0),
        ("--lease 5 true", "lease", 5.0),
        ("true", "grace", 10.0),
        ("--grace 0.5 true", "grace", 0.5),
        ("true", "x", []),
        ("-x A -x B=1=2 -xC=3 -x NCCL_* true", "x", ["A", "B=1=2", "C=3", "NCCL_*"]),
        ("--env-file a --env-file b true", "env_file", ["a", "b"]),
        ("true", "env", []),
        ("--env all --env uv true", "env", ["all", "uv"]),
        ("--cwd /data true", "cwd", "/data"),
        ("true", "stdin", "0"),
        ("--stdin all true", "stdin", "all"),
        ("--stdin none true", "stdin", "none"),
        ("--output-filename out true", "output_filename", "out"),
        ("true", "verbose", False),
        ("--verbose true", "verbose", True),
        ("-v true", "verbose", True),
        ("--verbose true", "quiet", False),
        ("--quiet true", "quiet", True),
        ("true", "prefix", "[{rank}]<{stream}>: "),
        ("--prefix {host}| true", "prefix", "{host}|"),
        ("--prefix= true", "prefix", ""),
        ("true", "prefix_timestamp", False),
        ("-prefix-timestamp true", "prefix_timestamp", True),
        ("--prefix-output-with-timestamp true", "prefix_timestamp", True),
        ("true", "color", "auto"),
        ("--color never true", "color", "never"),
        ("true", "ranks", None),
        ("--ranks 0,8-15 true", "ranks", (range(1), range(8, 16))),
        ("true", "merge", False),
        ("--merge true", "merge", True),
        ("--events f true", "events", "f"),
        ("--dry-run true", "dry_run", True),
        ("--gloo true", "launcher", None),
        ("--mpi true", "launcher", "mpirun"),
        ("--srun true", "launcher", "srun"),
        ("--jsrun true", "launcher", "jsrun"),
        ("--mpirun /opt/m/mpirun true", "mpirun", "/opt/m/mpirun"),
        ("--mpi-args=-c true", "mpi_args", [("-c",)]),
        ("--mpi-args -v true", "mpi_args", [("-v",)]),
        ("--mpi-args --version true", "mpi_args", [("--version",)]),
        ("--binding-args=-c true", "binding_args", [("-c",)]),
        ("--force-slots true", "force_slots", True),
        ("--merge --no-merge true", "merge", False),
        ("--no-merge --merge true", "merge", True),
        ("--no-scheduler --scheduler true", "no_scheduler", False),
        ("--no-verbose true", "verbose", False),
        ("--quiet --quiet true", "quiet", True),
        ("--mpi --mpi true", "launcher", "mpirun"),
        ("--mpi --no-mpi true", "launcher", None),
        ("--mpi --no-mpi --mpi true", "launcher", "mpirun"),
        ("--blacklist-cooldown-range 2 5 true", "cooldown", [2.0, 5.0]),
        ("--prefix - true", "prefix", "-"),
        ("--no-scheduler true", "no_scheduler", True),
        ("true", "np", None),
    ],
)
def test_a_flag_gives_its_value_and_leaves_the_command_alone(line, field, value):
    options = parse(line.split())
    assert getattr(options, field) == value
    assert options.command == TRUE


@pytest.mark.parametrize("flag", ["-cb", "--check-build"])
def test_check_build_needs_no_command(flag):
    options = parse([flag])
    assert options.check_build
    assert options.command == ()


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("-np 2 python train.py --np 3 -H x", "python train.py --np 3 -H x"),
        ("-np 2 python --s 3 --h --unknown -x", "python --s 3 --h --unknown -x"),
        ("-np 2 python -c pass -h --version", "python -c pass -h --version"),
        ("-np 2 -- python -np 3", "python -np 3"),
        ("-np 2 -- -odd-name -np 3", "-odd-name -np 3"),
        ("-np 2 python -- -np 3 --", "python -- -np 3 --"),
        ("-- -- x", "-- x"),
        ("--verbose true --verbose", "true --verbose"),
        ("--gloo --dry-run true", "true"),
        ("--num-proc 2 --ssh-user me -x A=b true", "true"),
        ("--env-file=f true", "true"),
        ("- x", "- x"),
        ("-n 2 true", "true"),
    ],
)
def test_the_command_begins_at_the_first_word_that_is_not_an_option(line, command):
    assert parse(line.split()).command == tuple(command.split())


def test_words_of_the_command_are_kept_as_they_are():
    words = ["sh", "-c", "echo $HOME 'a  b'", "", "ü", "\udcff", "--", "a\nb"]
    assert parse(["-np", "2", *words]).command == tuple(words)


def test_an_empty_word_is_a_command():
    assert parse(["-np", "2", "", "x"]).command == ("", "x")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("", "no command to run"),
        ("-np 2", "no command to run"),
        ("-np 2 --", "no command to run"),
        ("--dry-run -np 2", "no command to run"),
        ("-np", "-np/--num-proc: expected one argument"),
        ("-np two true", "-np/--num-proc: 'two' is not a whole number"),
        ("-np 1.5 true", "-np/--num-proc: '1.5' is not a whole number"),
        ("-np 0 true", "-np/--num-proc: 0 is not between 1 and"),
        ("-np -1 true", "-np/--num-proc: -1 is not between 1 and"),
        ("-np 99999999999 true", "-np/--num-proc: 99999999999 is not between 1 and"),
        ("--slots-per-host 0 true", "--slots-per-host: 0 is not between 1 and"),
        ("--slots-per-host 70000 true", "--slots-per-host: 70000 is not between 1 and 65535"),
        ("-p 0 true", "-p/--ssh-port: 0 is not between 1 and 65535"),
        ("-p 65536 true", "-p/--ssh-port: 65536 is not between 1 and 65535"),
        ("--start-timeout 0 true", "--start-timeout: 0 is not more than 0 seconds"),
        ("--lease -3 true", "--lease: -3 is not more than 0 seconds"),
        ("--grace nan true", "--grace: nan is not more than 0 seconds"),
        ("--grace inf true", "--grace: inf is more than 1000000 seconds"),
        ("--grace soon true", "--grace: 'soon' is not a number of seconds"),
        ("--stdin 1 true", "--stdin: invalid choice: '1'"),
        ("--host-keys no true", "--host-keys: invalid choice: 'no'"),
        ("--ssh-client putty true", "--ssh-client: invalid choice: 'putty'"),
        ("--connect-limit 0 true", "--connect-limit: 0 is not between 1 and"),
        ("--color red true", "--color: invalid choice: 'red'"),
        ("--ranks 3-1 true", "--ranks: '3-1' has no rank in it"),
        ("--ranks a true", "--ranks: 'a' is neither a rank nor a range such as 8-15"),
        ("--events= true", "--events: must not be empty"),
        ("--quiet --verbose true", "--verbose: not allowed with --quiet"),
        ("--print-completion ksh", "--print-completion: invalid choice: 'ksh'"),
        ("--env some true", "--env: invalid choice: 'some'"),
        ("-H a -hostfile f true", "not allowed with "),
        ("--ssh-user -oProxyCommand=x true", "--ssh-user: expected one argument"),
        ("--ssh-user=-oProxyCommand=x true", "--ssh-user: '-oProxyCommand=x' is not a user name"),
        ("--ssh-user= true", "--ssh-user: '' is not a user name"),
        ("--cwd= true", "--cwd: must not be empty"),
        (
            "--ho a true",
            "options can't be cut short; try: --hosts, --hostfile, --host-keys, --host-discovery-script, --horovod",
        ),
        (
            "--num 2 true",
            "unknown option '--num', and options can't be cut short; try: --num-proc, --num-nccl-streams, or hvlaunch --help",
        ),
        (
            "--check-b true",
            "unknown option '--check-b', and options can't be cut short; try: hvlaunch --check-build true, or ",
        ),
        (
            "-hostf f true",
            "unknown option '-hostf', and options can't be cut short; try: hvlaunch -hostfile f true, or ",
        ),
        ("-vv true", "unknown option '-vv'"),
        ("-v", "no command to run; try: hvlaunch -V for the version"),
        ("--gloo=1 true", "--gloo: ignored explicit argument '1'"),
        ("--gloo --mpi true", "--mpi: not allowed with --gloo"),
        ("--quiet --no-verbose true", "not allowed with --quiet"),
        (
            "--blacklist-cooldown-range 2 true",
            "--blacklist-cooldown-range: 'true' is not a number of seconds",
        ),
        ("--blacklist-cooldown-range 2", "--blacklist-cooldown-range: expected 2 arguments"),
        ("--blacklist-cooldown-range=2 5 true", "--blacklist-cooldown-range: expected 2 arguments"),
        ("--prefix --merge true", "--prefix: expected one argument"),
        ("--no-grace 3 true", "unknown option '--no-grace'"),
        ("--bogus true", "unknown option '--bogus'; try: hvlaunch --help"),
        ("--bogus=3 true", "unknown option '--bogus'"),
        (
            "--hostfiles f true",
            "unknown option '--hostfiles'; try: hvlaunch --hostfile f true, or hvlaunch --help",
        ),
        ("-z true", "unknown option '-z'"),
    ],
)
def test_an_invalid_value_is_one_line_that_names_the_flag(line, part):
    with pytest.raises(BadUsage) as caught:
        parse(line.split())
    assert part in str(caught.value)
    assert "hvlaunch --help" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_the_terminal_and_lists_every_flag(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(Answered) as caught:
        parse(["--help"])
    text = caught.value.text
    assert max(map(len, text.splitlines())) <= width
    groups = [
        "hosts",
        "workers",
        "environment",
        "output",
        "SSH",
        "ending",
        "controller",
        "general",
        "exit codes",
        "examples",
    ]
    places = [text.index(f"\n{group}:\n") for group in groups]
    assert places == sorted(places)
    flags = "-np --num-proc -H --hosts -hostfile --hostfile --slots-per-host -p --ssh-port -i --ssh-identity-file "
    flags += "--ssh-user --ssh-config --host-keys --ssh-client --connect-limit --remote-python --start-timeout --lease --grace -x --env-file --env "
    flags += (
        "--prefix -prefix-timestamp --prefix-output-with-timestamp --color --ranks --merge --events --quiet "
        "--print-completion --cwd --stdin --output-filename --verbose --dry-run -cb --check-build --gloo -v -V --version -h --help"
    )
    listed = [
        word.strip(",") for line in text.splitlines() if line.startswith("  -") for word in line.split()
    ]
    assert set(flags.split()) <= set(listed)
    examples = text.partition("\nexamples:\n")[2].replace("\\\n", "").splitlines()
    assert all(line.split()[0] == "hvlaunch" for line in examples if line.startswith("    ")), "fit to paste"
    assert "gpu[01-04]:8" in text, "square brackets are no markup"
    assert "default: 60" in text


def test_the_short_help_has_ten_options_and_where_more_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(Answered) as caught:
        parse(["-h"])
    lines = caught.value.text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24, "a terminal shows all of it"
    options = [option for group in GROUPS for option in group.options]
    everyday = [option.flags for option in options if option.is_everyday]
    shown = [
        tuple(re.findall(r"(?<!\S)(--?[a-zA-Z][-\w]*)", line[:32]))
        for line in lines
        if line.startswith("  -")
    ]
    assert sorted(shown) == sorted(everyday)
    assert len(everyday) == 10
    assert (
        f"  hvlaunch --help               all {len(options)} options, with examples and exit codes" in lines
    )


@pytest.mark.parametrize(
    "question", ["--help", "-h", "--version", "-V", "-v", "--check-build", "--print-completion bash"]
)
@pytest.mark.parametrize("line", ["--bogus {}", "--bogus x {}", "{} --bogus", "{} --bogus x true"])
def test_an_unknown_option_is_reported_before_a_question_is_answered(line, question):
    with pytest.raises(BadUsage, match="unknown option '--bogus'"):
        parse(line.format(question).split())


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(flag):
    with pytest.raises(Answered) as caught:
        parse([flag])
    assert caught.value.text == f"hvlaunch {__version__}\n"


def test_settle_may_be_zero():
    assert parse(["--settle", "0", "true"]).settle == 0.0
