"""Content of files on its way to this host: the list of files, and their parts.

Files come into a directory of their own. Each is named by its content, and ends with `.part` until its content is whole.
"""

from __future__ import annotations

import os
import stat

from hvlaunch.agent.quick import loads
from hvlaunch.agent.wire.frames import or_null, record, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

__all__ = [
    "LARGE",
    "PART",
    "PEER",
    "PIECE",
    "Manifest",
    "PartWriter",
    "TreeFile",
    "copy_content",
    "fields_of",
    "has_content",
    "keep_parts",
    "part_numbers",
    "places_of_parts",
    "ranges_of",
    "read_at",
    "read_part",
    "status_of",
]

PART = 4 << 20  # bytes: content travels, and is checked, in parts of this size
# Bytes after which the next host gets them. Each piece wakes a thread: the records of TLS, of 16 KiB, would wake too many.
PIECE = 1 << 18
_MODES = {0: 0o644, 1: 0o755}
LARGE = 8 << 20  # bytes from which on hosts ask each other
# A secret and a certificate, for content from host to host; null for a single host.
PEER = or_null(record({"secret": text(64), "fingerprint": text(80), "pem": text(1 << 14, raw=True)}))


class TreeFile:
    """A file of the tree. `mode` has its permissions, or is 1 for an executable file and 0 for another one."""

    __slots__ = ("content", "mode", "parts", "path", "size")

    def __init__(self, path: str, mode: int, size: int, parts: List[str]) -> None:
        self.path = path
        self.mode = _MODES.get(mode, mode & 0o777)
        self.size = size
        self.parts = parts
        # Equal content has equal names.
        self.content = parts[0] if len(parts) == 1 else _sha256(",".join(parts).encode("ascii"))


class Manifest:
    """The content of a tree. Raises ValueError for another hash, and for a path out of the tree."""

    def __init__(self, data: bytes, tree_hash: str) -> None:
        if _sha256(data) != tree_hash:
            raise ValueError("the list of files is damaged")
        self.hash = tree_hash
        self.directories: List[str] = []
        self.links: Dict[str, str] = {}
        self.files: List[TreeFile] = []
        parents = {""}
        for entry in loads(data.decode("ascii")):
            path = entry[1]
            parent, _, name = path.rpartition("/")
            # A listed parent is a directory of ours, so no path can lead through a link.
            if parent not in parents or name in ("", ".", "..") or "\0" in name:
                raise ValueError("a path that leads out of the tree: %r" % path)
            if entry[0] == "d":
                parents.add(path)
                self.directories.append(path)
            elif entry[0] == "l":
                self.links[path] = entry[2]
            else:
                self.files.append(TreeFile(path, entry[2], entry[3], entry[4]))
        self._files = {file.path: file for file in self.files}
        self.kinds: Dict[str, str] = dict.fromkeys(self.directories, "d")
        """The kind of each path: directory, link or file."""
        self.kinds.update(dict.fromkeys(self.links, "l"))
        self.kinds.update(dict.fromkeys(self._files, "f"))

    def is_at(self, path: str, place: str) -> bool:
        """True if `place` has what the tree has at `path`."""
        kind = self.kinds[path]
        if kind == "f":
            return has_content(place, self._files[path], None)
        if kind == "l":
            return os.path.islink(place) and os.readlink(place) == self.links[path]
        return os.path.isdir(place) and not os.path.islink(place)


def _sha256(data: bytes) -> str:
    from hashlib import sha256  # noqa: PLC0415 (2 ms, as long as nothing has changed)

    return sha256(data).hexdigest()


def places_of_parts(files: Iterable[TreeFile]) -> Dict[str, List[Tuple[TreeFile, int]]]:
    """Return the files and offsets of each part, in the order of the parts' first places."""
    places: Dict[str, List[Tuple[TreeFile, int]]] = {}
    for file in files:
        for number, part in enumerate(file.parts):
            places.setdefault(part, []).append((file, number * PART))
    return places


