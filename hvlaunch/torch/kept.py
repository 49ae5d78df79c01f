"""Commits of this worker in its host's memory, where they outlive the worker: agent/commits/__init__.py has their files."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from hvlaunch.agent import commits
from hvlaunch.agent.commits import PAGE, KeptCommit, NoRoom, Version, choose
from hvlaunch.agent.commits.saves import Saved, versions
from hvlaunch.owners import other_writer
from hvlaunch.rendezvous.messages import KEPT
from hvlaunch.rendezvous.worker import new_teller
from hvlaunch.torch.sharing import TensorSpec

__all__ = [
    "BackgroundKeeper",
    "CommitCosts",
    "KeptCommit",
    "KeptState",
    "Parts",
    "Saved",
    "Version",
    "choose",
    "kept_commits",
    "kept_directory",
    "load_saved",
    "saved_commits",
    "versions",
    "warn_of_little_room",
]

_ALIGNED = 64
"""Bytes: each tensor begins at a multiple."""
_PIECE = 16 << 20
"""Bytes to copy, or to prepare, at once. The end of the program waits for a piece that is being prepared."""

Parts = tuple[Any, Sequence[torch.Tensor]]
"""Skeleton and tensors of a value; see hvlaunch.torch.sharing."""


def kept_directory() -> str | None:
    """Return the directory of commits on this host; None without an agent, which removes the directory."""
    scratch = os.environ.get("HVLAUNCH_SCRATCH")
    return None if scratch is None else commits.directory_of(scratch)


def kept_commits() -> list[KeptCommit]:
    """Return all commits on this host, newest first."""
    directory = kept_directory()
    return [] if directory is None else commits.held(directory)


def warn_of_little_room(states: int) -> None:
    """Warn before the training if this host has hardly room for the commits of so many states."""
    # Static jobs end with their first failure, and then their commits too.
    if "HVLAUNCH_SCRATCH" not in os.environ or os.environ.get("HVLAUNCH_ELASTIC") != "1":
        return
    try:
        warning = commits.little_room(states)
    except OSError:
        return  # no /dev/shm: the first commit says so
    if warning is not None:
        _say("start", warning)


def _say(topic: str, words: str) -> None:
    """Print a message about this host, if no other worker of the host has printed one on the topic."""
    scratch = os.environ["HVLAUNCH_SCRATCH"]
    try:
        is_first = commits.is_first_to_say(commits.make_directory(scratch), topic)
    except OSError:
        is_first = True
    if is_first:
        sys.stderr.write(f"hvlaunch: host {os.environ.get('HVLAUNCH_HOST', 'localhost')}: {words}\n")


def saved_commits() -> dict[str, list[list[Saved]]]:
    """Return the complete versions in the directory of --save-to by family, newest first, each with the files of its ranks."""
    directory = os.environ.get("HVLAUNCH_SAVED_COMMITS")
    return {} if directory is None else versions(directory)


class KeptState:
    """The commits of a state. `name` is the same in each life of the worker."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._maps: dict[int, mmap.mmap] = {}
        """Mappings by inode. They stay: without their page tables a copy of 2 GB takes twice as long."""
        self._is_off = kept_directory() is None

    def write(self, version: Version, size: int, parts: Parts, states: int = 1) -> Callable[[], None] | None:
        """Copy a value into memory and return a function to complete the commit; None after stop().

        The function computes the checksums, in any thread, and then prepares the file of the next commit. `size` is the number of ranks
        with such a state each; 0 for a common state. `states`: number of these ranks on this host.
        """
        if self._is_off:
            return None
        skeleton, tensors = parts
        offsets: list[int] = []
        end = 0
        for tensor in tensors:
            offsets.append(end)
            end += _aligned(tensor.nbytes)
        meta = pickle.dumps((skeleton, [TensorSpec.of(tensor) for tensor in tensors], offsets))
        begin = _aligned(len(meta))
        commit = KeptCommit(self.name, *version, size, len(meta), begin + end)
        is_saved = "HVLAUNCH_SAVED_COMMITS" in os.environ
        try:
            directory = commits.make_directory(os.environ["HVLAUNCH_SCRATCH"])
            descriptor = commits.begin(
                directory, commit, lambda: commits.pins(directory), is_saved=is_saved, states=states
            )
        except NoRoom as error:
            # The ranks of a host lack the same memory.
            self._is_off = True
            _say("room", f"commits are not kept in memory: {error}")
            return None
        except OSError as error:
            self.stop(str(error))
            return None
        try:
            mapped = self._map(descriptor, commit)
            content = torch.frombuffer(mapped, dtype=torch.uint8, offset=PAGE, count=commit.length)
            content[: len(meta)] = torch.frombuffer(bytearray(meta), dtype=torch.uint8)
            _copy(content, [begin + offset for offset in offsets], tensors)
        except BaseException:
            commits.release(descriptor)
            raise

        def complete() -> None:
            try:
                commits.seal(descriptor, commit, None, mapped)
            finally:
                commits.release(descriptor)
            # Without memory this commit stands all the same, and the next one says so.
            with suppress(NoRoom, OSError):
                self._prepare(commits.prepare(directory, commit, is_saved=is_saved), commit)

        return complete

    def stop(self, cause: str) -> None:
        """Keep no more commits, and say why."""
        self._is_off = True
        sys.stderr.write(f"hvlaunch: commits are not kept in memory: {cause}\n")

    def _map(self, descriptor: int, commit: KeptCommit) -> mmap.mmap:
        size = PAGE + commit.length
        inode = os.fstat(descriptor).st_ino
        mapped = self._maps.get(inode)
        if mapped is None or len(mapped) != size:
            mapped = self._maps[inode] = mmap.mmap(descriptor, size)
        return mapped

    def _prepare(self, descriptor: int | None, commit: KeptCommit) -> None:
        """Give a new file its memory and its page tables: with both, the next commit takes no longer than a copy."""
        if descriptor is None:
            return
        try:
            size = commits.size_of_file(commit.length)
            os.ftruncate(descriptor, size)
            pages = torch.frombuffer(self._map(descriptor, commit), dtype=torch.uint8)
            for begin in range(0, size, _PIECE):
                if not threading.main_thread().is_alive():
                    return
                os.posix_fallocate(descriptor, begin, min(_PIECE, size - begin))
                # A write, since a page that was only read has another page fault later.
                pages[begin : begin + _PIECE : PAGE].zero_()
        finally:
            commits.release(descriptor)

    def versions(self) -> list[Version]:
        """Return the versions in this host's memory, by their headers; newest first."""
        return [commit.version for commit in kept_commits() if commit.name == self.name]

    def load(self, version: Version) -> Parts | None:
        """Return the value of a version; None if missing, or corrupt, with a message."""
        for commit in kept_commits():
            if (commit.name, commit.version) == (self.name, version):
                with commits.shared_lock(commit) as descriptor:
                    parts = _parts(descriptor, commit, "the memory of this host")
                if parts is not None:
                    return parts
        return None


