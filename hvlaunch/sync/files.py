"""Files for hosts and files of hosts: their lists, checked before anything is written, and their content in parts."""

import json
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.errands.offer import CONTROLS, Listing, leads_out, list_files
from hvlaunch.agent.errands.sync.content import PART, Manifest, places_of_parts, ranges_of, read_part
from hvlaunch.agent.quick import loads
from hvlaunch.agent.wire.frames import exactly, flag, record, several, text, whole
from hvlaunch.driver.links.errands import Errand, ErrandFailed, Limits
from hvlaunch.errors import BadUsage
from hvlaunch.owners import reason

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink

__all__ = ["NO_LIMIT", "FileList", "HostFiles", "LocalFiles", "offer_files"]

NO_LIMIT = 1 << 62
"""Bytes, of files that are brought."""
_MOST_LOCAL_FILES = 1 << 30
_MOST_FILES = 100_000
"""Of one host."""
_LIMITS = Limits(seconds=None, memory=1 << 30, output=None)
_LOOK = 1.0
_SILENCE = 60
"""Looks without a byte before a host is given up."""
_LONGEST_LINE = 1 << 20
_LARGEST_LIST = 64 << 20
"""Bytes of a host's list. A list of 200,000 files has about 30 MB."""
_LARGEST_LOCAL_LIST = 1 << 30
_LONGEST_PATH, _LONGEST_NAME = 4000, 255
_HASH = text(64)
_HEAD = record(
    {
        "is_file": flag,
        "size": whole(0, _LARGEST_LIST),
        "port": whole(0, 65535),
        "skipped": several(exactly(text(4096, raw=True), 2), 100),
    }
)
_FORMS: dict[str, Callable[[Any], bool]] = {
    "d": exactly(text(_LONGEST_PATH, raw=True), 2),
    "l": exactly(text(_LONGEST_PATH, raw=True), 3),
    "f": lambda entry: (
        type(entry) is list
        and [type(field) for field in entry] == [str, str, int, int, list]
        and 0 <= entry[2] <= 0o777  # noqa: PLR2004 (permissions)
        and 0 <= entry[3] < NO_LIMIT
        and all(_HASH(part) for part in entry[4])
    ),
}


class FileList:
    """A list of files with the hashes of their parts. `manifest` is the list, compressed. Raises ValueError for a wrong list."""

    def __init__(
        self,
        manifest: bytes,
        *,
        is_file: bool,
        limit: int = NO_LIMIT,
        most_files: int = _MOST_LOCAL_FILES,
        largest: int = _LARGEST_LOCAL_LIST,
    ) -> None:
        self.manifest = manifest
        self.is_file = is_file
        try:
            words = zlib.decompressobj().decompress(manifest, largest)
        except zlib.error:
            raise ValueError("its list of files is damaged") from None
        self.hash = sha256(words).hexdigest()
        check_list(words, limit, most_files, is_file=is_file)
        self.listed = Manifest(words, self.hash)
        self.size, self.count = sum(file.size for file in self.listed.files), len(self.listed.files)
        self._places = places_of_parts(self.listed.files)
        self.numbered: Sequence[str] = list(self._places)
        self._sizes: list[int] = []
        for listed in self._places.values():
            sizes = {min(PART, file.size - offset) for file, offset in listed}
            if len(sizes) != 1:
                raise ValueError("a part of its files has two sizes")
            self._sizes += sizes

    def size_of(self, number: int) -> int:
        return self._sizes[number]

    def read_here(self, path: str, number: int) -> bytes:
        """Return a part of the files at `path` on this machine; empty for another content."""
        part, root = self.numbered[number], Path(path).resolve()
        for file, offset in self._places[part]:
            place = root if self.is_file else root / file.path
            data = read_part(str(place), offset, self._sizes[number], part)
            if data is not None:
                return data
        return b""


class LocalFiles:
    """A file or directory of this machine, listed at its making. Raises BadUsage."""

    def __init__(self, path: str) -> None:
        try:
            self._listing: Listing = list_files(path, None, NO_LIMIT, _MOST_LOCAL_FILES)
        except ValueError as error:
            raise BadUsage(str(error)) from None
        except OSError as error:
            raise BadUsage(f"{error.filename or path}: {reason(error)}") from None
        self.is_file = self._listing.is_file
        words = json.dumps(self._listing.entries, separators=(",", ":")).encode("ascii")
        self.hash = sha256(words).hexdigest()
        self.manifest = zlib.compress(words, 1)
        sizes = [entry[3] for entry in self._listing.entries if entry[0] == "f"]
        self.size, self.count = sum(sizes), len(sizes)

    @property
    def numbered(self) -> Sequence[str]:
        return self._listing.numbered

    def size_of(self, number: int) -> int:
        return self._listing.size_of(number)

    def read(self, number: int) -> bytes:
        """Raises OSError for content with changes since its listing."""
        data = self._listing.read(number)
        if not data:
            path, _ = next(self._listing.places_of(number))
            raise OSError(f"{path} was changed while it was copied")
        return data


def offer_files(
    link: "HostLink",
    path: str,
    globs: Sequence[str] | None = None,
    limit: int = NO_LIMIT,
    peer: Mapping[str, str] | None = None,
    kept: "FileList | LocalFiles | None" = None,
) -> Errand:
    """Let a host list what is at `path`, or its entries that match `globs`, of at most `limit` bytes. Raises ErrandFailed.

    With a `kept` list, the host lists no files, and sends its parts of this list.
    """
    words = None if globs is None else list(globs)
    arguments = {
        "path": path,
        "globs": words,
        "limit": limit,
        "files": _MOST_FILES,
        "peer": peer,
        "hash": None if kept is None else kept.hash,
        "is_file": kept is not None and kept.is_file,
    }
    return link.errands.start("offer", arguments, _LIMITS)


