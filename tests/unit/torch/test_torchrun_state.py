"""The state of a torchrun job, and the barrier: one node's way to a place, alone and in simulated jobs whose nodes come, fail and die."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest

from hvlaunch.torch.torchrun.state import (
    Barrier,
    Ended,
    FormRound,
    JobState,
    JoinWaiting,
    Late,
    NodeLimits,
    NodePlace,
    WaitForChange,
    decode,
    encode,
    ended,
    formed,
    joined,
    left,
)

LIMITS = NodeLimits(min_nodes=2, max_nodes=3, join=100.0, last_call=30.0)


def barrier(last: NodePlace | None = None) -> Barrier:
    return Barrier("a", LIMITS, last)


def test_a_node_joins_and_waits_until_there_are_enough():
    one = barrier()
    assert one.next(None, 0.0) == JoinWaiting()
    assert one.next(JobState(epoch="e", waiting=("a",)), 1.0) == WaitForChange(101.0)


def test_the_last_call_of_a_jobs_first_round_runs_from_when_there_are_enough():
    one = barrier()
    one.next(JobState(epoch="e", waiting=("a",)), 0.0)
    two = JobState(epoch="e", waiting=("a", "b"))
    assert one.next(two, 20.0) == WaitForChange(50.0)
    assert one.next(two, 49.0) == WaitForChange(50.0)
    assert one.next(two, 50.0) == FormRound()


def test_a_full_round_is_formed_at_once():
    assert barrier().next(JobState(epoch="e", waiting=("b", "a", "c")), 0.0) == FormRound()


def test_survivors_do_not_wait_for_a_last_call():
    state = JobState(epoch="e", round=3, placed=("a", "b", "c"), waiting=("b", "a"))
    assert barrier(NodePlace("e", 3, 0, 3)).next(state, 0.0) == FormRound()


def test_a_new_round_waits_until_all_have_left_the_old_one():
    state = JobState(epoch="e", round=3, placed=("a", "b", "c"), active=("c",), waiting=("b", "a"))
    assert barrier(NodePlace("e", 3, 0, 3)).next(state, 0.0) == WaitForChange(100.0)


def test_too_few_for_too_long_is_late_and_enough_at_the_last_moment_is_a_round():
    few = JobState(epoch="e", waiting=("a",))
    one = barrier()
    one.next(few, 0.0)
    assert one.next(few, 100.0) == Late(("a",))
    other = barrier()
    other.next(few, 0.0)
    enough = JobState(epoch="e", waiting=("a", "b"))
    assert other.next(enough, 90.0) == WaitForChange(100.0)
    assert other.next(enough, 100.0) == FormRound()


def test_a_spare_waits_for_as_long_as_the_job_runs_and_then_has_its_full_time_to_join():
    full = JobState(epoch="e", round=0, placed=("b", "c", "d"), active=("b", "c", "d"), waiting=("a",))
    spare = barrier()
    assert spare.next(full, 0.0) == WaitForChange()
    assert spare.next(full, 10_000.0) == WaitForChange()
    assert spare.next(left(full, ["c"]), 10_001.0) == WaitForChange(10_101.0)


def test_the_place_is_of_a_new_round_only():
    state = JobState(epoch="e", round=3, placed=("b", "a"), active=("b", "a"))
    assert barrier().next(state, 0.0) == NodePlace("e", 3, 1, 2)
    assert barrier(NodePlace("e", 2, 0, 2)).next(state, 0.0) == NodePlace("e", 3, 1, 2)
    assert barrier(NodePlace("e", 3, 1, 2)).next(state, 0.0) == JoinWaiting()
    assert barrier(NodePlace("earlier", 3, 1, 2)).next(state, 0.0) == NodePlace("e", 3, 1, 2)


def test_a_waiting_node_taken_for_lost_joins_again():
    assert barrier().next(JobState(epoch="e", waiting=("b",)), 0.0) == JoinWaiting()


def test_the_jobs_end_reaches_its_members():
    state = JobState(epoch="e", round=0, placed=("b",), active=("b",), outcome="done", cause="b")
    told = Ended("done", "b")
    assert barrier(NodePlace("e", 0, 0, 1)).next(state, 0.0) == told
    assert barrier().next(joined_before(state), 0.0) == told
    assert barrier().next(state, 0.0, alive=True) == told


def joined_before(state: JobState) -> JobState:
    return JobState(epoch=state.epoch, waiting=("a",), active=state.active, outcome="done", cause="b")


def test_a_new_job_does_not_inherit_the_end_of_one_whose_nodes_were_killed():
    state = JobState(epoch="e", round=0, placed=("b",), active=("b",), outcome="failed", cause="c")
    new = barrier()
    assert new.next(state, 0.0) == WaitForChange()
    assert new.next(left(state, ["b"]), 5.0) == JoinWaiting()


@dataclass
class SimulatedNode:
    name: str
    barrier: Barrier | None
    place: NodePlace | None = None
    ended: bool = False
    late: bool = False


@dataclass
class SimulatedJob:
    """A job's nodes around one state. `random` draws the next action; time moves only while all wait."""

    limits: NodeLimits
    random: random.Random
    now: float = 0.0
    state: JobState | None = None
    nodes: dict[str, SimulatedNode] = field(default_factory=dict)
    rounds: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    epochs: Iterator[int] = field(default_factory=count)

    def arrive(self, name: str) -> None:
        self.nodes[name] = SimulatedNode(name, Barrier(name, self.limits))

    def die(self, name: str) -> None:
        """And its lease ends at once."""
        del self.nodes[name]
        if self.state is not None:
            self.state = left(self.state, [name])

    def fail(self, name: str) -> None:
        """A worker of it fails, and is started again."""
        node = self.nodes[name]
        node.barrier = Barrier(name, self.limits, node.place)

    def turn(self, node: SimulatedNode) -> bool:
        """One step of the node; False where it has nothing to do."""
        if node.ended or node.late:
            return False
        if node.barrier is None:
            assert self.state is not None
            if self.state.calls_back(node.name, self.limits.max_nodes):
                self.fail(node.name)
                return True
            return False
        step = node.barrier.next(self.state, self.now)
        if isinstance(step, JoinWaiting):
            self.state = joined(self.state, node.name, f"epoch {next(self.epochs)}")
        elif isinstance(step, FormRound):
            assert self.state is not None
            before = self.state
            self.state = formed(before, self.limits)
            assert self.state != before
            self.check_new_round(before, self.state)
        elif isinstance(step, NodePlace):
            assert self.rounds[step.epoch, step.round][step.rank] == node.name
            node.place, node.barrier = step, None
        elif isinstance(step, Ended):
            node.ended = True
        elif isinstance(step, Late):
            node.late = True
        else:
            return False
        return True

    def check_new_round(self, before: JobState, state: JobState) -> None:
        assert (state.epoch, state.round) not in self.rounds
        self.rounds[state.epoch, state.round] = state.placed
        assert self.limits.min_nodes <= len(state.placed) <= self.limits.max_nodes
        survivors = [node for node in before.placed if node in state.placed]
        assert list(state.placed[: len(survivors)]) == survivors
        for node in self.nodes.values():
            assert node.barrier is not None or node.name not in before.placed, "the old round still trains"

    def settle(self) -> None:
        """Until all train, or have nothing to do but to wait."""
        for _ in range(10_000):
            names = sorted(self.nodes)
            self.random.shuffle(names)
            moved = [self.turn(self.nodes[name]) for name in names]
            if not any(moved):
                ends_of_waits = [
                    step.until
                    for node in self.nodes.values()
                    if node.barrier is not None and not node.ended and not node.late
                    for step in [node.barrier.next(self.state, self.now)]
                    if isinstance(step, WaitForChange) and step.until is not None
                ]
                if not ends_of_waits:
                    return
                self.now = min(ends_of_waits)
        raise AssertionError("the nodes run in circles")


