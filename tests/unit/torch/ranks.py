"""Ranks of a job as forks of the test's process, which has torch imported already; and their rendezvous."""

import faulthandler
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import distributed as dist

from hvlaunch.torch import current
from hvlaunch.torch.current import World
from hvlaunch.torch.place import Place

__all__ = ["LONG", "all_forked", "begin_fork", "in_forks", "in_worlds"]

LONG = 90.0


def begin_fork() -> None:
    """Prepare a fork to be a rank: with one thread, and with its stacks in the test's output if it hangs."""
    torch.set_num_threads(1)  # OpenMP's other threads are the parent's, and don't live here
    faulthandler.dump_traceback_later(LONG + 10, file=2)


def all_forked(workers: Iterable[BaseProcess]) -> None:
    """Start them. They must not collect the parent's garbage: the destructor of a Gloo group waits for threads that a fork lacks."""
    # torch imports this module with the first optimizer, in a second: once here and not in each fork.
    import torch._dynamo  # noqa: F401

    gc.freeze()
    for worker in workers:
        worker.start()
    gc.unfreeze()


def in_forks(ranks: Iterable[int], call: Callable[[int], Any]) -> list[Any]:
    """call(rank), each in a process of its own, at once; what each returned. Fails with a rank's traceback."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    over = context.Event()

    def work(rank: int) -> None:
        begin_fork()
        told: tuple[int, Any, str | None]
        try:
            told = (rank, call(rank), None)
        except BaseException:  # noqa: BLE001 (told to the parent)
            told = (rank, None, traceback.format_exc())
        results.put(told)
        over.wait()  # rank 0's end takes its store along
        os._exit(0)  # torch's and pytest's endings are the parent's

    workers = [context.Process(target=work, args=(rank,), daemon=True) for rank in ranks]
    all_forked(workers)
    told: list[tuple[int, Any, str | None]] = []
    while len(told) < len(workers) and (not told or told[-1][2] is None):
        told.append(results.get())
    over.set()
    for worker in workers:
        if told[-1][2] is not None:
            worker.kill()  # it may wait for the one that failed
        worker.join()
    assert told[-1][2] is None, told[-1][2]
    return [value for _, value, _ in sorted(told, key=lambda item: item[0])]


def in_worlds(size: int, call: Callable[[int], Any]) -> list[Any]:
    """in_forks(), with a world of all on one host, by Gloo."""
    with tempfile.TemporaryDirectory() as directory:

        def work(rank: int) -> Any:
            place = Place(rank=rank, size=size, local_rank=rank, host="a", launcher="")
            store = dist.FileStore(f"{directory}/store", size)
            limit = timedelta(seconds=LONG)
            current.enter(World.form(place, lambda *_: store, backend="gloo", timeout=limit))
            result = call(rank)
            dist.barrier()
            return result

        return in_forks(range(size), work)
