"""Verdicts on hangs from samples and stacks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hvlaunch.telemetry.hang import Judge, Verdict, steps_apart
from hvlaunch.telemetry.sample import HostSample, WorkerSample
from hvlaunch.telemetry.stack import Frame, ProcessStack, ThreadStack

TIMEOUT = 60.0
REDUCE = (
    Frame("train", "/home/me/train.py", 88),
    Frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py", 3000),
)
SLEEP = (Frame("train", "/home/me/train.py", 12), Frame("fetch", "/home/me/data.py", 31))
BLAS = Frame("exec_blas", "/x/site-packages/numpy.libs/libscipy_openblas64_.so", 0)
ITEM = (Frame("<module>", "/home/me/train.py", 52),)
GPU = (Frame("cudaStreamSynchronize", "/usr/lib/libcudart.so.13", 0), Frame("0x7f", "libcuda.so.1", 0))
MPI = Frame("PMPI_Barrier", "/usr/lib/libmpi.so.40", 0)
IDLE: Mapping[str, Any] = dict.fromkeys(
    ("cpu", "load", "memory_used", "memory_total", "network_in", "network_out", "disk_read", "disk_write"), 0
)


class Rank:
    """A rank as observers see it. A test may change a rank while time passes."""

    def __init__(self, frames: Sequence[Frame] = REDUCE, **changes: Any) -> None:
        self.frames = tuple(frames)
        self.cpu = changes.pop("cpu", 0.0)
        self.writes = changes.pop("writes", 0)
        self.state = changes.pop("state", "S")
        self.move: Callable[[float], Sequence[Frame]] | None = changes.pop("move", None)
        self.native = changes.pop("native", ())
        self.later: tuple[Frame, ...] = changes.pop("later", ())
        """Where it is when its frames of C are looked at."""
        self.has_native = changes.pop("has_native", True)
        self.children: Sequence[Sequence[Frame]] = changes.pop("children", ())
        self.is_python = [True] * (1 + len(self.children))
        self.busiest = changes.pop("busiest", 0)
        """Index of the computing process: 0 is the worker, others are its children."""
        assert not changes

    def sample(self, rank: int, now: float) -> WorkerSample:
        io, pid = int(self.writes * now), rank + 100
        return WorkerSample(
            rank, pid, 1, self.cpu, self.cpu * now, 0, self.state, 1, None, io, None, (), pid + self.busiest
        )

    def stacks(self, rank: int, now: float, *, native: bool = False) -> Iterable[ProcessStack]:
        frames = tuple(self.move(now)) if self.move is not None else self.frames
        chosen = (self.later or frames) + tuple(self.native) if native else frames
        for number, entry in enumerate([chosen, *self.children]):
            is_python = self.is_python[number] and (self.has_native or not native)
            thread = ThreadStack("MainThread", tuple(entry) if is_python else (), is_python)
            yield ProcessStack(
                "ab"[rank // 4], rank, rank + 100 + number, "python", number > 0, (thread,), "py-spy"
            )


def host_of(name: str, now: float, workers: tuple[WorkerSample, ...], **changes: Any) -> HostSample:
    more = {"cores": 8, "free": {}, "gpus": (), "problems": (), **IDLE, **changes}
    return HostSample(host=name, time=now, workers=workers, **more)


def watch(
    ranks: Mapping[int, Rank],
    until: float = 20 * TIMEOUT,
    *,
    disk: float = 0.0,
    ended: Sequence[int] = (),
    reading: Sequence[int] = (),
    with_native: bool = True,
    steps: Mapping[int, int] | None = None,
    operations: int | None = None,
    behind: Sequence[int] = (),
) -> tuple[float, Verdict] | None:
    """Let the judge look as the driver does, from a first line at 0 on: when it says what."""
    judge = Judge(TIMEOUT, 0.0)
    judge.heard(0.0, by_steps=steps is not None)
    while judge.next_look <= until:
        now = judge.next_look
        workers = tuple(rank.sample(number, now) for number, rank in ranks.items())
        hosts = [
            host_of(name, now, chosen, disk_write=disk)
            for name in "ab"
            if (chosen := tuple(entry for entry in workers if "ab"[entry.rank // 4] == name))
        ]
        needed = judge.samples(now, hosts)
        judge.operations(now, {} if operations is None else {"a": operations})
        judge.stacks(now, [entry for number in sorted(needed) for entry in ranks[number].stacks(number, now)])
        if not judge.is_due(now):
            continue
        all_ = [entry for number, rank in ranks.items() for entry in rank.stacks(number, now)]
        deep = [
            entry for number in judge.computing for entry in ranks[number].stacks(number, now, native=True)
        ]
        outcome = judge.verdict(
            now,
            all_,
            deep if with_native else (),
            ended=ended,
            reading=reading,
            behind=behind,
            apart=steps_apart(steps or {}),
        )
        if outcome is not None:
            return now, outcome
    return None


def others(*odd: int) -> dict[int, Rank]:
    return {number: Rank() for number in range(8) if number not in odd}


def outcome(ranks: Mapping[int, Rank], **how: Any) -> Verdict:
    verdicts = watch(ranks, **how)
    assert verdicts is not None
    assert TIMEOUT <= verdicts[0] <= TIMEOUT + 5
    return verdicts[1]


class Flickering(Rank):
    """A waiting rank with a little processor time from TIMEOUT on, as of a library's thread."""

    def sample(self, rank: int, now: float) -> WorkerSample:
        return replace(super().sample(rank, now), cpu_time=max(0.0, now - TIMEOUT + 1))


