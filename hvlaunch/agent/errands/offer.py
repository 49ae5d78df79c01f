"""Lists files of this host with the hashes of their content, and sends the content in parts: `hvlaunch cp`, results of a job.

The driver lists its own files by the same functions. A list has only directories, regular files and links that stay within
the directory: docs/internals/sync.md.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import stat
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

from hvlaunch.agent.cache import own_directory
from hvlaunch.agent.errands.sync.content import (
    LARGE,
    PART,
    PEER,
    TreeFile,
    fields_of,
    part_numbers,
    places_of_parts,
    read_at,
    read_part,
)
from hvlaunch.agent.wire.frames import flag, or_null, record, several, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ARGUMENTS", "CONTROLS", "RESULT", "Listing", "Sums", "leads_out", "list_files", "run"]

ARGUMENTS = record(
    {
        "path": text(4096, raw=True),  # relative paths count from the home directory
        "globs": or_null(several(text(4096, raw=True), 1000)),  # null: the path itself, and all below
        "hash": or_null(text(64)),  # of a list that the driver has and sends: nothing is listed here
        "is_file": flag,  # of this list
        "limit": whole(0, 1 << 62),  # bytes
        "files": whole(0, 1 << 30),
        "peer": PEER,
    }
)
RESULT = record({"sent": whole(0, 1 << 62)})

CONTROLS = re.compile("[\\0-\\x1f\\x7f-\\x9f]")
_QUIET = 0.1  # seconds: a file that was changed later may change again without another status
_KEPT = 30 * 86400.0
_READERS = 4
_SIGN = 2.0  # seconds between signs of progress
_MOST_SKIPPED = 100


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Send the list, and then the requested parts, until the driver ends the input."""
    path = os.path.join(os.path.expanduser("~"), os.path.expanduser(arguments["path"]))
    if arguments["hash"] is not None:
        from hvlaunch.agent.errands.sync import receive_manifest  # noqa: PLC0415 (few lists come)

        manifest = receive_manifest(stream, arguments["hash"])
        path = os.path.realpath(path)
        is_file = arguments["is_file"]
        listing = Listing(os.path.dirname(path) if is_file else path, is_file)
        listing.number([_renamed(file, path) for file in manifest.files] if is_file else manifest.files)
        return _serve(listing, stream)
    shown = time.monotonic()

    def tell() -> None:
        nonlocal shown
        if time.monotonic() > shown + _SIGN:
            shown = time.monotonic()
            stream.write(b"progress\n")

    listing = list_files(path, arguments["globs"], arguments["limit"], arguments["files"], tell)
    peer, port = arguments["peer"], 0
    if peer is not None:
        from hvlaunch.agent.errands.sync.peers import PartServer  # noqa: PLC0415 (not for results)

        folder = own_directory("sums")
        port = PartServer(peer["secret"], peer["pem"], folder, listing.numbered, PART, listing.places_of).port
    data = zlib.compress(json.dumps(listing.entries, separators=(",", ":")).encode("ascii"), 1)
    head = {
        "is_file": listing.is_file,
        "size": len(data),
        "port": port,
        "skipped": listing.skipped[:_MOST_SKIPPED],
    }
    stream.write(b"list " + json.dumps(head).encode("ascii") + b"\n" + data)
    return _serve(listing, stream)


def _renamed(file: TreeFile, path: str) -> TreeFile:
    """Return the only file of a list as it is at `path`."""
    return TreeFile(os.path.basename(path), file.mode, file.size, file.parts)


def _serve(listing: Listing, stream: ErrandStream) -> Dict[str, Any]:
    """Send requested parts, empty without their content, until the driver ends the input."""
    sent = 0
    while True:
        try:
            line = stream.read_line()
        except EOFError:
            return {"sent": sent}
        for number in part_numbers(line.decode("ascii").strip(), len(listing.numbered)):
            part = listing.read(number)
            stream.write(len(part).to_bytes(4, "big") + part)
            sent += len(part)


def leads_out(path: str, target: str) -> bool:
    """True if the link at `path` leads out of the tree, or may: its target is absolute, or turns back behind a name.

    Leading `..` lead over directories of the list, and these are no links: chains of links stay inside too.
    """
    words = target.split("/")
    depth = path.count("/")
    while words and words[0] == "..":
        words, depth = words[1:], depth - 1
    return depth < 0 or not target or target.startswith("/") or any(word in ("", "..") for word in words)


