"""Functions on this machine: what they return and raise, what they print, and what is left when they are done."""

import asyncio
import atexit
import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

import hvlaunch
from hvlaunch.api import call_job, launcher
from hvlaunch.errors import BadUsage
from tests.pythons import find
from tests.testhosts.places import wait_until

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 100.0
HERE = sys.modules[__name__]


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers can't import this module; and what calls leave is seen."""
    cloudpickle.register_pickle_by_value(HERE)
    scratch, state = tmp_path / "tmp", tmp_path / "state"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    yield
    cloudpickle.unregister_pickle_by_value(HERE)


def rank() -> int:
    return int(os.environ["RANK"])


class Custom(Exception):
    """An error with more than a text."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> Any:
        return Custom, (self.code,)


class Counter:
    def __init__(self, start: int) -> None:
        self.start = start

    def count(self, more: int) -> int:
        return self.start + more + rank()


def typed() -> list[int]:
    """For the type checker: a function's own type is in what comes of it."""
    launcher = hvlaunch.Launcher(np=2)
    job: hvlaunch.Job[int] = launcher.start(rank)
    kept: list[int | Exception] = launcher.run(rank, return_exceptions=True)
    assert kept
    return [*job.results(), *hvlaunch.run(rank, np=2, hosts={"a": 2})]


def test_functions_of_any_kind_return_by_rank() -> None:
    outer = 100
    launcher = hvlaunch.Launcher(np=2, quiet=True)
    assert launcher.run(lambda: outer + rank()) == [100, 101]
    assert launcher.run(Counter(10).count, (5,)) == [15, 16]
    assert launcher.run(Counter(10).count, kwargs={"more": 1}) == [11, 12]
    assert launcher.run(os.path.join, ("a", "b")) == ["a/b", "a/b"]


def test_exception_of_a_worker_is_raised_with_its_traceback() -> None:
    def fail(code: int) -> None:
        if rank() == 1:
            raise Custom(code)
        time.sleep(DEADLINE)

    with pytest.raises(hvlaunch.WorkerFailed) as caught:
        hvlaunch.run(fail, (7,), np=2, quiet=True)
    error = caught.value
    assert (error.rank, error.host, error.exit_code) == (1, "localhost", 1)
    assert isinstance(error.__cause__, Custom)
    assert error.__cause__.code == 7
    assert error.traceback is not None
    assert "in fail" in error.traceback
    assert "in_worker" not in error.traceback
    # The job's output has the traceback: a notebook would show it twice more.
    assert str(error) == "rank 1 on localhost: Custom: code 7"
    with pytest.raises(hvlaunch.WorkerFailed) as kept:
        hvlaunch.Launcher(np=2, quiet=True).start(fail, (7,)).results()
    assert str(kept.value).startswith("rank 1 on localhost: Custom: code 7\n\nTraceback")
    assert [(end.rank, end.stopped) for end in error.others] == [(0, True)]


def test_with_return_exceptions_no_rank_ends_another() -> None:
    def some() -> int:
        if rank() == 0:
            raise Custom(3)
        if rank() == 1:
            os._exit(9)
        return rank()

    def only_one() -> int:
        if rank() == 0:
            raise Custom(3)
        return rank()

    first, second = hvlaunch.run(only_one, np=2, quiet=True, return_exceptions=True)
    assert isinstance(first, hvlaunch.WorkerFailed)
    assert isinstance(first.__cause__, Custom)
    assert second == 1
    ends = hvlaunch.run(some, np=2, quiet=True, return_exceptions=True)
    assert [type(end).__name__ for end in ends] == ["WorkerFailed", "WorkerFailed"]
    assert "exit code 9" in str(ends[1])


def test_long_error_keeps_its_beginning_and_end() -> None:
    def fail() -> None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 (for as long as the process)
        raise ValueError("<" + "x" * 20_000_000 + ">")

    with pytest.raises(hvlaunch.WorkerFailed) as caught:
        hvlaunch.run(fail, np=1, quiet=True)
    assert len(str(caught.value)) < 3_000_000
    assert "ValueError: <xxx" in str(caught.value)
    assert "18951426 characters are left out" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(str(caught.value.__cause__)) == 20_000_002


def test_forked_child_of_a_worker_returns_no_result() -> None:
    def fork() -> str:
        if os.fork() == 0:
            return "child"
        os.wait()
        return "parent"

    assert hvlaunch.run(fork, np=1, quiet=True) == ["parent"]


