"""What the user passes on, and files of variables: patterns, precedence, quoting, limits; and what is not shown."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.cli.env_file import EnvLine, parse_env_file, read_env_file
from hvlaunch.cli.environment import MAX_STRING, SET_BY_HVLAUNCH, left_out, shown, user_env
from hvlaunch.console.masking import MASK, masked
from hvlaunch.driver.program import Keys
from hvlaunch.driver.program.start_frame import (
    default_env,
    elastic_env,
    environment_env,
    gpu_env,
    identity_env,
    shared_env,
)
from hvlaunch.engine.actions import HostAddress, HostNetwork
from hvlaunch.errors import BadEnvironment, BadUsage
from hvlaunch.hosts.placement import place
from hvlaunch.job import ElasticOptions

FORWARDED = [
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TORCH_HOME",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "CUDA_HOME",
    "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "HF_TOKEN",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHDYNAMO_VERBOSE",
    "PYTHONFAULTHANDLER",
    "PYTHONHASHSEED",
    "PYTHONWARNINGS",
    "MKL_NUM_THREADS",
    "KMP_AFFINITY",
    "UCX_NET_DEVICES",
    "XLA_FLAGS",
    "WANDB_MODE",
    "TOKENIZERS_PARALLELISM",
    "http_proxy",
    "NO_PROXY",
]
FOR_ALL = [
    "MY_VAR",
    "WANDB_API_KEY",
    "TMPDIR",
    "HOROVOD_LOG_LEVEL",
    "HOROVOD_FUSION_THRESHOLD",
    "SLURM_JOB_ID",
    "EDITOR",
    "PWDX",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONINSPECT",
]
NEVER = [
    "CUDA_VISIBLE_DEVICES",
    "NEW_CUDA_VISIBLE_DEVICES",
    "BASH_FUNC_x%%",
    "OLDPWD",
    "PWD",
    "SHLVL",
    "_",
    "HOSTNAME",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "MAIL",
    "TERM",
    "TERM_PROGRAM",
    "COLORTERM",
    "COLUMNS",
    "LINES",
    "SSH_AUTH_SOCK",
    "SSH_CONNECTION",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "TMUX",
    "TMUX_PANE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "HVLAUNCH_TOKEN",
    "HVLAUNCH_RANK",
    "HVLAUNCH_ANYTHING",
    "HOROVOD_RANK",
    "HOROVOD_CONTROLLER",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_ELASTIC",
    "TORCHELASTIC_USE_AGENT_STORE",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
]
EVERYTHING = {name: f"value of {name}" for name in [*FORWARDED, *FOR_ALL, *NEVER]}

KEY = Keys.new().certificate


def passed(environ, *chosen, **options):
    env, warnings = user_env(environ, chosen=chosen, **options)
    assert warnings == []
    return env


def test_what_is_forwarded_by_default():
    assert passed(EVERYTHING) == {name: EVERYTHING[name] for name in FORWARDED}


def test_what_env_all_forwards():
    assert passed(EVERYTHING, mode="all") == {name: EVERYTHING[name] for name in [*FORWARDED, *FOR_ALL]}


@pytest.mark.parametrize(
    "value", ["http://me:hunter2@proxy:3128", "me:hunter2@proxy:3128", "http://me@proxy"]
)
def test_a_proxy_with_a_user_or_password_is_passed_on_only_if_asked_to(value):
    assert passed({"https_proxy": value, "HTTP_PROXY": value}) == {}
    assert passed({"https_proxy": value}, "https_proxy") == {"https_proxy": value}
    assert passed({"https_proxy": value}, mode="all") == {"https_proxy": value}


def test_variables_that_stay_here_are_named_by_patterns():
    environ = dict.fromkeys(
        ["AWS_REGION", "AWS_PROFILE", "EDITOR", "WANDB_API_KEY", "WANDB_X", "MY_VAR", "MY", "A\nB_C", "_X"],
        "1",
    )
    environ |= {
        "HOME": "/root",
        "RANK": "3",
        "SLURM_PROCID": "0",
        "SSH_AUTH_SOCK": "s",
        "WANDB_MODE": "offline",
    }
    names = left_out(environ, {"WANDB_MODE": "offline", "WANDB_X": "1"})
    assert names == sorted(["AWS_*", "EDITOR", "MY", "MY_VAR", "WANDB_API_KEY", r"'A\nB_C'", "_X"])
    assert left_out(environ, environ) == []


def test_names_are_matched_whole_and_by_case():
    assert (
        passed({"MYPATH": "1", "PATHS": "1", "path": "1", "NCCL": "1", "nccl_debug": "1", "LANGUAGE": "1"})
        == {}
    )


def test_a_variable_without_a_name_is_left_alone():
    assert passed({"": "x", "=C:": "x"}, "*", mode="default") == {"=C:": "x"}


def test_nothing_that_makes_a_worker_what_it_is_comes_from_the_user():
    placement = place([("a", 1)])[0]
    network = HostNetwork(master_addr="m", master_port=1, interface="i", rendezvous=("r", 2))
    own = identity_env(placement, worker="a/0/0", job_id="j", round_number=0, token="t", scratch="s")
    never_the_users = own.keys() | {
        name
        for name, value in shared_env(
            network, dict.fromkeys(shared_env(network, {}, KEY), "user"), KEY
        ).items()
        if value != "user"
    }
    for name in never_the_users:
        env, warnings = user_env({name: "outer"}, mode="all", chosen=[name, f"{name}=mine"])
        assert env == {}
        assert len(warnings) == 2
        assert f"variable {name} is set by hvlaunch" in warnings[0]


def test_hvlaunch_sets_all_that_it_says_it_sets():
    placement = place([("a", 1)])[0]
    network = HostNetwork(master_addr="m", master_port=1, interface="i", rendezvous=("r", 2))
    names = (
        identity_env(placement, worker="a/0/0", job_id="j", round_number=0, token="t", scratch="s").keys()
        | shared_env(network, {}, KEY).keys()
    )
    assert {name for name in SET_BY_HVLAUNCH if "*" not in name} <= names


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "HOME", "MASTER_ADDR", "MASTER_PORT", "SSH_AUTH_SOCK", "BASH_FUNC_x%%"]
)
def test_x_may_name_what_is_not_forwarded(name):
    assert passed({name: "here"}, name) == {name: "here"}
    assert passed({name: "here"}, f"{name}=there") == {name: "there"}


def test_later_wins_over_earlier(tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    first.write_text("B=one\nC=one\nD=one\n")
    second.write_text("C=two\nD=two\n")
    environ = {"NCCL_A": "environ", "B": "environ", "D": "environ"}
    assert passed(environ, "NCCL_A=x", "D=x", "D", files=[first, second]) == {
        "NCCL_A": "x",
        "B": "one",
        "C": "two",
        "D": "environ",
    }


def test_a_pattern_passes_on_all_that_match():
    environ = {"MLF_A": "1", "MLF_B": "2", "XMLF_C": "3", "MLF": "4"}
    assert passed(environ, "MLF_*") == {"MLF_A": "1", "MLF_B": "2"}
    assert passed(environ, "MLF_[A]") == {"MLF_A": "1"}
    assert passed(environ, "MLF_?") == {"MLF_A": "1", "MLF_B": "2"}


def test_a_missing_variable_gives_a_warning_and_others_are_passed_on(tmp_path):
    file = tmp_path / "env"
    file.write_text("A=1\nGONE\n")
    env, warnings = user_env({}, files=[file], chosen=["AWAY", "NO_*", "B=2"])
    assert env == {"A": "1", "B": "2"}
    assert warnings == [
        f"{file}:2: variable GONE is not set here, so it is not passed on",
        "variable AWAY is not set here, so it is not passed on",
        "no variable here matches NO_*",
    ]


def test_a_bare_name_in_a_file_is_as_it_is_here(tmp_path):
    file = tmp_path / "env"
    file.write_text("A\nexport B # comment\n")
    assert passed({"A": "1", "B": "2", "C": "3"}, files=[file]) == {"A": "1", "B": "2"}


NAMES = st.text(st.characters(exclude_characters="\0=*?[", codec="utf-8"), min_size=1).filter(
    lambda name: (
        not name.startswith(("HVLAUNCH_", "HOROVOD_", "TORCHELASTIC_")) and name not in SET_BY_HVLAUNCH
    )
)
VALUES = st.binary().filter(lambda raw: b"\0" not in raw).map(os.fsdecode)


@given(st.dictionaries(NAMES, VALUES))
def test_every_value_arrives_unchanged(variables):
    assert passed({}, *(f"{name}={value}" for name, value in variables.items())) == variables
    assert passed(variables, *variables) == variables


def test_ten_thousand_variables():
    variables = {f"V{n}": str(n) for n in range(10_000)}
    assert passed(variables, "V*") == variables
    assert passed(variables, mode="all") == variables


@pytest.mark.parametrize(
    ("word", "name", "cause"),
    [
        ("", "''", "the name is empty"),
        ("=1", "''", "the name is empty"),
        ("A\0B=1", r"'A\x00B'", "the name has a NUL byte"),
        ("A=1\0", "A", "its value has a NUL byte"),
        ("NCCL_*=1", "NCCL_*", "a pattern takes no value"),
    ],
)
def test_names_and_values_that_can_not_be(word, name, cause):
    with pytest.raises(BadEnvironment) as caught:
        user_env({}, chosen=[word])
    assert caught.value.name == name
    assert str(caught.value) == f"variable {name}: {cause}"
    assert caught.value.exit_code == 2


def test_a_nul_in_a_file_is_an_error_with_its_line(tmp_path):
    file = tmp_path / "env"
    file.write_bytes(b"A=1\nB=x\0y\n")
    with pytest.raises(BadEnvironment, match=f"{file}:2: its value has a NUL byte"):
        user_env({}, files=[file])


@pytest.mark.parametrize("letter", ["x", "ü", "\udcff"])
def test_the_limit_is_the_kernels(letter):
    size = len(os.fsencode(letter))
    longest = "A=" + "y" * ((MAX_STRING - 3) % size) + letter * ((MAX_STRING - 3) // size)
    assert len(os.fsencode(longest)) == MAX_STRING - 1
    assert passed({}, longest) == {"A": longest[2:]}
    for options in ({"chosen": [f"{longest}z"]}, {"chosen": ["A"]}, {"mode": "all"}):
        with pytest.raises(BadEnvironment) as caught:
            user_env({"A": f"{longest[2:]}z"}, **options)
        assert caught.value.name == "A"
        assert str(MAX_STRING) in str(caught.value)
        assert letter * 5 not in str(caught.value)


@pytest.mark.skipif(os.sysconf("SC_PAGESIZE") != 4096, reason="MAX_ARG_STRLEN is 32 pages")
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux's limit")
def test_the_kernel_agrees_on_the_limit():
    assert os.waitpid(os.posix_spawn("/bin/true", ["true"], {"A": "x" * (MAX_STRING - 3)}), 0)[1] == 0
    with pytest.raises(OSError, match="too long"):
        os.posix_spawn("/bin/true", ["true"], {"A": "x" * (MAX_STRING - 2)})


def test_a_file_that_is_missing_is_bad_usage(tmp_path):
    with pytest.raises(BadUsage, match="no such file"):
        user_env({}, files=[tmp_path / "missing"])


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "GITHUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "DB_PASSWORD",
        "MYSQL_PWD",
        "PASSWD",
        "db_password",
        "SSH_AUTH_SOCK",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "SENTRY_DSN",
        "SLACK_WEBHOOK_URL",
        "KEY",
        "SMTP_PASS",
        "SESSION_COOKIE",
        "JWT_X",
        "HVLAUNCH_TOKEN",
    ],
)
def test_secrets_are_masked_by_name(name):
    assert masked(name, "hunter2") == MASK


@pytest.mark.parametrize(
    "name", ["PATH", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "LANG", "NCCL_DEBUG", "BYPASS_CACHE", "RANK"]
)
def test_values_without_secrets_are_shown(name):
    assert masked(name, "hunter2") == "hunter2"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("http://me:hunter2@proxy:3128", f"http://{MASK}@proxy:3128"),
        ("a https://tok@h/x b", f"a https://{MASK}@h/x b"),
        ("postgresql+x://u:p@a,redis://:p2@b", f"postgresql+x://{MASK}@a,redis://{MASK}@b"),
        ("https://host/path?mail=a@b", "https://host/path?mail=a@b"),
        ("me@host", "me@host"),
    ],
)
def test_user_and_password_in_a_url_are_masked(value, expected):
    assert masked("URL", value) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("A", "A"), ("ü", "ü"), ("A\nB", r"'A\nB'"), ("\udcff", r"'\udcff'")]
)
def test_a_name_is_one_plain_word_in_messages(name, expected):
    assert shown(name) == expected


DOCS = (Path(__file__).parents[3] / "docs/reference/environment.md").read_text()


def test_the_page_for_users_has_every_variable():
    placement = place([("a", 1)])[0]
    network = HostNetwork("m", 1, "i", ("r", 2), "m", (HostAddress("a", "m", 1),))
    own = identity_env(placement, worker="a/0/0", job_id="j", round_number=0, token="t", scratch="s")
    names = set(own)
    names |= shared_env(network, {}, KEY, (1, 2)).keys() | default_env(1, 1).keys()
    names |= elastic_env(ElasticOptions(min_np=1, save_to="d")).keys() | gpu_env(1).keys()
    names |= environment_env("/env").keys()
    names |= {"HVLAUNCH_ROLE_GEN_HOSTS"}
    table = DOCS.partition("## What each worker gets")[2].partition("## What you pass on")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(names)


def test_the_example_file_of_the_page_is_right(tmp_path):
    file = tmp_path / "env"
    file.write_text(
        DOCS.partition("### Files of variables")[2].partition("```dotenv\n")[2].partition("```")[0]
    )
    assert passed({"HF_TOKEN": "t"}, files=[file]) == {
        "NCCL_DEBUG": "INFO",
        "WANDB_PROJECT": "digits",
        "HF_TOKEN": "t",
        "GREETING": r"single quotes keep $everything \as it is",
        "TWO_LINES": 'double quotes know \n, \t, \r, ", \\, $ and `,\nand both kinds may span lines',
        "EMPTY": "",
    }


def values(text):
    return {line.name: line.value for line in parse_env_file(text, source="f")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("\n  \n# A=1\n\t# B=2\n#", {}),
        ("A=1", {"A": "1"}),
        ("A=1\nB=2\n", {"A": "1", "B": "2"}),
        ("A=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
        ("A=1\nA=2", {"A": "2"}),
        ("  A=1", {"A": "1"}),
        ("export A=1", {"A": "1"}),
        ("export\tA=1", {"A": "1"}),
        ("exporter=1", {"exporter": "1"}),
        ("A", {"A": None}),
        ("export A # as it is here", {"A": None}),
        ("A=", {"A": ""}),
        ("A=   ", {"A": ""}),
        ("A= b c \t", {"A": "b c"}),
        ("A=b=c", {"A": "b=c"}),
        ("A=b # comment", {"A": "b"}),
        ("A=b#c", {"A": "b#c"}),
        ("A=#b", {"A": "#b"}),
        ("A= # comment", {"A": ""}),
        (r"A=C:\new $HOME `x`", {"A": r"C:\new $HOME `x`"}),
        ("A=it's", {"A": "it's"}),
        ("A=''", {"A": ""}),
        ("A=' b # c '", {"A": " b # c "}),
        (r"A='\n $X \\'", {"A": r"\n $X \\"}),
        ("A='two\nlines' # comment\nB=2", {"A": "two\nlines", "B": "2"}),
        ('A=""', {"A": ""}),
        ('A=" b # c "', {"A": " b # c "}),
        ('A= "b"', {"A": "b"}),
        (r'A="a\nb\tc\rd"', {"A": "a\nb\tc\rd"}),
        (r'A="\" \\ \$ \`"', {"A": '" \\ $ `'}),
        (r'A="\d \0"', {"A": r"\d \0"}),
        ('A="$HOME"', {"A": "$HOME"}),
        ('A="two\nlines"\nB=2', {"A": "two\nlines", "B": "2"}),
        ('A="one \\\nline"', {"A": "one line"}),
        ('A="it\'s"', {"A": "it's"}),
        ("A=ü\udcff", {"A": "ü\udcff"}),
    ],
)
def test_values(text, expected):
    assert values(text) == expected


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("=1", "f:1", "not NAME=VALUE"),
        ("A=1\n\n# c\n=2", "f:4", "not NAME=VALUE"),
        ("A = 1", "f:1", "not NAME=VALUE"),
        ("A B", "f:1", "not NAME=VALUE"),
        ("'A'=1", "f:1", "not NAME=VALUE"),
        ("A='x", "f:1", "no closing quote"),
        ('B=1\nA="x\ny\nz', "f:2", "no closing quote"),
        (r'A="x\"', "f:1", "no closing quote"),
        ("A='x\ny'\nB='z' z", "f:3", "text after the closing quote"),
        ("A='x''y'", "f:1", "text after the closing quote"),
    ],
)
def test_an_error_names_file_and_line(text, where, cause):
    with pytest.raises(BadUsage) as caught:
        parse_env_file(text, source="f")
    assert str(caught.value).startswith(f"{where}: {cause}")


def test_line_numbers_count_from_one_over_comments_and_quoted_newlines():
    lines = parse_env_file("# c\nA='x\ny'\n\nB=2", source="f")
    assert lines == [EnvLine(2, "A", "x\ny"), EnvLine(5, "B", "2")]


def in_double_quotes(value):
    for char in '\\"':
        value = value.replace(char, f"\\{char}")
    return f'"{value}"'


@given(st.lists(st.text(st.characters(exclude_characters="\0"))))
def test_every_value_survives_double_quotes(contents):
    text = "\n".join(f"V{index}={in_double_quotes(value)} # c" for index, value in enumerate(contents))
    assert list(values(text).values()) == contents


@given(st.lists(st.text(st.characters(exclude_characters="\0'"))))
def test_every_value_without_an_apostrophe_survives_single_quotes(contents):
    text = "\n".join(f"export V{index}='{value}'" for index, value in enumerate(contents))
    assert list(values(text).values()) == contents


@given(st.text())
def test_any_text_is_read_or_refused_with_its_line(text):
    try:
        lines = parse_env_file(text, source="f")
    except BadUsage as error:
        assert str(error).startswith("f:")
    else:
        assert all(line.name and "=" not in line.name for line in lines)


def test_reading_keeps_all_bytes_and_drops_the_byte_order_mark(tmp_path):
    path = tmp_path / "env"
    path.write_bytes(b"\xef\xbb\xbfA=\xff\xc3\xbc\n")
    assert read_env_file(path) == [EnvLine(1, "A", "\udcffü")]


def test_ten_thousand_lines_with_one_of_120_000_bytes(tmp_path):
    path = tmp_path / "env"
    path.write_text("".join(f"V{n}={n}\n" for n in range(10_000)) + f'LONG="{"x" * 120_000}"\n')
    lines = read_env_file(path)
    assert len(lines) == 10_001
    assert lines[-1] == EnvLine(10_001, "LONG", "x" * 120_000)


@pytest.mark.parametrize(("name", "cause"), [("missing", "no such file"), (".", "is a directory")])
def test_a_file_that_can_not_be_read(tmp_path, name, cause):
    with pytest.raises(BadUsage, match=cause) as caught:
        read_env_file(tmp_path / name)
    assert str(caught.value).startswith(f"--env-file {tmp_path}")