class HostFiles(FileList):
    """Files of a host, which are not trusted: their list is checked. Raises ValueError, ErrandFailed.

    `tell` is called now and then while the host reads its files. A `kept` list, as of offer_files(), is sent to the host.
    """

    def __init__(
        self,
        errand: Errand,
        limit: int,
        tell: Callable[[], None] = lambda: None,
        *,
        host: str,
        kept: "FileList | LocalFiles | None" = None,
    ) -> None:
        self._errand = errand
        self._host = host
        self._lock = threading.Lock()
        self._unread = b""
        while (line := self._line()) == "progress":
            tell()
        self.port = 0
        self.skipped: Sequence[tuple[str, str]] = ()
        if kept is not None:
            if line != "manifest":
                raise ValueError("it asks for no list of files")
            errand.write(len(kept.manifest).to_bytes(4, "big") + kept.manifest)
            super().__init__(kept.manifest, is_file=kept.is_file)
            return
        word, _, words = line.partition(" ")
        head: Any = _read(words) if word == "list" else None
        if not _HEAD(head):
            raise ValueError("its list of files has no head")
        self.port = head["port"]
        self.skipped = [(path, why) for path, why in head["skipped"]]
        manifest = self._exactly(head["size"])
        super().__init__(
            manifest, is_file=head["is_file"], limit=limit, most_files=_MOST_FILES, largest=_LARGEST_LIST
        )

    def read(self, number: int) -> bytes:
        """Raises OSError for content with changes since its listing, or for a lost host."""
        try:
            (data,) = self.parts([number])
        except (ErrandFailed, ValueError) as error:
            detail = error.detail if isinstance(error, ErrandFailed) else str(error)
            raise OSError(f"host {self._host} sends its files no more: {detail}") from error
        if not data:
            raise OSError(f"files of host {self._host} were changed while they were copied")
        return data

    @property
    def has_ended(self) -> bool:
        """True if the host's errand serves no more."""
        return self._errand.has_ended

    def stop(self) -> None:
        """End the host's errand."""
        self._errand.stop()

    def parts(self, numbers: Sequence[int]) -> Iterator[bytes]:
        """Yield parts; an empty part has changed since its listing. Raises ValueError, ErrandFailed."""
        with self._lock:
            ranges = ",".join(f"{first}-{last}" for first, last in ranges_of(numbers))
            self._errand.write(f"{ranges}\n".encode("ascii"))
            for number in numbers:
                size = int.from_bytes(self._exactly(4), "big")
                if size not in (0, self._sizes[number]):
                    raise ValueError("a part of its files has another size than it should")
                yield self._exactly(size)

    def _line(self) -> str:
        while b"\n" not in self._unread:
            if len(self._unread) > _LONGEST_LINE:
                raise ValueError("a line without an end")
            self._read_more()
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode("ascii")

    def _exactly(self, size: int) -> bytes:
        parts, missing = [self._unread[:size]], size - len(self._unread)
        self._unread = self._unread[size:]
        while missing > 0:
            self._read_more()
            parts.append(self._unread[:missing])
            self._unread, missing = self._unread[missing:], missing - len(self._unread)
        return b"".join(parts)

    def _read_more(self) -> None:
        for _ in range(_SILENCE):
            if (data := self._errand.read(_LOOK)) is not None:
                break
        else:
            raise ValueError(f"it sends nothing for {_SILENCE} s")
        if not data:
            self._errand.result()
            raise ValueError("it ended before it had sent all")
        self._unread += data


def check_list(words: bytes, limit: int, most_files: int, *, is_file: bool) -> None:
    """Check a host's list: entries, names, sizes and limits. Raises ValueError."""
    entries = _read(words.decode("ascii"))
    if type(entries) is not list or len(entries) > 2 * most_files:
        raise ValueError("its list of files is too long, or no list")
    size = 0
    for entry in entries:
        kind = entry[0] if type(entry) is list and entry else None
        form = _FORMS.get(kind) if type(kind) is str else None
        if form is None or not form(entry):
            raise ValueError("its list of files has an entry without a form")
        path: str = entry[1]
        if len(path) > _LONGEST_PATH or CONTROLS.search(path):
            raise ValueError("its list of files has a name that no file may have")
        if any(len(name.encode("utf-8", "surrogateescape")) > _LONGEST_NAME for name in path.split("/")):
            raise ValueError("its list of files has a name that is too long")
        if kind == "l" and (leads_out(path, entry[2]) or CONTROLS.search(entry[2])):
            raise ValueError("its list of files has a link that leads out of the directory")
        if kind == "f":
            size += entry[3]
            if len(entry[4]) != -(-entry[3] // PART):
                raise ValueError("its list of files has a file with parts for another size")
    if size > limit:
        raise ValueError("its files are larger than the limit")
    paths = [entry[1] for entry in entries]
    if any(first >= second for first, second in pairwise(paths)):
        raise ValueError("its list of files is not in order")
    if is_file and [entry[0] for entry in entries] != ["f"]:
        raise ValueError("its list has more than the one file")


def _read(words: str) -> Any:
    try:
        return loads(words)
    except (ValueError, RecursionError):
        raise ValueError("its list of files is not JSON") from None
