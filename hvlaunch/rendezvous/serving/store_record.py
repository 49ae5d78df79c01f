"""A server's store on disk, for a successor's server: the same values, versions and request ids."""

from __future__ import annotations

import os
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from hvlaunch.errors import HvlaunchError
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.record import BadLog, Log, Mark, boot_id, read_records

if TYPE_CHECKING:
    from hvlaunch.rendezvous.store import Store

__all__ = ["BadStoreFile", "Item", "Once", "StoreFile", "StoreRecord", "pack", "unpack"]

_MAGIC = b"hvlaunch store 1\n"
_START = Mark(len(_MAGIC))
_GIVEN_UP = b"hvlaunch store given up: "
_LIMIT = 64 << 20

_SET, _APPENDED, _DELETED = b"=", b"+", b"-"
"""A change of a key: its version as the number; then the scope, the key, and the value or the appended part."""
_DONE = b"#"
"""A request with an id: its answer's status as the number; then the id, the answer's body and headers."""
_NOTE = b"."
"""A note of the server's own: its name and value."""
_VERSION = b"v"
"""The store's version, and in decimal digits the latest version its deletions may lack."""
_KINDS = frozenset((_SET, _APPENDED, _DELETED, _DONE, _NOTE, _VERSION))
_ITEM = struct.Struct("<cQIII")

_BOOT = "boot"
_SLACK = 16 << 20
"""Bytes of outdated changes before a rewrite, beside twice the size after the last rewrite."""
_RECORD = 1 << 20
"""Bytes of a record, about, when a file is rewritten."""


class Item(NamedTuple):
    """An item of a record. The kind decides the meaning of the other fields."""

    kind: bytes
    number: int
    first: bytes
    second: bytes = b""
    third: bytes = b""


def pack(
    kind: bytes, number: int, first: bytes, second: bytes = b"", third: bytes = b""
) -> tuple[bytes, ...]:
    """Return the pieces of an item as bytes."""
    return _ITEM.pack(kind, number, len(first), len(second), len(third)), first, second, third


def unpack(body: memoryview) -> Iterator[Item]:
    """Yield the items of a record. Raises BadLog."""
    at = 0
    while at < len(body):
        if at + _ITEM.size > len(body):
            raise BadLog("an item is cut off")
        kind, number, *sizes = _ITEM.unpack_from(body, at)
        at += _ITEM.size
        if kind not in _KINDS or at + sum(sizes) > len(body):
            raise BadLog("an item has an unknown kind")
        parts = []
        for size in sizes:
            parts.append(bytes(body[at : at + size]))
            at += size
        yield Item(kind, number, *parts)


class BadStoreFile(HvlaunchError):
    """The stored values of the rendezvous can't be used: missing, damaged, another program's, or given up."""

    def __init__(self, path: Path, cause: str) -> None:
        super().__init__(f"{path}: {cause}", hint="stop the job, and start it again")
        self.path = path


class StoreFile:
    """A log of items, for a single server and therefore a single thread. Use create() or open().

    A server keeps at most `limit` bytes of values and names here.
    """

    def __init__(self, path: Path, log: Log | None, content: bytes, *, sync: bool, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.lost: Callable[[str], None] | None = None
        """Called with the reason, in place of a warning to the user, when the file is given up; by the server's thread."""
        self._log = log
        self._content = content
        self._sync = sync

    @classmethod
    def create(cls, path: Path, *, sync: bool = False, limit: int = _LIMIT) -> StoreFile:
        """Create a file for this user only; with `sync` it survives a loss of power. Raises OSError."""
        return cls(path, Log.create(path, _MAGIC, is_synced=sync), b"", sync=sync, limit=limit)

    @classmethod
    def open(cls, path: Path, *, sync: bool = False, limit: int = _LIMIT) -> StoreFile:
        """Open the file of another server, whatever ended it. Raises BadStoreFile."""
        try:
            return cls(path, None, _read(path), sync=sync, limit=limit)
        except OSError as error:
            raise BadStoreFile(path, _reason(error)) from None

    @property
    def is_new(self) -> bool:
        """True if the file is empty."""
        return not self._content and self.size == _START.size

    @property
    def size(self) -> int:
        """Bytes of the file, as far as written or read by this server."""
        return 0 if self._log is None else self._log.size

    def read(self) -> Iterator[Item]:
        """Yield the items of an opened file, once; a torn record at its end is cut off. Raises BadStoreFile."""
        end = _START
        try:
            for body, end in read_records(memoryview(self._content), _START):  # noqa: B007 (the last mark is the end)
                yield from unpack(body)
        except BadLog as error:
            raise BadStoreFile(self.path, f"this is damaged: {error}") from None
        self._content = b""
        try:
            self._log = Log.resume(self.path, end, is_synced=self._sync)
        except OSError as error:
            raise BadStoreFile(self.path, _reason(error)) from None

    def append(self, pieces: Iterable[bytes]) -> None:
        """Write these items in a record. Raises OSError."""
        assert self._log is not None  # noqa: S101 (for the type checker: a server reads before it writes)
        self._log.append(pieces)

    def rewrite(self, records: Iterable[list[bytes]]) -> None:
        """Replace the whole content at once. Raises OSError."""
        assert self._log is not None  # noqa: S101 (as above)
        self._log.replace(_START, records)

    def give_up(self, cause: str) -> None:
        """Let open() refuse the file with this reason; on a full disk, without a reason."""
        # Emptied first: a truncation needs no room, and an empty file is refused too.
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_TRUNC)
            with suppress(OSError):
                os.write(descriptor, _GIVEN_UP + cause.encode())
            os.close(descriptor)
        self.close()

    def close(self) -> None:
        """May be repeated."""
        if self._log is not None:
            self._log.close()


