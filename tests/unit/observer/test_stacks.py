"""Stacks of real processes by py-spy, by faulthandler, and by the kernel."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import hvlaunch.torch
from hvlaunch.agent.errands.observer import stacks
from hvlaunch.agent.errands.observer.stacks import STACK_SIGNAL, find_py_spy, packed, take_stacks
from hvlaunch.telemetry.stack import process_stacks, summary

ROOT = Path(__file__).parents[3]
PY_SPY = str(Path(sys.executable).with_name("py-spy"))
SLEEPS = """
import sys, time
def doze():
    print("up", flush=True); time.sleep(1000)
doze()
"""
ANSWERS = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import hvlaunch.torch
{SLEEPS}"""

Run = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Starts a program and waits until it is up."""
    started: list[subprocess.Popen[bytes]] = []

    def start(text: str, *before: str) -> "subprocess.Popen[bytes]":
        script = tmp_path / "script.py"
        script.write_text(text)
        command = [*before, sys.executable, str(script)]
        environment = {**os.environ, "HVLAUNCH_SCRATCH": str(tmp_path)}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env=environment, cwd=ROOT, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def fake(tmp_path: Path, script: str) -> str:
    """A py-spy that does this; $5 is the pid."""
    path = tmp_path / "fake-spy"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def only(stacks_found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the only stack, in the form for the driver."""
    assert process_stacks("a", json.loads(json.dumps(packed(stacks_found)))) is not None
    (stack,) = stacks_found
    return stack


def test_frames_of_python_are_read_while_the_process_continues(run: Run, tmp_path: Path) -> None:
    if not os.access(PY_SPY, os.X_OK):
        pytest.skip("no py-spy here")
    process = run(SLEEPS)
    stack = only(take_stacks([(3, process.pid)], 5.0, str(tmp_path), PY_SPY))
    assert (stack["rank"], stack["source"], stack["problem"], stack["is_child"]) == (3, "py-spy", None, False)
    frames = [(function, Path(file).name, line) for function, file, line in stack["threads"][0]["frames"]]
    assert frames == [("<module>", "script.py", 5), ("doze", "script.py", 4)]
    native = only(take_stacks([(3, process.pid)], 20.0, str(tmp_path), PY_SPY, native=True))
    assert any(".so" in file for _, file, _ in native["threads"][0]["frames"])
    assert process.poll() is None


def test_a_program_in_a_shell_is_a_child_of_the_rank(run: Run, tmp_path: Path) -> None:
    shell = run(SLEEPS, "/bin/sh", "-c", '"$@"; exit 3', "sh")
    stacks_found = take_stacks([(0, shell.pid)], 5.0, str(tmp_path), PY_SPY)
    assert [stack["is_child"] for stack in stacks_found] == [False, True]
    assert stacks_found[0]["source"] == "kernel"
    parsed = process_stacks("a", packed(stacks_found))
    assert parsed is not None
    if os.access(PY_SPY, os.X_OK):
        assert summary(parsed) == "rank 0 in doze (script.py:4)"


def test_faulthandler_writes_the_stack_without_py_spy(run: Run, tmp_path: Path) -> None:
    process = run(ANSWERS)
    for _ in range(2):  # its file is appended to
        stack = only(take_stacks([(0, process.pid)], 5.0, str(tmp_path), None))
        assert stack["source"] == "faulthandler"
        assert [function for function, _, _ in stack["threads"][0]["frames"]] == ["<module>", "doze"]
        assert "hvlaunch[stacks]" in stack["problem"]
    assert process.poll() is None


def test_an_unregistered_process_is_never_signalled(run: Run, tmp_path: Path) -> None:
    catches = f"import signal\nsignal.signal({int(STACK_SIGNAL)}, lambda *_: sys.exit(9))\n"
    for text in (SLEEPS, f"import sys\n{catches}{SLEEPS}"):
        process = run(text)
        (tmp_path / f"stack.{process.pid}").write_text("")  # as one before it with this pid may have left it
        stack = only(take_stacks([(0, process.pid)], 2.0, str(tmp_path), None))
        assert stack["source"] == "kernel"
        assert stack["threads"][0]["frames"]
        assert process.poll() is None


def test_the_signal_is_the_one_that_workers_register() -> None:
    assert hvlaunch.torch.STACK_SIGNAL == STACK_SIGNAL


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        ("echo 'Permission Denied: Try sudo' >&2; exit 1", "no permission: give the container SYS_PTRACE"),
        ("echo 'Error: Failed to find python version'; exit 1", "py-spy does not know this Python"),
        ("echo '\033[2J boom'; exit 1", "py-spy: ?[2J boom"),
        ("echo nonsense", "py-spy: nonsense"),
        ("echo '[{\"os_thread_id\": 1}]'", "py-spy: [{"),
        ("exit 1", "py-spy: no answer"),
    ],
)
def test_missing_frames_are_explained_in_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, problem: str
) -> None:
    monkeypatch.setattr(stacks, "_YAMA", "/no/such")
    process = run(SLEEPS)
    stack = only(take_stacks([(0, process.pid)], 5.0, str(tmp_path), fake(tmp_path, says)))
    assert stack["source"] == "kernel"
    assert stack["problem"].startswith(problem)


