"""Hosts that measure the network between them: right measures for hosts with the key, and nothing for strangers."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from hvlaunch.agent.errands import pairs
from hvlaunch.agent.facts import free_port
from hvlaunch.agent.wire.probe import QUESTION_SIZE, Question
from tests.testhosts.hosts import wait_until

KEY = "ab" * 32
HOW = {
    "patience": 5.0,
    "settle": 2.0,
    "paced": 1 << 16,
    "pace": 12_500_000,
    "size": 1 << 20,
    "seconds": 0.5,
    "tries": 1,
}


class Place:
    """The driver's end of the errand on a host that is called `name`; it is the stream of the errand."""

    def __init__(self, name: str, ports: list[int]) -> None:
        self.name = name
        self._read_fd, self._write_fd = os.pipe()
        self._input = os.fdopen(self._read_fd, "rb")
        self._answers: list[Any] = []
        arguments = {"key": KEY, "name": name, "address": None, "ports": ports}
        assert pairs.ARGUMENTS(arguments)
        self._thread = threading.Thread(target=pairs.run, args=(arguments, self), daemon=True)
        self._thread.start()
        listening = self.answer()
        assert pairs.PORTS(listening)
        self.ports = listening["ports"]

    def write(self, data: bytes) -> None:
        self._answers.append(json.loads(data))

    def read_line(self) -> bytes:
        line = self._input.readline()
        if not line:
            raise EOFError
        return line

    def answer(self) -> Any:
        wait_until(lambda: self._answers, "an answer of the errand")
        return self._answers.pop()

    def dial(self, *others: "Place", **changes: Any) -> list[Any]:
        dials = [
            {"name": other.name, "addresses": ["127.0.0.1"], "ports": other.ports, **HOW, **changes}
            for other in others
        ]
        os.write(self._write_fd, json.dumps(dials).encode() + b"\n")
        measures: list[Any] = self.answer()
        assert pairs.MEASURES(measures)
        return measures

    def close(self) -> None:
        os.close(self._write_fd)
        self._thread.join()
        self._input.close()


@contextmanager
def places(*names: str, ports: list[int] | None = None) -> Iterator[list[Place]]:
    before = threading.stack_size()
    with ExitStack() as stack:
        stack.callback(threading.stack_size, before)
        yield [stack.enter_context(closing(Place(name, ports or []))) for name in names]


@contextmanager
def closing(place: Place) -> Iterator[Place]:
    try:
        yield place
    finally:
        place.close()


def test_measures_of_two_hosts() -> None:
    with places("a", "b", "c") as (a, b, c):
        for measure, target in zip(a.dial(b, c), (b, c), strict=True):
            assert measure["reached"] == sorted(target.ports)
            assert measure["address"] == "127.0.0.1"
            assert 0 < measure["rtt"] < 1
            assert measure["loss"] == 0
            assert measure["rate"] is None or measure["rate"] > 1e6
            assert measure["mtu"] is None


def test_host_listens_in_the_whole_ephemeral_range_and_at_ports_of_the_job() -> None:
    with ExitStack() as held:
        # Outside the ephemeral range, where closed connections keep neighbours.
        taken = free_port()
        held.callback(taken.close)
        port = taken.getsockname()[1]
        with places("a", ports=[port]) as [place]:
            assert len(place.ports) == len(set(place.ports)) == 6
            assert port not in place.ports, "a program has it"
            assert any(port < other < port + 16 for other in place.ports)
            ephemeral = [other for other in place.ports[2:] if 32768 <= other <= 60999]
            assert max(ephemeral) - min(ephemeral) > 15000


def test_host_listens_in_the_ephemeral_range_beside_many_closed_connections() -> None:
    """A busy host has hundreds of them in a row, and the kernel keeps their ports for a minute."""
    with places("a") as [place]:
        sample = place.ports[1]
    with ExitStack() as taken:
        for port in range(sample, sample + 40):
            with suppress(OSError):
                taken.enter_context(socket.create_server(("", port)))
        with places("a") as [place]:
            assert sample < place.ports[1] < sample + 2000


@pytest.mark.parametrize("name", ["b", "c"])
def test_port_without_the_right_host_is_not_reached(name: str) -> None:
    """A host that answers for another name, and one that says nothing."""
    with places("a", "b") as (a, b), socket.create_server(("127.0.0.1", 0)) as silent:
        b.ports = [*b.ports, silent.getsockname()[1]]
        b.name = name
        [measure] = a.dial(b, patience=1.0, settle=0.5)
        assert measure["reached"] == (sorted(b.ports[:-1]) if name == "b" else [])
        assert (measure["address"] is None) == (name != "b")


def test_a_stream_from_an_address_of_this_host() -> None:
    """As the survey measures each network of two hosts; an address that the host lacks is no error."""
    with places("a", "b") as (a, b):
        senders = []
        for sender in ("127.0.0.2", "127.0.0.3", "192.0.2.1"):
            [measure] = a.dial(b, **{"from": sender, "size": 1 << 40, "seconds": 0.1})
            senders.append(measure["rate"])
        assert min(senders[:2]) > 1e6
        assert senders[2] is None


def test_strangers_get_no_answer() -> None:
    with places("a") as [place]:
        for data in (
            Question("cd" * 32, "a", "127.0.0.1", place.ports[0]).data,
            Question(KEY, "b", "127.0.0.1", place.ports[0]).data,
            os.urandom(QUESTION_SIZE),
        ):
            with socket.create_connection(("127.0.0.1", place.ports[0])) as stranger:
                stranger.sendall(data)
                assert stranger.recv(100) == b""


def test_proof_from_another_port_is_not_believed() -> None:
    """A stranger passes questions on to the right host, which knows them to be for another port."""
    with places("a", "b") as (a, b), socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def forward() -> None:
            while True:
                with suppress(OSError):
                    caller, _ = server.accept()
                    with caller, socket.create_connection(("127.0.0.1", b.ports[0])) as right:
                        right.sendall(caller.recv(QUESTION_SIZE))
                        caller.sendall(right.recv(100))
                if server.fileno() < 0:
                    return

        threading.Thread(target=forward, daemon=True).start()
        true_ports, b.ports = b.ports, [port]
        assert a.dial(b, patience=1.0)[0]["reached"] == []
        b.ports = true_ports
        assert a.dial(b)[0]["reached"] == sorted(true_ports)


def test_many_silent_connections_do_not_end_the_errand() -> None:
    with places("a", "b") as (a, b), ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", b.ports[0])))
        stack.close()
        wait_until(lambda: a.dial(b, patience=1.0)[0]["reached"] == sorted(b.ports), "the host answers again")
