"""Brings files of the user to a place on this host: `hvlaunch cp` and `--bring`. docs/internals/sync.md describes it.

New content is written beside its place, into a directory whose name begins with a dot. A file, or a new directory, gets its name
when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from contextlib import ExitStack

from hvlaunch.agent.cache import locked
from hvlaunch.agent.errands.offer import Sums
from hvlaunch.agent.errands.sync import check_room, receive_all, receive_manifest
from hvlaunch.agent.errands.sync.content import (
    LARGE,
    PEER,
    Manifest,
    PartWriter,
    copy_content,
    has_content,
    places_of_parts,
)
from hvlaunch.agent.wire.frames import flag, record, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Tuple

    from hvlaunch.agent.errands import ErrandStream
    from hvlaunch.agent.errands.sync.content import TreeFile

__all__ = ["ARGUMENTS", "RESULT", "Destination", "run"]

ARGUMENTS = record(
    {
        "path": text(4096, raw=True),  # relative paths count from the home directory
        "is_file": flag,
        "hash": text(64),  # of the manifest
        "peer": PEER,
    }
)
RESULT = record({"directory": text(4096, raw=True), "received": whole(0, 1 << 62)})

_LONGEST_NAME = 200


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Return where the files are, and how many bytes have come."""
    path = os.path.join(os.path.expanduser("~"), os.path.expanduser(arguments["path"]))
    manifest = receive_manifest(stream, arguments["hash"])
    with Destination(path, manifest, is_file=arguments["is_file"]) as destination:
        writer = destination.writer()
        receive_all(
            stream,
            arguments["peer"],
            writer,
            destination.size,
            destination.folder,
            destination.numbered,
            destination.places_of,
        )
        destination.install()
    result = {"directory": destination.path, "received": writer.received}
    # Others may still fetch content from here, until the driver ends the input.
    stream.write(b"ready " + json.dumps(result).encode("ascii") + b"\n")
    while stream.read(1 << 16):
        pass
    return result


class Destination:
    """The place for the files of a manifest. A context: within it no other process changes this place.

    Raises OSError and ValueError for a place that can't take the files.
    """

    def __init__(self, path: str, manifest: Manifest, *, is_file: bool) -> None:
        # A link at the user's path is followed.
        self.path = os.path.realpath(path)
        self._manifest = manifest
        self._is_file = is_file
        parent, name = os.path.split(self.path)
        if not name:
            raise ValueError("%s can't be replaced" % self.path)
        if len(name) > _LONGEST_NAME:
            name = hashlib.sha256(os.fsencode(name)).hexdigest()
        self._parent = parent
        self.folder = os.path.join(parent, ".%s.hvlaunch" % name)
        """The directory for new content, in the same file system."""
        self._places = places_of_parts(manifest.files)
        self.numbered = list(self._places)
        self.size = 0
        """Bytes still to come."""
        self._is_new = False
        self._opened = ExitStack()
        self._sums = Sums(self.path)

    def __enter__(self) -> Destination:  # noqa: PYI034 (Python 3.8 has no Self)
        os.makedirs(self._parent, exist_ok=True)
        self._opened.enter_context(locked(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def writer(self) -> PartWriter:
        """Return the writer for content missing at the place and in the folder."""
        self._check()
        lacking: Dict[str, TreeFile] = {}
        for file in self._manifest.files:
            if file.content in lacking or self._has(file) or has_content(self._incoming(file), file, None):
                continue
            if not file.parts:
                with open(self._incoming(file), "w"):
                    continue
            lacking[file.content] = file
        self.size = sum(file.size for file in lacking.values())
        check_room(self.folder, lacking.values(), self._parent)
        numbers = {part: number for number, part in enumerate(self._places)}
        return PartWriter(self.folder, lacking, numbers)

    def places_of(self, number: int) -> Iterator[Tuple[str, int]]:
        """Yield path and offset of each place of a part: it moves from the first to the last."""
        for file, offset in self._places[self.numbered[number]]:
            incoming = self._incoming(file)
            yield incoming, offset
            yield incoming + ".part", offset
            yield os.path.join(self.folder, "tree", file.path), offset
            yield self._place(file.path), offset

    def install(self, *, is_whole: bool = True) -> List[str]:
        """Give all content its name, and remove the folder. Return the paths of the files.

        Unless `is_whole`, files without their content are left out, and the folder stays with what has come.
        """
        self._check()
        self._is_new = is_whole and not self._is_file and not os.path.lexists(self.path)
        tree = os.path.join(self.folder, "tree") if self._is_new else self.path
        if not self._is_file:
            if self._is_new:
                shutil.rmtree(tree, ignore_errors=True)
            os.makedirs(tree, exist_ok=True)
        for path in self._manifest.directories:
            directory = os.path.join(tree, path)
            if os.path.islink(directory):
                os.unlink(directory)
            os.makedirs(directory, exist_ok=True)
        for path, target in self._manifest.links.items():
            link = os.path.join(tree, path)
            if not os.path.islink(link) or os.readlink(link) != target:
                if os.path.lexists(link):
                    os.unlink(link)
                os.symlink(target, link)
        last = {file.content: file for file in self._manifest.files}
        installed: List[str] = []
        for file in self._manifest.files:
            place = self.path if self._is_file else os.path.join(tree, file.path)
            if self._install_file(file, place, is_last=last[file.content] is file):
                installed.append(file.path)
            elif is_whole:
                raise OSError("%s was changed while it was copied" % file.path)
        if self._is_new:
            os.rename(tree, self.path)
        if sum(file.size for file in self._manifest.files) >= LARGE:
            for file in self._manifest.files:
                if file.path in installed:
                    self._sums.put(file.path, os.lstat(self._place(file.path)), file.parts)
            self._sums.save(installed)
        if is_whole:
            self.clear()
        return installed

    def clear(self) -> None:
        """Remove the folder for new content."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _place(self, path: str) -> str:
        return self.path if self._is_file or not path else os.path.join(self.path, path)

    def _incoming(self, file: TreeFile) -> str:
        return os.path.join(self.folder, file.content)

    def _has(self, file: TreeFile) -> bool:
        """True if the file is at its place, with its content."""
        place = self._place(file.path)
        try:
            status = os.lstat(place)
        except OSError:
            return False
        parts = self._sums.get(file.path, status) if stat.S_ISREG(status.st_mode) else None
        return parts == file.parts if parts is not None else has_content(place, file, None)

    def _install_file(self, file: TreeFile, place: str, *, is_last: bool) -> bool:
        """Return False if the content is not here, or has changed."""
        incoming, mode = self._incoming(file), file.mode | 0o600
        if not os.path.exists(incoming):
            if not self._has(file):
                return False
            if stat.S_IMODE(os.lstat(place).st_mode) != mode:
                os.chmod(place, mode)
            return True
        if not is_last:
            if not copy_content(incoming, incoming + ".copy", file):
                return False
            incoming += ".copy"
        os.chmod(incoming, mode)
        os.rename(incoming, place)
        return True

    def _check(self) -> None:
        """Raises OSError for a directory at the place of a file or link, and for a file at the place of a directory."""
        if not self._is_file:
            for path in ["", *self._manifest.directories]:
                place = self._place(path)
                if os.path.lexists(place) and not os.path.isdir(place):
                    raise NotADirectoryError("%s is no directory, and a directory would replace it" % place)
        for path in [*self._manifest.links, *(file.path for file in self._manifest.files)]:
            place = self._place(path)
            if os.path.isdir(place) and not os.path.islink(place):
                raise IsADirectoryError("%s is a directory, and a file would replace it" % place)
