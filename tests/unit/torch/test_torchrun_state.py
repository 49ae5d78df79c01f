"""The state of a torchrun job: how it changes, and how it is written."""

import pytest

from hvlaunch.torch.torchrun.state import JobState, NodeLimits, decode, encode, ended, formed, joined, left

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
