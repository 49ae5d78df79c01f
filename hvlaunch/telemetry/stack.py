"""Stacks of workers and of their children: what they are, and the form in which a host sends them. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, Literal

from hvlaunch.agent.wire.shapes import exactly, flag, of, or_null, record, several, text, whole
from hvlaunch.hosts.parse import fold_ranks

__all__ = [
    "STACKS",
    "Frame",
    "Node",
    "ProcessStack",
    "Source",
    "ThreadStack",
    "as_json",
    "from_json",
    "groups",
    "main_of",
    "merge",
    "notes",
    "places",
    "process_stacks",
    "summary",
    "tree_lines",
    "where",
    "whole_stacks",
]


Source = Literal["py-spy", "faulthandler", "kernel"]

_MOST_PROCESSES = 4096
_MOST_THREADS = 256
_MOST_FRAMES = 256
_NAME = text(256)
_PATH = text(1024)
_COUNT = whole(0, 1 << 31)

_SHAPE = {
    "rank": _COUNT,
    "pid": whole(1, 1 << 22),
    "command": _PATH,
    "is_child": flag,
    "source": of("py-spy", "faulthandler", "kernel"),
    "problem": or_null(text(512)),
    "threads": several(_COUNT, _MOST_THREADS),
}
_THREAD = {
    "name": _NAME,
    "is_python": flag,
    "frames": several(
        lambda frame: (
            exactly(lambda _: True, 3)(frame) and _NAME(frame[0]) and _PATH(frame[1]) and _COUNT(frame[2])
        ),
        _MOST_FRAMES,
    ),
}
STACKS = {
    "threads": several(record(_THREAD), _MOST_PROCESSES * _MOST_THREADS),
    "stacks": several(record(_SHAPE), _MOST_PROCESSES),
}
"""What a host may send: each thread once, and stacks with the numbers of their threads."""
_STACKS = record(STACKS)

_LIBRARIES = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Frame:
    """A call that has not returned. `file` is a path, or empty where it is not known; `line` is 0 then."""

    function: str
    file: str
    line: int

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own code, and not a library's, Python's or the kernel's."""
        return bool(self.file) and _library_part(self.file) is None

    @property
    def short_file(self) -> str:
        """Enough of the path to know the file by."""
        path = PurePosixPath(self.file)
        return _library_part(self.file) or "/".join(
            path.parts[-2:] if path.stem.startswith("__") else path.parts[-1:]
        )

    def __str__(self) -> str:
        if not self.file:
            return self.function
        return f"{self.function} ({self.short_file}{f':{self.line}' if self.line else ''})"


@lru_cache(maxsize=1 << 14)
def _library_part(file: str) -> str | None:
    """The path from the library on; None where the file is none of a library."""
    parts = PurePosixPath(file).parts
    if file.startswith(("<frozen", "[")) or any(".so" in name for name in parts[-1:]):
        return parts[-1]
    for number, part in enumerate(parts):
        if part in _LIBRARIES:
            return "/".join(parts[number + 1 :])
    for number, part in enumerate(parts[:-1]):
        if part in ("lib", "lib64") and parts[number + 1].startswith(("python3", "pypy3")):
            return "/".join(parts[number + 2 :])
    return None


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread. `is_python` is whether its frames are Python's."""

    name: str
    frames: tuple[Frame, ...]
    """The outermost first."""
    is_python: bool

    @property
    def is_helper(self) -> bool:
        """Whether nothing of the user's own runs in it."""
        return not any(frame.is_own for frame in self.frames)


@dataclass(frozen=True, slots=True)
class ProcessStack:
    """A worker's process, or one of a worker's children, at one moment."""

    host: str
    rank: int
    pid: int
    command: str
    is_child: bool
    """Whether it is a descendant of the worker's process."""
    threads: tuple[ThreadStack, ...]
    """The main thread first."""
    source: Source
    problem: str | None = None
    """Why there is no better stack of it, and what to do about it, in one line."""

    @property
    def is_python(self) -> bool:
        return any(thread.is_python for thread in self.threads)


def process_stacks(host: str, found: Any) -> tuple[ProcessStack, ...] | None:
    """What a host has sent; None where it has not the form."""
    if not _STACKS(found):
        return None
    threads = [
        ThreadStack(one["name"], tuple(Frame(*frame) for frame in one["frames"]), one["is_python"])
        for one in found["threads"]
    ]
    if any(number >= len(threads) for one in found["stacks"] for number in one["threads"]):
        return None
    return tuple(
        ProcessStack(host=host, **{**one, "threads": tuple(threads[number] for number in one["threads"])})
        for one in found["stacks"]
    )


def as_json(stacks: Iterable[ProcessStack]) -> dict[str, Any]:
    """As programs get them: `threads` has each once, `stacks` the processes with the numbers of their threads."""
    numbers: dict[ThreadStack, int] = {}
    known: dict[int, int] = {}  # by identity: to find an equal one costs as much as it is deep
    found = []
    for one in stacks:
        for thread in one.threads:
            if id(thread) not in known:
                known[id(thread)] = numbers.setdefault(thread, len(numbers))
        mine = {name: getattr(one, name) for name in ProcessStack.__slots__}
        found.append({**mine, "threads": [known[id(thread)] for thread in one.threads]})
    return {"threads": [_thread(thread) for thread in numbers], "stacks": found}


def _thread(thread: ThreadStack) -> dict[str, Any]:
    frames = [{"function": one.function, "file": one.file, "line": one.line} for one in thread.frames]
    return {"name": thread.name, "frames": frames, "is_python": thread.is_python}


def from_json(found: Mapping[str, Any]) -> list[ProcessStack]:
    """Those of as_json()."""
    threads = [
        ThreadStack(one["name"], tuple(Frame(**frame) for frame in one["frames"]), one["is_python"])
        for one in found["threads"]
    ]
    return [
        ProcessStack(**{**one, "threads": tuple(threads[number] for number in one["threads"])})
        for one in found["stacks"]
    ]


def whole_stacks(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The processes of as_json(), each with its threads themselves."""
    threads = found["threads"]
    return [{**one, "threads": [threads[number] for number in one["threads"]]} for one in found["stacks"]]


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
