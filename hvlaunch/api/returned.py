"""What the workers have returned, as the driver has kept it: values by rank, and errors in the place of those that failed."""

import io
import json
import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvlaunch.api.errors import JobFailed, JobStopped, ResultNotRead, WorkerFailed
from hvlaunch.api.in_worker import MARK, SIZE
from hvlaunch.driver.result_files import PROBLEM
from hvlaunch.job import JobResult, WorkerExit

__all__ = ["error_of", "values"]

_MOST_FACTS = 1 << 24


def values(result: JobResult, directory: Path, *, return_exceptions: bool) -> list[Any]:
    """What each rank of the last round has returned; None of one that was stopped because the job had ended well.

    Raises WorkerFailed, JobFailed, JobStopped, ResultNotRead; with `return_exceptions` those of single ranks are in the list.
    """
    error = None if result.exit_code == 0 else error_of(result, directory)
    if error is not None and not (return_exceptions and result.size):
        raise error
    found = [_value(result, directory, rank, error) for rank in range(result.size)]
    if not return_exceptions:
        for value in found:
            if isinstance(value, _Failure):
                raise value.error
    return [value.error if isinstance(value, _Failure) else value for value in found]


class _Failure:
    """That a rank has not returned a value, which may itself be an exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def error_of(result: JobResult, directory: Path) -> Exception:
    """Why the job has failed."""
    if result.interrupted is not None:
        return JobStopped(result.interrupted)
    if result.failure is not None:
        return _failed(result, directory, result.failure.rank)
    if result.error is not None:
        return JobFailed(result.error)
    return _failed(result, directory, next((end.rank for end in result.exits if not end.ok), 0))


def _value(result: JobResult, directory: Path, rank: int, error: Exception | None) -> Any:
    path = directory / str(rank)
    facts, end = _facts(path), _ends(result).get(rank)
    has_failed = error is not None and end is not None and _has_failed(end)
    if facts is not None and facts["kind"] == "value" and not has_failed:
        try:
            with path.open("rb") as file:
                return pickle.load(file)  # noqa: S301 (of a worker of this user's, over the job's session: docs/security.md)
        except Exception as cause:  # noqa: BLE001 (of any kind: unpickling runs the value's own code)
            unread = ResultNotRead(_one_line(cause), rank=rank)
            unread.__cause__ = cause
            return _Failure(unread)
    if error is None and facts is None and end is not None and end.stopped:
        return None
    if facts is None and isinstance(error, JobFailed | JobStopped) and (end is None or end.stopped):
        return _Failure(error)
    return _Failure(_failed(result, directory, rank))


def _has_failed(end: WorkerExit) -> bool:
    """Whether the worker has ended by itself, and not well."""
    return not end.stopped and (end.signal is not None or end.code not in (None, 0))


def _failed(result: JobResult, directory: Path, rank: int) -> WorkerFailed:
    facts, ends = _facts(directory / str(rank)), _ends(result)
    end = ends.get(rank)
    is_error = facts is not None and facts["kind"] == "error"
    error = WorkerFailed(
        f"{facts['type']}: {facts['text']}"
        if facts is not None and is_error
        else _cause(end, directory, rank, has_returned=facts is not None),
        rank=rank,
        host="" if end is None else end.host,
        traceback=facts["traceback"] if facts is not None and is_error else None,
        end=end,
        others=[each for number, each in sorted(ends.items()) if number != rank],
    )
    if facts is not None and is_error:
        error.__cause__ = _raised(directory / str(rank), facts)
    return error


def _cause(end: WorkerExit | None, directory: Path, rank: int, *, has_returned: bool) -> str:
    with suppress(OSError):
        return f"what it returned could not be kept: {(directory / f'{rank}{PROBLEM}').read_text()}"
    if end is None:
        return "nothing is known of its end"
    if end.not_started is not None:
        return f"it could not be started: {end.not_started}"
    if end.stopped:
        return "it was stopped, since the job had failed"
    if end.oom_killed:
        cause = "it was killed, since its host ran out of memory"
    elif end.signal is not None:
        cause = f"it was ended by signal {end.signal}"
    else:
        cause = f"it ended with exit code {end.code}" + ("" if has_returned else ", and returned nothing")
    return f"{cause}, after it had returned" if has_returned else cause


def _ends(result: JobResult) -> Mapping[int, WorkerExit]:
    return {end.rank: end for end in result.exits}


def _facts(path: Path) -> Mapping[str, Any] | None:
    """What stands at the end of a result; None where it is not whole."""
    tail = len(MARK) + SIZE.size
    try:
        with path.open("rb") as file:
            end = file.seek(0, io.SEEK_END)
            file.seek(max(0, end - tail))
            last = file.read()
            if len(last) != tail or not last.endswith(MARK):
                return None
            (size,) = SIZE.unpack_from(last)
            file.seek(max(0, end - tail - min(size, _MOST_FACTS)))
            facts: Mapping[str, Any] = json.loads(file.read(size))
    except (OSError, ValueError):
        return None
    return facts if facts["start"] + facts["size"] + size + tail == end else None


def _raised(path: Path, facts: Mapping[str, Any]) -> BaseException | None:
    """What the function has raised, where it could be sent and can be read."""
    with suppress(Exception), path.open("rb") as file:
        file.seek(facts["start"])
        error = pickle.loads(file.read(facts["size"]))  # noqa: S301 (as above)
        if isinstance(error, BaseException):
            return error
    return None


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
