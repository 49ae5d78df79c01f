"""Who has read HVLAUNCH_ENTRY from a launcher's own connections, and comes in place of an agent."""

import os
import subprocess
import sys
from contextlib import closing
from queue import SimpleQueue

import pytest

from hvlaunch.agent.wire.caller import ADDRESSES, CERTIFICATE, ENTRY
from hvlaunch.driver.program import AgentProgram
from hvlaunch.errors import AgentFailed
from hvlaunch.job import Host
from hvlaunch.mpi import Kind
from hvlaunch.mpi.calls import AgentCaller, Arrivals, CallListener, ReturnCalls
from hvlaunch.mpi.launched_agent import LaunchedAgent
from hvlaunch.mpi.request import caller_command
from hvlaunch.rendezvous.serving.certificate import Certificate
from tests.unit.gloo.fakes import FakeListener

RANK, LOCAL_RANK = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"


def test_the_second_of_a_rank_ends_the_job_by_name() -> None:
    """The stranger comes before the agent whose place it takes; when that one comes, it is known that one is false."""
    key = Certificate()
    came: SimpleQueue[AgentCaller] = SimpleQueue()
    arrivals = Arrivals([("a", 1), ("b", 1)], Kind.OPEN_MPI)
    processes: list[subprocess.Popen[bytes]] = []
    with closing(CallListener("the word", key, came.put, host="127.0.0.1")) as listener:
        env = {
            **os.environ,
            ENTRY: "the word",
            CERTIFICATE: key.fingerprint,
            ADDRESSES: f"127.0.0.1 {listener.port}",
        }
        command = caller_command((), sys.executable)  # a stranger does not meet our processes

        def call(rank: int) -> None:
            who = {RANK: str(rank), LOCAL_RANK: "0"}
            processes.append(subprocess.Popen(command, env={**env, **who}, stderr=subprocess.PIPE))
            arrivals.add(came.get(timeout=60))

        call(0)
        call(1)  # the stranger
        caller, _ = arrivals.agent_of("b", 0)
        connection = LaunchedAgent(
            "b", caller.connection, 1, lambda _: None, lambda: arrivals.trouble, ReturnCalls()
        )
        channel = connection.start_agent(AgentProgram({}, None), Host("b"), FakeListener())
        call(1)  # the agent
        words = r"two processes claim rank 1, on \S+ \(127.0.0.1\) and on \S+ \(127.0.0.1\): one is not of this job, and knows HVLAUNCH_ENTRY"
        with pytest.raises(AgentFailed, match=words):
            next(iter(channel.frames()))
        arrivals.close()
    for process in processes:
        process.communicate(timeout=60)
