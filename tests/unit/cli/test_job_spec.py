"""From options to a JobSpec: hosts, directories, files, limits."""

import dataclasses
import os
import re
import shlex
import time
from pathlib import Path

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.environment import MAX_STRING
from hvlaunch.cli.spec import current_directory, job_spec
from hvlaunch.console.lines import ASCTIME
from hvlaunch.errors import BadHost, BadUsage, SlotsUnlikely
from hvlaunch.hosts.placement import in_quota
from hvlaunch.job import (
    BringOptions,
    CollectOptions,
    ConsoleOptions,
    ContainerOptions,
    Host,
    JobSpec,
    MPIOptions,
    SetupOptions,
    SSHOptions,
    SyncOptions,
    Templates,
)
from hvlaunch.outside.ledger import Ledger, ledger_directory


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec_of(line, environ=None):
    spec, warnings = job_spec(parse(shlex.split(line)), environ or {})
    is_alone = spec.detach != "never" and spec.mpi is not None
    assert len(warnings) == is_alone
    assert not is_alone or warnings[0].startswith("no other driver can take over a job of ")
    return spec


def test_without_options_job_spec_has_its_defaults(here):
    assert spec_of("true") == JobSpec(command=("true",), hosts=(Host("localhost"),), cwd=str(here))


def test_everything_said_arrives(here):
    for name in ("key", "config", "vars"):
        (here / name).write_text("FROM_FILE=1\n")
    line = (
        "--job-name base --detach -np 3 -H a:2,u@b:1 --slots-per-host 4 --force-slots -x A=1 --env-file vars --stdin none --output-filename out -p 22 "
        "--ssh-user me -i key --ssh-config config --host-keys off --ssh-client openssh --connect-limit 3 --remote-python /py --start-timeout 1 --lease 2 "
        "--prefix {host}: -prefix-timestamp --color never --ranks 1-2 --merge --events log --report /r.json --notify mail:me@x.org --notify-on failed,done "
        "--horovod --rendezvous-relay always --rendezvous-port 4711 --rendezvous-bind 10.0.0.9 --worker-port-range 29500-29599 "
        f"--templates --sync --sync-dir {here} --sync-limit 5K --setup make --setup-key Makefile --bring a:/m:/data/m --collect out/*.pt:out --collect *.log:/results --collect-limit 1K "
        "--mpi --mpirun /m --mpi-args=-a --mpi-args=-b --binding-args=-c "
        "--ready-port 8000 --end-with-rank 2 --reconnect-timeout 4 --spill 0 --fsync --grace 3 --settle 1 --hang-timeout 5 --on-hang stop --verbose --network-interfaces 'ib0, ib1,' --network-interface eth0 --nccl auto --rank-order measured --cwd /data python -m train -np 4"
    )
    spec = spec_of(line, {"PATH": "/bin", "OTHER": "x"})
    assert dataclasses.replace(spec, options=()) == JobSpec(
        command=("python", "-m", "train", "-np", "4"),
        hosts=(Host("a", slots=2), Host("b", slots=1, user="u")),
        cwd="/data",
        templates=Templates(("python", "-m", "train", "-np", "4"), {}, (), {}),
        sync=SyncOptions(str(here), "", 5 << 10),
        bring=(BringOptions("a", "/m", "/data/m"),),
        collect=(CollectOptions("out/*.pt", f"{Path.cwd()}/out"), CollectOptions("*.log", "/results")),
        collect_limit=1 << 10,
        setup=SetupOptions(("make",), spec_of("--setup make true").setup.patterns, ("Makefile",)),
        name="base",
        detach="at start",
        np=3,
        end_with_rank=2,
        ready_port=8000,
        slots_per_host=4,
        force_slots=True,
        network_interfaces=("ib0", "ib1", "eth0"),
        nccl="auto",
        rank_order="measured",
        horovod=True,
        relay="always",
        rendezvous_port=4711,
        rendezvous_bind="10.0.0.9",
        worker_ports=(29500, 29599),
        env={"PATH": "/bin", "FROM_FILE": "1", "A": "1"},
        stdin="none",
        output_dir=Path("out"),
        console=ConsoleOptions(
            prefix=ASCTIME + "{host}:", color="never", ranks=(range(1, 3),), merge=True, quiet=False
        ),
        events=Path("log"),
        report=Path("/r.json"),
        notify=("mail:me@x.org",),
        notify_on=("failed", "done"),
        ssh=SSHOptions(
            port=22,
            user="me",
            identity=Path("key"),
            config=Path("config"),
            host_keys="off",
            client="openssh",
            connect_limit=3,
        ),
        mpi=MPIOptions(program="/m", args=("-a", "-b"), binding=("-c",)),
        remote_python="/py",
        start_timeout=1.0,
        lease=2.0,
        reconnect_timeout=4.0,
        spill=0,
        fsync=True,
        grace=3.0,
        settle=1.0,
        hang_timeout=5.0,
        on_hang="stop",
        verbose=True,
    )
    defaults = JobSpec(command=(), hosts=(), cwd="")
    for field in dataclasses.fields(JobSpec):
        if field.name in (
            "allocation",
            "elastic",
            "ready_url",
            "skip_bad_hosts",
            "map_by",
            "check",
            "visible_gpus",
            "bind",
            "gpus_per_worker",
            "pool",
            "leases",
            "queued",
            "call",
            "roles",
            "role_limit",
            "end_with_role",
            "container",
        ):
            continue  # none goes with what is said here: -H, --mpi, --ready-port, a command
        assert getattr(spec, field.name) != getattr(defaults, field.name), (
            f"{field.name} is not covered by this test"
        )


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}