def test_a_little_work_within_a_collective_is_no_progress() -> None:
    assert outcome({**others(2, 5), 2: Flickering(), 5: Rank(SLEEP)}).ranks == (5,)


def test_the_verdict_names_the_rank_that_others_wait_for() -> None:
    verdict = outcome({**others(5), 5: Rank(SLEEP)})
    assert verdict.ranks == (5,)
    assert (
        verdict.text
        == "rank 5 (host b) waits in fetch (data.py:31); ranks 0-4,6-7 wait for it in all_reduce (train.py:88)"
    )


def test_the_smaller_group_of_two_collectives_is_to_blame() -> None:
    broadcast = (Frame("train", "/home/me/train.py", 41), Frame("broadcast", REDUCE[1].file, 9))
    verdict = outcome({**others(2), 2: Rank(broadcast)})
    assert verdict.ranks == (2,)
    assert "rank 2 (host a) waits in broadcast (train.py:41); ranks 0-1,3-7" in verdict.text


def test_ranks_in_one_collective_are_named_with_its_line() -> None:
    verdict = outcome(others())
    assert verdict.ranks == tuple(range(8))
    assert verdict.text.startswith("all of them wait in all_reduce (train.py:88)")


def test_stopped_and_ended_ranks_are_to_blame() -> None:
    assert outcome({**others(1), 1: Rank(state="T")}).text.startswith("rank 1 (host a) is stopped (SIGSTOP")
    assert outcome(others(7), ended=[7]).text.startswith("rank 7 has ended; ranks 0-6 wait for it")


def test_a_busy_loop_at_one_line_hangs_and_a_long_library_call_does_not() -> None:
    spin = (Frame("train", "/home/me/train.py", 31),)
    verdict = outcome({**others(3), 3: Rank(spin, cpu=1.0, state="R")})
    assert verdict.text.startswith("rank 3 (host a) computes in train (train.py:31), always there; ranks")
    assert watch({**others(3), 3: Rank(spin, cpu=1.0, native=(BLAS,))}) is None


def test_rank_that_moved_between_samples_is_not_hanging() -> None:
    evaluates = (Frame("train", "/home/me/train.py", 31), Frame("step", "/home/me/train.py", 12))
    counts = (Frame("train", "/home/me/train.py", 31), Frame("step", "/home/me/train.py", 11))
    assert watch({**others(3), 3: Rank(evaluates, cpu=1.0, later=counts)}) is None
    assert watch({**others(3), 3: Rank(evaluates, cpu=1.0, has_native=False)}) is None
    assert outcome({**others(3), 3: Rank(evaluates, cpu=1.0)}).ranks == (3,)


