"""Hosts that are only played: connections whose agents answer at once, under the real driver."""

import json
import os
import re
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from hvlaunch.agent.frames import PROTOCOL, Decoder, encode
from hvlaunch.agent.pieces import Cutter
from hvlaunch.console.printer import Printer
from hvlaunch.gloo import events as on
from hvlaunch.gloo.driver import Driver, Keys
from hvlaunch.job import Host, JobResult, JobSpec
from hvlaunch.rendezvous.server import RendezvousServer

__all__ = ["SimulatedHosts"]

_BUNDLE_SIZE = re.compile(r"read\((\d+)\)")
_STREAMS = ("stdout", "stderr")


class SimulatedHosts:
    """`count` hosts with `slots` workers each, which print one line and run until they are let go."""

    def __init__(self, count: int, slots: int) -> None:
        names = [f"h{number}" for number in range(1, count + 1)]
        hosts = tuple(Host(name, slots=slots) for name in names)
        self._spec = JobSpec(command=("train",), hosts=hosts, cwd="/", start_timeout=300.0)
        self._agents = {name: _Agent(number, self._note_start) for number, name in enumerate(names, 1)}
        self._awaited = threading.Semaphore(0)
        self._workers = count * slots

    def run(self) -> JobResult:
        """The whole job, with its output to nowhere."""
        events: SimpleQueue[on.Event] = SimpleQueue()
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            printer = Printer(nowhere, nowhere)
            keys = Keys(token="t", probe_token="p", nonce="n")
            rendezvous = RendezvousServer(keys.token, keys.probe_token, keys.nonce, port=4711)
            driver = Driver(self._spec, events, printer, rendezvous, keys, self._connect, stdin=-1)
            try:
                return driver.run()
            finally:
                printer.close()

    def wait_until_started(self, timeout: float) -> None:
        """Until every worker was started. Raises TimeoutError."""
        for _ in range(self._workers):
            if not self._awaited.acquire(timeout=timeout):
                raise TimeoutError("not all workers were started")

    def let_workers_end(self) -> None:
        """Every worker ends with 0."""
        for agent in self._agents.values():
            agent.end_workers()

    def _connect(self, host: Host) -> "_Agent":
        return self._agents[host.name]

    def _note_start(self) -> None:
        self._awaited.release()


class _Agent:
    """A connection, its one channel, and the agent behind it."""

    local_address: str | None = "10.0.0.1"

    def __init__(self, number: int, note_start: Any) -> None:
        self.remote_address: str | None = f"10.1.{number >> 8}.{number & 255}"
        self.is_near = False
        self._note_start = note_start
        self._incoming: SimpleQueue[bytes] = SimpleQueue()
        self._decoder = Decoder()
        self._cutter = Cutter()
        self._bundle_left = 0
        self._slots: list[int] = []

    def run(self, command: str) -> "_Agent":
        found = _BUNDLE_SIZE.search(command)
        self._bundle_left = int(found[1]) if found else 0
        return self

    def read(self) -> bytes:
        return self._incoming.get()

    def write(self, data: bytes) -> None:
        skipped = min(self._bundle_left, len(data))
        self._bundle_left -= skipped
        for header, body in self._decoder.feed(data[skipped:]):
            answer = getattr(self, "_" + header["type"], None)
            if answer is not None:
                answer(header, body)

    def stderr(self) -> bytes:
        return b""

    def exit_status(self, timeout: float) -> int | None:  # noqa: ARG002 (as the protocol has it)
        return 0

    def close(self) -> None:
        self._incoming.put(b"")

    def end_workers(self) -> None:
        end = {"round": 0, "code": 0, "signal": None, "max_rss": 1 << 20, "oom_killed": False, "at": 1.0}
        for slot in self._slots:
            for stream in _STREAMS:
                self._say({"type": "output", "round": 0, "slot": slot, "stream": stream})
            self._say({"type": "exited", "slot": slot, **end})

    def _say(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        self._incoming.put(b"".join(self._cutter.cut(encode(dict(header), body))))

    def _hello(self, header: Mapping[str, Any], _: bytes) -> None:
        facts = {
            "addresses": {"lo": ["127.0.0.1"], "eth0": [self.remote_address]},
            "cpus": 8,
            "boot_id": None,
        }
        self._say(
            {
                "type": "hello",
                "protocol": PROTOCOL,
                "facts": facts,
                "scratch": "/tmp/hvlaunch-simulated",
                "beacon_port": 1,
                "master_port": 2,
                "cwd_error": None,
                "trouble": None,
            }
        )
        if header["rendezvous"]:
            address = header["rendezvous"]["candidates"][0][0]
            self._say({"type": "reached", "address": address, "tried": [address], "relay_port": None})

    def _probe(self, header: Mapping[str, Any], _: bytes) -> None:
        for address in (*header["addresses"], None):
            self._say({"type": "probed", "target": header["target"], "address": address})

    def _start(self, _: Mapping[str, Any], body: bytes) -> None:
        for worker in json.loads(body)["workers"]:
            slot = worker["slot"]
            self._slots.append(slot)
            self._say({"type": "started", "round": 0, "slot": slot, "pid": 1, "at": 1.0})
            self._say({"type": "output", "round": 0, "slot": slot, "stream": "stdout"}, b"one line\n")
            self._note_start()

    def _ping(self, *_: object) -> None:
        self._say({"type": "pong", "at": 1.0})

    def _bye(self, *_: object) -> None:
        self._say({"type": "bye", "left": 0})
        self.close()