def test_simulated_jobs_come_to_rest_in_a_round_of_the_right_nodes():
    for seed in range(150):
        simulate(seed)


def simulate(seed):
    draw = random.Random(seed)
    least = draw.randint(1, 3)
    job = SimulatedJob(NodeLimits(min_nodes=least, max_nodes=draw.randint(least, 5)), draw)
    for number in range(draw.randint(least, 6)):
        job.arrive(f"n{number}")
    job.settle()
    for number in range(10, 22):
        training = [node.name for node in job.nodes.values() if node.barrier is None]
        happening = draw.choice(["arrive", "die", "fail", "die while the others come back"])
        if happening == "arrive":
            job.arrive(f"n{number}")
        elif training:
            victim = draw.choice(training)
            if happening == "fail":
                job.fail(victim)
            else:
                job.die(victim)
            if happening == "die while the others come back":
                for _ in range(draw.randint(0, 4)):
                    if job.nodes:
                        job.turn(draw.choice(list(job.nodes.values())))
                if job.nodes:
                    job.die(draw.choice(sorted(job.nodes)))
        job.settle()
        job.nodes = {name: node for name, node in job.nodes.items() if not node.late}
        if job.state is not None:
            job.state = left(job.state, [name for name in job.state.nodes if name not in job.nodes])
        here = len(job.nodes)
        trained = {node.name for node in job.nodes.values() if node.barrier is None}
        if here >= least:
            assert len(trained) == min(here, job.limits.max_nodes)
            assert job.state is not None
            assert set(job.state.active) == trained
            assert job.state.running


