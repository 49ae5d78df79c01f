"""The failure report as data: what happened, why as far as it is known, and what each worker did. It has no words but others'."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hvlaunch.job import JobResult, WorkerExit
from hvlaunch.report.evidence import Evidence

__all__ = [
    "Cause",
    "FailureReport",
    "Kind",
    "Memory",
    "Missing",
    "Outcome",
    "Role",
    "RoundFailure",
    "Survivors",
]

Outcome = Literal["running", "well", "failed", "not started", "error", "interrupted"]
"""How the job ended: a worker is the cause; the command could be started nowhere; something else is (a lost host, a hang)."""

Kind = Literal[
    "not started",
    "host memory",
    "gpu memory",
    "missing module",
    "missing file",
    "port taken",
    "disk full",
    "timeout",
    "lost connection",
    "exception",
    "signal",
    "exit code",
]
"""Why a worker failed, as far as its end and its last words tell; the last three are all that is known."""

Role = Literal[
    "cause", "failed", "consequence", "stopped", "finished", "not started", "never started", "unknown"
]
"""What a worker's end has to do with the job's: it is the first cause; it failed itself, or for want of another worker."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a host, or a GPU of it, had in use. Bytes."""

    of: str
    """`host a`, `GPU 0 of host a`."""
    used: int
    total: int
    when: float
    """Seconds since the worker's end; less than 0 is before it."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What a worker did not find, and which other hosts were asked."""

    what: Literal["module", "file"]
    name: str
    there: tuple[str, ...]
    """Hosts that have it."""
    lacking: tuple[str, ...]
    """Hosts that lack it too."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The worker that is the first cause."""

    worker: WorkerExit
    kind: Kind
    evidence: Evidence
    exception: str | None
    """The last line of its traceback, or what stands there in a program that has none."""
    hint: str | None
    memory: tuple[Memory, ...] = ()
    missing: Missing | None = None


@dataclass(frozen=True, slots=True)
class Survivors:
    """What workers were doing before they were stopped."""

    places: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Ranks, and where all of them were; the fewest first."""
    notes: tuple[str, ...] = ()
    """Where stacks are not the best that there could be, and why."""
    tree: tuple[str, ...] = ()
    """Their stacks, merged to one."""
    job_id: str | None = None
    """Under which all are kept, if they are."""


@dataclass(frozen=True, slots=True)
class RoundFailure:
    """A round of an elastic job that ended before its time, and who failed in it."""

    number: int
    size: int
    hosts: tuple[str, ...]
    elapsed: float
    """Seconds from its start to its end."""
    cause: str | None
    failures: tuple[tuple[WorkerExit, Evidence], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """`about` is what the job was begun with, as `about.json` of its directory has it."""

    outcome: Outcome
    result: JobResult
    size: int
    """Workers of the last round."""
    cause: Cause | None = None
    evidence: Mapping[int, Evidence] = field(default_factory=dict)
    """Of each rank that failed or was stopped."""
    survivors: Survivors = field(default_factory=Survivors)
    rounds: tuple[RoundFailure, ...] = ()
    output: Path | None = None
    """Where all output is kept, if it is."""
    about: Mapping[str, Any] = field(default_factory=dict)
    ended: float | None = None
    """Seconds since 1970."""
