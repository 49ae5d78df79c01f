"""What an agent might send to a driver: one by ssh, and one that a launcher has started."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, TypeVar

from hvlaunch.agent.wire.frames import BadFrame, PieceWriter, encode
from hvlaunch.driver.links import host_ends
from hvlaunch.driver.links.agent_channel import (
    AgentChannel,
    CommandConnection,
    Garbled,
    Listener,
    PieceReader,
    RelayRules,
    report_decoder,
)
from hvlaunch.driver.program import NO_PYTHON, AgentProgram
from hvlaunch.engine.events import HostClosed
from hvlaunch.job import Host
from hvlaunch.mpi.calls import ReturnCalls
from hvlaunch.mpi.launched_agent import LaunchedAgent, LauncherEnd
from tests.security.fuzz.broken import Valid, broken_bytes, changed_bytes, piece_of
from tests.security.fuzz.job import Job
from tests.security.fuzz.judge import check_line, check_problem
from tests.unit.gloo.fakes import FACTS, HELLO
from tests.unit.rendezvous.corpus import HOSTILE, VALID

__all__ = ["driver_session", "launched_session"]

_TRIES = 20
"""Broken frames behind each valid one, at most; half as many on the average."""
_ENDS = 0.01
"""How often one that is refused ends the session."""
_ADDRESSES = {"addresses": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}}
_REQUESTS = [*VALID, *(data for data, _ in HOSTILE.values() if 0 < len(data) < 1 << 15)]


class _Agent:
    """Plays an agent, with a worker in slot 0."""

    def __init__(self, chance: random.Random, job: Callable[[], Job]) -> None:
        self._chance = chance
        self._job = job

    def frames(self, *, relays: bool) -> Iterator[Valid]:
        """As they should be, from the first to the last."""
        hello = HELLO | {"facts": FACTS | _ADDRESSES, "beacon_port": 9001, "master_port": 20001}
        yield hello, b""
        port = 5000 if relays else None
        address = "127.0.0.1" if relays else "10.0.0.100"
        yield {"type": "reached", "address": address, "tried": ["10.0.0.100"], "relay_port": port}, b""
        yield {"type": "probed", "target": "b", "agent": 0, "address": "10.0.0.2"}, b""
        yield {"type": "probed", "target": "b", "agent": 0, "address": None}, b""
        before = None
        for life in range(2):
            if self._job().abouts.get(0) is before:
                break
            before = self._job().abouts[0]
            yield from self._worker(life)
            if relays and life == 0:
                yield from self._relayed()
            yield {"type": "pong", "at": 2.0}, b""
            yield self._exited(), b"{}"
            self._job().wait(self._chance.choice((0.0, 1.5, 10.0)))
            if self._job().is_elastic:
                yield {"type": "master_port", "port": 20002}, b""
        yield {"type": "parting", "cause": "heard nothing"}, b""
        yield {"type": "fault", "cause": "KeyError: 1"}, b"Traceback\n"
        yield {"type": "bye", "left": 0, "pids": []}, b""

    @property
    def _about(self) -> dict[str, int]:
        return self._job().abouts.get(0, {"round": 0, "slot": 0, "start": 0})

    def _worker(self, life: int) -> Iterator[Valid]:
        yield {"type": "started", **self._about, "pid": 7 + life, "at": 1.0}, b""
        yield {"type": "output", **self._about, "stream": "stdout"}, b"one line\n"
        yield {"type": "output", **self._about, "stream": "stderr"}, b"x" * 3000
        if self._job().is_elastic:
            yield {"type": "suspended", **self._about}, b""
        else:
            yield {"type": "alone", **self._about, "library": "torch"}, b""
        yield {"type": "output", **self._about, "stream": "stdout"}, b""

    def _exited(self) -> dict[str, Any]:
        ending = {
            "code": 3,
            "signal": None,
            "max_rss": 1,
            "at": 3.0,
            "oom_killed": False,
            "port_taken_by": None,
        }
        return {"type": "exited", **self._about, **ending}

    def _relayed(self) -> Iterator[Valid]:
        for number in (1, 2):
            yield _relay(number, "open")
        for number in (1, 1, 2):
            request = self._chance.choice(_REQUESTS)
            if self._chance.random() < 0.5:
                request = changed_bytes(self._chance, request)
            yield _relay(number, "data", request[: 1 << 15])
        yield _relay(1, "credit", bytes=5)
        yield _relay(1, "end")
        yield _relay(2, "close")

    def others(self) -> list[Valid]:
        """More that there are, and that would mostly come at the wrong time."""
        about = self._about
        frames: list[Valid] = [
            ({"type": "not_started", **about, "code": 127, "cause": "x: command not found"}, b""),
            ({"type": "stdin_taken", "slot": 0, "bytes": 5}, b""),
            ({"type": "output", **about, "stream": "stdout"}, b"more\n"),
            ({"type": "started", **about, "pid": 7, "at": 1.0}, b""),
            ({"type": "suspended", **about}, b""),
            ({"type": "alone", **about, "library": "mpi4py"}, b""),
            ({"type": "master_port", "port": 5}, b""),
            ({"type": "bye", "left": 0, "pids": []}, b""),
            ({"type": "parting", "cause": "got SIGTERM"}, b""),
            (self._exited(), b"{}"),
            (HELLO | {"facts": FACTS | {"gpus": 1}}, b""),
            ({"type": "probed", "target": "b", "agent": 0, "address": "10.0.0.2"}, b""),
        ]
        frames += [_relay(number, what) for number in (1, 2, 3) for what in ("open", "end", "close")]
        frames += [
            _relay(1, "data", _REQUESTS[0]),
            _relay(2, "data", b"x"),
            _relay(1, "credit", bytes=5),
        ]
        return frames


def _relay(number: int, what: str, body: bytes = b"", **more: int) -> Valid:
    return {"type": "relay", "id": number, "what": what, **more}, body


T = TypeVar("T")


def _copy_of(checker: T) -> T:
    """With all that it counts; deepcopy() takes ten times as long, and would be most of a session."""
    found = copy(checker)
    for name, value in vars(checker).items():
        if isinstance(value, dict):
            inner = copy(value)
            inner.update((key, copy(one)) for key, one in value.items() if hasattr(one, "__dict__"))
            setattr(found, name, inner)
        elif isinstance(value, set | deque):
            setattr(found, name, copy(value))
        elif isinstance(value, RelayRules):
            setattr(found, name, _copy_of(value))
    return found


class _Trial:
    """Whether the driver takes a frame, tried on copies of what checks it."""

    def __init__(self, job: Job, end: LauncherEnd | None) -> None:
        self._job = job
        self._end = end

    def takes(self, number: int, pieces: bytes) -> bool:
        """Whether some frame is taken, and none refused; `number` is the first piece's. Raises AssertionError."""
        expected = None
        end = None
        is_taken = False
        try:
            reader = PieceReader(lambda _: None)
            reader._number = number
            for header, body in report_decoder().feed(reader.feed(pieces)):
                expected = expected or _copy_of(self._job.link._expected)
                end = end or (self._end and _copy_of(self._end))
                if end is None or end.concerns_driver(header):
                    expected.check(header, body)
                is_taken = True
        except BadFrame as error:
            check_line(str(error))
            check_problem(host_ends.broken("a", error).problem)
            return False
        except Garbled:
            return False
        return is_taken


