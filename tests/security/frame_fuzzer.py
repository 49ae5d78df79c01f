"""Broken frames by seed: what an agent might send to a driver, a driver to an agent, and a caller at the door.

Each session plays a host that is compromised: valid frames, among them broken ones. However it goes, that host alone is lost,
in one printable line; the engine, which runs a job on this host and another, finds nothing wrong with the other.
"""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from hvlaunch.agent.frames import FRAME_COST, OUTPUT_CHUNK, BadFrame, Decoder, encode
from hvlaunch.agent.orders import ORDERS, PLAN
from hvlaunch.agent.pieces import PieceWriter
from hvlaunch.errors import Problem
from hvlaunch.gloo.driver.agent_channel import CommandConnection
from hvlaunch.gloo.driver.agent_program import AgentProgram
from hvlaunch.gloo.driver.host_link import HostLink, Opening
from hvlaunch.gloo.driver.ranks import Ranks
from hvlaunch.gloo.engine import actions as do
from hvlaunch.gloo.engine import events as on
from hvlaunch.gloo.engine import facts as tell
from hvlaunch.gloo.engine.engine import Engine
from hvlaunch.gloo.watch.sentences import detail, sentence
from hvlaunch.job import Host
from hvlaunch.mpi.call_listener import _facts
from hvlaunch.mpi.process_ranks import ALL_NAMES
from tests.unit.gloo.fakes import FACTS, HELLO
from tests.unit.gloo.history import facts, spec

__all__ = ["door_session", "driver_session", "order_session"]

WINDOW = 1 << 16
_ABOUT = {"round": 0, "slot": 0, "start": 0}
_ADDRESSES = {"addresses": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}}
_FIRST: list[tuple[dict[str, Any], bytes]] = [
    (HELLO | {"facts": FACTS | _ADDRESSES}, b""),
    ({"type": "reached", "address": "10.0.0.100", "tried": ["10.0.0.100"], "relay_port": None}, b""),
    ({"type": "probed", "target": "b", "address": "10.0.0.2"}, b""),
    ({"type": "probed", "target": "b", "address": None}, b""),
]
_LATER: list[tuple[dict[str, Any], bytes]] = [
    ({"type": "started", **_ABOUT, "pid": 7, "at": 1.0}, b""),
    ({"type": "output", **_ABOUT, "stream": "stdout"}, b"one line\n"),
    ({"type": "output", **_ABOUT, "stream": "stderr"}, b"x" * 3000),
    ({"type": "pong", "at": 2.0}, b""),
    ({"type": "output", **_ABOUT, "stream": "stdout"}, b""),
    (
        {"type": "exited", **_ABOUT, "code": 3, "signal": None, "max_rss": 1, "at": 3.0, "oom_killed": False},
        b"{}",
    ),
    ({"type": "parting", "cause": "got SIGTERM"}, b""),
    ({"type": "fault", "cause": "KeyError: 1"}, b"Traceback\n"),
    ({"type": "bye", "left": 0}, b""),
]
_OTHERS: list[tuple[dict[str, Any], bytes]] = [
    ({"type": "not_started", **_ABOUT, "code": 127, "cause": "x: command not found"}, b""),
    ({"type": "suspended", **_ABOUT}, b""),
    ({"type": "master_port", "port": 5}, b""),
    ({"type": "stdin_taken", "slot": 0, "bytes": 5}, b""),
    *(({"type": "relay", "id": 1, "what": what}, b"") for what in ("open", "end", "close")),
    ({"type": "relay", "id": 1, "what": "data"}, b"GET / HTTP/1.1\r\n\r\n"),
    ({"type": "relay", "id": 1, "what": "credit", "bytes": 5}, b""),
]
_HELLO_ORDER = {
    "type": "hello",
    "protocol": 3,
    "name": "a",
    "key": "k",
    "known_as": None,
    "cwd": "/",
    "gpus": False,
    "ports": None,
    "elastic": None,
    "rendezvous": {"candidates": [["10.0.0.100", 4711]], "key": "k", "relay": "auto"},
}
_PLAN = {
    "argv": ["true"],
    "defaults": {"A": "1"},
    "env": {},
    "workers": [{"slot": 0, "start": 0, "env": {"B": "2"}, "stdin": False}],
}
_ORDERS: list[tuple[dict[str, Any], bytes]] = [
    (_HELLO_ORDER, b""),
    ({"type": "probe", "target": "b", "addresses": ["127.0.0.1"], "port": 9, "key": "k"}, b""),
    ({"type": "start", "round": 0}, json.dumps(_PLAN).encode()),
    ({"type": "stdin", "slot": 0}, b"x"),
    ({"type": "stop", "slots": None, "steps": [[15, 0.0], [9, 1.0]]}, b""),
    ({"type": "signal", "slots": [0], "signal": 10}, b""),
    ({"type": "ack", "bytes": 5}, b""),
    ({"type": "relay", "id": 1, "what": "data"}, b"x"),
    ({"type": "ping"}, b""),
    ({"type": "bye"}, b""),
]
_VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 255, 256, 65536, 2**31, 2**53 + 1, 2**64, 10**400, -0.5, 1e308, 5e-324),
    *(
        "",
        "0",
        "b",
        "stdout",
        "../../.bashrc",
        "10.0.0.2",
        "6.6.6.6",
        "::1",
        "\n",
        "x\nhvlaunch: all is well",
    ),
    *("\x1b]0;x\x07", "\x00", "\ud800", "\u202e", "x" * 5000, "1.2.3.4%eth0", "output", "exited"),
    *([], {}, [[]], {"": None}, [None] * 300, ["10.0.0.1"] * 300, {"eth0": ["10.0.0.1"]}, [[[[[[]]]]]]),
]


