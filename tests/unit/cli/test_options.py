"""The table of options: what is made of it, what flags take, and that nothing is said twice."""

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs.options_pages import options_page as page
from hvlaunch.cli.arguments import Answered, parse
from hvlaunch.cli.options import BadValue, Option, OptionGroup, Value, values
from hvlaunch.cli.options.parser import default_text
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.spec import job_spec
from hvlaunch.errors import BadUsage
from hvlaunch.job import ConsoleOptions, ElasticOptions, JobSpec, LeaseOptions, MPIOptions, SSHOptions

ROOT = Path(__file__).parents[3]
OPTIONS = [option for group in GROUPS for option in group.options]
PARTS = {
    "console": ConsoleOptions,
    "elastic": ElasticOptions,
    "leases": LeaseOptions,
    "mpi": MPIOptions,
    "ssh": SSHOptions,
}
DECIDED_BY_CODE = {
    "roles", "role_limit", "end_with_role", "console.labels",
    "command", "hosts", "force_slots", "allocation", "cwd", "env", "setup", "container", "sync", "bring", "collect", "templates", "options",  # from several options, the environment, the scheduler
    "call", "detach", "map_by", "visible_gpus", "console.hidden", "ssh.remote_agent", "mpi.launcher", "elastic.hostfile", "elastic.most_hosts", "elastic.per_host", "elastic.is_named", "elastic.avoided", "leases.given", "leases.passes_own", "queued",
}  # fmt: skip


def lowered(text):
    """As a value that is read and one that is not taken."""
    if text == "bad":
        raise BadValue("'bad' is not a program")
    return text.lower()


EXTRA = Option(
    "remote_agent",
    ("-ra", "--remote-agent"),
    "program in place of ssh",
    Value(("PROGRAM",), lowered, completion="file"),
    field="ssh.remote_agent",
    default="the scheduler's",
    more="It is called as `PROGRAM HOST COMMAND`.",
    example="hvlaunch --remote-agent ./agent.sh -H a:4 python train.py",
    convert=lambda name: f"/opt/{name}",
)
WITH_EXTRA = (
    *GROUPS,
    OptionGroup("another group", (EXTRA,), about="It has `--remote-agent`.", pages=(("SSH", "ssh.md"),)),
)


def answer(*words, groups=WITH_EXTRA):
    with pytest.raises(Answered) as caught:
        parse(words, groups)
    return caught.value.text


def test_a_long_name_with_one_dash_stands_behind_that_with_two():
    first = [option.flags[0] for option in OPTIONS]
    assert [flag for flag in first if re.fullmatch(r"-\w[\w-]{2,}", flag)] == []


def fields_of_job_spec():
    names = {field.name for field in dataclasses.fields(JobSpec)} - PARTS.keys()
    fields = {
        part: getattr(cls, "_fields", None) or [field.name for field in dataclasses.fields(cls)]
        for part, cls in PARTS.items()
    }
    return names | {f"{part}.{name}" for part, parts in fields.items() for name in parts}


def ids(option):
    return option.flag


def test_an_option_of_the_table_is_read_and_sets_its_field():
    options = parse(["--remote-agent", "Agent", "-H", "a", "true"], WITH_EXTRA)
    assert options.remote_agent == "agent"
    spec, _ = job_spec(options, {})
    assert spec.ssh == SSHOptions(remote_agent="/opt/agent")
    assert parse(["-ra=x", "true"], WITH_EXTRA).given == {"remote_agent": "x"}
    plain = parse(["true"], WITH_EXTRA)
    assert (plain.given, plain.remote_agent) == ({}, None)
    with pytest.raises(BadUsage, match=r"^-ra/--remote-agent: 'bad' is not a program; try: hvlaunch --help$"):
        parse(["--remote-agent", "bad", "true"], WITH_EXTRA)
    with pytest.raises(BadUsage, match=r"unknown option '--remote-agents'; try: hvlaunch --remote-agent x"):
        parse(["--remote-agents", "x", "true"], WITH_EXTRA)
    with pytest.raises(BadUsage, match="unknown option '--remote-agent'"):
        parse(["--remote-agent", "x", "true"])


def test_an_option_of_the_table_is_in_the_help():
    everyday = (*GROUPS, OptionGroup("another group", (EXTRA._replace(is_everyday=True),)))
    assert "\n  -ra, --remote-agent PROGRAM   program in place of ssh\n" in answer("-h", groups=everyday)
    assert "--remote-agent" not in answer("-h")
    long = answer("--help")
    assert "\nanother group:\n  It has --remote-agent.\n" in long
    entry = " ".join(long.partition("-ra, --remote-agent PROGRAM")[2].split())
    assert entry.startswith(
        "program in place of ssh. It is called as PROGRAM HOST COMMAND. [default: the scheduler's]"
    )


def test_an_option_of_the_table_is_on_the_page():
    text = page(WITH_EXTRA)
    assert "| [another group](#another-group) | [`--remote-agent`](#--remote-agent) |\n" in text
    assert (
        """
## Another group

It has [`--remote-agent`](#--remote-agent).

More: [SSH](ssh.md).

<a id="--remote-agent"></a>

### `-ra`, `--remote-agent PROGRAM`

Program in place of ssh. It is called as `PROGRAM HOST COMMAND`.

Default: the scheduler's.

```sh
hvlaunch --remote-agent ./agent.sh -H a:4 python train.py
```
"""
        in text
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_an_option_of_the_table_is_completed(shell):
    assert "remote-agent" in answer("--print-completion", shell)
    assert "remote-agent" not in answer("--print-completion", shell, groups=GROUPS)


def test_a_conversion_that_fails_names_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        BadUsage,
        match=r"^--ssh-config none: no such file or directory; try: its full path; a relative one starts at ",
    ):
        job_spec(parse(["--ssh-config", "none", "true"]), {})