def test_without_hosts_they_are_the_schedulers(here):
    spec = spec_of("true", SLURM)
    assert spec.allocation == "Slurm job 7"
    assert spec.hosts == (Host("n1", slots=4), Host("n2", slots=4))
    assert spec.ssh.remote_agent is None
    assert spec_of("--slots-per-host 2 true", SLURM).hosts == (Host("n1"), Host("n2"))
    for line, hosts in (
        ("-H a true", (Host("a"),)),
        ("--no-scheduler true", (Host("localhost"),)),
        ("--min-np 1 --host-discovery-script ./pool true", ()),
    ):
        spec = spec_of(line, SLURM)
        assert (spec.allocation, spec.hosts) == (None, hosts)


def test_a_schedulers_program_in_place_of_ssh(here):
    (here / "hostfile").write_text("w-0 slots=2\n")
    environ = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "OMPI_MCA_orte_default_hostfile": str(here / "hostfile"),
        "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh",
    }
    spec = spec_of("true", environ)
    assert (spec.hosts, spec.ssh.remote_agent) == ((Host("w-0", slots=2),), "/etc/mpi/kubexec.sh")


@pytest.mark.parametrize("flag", ["--mpirun /m", "--mpi-args=-a", "--binding-args=-a"])
def test_a_launchers_flag_without_a_launcher(here, flag):
    with pytest.raises(BadUsage, match="is for a launcher, and hvlaunch itself starts the workers"):
        spec_of(f"{flag} true")


def test_a_launcher_binds_by_flags_of_its_own(here):
    assert spec_of("--mpi true").bind == "none"
    assert spec_of("--gpus-per-worker 2 true").gpus_per_worker == 2
    assert spec_of("--mpi --bind core true").bind == "core"
    with pytest.raises(BadUsage, match="the launcher deals out GPUs itself"):
        spec_of("--mpi --gpus-per-worker 1 true")
    with pytest.raises(BadUsage, match="--bind and --binding-args mean the same"):
        spec_of("--srun --bind core --binding-args=-a true")


def test_what_horovod_reads_is_passed_on_with_it_alone(here):
    environ = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60", "HOROVOD_RANK": "7", "HOROVOD_GLOO_IFACE": "eth9"}
    assert spec_of("true", environ).env == {}
    assert spec_of("--horovod true", environ).env == {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}