def _read(path: Path) -> bytes:
    """Return the content of a store file. Raises BadStoreFile, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 (by its descriptor)
        status = os.fstat(descriptor)
        # Another user's file could feed this job with values.
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise BadStoreFile(path, "it is not a file that only this user can read and change")
        content = file.read()
    if content.startswith(_GIVEN_UP):
        raise BadStoreFile(path, f"it was given up: {content[len(_GIVEN_UP) :].decode(errors='replace')}")
    if not content:
        raise BadStoreFile(path, "it was given up")
    if not content.startswith(_MAGIC):
        raise BadStoreFile(path, "this is no store file of this version of hvlaunch")
    return content


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


class StoreRecord:
    """Records the content of `store` and `once`, and notes of the server, in a file. Belongs to the server's thread.

    The changes of one turn of the event loop are one record, written before the next turn; without a loop flush() writes them.
    Nobody hears of a change before: then() takes what must wait. Without a file nothing is recorded and nothing waits.
    `say` warns the user, `on_fault` counts exceptions that nothing else catches.
    """

    def __init__(
        self,
        file: StoreFile | None,
        store: Store,
        once: Once,
        say: Callable[[str], None],
        on_fault: Callable[[], None],
    ) -> None:
        self.is_behind = False
        """True while a change is not on disk yet."""
        self.notes: dict[str, bytes] = {}
        self._file = file
        self._store = store
        self._once = once
        self._say = say
        self._on_fault = on_fault
        self._call_soon: Callable[[Callable[[], None]], object] | None = None
        self._pieces: list[bytes] = []
        self._waiting: list[Callable[[], None]] = []
        self._rewrite_at = 0

    @property
    def is_kept(self) -> bool:
        """True if a successor could continue with everything this server has told its clients."""
        return self._file is not None

    def begin(self) -> None:
        """Load the content of the file, and record changes from now on. Raises BadStoreFile."""
        file, store = self._file, self._store
        if file is None:
            return
        boot = _boot()
        if not file.is_new:
            fresh, store.version, store.forgotten = store.version, 0, 0
            self._restore(file)
            # An unsynced file may have lost its end with the machine: watchers then get all keys.
            may_lack = self.notes.get(_BOOT) != boot
            store.go_on_from(max(fresh, store.version), forgets=may_lack)
        self._rewrite_at = 2 * file.size + _SLACK
        # From here on each change is recorded; not before, or the restored ones would be too.
        store.keep, self._once.keep = self._record_change, self._record_answer
        self._add(pack(*self._version()))
        self.note(_BOOT, boot)

    def serve_in(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Let the event loop of this `call_soon` call flush() from now on."""
        self._call_soon = call_soon

    def note(self, name: str, value: bytes = b"") -> None:
        """Record a fact beside the store; the latest value of a name counts."""
        if self._file is not None and self.notes.get(name) != value:
            self.notes[name] = value
            self._add(pack(_NOTE, 0, name.encode(), value))

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` when every change until now is on disk, in the order of the calls."""
        if self.is_behind:
            self._waiting.append(act)
        else:
            act()

    def flush(self) -> None:
        """Write the changes, then call everything in waiting order."""
        pieces, self._pieces = self._pieces, []
        # Without a file the waiting calls still run below.
        if pieces and self._file is not None:
            try:
                self._write(self._file, pieces)
            except OSError as error:
                self._give_up(_reason(error))
        self.is_behind = False
        # Emptied first: an act may add to the list.
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            try:
                act()
            except Exception:  # noqa: BLE001, PERF203 (a defect in one answer must not hold back the others)
                self._on_fault()

    def close(self) -> None:
        """Write the rest, and record no more."""
        self.flush()
        if self._file is not None:
            self._stop().close()

    # Counted by values: the log itself may be twice as long, and a successor must load it into memory.
    def _write(self, file: StoreFile, pieces: list[bytes]) -> None:
        """Raises OSError."""
        if self._store.size > file.limit:
            self._give_up(f"there are more than {file.limit >> 20} MiB of values")
            return
        file.append(pieces)
        if file.size > self._rewrite_at:
            file.rewrite(self._all_records())
            self._rewrite_at = 2 * file.size + _SLACK

    def _give_up(self, cause: str) -> None:
        file = self._stop()
        file.give_up(cause)
        loss = f"the rendezvous store is no longer kept on disk ({cause})"
        if file.lost is not None:
            file.lost(loss)
        else:
            self._say(f"warning: {loss}: no other driver can take this job over")

    def _stop(self) -> StoreFile:
        file, self._file = self._file, None
        self._store.keep = self._once.keep = None
        assert file is not None  # noqa: S101 (for the type checker: each caller has one)
        return file

    def _add(self, item: tuple[bytes, ...]) -> None:
        self._pieces += item
        if not self.is_behind:
            self.is_behind = True
            if self._call_soon is not None:
                self._call_soon(self.flush)

    def _record_change(self, scope: str, key: str, value: bytes | None, version: int, is_piece: bool) -> None:
        kind = _DELETED if value is None else _APPENDED if is_piece else _SET
        self._add(pack(kind, version, scope.encode(), key.encode(), value or b""))

    def _record_answer(self, identity: bytes, status: int, body: bytes, headers: bytes) -> None:
        self._add(pack(_DONE, status, identity, body, headers))

    def _version(self) -> tuple[bytes, int, bytes]:
        return _VERSION, self._store.version, b"%d" % self._store.forgotten

    def _all_records(self) -> Iterator[list[bytes]]:
        """Yield the whole content as records of about a MiB."""
        pieces: list[bytes] = []
        size = 0
        for item in self._all_items():
            pieces += item
            size += sum(map(len, item))
            if size >= _RECORD:
                yield pieces
                pieces, size = [], 0
        if pieces:
            yield pieces

    def _all_items(self) -> Iterator[tuple[bytes, ...]]:
        yield pack(*self._version())
        for name, value in self.notes.items():
            yield pack(_NOTE, 0, name.encode(), value)
        for scope, key, version in self._store.deletions():
            yield pack(_DELETED, version, scope.encode(), key.encode())
        for scope, key, entry in self._store.entries():
            yield pack(_SET, entry.version, scope.encode(), key.encode(), entry.value)
        for identity, status, body, headers in self._once:
            yield pack(_DONE, status, identity, body, headers)

    def _restore(self, file: StoreFile) -> None:
        """Raises BadStoreFile."""
        store = self._store
        # A value of many parts grows in place: else each part would copy the whole value.
        growing: dict[tuple[str, str], bytearray] = {}
        try:
            for kind, number, first, second, third in file.read():
                if kind == _VERSION:
                    store.go_on_from(number)
                    store.forgotten = max(store.forgotten, int(first))
                elif kind == _NOTE:
                    self.notes[first.decode()] = second
                elif kind == _DONE:
                    self._once.remember(first, number, second, third)
                else:
                    place = first.decode(), second.decode()
                    if kind == _APPENDED:
                        if place not in growing:
                            growing[place] = bytearray(store.get(*place) or b"")
                        growing[place] += third
                    else:
                        growing.pop(place, None)
                    store.restore(*place, None if kind == _DELETED else third, number)
            for place, value in growing.items():
                store.complete(*place, bytes(value))
        except ValueError as error:
            raise BadStoreFile(file.path, f"this is damaged: {error}") from None


def _boot() -> bytes:
    """Return a word for this start of the machine."""
    return (boot_id() or os.uname().nodename).encode()


_REMEMBERED = 50_000


class _Parts(Protocol):
    """The parts of an answer that are kept. The answer's own class needs a parser, which a job without clients does not load."""

    @property
    def status(self) -> int: ...

    @property
    def body(self) -> bytes: ...

    @property
    def headers(self) -> bytes: ...


A = TypeVar("A", bound=_Parts)


class Once:
    """Answers to requests by id; the newest `size` are remembered.

    `keep(identity, status, body, headers)` is called for each new answer.
    """

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._size = size
        self._answers: OrderedDict[bytes, tuple[int, bytes, bytes]] = OrderedDict()
        self.keep: Callable[[bytes, int, bytes, bytes], None] | None = None

    def __call__(
        self, identity: bytes | None, act: Callable[[], A], again: Callable[[int, bytes, bytes], A]
    ) -> A:
        """Return the earlier answer to `identity`, made by again(), else call act(). Errors are not remembered."""
        if identity is None:
            return act()
        earlier = self._answers.get(identity)
        if earlier is not None:
            return again(*earlier)
        answer = act()
        if answer.status in (200, 404):
            self.remember(identity, answer.status, answer.body, answer.headers)
            if self.keep is not None:
                self.keep(identity, answer.status, answer.body, answer.headers)
        return answer

    def remember(self, identity: bytes, status: int, body: bytes, headers: bytes) -> None:
        """Load the answer of an earlier server."""
        self._answers[identity] = status, body, headers
        if len(self._answers) > self._size:
            self._answers.popitem(last=False)

    def __iter__(self) -> Iterator[tuple[bytes, int, bytes, bytes]]:
        """Yield the remembered answers, the oldest first."""
        for identity, answer in self._answers.items():
            yield identity, *answer
