"""Makes a copy of the user's working tree on this host: docs/internals/sync.md.

A project has a directory in the user's cache, with one or more copies: `0`, `1`, ... A copy is never changed while a job uses
the copy. A fixed place has a single copy, with its files in `.hvlaunch` at the place.

New content is written to `incoming` first, and renamed into the tree when the tree's content is complete. It comes in parts, from
the driver or from other hosts, and what has come is offered to other hosts meanwhile.
"""

from __future__ import annotations

import marshal
import os
import stat
import time
import zlib

from hvlaunch.agent.cache import check_own, drop_old, is_used, locked, own_directory, own_use
from hvlaunch.agent.errands.sync.content import (
    LARGE,
    PART,
    PEER,
    PIECE,
    Manifest,
    PartWriter,
    TreeFile,
    copy_content,
    fields_of,
    has_content,
    keep_parts,
    places_of_parts,
    ranges_of,
    status_of,
)
from hvlaunch.agent.quick import dumps, loads
from hvlaunch.agent.wire.frames import or_null, record, several, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple, Union

    from hvlaunch.agent.errands import ErrandStream

__all__ = [
    "ARGUMENTS",
    "RESULT",
    "Copy",
    "check_room",
    "has_room",
    "receive_all",
    "receive_manifest",
    "run",
]

ARGUMENTS = record(
    {
        "project": text(100),  # a name for its directory, unique for a tree of the user's machine
        "to": or_null(
            text(4096, raw=True)
        ),  # a fixed place, from the home directory on, in place of the cache
        "job": text(64),  # empty for a job that no other driver can see
        "jobs": or_null(
            several(text(64), 10000)
        ),  # the running jobs of this user and driver, which alone use the project
        "hash": text(64),  # of the manifest
        "peer": PEER,
    }
)
RESULT = record({"directory": text(4096, raw=True), "received": whole(0, 1 << 62)})

_OWN = ".hvlaunch"  # at a fixed place, the directory with all that is not the tree


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Return the directory of a copy with this hash. Missing content comes over the stream."""
    name, place = arguments["project"], arguments["to"]
    if not name or name.startswith(".") or "/" in name:
        raise ValueError("no name of a project")
    projects = ""
    if place is None:
        projects = own_directory("trees")
        project = _Project(os.path.join(projects, name), arguments, stream)
    else:
        project = _FixedPlace(_fixed_place(place), arguments, stream)
    # Hosts may share the home directory: the second host waits here, and finds the copy complete.
    with locked(project.directory):
        result = project.update()
    # The host is ready, but others may still fetch content from here, until the driver ends the input.
    stream.write(b"ready " + dumps(result).encode("ascii") + b"\n")
    if projects:
        # After `ready`: no worker waits for the removal.
        drop_old(projects, _parts_of)
    while stream.read(1 << 16):
        pass
    return result


def _parts_of(project: str) -> List[str]:
    """Return the directories of a project for removal, each by itself."""
    incoming = os.path.join(project, "incoming")
    return [*_copies_of(project), *([incoming] if os.path.isdir(incoming) else [])]


def _fixed_place(place: str) -> str:
    """Return the place's path. Raises PermissionError if other users can write there."""
    home = os.path.expanduser("~")
    path = os.path.realpath(os.path.join(home, os.path.expanduser(place)))
    if path in ("/", os.path.realpath(home)):
        raise PermissionError("%s is no place for a project" % path)
    directory = os.path.join(path, _OWN)
    os.makedirs(directory, 0o700, exist_ok=True)
    check_own(path)
    check_own(directory)
    return path


