"""Files of options: whose they are, and what one may set that nobody named, such as that of a stranger's repository."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.main import main
from hvlaunch.cli.options.settings import Options
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.spec import job_spec
from hvlaunch.errors import BadHost, BadUsage
from hvlaunch.hosts.discovery import host_source
from tests.unit.cli.config.samples import of_toml

Give = Callable[[Path], Path]
ALICE = 4343
"""Another uid that nobody has here."""
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
def test_configuration_that_others_can_change_is_refused(here: Path, name: str, mode: int) -> None:
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


def link_of_bob_to(target: str) -> Callable[[Path, Give], None]:
    def plant(here: Path, give: Give) -> None:
        (here / "hvlaunch.toml").symlink_to(target)
        give(here / "hvlaunch.toml")

    return plant


def pipe_of_bob(here: Path, give: Give) -> None:
    os.mkfifo(here / "hvlaunch.toml")
    give(here / "hvlaunch.toml")


def directory_of_bob(here: Path, give: Give) -> None:
    (here / "hvlaunch.toml").mkdir()
    give(here / "hvlaunch.toml")


def link_of_bob_to_what_is_too_long(here: Path, give: Give) -> None:
    (here / "long").write_text("#" * (2 << 20))
    link_of_bob_to("long")(here, give)


def my_directory(here: Path, give: Give) -> None:
    (here / "hvlaunch.toml").mkdir()


def my_pipe(here: Path, give: Give) -> None:
    os.mkfifo(here / "hvlaunch.toml")


def my_link_to(target: str) -> Callable[[Path, Give], None]:
    return lambda here, give: (here / "hvlaunch.toml").symlink_to(target)


@pytest.mark.parametrize(
    "plant",
    [
        of_bob,
        for_all,
        in_a_directory_for_all,
        link_of_bob,
        pytest.param(link_of_bob_to("/nonexistent"), id="dangling link of bob"),
        pytest.param(link_of_bob_to("/dev/zero"), id="link of bob to a device"),
        pytest.param(link_of_bob_to("hvlaunch.toml"), id="link of bob to itself"),
        link_of_bob_to_what_is_too_long,
        directory_of_bob,
        pipe_of_bob,
        my_directory,
        my_pipe,
        pytest.param(my_link_to("/nonexistent"), id="my dangling link"),
        pytest.param(my_link_to("/dev/zero"), id="my link to a device"),
    ],
)
def test_a_discovered_file_that_others_could_have_planted_is_ignored(
    here: Path, given_to_bob: Give, plant: Callable[[Path, Give], None]
) -> None:
    plant(here, given_to_bob)
    done = shown_config()
    assert (done.returncode, done.stdout) == (0, "# no option is set\n")
    assert re.fullmatch(r"hvlaunch: warning: not used: hvlaunch.toml: .+\n", done.stderr)


def shown_config(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, which may hang."""
    return subprocess.run(
        [sys.executable, "-m", "hvlaunch", *words, "--show-config"],
        env={"PATH": os.environ["PATH"], **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def told_to(uid: int, here: Path) -> str:
    """What a process of that user is told in this directory: root may read all files."""
    for directory in (here, *here.parents[:-1]):
        directory.chmod(directory.stat().st_mode | 0o055)
    options_of()  # loads modules which that user may not be able to read
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told: list[str] = []
        try:
            os.setgid(uid)
            os.setuid(uid)
            options_of(told=told)
        except BaseException as error:  # noqa: BLE001 (the parent tells)
            told.append(f"{type(error).__name__}: {error}")
        os.write(writer, "\n".join(told).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def test_a_file_of_bobs_that_i_may_not_read_stops_no_job(here: Path, given_to_bob: Give) -> None:
    given_to_bob(written(here / "hvlaunch.toml")).chmod(0o600)
    told = told_to(ALICE, here)
    assert re.fullmatch(r"warning: not used: hvlaunch.toml: it belongs to user .+; try: .+", told)


def test_a_file_of_mine_that_i_may_not_read_is_an_error(here: Path, given_to_bob: Give) -> None:
    path = given_to_bob(written(here / "hvlaunch.toml"))
    path.chmod(0)
    told = told_to(path.stat().st_uid, here)
    assert told == "BadUsage: hvlaunch.toml: permission denied; try: --config-file FILE"


def pipe_of_a_pyproject(here: Path, give: Give) -> None:
    os.mkfifo(here / "pyproject.toml")
    give(here / "pyproject.toml")


def link_of_a_pyproject(here: Path, give: Give) -> None:
    """What it leads to is not opened: it may be on another machine."""
    (here / "pyproject.toml").symlink_to("mine")
    (here / "mine").write_text("[tool.hvlaunch]\nnp = 2\n")
    give(here / "pyproject.toml")


def spaces_in_a_pyproject(here: Path, give: Give) -> None:
    (here / "pyproject.toml").write_text("\n" * (1 << 18) + " " * (1 << 18) + "hvlaunch]")
    give(here / "pyproject.toml")


@pytest.mark.parametrize("plant", [pipe_of_a_pyproject, link_of_a_pyproject, spaces_in_a_pyproject])
def test_a_pyproject_of_another_user_holds_nobody_up(
    here: Path, given_to_bob: Give, plant: Callable[[Path, Give], None]
) -> None:
    plant(here, given_to_bob)
    done = shown_config()
    assert (done.returncode, done.stdout, done.stderr) == (0, "# no option is set\n", "")


@pytest.mark.parametrize("name", ["job.yaml", "xdg/hvlaunch/config.toml"])
def test_a_pipe_without_a_writer_is_an_error(here: Path, name: str) -> None:
    (here / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(here / name)
    words = ("--config-file", name) if name == "job.yaml" else ()
    done = shown_config(*words, XDG_CONFIG_HOME=str(here / "xdg"))
    assert done.returncode == 2
    assert f"{name}: it is a pipe, and no data arrived; try: --config-file FILE\n" in done.stderr


def test_a_file_of_mine_in_a_sticky_directory_is_used(here: Path) -> None:
    written(here / "hvlaunch.toml")
    here.chmod(0o1777)
    assert options_of().np == 2


@pytest.mark.parametrize(("group", "option"), OWN, ids=lambda value: getattr(value, "flag", ""))
@pytest.mark.parametrize("name", ["hvlaunch.toml", "pyproject.toml"])
def test_a_discovered_file_may_not_name_programs_or_keys(here: Path, group, option, name: str) -> None:
    head = "[tool.hvlaunch]\n" if name == "pyproject.toml" else ""
    (here / name).write_text(head + of_toml(option, None))
    with pytest.raises(BadUsage, match="is not allowed in a file that hvlaunch found by itself") as caught:
        options_of()
    assert f"{name}: {'[tool.hvlaunch] ' if head else ''}" in str(caught.value)
    assert f"try: --config-file {name}, or -" in str(caught.value)
    if option.name == "profile":
        with (here / name).open("a") as file:
            file.write("profiles.some-text = {}\n")
    assert option.name in options_of("--config-file", name).given


@pytest.mark.parametrize("key", ["hostfile", "env-file", "output-filename"])
def test_paths_in_a_discovered_file_stay_below_it(here: Path, key: str) -> None:
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
    with pytest.raises(BadHost, match="is allowed only in a hostfile that you named"):
        job_spec(options_of(), {})
    assert job_spec(options_of("--config-file", "hvlaunch.toml"), {})[0].hosts[0].python == "./evil"


def test_nor_does_it_when_it_is_read_again(here: Path) -> None:
    (here / "hvlaunch.toml").write_text("hostfile = 'hosts'\nmin-np = 1\n")
    (here / "hosts").write_text("localhost slots=2\n")
    found, named = (
        job_spec(options_of(), {})[0],
        job_spec(options_of("--config-file", "hvlaunch.toml"), {})[0],
    )
    (here / "hosts").write_text("localhost slots=2 python=./evil\n")
    assert found.elastic is not None
    assert named.elastic is not None
    sources = host_source(found.elastic), host_source(named.elastic)
    assert sources[0] is not None
    assert sources[1] is not None
    with pytest.raises(BadHost, match="is allowed only in a hostfile that you named"):
        sources[0].read_hosts()
    assert sources[1].read_hosts()[0].python == "./evil"


@pytest.mark.parametrize("keys", ["accept-new", "off"])
def test_hosts_of_a_file_that_was_found_must_be_known(here: Path, keys: str) -> None:
    (here / "hvlaunch.toml").write_text("hosts = 'evil.example:4'\n")
    with pytest.raises(BadUsage, match=r"hvlaunch.toml has hosts, and was not named but found"):
        options_of(HVLAUNCH_HOST_KEYS=keys)
    assert options_of("-H", "mine", HVLAUNCH_HOST_KEYS=keys).host_keys == keys
    assert options_of("--host-keys", keys).hosts == "evil.example:4"
    assert options_of("--config-file", "hvlaunch.toml", HVLAUNCH_HOST_KEYS=keys).hosts == "evil.example:4"


def test_the_settings_of_a_discovered_file_are_reported(
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


@pytest.mark.parametrize(
    "line",
    [
        "prefix = ''",
        "prefix = 'hvlaunch: '",
        "pool = 'mine'",
        "sync-dir = '/home/ada/.ssh'",
        "rendezvous-bind = '0.0.0.0'",
        "rendezvous-port = 22",
    ],
)
def test_a_strangers_file_chooses_no_prefix_pool_or_listener(here: Path, line: str) -> None:
    (here / "hvlaunch.toml").write_text(f"{line}\n")
    key = line.partition(" ")[0]
    with pytest.raises(
        BadUsage, match=rf"hvlaunch\.toml: {key} is not allowed in a file that hvlaunch found by itself"
    ):
        options_of()
    assert options_of("--config-file", "hvlaunch.toml").settings
