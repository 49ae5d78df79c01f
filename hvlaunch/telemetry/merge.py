"""Stacks of many ranks as one text: equal ones are one, with the set of their ranks. Pure.

As in STAT (Arnold et al., "Stack Trace Analysis for Large Scale Debugging", IPDPS 2007) they make a tree that has a
branch where they part. Here the branch of the fewest ranks comes first: it is the one to look at.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvlaunch.hosts.parse import fold_ranks
from hvlaunch.telemetry.stack import Frame, ProcessStack, ThreadStack

__all__ = ["Node", "groups", "main_of", "merge", "notes", "places", "summary", "tree_lines", "where"]

_WRAPPERS = frozenset(
    ("wrapper", "inner", "wrapped", "_wrapped_call_impl", "_call_impl", "decorate_context", "_fn", "__call__")
)
_MOST_GROUPS = 12
_LONGEST_COMMAND = 60
_NOTHING = "unknown: it had ended, or could not be read"


@dataclass(frozen=True, slots=True)
class Node:
    """Some calls that one or more ranks have in common, the outermost first, and where these ranks part."""

    ranks: frozenset[int]
    frames: tuple[Frame, ...]
    branches: tuple["Node", ...] = ()
    """Those of the fewest ranks first. A rank whose stack ends here is in none; one with several stacks may be in several."""


def merge(stacks: Iterable[tuple[int, Sequence[Frame]]]) -> Node:
    """The tree of these ranks' stacks."""
    ranks: dict[int, set[int]] = {}
    known: dict[
        int, Sequence[Frame]
    ] = {}  # most are one and the same: to compare them costs as much as they are deep
    for rank, frames in stacks:
        known[id(frames)] = frames
        ranks.setdefault(id(frames), set()).add(rank)
    return _merge([(frozenset(ranks[number]), tuple(frames)) for number, frames in known.items()])


def _merge(stacks: Sequence[tuple[frozenset[int], tuple[Frame, ...]]]) -> Node:
    common = _common([frames for _, frames in stacks])
    heads: dict[Frame, list[tuple[frozenset[int], tuple[Frame, ...]]]] = {}
    for ranks, frames in stacks:
        rest = frames[len(common) :]
        if rest:
            heads.setdefault(rest[0], []).append((ranks, rest))
    branches = sorted(
        (_merge(one) for one in heads.values()),
        key=lambda node: (len(node.ranks), min(node.ranks), _order(node.frames)),
    )
    return Node(frozenset().union(*(ranks for ranks, _ in stacks)), common, tuple(branches))


