"""How long torchrun takes to train again after a fault: with hvlaunch's rendezvous, and with its own c10d backend.

    python benchmarks/torchrun_recovery.py --jobs 10 --runs 3

Real agents with one Gloo worker each, on hosts made of namespaces on this machine (root, iproute2, sshd). Timed is
from functools import partial
from the fault to the first all_reduce of all ranks after it; starting Python and importing torch is in it, for all
alike. All of a table are run in turns.
"""

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import heading, spread, table
from tests.cluster.torchrun_agents import Agent, rendezvous, rounds, tell_to_stop, wait_for_round
from tests.testhosts.hosts import TestHosts

STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("0.0.0.0", 29400, is_master=True, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(slots=True)
class Backend:
    """A way to start torchrun, and how it did: seconds of each recovery, jobs that ended well, and all jobs."""

    name: str
    options: Sequence[object]
    env: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    well: int = 0
    jobs: int = 0

    def row(self, limit: float) -> list[str]:
        times = spread(self.seconds, 1) if self.seconds else f"never within {limit:.0f} s"
        return [self.name, times, f"{len(self.seconds)} of {self.jobs}", f"{self.well} of {self.jobs}"]


Fault = Callable[[Sequence[Agent]], tuple[float, list[Agent]]]
"""Does something to a job that trains; returns when, in seconds of CLOCK_MONOTONIC, and who should go on."""


def kill_a_worker(agents: Sequence[Agent]) -> tuple[float, list[Agent]]:
    victim = random.choice(agents)
    pid = victim.worker()
    time.sleep(random.random())
    when = time.monotonic()
    victim.host.run(["kill", "-9", str(pid)], check=True)
    return when, list(agents)


def without_rank_0(agents: Sequence[Agent]) -> tuple[Agent, list[Agent]]:
    (first,) = [agent for agent in agents if agent.reports()[-1]["rank"] == 0]
    return first, [agent for agent in agents if agent is not first]


def kill_all_of_rank_0s_node(agents: Sequence[Agent]) -> tuple[float, list[Agent]]:
    first, others = without_rank_0(agents)
    when = time.monotonic()
    first.host.run(["sh", "-c", "kill -9 -1"])
    return when, others


def power_off_rank_0s_node(agents: Sequence[Agent]) -> tuple[float, list[Agent]]:
    first, others = without_rank_0(agents)
    when = time.monotonic()
    first.host.kill()
    return when, others


def job(hosts: TestHosts, names: str, nnodes: str, backend: Backend, fault: Fault, limit: float) -> None:
    """Run one job with one fault to its end, and clear up behind it."""
    options = [f"--nnodes={nnodes}", "--max-restarts=3", f"--rdzv-id={uuid.uuid4().hex}", *backend.options]
    for host in hosts:
        (host.home / "root" / "stop").unlink(missing_ok=True)
    backend.jobs += 1
    agents = [Agent(hosts[name], options, backend.env) for name in names]
    try:
        wait_for_round(agents, 1)
        when, others = fault(agents)
        backend.seconds.append(wait_for_round(others, rounds(others) + 1, limit) - when)
        tell_to_stop(hosts)
        backend.well += all(agent.code() == 0 for agent in others)
    except (AssertionError, subprocess.TimeoutExpired) as problem:
        print(f"{backend.name}: {str(problem).partition(chr(10))[0][:300]}", file=sys.stderr)
    finally:
        for host in hosts:
            host.touched = True
        hosts.repair()


def in_turns(backends: Sequence[Backend], runs: int, one: Callable[[Backend], None]) -> Sequence[Backend]:
    for _ in range(runs):
        for backend in backends:
            one(backend)
    return backends


def show(title: str, backends: Sequence[Backend], limit: float) -> None:
    head = ["rendezvous", "seconds", "trained again", "ended well"]
    print(heading(title))
    print(table(head, [backend.row(limit) for backend in backends]), flush=True)
    ours, *others = backends
    for other in others:
        if ours.seconds and other.seconds:
            ratio = statistics.median(other.seconds) / statistics.median(ours.seconds)
            print(f"\n{other.name}: {ratio:.1f} times as long as {ours.name}", flush=True)


@contextlib.contextmanager
def c10d_store(hosts: TestHosts) -> Iterator[list[object]]:
    """A TCPStore for the c10d backend that no node takes along; torchrun's options for it."""
    process = hosts.driver.popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.driver.address}:29400", "--rdzv-conf=is_host=0"]
    process.stdin.close()
    process.wait()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=10, help="with a killed worker, of each kind")
    parser.add_argument("--runs", type=int, default=3, help="with a lost node, of each kind")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds to wait for a recovery")
    arguments = parser.parse_args()
    need_hosts()
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(TestHosts(["a", "b", "c"]))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = stack.enter_context(rendezvous(hosts, folder / "token"))
        ours = [*ours, "--rdzv-conf=token_file=/run/home/root/token"]
        beside = stack.enter_context(c10d_store(hosts))
        on_a = ["--rdzv-backend=c10d", "--rdzv-endpoint=a:29400"]

        killed = [
            Backend("hvlaunch", ours),
            Backend("c10d", on_a),
            Backend("c10d, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", on_a, UNSHARED),
        ]
        limit = min(arguments.limit, 45.0)
        if arguments.jobs:
            in_turns(killed, arguments.jobs, lambda one: job(hosts, "ab", "2", one, kill_a_worker, limit))
            show("a worker killed at random; 2 nodes of 1 worker, --max-restarts 3", killed, limit)

        def lose(backend: Backend, fault: Fault) -> None:
            job(hosts, "abc", "2:3", backend, fault, arguments.limit)

        for title, fault in [
            ("every process of rank 0's node killed; --nnodes 2:3", kill_all_of_rank_0s_node),
            ("rank 0's node powered off; --nnodes 2:3", power_off_rank_0s_node),
        ]:
            lost = [
                Backend("hvlaunch", ours),
                Backend("c10d, its store on a node", on_a),
                Backend("c10d, its store elsewhere", beside),
                Backend("c10d, the same, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", beside, UNSHARED),
            ]
            in_turns(lost, arguments.runs, partial(lose, fault=fault))
            show(title, lost, arguments.limit)


if __name__ == "__main__":
    main()
