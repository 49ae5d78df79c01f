"""Elastic scripts of Horovod's go on where their import alone is changed: they call init() first, and more after the training."""

import importlib
import os
import signal
from typing import Any, cast

import pytest
import torch

import hvlaunch.torch as hvd
from hvlaunch.rendezvous import Client
from hvlaunch.torch.group_errors import AlreadyInitialized
from tests.unit.torch.played_job import LONG, mark, me

SAMPLES = 60
BATCH = 2


def script(epochs, pause=lambda state: None):
    """As Horovod's elastic example: an optimizer and a sampler of its own; the learning rate follows the size."""

    def main():
        hvd.init()
        seen_first = hvd.rank(), hvd.size()
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        data = [(torch.full((2,), each / SAMPLES), torch.tensor([each / SAMPLES])) for each in range(SAMPLES)]
        sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
        loader: Any = torch.utils.data.DataLoader(cast("Any", data), batch_size=BATCH, sampler=sampler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=hvd.Compression.none,
            op=hvd.Average,
        )
        done = []

        @hvd.elastic.run
        def train(state):
            while state.epoch < epochs:
                state.sampler.set_epoch(state.epoch)
                for state.batch, (inputs, wanted) in enumerate(loader):
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(model(inputs), wanted).backward()
                    pause(state)
                    optimizer.step()
                    state.sampler.record_batch(state.batch, BATCH)
                    done.append(state.epoch)
                    state.commit()
                state.epoch += 1
                state.commit()

        def on_state_reset():
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * hvd.size()

        state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, sampler=sampler)
        state.register_reset_callbacks([on_state_reset])
        train(state)
        mean = hvd.allreduce(torch.tensor(float(hvd.rank())), name="avg_loss").item()
        weights = [each.tolist() for each in model.parameters()]
        rate = optimizer.param_groups[0]["lr"]
        hvd.shutdown()
        return seen_first, (hvd.is_initialized(), mean, rate), weights, sorted(set(done))

    return main


@pytest.fixture(autouse=True)
def imported():
    importlib.import_module("torch._dynamo")  # by the first optimizer, in each fork


def test_a_worker_that_is_killed_in_the_middle_of_a_step_is_lost_alone(job):
    def die(state):
        if (state.epoch, state.batch, hvd.size()) == (1, 3, 3):
            if me() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()  # never comes, and gradients are on their way

    started = job(script(3, die), 3)
    assert [ask.commit for ask in started.grant(0, 1, 2)] == [-1] * 3
    started.workers[0].join(LONG)
    started.tell("broken")
    asks = started.grant(1, 2)
    assert asks[0].commit == asks[1].commit > 10
    results = dict(started.result() for _ in range(2))
    assert results[1][:2] == ((1, 3), (False, 0.5, 0.02))
    assert results[2][:2] == ((2, 3), (False, 0.5, 0.02))
    assert results[1][2] == results[2][2]
    assert results[1][3] == [0, 1, 2]


def test_a_new_worker_gets_state_and_learning_rate(job):
    def wait(state):
        if me() == 0 and (state.epoch, state.batch) == (1, 0) and hvd.size() == 2:
            mark("here")
            # Without this wait, a slow test would tell of the change when the training has ended.
            with Client.from_environment() as client:
                client.wait("test", "told", LONG)

    started = job(script(6, wait), 3)
    started.grant(0, 1)
    started.until("here")
    started.tell("changing")
    started.server.put("test", "told", b"1")
    started.grant(0, 1, 2)
    results = dict(started.result() for _ in range(3))
    assert [results[each][0] for each in range(3)] == [(0, 2), (1, 2), (2, 3)]
    assert {results[each][1] for each in range(3)} == {(False, 1.0, 0.03)}
    assert results[0][2] == results[1][2] == results[2][2]


def test_a_round_broken_before_training_is_left(job):
    def main():
        hvd.init()
        first = hvd.size()
        mark(f"in {me()}")
        if me() == 0:
            signal.pause()
        state, resets = hvd.elastic.ObjectState(), []
        state.register_reset_callbacks([lambda: resets.append(hvd.size())])

        @hvd.elastic.run
        def train(_):
            with pytest.raises(AlreadyInitialized, match=r"inside another"):
                train(state)
            return hvd.size()

        return first, train(state), train(state), resets

    started = job(main, 3)
    started.grant(0, 1, 2)
    for number in range(3):
        started.until(f"in {number}")
    started.workers[0].kill()
    started.workers[0].join(LONG)
    started.tell("broken")
    started.grant(1, 2)
    started.grant(1, 2)
    assert [started.result()[1] for _ in range(2)] == [(3, 2, 2, [2, 2])] * 2


def test_init_alone_has_a_round_until_shutdown_and_may_have_another(job):
    def main():
        sizes = []
        for _ in range(2):
            ends = hvd.ProcessSet([0])
            hvd.init("gloo", 60.0, process_sets=[ends])
            hvd.init()
            sizes.append((hvd.size(), ends.included() and ends.group.size()))
            hvd.shutdown()
        return sizes

    started = job(main, 2)
    started.grant(0, 1)
    started.grant(1, 0)
    assert dict(started.result() for _ in range(2)) == {0: [(2, 1), (2, False)], 1: [(2, False), (2, 1)]}


def test_a_worker_that_is_not_wanted_ends_well_in_init(job):
    from hvlaunch.rendezvous.messages import PLACES, Grant, encode

    started = job(hvd.init, 1)
    started.go[0].set()
    started.server.put(PLACES, "h/0/0", encode(Grant(-1, leave="its host left the pool")))
    started.workers[0].join(LONG)
    assert started.workers[0].exitcode == 0
