"""The wording of a hang for users: the waiting ranks, and the ranks to blame. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hvlaunch.hosts.parse import fold_ranks
from hvlaunch.telemetry.stack import Frame, ProcessStack, main_of, where

__all__ = ["Doing", "How", "Verdict", "doing", "is_collective", "steps_apart", "verdict"]

How = Literal["collective", "waits", "computes", "works", "stopped", "unseen", "ended"]
"""State of a rank. `collective`: waits for other ranks in a collective. `computes`: computes at one place all the time.
`works`: computes at changing places. `unseen`: its host does not answer.
"""

_PLACES_INSIDE = 3
"""Number of places of children and other threads in the text."""
_MOST_STEPS = 3
"""Number of different steps above which no step is usual."""
_COLLECTIVE_FILES = (
    "torch/distributed/",
    "torch/nn/parallel/",
    "torch/autograd/",
    "hvlaunch/torch/",
    "horovod/",
)
"""Libraries with waits for other ranks. DistributedDataParallel reduces gradients below autograd."""
_COLLECTIVE_CALLS = ("MPI_", "PMPI_", "gloo::", "c10d::", "nccl", "pncclComm")


@dataclass(frozen=True, slots=True)
class Doing:
    """State and place of a rank. `inside` has the places of its children and other threads."""

    how: How
    place: str = ""
    inside: tuple[str, ...] = ()
    apart: str = ""
    """Another difference from most ranks, such as its step."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job hangs: no rank has made progress for `seconds`."""

    seconds: float
    ranks: tuple[int, ...]
    """The ranks to blame; every rank if no rank stands out."""
    text: str
    """One paragraph about these ranks and the waiting ranks."""


def is_collective(frames: Sequence[Frame]) -> bool:
    """True if a thread with these frames waits for other ranks."""
    # Only calls below the innermost user frame count: user code may run inside a library's training loop.
    last_own = max((number for number, frame in enumerate(frames) if frame.is_own), default=-1)
    return any(
        frame.short_file.startswith(_COLLECTIVE_FILES) or frame.function.startswith(_COLLECTIVE_CALLS)
        for frame in frames[last_own + 1 :]
    )


def doing(stacks: Sequence[ProcessStack], state: str, *, is_busy: bool) -> Doing:
    """Derive a rank's state from the stacks of its processes and the kernel state of the busiest process."""
    # A host without py-spy may have no stacks: the kernel's state is all there is.
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
    # The same place in several threads is worth one mention.
    inside = tuple(other for other in dict.fromkeys(others) if other != place)[:_PLACES_INSIDE]
    if state == "T":
        return Doing("stopped", place, inside)
    if is_collective(frames):
        return Doing("collective", place, inside)
    return Doing("computes" if is_busy else "waits", place, inside)


def verdict(
    seconds: float,
    ranks: Mapping[int, Doing],
    hosts: Mapping[int, str],
    apart: Mapping[int, str],
    *,
    agreed: str = "",
) -> Verdict:
    """Word the verdict on a job without progress.

    `hosts` maps ranks to hosts. `apart` has a difference from most other ranks, for some ranks. `agreed` is the
    collective that all ranks have begun last, if that is known.
    """
    groups = _groups({rank: replace(state, apart=apart.get(rank, "")) for rank, state in ranks.items()})
    # In a healthy job all ranks meet in a collective: a rank that is elsewhere keeps the others waiting.
    odd = [group for group in groups if group[0].how != "collective"]
    if not odd or len(odd) == len(groups):
        # All ranks are in collectives, or none is: steps and NCCL's counts may still tell who is behind.
        odd = [group for group in groups if group[0].apart]
    waiting = [group for group in groups if group not in odd]
    if not odd or not waiting:
        odd, waiting = _apart(groups)
    texts = [_said(state, members, hosts) for state, members in odd]
    if waiting and odd:
        object_ = "it" if sum(len(members) for _, members in odd) == 1 else "them"
        texts += [_waits(state, members, object_) for state, members in waiting]
    elif waiting:
        state, members = waiting[0]
        texts.append(f"all of them wait {_at(state)}" if len(members) > 1 else _said(state, members, hosts))
        if state.how == "collective" and len(members) > 1:
            # All ranks in one collective: the counts of NCCL, if any, have shown no difference.
            dead = "a connection between them may be dead"
            behind = f"{dead}, or one of them is a collective behind"
            texts.append(f"each has begun {agreed}, so {dead}" if agreed else behind)
    culprits = sorted(rank for _, members in (odd or waiting) for rank in members)
    return Verdict(seconds, tuple(culprits), "; ".join(texts))


def _groups(ranks: Mapping[int, Doing]) -> list[tuple[Doing, list[int]]]:
    """Group ranks by state, the smallest group first."""
    by_state: dict[Doing, list[int]] = {}
    for rank, state in ranks.items():
        by_state.setdefault(state, []).append(rank)
    return sorted(by_state.items(), key=lambda group: (len(group[1]), min(group[1])))


def steps_apart(steps: Mapping[int, int]) -> dict[int, str]:
    """Describe ranks whose newest step differs from the majority's; on a tie, the ranks that are behind."""
    counts = Counter(steps.values())
    # Ranks that count different things have no usual step.
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
    """Split groups if all or no ranks wait in collectives: the largest group waits for the others, if it waits."""
    # Groups of one size do not show which group waits for which.
    is_even = len(groups) > 1 and len(groups[0][1]) == len(groups[-1][1])
    if is_even or groups[-1][0].how not in ("collective", "waits"):
        return list(groups), []
    return list(groups[:-1]), list(groups[-1:])


def _said(state: Doing, members: Iterable[int], hosts: Mapping[int, str]) -> str:
    members = list(members)
    group_hosts = list(dict.fromkeys(hosts[rank] for rank in members if rank in hosts))
    name = fold_ranks(members) + (f" (host {group_hosts[0]})" if len(group_hosts) == 1 else "")
    many = len(members) > 1
    match state.how:
        case "ended":
            return f"{name} {'have' if many else 'has'} ended"
        case "stopped":
            text = f"{name} {'are' if many else 'is'} stopped (SIGSTOP, or a debugger)" + (
                f" {_at(state)}" if state.place else ""
            )
        case "computes":
            text = f"{name} {'compute' if many else 'computes'} {_at(state)}, always there"
        case "unseen":
            text = f"{name} can't be seen: the host does not answer"
        case "works":
            text = f"{name} {'compute' if many else 'computes'}, now {_at(state)}"
        case _:
            text = f"{name} {'wait' if many else 'waits'} {_at(state)}"
    text += f" ({state.apart})" if state.apart else ""
    return text + (f" [also there: {', '.join(state.inside)}]" if state.inside else "")


def _waits(state: Doing, members: Sequence[int], object_: str) -> str:
    return f"{fold_ranks(members)} {'wait' if len(members) > 1 else 'waits'} for {object_} {_at(state)}"


def _at(state: Doing) -> str:
    return f"in {state.place or 'an unknown place'}"