def load_saved(saved: Saved, device: str | None = None) -> Parts | None:
    """Return the value on disk; None if it is corrupt or can't be read, with a message. `device` replaces the kind of each tensor's."""
    path = saved.commit.path
    try:
        # No lock: a file on disk is never changed, and not every file system has locks.
        with open(path, "rb") as file:  # noqa: PTH123 (as in commits)
            # The directory may be everybody's, and unpickling runs what the writer of the file wants.
            problem = other_writer(os.fstat(file.fileno()))
            if problem is None:
                return _parts(file.fileno(), saved.commit, os.path.dirname(path), device)  # noqa: PTH120 (as in commits)
    except (OSError, ValueError) as error:
        problem = str(error)
    sys.stderr.write(f"hvlaunch: the commit of step {saved.commit.step} can't be read: {problem}\n")
    return None


def _parts(descriptor: int, commit: KeptCommit, place: str, device: str | None = None) -> Parts | None:
    if not commits.is_whole(descriptor, commit):
        sys.stderr.write(
            f"hvlaunch: the commit of step {commit.step} in {place} is corrupt"
            " (its checksums differ): it is not used\n"
        )
        return None
    mapped = mmap.mmap(descriptor, PAGE + commit.length, access=mmap.ACCESS_COPY)
    content = torch.frombuffer(mapped, dtype=torch.uint8, offset=PAGE, count=commit.length)
    # Unpickling is safe: files on disk are this user's, the directory in memory is this user's alone, and copies come from
    # hosts with the job's secret.
    skeleton, specs, offsets = pickle.loads(content[: commit.meta].numpy().tobytes())  # noqa: S301
    begin = _aligned(commit.meta)
    # Copies: the file will be written again.
    tensors = [
        torch.empty(spec.shape, dtype=spec.dtype, device=device or spec.device).copy_(
            _view(content, begin + offset, spec)
        )
        for spec, offset in zip(specs, offsets, strict=True)
    ]
    return skeleton, tensors


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _view(content: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
    return content[offset : offset + size].view(spec.dtype).view(spec.shape)


class CommitCosts:
    """Reports the costs of commits to the driver, for the job's bill. Rank 0 alone reports: the other ranks commit at the same steps."""

    def __init__(self) -> None:
        # Static jobs end with their first failure: no interval would help them.
        self._teller = new_teller(KEPT, "cost.") if os.environ.get("HVLAUNCH_ELASTIC") == "1" else None
        self._count = 0
        self._delayed = 0.0
        self.whole = 0.0
        """Seconds until the newest commit was whole in memory."""

    def add(self, delayed: float) -> None:
        """Count a commit. `delayed`: seconds without training. Never waits."""
        self._count += 1
        self._delayed += delayed
        if self._teller is not None:
            self._teller.tell(self._count, None, {"delayed": self._delayed, "whole": self.whole})


def _copy(content: torch.Tensor, offsets: list[int], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors into the content. Threads share all of the work: torch's threads would wait for each other at each tensor."""
    pieces = []
    for offset, tensor in zip(offsets, tensors, strict=True):
        source = tensor.detach()
        if _is_plain(source):
            target, address, size = content.data_ptr() + offset, source.data_ptr(), source.nbytes
            pieces += [(target + at, address + at, min(_PIECE, size - at)) for at in range(0, size, _PIECE)]
        else:
            _view(content, offset, TensorSpec.of(tensor)).copy_(source)
    count = max(1, min(torch.get_num_threads(), len(pieces)))

    def work(first: int) -> None:
        for piece in pieces[first::count]:
            ctypes.memmove(*piece)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(1, count)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's values are its bytes in this process's memory, in order."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous() and not is_lazy


class BackgroundKeeper:
    """Writes commits in a thread of its own. If they come faster than they are written, only the newest waits."""

    def __init__(self, name: str) -> None:
        warn_of_little_room(1)
        self.state = KeptState(name)
        self._lock = threading.Lock()
        self._round = 0
        self._is_writer = self._is_first = False
        self._next: tuple[Version, Parts] | None = None
        self._costs: CommitCosts | None = None
        self._thread: threading.Thread | None = None

    def begin(self, round_number: int, *, rank: int, local_rank: int) -> None:
        """Begin a round with this worker's ranks: one worker writes the commits of its host."""
        self._round, self._is_writer = round_number, local_rank == 0
        if rank == 0 and self._costs is None:
            self._costs = CommitCosts()
        self._is_first = rank == 0

    def keep(self, step: int, parts: Parts, delayed: float) -> None:
        """Write the commit soon. `delayed`: seconds without training so far. The caller must not change the value any more."""
        if not self._is_writer:
            return
        if self._costs is not None and self._is_first:
            self._costs.add(delayed)
        with self._lock:
            self._next = (self._round, step), parts
            if self._thread is None:
                # No daemon: the end of the program waits for the last commit.
                self._thread = threading.Thread(target=self._run, name="hvlaunch commits")
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._next is None:
                    self._thread = None
                    return
                (version, parts), self._next = self._next, None
            begun = time.monotonic()
            try:
                complete = self.state.write(version, 0, parts)
                if complete is not None:
                    complete()
                    if self._costs is not None:
                        self._costs.whole = time.monotonic() - begun
            except Exception as error:  # noqa: BLE001 (whatever pickling the user's objects raises)
                self.state.stop(f"{type(error).__name__}: {error}")

    def load_saved(self) -> tuple[Version, Parts] | None:
        """Return the newest whole value in the directory of --save-to; None without one."""
        for version in saved_commits().get(self.state.name, ()):
            # All ranks have the same state: it is one file.
            parts = load_saved(version[0])
            if parts is not None:
                return version[0].commit.version, parts
        return None

    def newest(self, besides: Iterable[Version]) -> Version:
        """Return the newest version in this host's memory apart from `besides`; (-1, -1) without any."""
        return max(set(self.state.versions()).difference(besides), default=(-1, -1))
