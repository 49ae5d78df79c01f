"""Makes a copy of the user's working tree on this host: docs/internals/sync.md.

A project has a directory in the user's cache, with one or more copies: `0`, `1`, ... A copy is never changed while a job uses
the copy. A copy has

- `tree`, the directory of the workers. Files of workers stay, as in any working directory;
- `index.json`, a list of the files from the user's tree, with the status of each file after its installation;
- `complete`, with the hash of the tree. The file is missing during a change, so a copy counts whole or not at all;
- `users`, with one empty file for each agent with a job in this copy.

New content is written to `incoming` first, and renamed into the tree when the tree's content is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
import zlib

from hvlaunch.agent.cache import drop_old, is_used, own_directory, own_use
from hvlaunch.agent.wire.shapes import or_null, record, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

    from hvlaunch.agent.errand_runner import ErrandStream
    from hvlaunch.agent.errands.sync.peers import PartServer

__all__ = [
    "ARGUMENTS",
    "PART",
    "RESULT",
    "Manifest",
    "PartWriter",
    "TreeFile",
    "copy_content",
    "has_content",
    "places_of_parts",
    "receive_parts",
    "run",
]

ARGUMENTS = record(
    {
        "project": text(100),  # a name for its directory, unique for a tree of the user's machine
        "hash": text(64),  # of the manifest
        # For content from host to host; null for a single host.
        "peer": or_null(
            record({"secret": text(64), "fingerprint": text(80), "pem": text(1 << 14, raw=True)})
        ),
    }
)
RESULT = record({"directory": text(4096, raw=True), "received": whole(0, 1 << 62)})

PART = 4 << 20  # bytes: content travels, and is checked, in parts of this size
_PROGRESS = 5.0  # seconds between signs of progress, which the driver can't see for itself
_LARGE = 8 << 20  # bytes from which on hosts ask each other
_LARGEST_MANIFEST = 1 << 30


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Return the directory of a copy with this hash. Missing content comes over the stream."""
    name = arguments["project"]
    if not name or name.startswith(".") or "/" in name:
        raise ValueError("no name of a project")
    projects = own_directory("trees")
    project = os.path.join(projects, name)
    os.makedirs(project, 0o700, exist_ok=True)
    # Hosts may share the home directory: the second host waits here, and finds the copy complete.
    with open(os.path.join(project, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        drop_old(projects, name, _has_used_copy)
        result = _Project(project, arguments, stream).update()
    # The host is ready, but others may still fetch content from here, until the driver ends the input.
    stream.write(b"ready " + json.dumps(result).encode("ascii") + b"\n")
    while stream.read(1 << 16):
        pass
    return result


def _has_used_copy(project: str) -> bool:
    return any(is_used(os.path.join(project, copy)) for copy in _copies(project))


def _copies(project: str) -> List[str]:
    return sorted((name for name in os.listdir(project) if name.isdigit()), key=int)


class TreeFile:
    """A file of the tree."""

    def __init__(self, path: str, is_executable: bool, size: int, parts: List[str]) -> None:
        self.path = path
        self.mode = 0o755 if is_executable else 0o644
        self.size = size
        self.parts = parts
        # Equal content has equal names.
        self.content = hashlib.sha256(",".join(parts).encode("ascii")).hexdigest()


class Manifest:
    """The content of a tree. Raises ValueError for another hash, and for a path out of the tree."""

    def __init__(self, data: bytes, tree_hash: str) -> None:
        if hashlib.sha256(data).hexdigest() != tree_hash:
            raise ValueError("the list of files is damaged")
        self.directories: List[str] = []
        self.links: Dict[str, str] = {}
        self.files: List[TreeFile] = []
        parents = {""}
        for entry in json.loads(data.decode("ascii")):
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
                self.files.append(TreeFile(path, bool(entry[2]), entry[3], entry[4]))
        self.paths = {*self.directories, *self.links, *(file.path for file in self.files)}


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
        self._folder = folder
        self._places = places_of_parts(lacking.values())
        self._left = {content: len(file.parts) for content, file in lacking.items()}
        self.needed = {numbers[part]: part for part in self._places}
        """The parts that have not come, by number."""
        self._order = sorted(self.needed, reverse=True)

    def write_next(self, data: bytes) -> bool:
        """Write the next needed part. Return False if the data is not this part, or if it was the last."""
        number = self._order[-1]
        part = self.needed[number]
        if hashlib.sha256(data).hexdigest() != part:
            return False
        for file, offset in self._places[part]:
            path = os.path.join(self._folder, file.content)
            _write_part(path, data, offset)
            self._left[file.content] -= 1
            if not self._left[file.content]:
                os.rename(path + ".part", path)
        del self.needed[self._order.pop()]
        self.received += len(data)
        self.on_part()
        return bool(self.needed)


class _Project:
    """The copies of one project. Its lock is held."""

    def __init__(self, directory: str, arguments: Dict[str, Any], stream: ErrandStream) -> None:
        self._directory = directory
        self._hash: str = arguments["hash"]
        self._peer: Optional[Dict[str, Any]] = arguments["peer"]
        self._stream = stream
        self._incoming = os.path.join(directory, "incoming")
        self._received = 0
        self._indexes: Dict[str, Dict[str, Any]] = {}

    def update(self) -> Dict[str, Any]:
        """Return the result of the errand."""
        copy, is_current = self._choose()
        tree = os.path.join(copy, "tree")
        if not is_current:
            manifest = self._manifest()
            self._fetch(copy, manifest)
            self._install(copy, manifest)
            shutil.rmtree(self._incoming, ignore_errors=True)
        self._use(copy)
        return {"directory": tree, "received": self._received}

    def _choose(self) -> Tuple[str, bool]:
        """Return a complete copy of this tree and True, or the first unused copy and False."""
        copies = [os.path.join(self._directory, name) for name in _copies(self._directory)]
        for copy in copies:
            if _read(os.path.join(copy, "complete")) == self._hash and _is_unchanged(copy, self._index(copy)):
                return copy, True
        for copy in copies:
            if not is_used(copy):
                return copy, False
        copy = os.path.join(self._directory, str(len(copies)))
        for name in ("tree", "users"):
            os.makedirs(os.path.join(copy, name), 0o700, exist_ok=True)
        return copy, False

    def _index(self, copy: str) -> Dict[str, Any]:
        """Return the kind of each path from the user's tree, and the content and status of files."""
        if copy not in self._indexes:
            try:
                self._indexes[copy] = json.loads(_read(os.path.join(copy, "index.json")))
            except ValueError:
                self._indexes[copy] = {}
        return self._indexes[copy]

    def _use(self, copy: str) -> None:
        """Note that this agent's job uses the copy, and no other."""
        user = own_use()
        for name in _copies(self._directory):
            path = os.path.join(self._directory, name, "users", user)
            if os.path.join(self._directory, name) == copy:
                with open(path, "w"):
                    pass
            elif os.path.exists(path):
                os.unlink(path)

    def _manifest(self) -> Manifest:
        self._stream.write(b"manifest\n")
        data = self._stream.read_exactly(int.from_bytes(self._stream.read_exactly(4), "big"))
        return Manifest(zlib.decompressobj().decompress(data, _LARGEST_MANIFEST), self._hash)

    # New content

    def _fetch(self, copy: str, manifest: Manifest) -> None:
        """Bring the content that the tree lacks into `incoming`."""
        os.makedirs(self._incoming, 0o700, exist_ok=True)
        sources = self._sources()
        here = self._index(copy)
        lacking: Dict[str, TreeFile] = {}
        for file in manifest.files:
            path = os.path.join(copy, "tree", file.path)
            if has_content(path, file, here.get(file.path)) or file.content in lacking:
                continue
            incoming = os.path.join(self._incoming, file.content)
            if has_content(incoming, file, None):
                continue
            if not file.parts:
                with open(incoming, "w"):
                    continue
            source = sources.get(file.content)
            if source is not None and copy_content(source, incoming, file):
                continue
            lacking[file.content] = file
        self._check_space(sum(file.size for file in lacking.values()))
        places = places_of_parts(manifest.files)
        numbers = {part: number for number, part in enumerate(places)}
        writer = PartWriter(self._incoming, lacking, numbers)
        peer = self._peer
        if peer is not None and sum(file.size for file in lacking.values()) >= _LARGE:
            server = self._serve(peer, copy, places)
            writer.on_part = server.has_more
            self._stream.write(b"offer %d\n" % server.port)
        while writer.needed:
            receive_parts(self._stream, peer, writer)
        self._received = writer.received

    def _serve(
        self, peer: Dict[str, Any], copy: str, places: Dict[str, List[Tuple[TreeFile, int]]]
    ) -> PartServer:
        """Serve the parts of the tree to other hosts."""
        hashes = list(places)

        def places_of(number: int) -> Iterator[Tuple[str, int]]:
            for file, offset in places[hashes[number]]:
                # It moves from the first to the last while it is installed.
                incoming = os.path.join(self._incoming, file.content)
                yield incoming, offset
                yield incoming + ".part", offset
                yield os.path.join(copy, "tree", file.path), offset

        from hvlaunch.agent.errands.sync.peers import PartServer  # noqa: PLC0415 (few copies are large)

        return PartServer(peer["secret"], peer["pem"], self._directory, hashes, PART, places_of)

    def _sources(self) -> Dict[str, str]:
        """Return paths of content on this host, by the content's name."""
        sources = {}
        for name in _copies(self._directory):
            copy = os.path.join(self._directory, name)
            for path, entry in self._index(copy).items():
                if entry[0] == "f":
                    sources[entry[1]] = os.path.join(copy, "tree", path)
        return sources

    def _check_space(self, size: int) -> None:
        status = os.statvfs(self._directory)
        free = status.f_bavail * status.f_frsize
        if size > free:
            raise OSError(
                "%s has %d MB free, and the files need %d MB" % (self._directory, free >> 20, size >> 20)
            )

    # The tree

    def _install(self, copy: str, manifest: Manifest) -> None:
        """Change the tree to the manifest's; all new content is in `incoming`."""
        tree = os.path.join(copy, "tree")
        before = self._index(copy)
        if os.path.exists(os.path.join(copy, "complete")):
            os.unlink(os.path.join(copy, "complete"))
        # After a kill, the next try finds old and new paths in this list.
        _write(copy, "index.json", json.dumps(dict({path: ["?"] for path in manifest.paths}, **before)))
        _remove_old(tree, before, manifest)
        for path in manifest.directories:
            directory = os.path.join(tree, path)
            if os.path.islink(directory) or not os.path.isdir(directory):
                _remove(directory)
                os.mkdir(directory, 0o755)
        index: Dict[str, Any] = {path: ["d"] for path in manifest.directories}
        for path, target in manifest.links.items():
            link = os.path.join(tree, path)
            if not os.path.islink(link) or os.readlink(link) != target:
                _remove(link)
                os.symlink(target, link)
            index[path] = ["l"]
        last = {file.content: file for file in manifest.files}
        for file in manifest.files:
            index[file.path] = self._install_file(
                tree, file, before.get(file.path), is_last=last[file.content] is file
            )
        _write(copy, "index.json", json.dumps(index))
        _write(copy, "complete", self._hash)

    def _install_file(self, tree: str, file: TreeFile, before: Any, *, is_last: bool) -> List[Any]:
        path = os.path.join(tree, file.path)
        if not has_content(path, file, before):
            _remove(path)
            incoming = os.path.join(self._incoming, file.content)
            if is_last:
                os.rename(incoming, path)
            elif not copy_content(incoming, path, file):
                raise OSError("%s was changed while it was installed" % file.path)
        os.chmod(path, file.mode)
        return ["f", file.content, *_status(path)]


def receive_parts(stream: ErrandStream, peer: Optional[Dict[str, Any]], writer: PartWriter) -> None:
    """Ask for the needed parts, and take them from the driver, or from a host that the driver names."""
    ranges = ",".join("%d-%d" % pair for pair in ranges_of(sorted(writer.needed)))
    stream.write(b"parts " + ranges.encode("ascii") + b"\n")
    answer = json.loads(stream.read_line().decode("ascii"))
    if answer["from"] and peer is not None:
        from hvlaunch.agent.errands.sync.peers import fetch  # noqa: PLC0415 (few copies are large)

        addresses = [(host, port) for host, port in answer["from"]]
        shown = time.monotonic()

        def tell() -> None:
            nonlocal shown
            if time.monotonic() >= shown + _PROGRESS:
                shown = time.monotonic()
                stream.write(b"progress\n")

        def take(data: bytes) -> bool:
            tell()
            return writer.write_next(data)

        fetch(addresses, peer["secret"], peer["fingerprint"], ranges, take, tell)
        return
    while writer.needed:
        size = int.from_bytes(stream.read_exactly(4), "big")
        if not writer.write_next(stream.read_exactly(size)) and writer.needed:
            raise ValueError("a part of a file was damaged on its way")


def ranges_of(numbers: List[int]) -> Iterator[Tuple[int, int]]:
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


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _write(copy: str, name: str, words: str) -> None:
    new = os.path.join(copy, name + ".new")
    with open(new, "w") as file:
        file.write(words)
    os.rename(new, os.path.join(copy, name))


def _status(path: str) -> List[int]:
    """Return size, times and inode of a file; empty for no file."""
    try:
        status = os.lstat(path)
    except OSError:
        return []
    if not stat.S_ISREG(status.st_mode):
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _is_unchanged(copy: str, index: Dict[str, Any]) -> bool:
    """True if every file has the status of its installation, and every link and directory exists."""
    tree = os.path.join(copy, "tree")
    for path, entry in index.items():
        whole_path = tree + "/" + path
        if entry[0] == "f":
            if _status(whole_path) != entry[2:]:
                return False
        elif not (os.path.islink(whole_path) if entry[0] == "l" else os.path.isdir(whole_path)):
            return False
    return True


def has_content(path: str, file: TreeFile, entry: Any) -> bool:
    """True if the file at `path` has the content; `entry` is its entry in the index, if any."""
    status = _status(path)
    if not status or status[0] != file.size:
        return False
    if entry and entry[0] == "f" and entry[2:] == status:
        return bool(entry[1] == file.content)
    return _parts_of(path) == file.parts


def _parts_of(path: str) -> List[str]:
    parts: List[str] = []
    try:
        with open(path, "rb", buffering=0) as file:
            while True:
                data = file.read(PART)
                if not data:
                    return parts
                parts.append(hashlib.sha256(data).hexdigest())
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
            if hashlib.sha256(data).hexdigest() != part:
                return False
            _write_part(target, data, number * PART)
    os.rename(target + ".part", target)
    return True


def _write_part(path: str, data: bytes, offset: int) -> None:
    """Write a part of a file. The file's name ends with `.part` until the file is whole."""
    descriptor = os.open(path + ".part", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(descriptor)


def _remove(path: str) -> None:
    """Remove a file or a link, or an empty directory."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        os.rmdir(path)


def _remove_old(tree: str, before: Dict[str, Any], manifest: Manifest) -> None:
    """Remove files and links that left the tree, and empty directories."""
    kinds = dict.fromkeys(manifest.directories, "d")
    kinds.update(dict.fromkeys(manifest.links, "l"))
    kinds.update({file.path: "f" for file in manifest.files})
    # Children first.
    for path in sorted(before, reverse=True):
        if path in manifest.paths and before[path][0] in (kinds[path], "?"):
            continue
        try:
            _remove(os.path.join(tree, path))
        except OSError:
            if path in manifest.paths:
                raise  # a directory with a job's files, where the tree has a file now
