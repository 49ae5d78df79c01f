"""Many ranks' stacks as one text."""

import json
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.telemetry.stack import (
    Frame,
    Node,
    ProcessStack,
    ThreadStack,
    as_json,
    from_json,
    merge,
    process_stacks,
    summary,
    tree_lines,
    where,
    whole_stacks,
)

Stacks = list[tuple[int, tuple[Frame, ...]]]

_FRAMES = st.builds(Frame, st.sampled_from("fgh"), st.sampled_from(["a.py", "b.py"]), st.integers(1, 2))
_STACKS = st.lists(st.tuples(st.integers(0, 5), st.lists(_FRAMES, max_size=5).map(tuple)), max_size=12)

MAIN = Frame("main", "/home/me/train.py", 12)
STEP = Frame("step", "/home/me/train.py", 88)
LOAD = Frame("load", "/home/me/data.py", 31)
TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/"
WRAPPER = Frame("wrapper", TORCH + "c10d_logger.py", 81)
ALL_REDUCE = Frame("all_reduce", TORCH + "distributed_c10d.py", 2810)
POLL = Frame("poll_schedule_timeout", "", 0)


def _paths(node: Node, before: tuple[Frame, ...] = ()) -> Iterator[tuple[int, tuple[Frame, ...]]]:
    """List the stacks of a tree: a rank's stack ends at the node without a branch for the rank."""
    frames = before + node.frames
    for branch in node.branches:
        yield from _paths(branch, frames)
    for rank in node.ranks.difference(*(branch.ranks for branch in node.branches)):
        yield rank, frames


def _all(node: Node) -> Iterator[Node]:
    yield node
    for branch in node.branches:
        yield from _all(branch)


def process(rank: int, *frames: Frame, child: bool = False, **more: object) -> ProcessStack:
    threads = (ThreadStack("MainThread", frames, not (frames and frames[-1] is POLL)),)
    fields = {"command": "python train.py", "threads": threads, "source": "py-spy", **more}
    return ProcessStack(host="a", rank=rank, pid=100 + rank, is_child=child, **fields)  # type: ignore[arg-type]


@given(_STACKS)
def test_a_tree_has_all_stacks_and_no_others(stacks: Stacks) -> None:
    single = list(dict(stacks).items())
    assert sorted(_paths(merge(single)), key=repr) == sorted(single, key=repr)


@given(_STACKS)
def test_common_frames_appear_once_and_the_smallest_branch_first(
    stacks: Stacks,
) -> None:
    tree = merge(dict(stacks).items())
    assert tree.ranks == {rank for rank, _ in stacks}
    for node in _all(tree):
        assert len({branch.frames[0] for branch in node.branches}) == len(node.branches)
        sizes = [len(branch.ranks) for branch in node.branches]
        assert sizes == sorted(sizes)
        assert len(sizes) != 1 or sum(sizes) < len(node.ranks)


@given(_STACKS.flatmap(lambda stacks: st.tuples(st.just(stacks), st.permutations(stacks))))
def test_the_tree_does_not_depend_on_the_order_of_stacks(both: tuple[Stacks, Stacks]) -> None:
    stacks, shuffled = both
    assert merge(shuffled) == merge(stacks)


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        ([MAIN, STEP, WRAPPER, ALL_REDUCE], "all_reduce (train.py:88)"),
        ([MAIN, LOAD], "load (data.py:31)"),
        ([WRAPPER, ALL_REDUCE], "all_reduce (torch/distributed/distributed_c10d.py:2810)"),
        ([POLL], "poll_schedule_timeout"),
        ([Frame("<module>", "/home/me/pkg/__main__.py", 3)], "<module> (pkg/__main__.py:3)"),
        ([Frame("<module>", "<string>", 2)], "<module> (<string>:2)"),
        ([], "no stack (it had ended, or could not be read)"),
    ],
)
def test_a_place_is_named_by_the_line_in_user_code(frames: Sequence[Frame], place: str) -> None:
    assert where(frames) == place


def test_the_smallest_group_is_named_first() -> None:
    stacks = [process(rank, MAIN, STEP, WRAPPER, ALL_REDUCE) for rank in range(7)]
    stacks.append(process(7, MAIN, LOAD))
    assert summary(stacks) == "rank 7 in load (data.py:31); ranks 0-6 in all_reduce (train.py:88)"
    assert tree_lines(stacks) == [
        "ranks 0-7: main (train.py:12)",
        "  rank 7: load (data.py:31)",
        "  ranks 0-6: step (train.py:88)",
        "    wrapper (torch/distributed/c10d_logger.py:81)",
        "    all_reduce (torch/distributed/distributed_c10d.py:2810)",
    ]


