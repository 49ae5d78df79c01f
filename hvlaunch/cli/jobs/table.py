"""Jobs in a table for people, and as objects for programs."""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hvlaunch.console.duration import duration
from hvlaunch.console.visible import visible
from hvlaunch.hosts.fold import host_set
from hvlaunch.outside.known import KnownJob

__all__ = ["job_record", "job_table", "state_word"]

State = Mapping[str, Any] | None
"""What the job's driver says of it now; None where it says nothing."""
_HEAD = ("JOB", "NAME", "STATE", "ROUND", "WORKERS", "HOSTS", "BEGAN", "COMMAND")
_WIDEST = 40
"""Letters of a cell, but for the last."""


def job_table(jobs: Sequence[tuple[KnownJob, State]], now: float | None = None) -> str:
    """One line for each job, below their heads."""
    now = time.time() if now is None else now
    rows = [_HEAD, *(_row(job, state, now) for job, state in jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    lines = ("  ".join([*map(str.ljust, row[:-1], widths), row[-1]]) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _row(job: KnownJob, state: State, now: float) -> tuple[str, ...]:
    current = None if state is None else state["round"]
    hosts = [] if state is None else [host["host"] for host in state["hosts"] if host["state"] == "ready"]
    cells = (
        job.id,
        str(job.about.get("name") or "-"),
        state_word(job, state),
        "-" if current is None else str(current["number"]),
        "-" if state is None else str(len(state["workers"])),
        host_set(hosts) if hosts else "-",
        f"{duration(max(0.0, now - job.began))} ago",
    )
    command = job.about.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    return (*(_cut(visible(cell)) for cell in cells), visible(" ".join(shlex.join(words).split())))


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def state_word(job: KnownJob, state: State) -> str:
    """`running`, `exit code 1`; where the driver says nothing, why."""
    if job.result is not None:
        return f"exit code {job.result.get('exit_code')}"
    if state is not None:
        return str(state["phase"])
    machine = job.about.get("machine")
    if machine != os.uname().nodename:
        return f"on {machine}"
    return "no answer" if job.has_driver else "driver killed"


def job_record(job: KnownJob, state: State) -> Mapping[str, Any]:
    """All that is known of a job."""
    return {**job.about, "id": job.id, "has_driver": job.has_driver, "state": state, "result": job.result}
