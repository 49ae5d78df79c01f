"""What a worker tells the host's agent about its newest collectives, and when it tells nothing."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from hvlaunch.agent.errands.observer import peers
from hvlaunch.telemetry.peers import HostPeers, agreed, host_peers, notes
from hvlaunch.torch import backends
from tests.unit.torch.ranks import in_worlds

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch has no recorder"
)


@contextmanager
def serving(folder: Path, pid: int, words: bytes) -> Iterator[None]:
    """A process's socket, on which it says these words."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / f"collectives.{pid}"))
        listener.listen(1)

        def run() -> None:
            # It may be too long for the agent, which then leaves.
            with listener.accept()[0] as connection, suppress(OSError):
                connection.sendall(words)

        threading.Thread(target=run, daemon=True).start()
        yield


def report_on(pids: list[int], scratch: Path) -> HostPeers:
    """The driver's view of these workers, by way of the host's agent."""
    answer = peers.answer({"workers": list(enumerate(pids)), "scratch": str(scratch)})
    report = host_peers("a", json.loads(json.dumps(answer)))
    assert report is not None
    return report


def test_messages_between_two_ranks_do_not_count_and_a_skipped_collective_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVLAUNCH_SCRATCH", str(tmp_path))

    def call(rank: int) -> Any:
        ones = torch.ones(4)
        store = dist.distributed_c10d._get_default_store()
        for _ in range(3):
            dist.all_reduce(ones)
        # Of these two, Gloo's own sequence number counts another number on each rank.
        if rank:
            dist.send(ones, 0) if rank == 1 else dist.recv(ones, 0)
        else:
            dist.recv(ones, 1)
            dist.send(ones, 2)
        dist.monitored_barrier()
        dist.barrier()
        numbers = [None] * 3
        dist.all_gather_object(numbers, dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
        at_one = backends.newest_collectives(0.0)
        if rank != 1:
            dist.broadcast(ones, 0, async_op=True)
            store.set(f"begun{rank}", "")
        store.set(f"pid{rank}", str(os.getpid()))
        pids = [int(store.get(f"pid{other}")) for other in range(3)]
        reports: Any = None
        if rank == 0:
            store.wait(["begun2"])
            reports = report_on(pids, tmp_path)
            reports = notes([reports]), agreed([reports], range(3)), reports.collectives
        store.set("over", "") if rank == 0 else store.wait(["over"])
        if rank == 1:
            dist.broadcast(ones, 0)
        return at_one, numbers, reports

    results = in_worlds(3, call)
    assert results[0][0] == results[1][0] == results[2][0]
    assert len(set(results[0][1])) > 1
    (causes, is_agreed, collectives) = results[0][2]
    assert not is_agreed
    [group] = collectives[0]
    number = collectives[0][group].number
    assert causes == {
        1: f"has begun collective {number - 1} ({collectives[1][group].kind}), the others collective {number} (broadcast)"
    }


def test_a_new_round_begins_with_no_collectives_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVLAUNCH_SCRATCH", str(tmp_path))

    def call(_rank: int) -> Any:
        dist.all_reduce(torch.ones(1))
        before = backends.newest_collectives(0.0)
        return before, backends.newest_collectives(time.time() + 60)

    for before, later in in_worlds(2, call):
        assert [entry["kind"] for entry in before] == ["all_reduce"]
        assert later == []


def test_one_process_answers_and_a_forked_child_answers_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_answers", None)
    backends.answer_agent()  # no worker
    assert backends._answers is None
    monkeypatch.setenv("HVLAUNCH_SCRATCH", str(tmp_path / "gone"))
    backends.answer_agent()
    assert backends._answers is None
    monkeypatch.setenv("HVLAUNCH_SCRATCH", str(tmp_path))
    (tmp_path / f"collectives.{os.getpid()}").write_text("of another process with this pid")
    backends.answer_agent()
    answers = backends._answers
    backends.answer_agent()
    assert backends._answers is answers
    child = os.fork()
    if child == 0:
        backends.answer_agent()
        os._exit(len(list(tmp_path.iterdir())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    monkeypatch.setattr(
        backends, "newest_collectives", lambda since: [{"group": "0", "number": 7, "kind": "all_reduce"}]
    )
    assert str(report_on([os.getpid()], tmp_path).collectives[0]["0"]) == "collective 7 (all_reduce)"
    # Whatever torch's record comes to, the next question is answered.
    monkeypatch.setattr(backends, "newest_collectives", lambda since: 1 / 0)
    assert report_on([os.getpid()], tmp_path).collectives == {}
    monkeypatch.setattr(
        backends, "newest_collectives", lambda since: [{"group": "0", "number": 8, "kind": "all_reduce"}]
    )
    assert report_on([os.getpid()], tmp_path).collectives[0]["0"].number == 8


def test_groups_on_gpus_are_left_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "gpu_backends", lambda: [object()])
    assert backends.newest_collectives(0.0) == []


@pytest.mark.parametrize(
    "words",
    [b"", b"{", b"null", b"[[]]", b"\x80\x04K\x01.", b"[" * 4000, b'[{"group": "0", "number": -1, "kind": "a"}]',
     b'[{"group": "0", "number": 1, "kind": "\\u001b[2J"}]', b'[{"group": "0", "number": 1}]', b" " * 100_000],
)  # fmt: skip
def test_nonsense_of_a_worker_costs_only_its_own_part(words: bytes, tmp_path: Path) -> None:
    right = b'[{"group": "0", "number": 5, "kind": "barrier"}]'
    # The parent of this process stands for another worker.
    with serving(tmp_path, os.getpid(), words), serving(tmp_path, os.getppid(), right):
        answer = peers._collectives({1: [os.getpid()], 2: [os.getppid()]}, str(tmp_path))
        report = host_peers(
            "a",
            {
                "pids": [],
                "addresses": [],
                "unanswered": [],
                "nccl": None,
                "collectives": [list(pair) for pair in answer],
            },
        )
    assert report is not None
    assert {rank: str(newest["0"]) for rank, newest in report.collectives.items()} == {
        2: "collective 5 (barrier)"
    }


def test_stuck_workers_share_one_deadline(tmp_path: Path) -> None:
    listeners = []
    for number in range(20):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / f"collectives.{number}"))
        listener.listen(1)
        listeners.append(listener)
    begin = time.monotonic()
    for _ in range(2):
        assert not list(peers._collectives({number: [number] for number in range(20)}, str(tmp_path)))
    assert time.monotonic() - begin < 2 * peers._COLLECTIVES_SECONDS + 2
    for listener in listeners:
        listener.close()
