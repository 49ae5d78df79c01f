"""What a call has on this machine: its files, however it ends, and what workers return, whole or not at all."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvlaunch.api.call_job import CallDirectory, values
from hvlaunch.api.errors import JobFailed, WorkerFailed
from hvlaunch.api.in_worker import MARK, SIZE
from hvlaunch.driver.worker_files import ResultFiles
from hvlaunch.errors import HostLost
from hvlaunch.job import JobResult, WorkerExit
from tests.testhosts.places import wait_until


def result(value: object, kind: str = "value") -> bytes:
    """As a worker writes it."""
    body = pickle.dumps(value)
    facts = {"kind": kind, "start": 0, "size": len(body), "type": "T", "text": "text", "traceback": "story"}
    tail = json.dumps(facts).encode()
    return body + tail + SIZE.pack(len(tail)) + MARK


def ended(size: int, code: int = 0, **more: Any) -> JobResult:
    exits = tuple(WorkerExit(rank, "h", code=0) for rank in range(size))
    return JobResult(exit_code=code, elapsed=1.0, exits=exits, size=size, **more)


def test_results_are_stored_by_the_final_rank(tmp_path: Path) -> None:
    files = ResultFiles(tmp_path)
    data = {worker: result(f"of {worker}") for worker in range(3)}
    for start in range(0, max(map(len, data.values())), 10):
        for worker, whole in data.items():
            files.write_part((0, worker, 0), 2 - worker, whole[start : start + 10] or b"")
    files.write_part((0, 2, 0), 0, b"")
    files.close()
    assert values(ended(3), tmp_path, return_exceptions=False) == ["of 2", "of 1", "of 0"]


@pytest.mark.parametrize("cut", [0, 1, 5, 20, 60])
def test_incomplete_result_is_ignored(tmp_path: Path, cut: int) -> None:
    whole = result("x")
    (tmp_path / "0").write_bytes(whole[: len(whole) - cut])
    if not cut:
        assert values(ended(1), tmp_path, return_exceptions=False) == ["x"]
        return
    with pytest.raises(WorkerFailed, match="rank 0 on h: it ended with exit code 0, and returned no value"):
        values(ended(1), tmp_path, return_exceptions=False)


def test_a_later_worker_of_a_rank_counts(tmp_path: Path) -> None:
    files = ResultFiles(tmp_path)
    for start in range(2):
        files.write_part((0, 0, start), 0, result(start))
        files.write_part((0, 0, start), 0, b"")
    assert values(ended(1), tmp_path, return_exceptions=False) == [1]


def test_full_disk_loses_the_result_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, _data: bytes) -> int:
            raise OSError(errno.ENOSPC, "full")

    files = ResultFiles(tmp_path)
    monkeypatch.setattr(files, "_file", lambda *_: Full())
    files.write_part((0, 0, 0), 0, b"some")
    monkeypatch.undo()
    files.write_part((0, 0, 0), 0, b"more")
    files.write_part((0, 0, 0), 0, b"")
    files.close()
    with pytest.raises(WorkerFailed, match="could not be kept: no space left on device"):
        values(ended(1), tmp_path, return_exceptions=False)


def test_ranks_of_lost_hosts_have_that_error(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(result("here"))
    lost = ended(1, 69, error=HostLost("lost", host="b").problem)._replace(size=2)
    first, second = values(lost, tmp_path, return_exceptions=True)
    assert first == "here"
    assert isinstance(second, JobFailed)
    assert (second.host, second.problem.kind, second.exit_code) == ("b", "HostLost", 69)
    with pytest.raises(JobFailed, match="host b: lost"):
        values(lost, tmp_path, return_exceptions=False)


def test_an_exception_that_was_returned_is_a_value(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(result(ValueError("a value")))
    [value] = values(ended(1), tmp_path, return_exceptions=False)
    assert isinstance(value, ValueError)


ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 100.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """For the files of calls."""
    place = tmp_path / "tmp"
    place.mkdir()
    return place


def begin(tmp_path: Path, text: str) -> "subprocess.Popen[str]":
    """A program that calls functions."""
    program = tmp_path / f"program{len(list(tmp_path.glob('program*.py')))}.py"  # another may not be read yet
    program.write_text(text)
    return subprocess.Popen(
        [sys.executable, program],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(tmp_path / "tmp"),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


FORKS = """
import gc, multiprocessing, os, sys, time, hvlaunch
from concurrent.futures import ThreadPoolExecutor
def work():
    while not os.path.exists({gate!r}):
        time.sleep(0.01)
    return "done"
def forked(child):
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
def in_a_child():
    job.stop()
    assert job.wait(1) == 0
