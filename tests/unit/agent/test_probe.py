"""Who can be reached: only who proves to be the right one counts."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from hvlaunch.agent.facts import free_port
from hvlaunch.agent.main import Greeting
from hvlaunch.agent.quick import Selector
from hvlaunch.agent.wire import probe
from hvlaunch.agent.wire.channel import DriverChannel
from hvlaunch.agent.wire.probe import QUESTION_SIZE, Beacon, Prover, Question, reach
from hvlaunch.rendezvous.serving import RendezvousServer
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


Say = Callable[[bytes, tuple[str, int]], bytes | None]


def as_prover(prover: Prover) -> Say:
    return lambda data, name: prover.answer(data, [name[0]], name[1])


@contextmanager
def saying(
    say: Say | bytes, address: str = "127.0.0.1", port: int = 0, pause: float = 0.0
) -> Iterator[tuple[int, list[bytes]]]:
    """A server that answers each question so, byte by byte if with a pause; its port, and the questions."""
    asked: list[bytes] = []

    def serve(one: socket.socket) -> None:
        while True:
            try:
                connection, _ = one.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.recv(QUESTION_SIZE, socket.MSG_WAITALL))
                answer = say if isinstance(say, bytes) else say(asked[-1], connection.getsockname()) or b""
                for start in range(0, len(answer), 1 if pause else max(1, len(answer))):
                    try:
                        connection.sendall(answer[start : start + 1] if pause else answer)
                    except OSError:
                        break  # the other side has heard enough
                    time.sleep(pause)

    with listener(address, port) as one:
        thread = threading.Thread(target=serve, args=(one,), daemon=True)
        thread.start()
        yield one.getsockname()[1], asked
        one.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def right(address: str = "127.0.0.1", port: int = 0, pause: float = 0.0, key: str = "right") -> Iterator[int]:
    """Who is asked for."""
    with saying(as_prover(Prover(key, "host t")), address, port, pause) as (where, _):
        yield where


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
    key: str = "right",
    timeout: float = 0.5,
    settle: float | None = None,
    connect_timeout: float | None = None,
) -> list[int]:
    found: list[int] = []

    def note(index: int) -> bool:
        found.append(index)
        return False

    reach(targets, key, "host t", timeout, note, settle, connect_timeout)
    return found


def test_only_a_target_with_the_key_counts() -> None:
    with (
        right() as good,
        right(key="wrong") as wrong,
        saying(as_prover(Prover("right", "host u"))) as (another, _),
        saying(b"x" * 32) as (liar, _),
        saying(lambda data, _: data[-32:]) as (mirror, _),
    ):
        targets = [("127.0.0.1", port) for port in (wrong, good, refused(), another, liar, mirror)]
        assert reached(targets, timeout=20) == [1]


def test_an_answer_in_pieces_counts() -> None:
    with right(pause=0.001) as port:
        assert reached([("127.0.0.1", port)], timeout=20) == [0]


def test_questions_differ_and_do_not_show_the_key() -> None:
    with saying(b"") as (port, asked):
        assert reached([("127.0.0.1", port)] * 3, timeout=20) == []
    assert len(set(asked)) == 3
    assert not [data for data in asked if b"right" in data]


def test_question_passed_on_by_a_stranger_with_the_same_address_is_not_answered() -> None:
    """docker0 has the same address everywhere: who is there hands the question to the right host, at its own address."""
    with right("127.0.0.2") as port:

        def pass_on(data: bytes, _: object) -> bytes:
            with socket.create_connection(("127.0.0.2", port)) as other:
                other.sendall(data)
                return other.recv(32, socket.MSG_WAITALL)

        with saying(pass_on, "127.0.0.1", port) as (stranger, asked):
            assert reached([("127.0.0.1", stranger)], timeout=20) == []
            assert asked
        assert reached([("127.0.0.2", port)], timeout=20) == [0]


def test_recorded_answer_is_refused() -> None:
    recorded: list[bytes] = []
    prover = Prover("right", "host t")

    def record(data: bytes, name: tuple[str, int]) -> bytes | None:
        answer = prover.answer(data, [name[0]], name[1])
        recorded.append(answer or b"")
        return answer

    with saying(record) as (port, asked):
        assert reached([("127.0.0.1", port)], timeout=20) == [0]
        assert prover.answer(asked[0], ["127.0.0.1"], port) is None  # the same question once more
    with saying(recorded[0], port=port):
        assert reached([("127.0.0.1", port)], timeout=20) == []


def test_refused_connection_is_noticed_at_once() -> None:
    began = time.monotonic()
    assert reached([("127.0.0.1", refused())] * 3, timeout=60) == []
    assert time.monotonic() - began < 30


def test_dead_address_is_given_up_in_time_and_delays_no_other() -> None:
    with blackhole() as hole, right() as port:
        began = time.monotonic()
        assert reached([("127.0.0.1", hole), ("127.0.0.1", port)], timeout=3.0) == [1]
        assert time.monotonic() - began >= 3.0


def test_without_any_connection_the_wait_is_shorter() -> None:
    with blackhole() as hole:
        began = time.monotonic()
        assert reached([("127.0.0.1", hole)], timeout=60, connect_timeout=0.1) == []
        assert time.monotonic() - began < 30


def test_connected_target_may_answer_later() -> None:
    with blackhole() as hole, right(pause=0.02) as port:
        targets = [("127.0.0.1", hole), ("127.0.0.1", port)]
        assert reached(targets, timeout=60, settle=0.0, connect_timeout=0.1) == [1]


def test_answer_in_time_counts_even_if_read_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listener() as one:
        peers: list[socket.socket] = []

        def clock() -> float:
            """All happens while it is asked for the third time: when they have been connected to."""
            asked.append(None)
            if len(asked) == 3:
                peers.append(one.accept()[0])
                answer = Prover("right", "host t").answer(question.data, ["127.0.0.1"], one.getsockname()[1])
                peers[0].sendall(answer or b"")
            return 0.0 if len(asked) < 3 else 100.0

        asked: list[None] = []
        question = Question("right", "host t", *one.getsockname())
        monkeypatch.setattr(probe, "Question", lambda *_: question)
        monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=clock))
        assert reached([one.getsockname()], timeout=60.0, connect_timeout=2.0) == [0]
        peers[0].close()


def test_after_a_first_answer_others_have_a_moment() -> None:
    with blackhole() as hole, right() as port:
        began = time.monotonic()
        assert reached([("127.0.0.1", hole), ("127.0.0.1", port)], timeout=60.0, settle=0.1) == [1]
        assert time.monotonic() - began < 30


def test_endless_answer_is_cut_off() -> None:
    with saying(b"x" * (1 << 20)) as (port, _):
        assert reached([("127.0.0.1", port)], timeout=20) == []


def test_invalid_address_is_skipped() -> None:
    with right() as port:
        assert reached([("no.such.host", 1), ("", 1), ("::zz", 1), ("127.0.0.1", port)], timeout=20) == [3]


def test_probing_stops_once_the_caller_is_satisfied() -> None:
    with right() as port:
        calls = []

        def found(index: int) -> bool:
            calls.append(index)
            return True

        reach([("127.0.0.1", port)], "right", "host t", 60.0, found)
    assert calls == [0]


def test_without_targets_probing_returns_at_once() -> None:
    assert reached([], timeout=60) == []


@contextmanager
def beacon(known_as: str | None = None) -> Iterator[Beacon]:
    """One that serves, in a thread."""
    selector = Selector()
    one = Beacon(free_port(), selector, Prover("right", "host t"), known_as)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            for call, _ in selector.select(0.01):
                call()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield one
    finally:
        over.set()
        thread.join()
        one.close()
        one.close()


def test_beacon_proves_its_host_by_ipv4_and_ipv6() -> None:
    with beacon() as one:
        addresses = ["127.0.0.1", *(["::1"] if has_ipv6() else [])]
        targets = [(address, one.port) for address in addresses]
        assert sorted(reached(targets, timeout=20)) == list(range(len(targets)))
        assert reached(targets, key="other", timeout=20) == []


def test_beacon_does_not_answer_without_the_key() -> None:
    with beacon() as one:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * QUESTION_SIZE, b"\x01hvl" + b"x" * 64):
            with socket.create_connection(("127.0.0.1", one.port), 20) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(100) == b""


def test_beacon_has_room_despite_silent_strangers() -> None:
    with beacon() as one, ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", one.port), 20)))
        assert reached([("127.0.0.1", one.port)], timeout=20) == [0]


def test_hundreds_of_hosts_that_call_before_the_first_of_them_asks_are_answered() -> None:
    """On busy hosts a caller is connected long before its turn to ask. With 128 hosts the job ended: no way to rank 0's host."""
    with beacon() as one, ExitStack() as stack:
        calls = {
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", one.port), 20))): Question(
                "right", "host t", "127.0.0.1", one.port
            )
            for _ in range(400)
        }
        for call, question in calls.items():
            call.sendall(question.data)
        assert all(question.is_answer(call.recv(32, socket.MSG_WAITALL)) for call, question in calls.items())


