"""run(): real processes and Gloo groups go from round to round, placed by a driver that the test plays. Escape: a thread in a collective of a broken round starts over, any other is left in peace."""

import hashlib
import importlib
import itertools
import json
import mmap
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import hvlaunch.torch as hvt
from hvlaunch.rendezvous.messages import PLACES, Grant, encode
from hvlaunch.torch import collectives
from hvlaunch.torch.elastic import CollectiveFailed, ElasticSampler, ObjectState, TorchState, run
from hvlaunch.torch.elastic.training import Escape
from hvlaunch.torch.group_errors import AlreadyInitialized
from tests.unit.torch import forgotten
from tests.unit.torch.played_job import LONG, mark, me


def counting(steps: int, pause=lambda state: None):
    """A training whose weight counts the samples of all steps, 1 per worker and step; commits after each step."""

    def main():
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        state = TorchState(model=model, sampler=ElasticSampler(range(1000)), step=0, sizes=[])

        @run
        def train(state):
            while state.step < steps:
                pause(state)
                one = torch.ones(1, 1)
                dist.all_reduce(one)
                with torch.no_grad():
                    state.model.weight += one
                state.step += 1
                state.sizes.append(hvt.size())
                state.sampler.record_batch(0, 1)
                state.commit()
            return hvt.rank(), state.model.weight.item(), state.sizes, state.sampler.processed

        return train(state)

    return main


def at(step: int, then):
    """Call `then` when the state comes to the step for the first time in this process."""
    done: list[bool] = []

    def pause(state) -> None:
        if state.step == step and not done:
            done.append(True)
            then()

    return pause


def test_survivors_of_a_killed_worker_go_on_from_the_last_commit(job):
    def die():
        if me() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    started = job(counting(6, at(3, die)), 3)
    assert [ask.commit for ask in started.grant(0, 1, 2)] == [-1, -1, -1]
    started.workers[0].join(LONG)
    asks = started.grant(1, 2)
    assert [ask.commit for ask in asks] == [3, 3]
    assert all(ask.cause for ask in asks)
    results = dict(started.result() for _ in range(2))
    sizes = [3, 3, 3, 2, 2, 2]
    assert results == {1: (0, 15.0, sizes, 15), 2: (1, 15.0, sizes, 15)}


@pytest.mark.parametrize("stopped", [0, 2])
def test_survivors_of_a_hung_worker_leave_their_collective_when_the_round_is_broken(job, stopped):
    def hang():
        if me() == stopped:
            mark("hangs")
            os.kill(os.getpid(), signal.SIGSTOP)

    rest = [number for number in range(3) if number != stopped]
    started = job(counting(5, at(2, hang)), 3)
    started.grant(0, 1, 2)
    started.until("hangs")
    started.tell("broken")
    started.grant(*rest)
    results = dict(started.result() for _ in range(2))
    assert results == {number: (rank, 12.0, [3, 3, 2, 2, 2], 12) for rank, number in enumerate(rest)}


def test_a_collective_timeout_breaks_the_round(job, monkeypatch):
    """As with NCCL, whose collectives have no end of their own."""
    hung = mmap.mmap(-1, 1)
    monkeypatch.setattr("hvlaunch.torch.elastic.training._LOOK", 0.05)
    monkeypatch.setattr("hvlaunch.torch.elastic.training.has_timed_out", lambda: bool(hung[0]))

    def hang():
        if me() == 2:
            hung[0] = 1
            os.kill(os.getpid(), signal.SIGSTOP)

    started = job(counting(5, at(2, hang)), 3)
    started.grant(0, 1, 2)
    asks = started.grant(0, 1)
    assert {ask.commit for ask in asks} == {2}
    assert "a collective of NCCL took longer than its timeout" in {ask.cause for ask in asks}
    hung[0] = 0
    results = dict(started.result() for _ in range(2))
    assert results == {number: (number, 12.0, [3, 3, 2, 2, 2], 12) for number in range(2)}


def test_a_pass_that_fails_half_way_leaves_no_hooks_on_the_model(job):
    """An aborted communicator of NCCL fails the pass where it begins a collective; hooks of that round's DDP would fail the next."""
    kept = []  # as contextlib keeps the error from Python 3.12 on

    def fail(state, bucket):
        raise dist.DistBackendError("NCCL communicator was aborted on rank 0.")

    def main():
        model = torch.nn.Linear(2, 2)
        state = TorchState(model=model, rounds=0)

        @run
        def train(state):
            parallel = torch.nn.parallel.DistributedDataParallel(state.model)
            state.rounds += 1
            if state.rounds == 1:
                state.commit()
                parallel.register_comm_hook(None, fail)
            try:
                parallel(torch.ones(1, 2)).mean().backward()
            except dist.DistBackendError as error:
                kept.append(error)
                raise
            return state.rounds

        return train(state)

    started = job(main, 1)
    started.grant(0)
    [ask] = started.grant(0)
    assert "was aborted" in ask.cause
    assert started.result() == (0, 2)


