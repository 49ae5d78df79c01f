"""Every option from every source gives what it gives on the command line: made of the table."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.options.table import COMMAND, GROUPS
from hvlaunch.cli.pages.show_config import show_config
from tests.unit.cli.config.samples import (
    IN_FILES,
    IN_VARIABLES,
    OPTIONS,
    of_toml,
    of_variable,
    of_yaml,
    sample,
)

FILES: dict[str, tuple[Callable[..., str], list[str], dict[str, str]]] = {
    "job.yaml": (of_yaml, ["--config-file", "job.yaml"], {}),
    "job.toml": (of_toml, ["--config-file", "job.toml"], {}),
    "hvlaunch.toml": (of_toml, [], {}),
    "pyproject.toml": (lambda option, group: "[tool.hvlaunch]\n" + of_toml(option, None), [], {}),
    "xdg/hvlaunch/config.toml": (of_toml, [], {}),
}
"""The name of a file, what makes its text, and the words that name it."""


FOUND = ("hvlaunch.toml", "pyproject.toml")
PROGRAMS = {"mpirun", "remote_python", "host_discovery_script", "mpi_args", "binding_args"}
TRUST = {"host_keys", "forward_agent", "ssh_config", "ssh_identity_file", "ssh_client"}
SWITCHES = [(group, option) for group, option in IN_FILES if option.value is None]


def ids(value):
    return value if isinstance(value, str) else getattr(value, "flag", getattr(value, "title", None))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def value_of(option, words, environ, here):
    """What the words and the environment set, and from where."""
    environ = {"HOME": str(here), "XDG_CONFIG_HOME": str(here / "xdg"), **environ}
    options = parse([*words, *([] if option == COMMAND else ["true"])], environ=environ)
    value = options.command if option == COMMAND else options.given[option.name]
    return value, options.settings[option.name][-1].origin


def typed_value(option):
    """What the command line makes of it."""
    options = parse([*sample(option).typed, *([] if option == COMMAND else ["true"])])
    return options.command if option == COMMAND else options.given[option.name]


def in_place(value, option, directory):
    """A value of the command line as a file has it, whose paths count from its directory."""
    if not option.value or not option.value.path:
        return value
    return [str(directory / each) for each in value] if isinstance(value, list) else str(directory / value)


@pytest.mark.parametrize(("group", "option"), [*IN_FILES, (None, COMMAND)], ids=ids)
def test_a_file(group, option, tmp_path, monkeypatch):
    """In each kind of file, in its group and at the top: one test for all, since a thousand cost seconds."""
    expected = typed_value(option)
    for name, (make, words, environ) in FILES.items():
        if option.source != "any" and name in FOUND:  # test_found_files.py has these
            continue
        for at in (group, None):
            here = tmp_path / f"{'top' if at is None else 'group'}-{name.replace('/', '-')}"
            path = here / name
            path.parent.mkdir(parents=True)
            monkeypatch.chdir(here)
            path.write_text(make(option, at))
            if option.name == "profile":
                other = here / ("hvlaunch.toml" if name.startswith("xdg") else "xdg/hvlaunch/config.toml")
                other.parent.mkdir(parents=True, exist_ok=True)
                other.write_text("[profiles.some-text]\n")
            value, origin = value_of(option, words, environ, here)
            assert value == in_place(expected, option, path.parent), path
            assert origin == (str(path) if name.startswith("xdg") else name)
            if group is None:
                break


@pytest.mark.parametrize(("group", "option"), [*IN_VARIABLES, (None, COMMAND)], ids=ids)
def test_a_variable(group, option, here):
    if option.name == "config_file":
        (here / "some-text").write_text("")
    if option.name == "profile":
        (here / "hvlaunch.toml").write_text("[profiles.some-text]\n")
    name, text = of_variable(option)
    value, origin = value_of(option, [], {name: text}, here)
    expected = typed_value(option)
    if option.value and option.value.has_options:
        value, expected = sum(value, ()), sum(expected, ())
    assert (value, origin) == (expected, "environment")


def test_sources_of_an_option_fit_its_effect():
    for _, option in OPTIONS:
        asks = bool(option.question) or option.name in {
            "check_build",
            "show_config",
            "show_secrets",
            "isolated",
        }
        assert asks == (option.source == "command line"), option
        assert (option.source == "no file") == (option.name == "config_file"), option
        if option.name in PROGRAMS | TRUST:
            assert option.source == "own", option


@pytest.mark.parametrize(("group", "option"), SWITCHES, ids=ids)
def test_a_switch_is_taken_back_by_the_command_line_and_by_false(group, option, here):
    (here / "job.toml").write_text(of_toml(option, group))
    words = ["--config-file", "job.toml", option.opposites[0], "true"]
    options = parse(words, environ={})
    assert (
        getattr(options, option.name) is (False if option.constant is True else None)
        or option.name == "detach"
    )
    (here / "job.toml").write_text(of_toml(option, None).replace("true", "false"))
    assert parse([*words[:2], "true"], environ={}).given.get(option.name) in (False, None)


def test_show_config_prints_a_file_with_the_same_settings(here):
    lines = [sample(option).typed for _, option in IN_FILES]
    skipped = {
        "--srun",
        "--jsrun",
        "--gloo",
        "--hostfile",
        "--host-discovery-script",
        "--quiet",
        "--detach",
        "--profile",
        "--exclude",
        "--per-host",
        "--ready-url",
        "--in-container",
        "--lease-gpus",
    }
    words = [word for line in lines if line[0] not in skipped for word in line]
    options = parse([*words, "--show-secrets", "--show-config", "python", "-c", "it's \x7f \x01 ü"])
    text = show_config(options, GROUPS)
    (here / "shown.toml").write_text(text)
    again = parse(["--config-file", "shown.toml"], environ={})
    paths = {option.name: option for _, option in IN_FILES if option.value and option.value.path}
    for name, value in options.given.items():
        if name in ("show_config", "show_secrets"):
            continue
        expected = in_place(value, paths[name], Path.cwd()) if name in paths else value
        assert again.given[name] == expected, name
    assert again.command == options.command
    assert len(again.given) > 80
    assert sorted(options.given) == (
        sorted({*again.given} - {"config_file"} | {"show_config", "show_secrets"})
    )
