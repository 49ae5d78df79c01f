"""The bill of a job: what its time, GPUs and energy went into."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hvlaunch.console.status import count, duration

__all__ = ["Bill", "bill_words", "make_bill"]

_LEAST_SECONDS = 60.0
"""A shorter job is not worth a line."""
_LEAST_SHARE = 0.01
"""Of the time, of a part that is worth a word."""
_MEASURED = 0.9
"""Share of the GPUs' time in which energy must be measured to stand for all of it."""
_HOUR = 3600.0
_JOULES_OF_KWH = 3.6e6


class Bill(NamedTuple):
    """The parts make up `wall_seconds`."""

    wall_seconds: float
    start_seconds: float
    """Until the workers ran or, if they report steps, until the first one."""
    training_seconds: float
    lost_seconds: float
    """In which steps were made that a failure has undone."""
    recovery_seconds: float
    """From each failure or change of the workers until they ran again."""
    hung_seconds: float
    end_seconds: float
    """Since the last worker ran."""
    has_steps: bool
    """False if the workers report neither steps nor commits: the training is then the time in which all of them ran."""
    recoveries: int
    gpu_hours: float | None
    """Of the workers' GPUs; None if unknown."""
    idle_gpu_hours: float | None
    """Of these, outside of the training."""
    energy_joules: float | None
    """As far as it was measured."""
    energy_gpu_hours: float
    """For which the energy was measured."""


def make_bill(
    totals: Mapping[str, Any],
    gpus_of: Callable[[str, int], int | None],
    energy: tuple[float, float] = (0.0, 0.0),
) -> Bill:
    """Make the bill of Totals.at(). `gpus_of` returns the number of GPUs of so many workers of a host; None if unknown.

    `energy`: joules, and the seconds of GPUs for which they were measured.
    """
    parts: Mapping[str, float] = totals["parts"]
    wall = sum(parts.values())
    idle = 1 - parts["training"] / wall if wall else 0.0
    used = [(gpus_of(entry["host"], entry["workers"]), entry["seconds"]) for entry in totals["workers"]]
    hours = None
    if all(gpus is not None for gpus, _ in used):
        hours = sum((gpus or 0) * seconds for gpus, seconds in used) / _HOUR
    joules, measured = energy
    return Bill(
        wall_seconds=round(wall, 3),
        **{f"{name}_seconds": round(seconds, 3) for name, seconds in parts.items()},
        has_steps=totals["has_steps"],
        recoveries=sum(totals["recoveries"]["counts"]),
        gpu_hours=None if hours is None else round(hours, 3),
        idle_gpu_hours=None if hours is None else round(hours * idle, 3),
        energy_joules=round(joules, 1) if measured else None,
        energy_gpu_hours=round(measured / _HOUR, 3),
    )


def bill_words(bill: Bill | None) -> str:
    """Return `96 % training, start 41 s, 2 recoveries 3.0 s, 34.7 GPU hours (1.4 idle), 11.2 kWh`.

    Empty for a short job, and for a job without GPUs that has only run.
    """
    if bill is None or bill.wall_seconds < _LEAST_SECONDS:
        return ""
    words = [*_parts(bill), *_gpus(bill)]
    if not words:
        return ""
    share = f"{100 * bill.training_seconds / bill.wall_seconds:.0f} %"
    return ", ".join([f"{share} {'training' if bill.has_steps else 'running'}", *words])


def _parts(bill: Bill) -> Iterator[str]:
    recovery = "recovery" if not bill.recoveries else count(bill.recoveries, "recovery").replace("ys", "ies")
    for name, seconds, is_rare in (
        ("start", bill.start_seconds, False),
        (recovery, bill.recovery_seconds, bill.recoveries > 0),
        ("lost", bill.lost_seconds, False),
        ("hung", bill.hung_seconds, False),
        ("end", bill.end_seconds, False),
    ):
        if is_rare or seconds >= _LEAST_SHARE * bill.wall_seconds:
            yield f"{name} {duration(seconds)}"


def _gpus(bill: Bill) -> Iterator[str]:
    if bill.gpu_hours:
        yield f"{bill.gpu_hours:.1f} GPU hours ({bill.idle_gpu_hours:.1f} idle)"
        if bill.energy_joules is not None and bill.energy_gpu_hours >= _MEASURED * bill.gpu_hours:
            yield f"{bill.energy_joules / _JOULES_OF_KWH:.1f} kWh"