def test_a_jobs_end_reaches_every_node_that_waits():
    job = SimulatedJob(NodeLimits(min_nodes=1, max_nodes=1), random.Random(0))
    for name in "ab":
        job.arrive(name)
    job.settle()
    assert job.state is not None
    (winner,) = job.state.placed
    job.state = left(ended(job.state, "done", winner), [winner])
    del job.nodes[winner]
    job.settle()
    (spare,) = job.nodes.values()
    assert spare.ended


TWO_OR_THREE = NodeLimits(min_nodes=2, max_nodes=3)


def running(*nodes: str, **fields) -> JobState:
    return JobState(epoch="e", round=0, placed=nodes, active=nodes, **fields)


def test_the_first_to_come_begins_a_job():
    state = joined(None, "a", "e")
    assert state == JobState(epoch="e", waiting=("a",))
    assert joined(state, "b", "other") == JobState(epoch="e", waiting=("a", "b"))


def test_without_nodes_a_new_job_begins():
    empty = JobState(epoch="old", round=3, placed=("x",), outcome="failed", cause="x")
    assert joined(empty, "a", "new") == JobState(epoch="new", waiting=("a",))


def test_a_joining_node_ends_its_old_round():
    state = joined(running("a", "b"), "b", "unused")
    assert (state.active, state.waiting, state.running) == (("a",), ("b",), False)
    assert state.calls_back("a", 2) == 1


def test_no_node_joins_an_ended_job():
    state = running("a", outcome="done")
    assert joined(state, "b", "e2") == state


def test_a_round_is_formed_when_all_have_left_the_old_one_and_enough_wait():
    one = JobState(epoch="e", waiting=("a",))
    assert formed(one, TWO_OR_THREE) == one
    busy = JobState(epoch="e", placed=("c",), active=("c",), waiting=("a", "b"))
    assert formed(busy, TWO_OR_THREE) == busy
    two = formed(JobState(epoch="e", waiting=("b", "a")), TWO_OR_THREE)
    assert (two.round, two.placed, two.active, two.waiting) == (0, ("a", "b"), ("a", "b"), ())


def test_survivors_keep_their_places_and_order_and_new_nodes_follow():
    state = JobState(epoch="e", round=4, placed=("m", "c", "z"), waiting=("a", "z", "b", "c"))
    after = formed(state, TWO_OR_THREE)
    assert after.placed == ("c", "z", "a")
    assert after.waiting == ("b",)
    assert after.round == 5


def test_new_nodes_are_in_the_order_of_their_addresses_numbers_by_value():
    names = ("10.0.0.10/7/aa", "10.0.0.9/8/bb", "node2/1/cc", "node10/1/dd")
    state = formed(JobState(epoch="e", waiting=names[::-1]), NodeLimits(min_nodes=1, max_nodes=4))
    assert state.placed == (names[1], names[0], names[2], names[3])


@pytest.mark.parametrize(
    ("state", "node", "calls"),
    [
        (running("a", "b"), "a", 0),
        (running("a", "b", waiting=("c",)), "a", 1),
        (running("a", "b", "c", waiting=("d",)), "a", 0),
        (left(running("a", "b", "c"), ["b"]), "a", 1),
        (running("a", "b"), "c", 1),
        (left(running("a", "b", outcome="done"), ["b"]), "a", 0),
        (left(running("a", "b", outcome="failed"), ["b"]), "a", 1),
    ],
    ids=["all is well", "one more", "a spare", "one is lost", "taken for lost", "done", "failed"],
)
def test_reasons_to_leave_training(state, node, calls):
    assert state.calls_back(node, 3) == calls


def test_the_first_word_on_how_a_job_ended_stands():
    state = ended(running("a", "b"), "failed", "a")
    assert ended(state, "done", "b") == state


def test_written_and_read_it_is_the_same():
    state = running("a", "b", waiting=("c",), outcome="done", cause="a")
    assert decode(encode(state)) == state


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04N.", b"[]", b"null", b'{"epoch": "e"}', b'{"placed": 1}', b"\xff"]
)
def test_an_invalid_state_is_refused(data):
    with pytest.raises(ValueError):
        decode(data)