def test_mpi_waits_by_computing() -> None:
    ranks = {
        number: Rank((Frame("main", "/home/me/mpi.py", 14),), cpu=1.0, native=(MPI,)) for number in range(8)
    }
    ranks[6] = Rank(SLEEP)
    verdict = outcome(ranks)
    assert verdict.ranks == (6,)
    assert "wait for it in PMPI_Barrier (mpi.py:14)" in verdict.text


def test_the_verdict_names_the_place_of_a_child() -> None:
    loader = (
        Frame("train", "/home/me/train.py", 20),
        Frame("_get", "/x/site-packages/torch/utils/data/d.py", 1),
    )
    verdict = outcome({**others(4), 4: Rank(loader, children=[SLEEP])})
    assert "rank 4 (host b) waits in _get (train.py:20) [also there: fetch (data.py:31)]" in verdict.text


def test_waiting_for_a_compiler_is_progress_and_for_an_idle_child_is_not() -> None:
    waits = Rank(
        (Frame("build", "/home/me/train.py", 7),), cpu=1.0, children=[(Frame("running", "", 0),)], busiest=1
    )
    waits.is_python = [True, False]
    assert watch({**others(3), 3: waits}) is None
    waits.is_python = [True, True]
    waits.children = [(Frame("spin", "/home/me/train.py", 9),)]
    assert outcome({**others(3), 3: waits}).ranks == (3,)


def moving(now: float) -> Sequence[Frame]:
    return (Frame("evaluate", "/home/me/train.py", 50 + int(now * 7) % 13),)


@pytest.mark.parametrize(
    ("rank", "disk"),
    [
        (Rank(cpu=1.0, move=moving), 0.0),
        (Rank(SLEEP, writes=20 << 20), 0.0),
        (Rank(SLEEP, state="D"), 20e6),
        (Rank(SLEEP, cpu=-0.001), 0.0),
    ],
    ids=[
        "computes here and there",
        "writes",
        "waits for a disk that moves",
        "starts one program after the other",
    ],
)
def test_a_rank_with_progress_keeps_the_job_from_hanging(rank: Rank, disk: float) -> None:
    assert watch({**others(0), 0: rank}, disk=disk) is None


def test_waiting_for_an_idle_disk_hangs() -> None:
    assert outcome({**others(0), 0: Rank(SLEEP, state="D")}).ranks == (0,)


def test_a_job_whose_ranks_all_compute_does_not_hang() -> None:
    spin = Rank((Frame("train", "/home/me/train.py", 31),), cpu=1.0)
    assert watch(dict.fromkeys(range(8), spin)) is None


def test_waiting_for_input_is_not_hanging() -> None:
    assert watch({**others(0), 0: Rank(SLEEP)}, reading=[0]) is None


def test_each_line_restarts_the_timeout_and_a_hang_is_reported_once() -> None:
    judge = Judge(TIMEOUT, 0.0)
    judge.heard(50.0)
    assert judge.next_look == 50 + TIMEOUT / 4
    ranks = {**others(5), 5: Rank(SLEEP)}
    verdicts = watch(ranks)
    assert verdicts is not None
    judge.heard(40.0)
    assert judge.next_look == 50 + TIMEOUT / 4


def test_a_loop_in_user_code_is_seen_without_native_frames() -> None:
    spin = (Frame("train", "/home/me/train.py", 31),)
    assert outcome({**others(3), 3: Rank(spin, cpu=1.0)}, with_native=False).ranks == (3,)


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (Rank(cpu=1.0, move=moving), "rank 3 (host a) computes, now in evaluate (train.py:"),
        (Rank(SLEEP, writes=20 << 20), "rank 3 (host a) waits in fetch (data.py:31)"),
    ],
    ids=["computes here and there", "writes"],
)
def test_reported_steps_alone_count(rank: Rank, words: str) -> None:
    assert watch({**others(3), 3: rank}) is None
    verdict = outcome({**others(3), 3: rank}, steps=dict.fromkeys(range(8), 120))
    assert verdict.ranks == (3,)
    assert verdict.text.startswith(words)


