"""The errands for --setup and for hvlaunch's modules, on a real agent: what is built, when it is built again, and what is left of a broken build."""

import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from hvlaunch import __version__
from hvlaunch.agent.facts import packages_of
from hvlaunch.driver.links.errands import Errand, Limits
from tests.unit.agent.errand_rig import ErrandRig
from tests.unit.agent.harness import interpreter

NO_LIMITS = Limits(seconds=None, memory=None, output=None)
# As every virtual environment has one.
MAKE_PYTHON = 'mkdir -p "$VIRTUAL_ENV/bin" && ln -s "$SETUP_PYTHON" "$VIRTUAL_ENV/bin/python"'
COUNTED = f"{MAKE_PYTHON} && echo built >> ../count && echo one && echo two >&2"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where environments are; agents of the test have it too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "on-host"))
    return tmp_path / "on-host/hvlaunch"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    path.mkdir()
    (path / "uv.lock").write_text("1")
    return path


class Host:
    """An agent on which a project is set up."""

    def __init__(self, agent: Any, project: Path) -> None:
        self.rig = ErrandRig(agent)
        self.project = project

    def start(self, *commands: str, **more: Any) -> Errand:
        arguments = {
            "commands": list(commands),
            "patterns": ["*.lock"],
            "files": [],
            "directory": str(self.project),
            "root": str(self.project),
            "project": "p",
            "env": {},
            **more,
        }
        return self.rig.errands.start("setup", arguments, NO_LIMITS)

    def run(self, *commands: str, **more: Any) -> tuple[dict[str, Any], list[str]]:
        """The result, and the lines on the stream."""
        errand = self.start(*commands, **more)
        result = self.rig.result(errand)
        data = b""
        while more_data := errand.read(0.0):
            data += more_data
        return result, data.decode().splitlines()

    @property
    def builds(self) -> int:
        return (self.project.parent / "count").read_text().count("built")


@pytest.fixture
def host(cache: Path, launch: Any, project: Path) -> Host:
    agent = launch()
    agent.hello()
    return Host(agent, project)


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_an_environment_is_built_once(cache: Path, launch: Any, project: Path, version: str) -> None:
    agent = launch(candidates=[interpreter(version)])
    agent.hello()
    host = Host(agent, project)
    result, lines = host.run(COUNTED)
    environment = Path(result["environment"])
    assert (result["code"], result["is_new"], host.builds) == (0, True, 1)
    assert lines == ['line "one"', 'line "two"']
    assert environment.parent.parent == cache / "environments"
    assert environment.parent.stat().st_mode & 0o777 == 0o700
    again, lines = host.run(COUNTED)
    assert again == {**result, "is_new": False}
    assert (lines, host.builds) == ([], 1)
    assert agent.bye()[0] == {"type": "bye", "left": 0, "pids": []}


def test_what_asks_for_another_environment(host: Host) -> None:
    first, _ = host.run(COUNTED)
    (host.project / "uv.lock").write_text("2")
    assert host.run(COUNTED)[0]["environment"] != first["environment"]
    (host.project / "uv.lock").write_text("1")
    assert host.run(COUNTED)[0] == {**first, "is_new": False}
    (host.project / "notes.txt").write_text("no lock")
    assert host.run(COUNTED)[0]["is_new"] is False
    assert host.run(COUNTED, files=["notes.txt"])[0]["is_new"] is True
    # Another project with equal files may have its own source in its environment.
    assert host.run(COUNTED, project="q")[0]["environment"] != first["environment"]
    assert host.run(COUNTED + " ")[0]["is_new"] is True
    (host.project / "sub").mkdir()
    (host.project / "sub/uv.lock").write_text("3")
    inner = {"directory": str(host.project / "sub")}
    assert host.run(COUNTED.replace("../", "../../"), **inner)[0]["is_new"] is True
    (host.project / "uv.lock").write_text("of the outer directory")
    assert host.run(COUNTED.replace("../", "../../"), **inner)[0]["is_new"] is True


def test_programs_find_the_environment(host: Host) -> None:
    words = 'echo "$UV_PROJECT_ENVIRONMENT:$VIRTUAL_ENV:${PATH%%:*}:${PYTHONPATH-none}:$MINE:$PWD"'
    result, lines = host.run(f"{MAKE_PYTHON}; {words}", env={"MINE": "x", "PYTHONPATH": "/other"})
    environment = result["environment"]
    assert lines == [f'line "{environment}:{environment}:{environment}/bin:none:x:{host.project}"']
    # A command that builds none, such as a compiler.
    assert host.run("true")[0]["environment"] is None