class _Project:
    """The copies of one project in the cache. Its lock is held during an update."""

    def __init__(self, directory: str, arguments: Dict[str, Any], stream: ErrandStream) -> None:
        self.directory = directory
        self._hash: str = arguments["hash"]
        self._job: str = arguments["job"]
        self._jobs: Optional[List[str]] = arguments["jobs"]
        self._peer: Optional[Dict[str, Any]] = arguments["peer"]
        self._stream = stream
        self._incoming = os.path.join(directory, "incoming")
        self._received = 0
        self._copies: List[Copy] = []

    def update(self) -> Dict[str, Any]:
        """Return the result of the errand."""
        self._copies = self._find()
        copy, is_current = self._choose()
        if not is_current:
            manifest = receive_manifest(self._stream, self._hash)
            copy.check_conflicts(manifest)
            missing = copy.missing(manifest)
            self._fetch(copy, manifest, missing)
            copy.install(manifest, missing, self._incoming)
            self._remove_incoming()
        copy.use(self._job)
        for other in self._copies:
            if other is not copy:
                other.leave()
        return {"directory": copy.tree, "received": self._received}

    def _find(self) -> List[Copy]:
        copies = [Copy(directory) for directory in _copies_of(self.directory)]
        for copy in copies:
            # Another user may have made them while the cache was open to all.
            check_own(copy.directory)
            check_own(copy.tree)
        return copies

    def _choose(self) -> Tuple[Copy, bool]:
        """Return a complete copy of this tree and True, or the first unused copy and False."""
        for copy in self._copies:
            if copy.is_current(self._hash):
                return copy, True
        for copy in self._copies:
            if not is_used(copy.directory, jobs=self._jobs):
                return copy, False
        names = {os.path.basename(copy.directory) for copy in self._copies}
        name = next(str(number) for number in range(len(names) + 1) if str(number) not in names)
        copy = Copy(os.path.join(self.directory, name))
        copy.make()
        return copy, False

    # New content

    def _fetch(self, copy: Copy, manifest: Manifest, missing: List[TreeFile]) -> None:
        """Bring the content of missing files into `incoming`."""
        os.makedirs(self._incoming, 0o700, exist_ok=True)
        sources = self._sources({file.content for file in missing})
        come = set(os.listdir(self._incoming))
        lacking: Dict[str, TreeFile] = {}
        for file in missing:
            if file.content in lacking:
                continue
            incoming = os.path.join(self._incoming, file.content)
            if file.content in come and has_content(incoming, file, None):
                continue
            if not file.parts:
                with open(incoming, "w"):
                    continue
            source = sources.get(file.content)
            if source is not None and copy_content(source, incoming, file):
                continue
            lacking[file.content] = file
        self._make_room(lacking)
        for file in lacking.values():
            # The version before has most of a large file with a small change.
            keep_parts(os.path.join(copy.tree, file.path), os.path.join(self._incoming, file.content), file)
        numbers: Dict[str, int] = {}
        for file in manifest.files:
            for part in file.parts:
                numbers.setdefault(part, len(numbers))
        writer = PartWriter(self._incoming, lacking, numbers)
        size = sum(file.size for file in lacking.values())
        self._receive(copy, manifest, writer, list(numbers), size)
        self._received = writer.received

    def _remove_incoming(self) -> None:
        try:
            os.rmdir(self._incoming)  # all its files are in the tree
        except OSError:
            import shutil  # noqa: PLC0415 (takes 5 ms, and few tries are broken off)

            shutil.rmtree(self._incoming, ignore_errors=True)

    def _receive(
        self, copy: Copy, manifest: Manifest, writer: PartWriter, hashes: List[str], size: int
    ) -> None:
        places: Dict[str, List[Tuple[TreeFile, int]]] = {}

        def places_of(number: int) -> Iterator[Tuple[str, int]]:
            if not places:  # few copies are served
                places.update(places_of_parts(manifest.files))
            for file, offset in places[hashes[number]]:
                # The content moves from the first to the last during the installation.
                incoming = os.path.join(self._incoming, file.content)
                yield incoming, offset
                yield incoming + ".part", offset
                yield os.path.join(copy.tree, file.path), offset

        receive_all(self._stream, self._peer, writer, size, self.directory, hashes, places_of)

    def _sources(self, contents: Set[str]) -> Dict[str, str]:
        """Return paths of these contents on this host, by their names."""
        return {
            entry[1]: os.path.join(copy.tree, path)
            for copy in self._copies
            for path, entry in copy.index.items()
            if entry[0] == "f" and entry[1] in contents
        }

    def _make_room(self, lacking: Dict[str, TreeFile]) -> None:
        """Remove unused copies if the disk has no room for these files. Raises OSError if the disk is full even then."""
        if not has_room(self._incoming, lacking.values()):
            self._drop_unused()
        check_room(self._incoming, lacking.values(), self.directory)

    def _drop_unused(self) -> None:
        drop_old(os.path.dirname(self.directory), _parts_of, 0)


