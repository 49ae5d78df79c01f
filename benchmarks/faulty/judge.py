"""Whether a job came to what its fault allows: code, named cause, leftovers, lost lines, time."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.faulty.kind import Kind, Must

__all__ = ["ALLOWANCE", "OUTPUT_LOST", "Outcome", "judge", "shown_lines"]

ALLOWANCE = 20.0
"""Seconds that are allowed beyond what is promised, for a machine that many share."""
OUTPUT_LOST = 74


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was seen of a job.

    `moment` is when the fault came, `at_end` the code with which it was to end when the fault came while it was ending, else None. `code` is None where it had not
    ended within `seconds`, which count from the fault. `messages` are hvlaunch's own. `written` is how many lines each worker had
    written, `shown` the numbers of those that were seen; `left` is what was left.
    """

    host: str
    code: int | None
    seconds: float
    messages: str
    written: Mapping[str, int]
    shown: Mapping[str, Sequence[int]]
    left: Sequence[str] = ()
    at_end: int | None = None
    moment: str = "running"


def shown_lines(stdout: bytes) -> dict[str, list[int]]:
    """The numbers of each worker's lines."""
    shown: dict[str, list[int]] = {}
    line = rb"^\[\d+\]<stdout>: (\S+) line (\d+) (?:\.{40}|={1000}|y)$"
    for name, number in re.findall(line, stdout, re.MULTILINE):
        shown.setdefault(name.decode(), []).append(int(number))
    return shown


def judge(kind: Kind, must: Must, outcome: Outcome) -> list[str]:
    """What is wrong; nothing where all is right."""
    if outcome.code is None:
        return [f"it had not ended {outcome.seconds:.0f} s after the fault", *_left(kind, outcome)]
    found = []
    as_told = outcome.at_end is not None and outcome.code == outcome.at_end
    if outcome.code not in must.codes and not as_told:
        found.append(f"its code is {outcome.code}, not {' or '.join(map(str, must.codes))}")
    elif _must_say(must, outcome) and not as_told and not _says(must, outcome):
        found.append(f"nothing it says is like {must.words!r}")
    if re.search(r"^Traceback|^hvlaunch: .*defect of hvlaunch", outcome.messages, re.MULTILINE):
        found.append("it shows a traceback or a defect of its own")
    if outcome.seconds > must.within + ALLOWANCE:
        found.append(f"it took {outcome.seconds:.1f} s to end, and {must.within:g} are promised")
    return found + _lost_lines(kind, outcome) + _left(kind, outcome)


def _must_say(must: Must, outcome: Outcome) -> bool:
    return outcome.code != 0 or (must.always and outcome.moment == "running")


def _says(must: Must, outcome: Outcome) -> bool:
    return re.search(must.words.replace("{host}", outcome.host), outcome.messages) is not None


def _left(kind: Kind, outcome: Outcome) -> list[str]:
    allowed = rf"{outcome.host}: {kind.leaves}" if kind.leaves else "(?!)"
    return [f"left: {what}" for what in outcome.left if not re.match(allowed, what)]


def _lost_lines(kind: Kind, outcome: Outcome) -> list[str]:
    """Lines that were written and not shown, or shown twice, or not in their order."""
    found = []
    for name, numbers in outcome.shown.items():
        if list(numbers) != sorted(set(numbers)):
            found.append(f"worker {name}: lines in disorder, or twice")
    if kind.loses == "all" or outcome.code == OUTPUT_LOST:
        return found
    for name, count in outcome.written.items():
        if kind.loses == "host" and name.startswith(f"{outcome.host}."):
            continue
        missing = sorted(set(range(count)) - set(outcome.shown.get(name, ())))
        if missing:
            found.append(
                f"worker {name}: {len(missing)} of {count} lines are lost, the first is {missing[0]}"
            )
    return found
