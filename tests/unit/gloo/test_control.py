"""The control socket of a job, by its requests: with a real server, and a driver that this test plays."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from hvlaunch.console.printer import Printer
from hvlaunch.driver.control import ControlDoor
from hvlaunch.driver.history import History
from hvlaunch.driver.observing import Inquiry
from hvlaunch.engine import events as on
from hvlaunch.gloo.reporting import Reporting
from hvlaunch.job import JobResult, JobSpec
from hvlaunch.outside import CONTROL, JobDirectory, KnownJob, known_jobs
from hvlaunch.outside.control import ControlClient as Client
from hvlaunch.outside.control import ControlRefused, DriverGone
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.telemetry.stack import ProcessStack

ID = "0123456789ab"
ABOUT = {"id": ID, "command": ["train"], "pid": 4711}
REPORTED = {**ABOUT, "began": 1.0}


def recorder(write, wall):
    return lambda event, actions, now: write({"type": type(event).__name__})


class Job:
    """A job's directory and server; its driver's queue is `events`."""

    def __init__(self, root: Path) -> None:
        self.directory = JobDirectory(root, ID, ABOUT)
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.history = History(recorder)
        self.server = RendezvousServer("token")
        self.server.start()
        self.kept: list[bool] = []
        self.printer = Printer(None, None)
        spec = JobSpec(command=("train",), hosts=(), cwd="/")
        self.reporting = Reporting(spec, self.printer, REPORTED, self.directory.path)
        control = ControlDoor(
            ABOUT, self.history, self.events.put, lambda: self.kept.append(True), self.reporting
        )
        self.server.serve_beside(self.directory.listen(), control)

    @property
    def known(self) -> KnownJob:
        return known_jobs(self.directory.path.parent)[0]

    @property
    def client(self) -> Client:
        return Client(self.known)

    def answer(self, state: Mapping[str, Any]) -> threading.Thread:
        """Answer the next inquiry, as the driver's loop does."""

        def take() -> None:
            inquiry = self.events.get(timeout=20)
            assert isinstance(inquiry, Inquiry)
            inquiry.answer(state)

        thread = threading.Thread(target=take)
        thread.start()
        return thread

    @property
    def socket(self) -> Path:
        return self.directory.path / CONTROL

    def ask(self, request: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(self.socket))
            caller.sendall(request)
            caller.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: caller.recv(65536), b""))

    def close(self) -> None:
        self.server.close()
        self.directory.close()
        self.printer.close()


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "jobs")
    yield job
    job.close()


def test_the_job_is_what_the_driver_says_now(job):
    driver = job.answer({"phase": "running"})
    assert job.client.get("/job") == {**ABOUT, "phase": "running"}
    driver.join()
    assert not job.server.was_asked


def test_events_are_returned_or_awaited(job):
    job.history.watch(on.HostConnected("a"), [], 0.0)
    assert job.client.get("/events") == {"next": 1, "missed": 0, "events": [{"type": "HostConnected"}]}
    assert job.client.get("/events?since=1") == {"next": 1, "missed": 0, "events": []}
    late = threading.Timer(0.05, lambda: job.history.watch(on.Interrupted(15), [], 0.0))
    late.start()
    assert job.client.get("/events?since=1&wait=60", 60)["events"] == [{"type": "Interrupted"}]
    late.join()


@pytest.mark.parametrize("word", ["USR1", "SIGUSR1", "usr1"])
def test_a_signal_for_the_workers(job, word):
    job.client.post("/signal", {"signal": word})
    assert job.events.get(timeout=20) == on.UserSignal(signal.SIGUSR1)


@pytest.mark.parametrize(
    ("ranks", "wanted"), [(None, None), ("0-3,8", (range(4), range(8, 9))), ("2-6/2", (range(2, 7, 2),))]
)
def test_stacks_are_given_when_the_hosts_have_said_them(job, ranks, wanted):
    def take() -> None:
        asked = job.events.get(timeout=20)
        assert (asked.ranks, asked.native) == (wanted, True)
        asked.answer([ProcessStack("a", 3, 77, "train", False, (), "kernel")])

    thread = threading.Thread(target=take)
    thread.start()
    (one,) = job.client.post("/stacks", {"ranks": ranks, "native": True}, 20)["stacks"]
    assert (one["host"], one["rank"], one["source"]) == ("a", 3, "kernel")
    thread.join()