class Listing:
    """Entries of a directory, or a single file, for a copy."""

    def __init__(self, root: str, is_file: bool) -> None:
        self.root = root
        self.is_file = is_file
        self.entries: List[List[Any]] = []
        """The manifest: see Manifest in errands/sync."""
        self.skipped: List[Tuple[str, str]] = []
        """Paths missing in the list, and the reasons."""
        self.numbered: List[str] = []
        self._places: Dict[str, List[Tuple[TreeFile, int]]] = {}

    def number(self, files: Sequence[TreeFile]) -> None:
        """Number the parts of the files of the complete list."""
        self._places = places_of_parts(files)
        self.numbered = list(self._places)

    def size_of(self, number: int) -> int:
        file, offset = self._places[self.numbered[number]][0]
        return min(PART, file.size - offset)

    def places_of(self, number: int) -> Iterator[Tuple[str, int]]:
        """Yield path and offset of each place of a part."""
        for file, offset in self._places[self.numbered[number]]:
            yield os.path.join(self.root, file.path), offset

    def read(self, number: int) -> bytes:
        """Return a part; empty if its files have changed since they were listed."""
        size, part = self.size_of(number), self.numbered[number]
        for path, offset in self.places_of(number):
            data = read_part(path, offset, size, part)
            if data is not None:
                return data
        return b""


def list_files(
    path: str,
    globs: Optional[Sequence[str]],
    limit: int,
    most_files: int,
    tell: Callable[[], None] = lambda: None,
) -> Listing:
    """Return what is at `path`, or the entries of the directory that match `globs`.

    Without globs all must be copied: raises ValueError for links that lead out of the directory, sockets and the like.
    Otherwise these are skipped. Raises ValueError too for more than `limit` bytes, and OSError.
    """
    path = os.path.realpath(path)
    status = os.stat(path)
    if globs is None and stat.S_ISREG(status.st_mode):
        listing = Listing(os.path.dirname(path), is_file=True)
        paths: Set[str] = {os.path.basename(path)}
    elif stat.S_ISDIR(status.st_mode):
        listing = Listing(path, is_file=False)
        paths = set()
        for name in _below(path, "") if globs is None else _matches(path, globs):
            paths.add(name)
            tell()
            if len(paths) > most_files:
                raise ValueError("%s has more than %d files" % (path, most_files))
    else:
        raise ValueError("%s is neither a file nor a directory" % path)
    _Reader(listing, is_strict=globs is None, tell=tell).read(paths, limit)
    listing.number([TreeFile(*entry[1:]) for entry in listing.entries if entry[0] == "f"])
    return listing


def _below(root: str, path: str) -> Iterator[str]:
    """Yield each path below a directory, itself not included. Raises OSError."""
    pending = [path]
    while pending:
        directory = pending.pop()
        for entry in os.scandir(os.path.join(root, directory)):
            name = os.path.join(directory, entry.name)
            if entry.is_dir(follow_symlinks=False):
                pending.append(name)
            yield name


def _matches(root: str, globs: Sequence[str]) -> Iterator[str]:
    for glob in globs:
        words = [word for word in glob.split("/") if word not in ("", ".")]
        if not words or ".." in words or glob.startswith("/"):
            raise ValueError("%s does not name files below the directory" % glob)
        yield from _match(root, "", words)


def _match(root: str, path: str, words: Sequence[str]) -> Iterator[str]:
    """Yield matching paths below `path`; a matching directory comes with its content."""
    word, others = words[0], words[1:]
    try:
        entries = list(os.scandir(os.path.join(root, path)))
    except OSError:
        return  # no directory, or none that this user may read
    if word == "**":
        yield from _match(root, path, others or ["*"])
    is_literal = not any(letter in word for letter in "*?[")
    for entry in entries:
        name = os.path.join(path, entry.name)
        is_directory = entry.is_dir(follow_symlinks=False)
        if word == "**":
            if is_directory and not entry.name.startswith("."):
                yield from _match(root, name, words)
        elif entry.name == word or (
            not is_literal
            and fnmatch.fnmatchcase(entry.name, word)
            and (word.startswith(".") or not entry.name.startswith("."))
        ):
            if others:
                # Only links in the user's own words are followed.
                if is_directory or (is_literal and entry.is_dir()):
                    yield from _match(root, name, others)
                continue
            yield name
            if is_directory:
                yield from _below(root, name)


