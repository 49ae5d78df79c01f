"""join(): workers with less data than others take part in what these do, with nothing of their own."""

import os
import signal
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path

import pytest
import torch

import hvlaunch.torch as hvd
from hvlaunch.torch import collective_log as log_module
from tests.unit.torch.played_job import LONG, me
from tests.unit.torch.ranks import in_worlds

ROOT = Path(__file__).parents[3]
SIZE = 3


def uneven(rank):
    """As Horovod's users have it: rank r has r + 1 batches; and all of it again, in the next epoch."""
    seen = []
    for epoch in range(2):
        for batch in range(rank + 1):
            ones = torch.full((2, 3), rank + 1.0)
            seen.append(
                [epoch, batch, hvd.allreduce(ones, op=hvd.Sum)[0, 0].item(), hvd.allreduce(ones)[0, 0].item()]
            )
        assert hvd.join() == 2
    expected = [(6.0, 2.0), (5.0, 5 / 3), (3.0, 1.0)]
    assert seen == [
        [epoch, batch, whole, pytest.approx(mean)]
        for epoch in range(2)
        for batch, (whole, mean) in enumerate(expected[: rank + 1])
    ]


def each_function(rank):
    """Rank 1 alone goes on; what the others had begun before they joined is seen to as well."""
    first = hvd.allreduce_async(torch.tensor([rank]), op=hvd.Sum)
    if rank == 1:
        for dtype in (torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool):
            assert hvd.allreduce(torch.ones(2, dtype=dtype), op=hvd.Max).tolist() == [1, 1], dtype
        assert hvd.allreduce(torch.tensor(3), op=hvd.Product).item() == 0
        assert hvd.allgather(torch.tensor([[7], [8]])).tolist() == [[7], [8]]
        assert hvd.allgather(torch.tensor(7)).tolist() == [7]
        assert hvd.broadcast(torch.tensor([7]), 1).item() == 7
        rows = torch.arange(6.0, requires_grad=True)
        found, received = hvd.alltoall(rows, splits=[2, 3, 1])
        assert (found.tolist(), received.tolist()) == ([2, 3, 4], [0, 3, 0])
        assert hvd.reducescatter(torch.arange(6.0), op=hvd.Sum).tolist() == [2, 3]
        hvd.barrier()
        hvd.allgather(rows).sum().backward()
        assert rows.grad is not None
        assert rows.grad.tolist() == [pytest.approx(1 / 3)] * 6
        assert hvd.grouped_allreduce([torch.ones(1), torch.ones(2)], op=hvd.Sum)[1].tolist() == [1, 1]
    last = hvd.join()
    assert last == 1
    assert first.wait().item() == 3


def training(rank):
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4 - rank):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert hvd.join() == 0
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert len(set(hvd.allgather_object(model.bias.item()))) == 1


def asked_for_a_broadcast(rank):
    if rank == 1:
        log_module.note(hvd.global_process_set, log_module.LoggedStep("broadcast", (1,), how=0))
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 0 has joined, and others wait for its broadcast"):
            hvd.join()


def left_behind(rank):
    if rank == 1:
        log_module.collective_log()._newest = deque(maxlen=2)
        for _ in range(3):
            log_module.note(hvd.global_process_set, log_module.LoggedStep("barrier"))
    if rank == 0:
        with pytest.raises(RuntimeError, match="too many collectives ahead"):
            hvd.join()


@pytest.mark.parametrize(
    "what",
    [uneven, each_function, training, asked_for_a_broadcast, left_behind],
    ids=lambda what: what.__name__,
)
def test_joined_workers_take_part_until_all_have_joined(what):
    in_worlds(SIZE, what)


def test_a_worker_that_ran_ahead_and_joined_first_is_followed():
    """A root may be done with its broadcast before anybody takes part, and the last to join lacks it."""

    def run(rank):
        if rank == 1:
            hvd.broadcast(torch.tensor([5.0]), 1)
        return hvd.join(device=0)

    assert set(in_worlds(2, run)) <= {0, 1}


def test_joining_alone_does_not_wait():
    assert in_worlds(1, lambda _: hvd.join()) == [0]


def test_join_leaves_a_broken_round(job):
    def main():
        @hvd.elastic.run
        def train(state):
            if hvd.size() == 2:
                hvd.allreduce(torch.ones(1))
                if me() == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
            return hvd.join()

        hvd.init()
        return train(hvd.elastic.ObjectState())

    started = job(main, 2)
    started.grant(0, 1)
    os.waitid(os.P_PID, started.workers[1].pid, os.WSTOPPED)
    started.tell("broken")
    assert started.grant(0)[0].commit == 0
    assert started.result() == (0, 0)


def test_an_early_end_of_rank_0_writes_no_store_errors(rendezvous):
    """As a script of Horovod's, which calls no shutdown(); whether anybody joins is looked for as long as there is a store, and no more."""
    text = """
import threading, torch, hvlaunch.torch as hvd
from hvlaunch.torch import collective_log as log_module
log_module._LOOK = 0.0001
hvd.init()
hvd.allreduce(torch.ones(1))
looking = [thread for thread in threading.enumerate() if thread.name == "hvlaunch join"]
assert len(looking) == 1
if hvd.rank():
    looking[0].join()
"""
    url, token = rendezvous
    shared = {"HVLAUNCH_RENDEZVOUS": url, "HVLAUNCH_TOKEN": token, "MASTER_ADDR": "127.0.0.1"}
    own = {"HVLAUNCH_ROUND": "49", "HVLAUNCH_SIZE": "2", "HVLAUNCH_HOST": "a"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", text],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **shared, **own, "HVLAUNCH_RANK": str(rank), "HVLAUNCH_LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=LONG)[1] for worker in workers]
    assert [(worker.returncode, words) for worker, words in zip(workers, said, strict=True)] == [(0, "")] * 2


def test_a_process_ends_well_while_its_watcher_runs():
    """Python would abort if it ended while a thread is in torch; a hundred threads that look all the time make that likely."""
    text = """
import torch, hvlaunch.torch as hvd
from hvlaunch.torch import collective_log as log_module
log_module._LOOK = 0
hvd.init()
from hvlaunch.torch.current import world
for _ in range(20):
    log_module.CollectiveLog(world()).add(log_module.LoggedStep("barrier"))
"""
    run = partial(subprocess.run, [sys.executable, "-c", text], capture_output=True, text=True, timeout=LONG)
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    done = run(env=env, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
