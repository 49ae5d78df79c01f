"""Ranks of a real Gloo group as forks of the test's process, which has torch imported already."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["in_ranks"]

LONG = 90.0


def in_ranks(size: int, call: Callable[[int], Any]) -> list[Any]:
    """call(rank) in `size` processes that have made a group; what each gave. Fails with a rank's traceback."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:

        def work(rank: int) -> None:
            torch.set_num_threads(1)  # OpenMP's other threads are the parent's, and don't live here
            try:
                store = dist.FileStore(f"{directory}/store", size)
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LONG)
                )
                results.put((rank, call(rank), None))
                dist.barrier()
            except BaseException:  # noqa: BLE001 (told to the parent)
                results.put((rank, None, traceback.format_exc()))
            os._exit(0)  # torch's and pytest's endings are the parent's

        workers = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(size)]
        for worker in workers:
            worker.start()
        told = []
        while len(told) < size and (not told or told[-1][2] is None):
            told.append(results.get())
        for worker in workers:
            if told[-1][2] is not None:
                worker.kill()
            worker.join(LONG)
    failures = [text for _, _, text in told if text]
    assert not failures, failures[0]
    return [value for _, value, _ in sorted(told, key=lambda item: item[0])]