def test_a_failed_build_leaves_nothing(host: Host, cache: Path) -> None:
    result, lines = host.run(f"{COUNTED}; echo broken; exit 3", "echo never")
    assert result == {"code": 3, "is_new": True, "environment": None, "packages": None}
    assert lines[-1] == 'line "broken"'
    (entry,) = (cache / "environments").iterdir()
    assert sorted(path.name for path in entry.iterdir()) == ["lock", "users"]
    host.run(f"{COUNTED}; echo broken; exit 3", "echo never")
    assert host.builds == 2
    assert host.run("kill -9 $$")[0]["code"] == 137
    assert host.run("nosuchprogram")[0]["code"] == 127


def test_a_killed_build_is_never_used(host: Host, cache: Path) -> None:
    command = f"rm -rf ../mark; {COUNTED}; test -e ../go || sleep 1000"
    errand = host.start(command)
    host.rig.until((host.project.parent / "count").exists, "the build is in the middle")
    errand.stop()
    assert host.rig.failure(errand)[0] == "stopped"
    assert list((cache / "environments").glob("*/env/bin/python"))
    assert not list((cache / "environments").glob("*/complete"))
    (host.project.parent / "go").touch()
    result, _ = host.run(command)
    assert (result["code"], result["is_new"], host.builds) == (0, True, 2)


def test_a_second_job_waits_and_then_has_nothing_to_do(host: Host) -> None:
    command = f"{COUNTED}; until test -e ../go; do sleep 0.05; done"
    first = host.start(command)
    host.rig.until((host.project.parent / "count").exists, "the first job builds")
    second = host.start(command)
    assert host.rig.read(second, 5) == b"wait\n"
    (host.project.parent / "go").touch()
    assert host.rig.result(first)["is_new"] is True
    assert host.rig.result(second)["is_new"] is False
    assert host.builds == 1


def test_a_replaced_python_asks_for_another_build(host: Host) -> None:
    """The host's Python was replaced by another version: the link in the environment leads nowhere."""
    python = Path(host.run(COUNTED)[0]["environment"], "bin/python")
    python.unlink()
    python.symlink_to("/nowhere")
    assert host.run(COUNTED)[0]["is_new"] is True
    assert os.access(python, os.X_OK)


def test_old_environments_are_dropped_unless_a_job_uses_them(host: Host, cache: Path) -> None:
    used = Path(host.run(COUNTED)[0]["environment"]).parent
    (host.project / "uv.lock").write_text("2")
    unused = Path(host.run(COUNTED)[0]["environment"]).parent
    shutil.rmtree(unused / "users")
    # A job of another agent: this process is one that lives.
    for user in (used / "users").iterdir():
        user.unlink()
    started = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (used / "users" / f"{boot}_{os.getpid()}_{started}").touch()
    for entry in (used, unused):
        for path in (entry / "lock", entry / "users", entry):
            if path.exists():
                os.utime(path, (time.time() - 40 * 86400,) * 2)
    (host.project / "uv.lock").write_text("3")
    host.run(COUNTED)
    assert used.exists()
    assert not unused.exists()


def test_a_daemon_of_the_command_does_not_hold_it_up(host: Host) -> None:
    """It has the command's output open, and ends with the errand."""
    result, lines = host.run(f"{MAKE_PYTHON}; sleep 1000 & echo started")
    assert (result["code"], lines) == (0, ['line "started"'])


@pytest.mark.parametrize("kind", ["missing", "fifo", "device", "directory"])
def test_a_file_of_the_key_must_be_a_file(host: Host, kind: str) -> None:
    path = host.project / "odd"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    reason, cause = host.rig.failure(host.start(COUNTED, files=["odd"]))
    assert reason == "raised"
    assert "odd" in cause


def test_names_of_files_are_no_part_of_each_other(host: Host) -> None:
    """A hostile name can't make two projects look equal, nor end a line of the key."""
    (host.project / 'a", "b.lock').write_text("1")
    first, _ = host.run(COUNTED)
    (host.project / 'a", "b.lock').rename(host.project / "a.lock")
    assert host.run(COUNTED)[0]["environment"] != first["environment"]
    (host.project / os.fsdecode(b"\xff\n.lock")).write_text("1")
    assert host.run(COUNTED)[0]["is_new"] is True


def test_a_cache_that_others_can_write_to_is_refused(host: Host, cache: Path) -> None:
    """Another user could have put a complete-looking environment there."""
    environment = Path(host.run(COUNTED)[0]["environment"])
    for path in (environment.parent, cache / "environments"):
        path.chmod(0o777)
        reason, cause = host.rig.failure(host.start(COUNTED))
        assert (reason, "other users can write there" in cause) == ("raised", True)
        path.chmod(0o700)
    shutil.move(environment.parent, cache / "elsewhere")
    environment.parent.symlink_to(cache / "elsewhere")
    assert host.rig.failure(host.start(COUNTED))[0] == "raised"


