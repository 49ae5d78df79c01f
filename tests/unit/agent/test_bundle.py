"""The start: any login shell, any candidate, exactly the bundle's bytes, nothing of the host's."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvlaunch import agent as agent_package
from hvlaunch.agent.wire.frames import PROTOCOL, Decoder, encode
from hvlaunch.driver import program as bundles
from hvlaunch.driver.links.agent_channel import PieceReader
from hvlaunch.driver.program import (
    NO_PYTHON,
    agent_command,
    bundle,
    python_candidates,
    rare_modules,
    without_docstrings,
)
from hvlaunch.errors import BadUsage
from tests.unit.agent.harness import AgentProcess, interpreter

Launch = Callable[..., AgentProcess]
CONFIG = {"grace": 0.2, "lease": 60.0, "window": 1 << 20, "reconnect": 1.0, "spill": 0}
WRONG = {"grace": 0.2, "lease": 60.0}
SHELLS = ["sh", "bash", "dash", "zsh", "fish", "csh", "tcsh", "ksh", "busybox"]


def shell_command(name: str) -> list[str]:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} here")
    return [path, "sh", "-c"] if name == "busybox" else [path, "-c"]


@pytest.fixture
def spaced_python(tmp_path: Path) -> str:
    """An interpreter whose path has what needs quoting."""
    directory = tmp_path / "a (b) & c; d* ~ #{e} %"
    directory.mkdir()
    script = directory / "my python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def old_python(tmp_path: Path, name: str = "old", version: str = "3.7.17") -> str:
    """Says that it is a Python of this version, and is nothing more."""
    script = tmp_path / name
    script.write_text(f"#!/bin/sh\necho Python {version}\n")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def new_user(tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who has no start-up files of shells."""
    home = tmp_path / "home"
    home.mkdir()
    return {**os.environ, "HOME": str(home)}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_login_shell_starts_the_agent(
    shell: str, launch: Launch, spaced_python: str, new_user: dict[str, str]
) -> None:
    candidates = ["/no/such dir/python", spaced_python]
    agent = launch(shell=shell_command(shell), candidates=candidates, env=new_user)
    assert agent.hello()["facts"]["executable"] == sys.executable
    assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
    assert agent.stderr() == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_no_candidate_is_one_line_and_127(shell: str, tmp_path: Path, new_user: dict[str, str]) -> None:
    candidates = ["/no/such dir/python", old_python(tmp_path), "no-such-python", str(tmp_path)]
    done = subprocess.run(
        [*shell_command(shell), agent_command(candidates, 1, 60)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env=new_user,
    )
    assert (done.returncode, done.stdout) == (127, b"")
    assert done.stderr.decode() == f"{NO_PYTHON} {', '.join(candidates)}\n"


def test_old_python_is_skipped(launch: Launch, tmp_path: Path) -> None:
    agent = launch(candidates=[old_python(tmp_path), sys.executable])
    assert agent.hello()["facts"]["executable"] == sys.executable


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        ("2.7.18", False),
        ("3.6.8", False),
        ("3.7.17", False),
        ("3.8.0", True),
        ("3.9.2rc1", True),
        ("3.10.1", True),
        ("3.15.0a1+", True),
    ],
)
def test_command_accepts_new_and_refuses_old_pythons(tmp_path: Path, version: str, taken: bool) -> None:
    command = agent_command([old_python(tmp_path, version=version)], 1, 60)
    done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.stdout == f"Python {version}\n".encode()) is taken
    assert (NO_PYTHON.encode() in done.stderr) is not taken


def test_a_home_directory_is_expanded(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "python").symlink_to(sys.executable)
    agent = launch(candidates=["~/envs/python"], env={"HOME": str(tmp_path)})
    assert agent.hello()["facts"]["executable"] == str(tmp_path / "envs" / "python")


def test_noise_of_the_login_shell_is_separated_from_frames(launch: Launch) -> None:
    noise = "Welcome! \\0\\376hvl \\377 100%% full"
    agent = launch(before=f"printf '{noise}'; echo to stderr >&2; ")
    agent.hello()
    assert agent.noise == b"Welcome! \0\xfehvl \xff 100% full"


def test_the_users_python_stands_alone() -> None:
    assert python_candidates("~/venv/bin/python") == ["~/venv/bin/python"]
    *ours, python3, python = python_candidates(None)
    assert ours[-1] == sys.executable
    assert (python3, python) == ("python3", "python")


