"""Files of options: whose they are, and what one may set that nobody named, such as that of a stranger's repository."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.given import Options
from hvlaunch.cli.main import main
from hvlaunch.cli.options import GROUPS
from hvlaunch.cli.spec import job_spec
from hvlaunch.errors import BadHost, BadUsage
from tests.unit.cli.config.samples import of_toml

Give = Callable[[Path], Path]
OWN = [(group, option) for group in GROUPS for option in group.options if option.source == "own"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    return project


def options_of(*words: str, told: list[str] | None = None, **environ: str) -> Options:
    return parse([*words, "true"], environ=environ, warn=(told if told is not None else []).append)


@pytest.mark.parametrize("mode", [0o666, 0o602])
@pytest.mark.parametrize("name", ["job.yaml", "xdg/hvlaunch/config.toml"])
def test_a_named_file_and_the_users_own_are_refused_where_others_can_change_them(
    here: Path, name: str, mode: int
) -> None:
    path = here / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# nothing\n")
    path.chmod(mode)
    words = ("--config-file", name) if name == "job.yaml" else ()
    with pytest.raises(
        BadUsage, match=rf"{name}: every user of this machine can change it .*; try: chmod go-w"
    ):
        options_of(*words, XDG_CONFIG_HOME=str(here / "xdg"))


def test_a_named_file_of_another_user_is_refused(here: Path, given_to_bob: Give) -> None:
    (here / "job.toml").write_text("np = 2\n")
    given_to_bob(here / "job.toml")
    with pytest.raises(BadUsage, match=r"job\.toml: it belongs to user"):
        options_of("--config-file", "job.toml")


def written(path: Path) -> Path:
    path.write_text("np = 2\n")
    return path


def of_bob(here: Path, give: Give) -> None:
    give(written(here / "hvlaunch.toml"))


def for_all(here: Path, give: Give) -> None:
    written(here / "hvlaunch.toml").chmod(0o666)


def in_a_directory_for_all(here: Path, give: Give) -> None:
    written(here / "hvlaunch.toml")
    here.chmod(0o777)


def link_of_bob(here: Path, give: Give) -> None:
    written(here.parent / "mine.toml")
    (here / "hvlaunch.toml").symlink_to(here.parent / "mine.toml")
    give(here / "hvlaunch.toml")
    here.chmod(0o1777)


@pytest.mark.parametrize("plant", [of_bob, for_all, in_a_directory_for_all, link_of_bob])
def test_a_file_that_was_found_and_that_others_could_have_put_there_is_not_used_and_stops_no_job(
    here: Path, given_to_bob: Give, plant: Callable[[Path, Give], None]
) -> None:
    plant(here, given_to_bob)
    told: list[str] = []
    options = options_of(told=told)
    assert options.np is None
    (line,) = told
    assert line.startswith("warning: not used: hvlaunch.toml: ")


def test_a_file_of_mine_in_a_sticky_directory_is_used(here: Path) -> None:
    written(here / "hvlaunch.toml")
    here.chmod(0o1777)
    assert options_of().np == 2


@pytest.mark.parametrize(("group", "option"), OWN, ids=lambda value: getattr(value, "flag", ""))
@pytest.mark.parametrize("name", ["hvlaunch.toml", "pyproject.toml"])
def test_what_hvlaunch_runs_and_trusts_is_no_matter_of_a_file_that_was_found(
    here: Path, group, option, name: str
) -> None:
    head = "[tool.hvlaunch]\n" if name == "pyproject.toml" else ""
    (here / name).write_text(head + of_toml(option, None))
    with pytest.raises(BadUsage, match="is not taken from a file that was not named but found") as caught:
        options_of()
    assert f"{name}:{2 if head else 1}: " in str(caught.value)
    assert f"try: --config-file {name}, or -" in str(caught.value)
    if option.name == "profile":
        with (here / name).open("a") as file:
            file.write("profiles.some-text = {}\n")
    assert option.name in options_of("--config-file", name).given


@pytest.mark.parametrize("key", ["hostfile", "env-file", "output-filename"])
def test_paths_of_a_file_that_was_found_stay_below_it(here: Path, key: str) -> None:
    (here.parent / "secret").write_text("A=1\n")
    (here / "link").symlink_to(here.parent / "secret")
    for path in ("../secret", str(here.parent / "secret"), "~/secret", "link"):
        (here / "hvlaunch.toml").write_text(f"{key} = '{path}'\n")
        with pytest.raises(BadUsage, match=f"{key}: {path} is not below the directory of this file"):
            options_of(HOME=str(here.parent))
        assert options_of("--config-file", "hvlaunch.toml").given
    (here / "hvlaunch.toml").write_text(f"{key} = 'below/x'\n")
    assert options_of().given


def test_a_hostfile_of_a_file_that_was_found_names_no_program(here: Path) -> None:
    (here / "hvlaunch.toml").write_text("hostfile = 'hosts'\n")
    (here / "hosts").write_text("localhost slots=2 python=./evil\n")
    with pytest.raises(BadHost, match="is taken only from a hostfile that you named"):
        job_spec(options_of(), {})
    assert job_spec(options_of("--config-file", "hvlaunch.toml"), {})[0].hosts[0].python == "./evil"


@pytest.mark.parametrize("keys", ["accept-new", "off"])
def test_hosts_of_a_file_that_was_found_must_be_known(here: Path, keys: str) -> None:
    (here / "hvlaunch.toml").write_text("hosts = 'evil.example:4'\n")
    with pytest.raises(BadUsage, match=r"hvlaunch.toml:1 has hosts, and was not named but found"):
        options_of(HVLAUNCH_HOST_KEYS=keys)
    assert options_of("-H", "mine", HVLAUNCH_HOST_KEYS=keys).host_keys == keys
    assert options_of("--host-keys", keys).hosts == "evil.example:4"
    assert options_of("--config-file", "hvlaunch.toml", HVLAUNCH_HOST_KEYS=keys).hosts == "evil.example:4"


def test_the_user_is_told_what_a_file_that_was_found_sets(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "hvlaunch.toml").write_text("np = 1\nx = {A = '1', B = '2'}\n")
    assert main(["--dry-run", "true"]) == 0
    assert capfd.readouterr().err == "hvlaunch: options of hvlaunch.toml: np, x\n"


@pytest.mark.parametrize("line", ["--dry-run --verbose", "--show-config --verbose"])
def test_secrets_in_files_are_masked(here: Path, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "hvlaunch.toml").write_text(
        "command = ['python', 'train.py', '--api-key', 'hunter2']\n"
        "x = {WANDB_API_KEY = 'hunter2', URL = 'https://me:hunter2@host/'}\n[profiles.a]\nnp = 1\n"
    )
    assert main(line.split()) == 0
    shown = capfd.readouterr()
    assert "hunter2" not in shown.out + shown.err
    assert shown.out.count("****") >= 4
    assert main([*line.split(), "--show-secrets"]) == 0
    assert capfd.readouterr().out.count("hunter2") == 3


def test_a_wrong_line_shows_no_secret(here: Path) -> None:
    for text in (
        "x = {API_KEY = ['hunter2']}\n",
        "x = {API_KEY = {a = 'hunter2'}}\n",
        "[x.API_KEY]\nhunter2 = 1\n",
    ):
        (here / "hvlaunch.toml").write_text(text)
        with pytest.raises(BadUsage) as caught:
            options_of()
        assert "hunter2" not in str(caught.value)
