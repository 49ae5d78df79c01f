"""Ranks of a job as forks of the test's process, which has torch imported already; and their rendezvous."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["in_forks"]


def in_forks(ranks: Iterable[int], call: Callable[[int], Any]) -> list[Any]:
    """call(rank), each in a process of its own, at once; what each returned. Fails with a rank's traceback."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    over = context.Event()

    def work(rank: int) -> None:
        try:
            told = (rank, call(rank), None)
        except BaseException:  # noqa: BLE001 (told to the parent)
            told = (rank, None, traceback.format_exc())
        results.put(told)
        over.wait()  # rank 0's end takes its store along
        os._exit(0)  # torch's and pytest's endings are the parent's

    workers = [context.Process(target=work, args=(rank,)) for rank in ranks]
    for worker in workers:
        worker.start()
    told = [results.get() for _ in workers]
    over.set()
    for worker in workers:
        worker.join()
    failures = [text for _, _, text in told if text]
    assert not failures, failures[0]
    return [value for _, value, _ in sorted(told, key=lambda item: item[0])]