def test_python_with_version_in_its_name_is_not_asked(launch: Launch, tmp_path: Path) -> None:
    """It would answer -V, as all do, with an error."""
    script = tmp_path / "python3.12"
    script.write_text(f'#!/bin/sh\ncase "$1" in -V) exit 1;; *) exec "{sys.executable}" "$@";; esac\n')
    script.chmod(0o755)
    agent = launch(candidates=["/no/such/python3.12", str(script), "/no/such/python"])
    assert agent.hello()["facts"]["executable"] == sys.executable


@pytest.mark.parametrize("name", ["python3.7", "python3.11 (copy)", "python3"])
def test_other_pythons_are_asked_for_their_version(launch: Launch, tmp_path: Path, name: str) -> None:
    agent = launch(candidates=[old_python(tmp_path, name), sys.executable])
    assert agent.hello()["facts"]["executable"] == sys.executable


def test_output_of_a_shim_before_the_version_is_ignored(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "pyenv: rehashing"\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    agent = launch(candidates=[str(script)])
    assert agent.hello()["facts"]["executable"] == sys.executable


@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs timeout(1)")
def test_python_that_hangs_at_version_is_skipped_and_ended(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that hangs."""
    monkeypatch.setattr(bundles, "_VERSION_LIMIT", 0.2)
    script, told = tmp_path / "python", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\necho $$ > {told}\nexec sleep 600\n")
    script.chmod(0o755)
    agent = launch(candidates=[str(script), sys.executable])
    assert agent.hello()["facts"]["executable"] == sys.executable
    assert not told.exists() or not Path(f"/proc/{told.read_text().strip() or 0}").exists()


@pytest.mark.parametrize("path", ["a'b", 'a"b', "a$b", "a`b", "a\\b", "a!b", "a\nb", ""])
def test_path_that_can_not_be_quoted_for_all_shells_is_bad_usage(path: str) -> None:
    with pytest.raises(BadUsage, match=r"--remote-python .*: must not have a quote"):
        python_candidates(path)


def test_command_line_is_short_and_has_no_secret() -> None:
    # Not this machine's candidates: their length depends on the place of the virtual environment.
    candidates = ["/opt/train/bin/python3.12", "/opt/train/bin/python", "python3", "python"]
    assert len(agent_command(candidates, 20_000, 60)) < 700


def fault(data: bytes) -> str:
    """What an agent of the bundle says of a frame that no driver sends: a traceback."""
    done = subprocess.run(
        ["/bin/sh", "-c", agent_command([sys.executable], len(data), 60)],
        input=data + encode({"type": "hello"}),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    ((header, body),) = Decoder().feed(PieceReader(lambda _: None).feed(done.stdout))
    assert header["type"] == "fault"
    return body.decode()


def test_every_module_of_the_agent_travels() -> None:
    root = Path(agent_package.__file__).parent
    files = {str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.py")}
    assert {path for path in files if not path.startswith("errands/")} == {
        *bundles._MODULES,
        *bundles._WITH_RANKS,
        *bundles._RARE,
        "boot",
        "launched",
        "wire/caller",
        "wire/carrier",
        *bundles._WARM,
        *bundles._LEASES,
        "workers/standby",  # with the workers of jobs that preload modules
        "services/__init__",  # with presets
        "services/tunnel",  # likewise
        "wire/peers",  # likewise, and with errands that use it
        "container",  # for hosts with containers, outside of these
        "cache",  # with errands that use it
        "proc",  # likewise, and workers import the same file
        "commits/__init__",  # likewise, and workers import the same file
        "commits/saves",  # likewise
    }


@pytest.mark.parametrize(("is_near", "limit"), [(False, 28_500), (True, 135_000)])
def test_the_bundle_stays_small(is_near: bool, limit: int) -> None:
    assert len(bundle(CONFIG, is_near=is_near)) < limit


def test_compiled_code_loses_only_its_docstrings() -> None:
    text = '"""Words."""\n__all__ = ["f"]\ndef f():\n    """Words."""\n    return ["a" for _ in "b"], (lambda: "c")()\ndef g():\n    return "d"\n'
    text += 'class C:\n    """Words."""\n    x = "e"\n    """Words."""\n    def h(self): return "i"\n'
    text += 'class D:\n    y = "j"\n'
    names: dict[str, Any] = {}
    exec(without_docstrings(compile(text, "f", "exec")), names)
    assert (names["f"](), names["g"]()) == ((["a"], "c"), "d")
    assert (names["C"].__doc__, names["C"].x, names["C"]().h(), names["C"].__qualname__) == (
        "",
        "e",
        "i",
        "C",
    )
    assert (names["D"].__doc__, names["D"].y) == (None, "j")
    assert names["__all__"] == ["f"]
    assert not names["f"].__doc__ and not names["__doc__"]


def shape(text: str) -> str:
    """The module's syntax with the numbers of its lines, whatever its docstrings say."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value, node.end_lineno, node.end_col_offset = ast.Constant(""), 0, 0
    columns = re.compile(r", (end_)?col_offset=\d+")
    return columns.sub("", ast.dump(tree, include_attributes=True))


def test_sent_modules_lose_imports_for_annotations() -> None:
    text = "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    import a\n\n    b = a.b\n\nx = 1\n"
    assert bundles.without_types(text) == "TYPE_CHECKING = False\n" + 5 * "\n" + "x = 1\n"
    for file in Path(agent_package.__file__).parent.rglob("*.py"):
        text = file.read_text()
        tree, sent = ast.parse(text), ast.parse(bundles.without_types(text))
        tree.body = [node for node in tree.body if not is_for_types(node)]
        assert ast.dump(sent, include_attributes=True) == ast.dump(tree, include_attributes=True)


def is_for_types(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING` without an `else`, which is what runs on a host."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse


def test_sent_modules_lose_only_docstrings_and_comments() -> None:
    for file in Path(agent_package.__file__).parent.rglob("*.py"):
        text = file.read_text()
        sent = bundles.without_words(text)
        assert shape(sent) == shape(text)
        assert "# noqa" not in sent
        assert not re.search(r'"""\w', sent)


@pytest.mark.parametrize("is_near", [False, True])
def test_compiled_code_is_used_by_the_same_python(is_near: bool) -> None:
    compiled = str(Path(agent_package.__file__).with_name("main.py"))
    assert (compiled in fault(bundle(WRONG, is_near=is_near))) is is_near


def test_no_text_is_compiled_by_the_same_python() -> None:
    """The first call of compile() makes Python's types of syntax trees, which takes 0.7 ms on each host."""
    data = bundle(CONFIG, is_near=True)
    watch = "import builtins; builtins.compile = lambda *_, **__: print('compiled') or 1 // 0\n"
    boot = bundles._BOOT.format(size=len(data), limit=60)
    words = [sys.executable, "-I", "-S", "-c", watch + boot]
    done = subprocess.run(words, input=data, capture_output=True, check=False)
    assert b"compiled" not in done.stdout
    assert b'"parting"' in done.stdout, done.stderr


def test_another_python_compiles_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MAGIC_NUMBER", b"\0\0\r\n")
    assert "<hvlaunch.agent.main>" in fault(bundle(WRONG, is_near=True))


def test_frames_right_behind_the_bundle_are_not_swallowed(launch: Launch) -> None:
    """One write has the bundle and the hello; the boot may read only its own part."""
    data = bundle(CONFIG, is_near=True)
    process = subprocess.Popen(
        ["/bin/sh", "-c", agent_command([sys.executable], len(data), 60)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    out, _ = process.communicate(data + encode({"type": "ping"}) + encode({"type": "bye"}), timeout=60)
    assert process.returncode == 0
    assert b'"pong"' in out
    assert b'"bye"' in out


def test_bundle_in_small_pieces_is_read_whole() -> None:
    data = bundle(CONFIG, is_near=True) + encode({"type": "bye"})
    process = subprocess.Popen(
        ["/bin/sh", "-c", agent_command([sys.executable], len(data) - len(encode({"type": "bye"})), 60)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    for start in range(0, len(data), 499):
        process.stdin.write(data[start : start + 499])
        process.stdin.flush()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b'"bye"' in out


@pytest.mark.parametrize("sent", [0, 1000])
def test_start_without_the_rest_of_the_bundle_ends_by_itself(sent: int) -> None:
    """No lease is known before the bundle is there, and of a network that is cut nothing is heard."""
    data = bundle(CONFIG, is_near=False)
    process = subprocess.Popen(
        ["/bin/sh", "-c", agent_command([sys.executable], len(data), 0.3)], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(data[:sent])
        process.stdin.flush()
        assert process.wait(60) == -signal.SIGALRM


def test_timer_of_the_start_is_cleared_once_the_agent_runs() -> None:
    code = (
        "import os, signal\nfrom hvlaunch.agent.guardian import watch_over\n"
        "signal.setitimer(signal.ITIMER_REAL, 3600)\n"
        "def timer(): os.write(1, b'%g ' % signal.getitimer(signal.ITIMER_REAL)[0])\n"
        "watch_over(b'x', lambda _: timer() or os._exit(0), 1.0, timer)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True
    )
    assert done.stdout == b"0 0 "


def test_a_guardian_that_may_not_fork_leaves_no_directory(tmp_path: Path) -> None:
    code = (
        "import errno, os\nfrom hvlaunch.agent import guardian\n"
        "def fork(): raise BlockingIOError(errno.EAGAIN, '')\n"
        f"os.fork = fork; guardian.main({CONFIG!r})"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == b"hvlaunch agent: can't start a process: Resource temporarily unavailable\n"
    assert list(tmp_path.iterdir()) == []


def test_modules_of_the_host_are_not_imported(launch: Launch, tmp_path: Path) -> None:
    """Neither PYTHONPATH, nor the working directory, nor site-packages come before the standard library."""
    for name in ("json", "select", "selectors", "sitecustomize", "usercustomize", "hvlaunch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the host')")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": str(tmp_path / "json.py"), "PYTHONHOME": "/nowhere"}
    agent = launch(env=env, cwd=str(tmp_path))
    agent.hello()
    _, out, _ = agent.run(["/bin/sh", "-c", "echo $PYTHONPATH"])
    assert out.decode().strip() == str(tmp_path)


def test_the_start_imports_little() -> None:
    """What an import costs is paid on every host before its workers can start."""
    data = bundle(CONFIG, is_near=True)
    command = agent_command([sys.executable], len(data), 60).replace("set -- -I", "set -- -X importtime -I")
    nobody = {"candidates": [("127.0.0.1", 1)], "key": "k", "relay": "never"}
    hello = {
        "type": "hello",
        "protocol": PROTOCOL,
        "name": "a",
        "key": "x",
        "known_as": None,
        "cwd": "/",
        "gpus": False,
        "ports": None,
        "elastic": None,
        "processes": 1,
    }
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    hello = {**hello, "rendezvous": nobody, "session": "key"}
    process.stdin.write(data + encode(hello) + encode({"type": "modules"}, rare_modules()))
    process.stdin.flush()
    told = b""
    while b'"reached"' not in told:
        told += os.read(process.stdout.fileno(), 1 << 16) or pytest.fail("it ended")
    _, errors = process.communicate(encode({"type": "bye"}))
    assert process.returncode == 0
    imported = {line.rpartition(b"|")[2].strip().decode() for line in errors.splitlines()}
    assert "hvlaunch.agent.workers.host_workers" in imported
    heavy = {
        "typing",
        "enum",
        "re",
        "json",
        "signal",
        "socket",
        "struct",
        "fcntl",
        "selectors",
        "collections",
        "functools",
        "ctypes",
        "threading",
        "encodings.idna",
        "subprocess",
        "shutil",
        "traceback",
        "asyncio",
        "logging",
        "pathlib",
        "tempfile",
        "inspect",
        "site",
        "hvlaunch.agent.wire.relay",
    }
    assert not imported & heavy


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"])
def test_the_agent_runs_on_every_python_from_the_oldest_promised(launch: Launch, version: str) -> None:
    agent = launch(candidates=[interpreter(version)])
    assert agent.hello()["facts"]["python"].startswith(f"{version}.")
    agent.start(["/bin/sh", "-c", "cat; exit 3"], stdin=True)
    agent.send("stdin", b"words", slot=0)
    agent.send("stdin", b"", slot=0)
    agent.expect("exited", code=3)
    assert agent.output() == b"words"
    agent.start(["/no/such/file"])
    agent.expect("not_started", code=127)
    assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
    assert agent.stderr() == ""


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7"])
def test_no_older_python_is_taken(launch: Launch, version: str) -> None:
    agent = launch(candidates=[interpreter(version), sys.executable])
    assert agent.hello()["facts"]["executable"] == sys.executable