class _Sender:
    """The bytes that one agent sends, valid and broken."""

    def __init__(self, chance: random.Random, job: Callable[[], Job], *, is_broken: bool) -> None:
        self.broken = 0
        """How many broken ones the driver has got to see."""
        self._tries = _TRIES if is_broken else 1
        self._is_broken = is_broken
        self._chance = chance
        self._job = job
        self._agent = _Agent(chance, job)
        self._writer = PieceWriter()

    def parts(self, end: Callable[[], LauncherEnd | None], *, relays: bool) -> Iterator[bytes]:
        """What is sent, as it is read. After the first valid one, since a driver must know an agent by its hello."""
        for header, body in self._agent.frames(relays=relays):
            self._job().settle()
            trial = _Trial(self._job(), end())
            others = self._agent.others()
            for _ in range(self._chance.randrange(self._tries)):
                data = broken_bytes(self._chance, others, (header, body))
                self.broken += 1
                number = self._writer._number
                pieces = piece_of(self._chance, self._cut, data)
                taken = trial.takes(number, pieces)
                if taken or self._chance.random() < _ENDS:
                    yield pieces
                    self._job().settle()
                    if not taken:  # it has ended the session, or is a part of something that never ends
                        return
                else:
                    self._writer._number = number
            number = self._writer._number
            pieces = self._cut(encode(header, body))
            if trial.takes(number, pieces):
                yield pieces
            else:  # one that was taken before it has changed what may come
                assert self._is_broken, header
                self._writer._number = number

    def _cut(self, data: bytes) -> bytes:
        return b"".join(self._writer.cut(data))


