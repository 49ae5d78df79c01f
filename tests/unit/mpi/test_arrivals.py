"""Who has come, and whose agents they are."""

import socket
import ssl
import threading
from typing import Any

import pytest

from hvlaunch.agent.caller import Sealed
from hvlaunch.errors import AgentFailed, StartTimeout
from hvlaunch.mpi.arrivals import Arrivals, sort_out
from hvlaunch.mpi.call_listener import Caller
from hvlaunch.mpi.detect import Kind
from hvlaunch.mpi.launcher_errors import LauncherFailed


def caller(hostname, rank):
    here, there = socket.socketpair()
    there.close()
    sealed = Sealed(here, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server_side=True)
    return Caller(sealed, hostname, {} if rank is None else {"OMPI_COMM_WORLD_RANK": str(rank)})


def names(found):
    return {
        host: [(one.hostname, one.environ["OMPI_COMM_WORLD_RANK"]) for one in callers]
        for host, callers in found.items()
    }


def test_each_hosts_agents_in_order_of_rank():
    callers = [caller("b", 2), caller("a", 1), caller("a", 0), caller("c.example.com", 3)]
    assert names(sort_out(callers, [("a", 2), ("b", 1), ("c", 1)], Kind.OPEN_MPI)) == {
        "a": [("a", "0"), ("a", "1")],
        "b": [("b", "2")],
        "c": [("c.example.com", "3")],
    }


def test_names_may_be_aliases():
    found = sort_out([caller("node7", 0), caller("node9", 1)], [("10.0.0.7", 1), ("gpu", 1)], Kind.OPEN_MPI)
    assert [one.hostname for callers in found.values() for one in callers] == ["node7", "node9"]


@pytest.mark.parametrize(
    ("came", "error"),
    [
        (
            [("a", None), ("b", 1)],
            "a process on a has no rank: none of OMPI_COMM_WORLD_RANK, PMIX_RANK",
        ),
        ([("a", 0), ("b", 0)], "started 2 processes, and gave rank 0 to two of them"),
        ([("a", 0), ("b", 2)], "gave rank 2 to one of them"),
        ([("b", 0), ("a", 1)], "put the ranks of host a on host b"),
    ],
)
def test_ranks_that_are_not_what_was_asked_for(came, error):
    with pytest.raises(LauncherFailed, match=error) as caught:
        sort_out([caller(*one) for one in came], [("a", 1), ("b", 1)], Kind.OPEN_MPI)
    assert caught.value.exit_code == 69


def test_ranks_not_host_by_host_are_an_error_that_shows_them():
    came = [caller("a", 0), caller("b", 1), caller("a", 2), caller("b", 3)]
    with pytest.raises(
        LauncherFailed, match=r"did not number its processes host by host \(0 on a, 1 on b, 2 on a, 3 on b\)"
    ):
        sort_out(came, [("a", 2), ("b", 2)], Kind.OPEN_MPI)


def test_who_waits_gets_the_agents_when_the_last_has_come():
    arrivals = Arrivals([("a", 1), ("b", 1)], Kind.OPEN_MPI)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(arrivals.of("b", 30)))
    waiting.start()
    arrivals.add(caller("b", 1))
    assert not arrivals.is_complete
    arrivals.add(caller("a", 0))
    waiting.join(30)
    assert [one.hostname for one in found] == ["b"]
    assert arrivals.is_complete
    late = caller("a", None)
    arrivals.add(late)
    assert late.connection.socket.fileno() == -1
    assert found[0].connection.socket.fileno() != -1
    assert arrivals.trouble is None
    arrivals.close()
    assert found[0].connection.socket.fileno() == -1


def test_the_end_of_the_launcher_ends_the_waiting():
    arrivals = Arrivals([("a", 2)], Kind.OPEN_MPI)
    early = caller("a", 0)
    arrivals.add(early)
    arrivals.fail(LauncherFailed("mpirun ended", hint="this"))
    with pytest.raises(AgentFailed, match="host a: mpirun ended; try: this"):
        arrivals.of("a", 30)
    assert early.connection.socket.fileno() == -1


def test_not_all_come_in_time():
    arrivals = Arrivals([("a", 2)], Kind.OPEN_MPI)
    arrivals.add(caller("a", 0))
    with pytest.raises(StartTimeout, match=r"only 1 of 2 processes were connected within 0.01 s"):
        arrivals.of("a", 0.01)


def test_wrong_ranks_end_the_waiting():
    arrivals = Arrivals([("a", 1)], Kind.OPEN_MPI)
    arrivals.add(caller("a", None))
    with pytest.raises(AgentFailed, match="a process on a has no rank"):
        arrivals.of("a", 30)
