"""Who can be reached: only the right nonce counts."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace

import pytest

from hvlaunch.agent import probe
from hvlaunch.agent.facts import free_port
from hvlaunch.agent.probe import Beacon, http_request, reach
from hvlaunch.rendezvous.serving.server import RendezvousServer
from tests.ipv6 import has_ipv6
from tests.unit.agent.harness import AgentProcess

Launch = Callable[..., AgentProcess]


@contextmanager
def listener(address: str = "127.0.0.1", port: int = 0, backlog: int = 16) -> Iterator[socket.socket]:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((address, port))
        one.listen(backlog)
        yield one


@contextmanager
def saying(answer: bytes, address: str = "127.0.0.1", port: int = 0, pause: float = 0.0) -> Iterator[int]:
    """A server that says this to everyone, byte by byte if with a pause; its port."""

    def serve(one: socket.socket) -> None:
        while True:
            try:
                connection, _ = one.accept()
            except OSError:
                return
            with connection:
                for start in range(0, len(answer), 1 if pause else len(answer)):
                    connection.sendall(answer[start : start + 1] if pause else answer)
                    time.sleep(pause)

    with listener(address, port) as one:
        thread = threading.Thread(target=serve, args=(one,), daemon=True)
        thread.start()
        yield one.getsockname()[1]
        one.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def blackhole(address: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A port that neither takes nor refuses connections, as behind a firewall that drops."""
    with listener(address, port, backlog=0) as one, ExitStack() as stack:
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(one.getsockname())
        yield one.getsockname()[1]


def refused() -> int:
    with listener() as one:
        port: int = one.getsockname()[1]
        return port


def reached(
    targets: list[tuple[str, int]],
    nonce: str = "right",
    timeout: float = 0.5,
    settle: float | None = None,
    connect_timeout: float | None = None,
) -> list[int]:
    found: list[int] = []

    def note(index: int) -> bool:
        found.append(index)
        return False

    reach(targets, lambda _: b"", nonce, timeout, note, settle, connect_timeout)
    return found


def test_the_right_nonce_counts_and_no_other() -> None:
    with (
        saying(b"right") as right,
        saying(b"wrong") as wrong,
        saying(b"HTTP/1.1 200 OK\r\n\r\nright") as http,
    ):
        targets = [("127.0.0.1", port) for port in (wrong, right, refused(), http)]
        assert sorted(reached(targets, timeout=20)) == [1, 3]


def test_a_nonce_in_pieces_counts() -> None:
    with saying(b"right", pause=0.01) as port:
        assert reached([("127.0.0.1", port)], timeout=20) == [0]


def test_refused_is_known_at_once() -> None:
    began = time.monotonic()
    assert reached([("127.0.0.1", refused())] * 3, timeout=60) == []
    assert time.monotonic() - began < 30


def test_an_address_that_drops_is_given_up_in_time_and_delays_nobody() -> None:
    with blackhole() as hole, saying(b"right") as port:
        began = time.monotonic()
        assert reached([("127.0.0.1", hole), ("127.0.0.1", port)], timeout=3.0) == [1]
        assert time.monotonic() - began >= 3.0


def test_where_no_address_takes_the_connection_less_patience_is_enough() -> None:
    with blackhole() as hole:
        began = time.monotonic()
        assert reached([("127.0.0.1", hole)], timeout=60, connect_timeout=0.1) == []
        assert time.monotonic() - began < 30


def test_who_took_the_connection_may_answer_later_than_that() -> None:
    with blackhole() as hole, saying(b"right", pause=0.2) as port:
        targets = [("127.0.0.1", hole), ("127.0.0.1", port)]
        assert reached(targets, timeout=60, settle=0.0, connect_timeout=0.1) == [1]


def test_who_answered_in_time_counts_though_we_had_no_turn_until_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listener() as one:
        peers: list[socket.socket] = []

        def clock() -> float:
            """All happens while it is asked for the third time: when they have been connected to."""
            asked.append(None)
            if len(asked) == 3:
                peers.append(one.accept()[0])
                peers[0].sendall(b"right")
            return 0.0 if len(asked) < 3 else 100.0

        asked: list[None] = []
        monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=clock))
        assert reached([one.getsockname()], timeout=60.0, connect_timeout=2.0) == [0]
        peers[0].close()


def test_after_a_first_answer_the_rest_have_a_moment() -> None:
    with blackhole() as hole, saying(b"right") as port:
        began = time.monotonic()
        assert reached([("127.0.0.1", hole), ("127.0.0.1", port)], timeout=60.0, settle=0.1) == [1]
        assert time.monotonic() - began < 30


def test_one_who_talks_without_end_is_cut_off() -> None:
    with saying(b"x" * (1 << 20)) as port:
        assert reached([("127.0.0.1", port)], timeout=20) == []


def test_what_is_no_address_is_passed_over() -> None:
    with saying(b"right") as port:
        assert reached([("no.such.host", 1), ("", 1), ("::zz", 1), ("127.0.0.1", port)], timeout=20) == [3]