class _FixedPlace(_Project):
    """The copy at the user's own place, `path`."""

    def __init__(self, path: str, arguments: Dict[str, Any], stream: ErrandStream) -> None:
        super().__init__(os.path.join(path, _OWN), arguments, stream)
        self._path = path

    def _find(self) -> List[Copy]:
        copy = Copy(self.directory, self._path)
        copy.make()
        return [copy]

    def _choose(self) -> Tuple[Copy, bool]:
        [copy] = self._copies
        if is_used(copy.directory, job=self._job, jobs=self._jobs):
            raise BlockingIOError("%s is in use by another running job" % self._path)
        return copy, copy.is_current(self._hash)

    def _drop_unused(self) -> None:
        pass  # everything beside the place is the user's


_LARGEST_MANIFEST = 1 << 30
_PROGRESS = 1.0  # seconds between signs of progress, which the driver can't see for itself


def receive_manifest(stream: ErrandStream, tree_hash: str) -> Manifest:
    """Ask the driver for the list of files. Raises ValueError for a list with another hash."""
    stream.write(b"manifest\n")
    data = stream.read_exactly(int.from_bytes(stream.read_exactly(4), "big"))
    return Manifest(zlib.decompressobj().decompress(data, _LARGEST_MANIFEST), tree_hash)


def has_room(folder: str, lacking: Iterable[TreeFile]) -> bool:
    """True if the folder's file system has room for these files."""
    size, free = _room(folder, lacking)
    return size <= free


def check_room(folder: str, lacking: Iterable[TreeFile], place: str) -> None:
    """Raises OSError if the folder's file system has no room for these files. `place` is the directory for the user."""
    size, free = _room(folder, lacking)
    if size > free:
        raise OSError("%s has %d MB free, and the files need %d MB" % (place, free >> 20, size >> 20))


def _room(folder: str, lacking: Iterable[TreeFile]) -> Tuple[int, int]:
    """Return the bytes that the files still need, and the free bytes."""
    files = list(lacking)
    # Content of an earlier try is counted by its blocks, because the files have holes.
    begun = {file.content + ".part" for file in files}
    entries = (entry for entry in os.scandir(folder) if entry.name in begun)
    size = sum(file.size for file in files) - sum(entry.stat().st_blocks * 512 for entry in entries)
    status = os.statvfs(folder)
    return size, status.f_bavail * status.f_frsize


def receive_all(
    stream: ErrandStream,
    peer: Optional[Dict[str, Any]],
    writer: PartWriter,
    size: int,
    folder: str,
    hashes: Sequence[str],
    places_of: Callable[[int], Iterator[Tuple[str, int]]],
) -> None:
    """Receive the needed parts, of files with `size` bytes. If these are many, offer all parts to other hosts.

    `hashes` are those of all parts, and `places_of` yields possible places of a part. `folder` is this user's own.
    """
    if peer is not None and size >= LARGE:
        from hvlaunch.agent.errands.sync.peers import PartServer  # noqa: PLC0415 (few copies are large)

        server = PartServer(peer["secret"], peer["pem"], folder, hashes, PART, places_of)
        writer.on_part, writer.on_bytes = server.has_more, server.comes
        stream.write(b"offer %d\n" % server.port)
    while writer.needed:
        _receive_parts(stream, peer, writer)


