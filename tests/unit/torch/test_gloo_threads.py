"""When threads of Gloo's count as idle: Python's threads stand in for them, under their name."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from hvlaunch.torch.backends import wait_until_idle
from tests.unit.torch.ranks import in_forks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")

LONG = 90.0


def must_not_sleep(seconds: float) -> None:
    pytest.fail(f"a thread is at work: it sleeps for {seconds} s")


@contextmanager
def gloo_thread(work: Callable[[], object]) -> Iterator[None]:
    """A thread that does the work once, and then waits for more until the end of the context."""
    named, over = threading.Event(), threading.Lock()
    over.acquire()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        named.set()
        work()
        over.acquire()

    thread = threading.Thread(target=run)
    thread.start()
    named.wait()
    try:
        yield
    finally:
        over.release()
        thread.join()


def test_without_gloo_there_is_no_wait(tmp_path: Path) -> None:
    # Not this process' own: another test's group may have left a thread that is about to end.
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "status").write_text(
        "Name:\tpython\nState:\tR (running)\nvoluntary_ctxt_switches:\t1\n"
    )
    assert wait_until_idle(tasks=tmp_path, sleep=must_not_sleep)


def test_without_proc_there_is_no_wait(tmp_path: Path) -> None:
    assert wait_until_idle(tasks=tmp_path / "none", sleep=must_not_sleep)


def test_a_thread_that_waits_for_work_is_idle() -> None:
    with gloo_thread(lambda: None):
        assert wait_until_idle(limit=LONG)


def test_a_thread_that_computes_or_wants_pythons_lock_is_waited_for() -> None:
    done = []

    def work() -> None:
        count = 0
        while count < 3_000_000:
            count += 1
        done.append(count)

    with gloo_thread(work):
        assert wait_until_idle(limit=LONG)
        assert done


def test_a_thread_that_never_rests_is_not_waited_for_for_ever() -> None:
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            pass

    with gloo_thread(work):
        assert not wait_until_idle(limit=0.2)
        is_over.set()


@pytest.mark.skipif(
    torch.__version__ < "2.9", reason="this torch's threads have no names: docs/reference/torch.md"
)
def test_gloos_threads_have_the_name_that_is_looked_for() -> None:
    def work(_rank: int) -> tuple[bool, bool]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(3))
        looks: list[float] = []
        wait_until_idle(sleep=looks.append)
        dist.destroy_process_group()
        return bool(looks), wait_until_idle(sleep=must_not_sleep)

    assert in_forks([0], work) == [(True, True)]
