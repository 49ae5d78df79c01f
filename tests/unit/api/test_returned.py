"""What workers return, from the frames that bring it to the list of values: whole or not at all."""

import errno
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.api.call_job import values
from hvlaunch.api.errors import JobFailed, WorkerFailed
from hvlaunch.api.in_worker import MARK, SIZE
from hvlaunch.driver.worker_files import ResultFiles
from hvlaunch.errors import HostLost
from hvlaunch.job import JobResult, WorkerExit


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
