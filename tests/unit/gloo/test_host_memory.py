"""What a job remembers of its hosts: which failures speak against a host, and that the next job says so."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.driver.links.agent_channel import CommandConnection
from hvlaunch.engine import events as on
from hvlaunch.errors import CheckFailed, ConnectFailed, HostError, HostLost, PermissionDenied, StartTimeout
from hvlaunch.gloo.controller import HostWays, run
from hvlaunch.gloo.host_memory import HostMemory, verdict_on_worker
from hvlaunch.job import ElasticOptions, Host, JobResult, JobSpec, WorkerExit
from hvlaunch.outside.ledger import VERDICTS, Ledger
from hvlaunch.report.evidence import Evidence
from hvlaunch.report.failure_report import FailureReport, make_report
from hvlaunch.ssh import connect_local
from tests.testhosts.hosts import wait_until

from .elastic_history import arrive, elastic
from .history import History, facts, lost, spec

TRACEBACK = ("Traceback (most recent call last):", '  File "train.py", line 1, in <module>')


@pytest.mark.parametrize(
    ("end", "words", "verdict"),
    [
        ({"code": 1}, (*TRACEBACK, "ValueError: x"), None),
        (
            {"code": 1},
            (*TRACEBACK, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
            "gpu fault",
        ),
        ({"code": 1}, ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",), "gpu fault"),
        ({"code": 1}, ("NVRM: Xid 63 at 0",), "gpu fault"),
        ({"code": 1}, (*TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory."), None),
        ({"code": 1}, (*TRACEBACK, "RuntimeError: CUDA error: device-side assert triggered"), None),
        ({"code": 1}, (*TRACEBACK, "OSError: [Errno 28] No space left on device"), "disk full"),
        ({"code": 1}, (*TRACEBACK, "ModuleNotFoundError: No module named 'x'"), None),
        ({"code": 1}, ("ncclSystemError: System call failed",), "network error"),
        ({"code": 1, "look": "consequence"}, ("ncclSystemError: System call failed",), None),
        ({"signal": signal.SIGKILL, "oom_killed": True}, (), "memory"),
        ({"signal": signal.SIGKILL}, (), "killed"),
        ({"signal": signal.SIGSEGV}, (), "crash"),
        ({"signal": signal.SIGBUS}, (), "crash"),
        ({"signal": signal.SIGABRT}, (), None),
        ({"signal": signal.SIGTERM, "stopped": True}, (), None),
        ({"code": 127, "not_started": "not there"}, (), None),
        ({"code": 3}, (), None),
    ],
)
def test_verdicts_on_the_host_of_a_failed_worker(
    end: dict[str, Any], words: tuple[str, ...], verdict: str | None
) -> None:
    worker = WorkerExit(0, "a", **end)
    assert verdict_on_worker(worker, Evidence("last lines of stderr", words)) == verdict
    assert verdict is None or verdict in VERDICTS


def test_a_file_that_other_hosts_have_is_missing_there() -> None:
    evidence = Evidence("traceback", (*TRACEBACK, "ModuleNotFoundError: No module named 'x'"))
    assert verdict_on_worker(WorkerExit(0, "a", code=1), evidence, lacks_file=True) == "lacks a file"


class Remembered:
    """A history that is watched, and its ledger."""

    def __init__(self, history: History, directory: Path) -> None:
        self.history = history
        self.lines: list[str] = []
        self.ledger = Ledger(directory / "ledger", self.lines.append)
        self.memory = HostMemory(self.ledger, "j0b", history.names, self.lines.append)

    def play(self, *events: on.Event) -> None:
        for event in events:
            self.memory.watch(event, self.history.play(event), self.history.now)

    def verdicts(self, *, code: int = 1) -> list[tuple[str, str, str]]:
        self.memory.keep(JobResult(exit_code=code, elapsed=1.0), lambda result: make_report(result, {}, 1))
        assert [line for line in self.lines if "internal error" in line] == []
        return [(entry.host, entry.verdict, entry.machine) for entry in self.ledger.entries()]


@pytest.fixture
def watch(tmp_path: Path) -> Callable[[str], Remembered]:
    def begin(hosts: str) -> Remembered:
        job = Remembered(History(spec(hosts)), tmp_path)
        job.play(on.Began())
        return job

    return begin


def be_ready(job: Remembered, ids: dict[str, str | None]) -> None:
    for number, (host, machine) in enumerate(ids.items(), 1):
        job.play(
            on.HostConnected(host),
            on.HostReady(host, facts(number, machine_id=machine)),
            on.RendezvousReached(host, "10.0.0.100"),
        )


def test_a_lost_host_is_remembered_by_its_machine(watch: Callable[[str], Remembered]) -> None:
    job = watch("a:1,b:1,c:1")
    be_ready(job, {"a": "m1", "b": "m2", "c": None})
    job.play(lost("b"), on.HostClosed("a"), on.HostClosed("c"))
    assert job.verdicts() == [("b", "lost", "m2")]


def test_hosts_with_one_id_are_told_apart_by_name(watch: Callable[[str], Remembered]) -> None:
    job = watch("a:1,b:1,c:1")
    be_ready(job, {"a": "same", "b": "same", "c": "m3"})
    job.play(lost("b"), on.HostClosed("a"), on.HostClosed("c"))
    assert job.verdicts() == [("b", "lost", "")]


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (StartTimeout("no connection within 60 s", host="b"), "not started"),
        (ConnectFailed("refused", host="b"), "not started"),
        (CheckFailed("gpu ecc: a row of its memory could not be remapped", host="b"), "check failed"),
        (PermissionDenied("no key fits", host="b", hint="", tried=()), None),
    ],
)
def test_a_host_that_does_not_start(
    error: HostError, verdict: str | None, watch: Callable[[str], Remembered]
) -> None:
    job = watch("a:1,b:1,c:1")
    be_ready(job, {"a": None})
    job.play(on.HostFailed("b", error.problem), on.HostClosed("a"))
    assert job.verdicts() == ([] if verdict is None else [("b", verdict, "")])


def test_a_problem_of_most_hosts_is_left_out(watch: Callable[[str], Remembered]) -> None:
    job = watch("a:1,b:1,c:1")
    for host in "abc":
        job.play(on.HostFailed(host, ConnectFailed("no route to host", host=host).problem))
    assert job.verdicts() == []


def test_the_host_for_which_the_others_wait(watch: Callable[[str], Remembered]) -> None:
    job = watch("a:2,b:2")
    be_ready(job, {"a": None, "b": None})
    job.play(on.HostProbed("a", "b", "10.0.0.2"), on.HostProbed("b", "a", "10.0.0.1"))
    job.play(on.JobHangs(60.0, (2, 3), "they wait"))
    assert job.verdicts() == [("b", "hang", "")]
    job.play(on.JobHangs(60.0, (1, 3), "they wait"))
    job.ledger.clear(["b"], "", 0.0)
    before = len(job.ledger.entries())
    job.play(on.JobHangs(60.0, (2,), "they wait"), on.JobGoesOn())
    fresh = Remembered(job.history, job.ledger._path.parent.parent / "fresh")
    fresh.play(on.JobHangs(60.0, (2,), "they wait"), on.JobGoesOn())
    assert fresh.verdicts() == []
    assert len(job.ledger.entries()) == before


@pytest.mark.parametrize("code", [0, 1])
def test_an_excluded_host_counts_if_the_others_did_better(code: int, tmp_path: Path) -> None:
    job = Remembered(elastic("a:1,b:1,c:1", min_np=1, cooldown=(600.0, 600.0)), tmp_path)
    arrive(job.history, "a", "b", "c")
    for number in range(2):
        job.play(on.WorkerExited("b", number, 0, 1, None, job.history.now + 1, start=number, look="cause"))
        for host in "ac":
            job.play(on.WorkerExited(host, number, 0, None, 15, job.history.now + 1, start=number))
        arrive(job.history)
    assert job.verdicts(code=code) == ([("b", "workers fail", "")] if code == 0 else [])


def test_a_defect_costs_the_entries_and_not_the_job(watch: Callable[[str], Remembered]) -> None:
    job = watch("a:1,b:1")

    def fail(_: JobResult) -> FailureReport:
        raise RuntimeError("a defect")

    job.memory.keep(JobResult(exit_code=1, elapsed=1.0), fail)
    assert job.lines == ["internal error: RuntimeError: a defect; nothing of this job's hosts is remembered"]


# Whole jobs


@contextmanager
def by_pipes(*_: object) -> Iterator[HostWays]:
    """Every host is this machine, whatever its name."""

    def connect(host: Host) -> CommandConnection:
        if host.name.startswith("gone"):
            raise ConnectFailed("refused", host=host.name)
        if host.name.startswith("late"):
            wait_until(Path(os.environ["XDG_STATE_HOME"], "begun").exists, "a worker of another host")
        return CommandConnection(connect_local(host), lambda _timeout: connect_local(host))

    yield HostWays(connect, connect)


def job_of(hosts: str, script: str, **changes: Any) -> JobSpec:
    names = tuple(Host(name, slots=1) for name in hosts.split(","))
    command = (sys.executable, "-c", f"import os, signal\nhost = os.environ['HVLAUNCH_HOST']\n{script}")
    return JobSpec(command=command, hosts=names, cwd="/", grace=1.0, settle=0.5, **changes)


ECC_ON_B = (
    "host == 'b' and exit('CUDA error: uncorrectable ECC error encountered')\nhost == 'a' and signal.pause()"
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "hvlaunch" / "ledger"


def run_job(job: JobSpec) -> tuple[JobResult, str]:
    errors = io.BytesIO()
    result = run(job, stdout=io.BytesIO(), stderr=errors, ways=by_pipes)
    return result, errors.getvalue().decode()


def test_the_next_job_names_a_host_that_broke_a_job(state: Path) -> None:
    result, text = run_job(job_of("a,b", ECC_ON_B))
    assert result.exit_code == 1
    assert "earlier jobs" not in text
    (entry,) = Ledger(state, print).entries()
    assert (entry.host, entry.verdict) == ("b", "gpu fault")
    # Both hosts are this machine, so its id tells nothing.
    assert entry.machine == ""
    assert entry.detail == "CUDA error: uncorrectable ECC error encountered"
    result, text = run_job(job_of("a,b", "exit(0)"))
    assert result.exit_code == 0
    lines = [line for line in text.splitlines() if "earlier jobs" in line]
    assert len(lines) == 1
    assert "b (gpu fault: CUDA error: uncorrectable ECC error encountered)" in lines[0]
    assert lines[0].endswith("try: --avoid-suspects, which uses such hosts last")
    assert len(Ledger(state, print).entries()) == 1, "a good job writes nothing"


def test_errors_of_scripts_and_damage_change_nothing(state: Path) -> None:
    for script in ("exit(3)", "raise ValueError", "host == 'b' and [].pop()"):
        assert run_job(job_of("a,b", script))[0].exit_code != 0
    assert not state.exists()
    state.mkdir(mode=0o700)
    (state / "log").write_bytes(b"x" * 100)
    result, text = run_job(job_of("a,b", "exit(0)"))
    assert result.exit_code == 0
    assert text.count("the ledger of hosts is damaged") == 1


def test_an_elastic_job_that_recovers_remembers_the_bad_host(state: Path) -> None:
    options = ElasticOptions(min_np=2, max_np=2, spares=1)
    # The first round has the first two hosts that answer, and must have b.
    script = """
import pathlib, time
place = pathlib.Path(os.environ['XDG_STATE_HOME'])
done = place / 'done'
host == 'b' and ((place / 'begun').touch(), exit('No space left on device'))
host == 'late' and done.touch()
while not done.exists():
    time.sleep(0.02)
"""
    result, _ = run_job(job_of("a,b,late", script, elastic=options))
    assert result.exit_code == 0
    entries = [(entry.host, entry.verdict) for entry in Ledger(state, print).entries()]
    assert ("b", "workers fail") in entries
    assert {host for host, _ in entries} == {"b"}


def test_jobs_of_this_machine_alone_have_no_memory(state: Path) -> None:
    result, _ = run_job(job_of("localhost", "os.kill(os.getpid(), signal.SIGSEGV)"))
    assert result.exit_code == 139
    assert not state.exists()


def test_each_problem_in_the_table_is_an_error_of_hosts() -> None:
    import hvlaunch.errors
    from hvlaunch.gloo.host_memory import _OF_PROBLEMS

    for kind, verdict in _OF_PROBLEMS.items():
        assert issubclass(getattr(hvlaunch.errors, kind), HostError)
        assert verdict in VERDICTS
    assert json.dumps(HostLost("x", host="a").problem.kind) == '"HostLost"'
