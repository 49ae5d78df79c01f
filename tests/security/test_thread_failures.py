"""What any thread of the driver raises ends the job: exit code 70, one report, no worker left; never silence and 0."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from hvlaunch.agent.wire.frames import plain
from hvlaunch.driver.process import failures_as_events, loud
from hvlaunch.engine import events as on
from hvlaunch.mpi.builders import LauncherCommand
from hvlaunch.mpi.calls import CallListener
from hvlaunch.mpi.controller import LauncherProcess
from hvlaunch.rendezvous.serving.certificate import Certificate

SCRIPT = """
import importlib, sys
module, kind, name = sys.argv.pop(1).split(":")
def fail(*args, **more):
    raise RuntimeError("planted\\nhvlaunch: all is well")
setattr(getattr(importlib.import_module(module), kind), name, fail)
from hvlaunch.cli.main import script
script()
"""
WORKER = """
import os, socket, sys, time
from urllib.parse import urlsplit
print("hello", flush=True)
where = urlsplit(os.environ["HVLAUNCH_RENDEZVOUS"])
knock = socket.create_connection((where.hostname, where.port))
knock.sendall(b"GET / HTTP/1.1\\r\\nAuthorization: Bearer %s\\r\\n\\r\\n" % os.environb[b"HVLAUNCH_TOKEN"])
time.sleep(1000)
"""
FAULTS = {
    "printer": "hvlaunch.console.display:Display:output",
    "printer's end": "hvlaunch.console.display:Display:page",
    "to a host": "hvlaunch.driver.links.session:HostSession:_write",
    "from a host": "hvlaunch.driver.links.host_link:HostLink:_obey",
    "stdin": "hvlaunch.driver.process:StdinPump:_run",
    "rendezvous": "hvlaunch.rendezvous.serving:RendezvousServer:_run_loop",
    "event file": "hvlaunch.console.files:EventFile:_run",
    "a host's stderr": "hvlaunch.ssh:PipeChannel:_drain_stderr",
    "discovery": "hvlaunch.hosts.discovery:Discovery:_run",
}


@pytest.fixture
def mark() -> Iterator[str]:
    mark = f"mark-{os.urandom(8).hex()}"
    yield mark
    left = [
        process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])
    ]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left


@pytest.mark.parametrize("fault", FAULTS)
def test_a_thread_that_fails_ends_the_job(fault: str, mark: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    pool = ["--hostfile", tmp_path / "hosts"] if fault == "discovery" else []
    options = ["--grace", "2", "--events", tmp_path / "events", *(["--min-np", "1", *pool] if pool else [])]
    command = [sys.executable, "-c", SCRIPT, FAULTS[fault], "-np", "1", *options]
    done = subprocess.run(
        [*map(str, command), sys.executable, "-c", WORKER, mark],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 70, done
    reports = [line for line in done.stderr.splitlines() if "internal error" in line and "planted" in line]
    assert len(reports) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "hvlaunch: all is well" not in done.stderr.splitlines()


class Planted(Exception):
    pass


def fail(*_: Any, **__: Any) -> None:
    raise Planted


def failure_of(begin: Callable[[], Any]) -> on.Event:
    events: SimpleQueue[on.Event] = SimpleQueue()
    with failures_as_events(events.put) as failures:
        kept = begin()
        event = events.get(timeout=60)
        assert failures.first is not None
        assert "Planted" in failures.traceback()
    del kept
    return event


@pytest.mark.parametrize("name", ["_listen", "_meet"])
def test_where_agents_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(CallListener, name, fail)

    def begin() -> Any:
        listener = CallListener("token", Certificate(), lambda _: None)
        with suppress(OSError), closing(socket.create_connection(("127.0.0.1", listener.port))):
            pass
        return listener

    event = failure_of(begin)
    assert isinstance(event, on.ThreadFailed)
    assert event.problem.exit_code == 70


@pytest.mark.parametrize("name", ["_read", "_wait"])
def test_where_a_launcher_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LauncherProcess, name, fail)

    def begin() -> Any:
        command = LauncherCommand(("true",), {})
        return LauncherProcess(command, dict(os.environ), say=lambda _: None, ended=lambda _: None)

    assert isinstance(failure_of(begin), on.ThreadFailed)


def test_errors_that_an_event_loop_would_swallow() -> None:
    event = failure_of(loud(fail))
    assert isinstance(event, on.ThreadFailed)
    assert "Planted" in event.problem.cause


def test_the_hook_is_as_before_afterwards() -> None:
    before = threading.excepthook
    with failures_as_events(lambda _: None):
        assert threading.excepthook is not before
    assert threading.excepthook is before


def test_words_are_one_line() -> None:
    assert plain("a\nhvlaunch: b\x1b[31m\u202e", 100) == "a\\nhvlaunch: b\\x1b[31m\\u202e"
    assert plain("x" * 50, 10) == "xxxxxxx..."