def test_quiet_arrives_too(here):
    assert spec_of("--quiet true").console == ConsoleOptions(quiet=True)


def test_a_malformed_prefix_is_an_error_at_once(here):
    with pytest.raises(BadUsage, match=r"unknown field \{lol\}; try: \{rank\}"):
        spec_of("-prefix-timestamp --prefix {lol} true")


def test_without_hosts_all_workers_are_on_this_machine(here):
    assert spec_of("-np 7 true").hosts == (Host("localhost", slots=7),)


@pytest.mark.parametrize(
    "line", ["-H b:2222 true", "-H b --slots-per-host 2222 true", "-hostfile hosts true"]
)
def test_a_port_in_the_place_of_slots_is_refused(here, line):
    (here / "hosts").write_text("b slots=2222\n")
    with pytest.raises(SlotsUnlikely) as caught:
        spec_of(line)
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        "host b: 2222 slots are more than any host has; try: -p 2222 if that is the port of sshd, --force-slots if you mean "
        "that many workers"
    )
    assert spec_of(f"--force-slots {line}").force_slots


@pytest.mark.parametrize(("line", "is_forced"), [("-np 2222 true", True), ("-np 2 -H a:1024 true", False)])
def test_slots_that_may_be_meant(here, line, is_forced):
    assert spec_of(line).force_slots is is_forced


MISPLACED = [
    (
        "python train.py -np 2",
        "-np 2 belongs to python, since it stands behind the command; options of hvlaunch come before: ",
    ),
    ("-np 2 /usr/bin/python train.py -H a:2,b", "-H a:2,b belongs to python, "),
    ("python train.py --num-proc 4", "hvlaunch --num-proc 4 python ..."),
    ("python train.py -hostfile hosts", "-hostfile hosts belongs"),
    ("python train.py --np=2", "--np=2 belongs to python, "),
    ("-np 2 python train.py --hosts=a:1,b:1", "hvlaunch --hosts=a:1,b:1 python ..."),
    ("python train.py -machinefile hosts", "-machinefile hosts belongs"),
]


@pytest.mark.parametrize(("line", "part"), MISPLACED)
def test_options_behind_the_command_are_a_warning(here, line, part):
    (here / "hosts").touch()
    spec, (warning,) = job_spec(parse(line.split()), {})
    assert spec.command[-1] == line.split()[-1]
    assert part in warning


@pytest.mark.parametrize(
    "line",
    [
        "-np 2 python train.py -np 2",
        "-- python train.py -np 2",
        "python train.py -np two",
        "python train.py --np=",
        "python serve.py --host 0.0.0.0:80",
        "python train.py --verbose -x A",
        "curl -H 'Accept: text/html' a",
        "curl -H a b",
        "python fetch.py -hostfile none",
        "-hostfile hosts python train.py -H a",
        "mpirun -np 2 python train.py",
        "env A=1 mpirun -np 2 python train.py",
        "-np 2",
    ],
)
def test_options_of_the_command_give_no_warning(here, line):
    (here / "hosts").write_text("a\n")
    words = shlex.split(line) if line != "-np 2" else ["--", *line.split()]
    assert job_spec(parse(words), {})[1] == []


