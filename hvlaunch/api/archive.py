"""A function with its arguments as a file that any Python of its version can run: a zip archive, with all that it takes."""

import fcntl
import io
import json
import os
import shutil
import stat
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hvlaunch.api.errors import CallNotPickled
from hvlaunch.errors import BadUsage

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = ["CallDirectory", "function_name", "pickled_call", "write_archive"]

_OF_WORKERS = tuple(
    f"hvlaunch/{name}" for name in ("__init__.py", "errors.py", "rendezvous", "torch", "torchrun.py")
)
"""What a function may import of hvlaunch, where it is not installed."""
_MOST = 1 << 31
"""Bytes that a Python reads from an archive."""


def function_name(function: Callable[..., object]) -> str:
    """As messages and `hvlaunch jobs` have it."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def pickled_call(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> bytes:
    """What a worker unpickles: by value what is of `__main__`, or of a notebook, and else by name.

    Raises CallNotPickled, and BadUsage where these are no arguments.
    """
    import cloudpickle  # noqa: PLC0415 (30 ms; attach() and jobs() need none)

    if not callable(function):
        raise CallNotPickled(f"{function!r} is not a function")
    if not isinstance(args, Iterable):
        raise BadUsage(f"args is of type {type(args).__name__}, and no sequence", hint="args=(value,)")
    if not isinstance(kwargs, Mapping):
        raise BadUsage(
            f"kwargs is of type {type(kwargs).__name__}, and no mapping", hint='kwargs={"name": value}'
        )
    args = tuple(args)  # once: it may be used up
    try:
        pickled: bytes = cloudpickle.dumps((function, args, dict(kwargs)), protocol=5)
    except Exception as error:
        what = _culprit(cloudpickle, function, args, kwargs)
        hint = "make it in the function, or pass what it is made of"
        raise CallNotPickled(f"{what} can't be pickled: {_one_line(error)}", hint=hint) from error
    if len(pickled) >= _MOST:
        hint = "pass the path of a file that the hosts can read"
        raise CallNotPickled(
            f"the function and its arguments take {len(pickled)} bytes; 2 GiB is the most", hint=hint
        )
    return pickled


def _culprit(
    cloudpickle: ModuleType,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> str:
    parts: Iterator[tuple[str, object]] = iter(
        [
            *((f"argument {number + 1}", value) for number, value in enumerate(args)),
            *((f"argument {name!r}", value) for name, value in kwargs.items()),
        ]
    )
    for name, part in parts:
        try:
            cloudpickle.dumps(part)
        except Exception:  # noqa: BLE001, PERF203 (of any kind: the value's own code may raise it)
            return f"{name} of {function_name(function)}()"
    return f"{function_name(function)}(), or a value that it uses,"


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def write_archive(path: Path, pickled: bytes, *, raises: bool) -> None:
    """Make the file. `raises` is whether a worker fails where the function raises something. Raises OSError."""
    call = {
        "python": "{}.{}".format(*sys.version_info),
        "path": [os.path.abspath(place) for place in sys.path],  # noqa: PTH100 (a text; empty is here)
        "raises": raises,
    }
    with path.open("x+b") as file:
        file.write(_base())
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("call.json", json.dumps(call))
            archive.writestr("call.pickle", pickled)


@cache
def _base() -> bytes:
    """What all archives have."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", (files("hvlaunch.api") / "in_worker.py").read_bytes())
        for name in ("cloudpickle", *_OF_WORKERS):
            package, *parts = name.split("/")
            for path, source in _sources(files(package).joinpath(*parts), name):
                archive.writestr(path, source)
    return data.getvalue()


def _sources(place: "Traversable", name: str) -> Iterator[tuple[str, bytes]]:
    """Of a module, or of all in a folder; it may be in an archive itself, where a function calls another."""
    if place.is_dir():
        for each in sorted(place.iterdir(), key=lambda one: one.name):
            yield from _sources(each, f"{name}/{each.name}")
    elif name.endswith(".py"):
        yield name, place.read_bytes()


def command(python: str | None) -> tuple[str, ...]:
    """What runs it on a host: the Python that was named, or this process's own where it is there, else one of its version."""
    version = "{}.{}".format(*sys.version_info)
    candidates: Any = (python,) if python is not None else (sys.executable, f"python{version}", "python3")
    return ("/bin/sh", "-c", _FIND, "sh", *candidates)


_FIND = (
    'for p do if command -v "$p" >/dev/null 2>&1; then exec "$p" "$HVLAUNCH_SCRATCH/call"; fi; done; '
    'echo "hvlaunch: no Python here: $*" >&2; exit 127'
)


_PREFIX = "hvlaunch-call-"
_LOCK = "lock"
_MAKING_TIME = 60.0
"""Seconds after which a directory has its lock."""


class CallDirectory:
    """Of the process that makes it, which holds its lock until it removes it, or ends."""

    def __init__(self) -> None:
        """Those of callers that were killed together with their drivers go meanwhile. Raises OSError."""
        for path in _left_over():
            shutil.rmtree(path, ignore_errors=True)
        self._pid = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.program = self.path / "program"
        try:
            self._lock = (self.path / _LOCK).open("xb")
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """It may be gone already. A process that was forked since leaves it to the one that has made it."""
        if os.getpid() == self._pid:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()


def _left_over() -> Iterator[Path]:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and status.st_mtime < time.time() - _MAKING_TIME and not _is_held(path / _LOCK):
                yield path


def _is_held(lock: Path) -> bool:
    """Whether somebody holds it, as far as that can be seen. Raises OSError."""
    with suppress(FileNotFoundError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