def _common(stacks: Sequence[tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """The frames with which all of them begin."""
    if not stacks:
        return ()
    first, last = min(stacks, key=_order), max(stacks, key=_order)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


def _order(frames: Sequence[Frame]) -> list[tuple[str, str, int]]:
    return [(frame.function, frame.file, frame.line) for frame in frames]


def where(frames: Sequence[Frame]) -> str:
    """In a few words: what the user's own code calls, and from which line; `all_reduce (train.py:88)`."""
    if not frames:
        return _NOTHING
    own = [number for number, frame in enumerate(frames) if frame.is_own]
    if not own:
        return str(frames[-1])
    last = frames[own[-1]]
    called = [
        frame.function
        for frame in frames[own[-1] + 1 :]
        if frame.function.rpartition(".")[2] not in _WRAPPERS
    ]
    return str(Frame(called[0] if called else last.function, last.file, last.line))


def main_of(processes: Sequence[ProcessStack]) -> ProcessStack:
    """Of a rank's processes the one that tells what the rank does: the first of Python, else the worker itself."""
    pythons = [one for one in processes if one.is_python]
    return next(
        iter(pythons or [one for one in processes if _program(one).startswith("python")] or processes)
    )


def _program(process: ProcessStack) -> str:
    return process.command.partition(" ")[0].rpartition("/")[2]


def _by_rank(stacks: Iterable[ProcessStack]) -> dict[int, list[ProcessStack]]:
    found: dict[int, list[ProcessStack]] = {}
    for one in sorted(stacks, key=lambda one: (one.rank, one.is_child)):
        found.setdefault(one.rank, []).append(one)
    return found


def groups(stacks: Iterable[ProcessStack]) -> list[tuple[frozenset[int], str]]:
    """Which ranks are where, the fewest first."""
    found: dict[str, set[int]] = {}
    for rank, processes in _by_rank(stacks).items():
        main = main_of(processes)
        found.setdefault(where(main.threads[0].frames if main.threads else ()), set()).add(rank)
    rarest = sorted(found.items(), key=lambda group: (len(group[1]), min(group[1])))
    return [(frozenset(ranks), place) for place, ranks in rarest]


def places(parts: Sequence[tuple[Iterable[int], str]], most: int = _MOST_GROUPS) -> list[str]:
    """The same in words: `rank 7 in sleep (data.py:31)`. The last has all but the first `most`."""
    lines = [f"{fold_ranks(ranks)} in {place}" for ranks, place in parts[:most]]
    if rest := [rank for ranks, _ in parts[most:] for rank in ranks]:
        lines.append(f"{fold_ranks(rest)} in {len(parts) - most} other places")
    return lines


def summary(stacks: Iterable[ProcessStack], most: int = _MOST_GROUPS) -> str:
    """All places in one line."""
    return "; ".join(places(groups(stacks), most))


def tree_lines(stacks: Iterable[ProcessStack]) -> list[str]:
    """All of it: a tree for the workers' main threads, one for each kind of other threads and of children."""
    ranks = _by_rank(stacks)
    mains, others, helpers = _Trees(), _Trees(), 0
    for rank, processes in ranks.items():
        main = main_of(processes)
        mains.add("", rank, main.threads[0].frames if main.threads else ())
        for one in processes:
            for number, thread in enumerate(one.threads):
                if one is main and number == 0:
                    continue
                if number and thread.is_helper:
                    helpers += 1
                else:
                    others.add(_title(one, thread, is_main=number == 0), rank, thread.frames)
    lines = [*mains.lines(), *others.lines()]
    if helpers:
        lines.append(f"{helpers} helper thread{'' if helpers == 1 else 's'} of libraries")
    return [*lines, *_notes(ranks)]


def _title(process: ProcessStack, thread: ThreadStack, *, is_main: bool) -> str:
    _, blank, rest = process.command.partition(" ")
    command = f"{_program(process)}{blank}{rest}"
    command = command if len(command) <= _LONGEST_COMMAND else f"{command[: _LONGEST_COMMAND - 3]}..."
    if is_main:
        return f"child {command}" if process.is_child else f"the worker itself, {command}"
    return f"thread {thread.name}" + (f" of child {command}" if process.is_child else "")


class _Trees:
    """Stacks that are shown as one tree, by their title."""

    def __init__(self) -> None:
        self._stacks: dict[str, list[tuple[int, Sequence[Frame]]]] = {}

    def add(self, title: str, rank: int, frames: Sequence[Frame]) -> None:
        self._stacks.setdefault(title, []).append((rank, frames))

    def lines(self) -> list[str]:
        lines: list[str] = []
        for title, stacks in self._stacks.items():
            body = _branch(merge(stacks), "")
            lines += [f"{title}:", *(f"  {line}" for line in body)] if title else body
        return lines


def _branch(node: Node, indent: str) -> list[str]:
    frames = [str(frame) for frame in node.frames]
    ends = node.ranks.difference(*(branch.ranks for branch in node.branches))
    lines = []
    if frames or not node.branches:
        lines.append(f"{indent}{fold_ranks(node.ranks)}: {frames[0] if frames else _NOTHING}")
        lines += [f"{indent}  {frame}" for frame in frames[1:]]
        indent += "  "
    if frames and node.branches and ends:
        lines.append(f"{indent}{fold_ranks(ends)}: here")
    elif node.branches and ends:
        lines.append(f"{indent}{fold_ranks(ends)}: {_NOTHING}")
    for branch in node.branches:
        lines += _branch(branch, indent)
    return lines


def notes(stacks: Iterable[ProcessStack]) -> list[str]:
    """Which ranks' stacks are not by py-spy, and why."""
    return _notes(_by_rank(stacks))


def _notes(ranks: dict[int, list[ProcessStack]]) -> list[str]:
    found: dict[tuple[str, str], set[int]] = {}
    for rank, processes in ranks.items():
        main = main_of(processes)
        if main.source != "py-spy":
            found.setdefault((main.source, main.problem or ""), set()).add(rank)
    return [
        f"{fold_ranks(known)} by {'the kernel' if source == 'kernel' else source}"
        + (f": {problem}" if problem else "")
        for (source, problem), known in found.items()
    ]
