"""Hosts that are only played: connections whose agents answer at once, under the real driver."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

from hvlaunch.console.printer import Printer
from hvlaunch.driver.links.agent_channel import CommandConnection
from hvlaunch.driver.loop import Driver, Item
from hvlaunch.driver.program import Keys
from hvlaunch.gloo import controller
from hvlaunch.gloo.controller import HostWays
from hvlaunch.job import Host, JobResult, JobSpec
from hvlaunch.rendezvous.serving import RendezvousServer
from tests.unit.gloo.played import PlayedAgent

__all__ = ["SimulatedHosts"]


class _Rendezvous(RendezvousServer):
    """These hosts reach the driver at an address that it has not."""

    def listen_at(self, address: str) -> None:
        pass


class SimulatedHosts:
    """`count` hosts with `slots` workers each, which print one line and run until they are let go."""

    def __init__(self, count: int, slots: int) -> None:
        names = [f"h{number}" for number in range(1, count + 1)]
        hosts = tuple(Host(name, slots=slots) for name in names)
        self._spec = JobSpec(command=("train",), hosts=hosts, cwd="/", start_timeout=300.0)
        self._agents = {
            name: PlayedAgent(f"10.1.{number >> 8}.{number & 255}", self._note_start)
            for number, name in enumerate(names, 1)
        }
        self.driver: Driver
        """While it runs."""
        self._awaited = threading.Semaphore(0)
        self._workers = count * slots

    def run(self) -> JobResult:
        """The whole job, with its output to nowhere."""
        events: SimpleQueue[Item] = SimpleQueue()
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            printer = Printer(nowhere, nowhere)
            keys = Keys.new()
            try:
                with _Rendezvous(keys.token) as server:
                    self.driver = Driver(self._spec, events, printer, server, keys, self._connect, stdin=-1)
                    return self.driver.run()
            finally:
                printer.close()

    def run_as_job(self, on_begun: Callable[[str], None]) -> JobResult:
        """As `hvlaunch` runs it, with a directory, a journal and a control socket; `on_begun` gets the job's id."""
        spec = replace(self._spec, rendezvous_bind="0.0.0.0")
        with open(os.devnull, "r+b") as nowhere:  # noqa: PTH123
            return controller.run(
                spec,
                stdout=nowhere,
                stderr=nowhere,
                stdin=nowhere.fileno(),
                ways=self._ways,
                on_begun=on_begun,
            )

    def answer(self, kind: str, said: Callable[[tuple[int, ...]], str]) -> None:
        """What observers say of these ranks to questions of this kind, as JSON."""
        for agent in self._agents.values():
            agent.answers[kind] = said

    @property
    def questions(self) -> int:
        """How many the observers were asked."""
        return sum(agent.questions for agent in self._agents.values())

    def wait_until_started(self, timeout: float) -> None:
        """Until every worker was started. Raises TimeoutError."""
        for _ in range(self._workers):
            if not self._awaited.acquire(timeout=timeout):
                raise TimeoutError("not all workers were started")

    def let_workers_end(self) -> None:
        """Every worker ends with 0."""
        for agent in self._agents.values():
            for slot in agent.slots:
                agent.end_worker(slot)

    @contextmanager
    def _ways(self, *_: object) -> Iterator[HostWays]:
        yield HostWays(self._connect, self._connect)

    def _connect(self, host: Host) -> CommandConnection:
        return CommandConnection(self._agents[host.name])

    def _note_start(self) -> None:
        self._awaited.release()
