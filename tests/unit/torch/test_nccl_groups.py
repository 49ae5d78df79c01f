"""How groups of NCCL's are ended; that their collectives end by that is shown on a GPU (tests/gpu)."""

import threading
import time

from hvlaunch.torch.backends import Aborts, abort_groups
from tests.unit.torch.ranks import in_worlds

LONG = 60.0


class AbortableGroup:
    def __init__(self, end):
        self.aborted = 0
        self._end = end

    def abort(self):
        self.aborted += 1
        self._end()


def test_groups_are_aborted_concurrently():
    both = threading.Barrier(2)
    groups = [AbortableGroup(lambda: both.wait(LONG)), AbortableGroup(lambda: both.wait(LONG))]
    Aborts(LONG).abort(groups)
    assert not both.broken
    assert [group.aborted for group in groups] == [1, 1]


def test_each_group_is_aborted_once_and_new_groups_too():
    hold = threading.Event()
    stuck, later = AbortableGroup(lambda: hold.wait(LONG)), AbortableGroup(lambda: None)
    aborts = Aborts(0.01)
    began = time.monotonic()
    aborts.abort([stuck])
    aborts.abort([stuck, later])
    assert time.monotonic() - began < LONG / 2
    assert (stuck.aborted, later.aborted) == (1, 1)
    hold.set()


def test_gloo_groups_are_not_aborted():
    def work(rank):
        import torch
        from torch import distributed as dist

        abort_groups()
        one = torch.ones(1)
        dist.all_reduce(one)
        return one.item()

    assert in_worlds(2, work) == [2.0, 2.0]
