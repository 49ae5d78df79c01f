"""A snapshot of the working tree: a manifest, and the content in pack files, which outlive changes of the tree.

Each root has a directory in the user's cache. The index there has the content of each path: its place in the packs.
Beside it are the directories and statuses of that moment: if they are the same, the index is not read.
Packs are append-only. A path with an unchanged status is not read again.

A snapshot is consistent: the tree did not change from the first read of a file until the last, nor in the tenth of a
second before. If a program writes two files together, hosts get both or neither.
"""

import errno
import fcntl
import json
import marshal
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from hvlaunch.agent.errands.sync.content import PART
from hvlaunch.console.status import size_words
from hvlaunch.errors import BadUsage
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.owners import make_own_directory, reason
from hvlaunch.sync.tree import Directory, Stat, Tree

__all__ = ["PackedPart", "TreeSnapshot", "take_snapshot"]

_QUIET = 0.1
"""Seconds for which nothing may have changed."""
_PATIENCE = 10.0
"""Seconds for which a tree may go on changing."""
_FORMAT = 1
_MANIFEST, _SAVED = "manifest", "snapshot.json"
_INDEX, _DIRECTORIES, _STATUSES = "index.json", "directories.json", "statuses"
_LARGEST = 10
_KEPT = 30 * 86400.0
"""Seconds for which the content of a tree is kept without being used."""
_MOST = 20 << 30
"""Bytes of content that trees may have together."""
_BUSY = 60.0
"""Seconds since a tree's last use within which another job may be about to lock its content."""
_SPARE = 64 << 20
"""Bytes of old content that packs may have beside twice the tree's."""


class PackedPart(NamedTuple):
    """Where a part of a file's content is."""

    hash: str
    """SHA-256, in hexadecimal."""
    size: int
    pack: str
    offset: int


_Entry: TypeAlias = list[Any]
"""A file or link as it was read: the five fields of its Stat, the target of a link, and the fields of its parts.

Plain lists: named tuples for 20,000 files would take longer than all else, if nothing has changed.
"""
_TARGET = len(Stat._fields)
_FIRST_PART = _TARGET + 1
_PART_SIZE = len(PackedPart._fields)


def _parts(entries: Iterable[_Entry]) -> dict[str, Sequence[Any]]:
    """Return the fields of all parts, by the parts' hashes in the order of the entries."""
    return {
        entry[first]: entry[first : first + _PART_SIZE]
        for entry in entries
        for first in range(_FIRST_PART, len(entry), _PART_SIZE)
    }


class TreeSnapshot:
    """A tree at one moment."""

    def __init__(
        self,
        root: str,
        folder: Path,
        tree_hash: str,
        manifest: bytes,
        index: bytes,
        entries: Iterable[_Entry] | None = None,
    ) -> None:
        """`entries` are those of `index`, if they are known."""
        self.root = root
        """Its directory on this machine."""
        self.hash = tree_hash
        """SHA-256 of the manifest, in hexadecimal."""
        self.manifest = manifest
        """JSON as agent/errands/sync reads it, compressed by zlib."""
        self._entries = entries
        self._index = index
        self._folder = folder
        # Open from now on: another job's snapshot may remove the packs.
        self._packs = {path.name: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in folder.glob("*.pack")}

    @cached_property
    def _parts(self) -> Mapping[str, Sequence[Any]]:
        # Most hosts lack nothing, and the JSON of 20,000 files takes a while.
        return _parts(json.loads(self._index)["entries"].values() if self._entries is None else self._entries)

    def size_of(self, number: int) -> int:
        """Return the bytes of a part."""
        return PackedPart(*self._parts[self.numbered[number]]).size

    def read(self, number: int) -> bytes:
        """Return the content of a part. Raises OSError."""
        part = PackedPart(*self._parts[self.numbered[number]])
        if part.pack not in self._packs:
            raise OSError(errno.ENOENT, "it lacks the earlier job's files, and they are no longer kept here")
        return os.pread(self._packs[part.pack], part.size, part.offset)

    @property
    def name(self) -> str:
        """The project's name on hosts, derived from this machine's name and the root."""
        key = sha256(f"{os.uname().nodename}:{self.root}".encode("utf-8", "surrogateescape")).hexdigest()[:12]
        return re.sub(r"[^A-Za-z0-9]+", "-", Path(self.root).name).strip("-")[:40].lower() + f"-{key}"

    @cached_property
    def numbered(self) -> Sequence[str]:
        """The hashes of all parts in the manifest's order; hosts ask for parts by index in this list."""
        return list(self._parts)

    def save(self, directory: Path) -> None:
        """Save the snapshot in the job's directory for a successor; packs are linked. Raises OSError."""
        for name in self._packs:
            _link(self._folder / name, directory / name)
        (directory / _MANIFEST).write_bytes(self.manifest)
        (directory / _SAVED).write_bytes(self._index)

    def close(self) -> None:
        for descriptor in self._packs.values():
            os.close(descriptor)


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory for the content of trees on this machine."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hvlaunch", "snapshots")


