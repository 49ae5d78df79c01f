"""Commits on disk, for a job that begins after all of its hosts were lost.

A file is a commit's file in memory, byte for byte, hence its checksums are those of the tensors as committed. Its name has the
version; a version counts if every rank's file is there. A file gets its name after its content is on the disk.
Hosts therefore need no common moment, and a killed writer leaves no version.
"""

from __future__ import annotations

import os
import re
import zlib
from typing import Dict, Iterable, List, Match, NamedTuple, Set, Tuple

from hvlaunch.agent import commits
from hvlaunch.agent.commits import CHUNK, PAGE, KeptCommit

__all__ = ["KEEP", "Saved", "SavedVersion", "complete", "prepare", "prune", "save", "saved", "versions"]

KEEP = 2
"""Complete versions that stay: the newest may prove corrupt."""
SavedVersion = Tuple[int, int, int]
"""Generation, round and step. A job that is started again counts its rounds from 0 again, and has a later generation."""
_ID = 32
"""Length of a directory's id."""
_NAME = re.compile(r"(?P<part>\.)?.+\.(\d+)-(\d+)-(\d+)(?(part)\.part)")
_SYNC_EVERY = 256 << 20
"""Bytes between two waits for the disk: more unwritten memory would press the workers."""


class Saved(NamedTuple):
    """A commit on disk."""

    generation: int
    commit: KeptCommit

    @property
    def version(self) -> SavedVersion:
        return (self.generation, *self.commit.version)


def saved(directory: str) -> List[Saved]:
    """Return the commits in the directory by their headers, newest first. Raises OSError."""
    items = []
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name)
        if match is not None and not match["part"]:
            commit = commits.read_commit(os.path.join(directory, name))
            version = _version(match)
            if commit is not None and commit.version == version[1:]:
                items.append(Saved(version[0], commit))
    return sorted(items, key=lambda item: item.version, reverse=True)


def _version(match: Match[str]) -> SavedVersion:
    generation, number, step = match.groups()[1:]
    return int(generation), int(number), int(step)


def complete(items: Iterable[Saved]) -> Dict[str, List[SavedVersion]]:
    """Return the numbers with a file for each rank, by family, newest first."""
    names: Dict[Tuple[str, SavedVersion, int], Set[str]] = {}
    for item in items:
        key = commits.family_of(item.commit), item.version, item.commit.size
        names.setdefault(key, set()).add(item.commit.name)
    numbers: Dict[str, List[SavedVersion]] = {}
    for (family, version, size), members in names.items():
        if len(members) == max(1, size):
            numbers.setdefault(family, []).append(version)
    return {family: sorted(items, reverse=True) for family, items in numbers.items()}


def versions(directory: str) -> Dict[str, List[List[Saved]]]:
    """Return the files of each complete version by family, newest first. An unreadable directory has no version."""
    try:
        items = saved(directory)
    except OSError:
        return {}
    return {
        family: [
            [item for item in items if item.version == version and commits.family_of(item.commit) == family]
            for version in numbers
        ]
        for family, numbers in complete(items).items()
    }


def prepare(directory: str) -> str:
    """Make the last part of the directory if it is missing, and write a file as a test. Raises OSError.

    Returns the directory's id, the same for all hosts that share it; empty if it can't be known.
    """
    try:
        # Not its parents: an absent mount must not become a directory on the host's own disk.
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    probe = os.path.join(directory, ".hvlaunch-%s-%d" % (os.uname().nodename, os.getpid()))
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, os.urandom(_ID // 2).hex().encode("ascii"))
        return _identity(directory, probe)
    finally:
        os.close(descriptor)
        os.unlink(probe)


def _identity(directory: str, proposal: str) -> str:
    path = os.path.join(directory, ".hvlaunch-directory")
    try:
        try:
            # Whole or not at all; a file server decides which host is the first.
            os.link(proposal, path)
        except FileExistsError:
            pass
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            words = os.read(descriptor, _ID + 1).decode("ascii", "replace")
        finally:
            os.close(descriptor)
    except OSError:
        # No hard links there, or another user's file.
        return ""
    return words if len(words) == _ID and words.isalnum() else ""


def save(directory: str, generation: int, commit: KeptCommit, source: int) -> None:
    """Write the commit in the open file `source`, whose lock the caller holds. Raises OSError; ValueError for a corrupt commit."""
    name = "%s.%d-%d-%d" % (commit.name, generation, *commit.version)
    part = os.path.join(directory, ".%s.part" % name)
    try:
        descriptor = os.open(
            part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            _copy(source, descriptor, commit)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(part, os.path.join(directory, name))
    except BaseException:
        _remove(part)
        raise
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _copy(source: int, target: int, commit: KeptCommit) -> None:
    head, table = os.pread(source, PAGE, 0), commits.table_of(source, commit)
    if not head.startswith(commits.header_of(commit, table)):
        raise ValueError("the workers have a newer commit by now")
    _write(target, head)
    unwritten = 0
    for number, begin in enumerate(range(0, commit.length, CHUNK)):
        data = os.pread(source, min(CHUNK, commit.length - begin), PAGE + begin)
        # A corrupt version on disk would take the place of a whole one.
        if zlib.crc32(data) != int.from_bytes(table[4 * number : 4 * number + 4], "little"):
            raise ValueError("its checksums in memory differ")
        _write(target, data)
        unwritten += len(data)
        if unwritten >= _SYNC_EVERY:
            os.fdatasync(target)
            unwritten = 0
    _write(target, table)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def prune(directory: str) -> None:
    """Remove the files before the newest complete versions of each family, unfinished files included. Raises OSError."""
    items = saved(directory)
    oldest = {
        family: numbers[KEEP - 1] for family, numbers in complete(items).items() if len(numbers) >= KEEP
    }
    for item in items:
        bound = oldest.get(commits.family_of(item.commit))
        if bound is not None and item.version < bound:
            _remove(item.commit.path)
    # A family that ended long ago must not keep the leavings of others.
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name)
        if match is not None and match["part"] and oldest and _version(match) < min(oldest.values()):
            _remove(os.path.join(directory, name))


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # another host was faster, or the disk is gone