class _Reader:
    """Fills a list with the entries of paths."""

    def __init__(self, listing: Listing, is_strict: bool, tell: Callable[[], None]) -> None:
        self._listing = listing
        self._is_strict = is_strict
        self._tell = tell
        self._size = 0

    def read(self, paths: Set[str], limit: int) -> None:
        """Raises OSError, ValueError."""
        root = self._listing.root
        directories: Set[str] = set()
        links: Dict[str, str] = {}
        files: Dict[str, os.stat_result] = {}
        for path in sorted(paths):  # skipped paths are named in this order
            try:
                status = os.lstat(os.path.join(root, path))
                if CONTROLS.search(path):
                    self._skip(path, "its name has control characters")
                elif stat.S_ISDIR(status.st_mode):
                    directories.add(path)
                elif stat.S_ISLNK(status.st_mode):
                    target = os.readlink(os.path.join(root, path))
                    if leads_out(path, target):
                        self._skip(path, "it is a link that leads out of the directory")
                    else:
                        links[path] = target
                elif stat.S_ISREG(status.st_mode):
                    files[path] = status
                else:
                    self._skip(path, "it is neither a file nor a directory nor a link")
            except OSError as error:  # noqa: PERF203 (each path for itself)
                self._fail(path, error)
        self._check_size({path: status.st_size for path, status in files.items()}, limit)
        parts = self._parts(files)
        for path in [*directories, *links, *parts]:
            while True:
                path = os.path.dirname(path)  # noqa: PLW2901 (its parents)
                if not path:
                    break
                directories.add(path)
        entries: List[List[Any]] = [["d", path] for path in directories]
        entries += [["l", path, target] for path, target in links.items() if path not in directories]
        entries += [
            ["f", path, files[path].st_mode & 0o777, files[path].st_size, hashes]
            for path, hashes in parts.items()
        ]
        # Parents come first. The order is part of the hash.
        self._listing.entries = sorted(entries, key=lambda entry: entry[1])

    def _skip(self, path: str, why: str) -> None:
        if self._is_strict:
            raise ValueError("%s: %s" % (os.path.join(self._listing.root, path), why))
        self._listing.skipped.append((path, why))

    def _fail(self, path: str, error: OSError) -> None:
        if self._is_strict:
            raise error
        self._listing.skipped.append((path, (error.strerror or "it can't be read").lower()))

    def _check_size(self, sizes: Dict[str, int], limit: int) -> None:
        total = sum(sizes.values())
        if total > limit:
            largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
            named = ", ".join("%s %.1f MB" % (path, size / 1e6) for path, size in largest)
            raise ValueError(
                "the files have %.1f MB, more than the limit of %.1f MB; the largest: %s"
                % (total / 1e6, limit / 1e6, named)
            )

    def _parts(self, files: Dict[str, os.stat_result]) -> Dict[str, List[str]]:
        """Return the hashes of each file's parts; skip files with changes meanwhile."""
        root = self._listing.root
        is_large = sum(status.st_size for status in files.values()) >= LARGE
        sums = Sums(root) if is_large else None
        remembered = {path: None if sums is None else sums.get(path, files[path]) for path in files}
        parts: Dict[str, List[str]] = {}
        with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
            pending = {
                path: [
                    readers.submit(_sum, os.path.join(root, path), offset, min(PART, status.st_size - offset))
                    for offset in range(0, status.st_size, PART)
                ]
                for path, status in files.items()
                if remembered[path] is None
            }
            for path, status in files.items():
                hashes = remembered[path]
                if hashes is None:
                    try:
                        hashes = []
                        for reading in pending[path]:
                            hashes.append(reading.result())
                            self._tell()
                        now = os.lstat(os.path.join(root, path))
                    except OSError as error:
                        self._fail(path, error)
                        continue
                    # The beginning of a growing file, such as a log, is copied.
                    if fields_of(now) != fields_of(status) and (
                        self._is_strict or now.st_size < status.st_size
                    ):
                        self._skip(path, "it was changed while it was read")
                        continue
                    if sums is not None and status.st_ctime < time.time() - _QUIET:
                        sums.put(path, status, hashes)
                parts[path] = hashes
        if sums is not None:
            sums.save(parts)
        return parts


def _sum(path: str, offset: int, size: int) -> str:
    """Raises OSError."""
    data = read_at(path, offset, size)
    if len(data) != size:
        raise OSError("it was changed while it was read")
    return hashlib.sha256(data).hexdigest()


class Sums:
    """The hashes of large files by their status, kept in the user's cache: unchanged files are not read again."""

    def __init__(self, root: str) -> None:
        self._file = ""
        self._sums: Dict[str, List[Any]] = {}
        try:
            folder = own_directory("sums")
            self._file = os.path.join(folder, hashlib.sha256(os.fsencode(root)).hexdigest()[:32])
            with open(self._file) as file:
                self._sums = json.load(file)
        except (OSError, ValueError):
            pass

    def get(self, path: str, status: os.stat_result) -> Optional[List[str]]:
        """Return the hashes of a file with this status; None if they are unknown."""
        entry = self._sums.get(path)
        if entry is None or entry[:-1] != fields_of(status):
            return None
        hashes: List[str] = entry[-1]
        return hashes

    def put(self, path: str, status: os.stat_result, hashes: List[str]) -> None:
        self._sums[path] = [*fields_of(status), hashes]

    def save(self, paths: Any) -> None:
        """Keep the hashes of these paths, and remove unused files after a month."""
        if not self._file:
            return
        try:
            with open(self._file + ".new", "w") as file:
                json.dump({path: self._sums[path] for path in paths if path in self._sums}, file)
            os.rename(self._file + ".new", self._file)
            for entry in os.scandir(os.path.dirname(self._file)):
                if entry.stat().st_mtime < time.time() - _KEPT:
                    os.unlink(entry.path)
        except OSError:
            return  # a full disk: the files are read again the next time