def test_the_cache_is_private_whatever_the_umask(cache: Path, launch: Any, project: Path) -> None:
    before = os.umask(0o002)
    try:
        agent = launch()
        agent.hello()
        host = Host(agent, project)
        environment = Path(host.run(COUNTED)[0]["environment"])
        for path in (cache, cache / "environments", environment.parent):
            assert path.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


# hvlaunch's modules

DATA = b"the modules"
NAME = hashlib.sha256(DATA).hexdigest()


def deliver(host: Host, data: bytes = DATA) -> Any:
    """The result, and whether the host asked for the content."""
    errand = host.rig.errands.start("library", {"hash": NAME, "size": len(data)})
    host.rig.until(lambda: errand.has_ended or errand._unread, "an answer")
    is_asked = not errand.has_ended
    errand.write(data)
    return Path(host.rig.result(errand)["path"]), is_asked


def test_modules_are_sent_once(host: Host, cache: Path) -> None:
    path, is_asked = deliver(host)
    assert (path.parent, path.read_bytes(), is_asked) == (cache / "library", DATA, True)
    assert deliver(host) == (path, False)
    old = path.with_name("old.zip")
    old.touch()
    os.utime(old, (0, 0))
    deliver(host)
    assert not old.exists()


@pytest.mark.parametrize("attack", ["content", "mode", "link", "fifo"])
def test_a_planted_file_is_replaced(host: Host, cache: Path, attack: str) -> None:
    path, _ = deliver(host)
    path.unlink()
    if attack == "content":
        path.write_bytes(b"not " + DATA)
    elif attack == "mode":
        path.write_bytes(DATA)
        path.chmod(0o666)
    elif attack == "link":
        path.symlink_to(cache / "planted")
        (cache / "planted").write_bytes(DATA)
    else:
        os.mkfifo(path)
    again, is_asked = deliver(host)
    assert (again, is_asked) == (path, True)
    assert path.read_bytes() == DATA
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600


def test_modules_that_were_damaged_are_not_kept(host: Host, cache: Path) -> None:
    errand = host.rig.errands.start("library", {"hash": NAME, "size": 3})
    errand.write(b"bad")
    assert host.rig.failure(errand) == ("raised", "ValueError: it was damaged on its way")
    assert list((cache / "library").iterdir()) == []


# What a Python has installed


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A virtual environment's directory of packages."""
    site = tmp_path / "env/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (tmp_path / "env/bin").mkdir()
    (tmp_path / "env/bin/python").symlink_to(interpreter("3.8"))
    (tmp_path / "env/pyvenv.cfg").touch()
    return site


def packages(site: Path) -> Any:
    return packages_of(str(site.parents[2] / "bin/python"))


def test_packages_are_read_from_directories(python: Path) -> None:
    assert packages(python) == {"hvlaunch": None, "editable": []}
    (python / "hvlaunch-1.2.3.dist-info").mkdir()
    (python / "__editable__.p.pth").write_text("/home/me/p/src\nimport sys; sys.path\n")
    (python / "__editable___q_finder.py").write_text(
        "MAPPING: dict[str, str] = {'q': '/home/me/q/q', 'q2': '/home/me/q/more/q2'}\n"
    )
    (python / "odd.pth").write_bytes(b"\xff\xfe\x00")
    got = packages(python)
    assert got["hvlaunch"] == "1.2.3"
    assert sorted(got["editable"]) == ["/home/me/p/src", "/home/me/q", "/home/me/q/more"]


def test_an_editable_install_of_hvlaunch_has_the_version_of_its_files(python: Path) -> None:
    root = Path(__file__).parents[3]
    (python / "hvlaunch-0.0.1.dist-info").mkdir()
    (python / "__editable__.hvlaunch.pth").write_text(f"{root}\n")
    assert packages(python)["hvlaunch"] == __version__


def test_a_system_python_has_debians_directories(tmp_path: Path) -> None:
    for name in (
        "usr/bin",
        "usr/lib/python3.11",
        "usr/lib/python3.12/site-packages",
        "usr/lib/python3/dist-packages",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "usr/bin/python3.11").touch(mode=0o755)
    (tmp_path / "usr/bin/python3").symlink_to("python3.11")
    (tmp_path / "usr/lib/python3/dist-packages/hvlaunch-7.dist-info").mkdir()
    # Of another Python.
    (tmp_path / "usr/lib/python3.12/site-packages/hvlaunch-8.dist-info").mkdir()
    got = packages_of(str(tmp_path / "usr/bin/python3"))
    assert got["hvlaunch"] == "7"
