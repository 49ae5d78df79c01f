"""Files that users ask for: each worker's output in files of its own (--output-filename), the folder of a job, and events (--events)."""

import errno
import json
import os
import resource
import stat
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from hvlaunch.console.lines import Stream
from hvlaunch.errors import BadUsage
from hvlaunch.owners import open_not_planted

if TYPE_CHECKING:
    from hvlaunch.console.notes import FileSizes

__all__ = ["NO_LINK", "EventFile", "JobFolder", "OutputFiles", "not_written", "rank_directory", "records_of"]


_MOST_OPEN = 1024
_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NO_LINK = _DIRECTORY | os.O_NOFOLLOW
"""Flags that open a directory but not a link to a directory."""
_FILE = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


def rank_directory(directory: Path, rank: int, size: int) -> Path:
    """Return the directory of a rank: rank.N, with N as wide as the largest of `size` ranks."""
    return directory / f"rank.{rank:0{len(str(size - 1))}}"


class OutputFiles:
    """rank.N/{stdout,stderr} in a directory, raw and without prefixes; each write is visible at once (tail -f).

    With many files open, the least recently used are closed, and reopened when needed. A higher limit of open
    files would also apply to the workers on this machine.
    """

    def __init__(
        self,
        directory: Path,
        size: int,
        *,
        root: int | None = None,
        most_open: int | None = None,
        sizes: "FileSizes | None" = None,
        goes_on: bool = False,
    ) -> None:
        """Make the directories and empty files of ranks 0 to size - 1. Raises BadUsage.

        `root` is the open directory, if the caller has opened it; close() closes it. `sizes` records how much
        is in each file. With `goes_on`, the files keep their content up to the recorded sizes.
        """
        self._directory = directory
        self._size = size
        self._most_open = most_open or min(
            _MOST_OPEN, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        )
        self._open: OrderedDict[tuple[int, Stream], int] = OrderedDict()
        self._root = -1 if root is None else root
        self._sizes = sizes
        self._ends: Counter[tuple[int, Stream]] = Counter()
        try:
            if root is None:
                directory.mkdir(parents=True, exist_ok=True)
                self._root = os.open(directory, _DIRECTORY)
            for rank in range(size):
                for stream in _STREAMS:
                    self._begin(rank, stream, goes_on=goes_on)
            if sizes is not None:
                sizes.publish()
        except OSError as error:
            raise not_written(directory, error) from None

    def _begin(self, rank: int, stream: Stream, *, goes_on: bool) -> None:
        """Open and truncate one file. Raises OSError."""
        file = self._make(rank, stream, 0 if goes_on else os.O_TRUNC)
        try:
            end = os.fstat(file).st_size
            if self._sizes is not None and not self._sizes.is_known:
                self._sizes.note(rank, stream, end)
            elif self._sizes is not None and end > self._sizes.of(rank, stream):
                end = self._sizes.of(rank, stream)
                # Bytes beyond the record will be sent again by the host, so they would be there twice.
                os.ftruncate(file, end)
            self._ends[rank, stream] = end
        finally:
            os.close(file)

    def settler(self, rank: int, stream: Stream, done: Callable[[int], None]) -> Callable[[int], None]:
        """Wrap `done` to put the file's current size on record."""
        sizes, end = self._sizes, self._ends[rank, stream]
        if sizes is None or rank >= self._size:
            return done

        def settle(size: int) -> None:
            sizes.note(rank, stream, end)
            done(size)

        return settle

    def size(self, rank: int, stream: Stream) -> int:
        """Return the size of the file."""
        return self._ends[rank, stream]

    def noter(
        self, rank: int, stream: Stream, begin: int, note: Callable[[bool], None] | None
    ) -> Callable[[bool], None] | None:
        """Wrap `note` to put on record whether the bytes after `begin` count."""
        sizes, end = self._sizes, self._ends[rank, stream]
        if sizes is None or note is None or rank >= self._size:
            return note

        def tell(is_printed: bool) -> None:
            sizes.note(rank, stream, end if is_printed else begin)
            note(is_printed)

        return tell

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Append `data` to the rank's file. Raises OSError with the file's name."""
        descriptor = self._descriptor(rank, stream)
        unwritten = memoryview(data)
        try:
            # A write may be partial, for example on a nearly full disk.
            while unwritten:
                written = os.write(descriptor, unwritten)
                self._ends[rank, stream] += written
                unwritten = unwritten[written:]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path(rank, stream))) from None

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def _descriptor(self, rank: int, stream: Stream) -> int:
        key = (rank, stream)
        if key in self._open:
            self._open.move_to_end(key)
        else:
            # Least recently used first, so active ranks keep their descriptors.
            if len(self._open) >= self._most_open:
                os.close(self._open.popitem(last=False)[1])
            self._open[key] = self._make(rank, stream)
        return self._open[key]

    def _path(self, rank: int, stream: str) -> Path:
        return rank_directory(self._directory, rank, self._size) / stream

    def _make(self, rank: int, stream: Stream, flags: int = 0) -> int:
        """Open the file without following links in place of the file or its directory. Raises OSError with its
        name.
        """
        if stream not in _STREAMS:
            raise ValueError(f"no stream: {stream!r}")
        path = self._path(rank, stream)
        try:
            with suppress(FileExistsError):
                os.mkdir(path.parent.name, dir_fd=self._root)
            directory = os.open(path.parent.name, NO_LINK, dir_fd=self._root)
            try:
                return os.open(stream, _FILE | flags, 0o666, dir_fd=directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


def not_written(directory: Path, error: OSError) -> BadUsage:
    """Return the error for a directory without files of output."""
    return BadUsage(
        f"--output-filename {directory}: {error.filename}: {_reason(error)}",
        hint="a directory that you may write to",
    )


_LATEST = "latest"


class JobFolder:
    """The folder DIR/JOB. JOB begins with the UTC time, and so folders sort by time.

    All paths are relative to open directories, and links are not followed: other users may write to DIR.
    """

    def __init__(
        self, directory: Path, job_id: str, wall: Callable[[], float] = time.time, *, goes_on: bool = False
    ) -> None:
        """Make a new folder, or with `goes_on` open the job's existing folder. Raises BadUsage."""
        now = wall()
        name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}.{int(now * 1000) % 1000:03}Z-{job_id}"
        try:
            root = os.open(directory, _DIRECTORY)
            try:
                # The owner of the parent may have put another directory in the place of the one that was checked.
                if os.fstat(root).st_uid not in (os.getuid(), 0):
                    raise PermissionError(errno.EPERM, "", str(directory))
                name = _found(job_id, root) or name if goes_on else name
                self.path = directory / name
                self._descriptor = _made(name, root, goes_on=goes_on)
                if not goes_on:
                    _lead(name, root, directory)
            finally:
                os.close(root)
        except OSError as error:
            raise not_written(directory, error) from None

    def files(
        self, size: int, below: str = "", *, sizes: "FileSizes | None" = None, goes_on: bool = False
    ) -> OutputFiles:
        """Make the files of `size` ranks in the folder or in `below`, as OutputFiles does. Raises BadUsage."""
        try:
            root = _made(below, self._descriptor, goes_on=goes_on) if below else os.dup(self._descriptor)
        except OSError as error:
            raise not_written(self.path, error) from None
        return OutputFiles(self.path / below, size, root=root, sizes=sizes, goes_on=goes_on)

    def close(self) -> None:
        os.close(self._descriptor)


