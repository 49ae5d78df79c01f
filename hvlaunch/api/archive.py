"""A call as a file that any Python of the same version can run: a zip archive with the pickled call and its modules."""

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
from typing import Any

from hvlaunch.api.errors import CallNotPickled
from hvlaunch.errors import BadUsage
from hvlaunch.job import SyncOptions
from hvlaunch.sync.library import module_texts, worker_modules

__all__ = ["CallDirectory", "function_name", "pickled_call", "write_archive"]

_MOST = 1 << 31
"""Most bytes that Python reads from a member of an archive."""


def function_name(function: Callable[..., object]) -> str:
    """Return the function's name for messages and `hvlaunch jobs`."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def pickled_call(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> bytes:
    """Pickle a call: functions and classes of `__main__` or a notebook by value, all others by name.

    Raises CallNotPickled, and BadUsage for wrong arguments.
    """
    import cloudpickle  # noqa: PLC0415 (30 ms; attach() and jobs() do without)

    if not callable(function):
        raise CallNotPickled(f"{function!r} is not a function")
    if not isinstance(args, Iterable):
        raise BadUsage(f"args is of type {type(args).__name__}, not a sequence", hint="args=(value,)")
    if not isinstance(kwargs, Mapping):
        raise BadUsage(
            f"kwargs is of type {type(kwargs).__name__}, not a mapping", hint='kwargs={"name": value}'
        )
    # An iterator can be read only once.
    args = tuple(args)
    try:
        pickled: bytes = cloudpickle.dumps((function, args, dict(kwargs)), protocol=5)
    except Exception as error:
        culprit = _culprit(cloudpickle, function, args, kwargs)
        hint = "create it inside the function, or pass the values that it is made from"
        raise CallNotPickled(f"{culprit} can't be pickled: {_one_line(error)}", hint=hint) from error
    if len(pickled) >= _MOST:
        hint = "pass the path of a file that the hosts can read"
        raise CallNotPickled(
            f"the function and its arguments take {len(pickled)} bytes; the limit is 2 GiB", hint=hint
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
    # The error of cloudpickle does not say which value is at fault: try them one by one.
    for name, part in parts:
        try:
            cloudpickle.dumps(part)
        except Exception:  # noqa: BLE001, PERF203 (the value's own code may raise anything)
            return f"{name} of {function_name(function)}()"
    return f"{function_name(function)}(), or a value that it uses,"


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def write_archive(path: Path, pickled: bytes, *, raises: bool, sync: SyncOptions | None = None) -> None:
    """Write the archive. With `raises` a worker fails if its function raises an exception. Raises OSError.

    With `sync`, modules of the tree come from the hosts' copies.
    """
    places = [os.path.abspath(place) for place in sys.path]  # noqa: PTH100 (a text; "" means the working directory)
    call = {
        "python": "{}.{}".format(*sys.version_info),
        "path": places if sync is None else [_place_in(sync, place) for place in places],
        "raises": raises,
    }
    # Opened for reading as well: zipfile looks for the archive's directory before it appends.
    with path.open("x+b") as file:
        # The members that all calls share are compressed once for this process.
        file.write(_base())
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("call.json", json.dumps(call))
            archive.writestr("call.pickle", pickled)


def _place_in(sync: SyncOptions, place: str) -> str:
    """Return a directory of the tree relative to the workers' directory; other directories unchanged."""
    real = os.path.realpath(place)
    is_inside = real == sync.root or real.startswith(f"{sync.root}/")
    return os.path.relpath(real, f"{sync.root}/{sync.below}") if is_inside else place


@cache
def _base() -> bytes:
    """Return the archive with the common members of all calls."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", (files("hvlaunch.api") / "in_worker.py").read_bytes())
        for path, source in (*module_texts(files("cloudpickle"), "cloudpickle"), *worker_modules()):
            archive.writestr(path, source)
    return data.getvalue()


def command(python: str | None, *, is_set_up: bool = False) -> tuple[str, ...]:
    """Return the command for a host: with the given Python, or the first available of this path, this version, `python3`.

    `is_set_up`: the hosts have an environment of their own, whose programs are first on their PATH.
    """
    version = "{}.{}".format(*sys.version_info)
    here = () if is_set_up else (sys.executable,)
    candidates: Any = (python,) if python is not None else (*here, f"python{version}", "python3")
    # `sh` is the script's $0; the candidates are its "$@".
    return ("/bin/sh", "-c", _FIND, "sh", *candidates)


# The host's shell finds Python: its paths may differ from ours.
_FIND = (
    'for p do if command -v "$p" >/dev/null 2>&1; then exec "$p" "$HVLAUNCH_SCRATCH/call"; fi; done; '
    'echo "hvlaunch: no Python here: $*" >&2; exit 127'
)


_PREFIX = "hvlaunch-call-"
_LOCK = "lock"
_MAKING_TIME = 60.0
"""Seconds after which a directory without a held lock is abandoned."""


class CallDirectory:
    """The files of one call on this machine: the program for the hosts, and the results. The process holds its lock."""

    def __init__(self) -> None:
        """Make the directory, and remove directories of callers killed together with their drivers. Raises OSError."""
        for path in _left_over():
            shutil.rmtree(path, ignore_errors=True)
        # A forked child has this object too, and must not remove its parent's files.
        self._pid = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.program = self.path / "program"
        try:
            self._lock = (self.path / _LOCK).open("xb")
            with suppress(OSError):
                # The file system has no locks.
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove the directory. May be repeated; does nothing in a forked process, since the parent still needs the files."""
        if os.getpid() == self._pid:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()


def _left_over() -> Iterator[Path]:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Another caller may remove the same directory at this moment.
        with suppress(OSError):
            # Directories of temporary files are shared: another user's directory, or a link, stays
            # as it is.
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            # A young directory may not have its lock yet.
            if is_ours and status.st_mtime < time.time() - _MAKING_TIME and not _is_held(path / _LOCK):
                yield path


def _is_held(lock: Path) -> bool:
    """True if a process holds the lock. Raises OSError."""
    with suppress(FileNotFoundError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