class _Command:
    """A connection by ssh, and its channel."""

    local_address = "10.0.0.100"
    remote_address = "10.0.0.1"
    is_near = False

    def __init__(self, chance: random.Random, parts: Iterator[bytes]) -> None:
        self._chance = chance
        self._parts = parts

    def run(self, _command: str) -> "_Command":
        return self

    def silence(self) -> None:
        return None

    def read(self) -> bytes:
        return next(self._parts, b"")

    def write(self, data: bytes) -> None:
        pass

    def stderr(self) -> bytes:
        words = b"x\r\nhvlaunch: all is well\x1b[2J", NO_PYTHON.encode(), b"\x1c", b"\xff\n" * 3000, b""
        return self._chance.choice(words)

    def exit_status(self, _timeout: float) -> int | None:
        return self._chance.choice((None, 0, 1, 127))

    def close(self) -> None:
        pass


def driver_session(seed: int, *, is_broken: bool = True) -> int:
    """What an agent sends to a driver; how many frames were broken. Raises AssertionError."""
    chance = random.Random(seed)
    relays = chance.random() < 0.5
    job: Job
    sender = _Sender(chance, lambda: job, is_broken=is_broken)
    connection = CommandConnection(_Command(chance, sender.parts(lambda: None, relays=relays)))  # type: ignore[arg-type]
    relay = "auto" if relays else chance.choice(("auto", "never"))
    job = Job(connection, is_elastic=chance.random() < 0.4, relay=relay)
    job.run()
    assert is_broken or isinstance(job.ended[-1], HostClosed), job.ended
    return sender.broken


class _Caller:
    """A launcher's agent that was let in: a socket that is always ready, and TLS that changes nothing."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self.socket = self
        self._parts = parts

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.100", 1

    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.1", 1

    def getsockopt(self, *_: int) -> bytes:
        return bytes(256)

    def shutdown(self, _how: int) -> None:
        pass

    def recv(self, _size: int) -> bytes:
        return next(self._parts, b"")

    def open(self, data: bytes) -> bytes:
        return data

    def sendall(self, data: bytes) -> None:
        pass


class _Launched(LaunchedAgent):
    """Its connection, on a host with two ranks."""

    end: LauncherEnd | None = None

    def start_agent(self, program: AgentProgram, host: Host, listener: Listener) -> AgentChannel:
        channel = super().start_agent(program, host, listener)
        self.end = channel._end  # type: ignore[attr-defined]
        return channel


def launched_session(seed: int, *, is_broken: bool = True) -> int:
    """What an agent sends that a launcher has started; how many frames were broken. Raises AssertionError."""
    chance = random.Random(seed)
    relays = chance.random() < 0.5
    job: Job
    connection: _Launched
    sender = _Sender(chance, lambda: job, is_broken=is_broken)
    caller: Any = _Caller(sender.parts(lambda: connection.end, relays=relays))
    connection = _Launched("a", caller, 2, lambda _: None, lambda: None, ReturnCalls())
    job = Job(connection, is_elastic=chance.random() < 0.4, relay="auto")
    job.run()
    assert is_broken or isinstance(job.ended[-1], HostClosed), job.ended
    return sender.broken
