"""Commits of workers in memory: files, checksums, and the choice of the version to restore.

Files in /dev/shm outlive the workers; the guardian removes these files with the job's private directory. Each state has three files:
the newest whole version and a pinned version stand while the third file is written. A state common to the ranks has two files. The
header comes last: a file without a valid header is no commit.

Workers import this module too, hence its only imports are of the standard library and of proc.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import shutil
import stat
import struct
import threading
import time
import zlib
from contextlib import contextmanager
from typing import (
    Callable,
    Collection,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from hvlaunch.agent.proc import LEAST_ROOM, commit_room

__all__ = [
    "CHUNK",
    "COPIES",
    "PAGE",
    "KeptCommit",
    "NoRoom",
    "Version",
    "begin",
    "buddies",
    "choose",
    "copies",
    "directory_of",
    "family_of",
    "forget",
    "free_files",
    "header_of",
    "held",
    "is_first_to_say",
    "is_whole",
    "little_room",
    "lock_shared",
    "make_directory",
    "newest",
    "pins",
    "prepare",
    "read_commit",
    "release",
    "seal",
    "set_pins",
    "shared_lock",
    "size_of_file",
    "table_of",
]

Version = Tuple[int, int]
"""Round and step. The same step of a later round is another version: its values may differ."""

PAGE = 4096
"""Bytes of a header with its padding, before the content."""
CHUNK = 4 << 20
"""Bytes of content for each checksum.

crc32 is the fastest checksum of the standard library: 7 GB/s per core, against 0.6 GB/s of blake2b. crc32 detects every error of up
to 32 bits in a row and misses 1 of 4 billion others. The digest of the header covers the list of checksums.
"""
_MAGIC = b"hvlkept1"
_HEADER = struct.Struct("<8sQQIQQ128s16s")
_DIGEST = 16
_LONGEST_NAME = 120
_SHM = "/dev/shm"  # noqa: S108 (the directories in it are private)
_SUFFIX = ".kept"
_PREFIX = "hvlaunch-"
_STALE = 86400.0
"""Seconds without a sign of life before removal of a directory, as after a killed guardian."""
COPIES = "copies"
"""The directory of other hosts' commits, in the directory of commits."""
_PINS = "pins"
_HOLD = 5.0
"""Seconds for the driver to choose a version. A driver may be gone, and training must continue."""
_PAUSE = 0.01
_THREADS = 4


class NoRoom(Exception):
    """The host has too little memory for a commit; `args[0]` says how much, and what to do."""


class KeptCommit(NamedTuple):
    """A whole version of a state, in a file."""

    name: str
    """The state's name: for a rank, or common to the ranks."""
    round: int
    step: int
    size: int
    """Number of ranks with such a state each; 0 for a common state."""
    meta: int
    """Bytes of the content before the tensors."""
    length: int
    """Bytes of the content."""
    path: str = ""

    @property
    def version(self) -> Version:
        return self.round, self.step


def family_of(commit: KeptCommit) -> str:
    """Return the name that the states of all ranks share."""
    return commit.name.rpartition(".")[0] if commit.size else commit.name


def directory_of(scratch: str) -> str:
    """Return the directory of commits for the job's private directory on this host, whether or not made."""
    return os.path.join(_SHM, os.path.basename(scratch) + _SUFFIX)


def make_directory(scratch: str) -> str:
    """Make the directory of commits if needed, and return its path. Raises OSError."""
    path = directory_of(scratch)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise PermissionError("%s is not ours" % path) from None
        return path
    with open(os.path.join(path, "scratch"), "w") as file:
        file.write(scratch)
    # Once for each job: the directory is rarely long, and no job waits for the agent of another.
    _remove_stale()
    return path


def _remove_stale() -> None:
    """Remove directories of this user's jobs after the death of agent and guardian. Agents set the time of their private directory."""
    for name in os.listdir(_SHM):
        path = os.path.join(_SHM, name)
        if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            continue
        try:
            with open(os.path.join(path, "scratch")) as file:
                scratch = file.read()
            try:
                seen = os.stat(scratch).st_mtime
            except FileNotFoundError:
                seen = os.stat(path).st_mtime
            if (
                os.stat(path).st_uid == os.getuid()
                and max(seen, os.stat(path).st_mtime) < time.time() - _STALE
            ):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # another user's, or one that is being removed