def test_a_function_may_call_another_in_workers_of_its_own() -> None:
    def outer() -> list[int]:
        return hvlaunch.run(rank, np=2, quiet=True)

    assert hvlaunch.run(outer, np=1, quiet=True) == [[0, 1]]


def test_a_display_that_fails_costs_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    def show(status: Any) -> None:
        shown.append(status)
        raise RuntimeError("the kernel's socket is closed")

    monkeypatch.setattr("hvlaunch.api.launcher.notebook_bar", lambda: show)
    assert hvlaunch.Launcher(np=2, quiet=True).start(rank, show=True).results(DEADLINE) == [0, 1]
    assert shown[-1] is None


def test_an_interrupt_while_the_driver_is_started_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    started: list[int] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        process = start(*args, **kwargs)
        started.append(process.pid)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hvlaunch.run(rank, np=1, quiet=True)
    [pid] = started
    assert not psutil.pid_exists(pid)


def test_a_result_that_cannot_be_pickled_is_named_with_its_rank() -> None:
    def lock() -> object:
        return [b"x" * 100_000, threading.Lock()] if rank() == 1 else None

    with pytest.raises(hvlaunch.WorkerFailed, match="rank 1 on localhost: ResultNotPickled: its value"):
        hvlaunch.run(lock, np=2, quiet=True)


