"""Broken and hostile requests, on both event loops: an error or the end, never a fault, and nothing left behind."""

import re
import socket
from contextlib import suppress

import pytest

from benchmarks.fuzz_rendezvous import Fuzzer, serve
from tests.unit.rendezvous.corpus import HOSTILE, VALID
from tests.unit.rendezvous.wire import Wire

STATUS = re.compile(rb"^HTTP/1\.1 ([0-9]{3}) ", re.MULTILINE)


@pytest.fixture
def small_server(loop_kind):
    """With limits that these requests get to."""
    with serve() as server:
        yield server


def all_answers(wire: Wire, data: bytes) -> bytes:
    """To all of `data`, behind which the client has nothing more to say."""
    given = bytearray()
    wire.send(data)
    # A server that has answered lingers for a while only; a client on a busy machine may come later.
    with suppress(OSError):
        wire.socket.shutdown(socket.SHUT_WR)
    while piece := wire.socket.recv(1 << 16):
        given += piece
    return bytes(given)


def test_each_of_the_corpus_gets_its_answer_and_nothing_is_left(small_server, connect, until):
    for name, (data, statuses) in HOSTILE.items():
        small_server.put("s", "smuggled", b"")
        small_server.delete("s", "k")
        given = all_answers(connect(small_server), data)
        assert [int(status) for status in STATUS.findall(given)] == statuses, name
    until(lambda: small_server.stats().connections == 0)
    stats = small_server.stats()
    assert (stats.faults, stats.waiting, stats.dropped) == (0, 0, 0)


def test_valid_ones_are_valid(small_server, connect):
    for data in VALID:
        assert connect(small_server).send(data).read().status in (200, 404, 412), data


@pytest.mark.parametrize(
    "name", ["a length and chunks", "two lengths that differ", "gzip, then chunked", "a body of GET"]
)
def test_what_hides_in_a_body_is_no_request(small_server, connect, name):
    small_server.put("s", "smuggled", b"secret")
    assert b"secret" not in all_answers(connect(small_server), HOSTILE[name][0])


def test_others_are_served_after_all_of_it(small_server, connect):
    hostile = [connect(small_server).send(data[:5000]) for data, _ in HOSTILE.values()]
    assert connect(small_server).ask("GET", "/s/none").status == 404
    assert small_server.stats().faults == 0
    assert len(hostile) == len(HOSTILE)


@pytest.mark.parametrize("seed", [1, 2])
def test_some_of_what_the_fuzzer_makes(small_server, seed):
    fuzzer = Fuzzer(small_server, seed)
    for _ in range(400):
        fuzzer.run_one()
    fuzzer.check()
    assert {200, 400, 401, 404, 431, 501} <= set(fuzzer.statuses)
