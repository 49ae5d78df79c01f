"""Stacks of workers and their children: their form on the wire, and one readable text from the stacks of many ranks. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, Literal

from hvlaunch.agent.wire.frames import exactly, flag, of, or_null, record, several, text, whole
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
"""The form of a host's stacks: each thread once, and processes with the numbers of their threads."""
_STACKS = record(STACKS)

_LIBRARIES = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Frame:
    """A call without a return yet. `file` is empty and `line` 0 if the place is unknown."""

    function: str
    file: str
    line: int

    @property
    def is_own(self) -> bool:
        """True for user code; false for code of a library, Python or the kernel."""
        return bool(self.file) and _library_part(self.file) is None

    @property
    def short_file(self) -> str:
        """The part of the path by which a reader recognizes the file."""
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
    """Return the path below the library's folder; None for a file outside libraries."""
    parts = PurePosixPath(file).parts
    # Frames of frozen modules, of the kernel ([...]) and of native libraries have no Python source.
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
    """A thread. `is_python` is true if its frames are Python's."""

    name: str
    frames: tuple[Frame, ...]
    """Outermost frame first."""
    is_python: bool

    @property
    def is_helper(self) -> bool:
        """True if no user code runs in the thread."""
        return not any(frame.is_own for frame in self.frames)


@dataclass(frozen=True, slots=True)
class ProcessStack:
    """A process of a worker, or of a worker's child, at one moment."""

    host: str
    rank: int
    pid: int
    command: str
    is_child: bool
    """True for a descendant of the worker's process."""
    threads: tuple[ThreadStack, ...]
    """Main thread first."""
    source: Source
    problem: str | None = None
    """Reason for the lack of a better stack, and a remedy, in a line."""

    @property
    def is_python(self) -> bool:
        return any(thread.is_python for thread in self.threads)


def process_stacks(host: str, answer: Any) -> tuple[ProcessStack, ...] | None:
    """Parse a host's stacks; None if their form is wrong."""
    if not _STACKS(answer):
        return None
    threads = [
        ThreadStack(entry["name"], tuple(Frame(*frame) for frame in entry["frames"]), entry["is_python"])
        for entry in answer["threads"]
    ]
    # The numbers are the host's: an index beyond the list must not become an exception.
    if any(number >= len(threads) for entry in answer["stacks"] for number in entry["threads"]):
        return None
    return tuple(
        ProcessStack(host=host, **{**entry, "threads": tuple(threads[number] for number in entry["threads"])})
        for entry in answer["stacks"]
    )


def as_json(stacks: Iterable[ProcessStack]) -> dict[str, Any]:
    """Return stacks as JSON: `threads` has each thread once, `stacks` the processes with the numbers of their threads."""
    numbers: dict[ThreadStack, int] = {}
    # Keyed by identity: comparing equal threads costs as much as their depth, and most ranks share a few.
    number_by_id: dict[int, int] = {}
    entries = []
    for stack in stacks:
        for thread in stack.threads:
            if id(thread) not in number_by_id:
                number_by_id[id(thread)] = numbers.setdefault(thread, len(numbers))
        fields = {name: getattr(stack, name) for name in ProcessStack.__slots__}
        entries.append({**fields, "threads": [number_by_id[id(thread)] for thread in stack.threads]})
    return {"threads": [_thread(thread) for thread in numbers], "stacks": entries}


def _thread(thread: ThreadStack) -> dict[str, Any]:
    frames = [{"function": frame.function, "file": frame.file, "line": frame.line} for frame in thread.frames]
    return {"name": thread.name, "frames": frames, "is_python": thread.is_python}


def from_json(data: Mapping[str, Any]) -> list[ProcessStack]:
    """Return the stacks from which as_json() made this."""
    threads = [
        ThreadStack(entry["name"], tuple(Frame(**frame) for frame in entry["frames"]), entry["is_python"])
        for entry in data["threads"]
    ]
    return [
        ProcessStack(**{**entry, "threads": tuple(threads[number] for number in entry["threads"])})
        for entry in data["stacks"]
    ]


