"""The bill of a job: what its time, GPUs and energy went into."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvlaunch.console.status import count, duration
from hvlaunch.named_tuples import NamedTuple

__all__ = ["Bill", "best_interval", "bill_words", "commit_words", "make_bill"]

_LEAST_SECONDS = 60.0
"""A shorter job is not worth a line."""
_LEAST_SHARE = 0.01
"""Of the time, of a part that is worth a word."""
_MEASURED = 0.9
"""Share of the GPUs' time in which energy must be measured to stand for all of it."""
_BRIEF = 0.1
"""Seconds; milliseconds are the unit of shorter durations."""
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
    failures: int = 0
    """Number of rounds with a failure."""
    commits: int = 0
    """Number of commits by rank 0; the other ranks commit at the same steps."""
    commit_seconds: float | None = None
    """Mean delay of training by a commit; None without commits."""
    commit_every: float | None = None
    """Best interval of commits; None without commits or failures."""
    save_seconds: float | None = None
    """Mean duration of a write to the directory of --save-to; None without any."""
    save_every: float | None = None
    """Best interval of writes to the directory; None without writes or failures."""
    save_trouble: str | None = None
    """Cause of missing writes at the end, if the ranks are the cause."""


def make_bill(
    totals: Mapping[str, Any],
    gpus_of: Callable[[str, int], int | None],
    energy: tuple[float, float] = (0.0, 0.0),
    costs: Mapping[str, Any] | None = None,
) -> Bill:
    """Make the bill of Totals.at(). `gpus_of` returns the number of GPUs of so many workers of a host; None if unknown.

    `energy`: joules, and the seconds of GPUs for which they were measured. `costs`: the costs of commits, None without commits.
    """
    parts: Mapping[str, float] = totals["parts"]
    trained = parts["training"] + parts["lost"]
    intervals = {} if costs is None else _intervals(costs, trained, totals["failures"])
    wall = sum(parts.values())
    seconds: dict[str, Any] = {f"{name}_seconds": round(part, 3) for name, part in parts.items()}
    idle = 1 - parts["training"] / wall if wall else 0.0
    used = [(gpus_of(entry["host"], entry["workers"]), entry["seconds"]) for entry in totals["workers"]]
    hours = None
    if all(gpus is not None for gpus, _ in used):
        hours = sum((gpus or 0) * seconds for gpus, seconds in used) / _HOUR
    joules, measured = energy
    return Bill(
        wall_seconds=round(wall, 3),
        **seconds,
        has_steps=totals["has_steps"],
        recoveries=sum(totals["recoveries"]["counts"]),
        gpu_hours=None if hours is None else round(hours, 3),
        idle_gpu_hours=None if hours is None else round(hours * idle, 3),
        energy_joules=round(joules, 1) if measured else None,
        energy_gpu_hours=round(measured / _HOUR, 3),
        failures=totals["failures"],
        **intervals,
    )


def _intervals(costs: Mapping[str, Any], trained: float, failures: int) -> dict[str, Any]:
    """Return the bill's fields about commits. `trained`: seconds of training, lost work included."""
    seconds = costs["delayed"] / costs["commits"]
    saves = costs["saves"]
    save_seconds = sum(saves) / len(saves) if saves else None
    commit_every = save_every = None
    if failures and trained:
        # Writing in the background delays no step, but the next commit waits for the end of the last.
        commit_every = round(max(best_interval(seconds, trained / failures), costs["whole"]), 3)
        if save_seconds is not None:
            save_every = round(best_interval(save_seconds, trained / failures), 3)
    return {
        "commits": costs["commits"],
        "commit_seconds": round(seconds, 6),
        "commit_every": commit_every,
        "save_seconds": None if save_seconds is None else round(save_seconds, 3),
        "save_every": save_every,
        "save_trouble": costs["trouble"],
    }


def best_interval(cost: float, between_failures: float) -> float:
    """Return the best interval of commits in seconds, sqrt(2 * cost * between_failures). `cost`: seconds of a commit.

    Source: J. W. Young, "A First Order Approximation to the Optimum Checkpoint Interval", Communications of the ACM 17 (9), 1974.
    Commits of more than twice `between_failures` pay at this interval: J. T. Daly, "A Higher Order Estimate of the Optimum
    Checkpoint Interval for Restart Dumps", Future Generation Computer Systems 22 (3), 2006.
    """
    return (2 * cost * between_failures) ** 0.5 if cost < 2 * between_failures else between_failures


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


def commit_words(bill: Bill | None) -> str:
    """Return `commits: 132, 0.40 s each; a failure every 41 min 0 s; saving every 44.4 s would cost least (Young/Daly); ...`.

    Empty for a short job, and without commits or failures. A cause of missing writes stands alone.
    """
    if bill is None:
        return ""
    if bill.save_trouble is not None:
        return f"commits were not saved to --save-to: {bill.save_trouble}"
    if bill.wall_seconds < _LEAST_SECONDS or bill.commit_seconds is None or bill.commit_every is None:
        return ""
    trained = bill.training_seconds + bill.lost_seconds
    words = [
        f"commits: {bill.commits}, {_short(bill.commit_seconds)} each",
        f"a failure every {duration(trained / bill.failures)}",
        f"saving every {_short(bill.commit_every)} would cost least (Young/Daly)",
        f"you saved every {_short(trained / bill.commits)}",
    ]
    if bill.save_seconds is not None and bill.save_every is not None:
        words.append(
            f"a write to --save-to took {_short(bill.save_seconds)}: --save-every {bill.save_every:.0f}"
        )
    return "; ".join(words)


def _short(seconds: float) -> str:
    return duration(seconds) if seconds >= _BRIEF else f"{1000 * seconds:.1f} ms"
