"""save() and load(): forks as the ranks of rounds, with the memory of one host, or of several."""

import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from hvlaunch.agent import commits
from hvlaunch.agent.commits import saves
from hvlaunch.agent.proc import Room
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.torch import checkpoint
from hvlaunch.torch.kept import KeptState, warn_of_little_room
from tests.unit.torch.ranks import all_forked

TOKEN = "of-this-job"
LONG = 90.0


class Rounds:
    """Rounds of ranks, which are forks of this process. Each host has a directory of commits of its own."""

    def __init__(self) -> None:
        self.server = RendezvousServer(TOKEN, host="127.0.0.1")
        self.server.start()
        self.name = f"hvlaunch-{uuid.uuid4().hex}"
        self.hosts: set[str] = set()
        self.results = multiprocessing.get_context("fork").SimpleQueue()

    def start(self, work, hosts: str, round_number: int):
        """Start work(rank) in a rank for each letter of `hosts`; the letter is the host."""
        context = multiprocessing.get_context("fork")
        self.hosts |= set(hosts)
        workers = [
            context.Process(target=self._work, args=(work, rank, hosts, round_number), daemon=True)
            for rank in range(len(hosts))
        ]
        all_forked(workers)
        return workers

    def _work(self, work, rank: int, hosts: str, round_number: int) -> None:
        torch.set_num_threads(1)
        local_rank = hosts[:rank].count(hosts[rank])
        os.environ.update(
            HVLAUNCH_RANK=str(rank),
            HVLAUNCH_SIZE=str(len(hosts)),
            HVLAUNCH_LOCAL_RANK=str(local_rank),
            HVLAUNCH_HOST=hosts[rank],
            HVLAUNCH_ROUND=str(round_number),
            HVLAUNCH_SCRATCH=f"/tmp/{self.name}-{hosts[rank]}",
            HVLAUNCH_RENDEZVOUS=f"http://127.0.0.1:{self.server.port}",
            HVLAUNCH_TOKEN=TOKEN,
        )
        result = work(rank)
        # As at the end of a program, which waits for the threads of the last save.
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join(LONG)
        self.results.put((rank, result))
        os._exit(0)

    def run(self, work, hosts: str, round_number: int) -> list[Any]:
        """Return the results by rank."""
        workers = self.start(work, hosts, round_number)
        results = dict(self.results.get() for _ in workers)
        for worker in workers:
            worker.join(LONG)
        return [results[rank] for rank in range(len(hosts))]

    def folder(self, host: str) -> Path:
        return Path(commits.directory_of(f"/tmp/{self.name}-{host}"))

    def close(self) -> None:
        self.server.close()
        for host in self.hosts:
            shutil.rmtree(self.folder(host), ignore_errors=True)


@pytest.fixture
def rounds():
    rounds = Rounds()
    yield rounds
    rounds.close()


def value(rank: int, step: int) -> dict[str, Any]:
    """A value that its rank and step determine."""
    return {
        "weights": torch.full((300,), 1000.0 * rank + step),
        "note": [rank, {"step": step}],
        "bits": torch.ones(3) > 0,
    }


def saving(*steps: int, shared: bool = False):
    def work(rank: int) -> None:
        for step in steps:
            checkpoint.save(step, value(0 if shared else rank, step), shared=shared)

    return work


def loading(rank: int):
    """Return the step and the sum of the weights, after a look at everything else."""
    restored = checkpoint.load()
    if restored is None:
        return None
    step, state = restored
    assert state["note"][1] == {"step": step}
    assert state["bits"].all()
    return step, state["weights"].unique().tolist()