def whole_stacks(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the processes of as_json() with their threads in place of the numbers."""
    threads = data["threads"]
    return [
        {**entry, "threads": [threads[number] for number in entry["threads"]]} for entry in data["stacks"]
    ]


_WRAPPERS = frozenset(
    ("wrapper", "inner", "wrapped", "_wrapped_call_impl", "_call_impl", "decorate_context", "_fn", "__call__")
)
_MOST_GROUPS = 12
_LONGEST_COMMAND = 60
_NOTHING = "no stack (it had ended, or could not be read)"


@dataclass(frozen=True, slots=True)
class Node:
    """Calls common to some ranks, outermost first, and the branches where these ranks differ."""

    ranks: frozenset[int]
    frames: tuple[Frame, ...]
    branches: tuple["Node", ...] = ()
    """Smallest branch first.

    A rank is in no branch if its stack ends here; a rank with several stacks may be in several branches.
    """


def merge(stacks: Iterable[tuple[int, Sequence[Frame]]]) -> Node:
    """Build the tree of these ranks' stacks."""
    ranks: dict[int, set[int]] = {}
    # Keyed by identity: most ranks share a few sequences, and comparing them costs as much as their depth.
    frames_by_id: dict[int, Sequence[Frame]] = {}
    for rank, frames in stacks:
        frames_by_id[id(frames)] = frames
        ranks.setdefault(id(frames), set()).add(rank)
    return _merge([(frozenset(ranks[number]), tuple(frames)) for number, frames in frames_by_id.items()])


def _merge(stacks: Sequence[tuple[frozenset[int], tuple[Frame, ...]]]) -> Node:
    common = _common([frames for _, frames in stacks])
    heads: dict[Frame, list[tuple[frozenset[int], tuple[Frame, ...]]]] = {}
    for ranks, frames in stacks:
        tail = frames[len(common) :]
        if tail:
            heads.setdefault(tail[0], []).append((ranks, tail))
    branches = sorted(
        (_merge(group) for group in heads.values()),
        key=lambda node: (len(node.ranks), min(node.ranks), _order(node.frames)),
    )
    return Node(frozenset().union(*(ranks for ranks, _ in stacks)), common, tuple(branches))


def _common(stacks: Sequence[tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """Return the frames at the beginning of all stacks."""
    if not stacks:
        return ()
    # The prefix common to the smallest and the largest in order is common to all.
    first, last = min(stacks, key=_order), max(stacks, key=_order)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


def _order(frames: Sequence[Frame]) -> list[tuple[str, str, int]]:
    return [(frame.function, frame.file, frame.line) for frame in frames]


def where(frames: Sequence[Frame]) -> str:
    """Describe the place in a few words: the call in user code and its line, as `all_reduce (train.py:88)`."""
    if not frames:
        return _NOTHING
    # Frames below the innermost user frame belong to libraries: their first call says what the user called.
    own_frames = [number for number, frame in enumerate(frames) if frame.is_own]
    if not own_frames:
        return str(frames[-1])
    last = frames[own_frames[-1]]
    called = [
        frame.function
        for frame in frames[own_frames[-1] + 1 :]
        if frame.function.rpartition(".")[2] not in _WRAPPERS
    ]
    return str(Frame(called[0] if called else last.function, last.file, last.line))


def main_of(processes: Sequence[ProcessStack]) -> ProcessStack:
    """Choose the process to describe a rank by: the first Python process, else the worker itself."""
    pythons = [process for process in processes if process.is_python]
    return next(
        iter(
            pythons
            or [process for process in processes if _program(process).startswith("python")]
            or processes
        )
    )


def _program(process: ProcessStack) -> str:
    return process.command.partition(" ")[0].rpartition("/")[2]


def _by_rank(stacks: Iterable[ProcessStack]) -> dict[int, list[ProcessStack]]:
    by_rank: dict[int, list[ProcessStack]] = {}
    for stack in sorted(stacks, key=lambda stack: (stack.rank, stack.is_child)):
        by_rank.setdefault(stack.rank, []).append(stack)
    return by_rank


def groups(stacks: Iterable[ProcessStack]) -> list[tuple[frozenset[int], str]]:
    """Group ranks by place, the smallest group first."""
    ranks_by_place: dict[str, set[int]] = {}
    for rank, processes in _by_rank(stacks).items():
        main = main_of(processes)
        ranks_by_place.setdefault(where(main.threads[0].frames if main.threads else ()), set()).add(rank)
    rarest = sorted(ranks_by_place.items(), key=lambda group: (len(group[1]), min(group[1])))
    return [(frozenset(ranks), place) for place, ranks in rarest]


def places(parts: Sequence[tuple[Iterable[int], str]], most: int = _MOST_GROUPS) -> list[str]:
    """Word the groups: `rank 7 in sleep (data.py:31)`. The last line counts groups beyond `most`."""
    lines = [
        f"{fold_ranks(ranks)}{':' if place == _NOTHING else ' in'} {place}" for ranks, place in parts[:most]
    ]
    if others := [rank for ranks, _ in parts[most:] for rank in ranks]:
        lines.append(f"{fold_ranks(others)} in {len(parts) - most} other places")
    return lines


def summary(stacks: Iterable[ProcessStack], most: int = _MOST_GROUPS) -> str:
    """Word the groups in one line."""
    return "; ".join(places(groups(stacks), most))


def tree_lines(stacks: Iterable[ProcessStack]) -> list[str]:
    """Return the full text: a tree for the main threads, and a tree for each kind of other threads and children."""
    ranks = _by_rank(stacks)
    mains, others, helpers = _Trees(), _Trees(), 0
    for rank, processes in ranks.items():
        main = main_of(processes)
        mains.add("", rank, main.threads[0].frames if main.threads else ())
        for process in processes:
            for number, thread in enumerate(process.threads):
                # Its main thread is in the first tree already.
                if process is main and number == 0:
                    continue
                # Thread pools of libraries would fill the screen: a count has to do.
                if number and thread.is_helper:
                    helpers += 1
                else:
                    others.add(_title(process, thread, is_main=number == 0), rank, thread.frames)
    lines = [*mains.lines(), *others.lines()]
    if helpers:
        lines.append(f"{helpers} helper thread{'' if helpers == 1 else 's'} of libraries")
    return [*lines, *_notes(ranks)]


def _title(process: ProcessStack, thread: ThreadStack, *, is_main: bool) -> str:
    _, blank, arguments = process.command.partition(" ")
    command = f"{_program(process)}{blank}{arguments}"
    command = command if len(command) <= _LONGEST_COMMAND else f"{command[: _LONGEST_COMMAND - 3]}..."
    if is_main:
        return f"child {command}" if process.is_child else f"the worker itself, {command}"
    return f"thread {thread.name}" + (f" of child {command}" if process.is_child else "")


class _Trees:
    """Trees by title."""

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
    """Word the ranks without a py-spy stack, and the reasons."""
    return _notes(_by_rank(stacks))


def _notes(ranks: dict[int, list[ProcessStack]]) -> list[str]:
    ranks_by_reason: dict[tuple[str, str], set[int]] = {}
    for rank, processes in ranks.items():
        main = main_of(processes)
        if main.source != "py-spy":
            ranks_by_reason.setdefault((main.source, main.problem or ""), set()).add(rank)
    return [
        f"{fold_ranks(members)} by {'the kernel' if source == 'kernel' else source}"
        + (f": {problem}" if problem else "")
        for (source, problem), members in ranks_by_reason.items()
    ]
