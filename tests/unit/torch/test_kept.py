"""Commits in memory: workers die, all at once or in the middle of a commit, and their successors continue."""

import mmap
import os
import random
import resource
import shutil
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from hvlaunch.agent import commits
from hvlaunch.agent.commits import saves
from hvlaunch.agent.proc import Room
from hvlaunch.torch.elastic import TorchState, run
from hvlaunch.torch.kept import KeptState
from tests.testhosts.places import wait_until
from tests.unit.torch.played_job import LONG, me

NAME = "elastic-1"


@pytest.fixture
def folder(monkeypatch):
    """The directory of commits of the jobs that the test starts."""
    scratch = f"/tmp/hvlaunch-{uuid.uuid4().hex}"
    monkeypatch.setenv("HVLAUNCH_SCRATCH", scratch)
    yield Path(commits.directory_of(scratch))
    shutil.rmtree(commits.directory_of(scratch), ignore_errors=True)


def kept_steps() -> list[int]:
    return [step for _, step in KeptState(NAME).versions()]


def counting(steps: int, pause):
    """A training whose weight counts its steps, and which begins with the state that it finds."""

    def main():
        model = torch.nn.Linear(64, 64, bias=False)
        torch.nn.init.zeros_(model.weight)
        state = TorchState(model=model, step=0)
        begun: list[int] = []

        @run
        def train(state):
            begun.append(state.step)
            while state.step < steps:
                assert state.model.weight.eq(state.step).all(), "the step is another step's"
                pause(state.step)
                one = torch.ones(1, 1)
                dist.all_reduce(one)
                with torch.no_grad():
                    state.model.weight += one / dist.get_world_size()
                state.step += 1
                state.commit()
            return begun, state.model.weight[0, 0].item()

        return train(state)

    return main


def end(started, *numbers: int) -> None:
    for number in numbers:
        started.workers[number].join(LONG)
        assert started.workers[number].exitcode == -signal.SIGKILL


def die_at(step: int):
    """Let the first two workers die at this step, once its commit is in memory."""

    def pause(present: int) -> None:
        if present == step and me() < 2:
            wait_until(lambda: step in kept_steps(), "the commit was not kept")
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    return pause


def test_successors_of_workers_that_all_died_continue_from_the_last_commit(job, folder):
    started = job(counting(6, die_at(3)), 4)
    started.grant(0, 1)
    end(started, 0, 1)
    assert [ask.commit for ask in started.grant(2, 3)] == [-1, -1]
    assert dict(started.result() for _ in range(2)) == {2: ([3], 6.0), 3: ([3], 6.0)}


def test_one_worker_alone_continues_too(job, folder):
    def pause(step: int) -> None:
        if step == 3 and me() == 0:
            wait_until(lambda: 3 in kept_steps(), "the commit was not kept")
            os.kill(os.getpid(), signal.SIGKILL)

    started = job(counting(6, pause), 2)
    started.grant(0)
    end(started, 0)
    started.grant(1)
    assert started.result() == (1, ([3], 6.0))


def test_commit_stands_if_its_worker_is_killed_in_the_middle_of_the_next(job, folder):
    def pause(step: int) -> None:
        if step == 3 and me() < 2:
            wait_until(lambda: 3 in kept_steps(), "the commit was not kept")
            dist.barrier()
            # The content of the next commit is written then, and its header is not.
            commits.seal = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if step == 4 and me() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    started = job(counting(6, pause), 4)
    started.grant(0, 1)
    end(started, 0)
    started.workers[1].kill()  # it may wait for its peer
    end(started, 1)
    started.grant(2, 3)
    assert dict(started.result() for _ in range(2)) == {2: ([3], 6.0), 3: ([3], 6.0)}