def corrupt(folder: Path, name: str, step: int) -> None:
    for commit in commits.held(str(folder)):
        if (commit.name, commit.step) == (name, step):
            with Path(commit.path).open("r+b") as file:
                file.seek(commits.PAGE + commit.length // 2)
                file.write(b"corrupt")


def test_ranks_of_the_next_round_have_the_values_of_the_last_step(rounds):
    assert rounds.run(loading, "aab", 0) == [None] * 3
    rounds.run(saving(1, 2, 3), "aab", 0)
    assert rounds.run(loading, "aab", 1) == [(3, [3.0]), (3, [1003.0]), (3, [2003.0])]


def test_step_that_a_rank_lacks_is_not_restored(rounds):
    rounds.run(saving(1, 2), "ab", 0)
    rounds.run(lambda rank: saving(*([3] if rank == 0 else []))(rank), "ab", 0)
    assert rounds.run(loading, "ab", 1) == [(2, [2.0]), (2, [1002.0])]


def test_same_step_of_two_rounds_is_not_mixed(rounds):
    rounds.run(saving(1, 2), "ab", 0)
    rounds.run(lambda rank: saving(*([2] if rank == 0 else []))(rank), "ab", 1)
    # Rank 0 has step 2 of both rounds, and rank 1 has it of round 0 alone.
    assert rounds.run(loading, "ab", 2) == [(2, [2.0]), (2, [1002.0])]
    names = {(commit.name, commit.version) for commit in commits.held(str(rounds.folder("a")))}
    assert ("default.0", (1, 2)) in names


def test_corrupt_value_of_one_rank_takes_all_ranks_to_the_step_before(rounds, capfd):
    rounds.run(saving(1, 2, 3), "ab", 0)
    corrupt(rounds.folder("b"), "default.1", 3)
    assert rounds.run(loading, "ab", 1) == [(2, [2.0]), (2, [1002.0])]
    assert "the commit of step 3 in the memory of this host is corrupt" in capfd.readouterr().err
    for step in (1, 2):
        corrupt(rounds.folder("a"), "default.0", step)
    assert rounds.run(loading, "ab", 2) == [None, None]


def test_values_of_three_ranks_do_not_fit_two(rounds):
    rounds.run(saving(1), "aab", 0)
    assert rounds.run(loading, "aa", 1) == [None, None]


def test_host_keeps_one_shared_value_for_any_number_of_ranks(rounds):
    rounds.run(saving(1, 2, shared=True), "aabb", 0)
    assert {path.name for path in rounds.folder("a").iterdir()} == {
        "default.shared.0",
        "default.shared.1",
        "scratch",
    }
    assert rounds.run(loading, "bbb", 1) == [(2, [2.0])] * 3


def test_steps_must_grow(rounds):
    def work(rank: int) -> str:
        checkpoint.save(5, value(rank, 5))
        with pytest.raises(ValueError, match="step 5 does not follow step 5"):
            checkpoint.save(5, value(rank, 5))
        return "refused"

    assert rounds.run(work, "a", 0) == ["refused"]


def test_nothing_is_kept_without_an_agent(monkeypatch):
    monkeypatch.delenv("HVLAUNCH_SCRATCH", raising=False)
    checkpoint.save(1, {"weights": torch.ones(1)})
    assert checkpoint.load() is None


def test_value_that_can_not_be_pickled_is_the_scripts_error(rounds):
    def work(rank: int) -> list[Any]:
        checkpoint.save(1, value(rank, 1))
        with pytest.raises((AttributeError, TypeError)):
            checkpoint.save(2, {"weights": torch.ones(1), "call": lambda: 0})
        return KeptState("default.0").versions()

    assert rounds.run(work, "a", 0) == [[(0, 1)]]


def test_ranks_killed_at_any_time_have_a_common_step(rounds):
    """Ranks in step, as collectives keep them, may be in the middle of different saves."""
    chance = random.Random(3)
    context = multiprocessing.get_context("fork")

    for round_number in range(6):
        barrier = context.Barrier(2)
        last = context.Value("q", 0)

        def work(rank: int, barrier=barrier, last=last) -> None:
            restored = checkpoint.load()
            step = restored[0] if restored else 0
            if restored:
                assert restored[1]["weights"].unique().tolist() == [1000.0 * rank + step]
            while True:
                barrier.wait()  # a collective
                step += 1
                checkpoint.save(step, value(rank, step))
                if rank == 0:
                    last.value = step

        workers = rounds.start(work, "ab", round_number)
        before = last.value
        deadline = time.monotonic() + LONG
        while last.value < before + 3:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(chance.random() / 50)
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(LONG)
            assert worker.exitcode == -signal.SIGKILL
        # The slower rank may not have begun its last save, and may still compute the checksums of the one before.
        steps = [restored[0] for restored in rounds.run(loading, "ab", 100 + round_number)]
        assert steps[0] == steps[1]
        assert steps[0] >= last.value - 2


def to_disk(rounds: Rounds, disk: Path, generation: int, hosts: str) -> None:
    """Save the commits of these hosts as their errands do, and lose the hosts."""
    disk.mkdir(exist_ok=True)
    for host in hosts:
        for commit in commits.held(str(rounds.folder(host))):
            with commits.shared_lock(commit) as descriptor:
                saves.save(str(disk), generation, commit, descriptor)
        shutil.rmtree(rounds.folder(host))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HVLAUNCH_SAVED_COMMITS", str(tmp_path / "disk"))
    return tmp_path / "disk"


@pytest.mark.parametrize("shared", [False, True])
def test_job_continues_from_disk_after_all_hosts_were_lost(rounds, disk, shared, capfd):
    assert rounds.run(loading, "ab", 3) == [None] * 2
    rounds.run(saving(1, 2, shared=shared), "ab", 3)
    to_disk(rounds, disk, 7, "ab")
    # The next job counts its rounds from 0, and what it saves is newer.
    expected = [(2, [2.0]), (2, [2.0 if shared else 1002.0])]
    assert rounds.run(loading, "cd", 0) == expected
    assert "training continues from step 2 in the directory of --save-to" in capfd.readouterr().err
    rounds.run(saving(1, shared=shared), "ab", 0)
    # Memory comes first.
    assert rounds.run(loading, "ab", 1)[0] == (1, [1.0])
    to_disk(rounds, disk, 8, "ab")
    assert rounds.run(loading, "cd", 2)[0] == (1, [1.0])


def test_damaged_file_on_disk_falls_back_to_the_older_version(rounds, disk, capfd):
    rounds.run(saving(1, 2), "ab", 0)
    to_disk(rounds, disk, 7, "ab")
    with (disk / "default.1.7-0-2").open("r+b") as file:
        file.seek(commits.PAGE + 500)
        file.write(b"corrupt")
    assert rounds.run(loading, "cd", 0) == [(1, [1.0]), (1, [1001.0])]
    words = capfd.readouterr().err
    assert f"the commit of step 2 in {disk} is corrupt" in words
    assert "continues from step 1" in words
    assert "continues from step 2" not in words
    (disk / "default.0.7-0-1").unlink()
    assert rounds.run(loading, "cd", 1) == [None, None]


@pytest.mark.parametrize("trap", ["another user's", "writable by all"])
def test_file_on_disk_that_others_may_have_written_is_not_unpickled(rounds, disk, capfd, trap):
    """A shared directory may be everybody's, and unpickling a file runs what its writer wants."""
    rounds.run(saving(1, 2), "ab", 0)
    to_disk(rounds, disk, 7, "ab")
    path = disk / "default.1.7-0-2"
    if trap == "writable by all":
        path.chmod(0o602)
    elif os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        pytest.skip("only root can give a file away")
    assert rounds.run(loading, "cd", 0) == [(1, [1.0]), (1, [1001.0])]
    words = "it belongs to" if trap == "another user's" else "every user of this machine can change it"
    assert f"step 2 can't be read: {words}" in capfd.readouterr().err


def test_other_number_of_ranks_does_not_fit_the_values_on_disk(rounds, disk):
    rounds.run(saving(1), "ab", 0)
    to_disk(rounds, disk, 7, "ab")
    assert rounds.run(loading, "cde", 0) == [None] * 3


@pytest.mark.parametrize("shared", [False, True])
def test_commit_on_disk_becomes_a_checkpoint_of_torch(rounds, disk, tmp_path, shared):
    rounds.run(saving(1, 2, shared=shared), "ab", 0)
    to_disk(rounds, disk, 7, "ab")
    out = str(tmp_path / "dcp")
    assert checkpoint.to_dcp(str(disk), out) == 2
    blank: dict[str, Any] = {
        "weights": torch.zeros(300),
        "bits": torch.zeros(3) > 0,
        "note": [0, {"step": 0}],
    }
    state: dict[str, Any] = blank if shared else {"0": blank, "1": {**blank, "weights": torch.zeros(300)}}
    torch.distributed.checkpoint.load(state, checkpoint_id=out, no_dist=True)
    last = state if shared else state["1"]
    assert last["weights"].unique().tolist() == [2.0 if shared else 1002.0]
    assert last["note"] == [0 if shared else 1, {"step": 2}]
    with pytest.raises(FileNotFoundError, match="no whole commit"):
        checkpoint.to_dcp(str(tmp_path), out)


def test_ranks_without_room_for_all_of_them_keep_nothing_and_say_so_once(rounds, monkeypatch, capfd):
    monkeypatch.setenv("HVLAUNCH_LOCAL_SIZE", "2")
    # Enough for one rank: without the other rank's need both would begin.
    room = Room(30_000, "/dev/shm", "a larger one")
    monkeypatch.setattr(commits, "commit_room", lambda: room)
    rounds.run(saving(1, 2), "aa", 0)
    words = "hvlaunch: host a: commits are not kept in memory: those of 2 workers need"
    printed = capfd.readouterr().err
    assert printed.count(words) == printed.count("hvlaunch: ") == 1
    assert "half of the 0.1 MB free in /dev/shm is less; try: a larger one" in printed
    assert commits.held(str(rounds.folder("a"))) == []
    monkeypatch.setattr(commits, "commit_room", lambda: Room(100_000, "/dev/shm", "a larger one"))
    rounds.run(saving(1, 2), "aa", 1)
    assert len(commits.held(str(rounds.folder("a")))) == 4


def test_little_room_is_said_before_the_training(rounds, monkeypatch, capfd):
    monkeypatch.setattr(commits, "commit_room", lambda: Room(32 << 20, "/dev/shm", "a larger one"))
    rounds.run(loading, "aa", 0)
    # A static job ends with its first failure: commits would not help it.
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("HVLAUNCH_ELASTIC", "1")
    rounds.run(loading, "aab", 0)
    # The next life of the workers repeats no message.
    rounds.run(lambda _rank: warn_of_little_room(2), "aab", 1)
    printed = capfd.readouterr().err
    for host in "ab":
        assert printed.count(f"hvlaunch: host {host}: commits have room for 33.6 MB, half of") == 1