def test_python_and_not_the_shell_around_it_describes_the_rank() -> None:
    shell = process(0, POLL, command="bash run.sh", source="kernel")
    inside = process(0, MAIN, LOAD, child=True)
    assert summary([inside, shell]) == "rank 0 in load (data.py:31)"
    assert "the worker itself, bash run.sh:" in tree_lines([inside, shell])


def test_many_places_are_cut_off_with_a_count() -> None:
    stacks = [process(rank, Frame("f", "a.py", rank + 1)) for rank in range(5)]
    assert summary(stacks, 3) == (
        "rank 0 in f (a.py:1); rank 1 in f (a.py:2); rank 2 in f (a.py:3); ranks 3-4 in 2 other places"
    )


def test_library_threads_are_counted_and_user_threads_shown() -> None:
    helper = ThreadStack("pin", (Frame("_bootstrap", "/usr/lib/python3.11/threading.py", 1),), True)
    user_thread = ThreadStack("mine", (LOAD,), True)
    item = process(0, MAIN, threads=(ThreadStack("MainThread", (MAIN,), True), helper, user_thread))
    assert tree_lines([item]) == [
        "rank 0: main (train.py:12)",
        "thread mine:",
        "  rank 0: load (data.py:31)",
        "1 helper thread of libraries",
    ]


def test_an_unreadable_stack_is_noted_once_with_its_remedy() -> None:
    denied = "py-spy may not look: remedy"
    stacks = [process(rank, POLL, source="kernel", problem=denied) for rank in (0, 1)]
    assert tree_lines(stacks)[-1] == f"ranks 0-1 by the kernel: {denied}"
    assert tree_lines([process(3)]) == ["rank 3: no stack (it had ended, or could not be read)"]


_SENT = {
    "rank": 3,
    "pid": 77,
    "command": "python train.py",
    "is_child": False,
    "source": "py-spy",
    "problem": None,
    "threads": [0, 0],
}
_THREAD = {"name": "MainThread", "is_python": True, "frames": [["main", "/home/me/train.py", 12]]}


def test_a_hosts_answer_becomes_stacks() -> None:
    stacks_found = process_stacks("b", {"threads": [_THREAD], "stacks": [_SENT]})
    assert stacks_found is not None
    (item,) = stacks_found
    assert (item.host, item.rank, item.threads[0].frames) == ("b", 3, (MAIN,))


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        [{**_SENT, "rank": "3"}],
        [{**_SENT, "more": 1}],
        [{**_SENT, "source": "guess"}],
        [{**_SENT, "command": "\x1b[2J"}],
        [{**_SENT, "threads": [1]}],
        [{**_SENT, "threads": [-1]}],
        [{**_SENT, "threads": [_THREAD]}],
    ],
)
def test_an_answer_in_a_wrong_form_is_refused(wrong: object) -> None:
    assert process_stacks("b", {"threads": [_THREAD], "stacks": wrong}) is None


@pytest.mark.parametrize("frame", [["f", "a.py"], ["f", "a\n.py", 1], "f" * 3])
def test_a_thread_in_a_wrong_form_is_refused(frame: object) -> None:
    assert process_stacks("b", {"threads": [{**_THREAD, "frames": [frame]}], "stacks": []}) is None


def test_stacks_as_json_have_each_thread_once() -> None:
    sent = {
        "threads": [_THREAD, {**_THREAD, "name": "other"}],
        "stacks": [_SENT, {**_SENT, "rank": 4, "threads": [1]}],
    }
    stacks_found = [item for host in "ab" for item in process_stacks(host, sent) or ()]
    data = json.loads(json.dumps(as_json(stacks_found)))
    assert [item["threads"] for item in data["stacks"]] == [[0, 0], [1], [0, 0], [1]]
    assert len(data["threads"]) == 2
    assert from_json(data) == stacks_found
    frames = [{"function": "main", "file": "/home/me/train.py", "line": 12}]
    assert whole_stacks(data)[3]["threads"] == [{"name": "other", "is_python": True, "frames": frames}]
