"""Hosts that do not reach each other, from the reports of hosts and of NCCL."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from hvlaunch.telemetry.peers import (
    HostPeers,
    NcclProcess,
    agreed,
    host_peers,
    notes,
    operations,
    read_report,
)

MISMATCH = """\
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  6 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 100 on node 10.0.0.1
  Rank 2 -- GPU 2 managed by process 101 on node 10.0.0.2
#0-1 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 107 on node d
"""
INCOMPLETE = """\
Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 105 on node 10.0.0.3 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 5 managed by process 105 on node 10.0.0.3
"""


def rank_of_nccl(rank: int, count: int, host: str = "10.0.0.1") -> dict[str, Any]:
    status = {
        "init_state": 0,
        "async_error": 0,
        "finalize_called": False,
        "destroy_flag": False,
        "abort_flag": False,
    }
    counts = {"Broadcast": 1, "AllReduce": count - 1, "AllGather": 0}
    more = {"cuda_dev": 0, "nvml_dev": 0, "status": status, "collective_counts": counts}
    return {"rank": rank, "host": host, "pid": 100 + rank, **more}


def as_nccl_says(counts: list[int], missing: tuple[int, ...] = ()) -> str:
    ranks = [rank_of_nccl(rank, count) for rank, count in enumerate(counts)]
    gone = [
        {"rank": rank, "host": "10.0.0.3", "pid": 100 + rank, "status": {"unresponsive": True}}
        for rank in missing
    ]
    of_one = {
        "hash": "0x27",
        "secondary_hash": "0x1:0x2",
        "size": len(counts),
        "ranks": ranks,
        "missing_ranks": gone,
    }
    return json.dumps(
        {"nccl_version": "2.28.3", "communicators_count": 1, "communicators": [of_one], "ras": {}}, indent=2
    )


def job(
    unanswered: dict[str, list[str]],
    nccl: str | None = None,
    collectives: Mapping[int, str] = MappingProxyType({}),
) -> list[HostPeers]:
    """Four hosts with two ranks each; `unanswered` hosts by the host that sends to them; what ranks say of their collectives."""
    made = []
    for number, name in enumerate("abcd"):
        answer = {
            "pids": [[rank, 100 + rank] for rank in (2 * number, 2 * number + 1)],
            "addresses": [f"10.0.0.{number + 1}", "127.0.0.1"] if number else [f"10.0.0.{number + 1}"],
            "unanswered": [
                [2 * number, f"10.0.0.{'abcd'.index(peer) + 1}"] for peer in unanswered.get(name, ())
            ],
            "nccl": nccl if name == "a" else None,
            "collectives": [
                [rank, collectives[rank]] for rank in (2 * number, 2 * number + 1) if rank in collectives
            ],
        }
        first = host_peers(name, answer)
        assert first is not None
        made.append(first)
    return made


def test_both_ends_of_a_dead_connection_are_named() -> None:
    text = "no answer between hosts b and c"
    for cut in ({"c": ["b"]}, {"b": ["c"], "c": ["b"]}):
        assert notes(job(cut)) == dict.fromkeys((2, 3, 4, 5), text)


def test_a_host_with_several_dead_connections_is_to_blame() -> None:
    expected = dict.fromkeys((4, 5), "no answer between host c and hosts a, b and d")
    assert notes(job({"a": ["c"], "b": ["c"], "d": ["c"]})) == expected
    assert notes(job({"c": ["a", "b", "d"]})) == expected


def test_an_unknown_address_blames_nobody() -> None:
    assert notes(job({})) == {}
    [peers, *_] = job({})
    assert notes([peers]) == {}
    answer = {
        "pids": [[0, 5]],
        "addresses": ["10.0.0.1"],
        "unanswered": [[0, "10.9.9.9"]],
        "nccl": None,
        "collectives": [],
    }
    lonely = host_peers("a", answer)
    assert lonely is not None
    assert notes([lonely]) == {}


def test_ranks_missing_to_nccl_and_ranks_behind_are_named() -> None:
    assert notes(job({}, as_nccl_says([50] * 8))) == {}
    assert notes(job({}, as_nccl_says([50, 50, 50, 49, 50, 50, 50, 50]))) == {
        3: "has begun 49 of NCCL's operations, the others 50"
    }
    assert notes(job({}, as_nccl_says([50] * 5, (5,)))) == {5: "NCCL gets no answer from it"}
    assert operations(job({}, as_nccl_says([50, 49]))) == {"a": 99}


def test_text_of_an_old_nccl_is_parsed() -> None:
    report = read_report(MISMATCH)
    assert report.behind == {
        NcclProcess(100, "10.0.0.1"): (6649, 6650),
        NcclProcess(101, "10.0.0.2"): (6649, 6650),
        NcclProcess(107, "d"): (60, 64),
    }
    assert (report.operations, report.missing) == (None, [])
    assert notes(job({}, MISMATCH))[7] == "has begun 60 of NCCL's operations, the others 64"
    assert set(read_report(INCOMPLETE).missing) == {NcclProcess(105, "10.0.0.3")}
    assert notes(job({}, INCOMPLETE)) == {5: "NCCL gets no answer from it"}


def test_the_address_tells_equal_pids_apart() -> None:
    first, two = (
        HostPeers(name, {100: rank}, frozenset([address]), frozenset(), None)
        for name, rank, address in (("a", 0, "10.0.0.1"), ("b", 1, "10.0.0.2"))
    )
    teller = HostPeers(
        "c", {7: 2}, frozenset(["10.0.0.3"]), frozenset(), read_report(as_nccl_says([49, 50, 50]))
    )
    assert list(notes([first, two, teller])) == [0]
    assert list(notes([two, teller])) == [1]


@pytest.mark.parametrize(
    "report_text",
    ["", "{", "{}", '{"communicators": 7}', '{"communicators": [{"ranks": [{}]}]}', '{"communicators": [[]]}',
     '{"communicators": [{"ranks": [{"pid": 1, "host": "a", "collective_counts": {"a": -1}}]}]}', "{" * 10**5,
     "#0-0 (x)\n  Rank 1 has launched up to operation " + "9" * 5000 + " -- GPU 0 managed by process 1 on node a"],
)  # fmt: skip
def test_nonsense_from_nccl_is_ignored(report_text: str) -> None:
    report = read_report(report_text)
    assert (report.operations, report.behind, report.missing) == (None, {}, [])


@pytest.mark.parametrize(
    "answer",
    [None, {}, {"pids": [[0, 1]], "addresses": ["x"], "unanswered": [], "nccl": None, "collectives": []},
     {"pids": [[0]], "addresses": [], "unanswered": [], "nccl": None, "collectives": []},
     {"pids": [], "addresses": [], "unanswered": [], "nccl": 7, "collectives": []},
     {"pids": [], "addresses": [], "unanswered": [], "nccl": None, "collectives": [[0, 7]]},
     {"pids": [], "addresses": [], "unanswered": [], "nccl": None, "collectives": [[0, "x" * 10_000]]}],
)  # fmt: skip
def test_nonsense_from_a_host_is_ignored(answer: object) -> None:
    assert host_peers("a", answer) is None


def at(number: int, kind: str, group: str = "0") -> str:
    return json.dumps([{"group": group, "number": number, "kind": kind}])


def test_ranks_at_another_collective_are_described() -> None:
    same = dict.fromkeys(range(8), at(120, "all_reduce"))
    assert notes(job({}, None, same)) == {}
    assert agreed(job({}, None, same), range(8)) == "collective 120 (all_reduce)"
    behind = job({}, None, {**same, 5: at(119, "broadcast")})
    assert notes(behind) == {
        5: "has begun collective 119 (broadcast), the others collective 120 (all_reduce)"
    }
    assert not agreed(behind, range(8))
    other_kind = job({}, None, {**same, 2: at(120, "broadcast")})
    assert notes(other_kind) == {
        2: "has begun collective 120 (broadcast), the others collective 120 (all_reduce)"
    }
    # A dead connection explains more than the numbers.
    assert (
        notes(job({"c": ["b"]}, None, {**same, 5: at(119, "broadcast")}))[2]
        == "no answer between hosts b and c"
    )


def test_a_tie_of_kinds_accuses_both_sides_and_a_tie_of_numbers_the_ranks_behind() -> None:
    halves = {rank: at(7, "broadcast" if rank < 4 else "all_reduce") for rank in range(8)}
    causes = notes(job({}, None, halves))
    assert causes[0] == "has begun collective 7 (broadcast), the others collective 7 (all_reduce)"
    assert causes[7] == "has begun collective 7 (all_reduce), the others collective 7 (broadcast)"
    assert len(causes) == 8
    assert sorted(notes(job({}, None, {rank: at(7 + rank // 4, "barrier") for rank in range(8)}))) == [
        0,
        1,
        2,
        3,
    ]
    # Pipelines, or whatever else: no collective is usual.
    assert notes(job({}, None, {rank: at(rank, "barrier") for rank in range(8)})) == {}


def test_groups_are_compared_each_for_itself_and_silent_ranks_not_at_all() -> None:
    two = {rank: at(3 + rank % 2, "all_gather", str(rank % 2)) for rank in range(8)}
    assert notes(job({}, None, two)) == {}
    assert agreed(job({}, None, two), range(8)) == "the same collectives"
    del two[4]
    assert notes(job({}, None, two)) == {}
    assert not agreed(job({}, None, two), range(8))
    assert not agreed(job({}, None, {**two, 4: "[]"}), range(8))