def _broken(chance: random.Random, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """The frame with one thing about it changed."""
    changed = json.loads(json.dumps(header))
    place = changed
    while chance.random() < 0.3 and (
        inner := [one for one in place.values() if isinstance(one, dict) and one]
    ):
        place = chance.choice(inner)
    name = chance.choice([*place])
    match chance.randrange(6):
        case 0 | 1 | 2:
            place[name] = chance.choice(_VALUES)
        case 3:
            del place[name]
        case 4:
            place[chance.choice(["more", "slot", "type", "x" * 300])] = chance.choice(_VALUES)
        case _:
            body = chance.choice([b"", b"x", body * 2, bytes(5000), b"x" * (OUTPUT_CHUNK + 1)])
    return changed, body


def _bytes_of(chance: random.Random, header: dict[str, Any], body: bytes) -> bytes:
    """The frame on the wire, which may be broken there as well."""
    try:
        data = encode(header, body)
    except (TypeError, ValueError, OverflowError):  # no JSON, in some Pythons
        data = encode({"type": "pong", "at": 0})
    if chance.random() < 0.1:
        at = chance.randrange(len(data))
        data = data[:at] + bytes([chance.randrange(256)]) + data[at + chance.randrange(3) :]
    return data


def _frames(
    chance: random.Random, valid: Sequence[tuple[dict[str, Any], bytes]], others: Sequence[Any]
) -> Iterator[bytes]:
    calm = chance.randrange(len(valid))
    for number, (header, body) in enumerate(valid):
        if number >= calm and chance.random() < 0.05:
            continue
        if number >= calm and chance.random() < 0.3:
            yield _bytes_of(chance, *_broken(chance, *chance.choice([(header, body), *others])))
        yield encode(header, body)
    for _ in range(chance.randrange(4)):
        yield _bytes_of(chance, *_broken(chance, *chance.choice([*valid, *others])))


class _Wire:
    """A connection, and its channel: what the host sends is known from the start."""

    local_address = "10.0.0.100"
    remote_address = "10.0.0.1"
    is_near = False

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts

    def run(self, _command: str) -> "_Wire":
        return self

    def read(self) -> bytes:
        return next(self._parts, b"")

    def write(self, data: bytes) -> None:
        pass

    def stderr(self) -> bytes:
        return b"x\r\nhvlaunch: all is well\x1b[2J"

    def exit_status(self, _timeout: float) -> int | None:
        return 0

    def close(self) -> None:
        pass


class _Sink:
    """Takes output, and acknowledges none: it must stay within the window."""

    def __init__(self) -> None:
        self.kept = 0

    def output(self, rank: int, stream: str, data: bytes, done: Any) -> None:
        assert (rank, stream in ("stdout", "stderr")) == (0, True)
        self.kept += len(data) + FRAME_COST
        assert self.kept <= WINDOW + 4 * OUTPUT_CHUNK + 4 * (1 << 20)

    def end(self, rank: int, stream: str) -> None:
        assert (rank, stream in ("stdout", "stderr")) == (0, True)


class _Program(AgentProgram):
    def command(self, host: Host, *, is_here: bool, is_near: bool) -> tuple[str, bytes]:
        return "agent", b""


class _Relay:
    def obey(self, header: Any, body: bytes) -> None:
        pass

    def close(self) -> None:
        pass


class _Job:
    """The engine of a job on hosts a, which is hostile, and b."""

    def __init__(self) -> None:
        self.engine = Engine(spec("a:1,b:1"), 4711)
        self.ranks = Ranks()
        self.now = 100.0
        self.sent: list[dict[str, Any]] = []
        self.feed(on.Began())
        for event in (
            on.HostConnected("b"),
            on.HostReady("b", facts(2)),
            on.RendezvousReached("b", "10.0.0.100"),
        ):
            self.feed(event)

    def feed(self, event: on.Event) -> None:
        self.now += 0.001
        actions = self.engine.handle(event, self.now)
        self.ranks.see(actions)
        if (text := detail(event, 0.0)) is not None:
            _check_text(text)
        for action in actions:
            match action:
                case do.Probe("a", target, addresses, port):
                    about = {"target": target, "addresses": [*addresses], "port": port}
                    self.sent.append({"type": "probe", **about})
                case do.Probe("b", target, addresses, _):
                    for address in (*addresses, None):
                        self.feed(on.HostProbed("b", target, address))
                case do.Start(host="a", round=number):
                    self.sent.append({"type": "start", "round": number})
                case do.Finish(result):
                    assert result.exit_code != 0
                case tell.HostNotUsable() | tell.HostLostAtEnd() | tell.KeepingHosts():
                    _check_problem(action.problem)
                    _check_text(sentence(action))
                case _:
                    pass


def _check_text(text: str) -> None:
    assert all(line.startswith("host ") or i == 0 for i, line in enumerate(text.split("\n"))), text
    assert text.replace("\n", "").isprintable(), text


def _check_problem(problem: Problem) -> None:
    assert problem.host != "b", problem
    assert problem.kind != "HostFault", problem
    assert str(problem).isprintable(), problem


def driver_session(seed: int) -> int:
    """What an agent sends to a driver; how many frames there were. Raises AssertionError."""
    chance = random.Random(seed)
    job = _Job()
    writer = PieceWriter()
    count = 0
    hello = {"type": "hello", "gpus": False, "ports": None, "elastic": None}
    hello["rendezvous"] = {
        "candidates": [["10.0.0.100", 4711]],
        "relay": chance.choice(["auto", "never"]),
    }

    def parts() -> Iterator[bytes]:
        nonlocal count
        for frame in _frames(chance, [*_FIRST, *_LATER], _OTHERS):
            count += 1
            yield b"".join(writer.cut(frame))

    ended: list[on.Event] = []

    def post(event: on.Event) -> None:
        ended.append(event)
        if isinstance(event, on.HostFailed | on.HostGone):
            _check_problem(event.problem)
        job.feed(event)
        while job.sent:
            link.send(job.sent.pop(0))

    opening = Opening(
        connect=lambda _: CommandConnection(_Wire(parts())),  # type: ignore[arg-type]
        program=_Program({}, None),
        hello=lambda _: hello,
        relay=lambda _: _Relay(),  # type: ignore[arg-type,return-value]
        window=WINDOW,
    )
    link = HostLink(
        Host("a"),
        opening,
        post,
        _Sink(),
        lambda slot, start: job.ranks.of("a", slot, start),
        lambda slot, start: job.ranks.born("a", slot, start),
        lambda: job.now,
    )
    link._run()
    assert isinstance(ended[-1], on.HostFailed | on.HostGone | on.HostClosed), ended
    return count


def order_session(seed: int) -> int:
    """What a driver sends to an agent, as far as it is read; how many frames there were. Raises AssertionError."""
    chance = random.Random(seed)
    decoder = Decoder(ORDERS)
    count = 0
    try:
        for frame in _frames(chance, _ORDERS, _ORDERS):
            count += 1
            for header, body in decoder.feed(frame):
                assert header["type"] in ORDERS
                if header["type"] == "start":
                    _check_plan(chance, body)
    except BadFrame as error:
        assert str(error).isprintable(), error
    return count


def _check_plan(chance: random.Random, body: bytes) -> None:
    plan, _ = _broken(chance, json.loads(body) if PLAN(_json(body)) else _PLAN, b"")
    if PLAN(plan):
        for worker in plan["workers"]:
            assert isinstance(worker["slot"] + worker["start"], int)
            assert all(isinstance(value, str) for value in worker["env"].values())
        assert all(isinstance(word, str) for word in plan["argv"])


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def door_session(seed: int) -> int:
    """What a caller tells that has the token. Raises AssertionError."""
    chance = random.Random(seed)
    known = {name: str(chance.randrange(4)) for name in sorted(ALL_NAMES)}
    told: Any = ["node1", known]
    place = chance.randrange(4)
    if place == 0:
        told = chance.choice(_VALUES)
    elif place == 1:
        told[chance.randrange(2)] = chance.choice(_VALUES)
    elif place == 2:
        told[1][chance.choice([*known, "more", "x" * 400])] = chance.choice(_VALUES)
    else:
        told.append(chance.choice(_VALUES))
    data = json.dumps(told).encode()
    if chance.random() < 0.2:
        at = chance.randrange(len(data))
        data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    try:
        hostname, environ = _facts(data)
    except ValueError:
        return 1
    assert hostname.isprintable()
    assert len(hostname) <= 256
    assert environ.keys() <= ALL_NAMES
    assert all(value.isprintable() and len(value) <= 256 for value in environ.values())
    return 1


def orders(seed: int) -> Iterator[bytes]:
    """What a driver sends to an agent: broken, but for what an agent would carry out."""
    chance = random.Random(seed)
    for header, body in _ORDERS:
        yield encode(header, body)
        if chance.random() < 0.3:
            yield _bytes_of(chance, *_broken(chance, *chance.choice([one for one in _ORDERS if not one[1]])))