def size_of_file(length: int) -> int:
    """Return the bytes of a file for content of this length."""
    return PAGE + length + 4 * _chunks(length)


def _chunks(length: int) -> int:
    return -(-length // CHUNK)


def free_files(
    whole: Mapping[str, Version], paths: Sequence[str], pinned: Collection[Version], *, is_held: bool
) -> List[str]:
    """Return the files for the next version, the best first; `whole` are the versions by file.

    `is_held`: the driver is choosing a version to pin, and needs each of them. Empty if the writer must wait.
    """
    unwritten = [path for path in paths if path not in whole]
    if unwritten or is_held:
        return unwritten
    newest = max(whole.values())
    # With two pins the newest version gives way, since other hosts have pinned ones too. Wrong pins must not stop training.
    for kept in ({newest, *pinned}, set(pinned), {newest}):
        free = [path for path in paths if whole[path] not in kept]
        if free:
            return sorted(free, key=lambda path: whole[path])
    return []


def begin(
    directory: str,
    commit: KeptCommit,
    pinned: Callable[[], Tuple[Collection[Version], bool]] = lambda: ((), False),
    *,
    is_saved: bool = False,
    states: int = 1,
) -> int:
    """Return the descriptor of a file for the commit, locked and without a valid header; the caller releases the descriptor.

    The newest whole version and pinned versions stay, for common states the newest alone. Waits for a reader of the only other
    file. `pinned` returns the pins, as pins() does. `is_saved`: one more file, since a slow disk may read one for minutes. `states`:
    number of states of this size in the directory; there must be room for all their files. Raises NoRoom, OSError.
    """
    if len(commit.name.encode()) > _LONGEST_NAME or "/" in commit.name:
        raise ValueError("%r can't be the name of a state" % commit.name)
    paths = _paths(directory, commit, is_saved)
    whole = {path: kept.version for path in paths for kept in [read_commit(path)] if kept is not None}
    deadline = time.monotonic() + _HOLD
    free: List[str] = []
    while not free:
        versions, is_held = pinned() if commit.size else ((), False)
        free = free_files(whole, paths, versions, is_held=is_held and time.monotonic() < deadline)
        if not free:
            time.sleep(_PAUSE)
    size = size_of_file(commit.length)
    missing = sum(max(0, size - _memory(path)) for path in paths)
    # A state with all of its files needs nothing more, whatever the others need.
    if missing:
        _check_room(max(missing, states * len(paths) * size - _in_use(directory, commit)), states)
    descriptor = _locked(free)
    try:
        # The header first: nothing of the old version may count from here on.
        os.pwrite(descriptor, bytes(PAGE), 0)
        if os.fstat(descriptor).st_size > size:
            os.ftruncate(descriptor, size)
        status = os.fstat(descriptor)
        # A file with all of its pages needs no look at each of them, which takes as long as the copy.
        if status.st_size < size or status.st_blocks * 512 < size:
            # The memory now: a write to a mapping that finds no memory would kill the process.
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        release(descriptor)
        raise NoRoom("%s: %s" % (_SHM, os.strerror(error.errno or 0).lower())) from None
    return descriptor


def prepare(directory: str, commit: KeptCommit, *, is_saved: bool = False) -> Optional[int]:
    """Return the descriptor of a new, empty file for a later commit like this, locked; None if every file exists.

    The caller may give the file memory before the commit needs it, and releases the descriptor. Raises NoRoom, OSError.
    """
    new = [path for path in _paths(directory, commit, is_saved) if not os.path.exists(path)]
    if not new:
        return None
    _check_room(size_of_file(commit.length), 1)
    return _locked(new[:1])


def _paths(directory: str, commit: KeptCommit, is_saved: bool) -> List[str]:
    count = (3 if commit.size else 2) + is_saved
    return [os.path.join(directory, "%s.%d" % (commit.name, number)) for number in range(count)]


def _in_use(directory: str, commit: KeptCommit) -> int:
    """Return the memory of the files of all states like this one."""
    pattern = re.escape(family_of(commit)) + (r"\.\d+" if commit.size else "") + r"\.\d"
    paths = [os.path.join(directory, name) for name in os.listdir(directory) if re.fullmatch(pattern, name)]
    return sum(map(_memory, paths))


def _memory(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0


def _check_room(missing: int, states: int) -> None:
    """Raise NoRoom unless the room for commits suffices."""
    # All files of all ranks: each rank alone would find room for its own, and together they would take more than there is.
    if missing > 0:
        room = commit_room()
        if missing > room.size:
            words = "%s %s more, and half of the %s free in %s is less; try: %s"
            need = "they need" if states == 1 else "those of %d workers need" % states
            raise NoRoom(words % (need, _size(missing), _size(2 * room.size), room.place, room.remedy))


def little_room(states: int) -> Optional[str]:
    """Return a warning if commits of so many states hardly have room, whatever their size; None with room."""
    room = commit_room()
    if room.size >= states * LEAST_ROOM:
        return None
    words = "commits have room for %s, half of what is free in %s: hardly enough for %d %s; try: %s"
    workers = "worker" if states == 1 else "workers"
    return words % (_size(room.size), room.place, states, workers, room.remedy)


def is_first_to_say(directory: str, topic: str) -> bool:
    """Return True for the first caller of the host's workers: each topic is worth one message."""
    try:
        os.close(
            os.open(os.path.join(directory, ".said-" + topic), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        )
    except FileExistsError:
        return False
    except OSError:
        pass  # no room even for this file: the message matters more than its repetition
    return True


def _size(count: int) -> str:
    return "%.1f GB" % (count / 1e9) if count >= 1e9 else "%.1f MB" % (count / 1e6)  # noqa: PLR2004 (a gigabyte)


def _locked(paths: List[str]) -> int:
    # First any file that is free at once, then the best one: training waits for this.
    for patience in (fcntl.LOCK_NB, 0):
        for path in paths:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | patience)
            except BlockingIOError:
                os.close(descriptor)
                continue
            return descriptor
    raise OSError("no file for a commit")


def _sums(content: memoryview) -> bytes:
    """Return the checksums of the chunks. Threads share the work: crc32 releases Python's lock."""
    count = _chunks(len(content))
    sums = [0] * count

    def work(first: int) -> None:
        for number in range(first, count, _THREADS):
            sums[number] = zlib.crc32(content[number * CHUNK : (number + 1) * CHUNK])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(1, min(_THREADS, count))]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    return struct.pack("<%dI" % count, *sums)


def seal(
    descriptor: int,
    commit: KeptCommit,
    table: Optional[bytes] = None,
    mapped: Optional[mmap.mmap] = None,
) -> None:
    """Make the content of the file a commit. `mapped`: a mapping of the file, which saves the page faults of another.

    Raises ValueError if `table`, the checksums at its origin, does not fit the content.
    """
    if mapped is None:
        with _mapped(descriptor, commit) as content:
            sums = _sums(content)
    else:
        with memoryview(mapped) as whole, whole[PAGE : PAGE + commit.length] as content:
            sums = _sums(content)
    if table is not None and table != sums:
        raise ValueError("checksums of %s do not fit its content" % commit.name)
    os.pwrite(descriptor, sums, PAGE + commit.length)
    os.pwrite(descriptor, header_of(commit, sums), 0)


def header_of(commit: KeptCommit, sums: bytes) -> bytes:
    name = commit.name.encode()
    fields = commit.round, commit.step, commit.size, commit.meta, commit.length
    # The header has a checksum of its own, since a killed writer may leave half of it.
    head = _HEADER.pack(_MAGIC, *fields, name, hashlib.blake2b(sums, digest_size=_DIGEST).digest())
    return head + hashlib.blake2b(head, digest_size=_DIGEST).digest()


@contextmanager
def _mapped(descriptor: int, commit: KeptCommit) -> Iterator[memoryview]:
    mapped = mmap.mmap(descriptor, PAGE + commit.length, access=mmap.ACCESS_READ)
    with mapped, memoryview(mapped) as whole, whole[PAGE:] as content:
        yield content


def is_whole(descriptor: int, commit: KeptCommit) -> bool:
    """Return True if the file still has this commit, with the checksums of its making."""
    head = os.pread(descriptor, _HEADER.size + _DIGEST, 0)
    table = table_of(descriptor, commit)
    if head != header_of(commit, table) or os.fstat(descriptor).st_size < size_of_file(commit.length):
        return False
    with _mapped(descriptor, commit) as content:
        return _sums(content) == table


def table_of(descriptor: int, commit: KeptCommit) -> bytes:
    """Return the checksums in the file."""
    return os.pread(descriptor, 4 * _chunks(commit.length), PAGE + commit.length)


def read_commit(path: str) -> Optional[KeptCommit]:
    """Return the commit in the file by its header alone; None without a valid header."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEADER.size + _DIGEST)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if len(head) < _HEADER.size + _DIGEST:
        return None
    if hashlib.blake2b(head[:-_DIGEST], digest_size=_DIGEST).digest() != head[-_DIGEST:]:
        return None
    magic, number, step, ranks, meta, length, name, _ = _HEADER.unpack(head[:-_DIGEST])
    text = name.rstrip(b"\0").decode("utf-8", "replace")
    # A file under another state's name is not this state's, however whole.
    if magic != _MAGIC or size < size_of_file(length) or os.path.basename(path).rpartition(".")[0] != text:
        return None
    return KeptCommit(text, number, step, ranks, meta, length, path)


def held(directory: str) -> List[KeptCommit]:
    """Return the commits in the directory, copies included, by their headers without a check of the content. Newest first."""
    paths = []
    for folder in (directory, os.path.join(directory, COPIES)):
        try:
            paths += [os.path.join(folder, name) for name in os.listdir(folder)]
        except OSError:  # noqa: PERF203 (there are two)
            continue
    commits = [commit for commit in map(read_commit, paths) if commit is not None]
    return sorted(commits, key=lambda commit: commit.version, reverse=True)


def lock_shared(commit: KeptCommit) -> int:
    """Open the commit's file and keep writers away until release() of the returned descriptor. Raises OSError."""
    descriptor = os.open(commit.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def shared_lock(commit: KeptCommit) -> Iterator[int]:
    """Open the commit's file and keep writers away. Yields the descriptor. Raises OSError."""
    descriptor = lock_shared(commit)
    try:
        yield descriptor
    finally:
        release(descriptor)


def release(descriptor: int) -> None:
    """Unlock and close a file."""
    # A mapping has a duplicate of the descriptor, with which the lock would live on.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def set_pins(directory: str, versions: Iterable[Version], *, is_held: bool) -> None:
    """Set the pinned versions. `is_held`: writers keep every whole version for a moment. Raises OSError."""
    path = os.path.join(directory, _PINS)
    with open(path + ".new", "w") as file:
        file.write("%d\n" % is_held)
        file.writelines("%d %d\n" % version for version in versions)
    # Writers see the old pins or the new ones, never half of a list.
    os.rename(path + ".new", path)


def pins(directory: str) -> Tuple[List[Version], bool]:
    """Return the pinned versions, and True if writers must keep every whole version now."""
    try:
        with open(os.path.join(directory, _PINS)) as file:
            hold, *pairs = file.read().splitlines()
        return [(int(number), int(step)) for number, step in map(str.split, pairs)], hold == "1"
    except (OSError, ValueError):
        return [], False


def forget(directory: str, first: int) -> None:
    """Remove states and copies without a version from round `first` on: their ranks now belong to other hosts, or have ended."""
    for folder in (directory, os.path.join(directory, COPIES)):
        here = [commit for commit in held(directory) if os.path.dirname(commit.path) == folder]
        alive = {commit.name for commit in here if commit.round >= first}
        for commit in here:
            if commit.name not in alive and commit.size:
                os.unlink(commit.path)


def choose(
    commits: Mapping[str, Iterable[KeptCommit]], names: Collection[str], size: int
) -> Optional[Tuple[Version, Dict[str, List[str]]]]:
    """Return the newest version of every state of `names`, and its hosts by state; None without a common version.

    `commits` are by host. `size` is the number of ranks: a commit for another number of ranks does not count.
    """
    hosts: Dict[Version, Dict[str, List[str]]] = {}
    for host, items in commits.items():
        for commit in items:
            if commit.name in names and commit.size in (0, size):
                places = hosts.setdefault(commit.version, {}).setdefault(commit.name, [])
                if host not in places:
                    places.append(host)
    return max(
        ((version, places) for version, places in hosts.items() if len(places) == len(set(names))),
        key=lambda item: item[0],
        default=None,
    )


def buddies(
    hosts: Sequence[str], count: int, present: Mapping[str, Iterable[str]] = {}
) -> Dict[str, List[str]]:
    """Return the hosts with copies of each host's commits. Hosts of `present`, the last result, stay as far as they exist.

    The host with the fewest copies comes first, then a host whose copies this host keeps: pairs lose less than chains if several
    hosts are lost.
    """
    most = min(count, len(hosts) - 1)
    result = {host: [buddy for buddy in present.get(host, ()) if buddy in hosts][:count] for host in hosts}
    for _ in range(most):
        for number, host in enumerate(hosts):
            if len(result[host]) >= most:
                continue
            loads = [buddy for chosen in result.values() for buddy in chosen]

            def order(
                other: str, host: str = host, loads: List[str] = loads, half: int = number + len(hosts) // 2
            ) -> Tuple[int, bool, int, int]:
                is_partner = host in result[other]
                # A host with buddies of its own can't become the other half of a pair.
                chosen = 0 if is_partner else len(result[other])
                return loads.count(other), not is_partner, chosen, (hosts.index(other) - half) % len(hosts)

            others = [other for other in hosts if other != host and other not in result[host]]
            result[host].append(min(others, key=order))
    return result


def copies(
    kept: Mapping[str, Sequence[KeptCommit]],
    copied: Mapping[str, Sequence[KeptCommit]],
    keepers: Mapping[str, Sequence[str]],
) -> Tuple[List[Version], List[Tuple[str, str, KeptCommit]]]:
    """Return the newest complete version of each kind of state, and the missing copies as host, source and commit.

    `kept` are the commits of each host's workers, `copied` the copies on each host, `keepers` the result of buddies(). A version is
    complete if the workers' hosts have it for every rank. Copies of a common state are missing only on a lone host.
    """
    count = max(map(len, keepers.values()), default=0)
    targets = newest(kept)
    missing = []
    for _, sources in targets:
        for source, commit in sources:
            holders = {host for host, items in copied.items() if _has(items, commit)}
            if not commit.size:
                holders |= {host for host, items in kept.items() if _has(items, commit)} - {source}
            if commit.size or len(holders) < count:
                lacking = (host for host in keepers.get(source, ()) if host not in holders)
                missing += [(host, source, commit) for host in lacking]
    return sorted({version for version, _ in targets}), missing


def newest(
    kept: Mapping[str, Sequence[KeptCommit]],
) -> List[Tuple[Version, List[Tuple[str, KeptCommit]]]]:
    """Return the newest complete version of each kind of state, with the first host of each commit; `kept` as for copies()."""
    sources: Dict[Tuple[str, int], Dict[Version, Dict[str, Tuple[str, KeptCommit]]]] = {}
    for host, items in kept.items():
        for commit in items:
            versions = sources.setdefault((family_of(commit), commit.size), {})
            versions.setdefault(commit.version, {}).setdefault(commit.name, (host, commit))
    complete = [
        max(
            (
                (version, list(names.values()))
                for version, names in by_version.items()
                if len(names) == max(1, size)
            ),
            key=lambda item: item[0],
            default=((-1, -1), []),
        )
        for (_, size), by_version in sources.items()
    ]
    last = max((version[0] for version, _ in complete), default=-1)
    # Ranks of an earlier round of another size have ended.
    return [item for item in complete if item[0][0] == last >= 0]


def _has(items: Iterable[KeptCommit], commit: KeptCommit) -> bool:
    return any(item.name == commit.name and item.version == commit.version for item in items)
