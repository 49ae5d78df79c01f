"""What a driver might send to an agent, whose own loop and relay act on it; only its workers are played."""

import _thread
import errno
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from ipaddress import ip_address
from typing import Any
from unittest import mock

from hvlaunch.agent import facts, main, reaper, scratch, workers
from hvlaunch.agent.main import Agent
from hvlaunch.agent.quick import Selector
from hvlaunch.agent.wire import probe
from hvlaunch.agent.wire.channel import ORDERS, DriverChannel
from hvlaunch.agent.wire.frames import BadFrame, Decoder, encode, misfit
from hvlaunch.agent.wire.probe import Question
from hvlaunch.agent.workers import diagnosis, family
from hvlaunch.agent.workers.host_workers import _plan
from hvlaunch.driver.links.agent_channel import REPORTS
from tests.security.fuzz.broken import Valid, broken_bytes, broken_frame
from tests.security.fuzz.judge import check_line

__all__ = ["order_session", "orders"]

_TRIES = 30
_HOLDER = {"uid": 4242, "port": 20001, "user": None, "program": "nc, pid 7"}
_ENDS = 0.01
_NO_PROCESS = 1 << 21
"""The pids of those that are played are larger; nothing is done to them."""
_CONFIG = {"lease": 60.0, "grace": 1.0, "window": 1 << 16, "reconnect": 1.0, "spill": 0}
_RENDEZVOUS = {"candidates": [["10.0.0.100", 4711]], "key": "k", "relay": "always"}
_HELLO = {
    "type": "hello",
    "protocol": 3,
    "name": "a",
    "key": "k",
    "known_as": None,
    "cwd": "/",
    "gpus": False,
    "ports": None,
    "elastic": 5.0,
    "processes": 1,
    "rendezvous": _RENDEZVOUS,
    "session": None,
}


def _start(number: int) -> Valid:
    env = {"HVLAUNCH_RANK": "0", "MASTER_PORT": "20001", "HVLAUNCH_WORKER": f"a/0/{number}"}
    workers = [{"slot": slot, "start": number, "env": env, "stdin": slot == 0} for slot in range(2)]
    plan = {
        "argv": ["/bin/true"],
        "cwd": None,
        "defaults": {"A": "1"},
        "env": {},
        "result": False,
        "workers": workers,
    }
    return {"type": "start", "round": number}, json.dumps(plan).encode("ascii")


def _relay(number: int, what: str, body: bytes = b"", **more: int) -> Valid:
    return {"type": "relay", "id": number, "what": what, **more}, body


_LINE: list[Valid] = [
    (_HELLO, b""),
    ({"type": "modules"}, b""),
    ({"type": "call"}, b"x" * 1000),
    ({"type": "probe", "target": "b", "agent": 0, "addresses": ["10.0.0.2"], "port": 9, "key": "k"}, b""),
    _start(0),
    ({"type": "ping"}, b""),
    _relay(1, "data", b"HTTP/1.1 200 OK\r\n\r\n"),
    _relay(1, "credit", bytes=1 << 10),
    _relay(2, "data", b"x" * 1000),
    _relay(2, "end"),
    ({"type": "stdin", "slot": 0}, b"x" * 1000),
    ({"type": "signal", "slots": [0], "signal": 10}, b""),
    ({"type": "ack", "bytes": 1 << 16}, b""),
    _relay(1, "close"),
    ({"type": "stop", "slots": None, "steps": [[15, 0.0], [9, 1.0]]}, b""),
    _start(1),
    ({"type": "stdin", "slot": 0}, b""),
    ({"type": "bye"}, b""),
]


class _Channel(DriverChannel):
    """What the agent sends must be frames that an agent may send; what it gets are frames, or why they are none."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, fd)
        self.came: list[bytes] = []
        self.sent: list[dict[str, Any]] = []

    def send(self, header: dict[str, Any], body: bytes = b"", *, relayed: bool = False) -> None:
        found = misfit(REPORTS, json.loads(json.dumps(header)), body)
        assert found is None, (found, header)
        self.sent.append(header)

    def receive(self) -> list[Any]:
        """Raises BadFrame."""
        frames: list[Any] = []
        while self.came:
            frames += self._decoder.feed(self.came.pop(0))
        return frames


class _Agent(Agent):
    """Without signals, which are the process' own."""

    def _watch_signals(self) -> None:
        os.set_blocking(self._wake_write, False)

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)
        for one in self._workers._slots:
            stdin = [] if one.worker.stdin is None else [one.worker.stdin]
            for end in (*one.worker.output.values(), *stdin):
                os.close(end)
        if self._greeting._beacon is not None:
            self._greeting._beacon.close()
        for sock in (*self._greeting._kept, *self._greeting._lent):
            sock.close()
        self._selector.close()