class PartWriter:
    """Writes parts in the order of their numbers, each into every file with this part."""

    def __init__(self, folder: str, lacking: Dict[str, TreeFile], numbers: Dict[str, int]) -> None:
        self.received = 0
        self.on_part: Callable[[], None] = lambda: None
        self.on_bytes: Callable[[int, bytearray], None] = lambda _number, _data: None
        self._folder = folder
        self._places: Dict[str, List[Tuple[TreeFile, int]]] = {}
        self._left: Dict[str, int] = {}
        begun = set(os.listdir(folder))
        for file in lacking.values():
            self._add(file, is_begun=file.content + ".part" in begun)
        self.needed = {numbers[part]: part for part in self._places}
        """The parts that have not come, by number."""
        self._order = sorted(self.needed, reverse=True)

    def _add(self, file: TreeFile, *, is_begun: bool) -> None:
        """Note the missing parts of a file: some may have come in an earlier try."""
        path = os.path.join(self._folder, file.content)
        here = _parts_of(path + ".part") if is_begun else []
        missing = [number for number, part in enumerate(file.parts) if here[number : number + 1] != [part]]
        for number in missing:
            self._places.setdefault(file.parts[number], []).append((file, number * PART))
        self._left[file.content] = len(missing)
        if not missing:
            os.rename(path + ".part", path)

    def show_next(self, data: bytearray) -> None:
        """Call `on_bytes` with the number of the next part, and its bytes so far."""
        self.on_bytes(self._order[-1], data)

    def write_next(self, data: bytes) -> bool:
        """Write the next needed part. Return False if the data is not this part, or if it was the last."""
        part = self.needed[self._order[-1]]
        if _sha256(data) != part:
            return False
        for file, offset in self._places[part]:
            path = os.path.join(self._folder, file.content)
            if file.size <= PART:
                # Half of a file has another hash, and does not count: it needs no other name.
                _write(path, data, 0, file.mode, os.O_TRUNC)
                continue
            _write_part(path, data, offset)
            self._left[file.content] -= 1
            if not self._left[file.content]:
                os.rename(path + ".part", path)
        del self.needed[self._order.pop()]
        self.received += len(data)
        self.on_part()
        return bool(self.needed)

    def skip_next(self) -> None:
        """Do without the next part: no file with it becomes whole."""
        del self.needed[self._order.pop()]


def ranges_of(numbers: Iterable[int]) -> Iterator[Tuple[int, int]]:
    """Yield first and last of each run of numbers."""
    first: Optional[int] = None
    last = -1
    for number in numbers:
        if first is None or number != last + 1:
            if first is not None:
                yield first, last
            first = number
        last = number
    if first is not None:
        yield first, last


def part_numbers(ranges: str, count: int) -> List[int]:
    """Read numbers of parts, as `FIRST-LAST,FIRST-LAST`. Raises ValueError for parts beyond `count`."""
    numbers: List[int] = []
    for words in ranges.split(","):
        first, _, last = words.partition("-")
        run = range(int(first), int(last) + 1)
        # Before the numbers take memory: a few letters can name more of them than any machine holds.
        if not run or run[0] < 0 or run[-1] >= count or len(numbers) + len(run) > count:
            raise ValueError("it asked for parts of files that are not there")
        numbers.extend(run)
    return numbers


def read_part(path: str, offset: int, size: int, part: str) -> Optional[bytes]:
    """Return these bytes of a file if they are the part with this hash."""
    try:
        data = read_at(path, offset, size)
    except OSError:
        return None
    return data if _sha256(data) == part else None


def read_at(path: str, offset: int, size: int) -> bytes:
    """Return these bytes of a file, fewer at its end. Raises OSError."""
    # O_NONBLOCK: a FIFO would block here.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)


def status_of(path: str) -> List[int]:
    """Return size, times, inode and mode of a file; empty for no file."""
    try:
        status = os.lstat(path)
    except OSError:
        return []
    if not stat.S_ISREG(status.st_mode):
        return []
    return fields_of(status)


def fields_of(status: os.stat_result) -> List[int]:
    """Return the fields of a status that change with a file."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_mode]


def has_content(path: str, file: TreeFile, entry: Any) -> bool:
    """True if the file at `path` has the content; `entry` is its entry in the index, if any."""
    status = status_of(path)
    if not status or status[0] != file.size:
        return False
    if entry and entry[0] == "f" and entry[2:] == status:
        return bool(entry[1] == file.content)
    return _parts_of(path) == file.parts


def _parts_of(path: str) -> List[str]:
    parts: List[str] = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            while True:
                data = file.read(PART)
                if not data:
                    return parts
                parts.append(_sha256(data))
    except OSError:
        return []


def copy_content(source: str, target: str, file: TreeFile) -> bool:
    """Copy a file of this host, and check its content; False for other content."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(target + ".part", flags, 0o600))
    with open(descriptor, "rb", buffering=0) as from_file:
        for number, part in enumerate(file.parts):
            data = from_file.read(PART)
            if _sha256(data) != part:
                return False
            _write_part(target, data, number * PART)
    os.rename(target + ".part", target)
    return True


def keep_parts(before: str, target: str, file: TreeFile) -> None:
    """Copy the parts of another version of a file with equal content at equal offsets."""
    if file.size <= PART or os.path.exists(target + ".part"):
        return
    try:
        descriptor = os.open(before, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    with open(descriptor, "rb", buffering=0) as from_file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return
        for number, part in enumerate(file.parts):
            data = from_file.read(PART)
            if _sha256(data) == part:
                _write_part(target, data, number * PART)


def _write_part(path: str, data: bytes, offset: int) -> None:
    """Write a part of a file. The file's name ends with `.part` until the file is whole."""
    _write(path + ".part", data, offset, 0o600, 0)


def _write(path: str, data: bytes, offset: int, mode: int, flags: int) -> None:
    flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        if not any(data[:16]) and not data.strip(b"\0") and os.fstat(descriptor).st_size <= offset:
            # A hole takes no space, as in sparse files.
            os.ftruncate(descriptor, offset + len(data))
            return
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(descriptor)