@pytest.mark.parametrize("reason", [None, "no worker of the round runs there"])
def test_a_move_begins_or_is_refused_with_the_reason(job, reason):
    def take() -> None:
        asked = job.events.get(timeout=20)
        assert asked.event == on.MoveWanted("a", "b")
        asked.answer(reason)

    job.history.watch(on.HostConnected("a"), [], 0.0)
    thread = threading.Thread(target=take)
    thread.start()
    if reason is None:
        assert job.client.post("/move", {"host": "a", "to": "b"}) == {"next": 1}
    else:
        with pytest.raises(ControlRefused, match=f"job {ID}: host a is not moved: {reason}"):
            job.client.post("/move", {"host": "a", "to": "b"})
    thread.join()


@pytest.mark.parametrize(("kill", "times"), [(False, 1), (True, 2)])
def test_a_stop(job, kill, times):
    job.client.post("/stop", {"kill": kill})
    assert [job.events.get(timeout=20) for _ in range(times)] == [on.Interrupted(signal.SIGTERM)] * times
    assert job.events.empty()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/signal", {"signal": "NOSUCH"}),
        ("/signal", {"signal": 10}),
        ("/signal", {}),
        ("/stop", {"kill": "yes"}),
        ("/stop", {"kill": True, "more": 1}),
        ("/move", {"host": "a"}),
        ("/move", {"host": "", "to": None}),
        ("/move", {"host": "a", "to": 1}),
        ("/stacks", {"ranks": None}),
        ("/stacks", {"ranks": "x", "native": False}),
        ("/stacks", {"ranks": [1], "native": False}),
        ("/stacks", {"ranks": None, "native": 1}),
    ],
)
def test_malformed_orders_are_refused(job, path, body):
    with pytest.raises(ControlRefused, match="job 0123456789ab: the body "):
        job.client.post(path, body)
    assert job.events.empty()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /nowhere", b"404"),
        (b"GET /s/k", b"404"),
        (b"POST /job", b"405"),
        (b"GET /stop", b"405"),
        (b"GET /events?since=x", b"400"),
        (b"GET /events?wait=1&since=1", b"400"),
    ],
)
def test_malformed_requests_are_refused(job, request_line, status):
    answer = job.ask(request_line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    assert answer.split()[1] == status


def test_noise_in_the_channel_is_ignored(job):
    assert job.ask(b"\x16\x03\x01nonsense\r\n\r\n").split()[1] == b"501"
    driver = job.answer({})
    assert job.client.get("/job") == ABOUT
    driver.join()


def test_end_of_the_job_ends_all_waits(job):
    asker = threading.Timer(0.05, job.server.close)
    asker.start()
    with pytest.raises(DriverGone):
        job.client.get("/events?wait=60", 60)
    asker.join()
    with pytest.raises(DriverGone, match="its driver does not answer"):
        Client(job.known, patience=0.2).get("/job")


_AS_NOBODY = """\
import os, socket, sys
caller = socket.socket(socket.AF_UNIX)
os.setgid(65534), os.setuid(65534)
caller.connect(sys.argv[1])
try:
    caller.sendall(b'POST /stop HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 15\\r\\n\\r\\n{"kill": false}')
    print(caller.recv(100))
except ConnectionError:
    print(b"")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_other_user_is_refused_in_spite_of_file_modes():
    with tempfile.TemporaryDirectory() as open_to_all, closing(Job(Path(open_to_all))) as job:
        for path, mode in ((Path(open_to_all), 0o755), (job.directory.path, 0o755), (job.socket, 0o666)):
            path.chmod(mode)
        other = subprocess.run(
            [sys.executable, "-I", "-c", _AS_NOBODY, job.socket], capture_output=True, text=True, check=False
        )
        assert other.stdout.strip() == "b''", other
        assert job.events.empty()


def test_the_report_is_there_while_the_job_runs_and_when_it_has_ended(job):
    driver = job.answer({})
    assert job.client.get("/report")["outcome"] == "running"
    driver.join()
    found = []
    waiting = threading.Thread(target=lambda: found.append(job.client.get("/report?wait=30", 30)))
    waiting.start()
    job.reporting.announce_end(JobResult(exit_code=7, elapsed=1.0))
    waiting.join()
    assert [report["exit_code"] for report in (*found, job.client.get("/report"))] == [7, 7]
