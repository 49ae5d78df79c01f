"""Options as Python has them: one table, typed, and read as on the command line."""

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import hvlaunch
from docs.python_options import module
from hvlaunch.api import options
from hvlaunch.api.given import FIELDS, spec_of
from hvlaunch.cli.arguments import parse
from hvlaunch.cli.spec import job_spec
from hvlaunch.errors import BadUsage
from hvlaunch.job import JobSpec

ENVIRON = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}

EQUAL: list[tuple[dict[str, Any], list[str]]] = [
    ({"np": 4, "hosts": "a:2,b:2"}, ["-np", "4", "-H", "a:2,b:2"]),
    ({"hosts": ["a:2", "b:2"]}, ["-H", "a:2,b:2"]),
    ({"hosts": {"a": 2, "b": 2}}, ["-H", "a:2,b:2"]),
    ({"hosts": {"::1": 2, "[::2]": 1}}, ["-H", "[::1]:2,[::2]:1"]),
    ({"env": {"A": "1", "B": 2}}, ["-x", "A=1", "-x", "B=2"]),
    ({"env": ["A=1"]}, ["-x", "A=1"]),
    ({"output_dir": Path("/tmp/logs")}, ["--output-filename", "/tmp/logs"]),
    ({"ranks": [0, 2]}, ["--ranks", "0,2"]),
    ({"ranks": range(3)}, ["--ranks", "0,1,2"]),
    ({"quiet": True, "merge": False}, ["--quiet", "--no-merge"]),
    ({"lease": 2.5, "spill": "1M"}, ["--lease", "2.5", "--spill", "1M"]),
    ({"worker_port_range": (10_000, 10_100)}, ["--worker-port-range", "10000-10100"]),
    (
        {"hosts": "a,b", "network_interfaces": ["ib0", "eth0"]},
        ["-H", "a,b", "--network-interfaces", "ib0,eth0"],
    ),
    ({"min_np": 1, "cooldown": (1, 5)}, ["--min-np", "1", "--blacklist-cooldown-range", "1", "5"]),
    ({"np": None}, []),
]


def by_line(words: list[str]) -> JobSpec:
    return job_spec(parse(["--stdin", "none", *words, "work"]), ENVIRON)[0]


@pytest.mark.parametrize(("given", "words"), EQUAL, ids=[" ".join(words) for _, words in EQUAL])
def test_values_of_python_mean_what_the_command_line_means(given: dict[str, Any], words: list[str]) -> None:
    spec = spec_of({"isolated": True, **given}, ["work"], ENVIRON)
    # The words may differ: lists of Python are not joined.
    assert replace(spec, options=()) == replace(by_line(["--isolated", *words]), options=())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"np": 0}, "np=0: 0 is not between 1 and"),
        ({"np": "many"}, "np='many': 'many' is not a whole number"),
        ({"np": True}, "np=True: True is of type bool"),
        ({"lease": object}, "lease=<class 'object'>: <class 'object'> is of type type"),
        ({"quiet": 1}, "quiet=1: is neither True nor False"),
        ({"cooldown": (1,)}, "cooldown=(1,): needs 2 values"),
        ({"env": {"A=B": "1"}}, "env={'A=B': '1'}: 'A=B' is no name of a variable"),
        ({"cwd": "a\0b"}, "cwd='a\\x00b': has a NUL byte"),
        ({"on_hang": "wait"}, "on_hang='wait': invalid choice"),
        ({"hosts": "a", "hostfile": "f"}, "hostfile: not allowed with hosts"),
    ],
)
def test_a_wrong_value_is_named_as_it_is_in_python(given: dict[str, Any], text: str) -> None:
    with pytest.raises(BadUsage) as caught:
        spec_of({"isolated": True, **given}, ["work"], ENVIRON)
    assert str(caught.value).startswith(text)


def test_files_and_variables_count_except_unusable_options() -> None:
    environ = {**ENVIRON, "HVLAUNCH_LEASE": "7", "HVLAUNCH_GRACE": "3", "HVLAUNCH_DETACH": "1"}
    spec = spec_of({"grace": 4.0}, ["work"], environ)
    assert (spec.lease, spec.grace, spec.detach) == (7.0, 4.0, "never")


def test_options_of_the_project_file_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hvlaunch.toml").write_text("hosts = 'localhost:2'\nlease = 7\ncommand = 'true'\n")
    assert spec_of({}, ["work"], ENVIRON).lease == 7.0
    assert capfd.readouterr().err == "hvlaunch: options of hvlaunch.toml: hosts, lease\n"
    spec_of({"hosts": "localhost:1", "lease": 5.0}, ["work"], ENVIRON)
    spec_of({"quiet": True}, ["work"], ENVIRON)
    spec_of({"isolated": True}, ["work"], ENVIRON)
    assert capfd.readouterr().err == ""


def test_the_module_of_options_is_that_of_the_table() -> None:
    """Its layout is the formatter's."""
    text = Path(inspect.getfile(options)).read_text()
    assert _plain(text) == _plain(module()), "make options-page"


def _plain(text: str) -> str:
    return "".join(text.split()).replace(",)", ")").replace(",]", "]")


def test_launchers_have_a_field_with_a_type_for_each_option() -> None:
    names = {field.name for field in fields(hvlaunch.Launcher)}
    assert names == {*FIELDS, "python"}
    assert get_type_hints(options.GivenOptions).keys() == FIELDS.keys()
    assert hvlaunch.Launcher(np=2) == hvlaunch.Launcher(np=2)