def test_suspects_are_used_last(here, tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    ledger = Ledger(ledger_directory(environ), print)
    ledger.record("", "b", "gpu fault", "1", time.time())
    ledger.record("", "c", "crash", "1", time.time())
    names = [host.name for host in spec_of("--avoid-suspects -np 4 -H a,b,c,d true", environ).hosts]
    assert names == ["a", "c", "d", "b"]
    assert [host.name for host in spec_of("-np 4 -H a,b,c,d true", environ).hosts] == ["a", "b", "c", "d"]
    spec = spec_of("--avoid-suspects --min-np 2 --host-discovery-script hosts true", environ)
    assert spec.elastic.avoided == ("b",)
    listed = in_quota([Host("b"), Host("d"), Host("a")], dataclasses.replace(spec.elastic, most_hosts=2))
    assert [host.name for host in listed] == ["d", "a"]


def test_hosts_from_a_file(here):
    (here / "hosts").write_text("# pool\na slots=2\nb:3\n")
    assert spec_of("-hostfile hosts true").hosts == (Host("a", slots=2), Host("b", slots=3))


def test_container_options_arrive(here):
    line = "--container a/b:c --mount /d --mount ~/e:/f:ro --runtime podman true"
    mounts = (("/d", "", False), ("~/e", "/f", True))
    assert spec_of(line).container == ContainerOptions("a/b:c", None, "podman", mounts)
    assert spec_of("--in-container box true").container == ContainerOptions(None, "box", None, ())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--mount /a true", "--mount needs a new container"),
        ("--container a --in-container b true", "--in-container"),
        ("--in-container a --mount /b true", "--mount is for a new container"),
        ("--in-container a --runtime apptainer true", "--in-container is for docker and podman"),
        ("--container a --mpi true", "mpirun starts the workers itself, and not in a container"),
        ("--container a --pool p true", "the agents of a warm pool are not in a container"),
        ("--container a --mount b:/c true", "'b:/c' is not SRC[:DST][:ro] with absolute paths"),
        ("--container a --mount /b:c true", "'/b:c' is not SRC[:DST][:ro]"),
        ("--container a --mount /b:/c:rw:ro true", "is not SRC[:DST][:ro]"),
    ],
)
def test_container_options_that_make_no_sense_are_refused(here, line, words):
    with pytest.raises(BadUsage, match=re.escape(words)):
        spec_of(line)


def test_a_short_form_of_setup_comes_before_a_command(here):
    setup = spec_of("--env all --env uv --setup make --setup-key a true").setup
    assert "uv sync --frozen" in setup.commands[0]
    assert (setup.commands[1:], setup.files) == (("make",), ("a",))
    assert "uv.lock" in setup.patterns


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--setup-key a true", "--setup-key is for --setup and --env"),
        ("--env uv --env pip true", "--env uv and --env pip build two environments"),
        ("--setup make --setup-key ../a true", "--setup-key '../a' is no file below the working directory"),
        ("--setup make --setup-key /etc/shadow true", "is no file below the working directory"),
        ("--setup make --setup-key $'a\\x1b[2J' true", "is no file below the working directory"),
        ("--env venv true", "--env: invalid choice: 'venv' (choose from all, conda, pip, uv)"),
    ],
)
def test_a_setup_that_makes_no_sense(here, line, words):
    with pytest.raises(BadUsage) as error:
        spec_of(line.replace("$'a\\x1b[2J'", "'a\x1b[2J'"))
    assert words in str(error.value)


def test_env_all(here):
    assert spec_of("--env all true", {"ANY": "1", "HOME": "/h"}).env == {"ANY": "1"}


def test_warnings_are_handed_on(here):
    _, warnings = job_spec(parse(["-x", "GONE", "true"]), {})
    assert len(warnings) == 1
    assert "GONE" in warnings[0]


