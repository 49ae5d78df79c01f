"""Where agents call the driver that a launcher has started: strangers' TLS, and what comes before and behind the word.

And the other side: what calls meets somebody who is not the driver.
"""

import contextlib
import json
import random
import ssl
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

from hvlaunch.agent.wire.caller import Sealed, _Calls
from hvlaunch.mpi import ALL_NAMES, calls
from hvlaunch.mpi.calls import AgentCaller, CallLimits, CallListener
from hvlaunch.rendezvous.serving.certificate import Certificate, tls_context
from tests.security.fuzz.broken import broken_frame, changed_bytes

__all__ = ["call_session", "door_session", "stranger_session"]

_WORD = "the-word-that-lets-agents-in"
_FEW = 4
_LONGEST = 256


@cache
def _certificates() -> tuple[Certificate, Certificate]:
    """The driver's, and somebody else's."""
    return Certificate(), Certificate()


@cache
def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    ours, theirs = _certificates()
    return tls_context(ours), tls_context(theirs)


@cache
def _door() -> CallListener:
    listener = CallListener(_WORD, _certificates()[0], lambda _: None, CallLimits(), host="127.0.0.1")
    listener.close()
    return listener


def _client() -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """An agent's end of TLS, what comes to it, and what it sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    return context.wrap_bio(incoming, outgoing), incoming, outgoing


def _shake(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


class _Socket:
    """What the other side sends is made by `answer`, of what it has heard; nothing is its end."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self._waiting = b""
        self._heard = b""
        self.all_heard = b""

    def recv(self, size: int) -> bytes:
        if not self._waiting:
            heard, self._heard = self._heard, b""
            self._waiting = self._answer(heard)
        data, self._waiting = self._waiting[:size], self._waiting[size:]
        return data

    def sendall(self, data: bytes) -> None:
        self._heard += data
        self.all_heard += data

    def setsockopt(self, *_: int) -> None:
        pass

    def settimeout(self, _: float | None) -> None:
        pass


class _Agent:
    """Calls as it should, until it is told to break what it sends next."""

    def __init__(self, chance: random.Random, said: bytes, breaks_at: int) -> None:
        """`breaks_at` is the number of what it sends that is broken on its way; there may be none such."""
        self._chance = chance
        self._said = said
        self._tls, self._incoming, self._outgoing = _client()
        self._is_shaken = False
        self._breaks_at = breaks_at
        self._number = 0
        self.has_broken = False

    def answer(self, heard: bytes) -> bytes:
        self._incoming.write(heard)
        if not self._is_shaken:
            self._is_shaken = _shake(self._tls)
            if self._is_shaken:
                self._tls.write(self._said)
        data = self._outgoing.read()
        if self._number == self._breaks_at and data:
            data = changed_bytes(self._chance, data)
            self.has_broken = True
        self._number += 1
        return data


def _part(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _told(chance: random.Random, *, is_broken: bool) -> bytes:
    """What an agent tells: the word, its name, and its variables; something of it may be broken."""
    facts = {"facts": ["node1", {name: str(chance.randrange(4)) for name in sorted(ALL_NAMES)}]}
    valid = _part(_WORD.encode()) + _part(json.dumps(facts["facts"]).encode("ascii"))
    if not is_broken:
        return valid
    how = chance.random()
    if how < 0.1:
        return _part(changed_bytes(chance, _WORD.encode())) + valid[4 + len(_WORD) :]
    if how < 0.2:
        return changed_bytes(chance, valid)
    broken, _ = broken_frame(chance, facts, b"")
    data = json.dumps(broken.get("facts")).encode("ascii")
    if how < 0.3:
        data = changed_bytes(chance, data)
    return _part(_WORD.encode()) + _part(data)


def _meet(sock: Any) -> AgentCaller | None:
    """As the listener does; None where who called is refused. Raises AssertionError, and whatever is a defect."""
    try:
        caller = _door()._check(sock, _contexts()[0])
    except (OSError, ValueError):
        return None
    assert caller.hostname.isprintable()
    assert len(caller.hostname) <= _LONGEST
    assert caller.environ.keys() <= ALL_NAMES
    assert all(value.isprintable() and len(value) <= _LONGEST for value in caller.environ.values())
    return caller


class _Open:
    """In place of Sealed, for what comes behind a handshake: `said` has come."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    def __call__(self, *_: object, **__: object) -> "_Open":
        return self

    def shake_hands(self) -> None:
        pass

    def receive(self, size: int) -> bytes:
        assert size <= CallLimits().facts
        if size > len(self._said):
            raise OSError("the other side closed the connection")
        data, self._said = self._said[:size], self._said[size:]
        return data


def door_session(seed: int, *, is_broken: bool = True) -> int:
    """What callers tell behind a handshake; how many of them were broken. Raises AssertionError, and whatever is a defect."""
    chance = random.Random(seed)
    for _ in range(_FEW):
        told = _told(chance, is_broken=is_broken)
        with mock.patch.object(calls, "Sealed", _Open(told)):
            caller = _meet(_Socket(lambda _: b""))
        assert caller is None or told.startswith(_part(_WORD.encode()))
        assert is_broken or caller is not None
    return _FEW if is_broken else 0


@cache
def _hello() -> bytes:
    tls, _, outgoing = _client()
    _shake(tls)
    return outgoing.read()


def _next(said: Iterator[bytes], _heard: bytes) -> bytes:
    return next(said, b"")


def stranger_session(seed: int, *, is_broken: bool = True) -> int:
    """A stranger's handshakes: hellos that are broken, then one that may be broken anywhere on its way."""
    chance = random.Random(seed)
    for _ in range(_FEW - 1 if is_broken else 0):
        said = iter([changed_bytes(chance, _hello()), chance.choice((b"", _hello(), chance.randbytes(100)))])
        assert _meet(_Socket(partial(_next, said))) is None
    agent = _Agent(chance, _told(chance, is_broken=is_broken), 9 if not is_broken else chance.randrange(4))
    sock = _Socket(agent.answer)
    caller = _meet(sock)
    assert _WORD.encode() not in sock.all_heard
    if not is_broken:
        assert caller is not None
        return 0
    if caller is not None:
        _break_behind(chance, caller, agent)
    return _FEW - 1 + (agent.has_broken or caller is not None)


def _break_behind(chance: random.Random, caller: AgentCaller, agent: _Agent) -> None:
    """It was let in: what is changed on its way from now on ends the connection."""
    agent._tls.write(b"frames")
    data = agent._outgoing.read()
    changed = changed_bytes(chance, data)
    with contextlib.suppress(OSError):
        assert caller.connection.open(changed) in (b"", b"frames")


def call_session(seed: int, *, is_broken: bool = True) -> int:
    """Who answers is not the driver, or what it says is changed on its way: it is told nothing."""
    chance = random.Random(seed)
    is_driver = not is_broken or chance.random() < 0.7
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = _contexts()[not is_driver].wrap_bio(incoming, outgoing, server_side=True)

    def answer(heard: bytes) -> bytes:
        incoming.write(heard)
        with contextlib.suppress(ssl.SSLError):
            tls.do_handshake()
        data = outgoing.read()
        return changed_bytes(chance, data) if is_broken and is_driver and data else data

    sock = _Socket(answer)
    calls = _Calls(_WORD.encode(), _certificates()[0].fingerprint, b'["node1",{}]', 30.0)
    try:
        calls._meet(sock)  # type: ignore[arg-type]
    except OSError:
        assert is_broken
        assert calls._driver is None
    else:
        assert is_driver
        assert isinstance(calls._driver, Sealed)
    assert _WORD.encode() not in sock.all_heard
    return int(is_broken)