def test_enough_is_enough() -> None:
    with saying(b"right") as port:
        calls = []

        def found(index: int) -> bool:
            calls.append(index)
            return True

        reach([("127.0.0.1", port)], lambda _: b"", "right", 60.0, found)
    assert calls == [0]


def test_no_target_is_no_wait() -> None:
    assert reached([], timeout=60) == []


def test_a_beacon_tells_its_nonce_in_both_families() -> None:
    beacon = Beacon(free_port(), "right")
    serving = threading.Event()

    def serve() -> None:
        while not serving.is_set():
            beacon.answer()
            time.sleep(0.001)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        addresses = ["127.0.0.1", *(["::1"] if has_ipv6() else [])]
        targets = [(address, beacon.port) for address in addresses]
        assert sorted(reached(targets, timeout=20)) == list(range(len(targets)))
        assert reached(targets, nonce="other", timeout=20) == []
    finally:
        serving.set()
        thread.join()
        beacon.close()


def test_the_request_names_the_target_and_carries_the_token() -> None:
    request = http_request("secret")
    assert request(("::1", 80)).startswith(b"GET /-/nonce HTTP/1.1\r\nHost: [::1]:80\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in request(("a", 1))
    assert request(("a", 1)).endswith(b"\r\n\r\n")


class TestAgents:
    """The same through the frames."""

    def test_one_agent_finds_the_other(self, launch: Launch) -> None:
        target, prober = launch(), launch()
        port = target.hello(nonce="the-target")["beacon_port"]
        prober.hello(nonce="the-prober")
        prober.send(
            "probe",
            target="t",
            addresses=["127.0.0.1", "127.0.0.1"],
            port=port,
            nonce="the-target",
        )
        assert prober.expect("probed")[0] == {"type": "probed", "target": "t", "address": "127.0.0.1"}
        prober.expect("probed", address="127.0.0.1")
        prober.expect("probed", address=None)

    def test_the_wrong_host_at_the_right_address_is_not_found(self, launch: Launch) -> None:
        target, prober = launch(), launch()
        port = target.hello(nonce="somebody-else")["beacon_port"]
        prober.hello()
        prober.send("probe", target="t", addresses=["127.0.0.1"], port=port, nonce="the-target")
        assert prober.expect("probed")[0] == {"type": "probed", "target": "t", "address": None}

    def test_each_address_that_answers_is_told_at_once(self, agent: AgentProcess) -> None:
        with closing(free_port()) as free:  # at all addresses
            port = free.getsockname()[1]
        with (
            saying(b"nonce", "127.0.0.2", port),
            blackhole("127.0.0.1", port),
            saying(b"no", "127.0.0.4", port),
        ):
            addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]
            agent.send("probe", target="t", addresses=addresses, port=port, nonce="nonce")
            assert agent.expect("probed")[0]["address"] == "127.0.0.2"
            assert agent.bye()[1] == 0

    @pytest.mark.parametrize("first", ["refused", "dropped", "wrong", "right"])
    def test_the_first_address_of_the_rendezvous_that_answers_is_taken(
        self, launch: Launch, first: str
    ) -> None:
        agent = launch()
        with RendezvousServer("token", "probe-token", "n0nce") as server, ExitStack() as stack:
            if first == "dropped":
                port = stack.enter_context(blackhole())
            elif first == "wrong":
                port = stack.enter_context(saying(b"HTTP/1.1 200 OK\r\n\r\nother"))
            else:
                port = server.port if first == "right" else refused()
            candidates = [("127.0.0.2", port), ("127.0.0.1", server.port), ("127.0.0.3", server.port)]
            if first in ("dropped", "wrong"):
                candidates[0] = ("127.0.0.1", port)
                candidates[1] = ("127.0.0.4", server.port)
            agent.hello(
                rendezvous={
                    "candidates": candidates,
                    "token": "probe-token",
                    "nonce": "n0nce",
                    "relay": "auto",
                }
            )
            header, _ = agent.expect("reached")
        assert header["address"] == candidates[0 if first == "right" else 1][0]
        assert header["tried"] == [address for address, _ in candidates]

    def test_no_address_of_the_rendezvous_answers(self, launch: Launch) -> None:
        agent = launch()
        candidates = [("127.0.0.1", refused())]
        agent.hello(rendezvous={"candidates": candidates, "token": "t", "nonce": "n", "relay": "never"})
        assert agent.expect("reached")[0]["address"] is None

    def test_a_fault_beside_the_loop_reaches_the_driver(self, agent: AgentProcess) -> None:
        agent.send("probe", target="t", addresses=["127.0.0.1"], port=1, nonce="\u00e9")
        assert "UnicodeEncodeError: " in agent.expect("fault")[0]["cause"]
        assert agent.status() == 1

    def test_probing_leaves_no_connection_open(self, launch: Launch) -> None:
        target, prober = launch(), launch()
        port = target.hello(nonce="the-target")["beacon_port"]
        prober.hello()
        before = prober.agent.num_fds()
        for _ in range(5):
            prober.send("probe", target="t", addresses=["127.0.0.1"] * 4, port=port, nonce="the-target")
            prober.expect("probed", address=None)
        assert prober.agent.num_fds() <= before