def test_corrupt_commit_falls_back_to_the_version_before(job, folder, capfd):
    die = die_at(3)

    def pause(step: int) -> None:
        # On a busy machine a commit may be left out: only the newest waits for the one that is being written.
        if step == 2:
            wait_until(lambda: 2 in kept_steps(), "the commit before was not kept")
        die(step)

    started = job(counting(6, pause), 4)
    started.grant(0, 1)
    end(started, 0, 1)
    newest, older = commits.held(str(folder))
    assert (newest.step, older.step) == (3, 2)
    with Path(newest.path).open("r+b") as file:
        file.seek(commits.PAGE + newest.length - 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    started.grant(2, 3)
    assert dict(started.result() for _ in range(2)) == {2: ([older.step], 6.0), 3: ([older.step], 6.0)}
    assert "the commit of step 3 in the memory of this host is corrupt" in capfd.readouterr().err


def test_job_continues_from_disk_after_all_hosts_were_lost(job, folder, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HVLAUNCH_SAVED_COMMITS", str(tmp_path))
    started = job(counting(6, die_at(3)), 4)
    started.grant(0, 1)
    end(started, 0, 1)
    for generation, commit in enumerate(reversed(commits.held(str(folder)))):
        with commits.shared_lock(commit) as descriptor:
            saves.save(str(tmp_path), generation, commit, descriptor)
        Path(commit.path).unlink()
    started.grant(2, 3)
    assert dict(started.result() for _ in range(2)) == {2: ([3], 6.0), 3: ([3], 6.0)}
    assert "training continues from commit 3 in the directory of --save-to" in capfd.readouterr().err


def keep(state: KeptState, step: int) -> int:
    """Commit 64 MiB, and return the page faults of the pause."""
    value = {"step": step}, [torch.full((16 << 20,), float(step))]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    complete = state.write((0, step), 0, value)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert complete is not None
    complete()
    return faults


def restored(state: KeptState) -> float:
    parts = state.load(state.versions()[0])
    assert parts is not None
    (weights,) = parts[1]
    (value,) = weights.unique().tolist()
    return float(value)


def test_pause_after_the_first_commit_has_no_page_faults(folder):
    state = KeptState(NAME)
    first, *later = (keep(state, step) for step in (1, 2, 3, 4))
    pages = (64 << 20) // commits.PAGE
    assert first >= pages / 16
    assert max(later) < pages / 32, later
    assert restored(state) == 4.0


def test_end_of_the_program_does_not_wait_for_the_file_of_another_commit(folder, monkeypatch):
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    state = KeptState(NAME)
    keep(state, 1)
    assert Path(folder / f"{NAME}.1").stat().st_blocks == 0
    # A killed program leaves such a file too.
    keep(state, 2)
    assert restored(state) == 2.0


def test_commit_stands_without_memory_for_the_file_of_the_next(folder, monkeypatch, capfd):
    state = KeptState(NAME)
    complete = state.write((0, 1), 0, ({}, [torch.ones(1000)]))
    assert complete is not None
    monkeypatch.setattr(commits, "commit_room", lambda: Room(500, "/dev/shm", "a larger one"))
    complete()
    assert capfd.readouterr().err == ""
    assert restored(state) == 1.0
    assert state.write((0, 2), 0, ({}, [torch.ones(1000)])) is None
    assert "commits are not kept in memory: they need" in capfd.readouterr().err
    assert restored(state) == 1.0


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_of_any_kind_return_as_they_were(folder, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    chance = torch.Generator().manual_seed(1)
    grid = torch.rand(7, 5, generator=chance)
    tensors = [
        grid,
        grid.t(),
        grid[1:, ::2],
        grid[:1].expand(4, 5),
        torch.complex(grid, -grid).conj(),
        torch.complex(grid, -grid).conj().imag,
        grid.bfloat16(),
        grid > 0.5,
        torch.tensor(3),
        torch.empty(0, 3),
        torch.nn.Parameter(grid),
        torch.rand((40 << 20) // 4 + 3, generator=chance),
    ]
    state = KeptState(NAME)
    for step in (1, 2, 3):
        complete = state.write((0, step), 0, (step, tensors))
        assert complete is not None
        complete()
    parts = state.load((0, 3))
    assert parts is not None
    assert parts[0] == 3
    for before, after in zip(tensors, parts[1], strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


def test_newcomers_take_the_state_of_survivors_and_not_an_old_commit(job, folder):
    """What is in memory may be another history's: it counts only if no worker has a state."""

    def pause(step: int) -> None:
        if step == 3:
            # The other worker may still be in step 2, whose last message a killed peer's connection can lose.
            dist.barrier()
        if step == 3 and me() == 0:
            wait_until(lambda: 3 in kept_steps(), "the commit was not kept")
            # As if this host had committed more than the survivor, in a round that was undone.
            complete = KeptState(NAME).write((7, 99), 0, ({"step": 99}, []))
            assert complete is not None
            complete()
            os.kill(os.getpid(), signal.SIGKILL)

    started = job(counting(6, pause), 3)
    started.grant(0, 1)
    end(started, 0)
    started.grant(1, 2)
    results = dict(started.result() for _ in range(2))
    assert results == {1: ([0, 3], 6.0), 2: ([3], 6.0)}


@pytest.mark.parametrize("deaths", [6, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_at_most_one_commit_is_lost_if_all_workers_are_killed_at_any_time(job, folder, deaths):
    """With commits that are farther apart than writing one takes."""
    reached, begun = mmap.mmap(-1, 8), mmap.mmap(-1, 8)
    seen: list[int] = []

    def pause(step: int) -> None:
        if me() % 2 == 0:
            if not seen:
                seen.append(step)
                begun[:] = step.to_bytes(8, "big")
            reached[:] = step.to_bytes(8, "big")
            wait_until(lambda: max(kept_steps(), default=0) >= step, "the commit was not kept")

    chance = random.Random(deaths)
    started = job(counting(1 << 40, pause), 2 * deaths)
    lost = []
    for first in range(0, 2 * deaths, 2):
        before = int.from_bytes(reached[:], "big")
        started.grant(first, first + 1)
        wait_until(lambda before=before: int.from_bytes(reached[:], "big") > before + 2, "no progress")  # type: ignore[misc]
        time.sleep(chance.random() / 20)
        for number in (first, first + 1):
            started.workers[number].kill()
        end(started, first, first + 1)
        lost.append(before - int.from_bytes(begun[:], "big"))
    assert max(lost) <= 1, lost
