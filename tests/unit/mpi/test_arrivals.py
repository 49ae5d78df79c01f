"""Who has come, and whose agents they are."""

import socket
import ssl
import threading
from typing import Any

import pytest

from hvlaunch.agent.wire.caller import Sealed
from hvlaunch.errors import AgentFailed, StartTimeout
from hvlaunch.mpi import Kind
from hvlaunch.mpi.calls import AgentCaller, Arrivals, LauncherFailed


def caller(hostname, rank, local=0, size=None):
    here, there = socket.socketpair()
    there.close()
    sealed = Sealed(here, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server_side=True)
    numbers = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_SIZE": size}
    environ = {
        f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items() if number is not None
    }
    return AgentCaller(sealed, hostname, environ)


def arrivals_of(*hosts):
    return Arrivals(hosts, Kind.OPEN_MPI)


def found(arrivals, *hosts):
    return {
        host: (agent.hostname, count) for host in hosts for agent, count in [arrivals.agent_of(host, 0.01)]
    }


def test_each_hosts_agent_is_that_of_its_first_rank():
    arrivals = arrivals_of(("a", 2), ("b", 1), ("c", 1))
    for came in (caller("b", 2), caller("c.example.com", 3, size=1), caller("a", 0, size=2)):
        assert not arrivals.is_complete
        arrivals.add(came)
    assert found(arrivals, "a", "b", "c") == {"a": ("a", 2), "b": ("b", 1), "c": ("c.example.com", 1)}


def test_names_may_be_aliases():
    arrivals = arrivals_of(("10.0.0.7", 1), ("gpu", 1))
    arrivals.add(caller("node7", 0))
    arrivals.add(caller("node9", 1))
    assert found(arrivals, "10.0.0.7", "gpu") == {"10.0.0.7": ("node7", 1), "gpu": ("node9", 1)}


@pytest.mark.parametrize(
    ("came", "error"),
    [
        (("a", None), "a process on a has no rank: none of OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK"),
        (("b", 1), r"did not number its processes host by host \(rank 1 is the first on b\); try: leave out"),
        (("a", 0, 0, 4), "Open MPI started 4 processes on a, not 2; try: one name for each host"),
        (("b", 0), "put the ranks of host a on host b"),
    ],
)
def test_unexpected_ranks_are_errors(came, error):
    arrivals = arrivals_of(("a", 2), ("b", 2))
    arrivals.add(caller(*came))
    with pytest.raises(AgentFailed, match=error) as caught:
        arrivals.agent_of("a", 30)
    assert caught.value.exit_code == 69


@pytest.mark.parametrize("hosts", [(("a", 1), ("b", 1)), (("a", 1),)])
def test_two_processes_of_one_rank(hosts):
    arrivals = arrivals_of(*hosts)
    for _ in range(2):
        arrivals.add(caller("a", 0))
    with pytest.raises(
        AgentFailed, match=r"two processes claim rank 0, on a .*and on a .*: one is not of this job"
    ):
        arrivals.agent_of(hosts[-1][0], 30)
    assert arrivals.trouble is not None


def test_waiting_thread_gets_the_agent_after_the_last_arrival():
    arrivals = arrivals_of(("a", 1), ("b", 1))
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(arrivals.agent_of("b", 30)))
    waiting.start()
    arrivals.add(caller("b", 1))
    assert not arrivals.is_complete
    arrivals.add(caller("a", 0))
    waiting.join(30)
    ((agent, count),) = found
    assert (agent.hostname, count, arrivals.is_complete) == ("b", 1, True)
    late = caller("a", None)
    arrivals.add(late)
    assert late.connection.socket.fileno() == -1
    assert arrivals.trouble is None
    assert agent.connection.socket.fileno() != -1
    arrivals.close()
    assert agent.connection.socket.fileno() == -1


def test_the_end_of_the_launcher_ends_the_waiting():
    arrivals = arrivals_of(("a", 2), ("b", 1))
    early = caller("a", 0)
    arrivals.add(early)
    arrivals.fail(LauncherFailed("mpirun ended", hint="this"))
    with pytest.raises(AgentFailed, match="host a: mpirun ended; try: this"):
        arrivals.agent_of("a", 30)
    assert early.connection.socket.fileno() == -1


def test_missing_agent_is_a_start_timeout():
    arrivals = arrivals_of(("a", 2), ("b", 1))
    arrivals.add(caller("a", 0))
    with pytest.raises(StartTimeout, match=r"the agents of only 1 of 2 hosts were connected within 0.01 s"):
        arrivals.agent_of("a", 0.01)
