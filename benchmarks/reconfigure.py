"""How survivors of a broken round get new groups: by torch's `_reconfigure` (torch >= 2.14, Gloo), and as elastic jobs do it.

    python benchmarks/reconfigure.py
    python benchmarks/reconfigure.py --workers 16 --turns 20

Workers on this machine all-reduce without a pause until one is killed (kill -9) or falls silent (SIGSTOP, as a host that is
switched off). All survivors hear of it at once, as from the driver. Timed is from the fault to the next all_reduce of the slowest,
and what the new groups take of it. The ways take turns, a turn is a fault.
"""

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import distributed as dist

from benchmarks.command_line import argument_parser
from benchmarks.measure import heading, spread, table
from hvlaunch.rendezvous import WaitTimeout
from hvlaunch.torch.backends import GroupSockets
from hvlaunch.torch.current import World, meet, members
from hvlaunch.torch.place import Place

new: Any = dist
"""With the functions of torch 2.14."""
FAULTS = {"killed": signal.SIGKILL, "silent": signal.SIGSTOP}
PATIENCE = 6.0
"""Seconds that a recovery is waited for."""
WAYS = ("torch alone", "torch, our sockets", "torch, our sockets, subgroups", "new groups (elastic jobs)")


class Board:
    """The rendezvous: the driver's store, which no worker's end takes away. `put` and `wait` are those of meeting.Post."""

    def __init__(self, port: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)

    def put(self, scope: str, key: str, value: bytes) -> None:
        self.store.set(f"{scope}/{key}", value.decode())

    def wait(self, scope: str, key: str, timeout: float) -> bytes:
        try:
            self.store.wait([f"{scope}/{key}"], timedelta(seconds=timeout))
        except dist.DistStoreError as error:
            raise WaitTimeout(scope, key, timeout) from error
        return self.store.get(f"{scope}/{key}")


def place(rank: int, size: int, round_number: int) -> Place:
    """Two workers on each host."""
    return Place(
        rank=rank,
        size=size,
        local_rank=rank % 2,
        host=f"host{rank // 2}",
        launcher="",
        round=round_number,
        master_addr="127.0.0.1",
    )


class Torchs:
    """One group, made anew by torch. `has_subgroups` makes the local and the cross group of an elastic round, too."""

    def __init__(self, board: Board, rank: int, size: int, *, has_subgroups: bool) -> None:
        self._board, self._worker, self._has_subgroups = board, rank, has_subgroups
        new.init_process_group("gloo", store=board.store, rank=rank, world_size=size, enable_reconfigure=True)
        self.form(list(range(size)), 0)

    def form(self, workers: list[int], number: int) -> None:
        # A handle ends with its round, so each round's are exchanged anew.
        self._board.put(f"handles.{number}", f"{self._worker}", new._get_reconfigure_handle().encode())  # noqa: SLF001
        handles = [self._board.wait(f"handles.{number}", f"{one}", PATIENCE).decode() for one in workers]
        new._reconfigure(number, handles, timeout=timedelta(seconds=PATIENCE)).wait()  # noqa: SLF001
        if self._has_subgroups:
            size = len(workers)
            rank = workers.index(self._worker)
            mine = members(place(rank, size, number), [(other // 2, other % 2) for other in range(size)])
            for ranks in mine:
                dist.new_group(list(ranks), use_local_synchronization=True)


class Ours:
    """The groups of an elastic round, made anew."""

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self._board, self._worker = board, rank
        self._world: World | None = None
        self.form(list(range(size)), 0)

    def form(self, workers: list[int], number: int) -> None:
        if self._world is not None:
            self._world.abandon()
        self._world = None
        rank = workers.index(self._worker)
        meeting: Callable[..., Any] = functools.partial(meet, client=self._board)
        self._world = World.form(place(rank, len(workers), number), meeting, backend="gloo")


def work(way: str, rank: int, size: int, numbers: int, pipe: Connection) -> None:
    """All-reduce until the fault, then with the survivors; send when it went on, and the seconds that the groups took."""
    torch.set_num_threads(1)
    port, victim = pipe.recv()
    board = Board(port)
    groups: Torchs | Ours
    sockets = GroupSockets()
    with sockets.watch():
        if way == WAYS[3]:
            groups = Ours(board, rank, size)
        else:
            groups = Torchs(board, rank, size, has_subgroups=way == WAYS[2])

    def leave() -> None:
        pipe.recv()
        if way != WAYS[0]:
            sockets.shut_down()

    hears = threading.Thread(target=leave, daemon=True)
    hears.start()
    gradients = torch.ones(numbers)
    try:
        dist.all_reduce(gradients)
        pipe.send("trains")
        while True:
            dist.all_reduce(gradients)
    except RuntimeError:
        hears.join()
    workers = [worker for worker in range(size) if worker != victim]
    began = time.monotonic()
    try:
        groups.form(workers, 1)
        took = time.monotonic() - began
        total = torch.ones(1)
        dist.all_reduce(total)
    except (RuntimeError, WaitTimeout):
        return  # some survivor is still in its collective
    pipe.send((time.monotonic(), took) if int(total) == len(workers) else None)
    pipe.recv()


def one_fault(way: str, fault: str, size: int, numbers: int) -> tuple[float, float] | None:
    """Seconds to the next all_reduce of the slowest, and of its groups; None where it never comes."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(size)]
    # Forked before the store has threads.
    processes = [
        context.Process(target=work, args=(way, rank, size, numbers, pipe), daemon=True)
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ours = [pipe for pipe, _ in pipes]
    victim = size // 2
    try:
        for pipe in ours:
            pipe.send((store.port, victim))
        for pipe in ours:
            if not pipe.poll(30.0) or pipe.recv() != "trains":
                raise RuntimeError(f"{way}: a worker does not train")
        time.sleep(0.2)
        return _after(ours, processes, victim, fault)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _after(
    pipes: list[Connection], processes: Sequence[BaseProcess], victim: int, fault: str
) -> tuple[float, float] | None:
    when = time.monotonic()
    os.kill(processes[victim].pid or 0, FAULTS[fault])
    left = [pipe for rank, pipe in enumerate(pipes) if rank != victim]
    for pipe in left:
        pipe.send("broken")
    results = []
    while left:
        ready = cast("list[Connection]", wait(left, max(0.0, when + PATIENCE - time.monotonic())))
        if not ready:
            return None
        for pipe in ready:
            left.remove(pipe)
            results.append(pipe.recv())
    return max(at for at, _ in results) - when, max(took for _, took in results)


def main() -> int:
    parser = argument_parser(__doc__)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # of torch alone: it tells each wait that has no end
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--numbers", type=int, default=1000, help="floats in an all_reduce (default 1000)")
    options = parser.parse_args()
    if not hasattr(dist, "_reconfigure"):
        print(f"torch {torch.__version__} has no _reconfigure: skipped")
        return 0
    for fault in FAULTS:
        results: dict[str, list[tuple[float, float] | None]] = {way: [] for way in WAYS}
        for _ in range(options.turns):
            for way in WAYS:
                results[way].append(one_fault(way, fault, options.workers, options.numbers))
        rows = []
        for way, times in results.items():
            good = [time_ for time_ in times if time_ is not None]
            columns = (
                [spread([1000 * one[index] for one in good], 1) for index in (0, 1)]
                if good
                else ["never"] * 2
            )
            rows.append([way, *columns, f"{len(good)} of {len(times)}"])
        print(heading(f"A worker of {options.workers} is {fault}; torch {torch.__version__}"))
        print(table(["", "ms to the next all_reduce", "ms for the groups", "went on"], rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