def test_a_result_that_cannot_be_read_here_is_named_with_its_rank() -> None:
    def unreadable() -> object:
        class Odd:
            def __reduce__(self) -> "tuple[object, tuple[str]]":
                return os.remove, ("/nonexistent/file",)

        return Odd()

    with pytest.raises(hvlaunch.ResultNotRead, match=r"rank 0.*FileNotFoundError"):
        hvlaunch.run(unreadable, np=1, quiet=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ((lambda value: value, (1, threading.Lock())), "argument 2 of"),
        ((lambda: LOCK, ()), "or a value that it uses,"),
        ((3, ()), "3 is not a function"),
    ],
)
def test_unpicklable_function_is_refused_before_the_start(
    call: tuple[Any, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(hvlaunch.CallNotPickled, match=words):
        hvlaunch.run(call[0], call[1], np=2)
    assert not list((tmp_path / "tmp").iterdir())


LOCK: Any = threading.Lock()


def test_a_large_result_comes_whole() -> None:
    def large() -> bytes:
        return bytes([rank()]) * (20 << 20)

    assert hvlaunch.run(large, np=2, quiet=True) == [bytes([number]) * (20 << 20) for number in range(2)]


def test_output_goes_to_the_streams_of_this_process() -> None:
    def talk() -> None:
        sys.stdout.write("to stdout\n")
        sys.stderr.write("to stderr\n")

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        hvlaunch.run(talk, np=1)
    assert out.getvalue() == "[0]<stdout>: to stdout\n"
    assert "[0]<stderr>: to stderr\n" in err.getvalue()


def test_unencodable_output_is_escaped(tmp_path: Path) -> None:
    def talk() -> None:
        sys.stdout.buffer.write("before\n→ and ü\nafter\ncut: ".encode() + b"\xe2\x86")

    path = tmp_path / "out"
    with path.open("w", encoding="latin-1") as file, contextlib.redirect_stdout(file):
        hvlaunch.run(talk, np=1, prefix="")
    assert path.read_text(encoding="latin-1") == "before\n\\u2192 and ü\nafter\ncut: \\ufffd\n"


@pytest.mark.parametrize("how", ["none", "closed", "ascii"])
def test_exception_is_sent_although_stderr_is_unusable(how: str) -> None:
    def fail() -> None:
        if how == "none":
            sys.stderr = None
        elif how == "closed":
            sys.stderr.close()
        else:
            sys.stderr = io.TextIOWrapper(sys.stderr.buffer, encoding="ascii", errors="strict")
        raise LookupError("für nichts")

    err = io.StringIO()
    with (
        pytest.raises(hvlaunch.WorkerFailed, match="LookupError: für nichts") as caught,
        contextlib.redirect_stderr(err),
    ):
        hvlaunch.run(fail, np=1)
    assert isinstance(caught.value.__cause__, LookupError)
    assert ("<stderr>: LookupError: f\\xfcr nichts\n" in err.getvalue()) == (how == "ascii")


def test_a_worker_that_fails_after_it_has_returned_says_so() -> None:
    def work() -> int:
        atexit.register(os._exit, 3)
        return 5

    words = "rank 0 on localhost: it ended with exit code 3, after it had returned"
    with pytest.raises(hvlaunch.WorkerFailed, match=words):
        hvlaunch.run(work, np=1, quiet=True)
    [error] = hvlaunch.run(work, np=1, quiet=True, return_exceptions=True)
    assert words in str(error)


def test_job_has_state_and_results() -> None:
    def wait_for_signal() -> int:
        got = []
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while not got:
            time.sleep(0.01)
        sys.stdout.write("last")
        return rank()

    job = hvlaunch.Launcher(np=2).start(wait_for_signal)
    lines = job.output()
    first = sorted(next(lines)[:3] for _ in range(2))
    assert first == [(0, "stdout", "ready"), (1, "stdout", "ready")]
    wait_until(lambda: job.state == "running", "it runs")
    assert job.hosts == ["localhost"]
    assert next(job.events())["type"] == "job_started"
    found = hvlaunch.attach(job.id)
    assert [each.id for each in hvlaunch.jobs()] == [job.id]
    stacks = found.stacks([1])
    assert [stack["rank"] for stack in stacks] == [1]
    with pytest.raises(TimeoutError):
        job.wait(0.01)
    with pytest.raises(TimeoutError):
        found.wait(0.01)
    with pytest.raises(hvlaunch.ResultLost):
        found.results()
    found.signal(signal.SIGUSR1)
    assert sorted(line[:3] for line in lines) == [(0, "stdout", "last"), (1, "stdout", "last")]
    assert job.results(DEADLINE) == [0, 1]
    assert (job.wait(), found.wait(), job.state) == (0, 0, "exit code 0")
    assert [event["type"] for event in found.events()] == ["events_missed", "job_ended"]


def test_elastic_job_returns_the_values_of_the_last_round() -> None:
    def in_the_second_round() -> tuple[int, str]:
        if os.environ["HVLAUNCH_ROUND"] == "0":
            if rank() == 1:
                sys.exit(3)
            time.sleep(DEADLINE)
        return rank(), os.environ["HVLAUNCH_ROUND"]

    found = hvlaunch.run(
        in_the_second_round, np=2, min_np=1, hosts="localhost:2", cooldown=(0.1, 0.2), quiet=True
    )
    assert found == [(0, "1"), (1, "1")]


def test_a_job_can_be_stopped() -> None:
    job = hvlaunch.Launcher(np=1).start(time.sleep, (DEADLINE,))
    wait_until(lambda: job.state == "running", "it runs")
    job.stop()
    assert job.wait(DEADLINE) == 128 + signal.SIGTERM
    with pytest.raises(hvlaunch.JobStopped):
        job.results()


def test_call_checks_arguments_by_their_types() -> None:
    def power(base: int, *, exponent: int = 1) -> int:
        return int(base**exponent)

    launcher = hvlaunch.Launcher(np=2, quiet=True)
    values: list[int] = launcher.call(power, 2, exponent=3)
    assert values == [8, 8]
    # mypy reports an ignored error that is none.
    with pytest.raises(hvlaunch.WorkerFailed, match="TypeError"):
        launcher.call(power, "2")  # type: ignore[arg-type]
    with pytest.raises(hvlaunch.WorkerFailed, match="TypeError"):
        launcher.call(power, 2, power=3)  # type: ignore[call-arg]


def test_the_cause_of_a_failed_job_is_raised_and_not_printed_too(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(hvlaunch.JobFailed, match=r"nohost\.invalid can't be resolved"):
        hvlaunch.run(rank, hosts="nohost.invalid:1")
    assert capfd.readouterr().err == ""
    # The first message is news: an elastic job waits for other hosts.
    with pytest.raises(hvlaunch.JobFailed, match="can't be resolved"):
        hvlaunch.run(rank, hosts="nohost.invalid:1", min_np=1, elastic_timeout=0.5)
    news, waiting = capfd.readouterr().err.splitlines()
    assert "can't be resolved" in news
    assert "waiting for 1 slot" in waiting
    # wait() raises nothing.
    assert hvlaunch.Launcher(hosts="nohost.invalid:1").start(rank, show=True).wait(60) == 69
    assert "can't be resolved" in capfd.readouterr().err


def test_options_that_are_wrong_are_named_as_they_are_in_python() -> None:
    with pytest.raises(BadUsage, match="np=0: 0 is not between 1"):
        hvlaunch.run(rank, np=0)
    with pytest.raises(
        TypeError, match=r"^run\(\) got an unexpected keyword argument 'nps'; did you mean 'np'\?$"
    ):
        hvlaunch.run(rank, nps=2)  # type: ignore[call-overload]
    with pytest.raises((BadUsage, hvlaunch.JobFailed), match=r"only 2 slots; try: np=2, or more slots"):
        hvlaunch.run(rank, np=3, hosts="localhost:2")
    with pytest.raises(BadUsage, match=r"args is of type int, not a sequence; try: args=\(value,\)"):
        hvlaunch.run(rank, 5)  # type: ignore[call-overload]
    with pytest.raises(BadUsage, match="kwargs is of type list, not a mapping"):
        hvlaunch.run(rank, (), [])  # type: ignore[call-overload]


def test_another_python_is_named() -> None:
    """A function that travels whole is code of one version."""
    other = find("3.14" if sys.version_info[:2] != (3, 14) else "3.13")
    if other is None:
        pytest.skip("there is no other Python here")
    with pytest.raises(
        hvlaunch.WorkerFailed, match=r"WrongPython: the function is of Python .*; try: python=PATH"
    ):
        hvlaunch.run(rank, np=1, quiet=True, python=other)


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.long)])
def test_nothing_is_left_of_many_calls(tmp_path: Path, count: int) -> None:
    """Neither processes, nor threads, files or descriptors; errors and threads of the caller's change nothing."""

    def fail() -> None:
        raise Custom(1)

    def left() -> tuple[list[int], int, set[str], list[Path]]:
        gc.collect()
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        threads = {thread.name for thread in threading.enumerate()}
        return children, psutil.Process().num_fds(), threads, list((tmp_path / "tmp").iterdir())

    launcher = hvlaunch.Launcher(np=1, quiet=True)
    assert launcher.run(rank) == [0]  # what stays of the first is what modules are made of
    before = left()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: launcher.run(rank), range(count))) == [[0]] * count
    with pytest.raises(hvlaunch.WorkerFailed):
        launcher.run(fail)
    assert left() == before
    assert len(list((tmp_path / "state/hvlaunch/jobs").iterdir())) == 1  # that which failed


