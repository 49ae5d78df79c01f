"""The file in which a server keeps what its store holds, so that a successor's server goes on from it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hvlaunch.errors import HvlaunchError
from hvlaunch.rendezvous.serving.items import BadBlocks, Item, block, blocks, items

__all__ = ["BadStoreFile", "StoreFile"]

_FORMAT = b"hvlaunch store 1\n"
_GIVEN_UP = b"hvlaunch store given up: "
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LIMIT = 64 << 20


class BadStoreFile(HvlaunchError):
    """There is no store file, or no server can go on from it: it is not whole, another program's, or was given up."""

    def __init__(self, path: Path, cause: str) -> None:
        super().__init__(f"{path}: {cause}", hint="stop the job, and start it again")
        self.path = path


class StoreFile:
    """One that was just made, or opened. It belongs to one server, and so to one thread; make it by create() or open().

    What is written survives the death of this process; with `sync`, that of the machine. `limit`: the most bytes of
    values and names that a server keeps here.
    """

    def __init__(self, path: Path, descriptor: int, *, sync: bool, limit: int, old: bytes = b"") -> None:
        self.path = path
        self.limit = limit
        self.size = 0
        """Bytes that were written."""
        self.lost: Callable[[str], None] | None = None
        """Is told why, in place of the server's user, when it has been given up; by the server's thread."""
        self._descriptor = descriptor
        self._sync = sync
        self._check = 0
        self._old = old

    @classmethod
    def create(cls, path: Path, *, sync: bool = False, limit: int = _LIMIT) -> StoreFile:
        """A new file, which only this user can read. Raises OSError."""
        file = cls(path, os.open(path, _NEW, 0o600), sync=sync, limit=limit)
        file._write(_FORMAT)
        if sync:
            _sync_directory(path)
        return file

    @classmethod
    def open(cls, path: Path, *, sync: bool = False, limit: int = _LIMIT) -> StoreFile:
        """What another server has left, however it ended. Raises BadStoreFile."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_APPEND)
        except OSError as error:
            raise BadStoreFile(path, (error.strerror or str(error)).lower()) from None
        try:
            return cls(path, descriptor, sync=sync, limit=limit, old=_read(path, descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def is_new(self) -> bool:
        """No server has written to it yet."""
        return not self._old and not self._check

    def read(self) -> Iterator[Item]:
        """All that an opened file has, once. What comes behind the last whole block is cut off. Raises BadStoreFile."""
        data = memoryview(self._old)[len(_FORMAT) :]
        end = 0
        try:
            for body, self._check, end in blocks(data):  # noqa: B007 (they are of use after the loop)
                yield from items(body)
        except BadBlocks as error:
            raise BadStoreFile(self.path, f"this is damaged: {error}") from None
        self.size = len(_FORMAT) + end
        self._old = b""
        try:
            os.ftruncate(self._descriptor, self.size)
        except OSError as error:
            raise BadStoreFile(self.path, (error.strerror or str(error)).lower()) from None

    def append(self, pieces: Iterable[bytes]) -> None:
        """Write these items, all or none of which are there later. Raises OSError."""
        head, body, self._check = block(pieces, self._check)
        self._write(head, body)

    def rewrite(self, content: Iterable[list[bytes]]) -> None:
        """Let these blocks take the place of all that is there, at once. Raises OSError."""
        part = self.path.with_name(f"{self.path.name}.part")
        part.unlink(missing_ok=True)
        old, self._descriptor = self._descriptor, os.open(part, _NEW, 0o600)
        os.close(old)
        self.size = self._check = 0
        sync, self._sync = self._sync, False
        self._write(_FORMAT)
        for pieces in content:
            self.append(pieces)
        if sync:
            os.fdatasync(self._descriptor)
        part.rename(self.path)
        if sync:
            _sync_directory(self.path)
        self._sync = sync

    def give_up(self, cause: str) -> None:
        """No server must go on from this: let open() say why. Where nothing can be written any more, it can't."""
        with suppress(OSError):
            self.path.with_name(f"{self.path.name}.part").unlink(missing_ok=True)
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_TRUNC)
            with suppress(OSError):
                os.write(descriptor, _GIVEN_UP + cause.encode())
            os.close(descriptor)
        self.close()

    def close(self) -> None:
        """May be repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write(self, *pieces: bytes) -> None:
        left = memoryview(b"".join(pieces) if len(pieces) > 1 else pieces[0])
        while left:
            written = os.write(self._descriptor, left)
            self.size += written
            left = left[written:]
        if self._sync:
            os.fdatasync(self._descriptor)


def _read(path: Path, descriptor: int) -> bytes:
    """Raises BadStoreFile."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise BadStoreFile(path, "this is no file that only this user can read and change")
    with open(os.dup(descriptor), "rb") as reader:  # noqa: PTH123 (by its descriptor)
        content = reader.read()
    if content.startswith(_GIVEN_UP):
        raise BadStoreFile(path, f"it was given up: {content[len(_GIVEN_UP) :].decode(errors='replace')}")
    if not content:
        raise BadStoreFile(path, "it was given up")
    if not content.startswith(_FORMAT):
        raise BadStoreFile(path, "this is no store file of this version of hvlaunch")
    return content


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
