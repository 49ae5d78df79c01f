"""What a server keeps in its store file, and what waits until it is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from hvlaunch.boot import boot_id
from hvlaunch.rendezvous.serving.items import APPENDED, DELETED, DONE, MARK, NOTE, SET, pack
from hvlaunch.rendezvous.serving.once import Once
from hvlaunch.rendezvous.serving.store_file import BadStoreFile, StoreFile
from hvlaunch.rendezvous.store import Store

__all__ = ["StoreKeeping"]

_BOOT = "boot"
_SLACK = (
    16 << 20
)  # bytes of changes that are out of date, beside as many as the file had when it was last rewritten
_BLOCK = 1 << 20  # bytes of a block, about, where a file is rewritten


class StoreKeeping:
    """Keeps what `store`, `once` and notes of the server's own hold. Belongs to the server's thread.

    What changes in one turn of the event loop is written at once, before the next; without a loop by flush(). Nobody is
    told of a change before that: then() is for what must wait. Without a file nothing is kept, and nothing waits.
    `say` tells the user, `on_fault` counts exceptions that nobody else catches.
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
        """Something has changed that is not on record yet."""
        self.notes: dict[str, bytes] = {}
        self._file = file
        self._store = store
        self._once = once
        self._say = say
        self._on_fault = on_fault
        self._call_soon: Callable[[Callable[[], None]], object] | None = None
        self._pieces: list[bytes] = []
        self._waiting: list[Callable[[], None]] = []
        self._enough = 0

    @property
    def is_kept(self) -> bool:
        """Whether a successor could go on from all that this server has told anybody."""
        return self._file is not None

    def begin(self) -> None:
        """Take over what the file has from an earlier server, and keep all changes from now on. Raises BadStoreFile."""
        file, store = self._file, self._store
        if file is None:
            return
        boot = _boot()
        if not file.is_new:
            fresh, store.version, store.forgotten = store.version, 0, 0
            self._restore(file)
            may_lack = self.notes.get(_BOOT) != boot
            store.go_on_from(max(fresh, store.version), forgets=may_lack)
        self._enough = 2 * file.size + _SLACK
        store.keep, self._once.keep = self._changed, self._done
        self._add(pack(*self._mark()))
        self.note(_BOOT, boot)

    def serve_in(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """From now on there is an event loop that calls flush() itself."""
        self._call_soon = call_soon

    def note(self, name: str, value: bytes = b"") -> None:
        """Something that the server knows beside its store; the latest of that name is kept."""
        if self._file is not None and self.notes.get(name) != value:
            self.notes[name] = value
            self._add(pack(NOTE, 0, name.encode(), value))

    def then(self, act: Callable[[], None]) -> None:
        """Do it as soon as what has changed until now is on record; before others that come later."""
        if self.is_behind:
            self._waiting.append(act)
        else:
            act()

    def flush(self) -> None:
        """Write what has changed, then do what has waited for that."""
        pieces, self._pieces = self._pieces, []
        if pieces and self._file is not None:
            try:
                self._write(self._file, pieces)
            except OSError as error:
                self._give_up((error.strerror or str(error)).lower())
        self.is_behind = False
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            try:
                act()
            except Exception:  # noqa: BLE001, PERF203 (a defect in one's answer keeps no other's back)
                self._on_fault()

    def close(self) -> None:
        """Write what is left, and keep nothing more."""
        self.flush()
        if self._file is not None:
            self._stop().close()

    def _write(self, file: StoreFile, pieces: list[bytes]) -> None:
        """Raises OSError."""
        if self._store.size > file.limit:
            self._give_up(f"there are more than {file.limit >> 20} MiB of values")
            return
        file.append(pieces)
        if file.size > self._enough:
            file.rewrite(self._all())
            self._enough = 2 * file.size + _SLACK

    def _give_up(self, cause: str) -> None:
        file = self._stop()
        file.give_up(cause)
        what = f"what workers keep at the rendezvous is no longer kept on disk ({cause})"
        if file.lost is not None:
            file.lost(what)
        else:
            self._say(f"warning: {what}: no other driver can take this job over")

    def _stop(self) -> StoreFile:
        file, self._file = self._file, None
        self._store.keep = self._once.keep = None
        assert file is not None  # noqa: S101 (for the type checker: whoever calls this has one)
        return file

    def _add(self, item: tuple[bytes, ...]) -> None:
        self._pieces += item
        if not self.is_behind:
            self.is_behind = True
            if self._call_soon is not None:
                self._call_soon(self.flush)

    def _changed(self, scope: str, key: str, value: bytes | None, version: int, is_piece: bool) -> None:
        kind = DELETED if value is None else APPENDED if is_piece else SET
        self._add(pack(kind, version, scope.encode(), key.encode(), value or b""))

    def _done(self, identity: bytes, status: int, body: bytes, headers: bytes) -> None:
        self._add(pack(DONE, status, identity, body, headers))

    def _mark(self) -> tuple[bytes, int, bytes]:
        return MARK, self._store.version, b"%d" % self._store.forgotten

    def _all(self) -> Iterator[list[bytes]]:
        """All that there is, in blocks."""
        pieces: list[bytes] = []
        size = 0
        for item in self._items():
            pieces += item
            size += sum(map(len, item))
            if size >= _BLOCK:
                yield pieces
                pieces, size = [], 0
        if pieces:
            yield pieces

    def _items(self) -> Iterator[tuple[bytes, ...]]:
        yield pack(*self._mark())
        for name, value in self.notes.items():
            yield pack(NOTE, 0, name.encode(), value)
        for scope, key, version in self._store.deletions():
            yield pack(DELETED, version, scope.encode(), key.encode())
        for scope, key, entry in self._store.entries():
            yield pack(SET, entry.version, scope.encode(), key.encode(), entry.value)
        for identity, status, body, headers in self._once:
            yield pack(DONE, status, identity, body, headers)

    def _restore(self, file: StoreFile) -> None:
        """Raises BadStoreFile."""
        store = self._store
        growing: dict[tuple[str, str], bytearray] = {}  # else a value of many parts would be copied as often
        try:
            for kind, number, first, second, third in file.read():
                if kind == MARK:
                    store.go_on_from(number)
                    store.forgotten = max(store.forgotten, int(first))
                elif kind == NOTE:
                    self.notes[first.decode()] = second
                elif kind == DONE:
                    self._once.remember(first, number, second, third)
                else:
                    place = first.decode(), second.decode()
                    if kind == APPENDED:
                        if place not in growing:
                            growing[place] = bytearray(store.get(*place) or b"")
                        growing[place] += third
                    else:
                        growing.pop(place, None)
                    store.restore(*place, None if kind == DELETED else third, number)
            for place, value in growing.items():
                store.complete(*place, bytes(value))
        except ValueError as error:
            raise BadStoreFile(file.path, f"this is damaged: {error}") from None


def _boot() -> bytes:
    """What is another after the machine has started again."""
    return (boot_id() or os.uname().nodename).encode()