def test_hundreds_of_callers_wait_for_a_busy_host_without_a_second_try() -> None:
    """The kernel drops a call beyond the queue of those that wait, and tries again after a second."""
    one = Beacon(free_port(), Selector(), Prover("right", "host t"), None)
    with closing(one), ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", one.port), 0.9)))


def test_beacon_answers_for_its_address_behind_nat() -> None:
    with beacon("192.0.2.7") as one, socket.create_connection(("127.0.0.1", one.port), 20) as other:
        question = Question("right", "host t", "192.0.2.7", one.port)
        other.sendall(question.data)
        assert question.is_answer(other.recv(32, socket.MSG_WAITALL))


class TestAgents:
    """The same through the frames."""

    def test_one_agent_finds_the_other(self, launch: Launch) -> None:
        target, prober = launch(), launch()
        port = target.hello(name="t", key="the-target")["beacon_port"]
        prober.hello(key="the-prober")
        prober.send(
            "probe",
            target="t",
            agent=3,
            addresses=["127.0.0.1", "127.0.0.1"],
            port=port,
            key="the-target",
        )
        assert prober.expect("probed")[0] == {
            "type": "probed",
            "target": "t",
            "agent": 3,
            "address": "127.0.0.1",
        }
        prober.expect("probed", address="127.0.0.1")
        prober.expect("probed", address=None)

    def test_the_wrong_host_at_the_right_address_is_not_found(self, launch: Launch) -> None:
        target, prober = launch(), launch()
        port = target.hello(name="t", key="somebody-else")["beacon_port"]
        prober.hello()
        prober.send("probe", target="t", agent=3, addresses=["127.0.0.1"], port=port, key="the-target")
        assert prober.expect("probed")[0] == {"type": "probed", "target": "t", "agent": 3, "address": None}

    def test_each_address_that_answers_is_told_at_once(self, agent: AgentProcess) -> None:
        with closing(free_port()) as free:  # at all addresses
            port = free.getsockname()[1]
        with (
            right("127.0.0.2", port),
            blackhole("127.0.0.1", port),
            saying(b"no", "127.0.0.4", port),
        ):
            addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]
            agent.send("probe", target="t", agent=3, addresses=addresses, port=port, key="right")
            assert agent.expect("probed")[0]["address"] == "127.0.0.2"
            assert agent.bye()[1] == 0

    @pytest.mark.parametrize("first", ["refused", "dropped", "wrong", "right"])
    def test_the_first_address_of_the_rendezvous_that_answers_is_taken(
        self, launch: Launch, first: str
    ) -> None:
        agent = launch()
        answerer = Prover("probe-key", "rendezvous")
        with RendezvousServer("token", host="", answerer=answerer) as server, ExitStack() as stack:
            if first == "dropped":
                port = stack.enter_context(blackhole())
            elif first == "wrong":
                port, _ = stack.enter_context(saying(b"HTTP/1.1 200 OK\r\n\r\nother"))
            else:
                port = server.port if first == "right" else refused()
            candidates = [("127.0.0.2", port), ("127.0.0.1", server.port), ("127.0.0.3", server.port)]
            if first in ("dropped", "wrong"):
                candidates[0] = ("127.0.0.1", port)
                candidates[1] = ("127.0.0.4", server.port)
            agent.hello(
                rendezvous={
                    "candidates": candidates,
                    "key": "probe-key",
                    "relay": "auto",
                }
            )
            header, _ = agent.expect("reached")
        assert header["address"] == candidates[0 if first == "right" else 1][0]
        assert header["tried"] == [address for address, _ in candidates]

    def test_no_address_of_the_rendezvous_answers(self, launch: Launch) -> None:
        agent = launch()
        candidates = [("127.0.0.1", refused())]
        agent.hello(rendezvous={"candidates": candidates, "key": "k", "relay": "never"})
        assert agent.expect("reached")[0]["address"] is None

    @pytest.mark.parametrize("elastic", [None, 60.0])
    def test_the_beacon_of_a_static_job_closes_when_workers_start(
        self, launch: Launch, elastic: float | None
    ) -> None:
        target, prober = launch(), launch()
        port = target.hello(name="t", key="right", elastic=elastic)["beacon_port"]
        target.start(["sleep", "1000"])
        target.expect("started")
        prober.hello()
        prober.send("probe", target="t", agent=3, addresses=["127.0.0.1"], port=port, key="right")
        found = prober.expect("probed")[0]["address"]
        assert found == (None if elastic is None else "127.0.0.1")

    def test_probing_leaves_no_connection_open(self, launch: Launch) -> None:
        target, prober = launch(), launch()
        port = target.hello(name="t", key="the-target")["beacon_port"]
        prober.hello()
        before = prober.agent.num_fds()
        for _ in range(5):
            prober.send(
                "probe", target="t", agent=3, addresses=["127.0.0.1"] * 4, port=port, key="the-target"
            )
            prober.expect("probed", address=None)
        assert prober.agent.num_fds() <= before


@pytest.mark.parametrize("address", ["\u00e9", "", "b", "0x7f.1", "127.1", "x" * 300])
def test_invalid_address_leads_nowhere(address: str) -> None:
    reach([(address, 9)], "k", "host b", 5.0, lambda _: pytest.fail("it was reached"))


def test_keys_and_names_may_be_any_text() -> None:
    question = Question("k\u00e9", "host \udc80\ud800", "127.0.0.1", 9)
    answer = Prover("k\u00e9", "host \udc80\ud800").answer(question.data, ["127.0.0.1"], 9)
    assert answer is not None
    assert question.is_answer(answer)


def test_a_fault_beside_the_loop_is_raised_in_the_loop() -> None:
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    with Path(os.devnull).open("rb") as nothing:
        channel = DriverChannel(nothing.fileno(), nothing.fileno())
        greeting = Greeting(channel, Selector(), calls.put, "/tmp/x", lambda: 1, None)
        greeting._in_thread(lambda: os.close(-1))
        with pytest.raises(OSError, match="Bad file descriptor"):
            calls.get(timeout=60)()