def test_the_directory_is_named_as_the_users_shell_names_it(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    monkeypatch.chdir(link)
    assert current_directory({"PWD": str(link)}) == str(link)
    saving = spec_of("-np 2 --min-np 1 -H a:1,b:1 --save-to runs/7 true", {"PWD": str(link)})
    assert saving.elastic.save_to == f"{link}/runs/7"
    real = os.path.realpath(link)
    assert current_directory({}) == real
    for wrong in (str(tmp_path), "relative", ".", "/no/such/place", "/\0", ""):
        assert current_directory({"PWD": wrong}) == real


@pytest.mark.parametrize(
    ("directory", "expected"), [("/data", "/data"), ("sub/x", "{}/sub/x"), ("..", "{}/.."), (".", "{}")]
)
def test_cwd_may_be_relative_to_this_directory(here, directory, expected):
    assert spec_of(f"--cwd {directory} true").cwd == expected.format(here)


def test_a_directory_that_is_gone_is_an_error_unless_another_is_named(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(BadUsage, match="current directory is gone; try: --cwd"):
        spec_of("true", {"PWD": str(gone)})
    assert spec_of("--cwd /data true").cwd == "/data"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-i missing true", "-i/--ssh-identity-file missing: no such file or directory"),
        ("-i . true", "-i/--ssh-identity-file .: is a directory"),
        ("--ssh-config missing true", "--ssh-config missing: no such file or directory"),
        ("-i ~nobody-has-this-name/key true", "-i/--ssh-identity-file '~nobody-has-this-name/key': "),
        ("-hostfile missing true", "missing"),
        ("--env-file missing true", "--env-file missing: no such file or directory"),
    ],
)
def test_files_that_can_not_be_read(here, line, message):
    with pytest.raises(BadUsage) as caught:
        spec_of(line)
    assert message in str(caught.value)


def test_a_home_directory_is_found(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    (here / "key").touch()
    assert spec_of("-i ~/key true").ssh.identity == here / "key"


@pytest.mark.parametrize("hosts", ["", "a:0", "a:b", "a,,b", "gpu[1-"])
def test_bad_hosts(here, hosts):
    with pytest.raises(BadHost):
        job_spec(parse(["-H", hosts, "true"]), {})


def test_an_argument_as_long_as_the_kernel_takes_and_one_byte_more(here):
    longest = "x" * (MAX_STRING - 1)
    spec, _ = job_spec(parse(["echo", longest]), {})
    assert spec.command == ("echo", longest)
    with pytest.raises(BadUsage, match=f"word 2 of the command takes {MAX_STRING} bytes"):
        job_spec(parse(["echo", longest + "y"]), {})


def test_an_argument_with_a_nul(here):
    with pytest.raises(BadUsage, match="word 3 of the command has a NUL byte"):
        job_spec(parse(["echo", "a", "b\0c"]), {})


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("-np 2 --end-with-rank 2 true", "--end-with-rank 2: the job has only ranks 0-1"),
        ("--min-np 1 --end-with-rank 0 true", "--end-with-rank is for static jobs"),
        ("--min-np 1 --skip-bad-hosts true", "--skip-bad-hosts is for static jobs"),
        ("--mpi --skip-bad-hosts true", "--skip-bad-hosts needs ssh"),
        ("--mpi --check true", "--check needs hvlaunch's own agents"),
    ],
)
def test_what_can_not_be_with_skipped_hosts_or_a_last_rank(line, cause):
    with pytest.raises(BadUsage) as caught:
        job_spec(parse(shlex.split(line)), {})
    assert caught.value.cause.startswith(cause)


@pytest.mark.parametrize(
    ("line", "lease"),
    [
        ("true", 10.0),
        ("--lease 20 true", 20.0),
        ("--detach true", 30.0),
        ("--detach-on-hangup true", 30.0),
        ("-np 2 --min-np 1 -H a:1,b:1 true", 30.0),
    ],
)
def test_static_jobs_in_the_foreground_give_a_host_up_early(here, line, lease):
    assert spec_of(line).lease == lease


@pytest.mark.parametrize(
    ("line", "patience"),
    [
        ("python x.py", 5.0),
        ("--detach python x.py", 30.0),
        ("--detach-on-hangup --lease 60 python x.py", 60.0),
        ("--detach --reconnect-timeout 7 python x.py", 7.0),
        ("--detach --srun python x.py", 5.0),
    ],
)
def test_agents_of_a_detached_job_wait_for_the_lease(here, line, patience):
    assert spec_of(line).reconnect_timeout == patience


def test_hangs_need_not_be_looked_for(here):
    assert spec_of("--hang-timeout 0 true").hang_timeout == 0
    assert spec_of("true").hang_timeout == 60