def _found(job_id: str, root: int) -> str | None:
    """Return the name of the job's folder, if it exists."""
    return next((name for name in os.listdir(root) if name.endswith(f"Z-{job_id}")), None)


def _made(name: str, root: int, *, goes_on: bool) -> int:
    """Make and open a directory; with `goes_on` it may exist."""
    with suppress(*[FileExistsError] * goes_on):
        os.mkdir(name, dir_fd=root)
    return os.open(name, NO_LINK, dir_fd=root)


def _lead(name: str, root: int, directory: Path) -> None:
    """Point DIR/latest at the folder, atomically. Raises BadUsage if `latest` is not a link."""
    with suppress(FileNotFoundError):
        if not stat.S_ISLNK(os.stat(_LATEST, dir_fd=root, follow_symlinks=False).st_mode):
            raise BadUsage(
                f"--output-filename {directory}: {directory / _LATEST} is not the link that hvlaunch makes",
                hint="another directory",
            )
    link = f".{_LATEST}-{name}"
    os.symlink(name, link, dir_fd=root)
    try:
        # Renaming is atomic: a reader never finds the link missing.
        os.replace(link, _LATEST, src_dir_fd=root, dst_dir_fd=root)
    except OSError:
        os.unlink(link, dir_fd=root)
        raise


_EVENT_PATIENCE = 5.0
_EVENT_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
"""Without O_NONBLOCK, opening a named pipe without a reader would block for ever."""


class EventFile:
    """Appends JSON objects to a file, one per line, each written at once.

    A thread of its own writes the file: a hanging disk stops nothing else.
    """

    def __init__(self, path: Path, on_error: Callable[[str], None]) -> None:
        """Open the file. `on_error` is called once, in the file's thread, when records are lost. Raises BadUsage."""
        self._path = path
        self._on_error = on_error
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        try:
            self._descriptor = open_not_planted(str(path), _EVENT_FLAGS, 0o600)
            # Only opening had to be non-blocking; the file's own thread may wait for a slow pipe.
            os.set_blocking(self._descriptor, True)
        except OSError as error:
            cause, hint = _reason(error), "a file that you may write to"
            if error.errno == errno.ENXIO:
                cause, hint = "this pipe has no reader", "start its reader first, as in cat FILE &"
            elif error.errno == errno.ELOOP:
                cause = "it is a link that another user made, or can replace"
            elif error.errno == errno.EPERM and error.strerror:
                cause = error.strerror
            raise BadUsage(f"--events {path}: {cause}", hint=hint) from None
        self._thread = Thread(target=self._run, name="event file", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record. Never blocks."""
        self._queue.put(json.dumps(record).encode() + b"\n")

    def close(self, timeout: float = _EVENT_PATIENCE) -> None:
        """Write the rest, for at most `timeout` seconds."""
        # None ends the thread after everything before it.
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        failed = False
        while (line := self._queue.get()) is not None:
            try:
                unwritten = memoryview(line)
                while unwritten:
                    unwritten = unwritten[os.write(self._descriptor, unwritten) :]
            except OSError as error:  # noqa: PERF203 - the next line may find room again
                if not failed:
                    failed = True
                    self._on_error(f"--events {self._path}: {_reason(error)}; some events are lost")
        os.close(self._descriptor)


def records_of(path: Path, job_id: str) -> int:
    """Count the records of the job in the file; 0 if `path` is not a regular file."""
    mark, count = f'"job": "{job_id}"'.encode(), 0
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                count = sum(mark in line and line.endswith(b"\n") for line in file)
    return count


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0).lower()