def test_yama_is_named_with_its_setting(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scope").write_text("2\n")
    monkeypatch.setattr(stacks, "_YAMA", str(tmp_path / "scope"))
    process = run(SLEEPS)
    spy = fake(tmp_path, "echo 'Error: Permission denied'; exit 1")
    stack = only(take_stacks([(0, process.pid)], 5.0, str(tmp_path), spy))
    assert stack["problem"] == (
        "no permission: sysctl kernel.yama.ptrace_scope=0 there (it is 2), or import hvlaunch.torch"
    )


def test_a_process_that_changed_is_read_again(run: Run, tmp_path: Path) -> None:
    process = run(SLEEPS)
    good = json.dumps(
        [
            {"os_thread_id": process.pid + 1, "thread_name": "x", "frames": []},
            {"os_thread_id": process.pid, "thread_name": None, "frames": []},
        ]
    )
    counted = f"echo x >> {tmp_path}/count; [ $(wc -l < {tmp_path}/count) = 3 ] && echo '{good}'"
    stack = only(take_stacks([(0, process.pid)], 5.0, str(tmp_path), fake(tmp_path, counted)))
    assert (stack["source"], stack["problem"]) == ("py-spy", None)
    assert [thread["name"] for thread in stack["threads"]] == ["MainThread", "x"]  # the main thread first


def test_a_py_spy_that_hangs_is_cut_off(run: Run, tmp_path: Path) -> None:
    processes = [run(SLEEPS) for _ in range(3)]
    spy = fake(tmp_path, f"[ $5 = {processes[1].pid} ] && exec sleep 1000; echo no; exit 1")
    began = time.monotonic()
    stacks_found = take_stacks(
        [(rank, stack.pid) for rank, stack in enumerate(processes)], 1.0, str(tmp_path), spy
    )
    assert time.monotonic() - began < 10.0
    assert [stack["problem"] for stack in stacks_found] == [
        "py-spy: no",
        "py-spy was not ready in time",
        "py-spy: no",
    ]
    assert all(stack["threads"][0]["frames"] for stack in stacks_found)


def test_an_ended_process_has_no_stack(run: Run, tmp_path: Path) -> None:
    process = run(SLEEPS)
    process.kill()
    process.wait()
    assert take_stacks([(0, process.pid)], 1.0, str(tmp_path), None) == []


def test_py_spy_is_the_hosts_own_or_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_py_spy(str(tmp_path), "/no/python") is None
    brought = tmp_path / "py-spy"
    shutil.copy("/bin/true", brought)
    assert find_py_spy(str(tmp_path), "/no/python") == str(brought)
    (tmp_path / "bin").mkdir()
    shutil.copy("/bin/true", tmp_path / "bin" / "py-spy")
    assert find_py_spy(str(tmp_path), "/no/python") == str(tmp_path / "bin" / "py-spy")


def test_py_spy_is_stored_in_the_jobs_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such")
    monkeypatch.setattr(sys, "executable", "/no/python")
    question = {"scratch": str(tmp_path), "workers": [], "seconds": 1.0, "native": False}
    assert stacks.answer(question) == {"threads": [], "stacks": [], "lacks": os.uname().machine}
    stacks.take_py_spy({"scratch": str(tmp_path), "data": zlib.compress(Path("/bin/true").read_bytes())})
    assert (tmp_path / "py-spy").stat().st_mode & 0o777 == 0o700
    assert stacks.answer(question) == {"threads": [], "stacks": [], "lacks": None}


def test_an_answer_is_shortened_to_its_limit() -> None:
    frames = [["function", "/a/long/path/of/a/file.py", line] for line in range(128)]
    threads = [{"name": "thread", "is_python": True, "frames": frames} for _ in range(64)]
    stacks_found: list[dict[str, Any]] = [
        {"rank": rank, "is_child": child, "threads": [dict(stack) for stack in threads]}
        for rank in range(8)
        for child in (True, False)
    ]
    for most in (1 << 20, 1 << 16, 1 << 12):
        stacks_found = stacks.shortened(stacks_found, most)
        assert len(json.dumps(stacks_found)) <= most
        assert stacks_found[0]["threads"][0]["frames"][-1][2] == 127
    assert not any(stack["is_child"] for stack in stacks_found)
