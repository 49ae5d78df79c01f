"""Why a worker failed, by how it ended and by its last words. Pure."""

import re
from collections.abc import Mapping
from signal import SIGABRT
from typing import Literal

from hvlaunch.job import WorkerExit
from hvlaunch.report.consequences import lost_connection
from hvlaunch.report.data import Kind, Role
from hvlaunch.report.evidence import Evidence

__all__ = ["exception", "kind", "role", "sought"]

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_MODULE = re.compile(r"No module named '?([A-Za-z_][\w.]*)")
_FILE = re.compile(r"(?:No such file or directory: |can't open file )'([^']+)'")
_LAST_WORDS: Mapping[Kind, re.Pattern[str]] = {
    "gpu memory": re.compile(
        r"(?:CUDA|HIP|XPU)(?: error:)? out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY"
    ),
    "host memory": re.compile(r"\bMemoryError|bad_alloc|[Cc]annot allocate memory|can't allocate memory"),
    "missing module": re.compile(rf"{_MODULE.pattern}|error while loading shared libraries"),
    "missing file": re.compile(rf"FileNotFoundError|{_FILE.pattern}|: No such file or directory"),
    "disk full": re.compile("No space left on device"),
    "timeout": re.compile(
        r"(?i)timed out waiting|watchdog caught collective operation timeout|socket timeout|socket has timed out"
        r"|wait timeout|barrier timed out|passed? monitoredbarrier"
    ),
}
"""In the order in which they count: of NCCL's and CUDA's errors the one that says more."""


def kind(worker: WorkerExit, evidence: Evidence) -> Kind:
    """The most that can be said."""
    if worker.not_started is not None or worker.exit_code in (_NOT_EXECUTABLE, _NOT_FOUND):
        return "not started"
    if worker.oom_killed:
        return "host memory"
    if worker.port_taken_by is not None:
        return "port taken"
    if worker.signal is not None and worker.signal != SIGABRT and not worker.stopped:
        return "signal"
    words = "\n".join(evidence.verdict)
    if (found := next((name for name, text in _LAST_WORDS.items() if text.search(words)), None)) is not None:
        return found
    if lost_connection(evidence):
        return "lost connection"
    if evidence.has_traceback:
        return "exception"
    return "exit code" if worker.signal is None else "signal"


def exception(evidence: Evidence) -> str | None:
    """What a traceback says that was raised."""
    return evidence.verdict[0] if evidence.has_traceback and evidence.verdict else None


def sought(words: str) -> tuple[Literal["module", "file"], str] | None:
    """What a worker has not found, by its last words."""
    for what, pattern in (("module", _MODULE), ("file", _FILE)):
        if found := [*pattern.finditer(words)]:
            return ("module" if what == "module" else "file"), found[-1][1].rstrip(".")
    return None


def role(worker: WorkerExit, cause: WorkerExit | None, evidence: Evidence | None) -> Role:
    """What this worker's end has to do with the job's."""
    if worker is cause:
        return "cause"
    if worker.not_started is not None:
        return "not started"
    if worker.ok:
        return "finished"
    if worker.stopped:
        return "stopped"
    has_lost = evidence is not None and lost_connection(evidence)
    return "consequence" if has_lost or worker.look == "consequence" else "failed"