launcher = hvlaunch.Launcher(np=1, quiet=True)
"""
START = "job = launcher.start(work); job.id\n"
FORK, LET_GO = "forked(lambda: None)\n", "open({gate!r}, 'w').close()\n"
END = "print(job.results())\n"
FORKING = {
    "while it runs": START + FORK + LET_GO + END,
    "in another thread": "pool = ThreadPoolExecutor(1)\nrun = pool.submit(launcher.run, work)\n"
    "while not hvlaunch.jobs() or hvlaunch.jobs()[0].state != 'running': time.sleep(0.01)\n"
    + FORK
    + LET_GO
    + "print(run.result())\n",
    "multiprocessing": START
    + "child = multiprocessing.get_context('fork').Process(target=gc.collect)\nchild.start()\nchild.join()\n"
    "assert child.exitcode == 0\n" + LET_GO + END,
    "a child lets it go": START + LET_GO + "job.wait()\nforked(lambda: globals().pop('job'))\n" + END,
    "a child uses it": START + LET_GO + "job.wait()\nforked(in_a_child)\n" + END,
}


@pytest.mark.parametrize("how", FORKING)
def test_a_fork_of_the_caller_takes_no_result_from_it(how: str, tmp_path: Path, place: Path) -> None:
    text = (FORKS + FORKING[how]).format(gate=str(tmp_path / "gate"))
    assert begin(tmp_path, text).communicate(timeout=DEADLINE) == ("['done']\n", "")
    assert not list(place.iterdir())


ENDS = """
import os, time, hvlaunch
def work():
    open({mark!r}, "w").write(str(os.getpid()))
    time.sleep(100)
"""
RUN, STARTED = "hvlaunch.run(work, np=1, quiet=True)\n", "hvlaunch.Launcher(np=1, quiet=True).start(work)"


SIDE_BY_SIDE = f"""
jobs = [{STARTED}, {STARTED}]
try:
    [job.results() for job in jobs]
except KeyboardInterrupt:
    for job in jobs:
        job.stop()
    raise
"""


@pytest.mark.parametrize(
    ("number", "calls"),
    [
        (signal.SIGTERM, RUN),
        (signal.SIGHUP, RUN),
        (signal.SIGKILL, RUN),
        (signal.SIGINT, RUN),
        (signal.SIGINT, SIDE_BY_SIDE),
    ],
)
def test_files_go_when_a_signal_ends_the_caller(number: int, calls: str, tmp_path: Path, place: Path) -> None:
    mark = tmp_path / "mark"
    process = begin(tmp_path, ENDS.format(mark=str(mark)) + calls)
    wait_until(lambda: mark.exists() and mark.read_text(), "the worker runs")
    assert list(place.glob("hvlaunch-call-*"))
    process.send_signal(number)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == -number
    wait_until(lambda: not list(place.iterdir()), "nothing is left")
    assert not psutil.pid_exists(int(mark.read_text()))


def test_files_go_when_the_caller_is_killed_before_the_job(tmp_path: Path, place: Path) -> None:
    killed = f"job = {STARTED}\nassert os.listdir({str(place)!r})\nos.kill(os.getpid(), 9)\n"
    process = begin(tmp_path, ENDS.format(mark=str(tmp_path / "mark")) + killed)
    process.communicate(timeout=DEADLINE)
    wait_until(lambda: not list(place.iterdir()), "nothing is left")


def test_unreferenced_job_ends_with_the_caller(tmp_path: Path, place: Path) -> None:
    mark = tmp_path / "mark"
    text = ENDS.format(mark=str(mark)) + f"{STARTED}\nwhile not os.path.exists({str(mark)!r}): pass\n"
    process = begin(tmp_path, text)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert not list(place.iterdir())
    assert not psutil.pid_exists(int(mark.read_text() or 0))


KEPT = """
import os, sys
from hvlaunch.api.call_job import CallDirectory
directory = CallDirectory()
directory.program.touch()
print(directory.path, flush=True)
sys.stdin.read()
"""


def test_files_of_a_killed_caller_are_removed_by_the_next_call(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = [begin(tmp_path, KEPT) for _ in range(3)]
    old, young, living = (Path(caller.stdout.readline().strip()) for caller in callers if caller.stdout)
    for caller in callers[:2]:
        caller.kill()
        caller.communicate(timeout=DEADLINE)
    (other := place / "hvlaunch-call-of-another").symlink_to(tmp_path)
    for path in (old, living):
        os.utime(path, (0, 0))
    monkeypatch.setattr("tempfile.tempdir", str(place))
    directory = CallDirectory()
    assert set(place.iterdir()) == {young, living, other, directory.path}
    directory.remove()
    directory.remove()
    assert set(place.iterdir()) == {young, living, other}
    callers[2].kill()
    callers[2].communicate(timeout=DEADLINE)