def test_the_page_in_docs_is_the_one_that_the_table_makes():
    done = subprocess.run(
        [sys.executable, "docs/options_pages.py", "options.md"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.decode() == (ROOT / "docs/reference/options.md").read_text(), "make options-page"


def test_the_links_of_the_page_lead_to_places_on_it():
    text = page(GROUPS)
    places = set(re.findall(r'<a id="([^"]+)"', text))
    places |= {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= places


def test_names_and_flags_are_unique():
    flags = [flag for option in OPTIONS for flag in (*option.flags, *option.aliases, *option.opposites)]
    assert len(flags) == len(set(flags))
    shared = {option.name for option in OPTIONS if [each.name for each in OPTIONS].count(option.name) > 1}
    assert shared == {"detach", "launcher", "help", "nproc_per_node"}
    launchers = [option.constant for option in OPTIONS if option.name == "launcher"]
    assert len(launchers) == len(set(launchers))


def test_every_field_of_a_job_is_set_by_one_option_or_by_code():
    fields = [option.field for option in OPTIONS if option.field]
    assert len(fields) == len(set(fields))
    assert set(fields) | DECIDED_BY_CODE == fields_of_job_spec()
    assert not set(fields) & DECIDED_BY_CODE


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.field and not option.convert], ids=ids
)
def test_the_default_is_the_fields_own(option):
    spec = JobSpec(
        command=(),
        hosts=(),
        cwd="",
        elastic=ElasticOptions(min_np=1),
        mpi=MPIOptions(),
        leases=LeaseOptions(),
    )
    value = spec
    for name in option.field.split("."):
        value = getattr(value, name)
    if option.name != "min_np":  # which has none of its own
        assert getattr(parse(["true"]), option.name) == value
    if isinstance(value, float):
        assert default_text(option) == f"{value:g} s"


def test_a_default_that_is_a_list_is_a_new_one_each_time():
    options = parse(["true"])
    options.x.append("A")
    assert options.x == []


def test_a_name_that_no_option_has_is_an_error():
    with pytest.raises(AttributeError):
        _ = parse(["true"]).no_such_option


def test_its_words_are_short_and_plain():
    for option in OPTIONS:
        assert option.help, option
        assert len(option.help) <= 60, option
        assert not option.help.endswith("."), option
        assert not option.more or option.more.endswith("."), option
        assert not option.default.endswith("."), option
        assert "default" not in option.more, option
        text = f"{option.help} {option.more} {option.default}"
        assert text.count("`") % 2 == 0, option


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.example], ids=ids)
def test_its_example_has_it(option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    program, *words = shlex.split(option.example)
    assert program == "hvlaunch"
    options = parse(words)
    assert options.given[option.name] is not None
    assert options.command == (() if option.name == "role" else ("python", "train.py"))
    job_spec(options, {"WANDB_MODE": "offline"})


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [0]),
        ("7", [7]),
        ("0,8-15", [0, *range(8, 16)]),
        ("3-3", [3]),
        ("0-6/2, 9", [0, 2, 4, 6, 9]),
        ("5,5,1", [5, 5, 1]),
        ("007", [7]),
    ],
)
def test_ranks(text, ranks):
    assert [rank for part in values.ranks(text) for rank in part] == ranks


def test_a_large_range_costs_nothing():
    (part,) = values.ranks("0-999999999")
    assert 999_999_999 in part


@pytest.mark.parametrize(
    "text", ["", ",", "0,", "-1", "1-", "3-1", "0-4/0", "0/2", "a", "0..3", "1 2", "٣", "1" * 10, "[0-3]"]
)
def test_no_ranks(text):
    with pytest.raises(BadValue, match=r"has no rank in it|is neither a rank nor a range"):
        values.ranks(text)


@pytest.mark.parametrize(
    ("text", "ports"), [("1-2", (1, 2)), ("29500-29599", (29500, 29599)), ("1-65535", (1, 65535))]
)
def test_ports(text, ports):
    assert values.ports(text) == ports


@pytest.mark.parametrize(
    "text", ["", "1", "-", "1-", "-1", "0-5", "5-65536", "5-5", "6-5", "a-b", "1-2-3", "1:2"]
)
def test_no_ports(text):
    with pytest.raises(BadValue, match=r"is not|does not have the two ports"):
        values.ports(text)


def test_a_port_may_be_any():
    assert [values.port_or_any(text) for text in ("0", "1", "65535")] == [0, 1, 65535]
    for text in ("-1", "65536", "x"):
        with pytest.raises(BadValue):
            values.port_or_any(text)


def test_words():
    assert values.words("--bind-to core 'a b'") == ("--bind-to", "core", "a b")
    with pytest.raises(BadValue, match="no closing quotation"):
        values.words("a 'b")


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("300", 300), ("64K", 64 << 10), ("5M", 5 << 20), ("2G", 2 << 30)]
)
def test_sizes(text, size):
    assert values.size(text) == size


@pytest.mark.parametrize("text", ["", "K", "5m", "5s", "1.5G", "-1", "1" * 13, "5T"])
def test_no_sizes(text):
    with pytest.raises(BadValue, match="is not a size"):
        values.size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("8h", 28_800), ("2d", 172_800)]
)
def test_spans(text, seconds):
    assert values.span(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "5M", "5K", "h", "1.5h"])
def test_no_spans(text):
    with pytest.raises(BadValue, match="is not a time"):
        values.span(text)
