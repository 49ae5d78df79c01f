"""A hang as a user is told of it: which ranks wait, and for which. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hvlaunch.hosts.parse import fold_ranks
from hvlaunch.telemetry.stack import Frame, ProcessStack, main_of, where

__all__ = ["Doing", "How", "Verdict", "doing", "is_collective", "steps_apart", "verdict"]

How = Literal["collective", "waits", "computes", "works", "stopped", "unseen", "ended"]
"""`collective`: it waits for other ranks in one. `computes`: at one place all the time; `works`: here and there.
`unseen`: its host does not answer.
"""

_PLACES_INSIDE = 3
"""Of its children and other threads, how many are told."""
_MOST_STEPS = 3
"""Of more than so many different ones, none is usual."""
_COLLECTIVE_FILES = (
    "torch/distributed/",
    "torch/nn/parallel/",
    "torch/autograd/",
    "hvlaunch/torch/",
    "horovod/",
)
"""Libraries that wait for other ranks: autograd where DistributedDataParallel reduces gradients."""
_COLLECTIVE_CALLS = ("MPI_", "PMPI_", "gloo::", "c10d::", "nccl", "pncclComm")


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank does, and where; `inside` has the places of its children and other threads."""

    how: How
    place: str = ""
    inside: tuple[str, ...] = ()
    apart: str = ""
    """How else it differs from most others."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job hangs, since `seconds` ago: no rank has got on."""

    seconds: float
    ranks: tuple[int, ...]
    """Those that the others wait for; all, where none stands out."""
    text: str
    """One paragraph about them and those who wait."""


def is_collective(frames: Sequence[Frame]) -> bool:
    """Whether who has these calls waits for other ranks."""
    own = max((number for number, frame in enumerate(frames) if frame.is_own), default=-1)
    return any(
        frame.short_file.startswith(_COLLECTIVE_FILES) or frame.function.startswith(_COLLECTIVE_CALLS)
        for frame in frames[own + 1 :]
    )


def doing(stacks: Sequence[ProcessStack], state: str, *, is_busy: bool) -> Doing:
    """What a rank does by the stacks of its processes and the state of the busiest."""
    if not stacks:
        return Doing("stopped" if state == "T" else "waits")
    main = main_of(stacks)
    frames = main.threads[0].frames if main.threads else ()
    place = where(frames)
    others = [
        where(thread.frames)
        for process in stacks
        for number, thread in enumerate(process.threads)
        if not (process is main and number == 0) and not thread.is_helper
    ]
    inside = tuple(one for one in dict.fromkeys(others) if one != place)[:_PLACES_INSIDE]
    if state == "T":
        return Doing("stopped", place, inside)
    if is_collective(frames):
        return Doing("collective", place, inside)
    return Doing("computes" if is_busy else "waits", place, inside)


def verdict(
    seconds: float, ranks: Mapping[int, Doing], hosts: Mapping[int, str], apart: Mapping[int, str]
) -> Verdict:
    """What is to be said of a job none of whose ranks has got on for so long.

    `hosts` has the hosts of the ranks; `apart`, of some, how they differ from most others, beside what they do.
    """
    groups = _groups({rank: replace(one, apart=apart.get(rank, "")) for rank, one in ranks.items()})
    odd = [group for group in groups if group[0].how != "collective"]
    if not odd or len(odd) == len(groups):
        odd = [group for group in groups if group[0].apart]
    waiting = [group for group in groups if group not in odd]
    if not odd or not waiting:
        odd, waiting = _apart(groups)
    texts = [_said(one, who, hosts) for one, who in odd]
    if waiting and odd:
        object_ = "it" if sum(len(who) for _, who in odd) == 1 else "them"
        texts += [_waits(one, who, object_) for one, who in waiting]
    elif waiting:
        one, who = waiting[0]
        texts.append(f"all of them wait {_at(one)}" if len(who) > 1 else _said(one, who, hosts))
        if one.how == "collective" and len(who) > 1:
            texts.append("a connection between them may be dead, or one of them is a collective behind")
    culprits = sorted(rank for _, who in (odd or waiting) for rank in who)
    return Verdict(seconds, tuple(culprits), "; ".join(texts))


def _groups(ranks: Mapping[int, Doing]) -> list[tuple[Doing, list[int]]]:
    """Ranks that do the same, those of the fewest first."""
    found: dict[Doing, list[int]] = {}
    for rank, one in ranks.items():
        found.setdefault(one, []).append(rank)
    return sorted(found.items(), key=lambda group: (len(group[1]), min(group[1])))


def steps_apart(steps: Mapping[int, int]) -> dict[int, str]:
    """By the newest step of those that tell it: of ranks that are at another step than most; of those that have not made one that others have, at a tie."""
    counts = Counter(steps.values())
    if not 1 < len(counts) <= _MOST_STEPS:
        return {}
    usual = max(counts, key=lambda step: (counts[step], step))
    return {
        rank: f"at step {step}, {'others' if len(counts) > 2 else 'the others'} at {usual}"  # noqa: PLR2004 (two steps)
        for rank, step in steps.items()
        if step != usual
    }


def _apart(
    groups: Sequence[tuple[Doing, list[int]]],
) -> tuple[list[tuple[Doing, list[int]]], list[tuple[Doing, list[int]]]]:
    """Where all wait, or none does, in collectives: the most on one side, if they wait, the others on the other."""
    is_even = len(groups) > 1 and len(groups[0][1]) == len(groups[-1][1])
    if is_even or groups[-1][0].how not in ("collective", "waits"):
        return list(groups), []
    return list(groups[:-1]), list(groups[-1:])


def _said(one: Doing, who: Iterable[int], hosts: Mapping[int, str]) -> str:
    who = list(who)
    there = list(dict.fromkeys(hosts[rank] for rank in who if rank in hosts))
    name = fold_ranks(who) + (f" (host {there[0]})" if len(there) == 1 else "")
    many = len(who) > 1
    match one.how:
        case "ended":
            return f"{name} {'have' if many else 'has'} ended"
        case "stopped":
            text = f"{name} {'are' if many else 'is'} stopped (SIGSTOP, or a debugger)" + (
                f" {_at(one)}" if one.place else ""
            )
        case "computes":
            text = f"{name} {'compute' if many else 'computes'} {_at(one)}, always there"
        case "unseen":
            text = f"{name} can't be seen: the host does not answer"
        case "works":
            text = f"{name} {'compute' if many else 'computes'}, now {_at(one)}"
        case _:
            text = f"{name} {'wait' if many else 'waits'} {_at(one)}"
    text += f" ({one.apart})" if one.apart else ""
    return text + (f" [also there: {', '.join(one.inside)}]" if one.inside else "")


def _waits(one: Doing, who: Sequence[int], object_: str) -> str:
    return f"{fold_ranks(who)} {'wait' if len(who) > 1 else 'waits'} for {object_} {_at(one)}"


def _at(one: Doing) -> str:
    return f"in {one.place or 'an unknown place'}"