def test_asyncio_waits_for_several_calls_and_stops_cancelled_ones(tmp_path: Path) -> None:
    def mark_and_sleep() -> None:
        (tmp_path / "mark").write_text(str(os.getpid()))
        time.sleep(DEADLINE)

    async def calls() -> None:
        launcher = hvlaunch.Launcher(np=1, quiet=True)
        numbers, words = await asyncio.gather(launcher.arun(rank), launcher.arun(lambda: "b"))
        assert (numbers, words) == ([0], ["b"])
        task = asyncio.ensure_future(launcher.arun(mark_and_sleep))
        await asyncio.to_thread(wait_until, (tmp_path / "mark").exists, "the worker runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(calls())
    assert not list((tmp_path / "tmp").iterdir())
    pid = int((tmp_path / "mark").read_text())
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_asyncio_goes_on_while_a_call_begins(
    is_cancelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, begins, may_begin = call_job.write_archive, threading.Event(), threading.Event()

    def written(*args: Any, **kwargs: Any) -> None:
        begins.set()
        assert may_begin.wait(DEADLINE / 10), "the loop goes on"
        write(*args, **kwargs)

    async def call() -> None:
        numbers = [1]
        task = asyncio.ensure_future(hvlaunch.Launcher(np=1, quiet=True).arun(lambda: numbers))
        assert await asyncio.to_thread(begins.wait, DEADLINE)
        numbers.append(2)
        if is_cancelled:
            task.cancel()
        asyncio.get_running_loop().call_soon(may_begin.set)
        if not is_cancelled:
            assert await task == [[1]]
            return
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not list((tmp_path / "tmp").iterdir())

    monkeypatch.setattr(launcher, "write_archive", written)
    of_other_tests = psutil.Process().children()
    asyncio.run(call())
    assert set(psutil.Process().children()) <= {*of_other_tests}


PROGRAM = """
import os, time, hvlaunch
def work():
    open({mark!r}, "w").write(str(os.getpid()))
    time.sleep(100)
try:
    hvlaunch.run(work, np=1)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_the_workers_end_with_the_caller(how: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(mark=str(mark)))
    process = subprocess.Popen(
        [sys.executable, program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: mark.exists() and mark.read_text(), "the worker runs")
    process.send_signal(signal.SIGINT if how == "interrupted" else signal.SIGKILL)
    out, _ = process.communicate(timeout=DEADLINE)
    assert (out, process.returncode) == (("interrupted\n", 0) if how == "interrupted" else ("", -9))
    pid = int(mark.read_text())
    wait_until(lambda: not psutil.pid_exists(pid), "the worker has ended")