def load_snapshot(root: str, directory: Path) -> TreeSnapshot:
    """Return the snapshot in the directory of a killed driver's job. Raises BadUsage."""
    try:
        index = (directory / _SAVED).read_bytes()
        words = json.loads(index)
        entries = words["entries"].values()
        return TreeSnapshot(
            root, directory, words["hash"], (directory / _MANIFEST).read_bytes(), index, entries
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadUsage(f"the job's copy of {root} is gone: {error}") from None


def take_snapshot(root: str, cache: Path, limit: int, clock: Callable[[], float] = time.time) -> TreeSnapshot:
    """Return a snapshot of the tree at `root`, of at most `limit` bytes. `cache` is hvlaunch's directory for trees.

    Raises BadUsage for a tree that can't be copied: too large, unreadable, changing, or with links that lead out of it.
    """
    folder = cache / sha256(root.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    try:
        make_own_directory(str(folder))
        with _locked(folder / "lock"):
            # With the lock: this tree's content is not old any more.
            _drop_old(cache, clock())
            return _Reader(root, folder, limit, clock).snapshot()
    except OSError as error:
        raise BadUsage(f"{root} can't be copied: {error.filename or folder}: {reason(error)}") from None


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[None]:
    """Hold a lock, whose time is that of its last use. Raises OSError."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | flags)
        yield


def _drop_old(cache: Path, now: float) -> None:
    """Remove the content of trees without use for a month, and the oldest while all have more than 20 GB.

    Running jobs keep their content: they hold the packs open.
    """
    ages = sorted((now - _time(folder / "lock"), folder) for folder in cache.iterdir())
    total = 0
    for age, folder in ages:
        total += sum(pack.stat().st_size for pack in folder.glob("*.pack"))
        if age > _KEPT or (total > _MOST and age > _BUSY):
            with suppress(OSError), _locked(folder / "lock", fcntl.LOCK_NB):
                shutil.rmtree(folder)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _link(path: Path, new: Path) -> None:
    try:
        os.link(path, new)
    except OSError:  # another file system
        shutil.copyfile(path, new)


class _Pack:
    """A new file with content. An empty pack is removed at the end."""

    def __init__(self, folder: Path, parts: dict[str, Sequence[Any]]) -> None:
        self._path = folder / f"{time.time_ns():x}.pack"
        self._file = self._path.open("xb", buffering=0)
        self._parts = parts

    def close(self) -> None:
        if not self._file.tell():
            self._path.unlink()
        self._file.close()

    def keep(self, data: bytes) -> Sequence[Any]:
        """Return the fields of the part with this content; add the content unless a pack has it."""
        name = sha256(data).hexdigest()
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = PackedPart(name, len(data), self._path.name, self._file.tell())
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        return part


class _Reader:
    """Reads changes of a tree since the last index. The lock of `folder` is held."""

    def __init__(self, root: str, folder: Path, limit: int, clock: Callable[[], float]) -> None:
        self._root = root
        self._folder = folder
        self._limit = limit
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._record: Mapping[str, Any] = {}
        self._statuses = b""
        directories: dict[str, Directory] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((folder / _DIRECTORIES).read_bytes())
            if record["format"] == _FORMAT:
                directories = {path: Directory(*entry) for path, entry in record["directories"].items()}
                self._record, self._statuses = record, (folder / _STATUSES).read_bytes()
        self._tree = Tree(root, directories)

    def snapshot(self) -> TreeSnapshot:
        statuses = self._tree.look()
        self._check_size(statuses)
        if _packed(statuses) == self._statuses:
            with suppress(FileNotFoundError):
                manifest, index = ((self._folder / name).read_bytes() for name in (_MANIFEST, _INDEX))
                # A file may have lost its end with the machine's power.
                if [len(manifest), len(index)] == self._record["sizes"]:
                    return TreeSnapshot(self._root, self._folder, self._record["hash"], manifest, index)
        with suppress(OSError, ValueError, KeyError, TypeError):
            words = json.loads((self._folder / _INDEX).read_bytes())
            if words["format"] == _FORMAT:
                self._entries = words["entries"]
        with closing(self._open_pack()) as pack:
            statuses = self._read_until_quiet(statuses, pack)
        self._entries = {path: self._entries[path] for path in sorted(statuses)}
        listed = _json(list(self._listed()))
        tree_hash, manifest = sha256(listed).hexdigest(), zlib.compress(listed, 1)
        index = _json({"format": _FORMAT, "hash": tree_hash, "entries": self._entries})
        # Without this file the others do not count, so it goes first and comes last.
        (self._folder / _DIRECTORIES).unlink(missing_ok=True)
        self._write(_MANIFEST, manifest)
        self._write(_INDEX, index)
        self._write(_STATUSES, _packed(statuses))
        record = {"format": _FORMAT, "hash": tree_hash, "sizes": [len(manifest), len(index)]}
        self._write(_DIRECTORIES, _json({**record, "directories": self._tree.directories}))
        return TreeSnapshot(self._root, self._folder, tree_hash, manifest, index, self._entries.values())

    def _read_until_quiet(self, statuses: dict[str, Stat], pack: "_Pack") -> dict[str, Stat]:
        """Read changed files until the tree was still during a whole read."""
        deadline = self._clock() + _PATIENCE
        while True:
            changed = self._changed(statuses)
            self._wait_for_quiet(self._times(statuses, changed))
            read = {path: self._read(path, statuses[path], pack) for path in changed}
            again = self._tree.look()
            if again == statuses and None not in read.values():
                self._entries.update({path: entry for path, entry in read.items() if entry is not None})
                return statuses
            if self._clock() > deadline:
                moving = [path for path in statuses if statuses[path] != again.get(path)] or changed
                raise BadUsage(
                    f"{self._root} keeps changing, so no copy of it would be whole: {moving[0]}",
                    hint="stop the program that writes there, or name the file in .hvlaunchignore",
                )
            statuses = again
            self._check_size(statuses)

    def _times(self, statuses: Mapping[str, Stat], changed: Iterable[str]) -> Iterator[float]:
        """Yield when paths have changed, in seconds."""
        for path in changed:
            yield statuses[path].ctime / 1e9
        # A removed file has no time, but its directory has.
        for path in self._entries.keys() - statuses.keys():
            directory = self._tree.directories.get(path.rpartition("/")[0])
            if directory is not None:
                yield directory.mtime / 1e9

    def _wait_for_quiet(self, times: Iterable[float]) -> None:
        # The file server's clock, which makes the time stamps, may be a moment ahead of ours. A stamp far in the future says nothing.
        age = self._clock() - max(times, default=0.0)
        if -_QUIET < age < _QUIET:
            time.sleep(_QUIET - age)

    def _changed(self, statuses: Mapping[str, Stat]) -> list[str]:
        """Return paths without an equal entry in the index."""
        entries = self._entries
        return [
            path
            for path, status in statuses.items()
            if (entry := entries.get(path)) is None or entry[:_TARGET] != [*status]
        ]

    def _read(self, path: str, status: Stat, pack: "_Pack") -> _Entry | None:
        """Return the entry of a path; None if its status has changed."""
        if stat.S_ISDIR(status.mode):
            return [*status, ""]
        whole = self._tree.path(path)
        try:
            if stat.S_ISLNK(status.mode):
                return [*status, self._target(path, str(Path(whole).readlink()))]
            descriptor = os.open(whole, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 (a descriptor)
            parts = [pack.keep(data) for data in iter(lambda: file.read(PART), b"")]
            is_same = Stat.from_kernel(os.fstat(descriptor)) == status
        return [*status, "", *(value for part in parts for value in part)] if is_same else None

    def _open_pack(self) -> "_Pack":
        """Open a new pack. Begin anew if most content of the other packs is old."""
        packs = list(self._folder.glob("*.pack"))
        parts = _parts(self._entries.values())
        used = sum(size for _, size, *_ in parts.values())
        if sum(pack.stat().st_size for pack in packs) > 2 * used + _SPARE:
            for pack in packs:
                pack.unlink()
            self._entries, parts = {}, {}
        return _Pack(self._folder, parts)

    def _target(self, path: str, target: str) -> str:
        """Return the relative target of a link. Raises BadUsage for a target out of the tree."""
        here = path.rpartition("/")[0]
        if target.startswith("/"):
            target = os.path.relpath(target, f"{self._root}/{here}")
        end = os.path.normpath(f"{here}/{target}" if here else target)
        if end == ".." or end.startswith(("../", "/")):
            raise BadUsage(
                f"{path} is a link that leads out of {self._root}, to {target}",
                hint="copy what it leads to, or name the link in .hvlaunchignore",
            )
        return target

    def _check_size(self, statuses: Mapping[str, Stat]) -> None:
        """Raises BadUsage for too large a tree; the error names the largest entries."""
        total = sum(status.size for status in statuses.values())
        if total <= self._limit:
            return
        sizes: dict[str, int] = {}
        for path, status in statuses.items():
            head, slash, _ = path.partition("/")
            sizes[head + slash] = sizes.get(head + slash, 0) + status.size
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:_LARGEST]
        named = ", ".join(f"{path} {size_words(entry)}" for path, entry in largest if entry)
        raise BadUsage(
            f"{self._root} has {size_words(total)}, and --sync-limit is {size_words(self._limit)}; "
            f"its largest entries: {named}",
            hint="name what hosts do not need in .gitignore or .hvlaunchignore, or raise --sync-limit",
        )

    def _listed(self) -> Iterator[list[Any]]:
        """Yield the manifest: directories, links and files by path, so that parents come first."""
        for path, entry in self._entries.items():
            mode, size = entry[0], entry[1]
            if stat.S_ISDIR(mode):
                yield ["d", path]
            elif stat.S_ISLNK(mode):
                yield ["l", path, entry[_TARGET]]
            else:
                yield ["f", path, int(bool(mode & stat.S_IXUSR)), size, entry[_FIRST_PART::_PART_SIZE]]

    def _write(self, name: str, data: bytes) -> None:
        new = self._folder / f"{name}.new"
        new.write_bytes(data)
        new.replace(self._folder / name)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _packed(statuses: Mapping[str, Stat]) -> bytes:
    """Return all statuses in a form that is quickly compared."""
    # JSON would take four times as long.
    return marshal.dumps([*statuses, *chain.from_iterable(statuses.values())], 2)