def _receive_parts(stream: ErrandStream, peer: Optional[Dict[str, Any]], writer: PartWriter) -> None:
    """Ask for the needed parts, and take them from the driver, or from a host that the driver names."""
    ranges = ",".join("%d-%d" % pair for pair in ranges_of(sorted(writer.needed)))
    stream.write(b"parts " + ranges.encode("ascii") + b"\n")
    answer = loads(stream.read_line().decode("ascii").strip())
    if answer["from"] and peer is not None:
        from hvlaunch.agent.errands.sync.peers import fetch  # noqa: PLC0415 (few copies are large)

        addresses = [(host, port) for host, port in answer["from"]]
        shown = time.monotonic()

        def tell(data: bytearray) -> None:
            nonlocal shown
            writer.show_next(data)
            if time.monotonic() >= shown + _PROGRESS:
                shown = time.monotonic()
                stream.write(b"progress %d\n" % writer.received)

        fetch(addresses, peer["secret"], peer["fingerprint"], ranges, writer.write_next, tell)
        return
    while writer.needed:
        size = int.from_bytes(stream.read_exactly(4), "big")
        data = bytearray()
        while len(data) < size:
            data += stream.read_exactly(min(size - len(data), PIECE))
            writer.show_next(data)
        if not writer.write_next(bytes(data)) and writer.needed:
            raise ValueError("a part of a file was damaged on its way")


def _copies_of(project: str) -> List[str]:
    """Return the directories of a project's copies."""
    names = sorted((name for name in os.listdir(project) if name.isdigit()), key=int)
    return [os.path.join(project, name) for name in names]