def test_a_rank_at_another_step_is_to_blame_within_one_collective() -> None:
    verdict = outcome(others(), steps={**dict.fromkeys(range(8), 120), 6: 119})
    assert verdict.ranks == (6,)
    assert verdict.text.startswith(
        "rank 6 (host b) waits in all_reduce (train.py:88) (at step 119, the others at 120); ranks 0-5,7 wait for it"
    )


def test_a_step_as_long_as_earlier_steps_is_no_hang() -> None:
    judge = Judge(TIMEOUT, 0.0)
    for end in (10.0, 100.0):
        judge.heard(end, by_steps=True)
    workers = (Rank(SLEEP).sample(0, 1.0),)
    judge.samples(150.0, [host_of("a", 150.0, workers)])
    assert not judge.is_due(100.0 + 179)
    assert judge.is_due(100.0 + 181)
    judge.heard(280.0)
    judge.samples(300.0, [host_of("a", 300.0, workers)])
    assert judge.is_due(280.0 + TIMEOUT + 1)


def look(judge: Judge, now: float, *, sampled_at: float | None = None, **host: Any) -> None:
    """Two sleeping ranks, the first with `used` cores."""
    cpu = host.pop("cpu", 0.0)
    at = now if sampled_at is None else sampled_at
    ranks = (Rank(SLEEP, cpu=cpu), Rank(SLEEP))
    judge.samples(
        now, [host_of("a", at, tuple(entry.sample(number, at) for number, entry in enumerate(ranks)), **host)]
    )


def test_a_rank_computes_even_with_a_small_share_of_a_processor() -> None:
    judge = Judge(TIMEOUT, 0.0)
    for now in (20.0, 30.0):
        look(judge, now, cpu=0.01, load=0.5)
    assert judge.computing == frozenset()
    look(judge, 40.0, cpu=0.01, load=64.0)
    assert judge.computing == {0}


def test_an_old_sample_says_nothing_about_now() -> None:
    judge = Judge(TIMEOUT, 0.0)
    for now in (20.0, 30.0, 40.0, 50.0):
        look(judge, now)
    look(judge, 60.0, sampled_at=50.0)
    assert not judge.is_due(60.0)
    assert judge.next_look < 62.0
    look(judge, 61.0)
    assert judge.is_due(61.0)


def test_a_driver_that_was_stopped_starts_the_timeout_anew() -> None:
    judge = Judge(TIMEOUT, 0.0)
    look(judge, 20.0)
    look(judge, 300.0)
    assert not judge.is_due(300.0)
    for now in (310.0, 330.0, 350.0, 361.0):
        look(judge, now)
    assert judge.is_due(361.0)


def on_gpu(frames: Sequence[Frame] = ITEM) -> Rank:
    return Rank(frames, cpu=1.0, native=GPU)


def test_waiting_for_the_gpu_while_nccl_is_idle_is_waiting_for_others() -> None:
    ranks = {number: on_gpu() for number in range(8)}
    waits = "ranks 0-4,6-7 wait for it in <module> (train.py:52)"
    verdict = outcome({**ranks, 5: Rank(SLEEP)}, operations=48, behind=[5])
    assert verdict.text == f"rank 5 (host b) waits in fetch (data.py:31); {waits}"
    verdict = outcome({**ranks, 5: Rank((*ITEM, REDUCE[1]))}, operations=48)
    assert verdict.text == f"rank 5 (host b) waits in all_reduce (train.py:52); {waits}"
    verdict = outcome({**ranks, 5: Rank(SLEEP)})
    assert "ranks 0-4,6-7 compute in <module> (train.py:52), always there" in verdict.text


def test_a_rank_behind_that_waits_for_its_gpu_computes() -> None:
    evaluates = on_gpu((*ITEM, Frame("evaluate", "/home/me/train.py", 70)))
    assert watch({**others(0), 0: evaluates}, operations=48, behind=[0]) is None
    assert watch({number: on_gpu() for number in range(8)}, operations=48) is None
    assert watch({number: on_gpu() for number in range(8)}) is None
