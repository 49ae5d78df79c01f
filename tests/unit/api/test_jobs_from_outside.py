"""A Job whose driver ends, or has ended: nothing of that is hidden, and nothing else looks like it."""

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import hvlaunch
from hvlaunch.api.job import Job
from hvlaunch.cli.jobs.output import await_output
from hvlaunch.errors import BadUsage
from hvlaunch.outside import ABOUT, JobDirectory, KnownJob, known_job
from hvlaunch.outside.control import DriverGone

DEADLINE = 100.0
ENDED_BADLY = {"exit_code": 3, "elapsed": 1.5, "rank": 1, "host": "a"}


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    """Of a job that this process drives."""
    return JobDirectory(tmp_path / "hvlaunch/jobs", "4a5fac6ebd8e", {"id": "4a5fac6ebd8e", "pid": 1})


def known(directory: JobDirectory) -> KnownJob:
    job = known_job(directory.path)
    assert job is not None
    assert job.has_driver
    return job


def answering(directory: JobDirectory, status: int, *bodies: Any, end: Callable[[], None]) -> None:
    """Answer so many requests, and end."""
    listener = directory.listen()

    def answer() -> None:
        with listener:
            for body in bodies:
                connection, _ = listener.accept()
                with connection:
                    data = json.dumps(body).encode()
                    connection.recv(1 << 16)
                    connection.sendall(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (status, len(data)))
                    connection.sendall(data)
        end()

    threading.Thread(target=answer, daemon=True).start()


@pytest.mark.parametrize("result", [ENDED_BADLY, None])
def test_ending_driver_need_not_keep_output(
    directory: JobDirectory, result: Mapping[str, Any] | None
) -> None:
    job = known(directory)

    def end() -> None:
        if result is not None:
            directory.keep(result)
        directory.close()

    answering(directory, 503, {}, end=end)
    await_output(job)
    await_output(job)
    assert list(Job[Any](job).output()) == []


def test_results_name_the_cause_without_hosts() -> None:
    for _ in range(3):
        job = hvlaunch.Launcher(hosts="nohost.invalid:1", quiet=True).start(time.time)
        assert list(job.output()) == []
        with pytest.raises(hvlaunch.JobFailed, match=r"nohost\.invalid"):
            job.results(DEADLINE)


def test_dropped_events_are_counted(directory: JobDirectory) -> None:
    pages = [
        {"next": 9, "missed": 7, "events": [{"type": "worker_started"}, {"type": "worker_exited"}]},
        {"next": 10, "missed": 0, "events": [{"type": "job_ended"}]},
    ]
    job = Job[Any](known(directory))
    answering(directory, 200, *pages, end=directory.close)
    first, *rest = job.events()
    assert (first["type"], first["job"], first["missed"]) == ("events_missed", job.id, 7)
    assert [each["type"] for each in rest] == ["worker_started", "worker_exited", "job_ended"]


@pytest.mark.parametrize("result", [ENDED_BADLY, None])
def test_ended_job_has_its_end_as_an_event(directory: JobDirectory, result: Mapping[str, Any] | None) -> None:
    job = Job[Any](known(directory))
    if result is not None:
        directory.keep(result)
    directory.close()
    missed, ended = job.events()
    assert (missed["type"], missed["missed"]) == ("events_missed", None)
    assert (ended["type"], ended["job"], ended["exit_code"]) == ("job_ended", job.id, 3 if result else 0)
    assert ended["rank"] == (1 if result else None)


def test_killed_driver_does_not_end_the_events(tmp_path: Path) -> None:
    (tmp_path / ABOUT).write_text('{"pid": 1}')
    job = Job[Any](KnownJob(tmp_path.name, tmp_path, {}, None, has_driver=True))
    events = job.events()
    assert next(events)["type"] == "events_missed"
    with pytest.raises(DriverGone, match="its driver was killed"):
        next(events)


def test_client_that_pauses_past_the_end_gets_it(tmp_path: Path) -> None:
    def work() -> None:
        while not (tmp_path / "gate").exists():
            time.sleep(0.01)

    job = hvlaunch.Launcher(np=1, quiet=True).start(work)
    events = job.events()
    seen = [next(events)["type"]]
    (tmp_path / "gate").touch()
    assert job.wait(DEADLINE) == 0
    rest = list(events)
    seen += [each["type"] for each in rest]
    assert seen[0] == "job_started"
    assert seen[-2:] == ["events_missed", "job_ended"]
    assert rest[-1]["exit_code"] == 0
    assert rest[-1]["elapsed"] > 0


def test_wrong_arguments_are_named(directory: JobDirectory) -> None:
    job = Job[Any](known(directory))
    wrong: Any
    for wrong in ("FOO", 999, None):
        with pytest.raises(BadUsage, match=f"{wrong!r} is not a signal"):
            job.signal(wrong)
    for wrong in (5, [-1], ["a"], "0-3"):
        with pytest.raises(BadUsage, match="ranks="):
            job.stacks(wrong)
    assert job.stacks([]) == []
    with pytest.raises(BadUsage, match="attach"):
        hvlaunch.attach(5)  # type: ignore[arg-type]
    directory.close()


@pytest.mark.parametrize("name", ["USR1", "sigusr1", signal.SIGUSR1, int(signal.SIGUSR1)])
def test_a_signal_has_its_name_or_number(name: Any, directory: JobDirectory) -> None:
    listener, seen = directory.listen(), []

    def answer() -> None:
        connection, _ = listener.accept()
        with connection, listener, suppress(socket.timeout):
            connection.settimeout(DEADLINE)
            data = b""
            while not data.endswith(b"}"):
                data += connection.recv(1 << 16)
            seen.append(data.rpartition(b"\n")[2])
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    thread = threading.Thread(target=answer)
    thread.start()
    Job[Any](known(directory)).signal(name)
    thread.join()
    directory.close()
    assert seen == [b'{"signal": "SIGUSR1"}']