class Copy:
    """A copy with its files in `directory`. Its lock is held. `tree` is another place for the tree itself.

    A copy has

    - `tree`, the directory of the workers. Files of workers stay, as in any working directory;
    - `index.json`, a list of the files from the user's tree, with the status of each file after its installation;
    - `paths.json` and `statuses`, the same in a form that takes a fourth of the time to compare;
    - `changing.json`, the paths that a change adds or replaces, until it is complete;
    - `theirs.json`, the listed paths with files from before at a fixed place: they are never removed or replaced;
    - `complete`, with the hash of the tree. The file is missing during a change, so a copy counts whole or not at all;
    - `size`, the bytes of the tree;
    - `users`, with a file for each agent with a job in this copy.
    """

    def __init__(self, directory: str, tree: str = "") -> None:
        self.directory = directory
        self.tree = tree or os.path.join(directory, "tree")
        self.is_fixed = bool(tree)
        """True if the tree may have files that hvlaunch has not written, and that must stay."""
        self._index: Optional[Dict[str, Any]] = None
        self._unchanged: Set[str] = set()
        self._theirs: Set[str] = set(self._load("theirs.json", []))

    def make(self) -> None:
        for path in (self.tree, os.path.join(self.directory, "users")):
            os.makedirs(path, 0o700, exist_ok=True)

    @property
    def index(self) -> Dict[str, Any]:
        """The kind of each path from the user's tree, and the content and status of files."""
        # Read when it is needed: a copy without changes does without.
        if self._index is None:
            self._index = self._load("index.json", {})
            # After a kill during a change: old and new paths.
            self._index.update({path: ["?"] for path in self._load("changing.json", [])})
        return self._index

    def is_current(self, tree_hash: str) -> bool:
        """True if the copy is complete and no path has changed since its installation."""
        if _read(os.path.join(self.directory, "complete")) != tree_hash:
            return False
        try:
            # The hash, since other versions of hvlaunch change copies, and not these files.
            of_hash, directories, links, files = self._load("paths.json", [""] * 4)
            with open(os.path.join(self.directory, "statuses"), "rb") as file:
                statuses = file.read()
            return (
                of_hash == tree_hash
                and all(os.path.isdir(self.tree + "/" + path) for path in directories)
                and all(_leads(self.tree + "/" + path, ["l", target]) for path, target in links)
                and self._statuses_of(files) == statuses
            )
        except (OSError, ValueError, TypeError):
            return False  # a path is gone, or a worker has written to these files

    def _statuses_of(self, files: List[str]) -> bytes:
        """Return what `statuses` has if these files have not changed. Raises OSError."""
        fields: List[int] = []
        look = os.stat
        with _Directory(self.tree) as tree:
            for path in files:
                # In place, as fields_of(): calls would take as long as the kernel's answers.
                status = look(path, dir_fd=tree, follow_symlinks=False)
                fields += (
                    status.st_size,
                    status.st_mtime_ns,
                    status.st_ctime_ns,
                    status.st_ino,
                    status.st_mode,
                )
        return _packed(fields)

    def _find_unchanged(self) -> Set[str]:
        """Return the files with the status of their installation."""
        unchanged = set()
        look = os.stat
        with _Directory(self.tree) as tree:
            for path, entry in self.index.items():
                if entry[0] == "f":
                    # In place, as above.
                    try:
                        status = look(path, dir_fd=tree, follow_symlinks=False)
                    except OSError:
                        continue
                    if entry[2:] == [
                        status.st_size,
                        status.st_mtime_ns,
                        status.st_ctime_ns,
                        status.st_ino,
                        status.st_mode,
                    ]:
                        unchanged.add(path)
        return unchanged

    def missing(self, manifest: Manifest) -> List[TreeFile]:
        """Return the files without their content in the tree."""
        missing = []
        unchanged = self._find_unchanged()
        for file in manifest.files:
            if file.path in unchanged:
                if self.index[file.path][1] != file.content:
                    unchanged.remove(file.path)
                    missing.append(file)
            elif not has_content(self.tree + "/" + file.path, file, None):
                missing.append(file)
        self._unchanged = unchanged
        return missing

    def use(self, job: str) -> None:
        """Note that this agent's job uses the copy."""
        with open(os.path.join(self.directory, "users", own_use()), "w") as file:
            file.write(job)

    def leave(self) -> None:
        """Note that this agent's job does not use the copy."""
        path = os.path.join(self.directory, "users", own_use())
        if os.path.exists(path):
            os.unlink(path)

    def check_conflicts(self, manifest: Manifest) -> None:
        """Raises FileExistsError if a fixed place has another file of the user's at a path of the tree."""
        if not self.is_fixed:
            return
        for path in manifest.kinds:
            whole_path = os.path.join(self.tree, path)
            if not os.path.lexists(whole_path):
                self._theirs.discard(path)
            elif path not in self.index or path in self._theirs:
                if not manifest.is_at(path, whole_path):
                    raise FileExistsError(
                        "%s is not from hvlaunch, and the project has another %s: move it away, or name another place"
                        % (whole_path, path)
                    )
                self._theirs.add(path)

    def install(self, manifest: Manifest, missing: List[TreeFile], incoming: str) -> None:
        """Change the tree to the manifest's; the content of `missing` files is in `incoming`."""
        before = self.index
        lacking = {file.path for file in missing}
        if os.path.exists(os.path.join(self.directory, "complete")):
            os.unlink(os.path.join(self.directory, "complete"))
        self._save("theirs.json", sorted(self._theirs))
        self._save(
            "changing.json", [path for path in manifest.kinds if path not in before or path in lacking]
        )
        _write(self.directory, "size", str(sum(file.size for file in manifest.files)))
        self._remove_old(before, manifest)
        for path in manifest.directories:
            directory = os.path.join(self.tree, path)
            if os.path.islink(directory) or not os.path.isdir(directory):
                _remove(directory)
                os.mkdir(directory, 0o755)
        index: Dict[str, Any] = {path: ["d"] for path in manifest.directories}
        for path, target in manifest.links.items():
            link = os.path.join(self.tree, path)
            if not os.path.islink(link) or os.readlink(link) != target:
                _remove(link)
                os.symlink(target, link)
            index[path] = ["l", target]
        last = {file.content: file for file in missing}
        for file in manifest.files:
            path = self.tree + "/" + file.path
            if file.path in lacking:
                self._install_file(path, file, incoming, is_last=last[file.content] is file)
            else:
                entry = before.get(file.path, ["?"])
                if file.path in self._unchanged and stat.S_IMODE(entry[-1]) == file.mode:
                    index[file.path] = entry
                    continue
            status = os.lstat(path)
            if file.path not in self._theirs and status.st_mode & 0o7777 != file.mode:
                os.chmod(path, file.mode)
                status = os.lstat(path)
            index[file.path] = ["f", file.content, *fields_of(status)]
        self._index = index
        self._save("theirs.json", sorted(self._theirs & index.keys()))
        self._save("index.json", index)
        files = [file.path for file in manifest.files]
        self._save("paths.json", [manifest.hash, manifest.directories, list(manifest.links.items()), files])
        fields: List[int] = []
        for name in files:
            fields += index[name][2:]
        _write(self.directory, "statuses", _packed(fields))
        _write(self.directory, "complete", manifest.hash)
        os.unlink(os.path.join(self.directory, "changing.json"))

    def _install_file(self, path: str, file: TreeFile, incoming: str, *, is_last: bool) -> None:
        content = os.path.join(incoming, file.content)
        if not is_last:
            # Not beside `path`: the tree may have a file of any name.
            content = os.path.join(incoming, "copy")
            if not copy_content(os.path.join(incoming, file.content), content, file):
                raise OSError("%s was changed while it was installed" % file.path)
        try:
            os.rename(content, path)
        except IsADirectoryError:
            os.rmdir(path)
            os.rename(content, path)

    def _remove_old(self, before: Dict[str, Any], manifest: Manifest) -> None:
        """Remove files and links that left the tree, and empty directories."""
        kinds = manifest.kinds
        left = [
            path for path, entry in before.items() if path not in kinds or entry[0] not in (kinds[path], "?")
        ]
        # Children first.
        for path in sorted(left, reverse=True):
            whole_path = os.path.join(self.tree, path)
            if self.is_fixed and (path in self._theirs or not _is_ours(whole_path, before[path])):
                continue
            try:
                _remove(whole_path)
            except OSError:
                if path in kinds:
                    raise  # a directory with a job's files, where the tree has a file now

    def _load(self, name: str, default: Any) -> Any:
        try:
            return loads(_read(os.path.join(self.directory, name)))
        except ValueError:
            return default

    def _save(self, name: str, value: Any) -> None:
        _write(self.directory, name, dumps(value))


class _Directory:
    """An open directory, for short paths of its files: the kernel looks up every directory of a path."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _write(directory: str, name: str, content: Union[str, bytes]) -> None:
    new = os.path.join(directory, name + ".new")
    with open(new, "wb") as file:
        file.write(content.encode("ascii") if isinstance(content, str) else content)
    os.rename(new, os.path.join(directory, name))


def _packed(fields: List[int]) -> bytes:
    # JSON would take six times as long. Version 2 has the same bytes for the same numbers, with any Python.
    return marshal.dumps(fields, 2)


def _is_ours(path: str, entry: List[Any]) -> bool:
    """True if a path at a fixed place has not changed since its installation."""
    if entry[0] == "f":
        return status_of(path) == entry[2:]
    if entry[0] == "l":
        return _leads(path, entry)
    return entry[0] == "?" or os.path.isdir(path)


def _leads(path: str, entry: List[Any]) -> bool:
    """True for a link with the target of its installation."""
    return os.path.islink(path) and [os.readlink(path)] == entry[1:]


def _remove(path: str) -> None:
    """Remove a file or a link, or an empty directory."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        os.rmdir(path)
