"""Escape: who waits in a collective of a broken round starts over; who does anything else is left in peace."""

import hashlib
import itertools
import threading
import time
from pathlib import Path

import pytest
import torch

from hvlaunch.torch import collectives
from hvlaunch.torch.elastic.training import Escape

LONG = 60.0
TORCH = Path(torch.__file__).parent


def waiting(file: Path, started_over: threading.Event, pressed: threading.Semaphore, *, uses_gpu=False):
    """A thread that waits in code of this file, with an Escape that has begun; and what lets it go."""
    escapes = []
    is_there = threading.Event()
    way_out = threading.Lock()
    way_out.acquire()
    wait = compile("is_there.set(); way_out.acquire()", str(file), "exec")

    def work():
        with Escape(pressed.release, started_over.set, look=0.01, uses_gpu=lambda: uses_gpu) as escape:
            escapes.append(escape)
            exec(wait, {"is_there": is_there, "way_out": way_out})

    thread = threading.Thread(target=work)
    thread.start()
    assert is_there.wait(LONG)
    escapes[0].begin()
    return thread, way_out


@pytest.mark.parametrize(
    "file", ["distributed/distributed_c10d.py", "autograd/graph.py", collectives.__file__]
)
def test_a_thread_stuck_in_a_collective_starts_over(file):
    started_over = threading.Event()
    thread, way_out = waiting(TORCH / file, started_over, threading.Semaphore(0))
    assert started_over.wait(LONG)
    way_out.release()
    thread.join()


def spin(seconds):
    """In C, with Python's lock given back, as who waits for a GPU."""
    hashlib.pbkdf2_hmac("sha256", b"x", b"x", int(seconds * 500_000))


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_a_thread_spinning_for_its_gpu_starts_over(uses_gpu):
    started_over = threading.Event()
    deadline = time.monotonic() + (LONG if uses_gpu else 0.5)
    with Escape(lambda: None, started_over.set, look=0.02, uses_gpu=lambda: uses_gpu) as escape:
        escape.begin()
        while time.monotonic() < deadline and not started_over.is_set():
            hashlib.pbkdf2_hmac(
                "sha256", b"x", b"x", 200_000
            )  # gives Python's lock back, as who waits for a GPU does
    assert started_over.is_set() == uses_gpu


def test_a_thread_waiting_elsewhere_does_not_start_over():
    started_over = threading.Event()
    with Escape(lambda: None, started_over.set, look=0.02, uses_gpu=lambda: True) as escape:
        escape.begin()
        time.sleep(0.5)  # nothing is to happen in the time of 25 looks
    assert not started_over.is_set()


def dive(depth):
    if depth:
        dive(depth - 1)
    else:
        spin(0.001)


def test_a_thread_released_by_its_gpu_does_not_start_over():
    started_over = threading.Event()
    with Escape(lambda: None, started_over.set, look=0.05, uses_gpu=lambda: True) as escape:
        escape.begin()
        deadline = time.monotonic() + 1.0
        for depth in itertools.cycle(range(100)):
            dive(depth)
            if time.monotonic() > deadline:
                break
    assert not started_over.is_set()


@pytest.mark.parametrize("file", ["serialization.py", "distributed/checkpoint/filesystem.py", "/train.py"])
def test_a_busy_thread_may_finish_while_connections_are_shut_down(file):
    started_over, pressed = threading.Event(), threading.Semaphore(0)
    thread, way_out = waiting(TORCH / file, started_over, pressed)
    for _ in range(4):
        assert pressed.acquire(timeout=LONG)
    assert not started_over.is_set()
    way_out.release()
    thread.join()
