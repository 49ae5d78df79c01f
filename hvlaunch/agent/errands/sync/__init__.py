"""Makes a copy of the user's working tree on this host: docs/internals/sync.md.

A project has a directory in the user's cache, with one or more copies: `0`, `1`, ... A copy is never changed while a job uses
the copy. A fixed place has a single copy, with its files in `.hvlaunch` at the place.

New content is written to `incoming` first, and renamed into the tree when the tree's content is complete.
"""

from __future__ import annotations

import os

from hvlaunch.agent.cache import check_own, drop_old, is_used, locked, own_directory
from hvlaunch.agent.errands.sync.arrival import check_room, has_room, receive_all, receive_manifest
from hvlaunch.agent.errands.sync.content import (
    PEER,
    PartWriter,
    TreeFile,
    copy_content,
    has_content,
    keep_parts,
    places_of_parts,
)
from hvlaunch.agent.errands.sync.copies import Copy, copies_of
from hvlaunch.agent.quick import dumps
from hvlaunch.agent.wire.frames import or_null, record, several, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

    from hvlaunch.agent.errands import ErrandStream
    from hvlaunch.agent.errands.sync.content import Manifest

__all__ = ["ARGUMENTS", "RESULT", "run"]

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
    return [*copies_of(project), *([incoming] if os.path.isdir(incoming) else [])]


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
        copies = [Copy(directory) for directory in copies_of(self.directory)]
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
