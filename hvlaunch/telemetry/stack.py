"""Stacks of workers and of their children: what they are, and the form in which a host sends them. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, Literal

from hvlaunch.agent.wire.shapes import exactly, flag, of, or_null, record, several, text, whole

__all__ = [
    "STACKS",
    "Frame",
    "ProcessStack",
    "Source",
    "ThreadStack",
    "as_json",
    "from_json",
    "process_stacks",
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