def test_a_worker_that_gloo_forgets_starts_over_with_its_last_commit(job):
    """A message is half sent when its receiver hangs: Gloo never tells the sender's thread that it failed."""
    received = mmap.mmap(-1, forgotten.SIZE)

    def stop_in_the_middle():
        while True:
            if received[0] and not received[forgotten.SIZE // 2]:
                os.kill(os.getpid(), signal.SIGSTOP)

    def main():
        if me() == 0:
            os.execv(sys.executable, [sys.executable, forgotten.__file__])
        state = TorchState(text="new")

        @run
        def train(state):
            threading.Thread(target=stop_in_the_middle, daemon=True).start()
            state.commit()  # as the other one does
            tensor = torch.frombuffer(received, dtype=torch.uint8)
            while True:
                dist.broadcast(tensor, 0)
                tensor.zero_()

        train(state)

    started = job(main, 2)
    started.grant(0, 1)
    sender, receiver = started.workers
    os.waitid(os.P_PID, receiver.pid, os.WSTOPPED)
    while received[forgotten.SIZE // 2]:  # it has come too late
        os.kill(receiver.pid, signal.SIGCONT)
        os.waitid(os.P_PID, receiver.pid, os.WSTOPPED)
    started.tell("broken")
    (ask,) = started.grant(0)
    assert (ask.round, ask.commit, ask.cause) == (0, 2, "the test says so")
    assert json.loads(started.until("done")) == [sender.pid, "committed", 2]


@pytest.mark.skipif(
    torch.__version__ < "2.8", reason="this torch waits with Python's lock: docs/reference/torch.md"
)
def test_a_stuck_thread_does_not_delay_the_others(job):
    """The message is never received, and nothing ends it; the next round begins all the same."""

    def main():
        @run
        def train(state):
            if hvt.size() == 1:
                return
            if me() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.broadcast(torch.ones(1 << 24), 0, async_op=True)
            raise CollectiveFailed("the script sees that its peer hangs")

        train(ObjectState())

    started = job(main, 2)
    started.grant(0, 1)
    started.grant(0)
    assert started.result()[0] == 0


def test_a_new_worker_gets_the_state_and_no_step_is_repeated(job):
    reached = at(2, lambda: mark("here") if me() == 0 else None)

    def grow(state):
        reached(state)
        # On a busy machine the test's word may come late: without it the training is not over.
        while state.step == 39 and hvt.size() == 2:
            state.commit()

    started = job(counting(40, grow), 3)
    started.grant(1, 0)
    started.until("here")
    started.tell("changing")
    asks = started.grant(1, 0, 2)
    assert asks[0].commit == asks[1].commit >= 1
    assert (asks[0].cause, asks[2].commit) == (None, -1)
    results = dict(started.result() for _ in range(3))
    sizes = results[2][2]
    assert sizes == sorted(sizes)
    assert set(sizes) == {2, 3}
    assert [results[number] for number in (1, 0, 2)] == [
        (rank, float(sum(sizes)), sizes, sum(sizes)) for rank in range(3)
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_that_breaks_while_its_groups_are_made_is_left(job, rank):
    started = job(counting(2), 1)
    started.go[0].set()
    started._ask(0)
    started.round, started.seated = 0, [0]
    grant = Grant(0, rank, 2, rank, 2, 0, 1, "127.0.0.1", "lo")  # nobody has the other one
    started.server.put(PLACES, "h/0/0", encode(grant))
    if rank == 0:
        assert started.server.wait("round.0", "store", LONG) is not None
    started.tell("broken")
    assert started.grant(0)[0].commit == -1
    assert started.result() == (0, (0, 2.0, [1, 1], 2))


def test_variables_of_a_place_replace_its_interface(job):
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
    train = counting(1)
    started = job(lambda: (train(), [os.environ.get(name) for name in names]), 1)
    started.go[0].set()
    started._ask(0)
    started.round, started.seated = 0, [0]
    words = "GLOO_SOCKET_IFNAME=lo NCCL_IB_HCA==mlx5_1:1"
    grant = Grant(0, 0, 1, 0, 1, 0, 1, "127.0.0.1", "eth7", variables=words)
    started.server.put(PLACES, "h/0/0", encode(grant))
    _, (_, variables) = started.result()
    assert variables == ["lo", os.environ.get("NCCL_SOCKET_IFNAME"), "=mlx5_1:1"]


def test_a_worker_that_is_not_wanted_any_more_leaves_well(job):
    started = job(counting(2), 1)
    started.go[0].set()
    started.server.put(PLACES, "h/0/0", encode(Grant(-1, leave="its host left the pool")))
    started.workers[0].join(LONG)
    assert started.workers[0].exitcode == 0


def test_an_error_after_aborted_collectives_is_not_the_scripts(job):
    """On a GPU such a collective does not fail: the script goes on, with garbage."""

    def doubt():
        if me() == 0:
            mark("waits")
            hang = torch.ones(1)
            with suppress(RuntimeError):
                dist.all_reduce(hang, group=dist.new_group([0, 1]))
            raise FloatingPointError("the loss is not finite")
        time.sleep(LONG)

    started = job(counting(5, at(2, doubt)), 2)
    started.grant(0, 1)
    started.until("waits")
    started.tell("broken")
    (ask,) = started.grant(0)
    assert ask.commit == 2
    assert ask.cause == "FloatingPointError: the loss is not finite"
    assert started.result() == (0, (0, 7.0, [2, 2, 1, 1, 1], 7))


def test_an_error_of_the_script_is_its_own(job):
    def fail():
        raise ZeroDivisionError("the script's")

    started = job(counting(3, at(1, fail)), 1)
    started.grant(0)
    started.workers[0].join(LONG)
    assert started.workers[0].exitcode == 1


def test_the_scripts_own_error_is_raised_though_peers_fail_too(job):
    """Torch's errors are RuntimeErrors too: whose it was must be known before the peers lose their groups."""

    def fail():
        if me() == 0:
            raise RuntimeError("out of memory, say")

    started = job(counting(3, at(1, fail)), 2)
    started.grant(0, 1)
    started._ask(1)
    started.tell("broken")
    started.workers[0].join(LONG)
    assert started.workers[0].exitcode == 1
    started.grant(1)
    assert started.result() == (1, (0, 4.0, [2, 1, 1], 4))


def test_trainings_may_follow_but_not_nest(job):
    """Their groups are run()'s own: with one more, workers that join later would wait for ranks that never come."""

    def main():
        @run
        def train(state, steps):
            while state.step < steps:
                dist.all_reduce(torch.ones(1))
                state.step += 1
                state.commit()
            with pytest.raises(AlreadyInitialized, match=r"elastic\.run"):
                train(state, steps + 1)
            return state.step

        return [train(ObjectState(step=0), steps) for steps in (2, 1)]

    started = job(main, 2)
    started.grant(0, 1)
    assert [(ask.round, ask.commit, ask.cause) for ask in started.grant(0, 1)] == [(0, -1, None)] * 2
    assert sorted(started.result() for _ in range(2)) == [(0, [2, 1]), (1, [2, 1])]


def test_the_same_model_is_wrapped_anew_in_each_round(job):
    """DistributedDataParallel hooks into a model's parameters: those of an old round must be gone in the next."""
    importlib.import_module("torch._dynamo")  # DistributedDataParallel would, in each fork

    def main():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        state = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.01), step=0)

        @run
        def train(state):
            wrapped = torch.nn.parallel.DistributedDataParallel(state.model)
            while state.step < 8:
                if me() == 0 and state.step == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                state.optimizer.zero_grad()
                wrapped(torch.full((2, 4), float(me()))).square().mean().backward()
                state.optimizer.step()
                state.step += 1
                state.commit()
            return [parameter.tolist() for parameter in state.model.parameters()]

        return train(state)

    started = job(main, 3)
    started.grant(0, 1, 2)
    started.workers[0].join(LONG)
    started.grant(2, 1)
    (_, one), (_, other) = (started.result() for _ in range(2))
    assert one == other


MINUTE = 60.0
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
    assert is_there.wait(MINUTE)
    escapes[0].begin()
    return thread, way_out


@pytest.mark.parametrize(
    "file", ["distributed/distributed_c10d.py", "autograd/graph.py", collectives.__file__]
)
def test_a_thread_stuck_in_a_collective_starts_over(file):
    started_over = threading.Event()
    thread, way_out = waiting(TORCH / file, started_over, threading.Semaphore(0))
    assert started_over.wait(MINUTE)
    way_out.release()
    thread.join()


def spin(seconds):
    """In C, with Python's lock given back, as who waits for a GPU."""
    hashlib.pbkdf2_hmac("sha256", b"x", b"x", int(seconds * 500_000))


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_a_thread_spinning_for_its_gpu_starts_over(uses_gpu):
    started_over = threading.Event()
    deadline = time.monotonic() + (MINUTE if uses_gpu else 0.5)
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
        assert pressed.acquire(timeout=MINUTE)
    assert not started_over.is_set()
    way_out.release()
    thread.join()