class _Host:
    """What is around an agent."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.theirs: list[int] = []
        self.connections: list[socket.socket] = []

    def spawn(self, _program: str, argv: list[bytes], env: dict[bytes, bytes], **more: Any) -> int:
        """As os.posix_spawn, but that nothing runs: it has what a process would have, and has written."""
        words = [*argv, *env, *env.values()]
        if any(b"\0" in word for word in words) or any(b"=" in name for name in env):
            raise ValueError("embedded null byte, or a name that is none")
        if self.chance.random() < 0.1:
            raise OSError(errno.EAGAIN, "no process is left")
        stdin, stdout, stderr = (os.dup(fd) for _, fd, _ in more["file_actions"])
        self.theirs += stdin, stdout, stderr
        os.write(stdout, b"x" * self.chance.choice((1, 1000, 1 << 15)))
        return _NO_PROCESS + len(self.theirs)

    def kill(self, pid: int, number: int) -> None:
        """As hvlaunch.agent.reaper.send_signal."""
        assert abs(pid) > _NO_PROCESS
        assert 1 <= number <= 64

    def reach(
        self, targets: Sequence[Any], key: str, name: str, _timeout: float, found: Any, *_: Any
    ) -> None:
        """As hvlaunch.agent.wire.probe.reach; an address that is none is really tried."""
        for index, target in enumerate(targets):
            if not _is_address(target[0]):
                selector = Selector()
                assert not probe._connect_all(selector, [target])
                selector.close()
                continue
            assert not Question(key, name, *target).is_answer(b"")
            if found(index):
                return

    def knock(self, port: int) -> None:
        """Workers connect to the relay."""
        for _ in range(2):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setblocking(False)
            self.connections.append(connection)
            connection.send(b"GET /s/k HTTP/1.1\r\n\r\n")

    def move(self) -> None:
        """Workers read, write, and hang up."""
        for connection in self.connections:
            with suppress(OSError):
                connection.recv(1 << 16)
                connection.send(b"x")
        if self.connections and self.chance.random() < 0.05:
            self.connections.pop().close()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for fd in self.theirs:
            os.close(fd)


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(text))
    return False


@cache
def _facts() -> dict[str, Any]:
    return facts.host_facts()


def _run(work: Callable[..., None], args: tuple[Any, ...] = ()) -> None:
    work(*args)


def _on(host: _Host) -> ExitStack:
    """While it is open, an agent is on this host."""
    stack = ExitStack()
    known = _facts()
    for where, name, what in (
        (os, "posix_spawn", host.spawn),
        (workers, "send_signal", host.kill),
        (facts, "host_facts", lambda: {**known}),
        (probe, "reach", host.reach),
        (_thread, "start_new_thread", _run),
        (main, "enter", lambda _: None),
        (workers, "enter", lambda _: None),
        (main, "_gpus", int),
        (diagnosis, "programs_of", lambda _: []),
        (diagnosis, "library_of", lambda _: host.chance.choice((None, "torch", "mpi4py"))),
        (diagnosis, "was_used", lambda _: host.chance.random() < 0.5),
        (diagnosis, "other_user_at", lambda _: host.chance.choice((None, _HOLDER))),
        (reaper, "kill_descendants", lambda _: []),
        (family, "kill_marked", lambda *_: None),
        (scratch, "keep_call", lambda *_: None),
    ):
        stack.enter_context(mock.patch.object(where, name, what))
    return stack


class _Session:
    """A driver, and the agent on the host."""

    def __init__(self, seed: int, tries: int) -> None:
        self.broken = 0
        self._tries = tries
        self._chance = random.Random(seed)
        self._host = _Host(self._chance)
        self._pipes = [os.pipe(), os.pipe()]
        (quiet, _), (guardian, _) = self._pipes
        self._channel = _Channel(quiet)
        self._agent = _Agent(self._channel, _CONFIG, "/tmp/x", guardian, None)
        self._has_knocked = self._has_failed = False

    @property
    def is_well(self) -> bool:
        """Whether all was carried out, to the driver's last frame."""
        return self._has_knocked and not self._has_failed and self._agent._ending

    def run(self) -> None:
        """Raises AssertionError, and whatever the agent raises."""
        for valid in _LINE:
            for _ in range(self._chance.randrange(self._tries)):
                self.broken += 1
                data = self._broken(valid)
                if self._goes_on(data) or self._chance.random() < _ENDS:
                    self._send(data)
                if self._agent._ending:
                    return
            self._send(encode(*valid))
            if self._agent._ending:
                return

    def _goes_on(self, data: bytes) -> bool:
        """Whether the frame is taken, and not the last."""
        kinds = _kinds(data)
        is_first = self._agent._session_key is None and kinds != ["hello"]
        return bool(kinds) and "bye" not in kinds and not is_first

    def _broken(self, likely: Valid) -> bytes:
        if self._chance.random() > 0.15:
            return broken_bytes(self._chance, _LINE, likely)
        header, body = _start(self._chance.randrange(3))
        plan, _ = broken_frame(self._chance, json.loads(body), b"")
        return encode(header, json.dumps(plan).encode("ascii"))

    def _send(self, data: bytes) -> None:
        """The agent acts on it, and its workers go on."""
        self._channel.came.append(data)
        self._agent._receive()
        self._turn()
        self._host.move()
        self._end_one()
        for header in self._channel.sent:
            if header["type"] == "fault":
                assert header["cause"].startswith("the driver sent "), header
                assert self._agent._ending
                self._has_failed = True
            elif header["type"] == "reached" and header["relay_port"] and not self._has_knocked:
                self._has_knocked = True
                self._host.knock(header["relay_port"])
        self._channel.sent.clear()

    def _turn(self) -> None:
        """As Agent.run()."""
        agent = self._agent
        while agent._calls:
            agent._calls.popleft()()
        for call, _ in agent._selector.select(0.0):
            call()
        if agent._relay is not None:
            agent._relay.read_on()
        agent._workers.take_due_steps(self._chance.choice((0.0, time.monotonic(), 1e18)))

    def _end_one(self) -> None:
        living = [one for one in self._agent._workers._slots if one.end is None]
        if living and self._chance.random() < 0.1:
            self._agent._workers._finish(self._chance.choice(living), self._chance.choice((0, 256, 9)), 1)

    def close(self) -> None:
        """The agent ends: all its workers get their signals, and it tells the rest. Raises AssertionError."""
        try:
            if self._agent._ending:
                for one in self._agent._workers._slots:
                    assert one.end is not None or one.steps or one.worker.killed
            for one in self._agent._workers._slots:
                if one.end is None:
                    self._agent._workers._finish(one, 9, 1)
            self._agent._workers.output.finish_all()
        finally:
            self._agent.close()
            self._host.close()
            for end in self._pipes:
                os.close(end[0])
                os.close(end[1])


def _kinds(data: bytes) -> list[str]:
    """The types of the frames that an agent takes, as far as their forms go. Raises AssertionError."""
    try:
        frames = [*Decoder(ORDERS).feed(data)]
        for header, body in frames:
            if header["type"] == "start":
                _plan(body)
    except BadFrame as error:
        check_line(str(error))
        return []
    return [header["type"] for header, _ in frames]


def order_session(seed: int, *, is_broken: bool = True) -> int:
    """What a driver sends to an agent; how many frames were broken. Raises AssertionError, and whatever the agent raises."""
    session = _Session(seed, _TRIES if is_broken else 1)
    with _on(session._host):
        try:
            session.run()
            assert is_broken or session.is_well
        finally:
            session.close()
    return session.broken


def orders(seed: int) -> Iterator[bytes]:
    """What a driver sends to an agent: broken, but for what an agent would carry out with programs and files."""
    chance = random.Random(seed)
    harmless = [valid for valid in _LINE if not valid[1]]
    for header, body in _LINE:
        yield encode(header, body)
        if chance.random() < 0.3:
            yield broken_bytes(chance, harmless, chance.choice(harmless))
