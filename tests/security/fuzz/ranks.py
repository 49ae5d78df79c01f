"""What a launcher's process might send to its host's agent, besides descriptors; nothing runs."""

import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvlaunch.agent.quick import READ, Selector
from hvlaunch.agent.wire.frames import BadFrame, Decoder, encode
from hvlaunch.agent.workers import CannotStart
from hvlaunch.agent.workers.host_workers import exit_of
from hvlaunch.agent.workers.local_ranks import _REPORTS, LocalRanks, _Rank
from hvlaunch.driver.links.agent_channel import REPORTS
from tests.security.fuzz.broken import Valid, broken_bytes
from tests.security.fuzz.judge import check_line

__all__ = ["rank_session"]

_TRIES = 20
_ENDS = 0.05
_SLOT = 1
_LIFE: list[Valid] = [
    ({"type": "started", "pid": 7}, b""),
    ({"type": "parting", "cause": "got SIGTERM"}, b""),
    ({"type": "ended", "status": 256, "max_rss": 1}, b""),
]
_LINE: list[Valid] = [*_LIFE, *_LIFE, ({"type": "bye", "left": 0}, b"")]
_FRAMES: list[Valid] = [*_LINE, ({"type": "not_started", "code": 127, "cause": "x: command not found"}, b"")]


class _Session:
    """A process that lies, and its host's agent."""

    def __init__(self, seed: int, tries: int) -> None:
        self.broken = 0
        self.ends = 0
        self.is_over = False
        self._tries = tries
        self._chance = random.Random(seed)
        self._selector = Selector()
        self._process, ours = socket.socketpair()
        self._ranks = LocalRanks((ours, {}), self._selector, self._ended, check_line)
        self._rank = self._ranks._ranks[_SLOT] = _Rank(ours)
        self._selector.register(ours, READ, lambda: self._ranks._receive(_SLOT, self._rank))
        self._is_ordered = False

    def _ended(self, slot: int, status: int, max_rss: int) -> None:
        """As HostWorkers.end_of()."""
        assert slot == _SLOT
        end = exit_of(status, max_rss)
        assert (end["code"] is None) != (end["signal"] is None)
        shapes: Any = REPORTS["exited"]
        assert all(shapes.fields[name](value) for name, value in end.items()), end
        self.ends += 1

    def run(self) -> None:
        """Raises AssertionError, and whatever the agent raises."""
        for header, body in _LINE:
            if header["type"] == "started":
                self._ranks.order(_SLOT, ["x"], {}, {}, with_stdin=True)
                self._is_ordered = True
            for _ in range(self._chance.randrange(self._tries)):
                self.broken += 1
                data = broken_bytes(self._chance, _FRAMES, (header, body))
                is_sent = _is_taken(data) and not self._is_ordered  # where it would be the answer
                if is_sent or self._chance.random() < _ENDS:
                    self._send(data, self._chance.randrange(5) if self._chance.random() < 0.2 else 0)
                if self.is_over:
                    return
            self._send(encode(header, body), 3 if header["type"] == "started" else 0)
            if self.is_over:
                return

    def _send(self, data: bytes, count: int) -> None:
        """The agent acts on it."""
        fds = [self._descriptor() for _ in range(count)]
        with suppress(BrokenPipeError):
            socket.send_fds(self._process, [data], fds)
        for fd in fds:
            os.close(fd)
        if not _is_whole(data, is_answer=self._is_ordered):
            self._process.shutdown(socket.SHUT_WR)  # the rest would be waited for
        if self._is_ordered:
            self._take_answer()
        for call, _ in self._selector.select(0.0):
            call()
        self.is_over = self._rank.has_left

    def _take_answer(self) -> None:
        self._is_ordered = False
        try:
            worker = self._ranks.started(_SLOT, "")
        except CannotStart as error:
            assert error.code in (126, 127)
            check_line(error.cause)
            self.is_over = True
            return
        assert worker.stdin is not None
        for fd in (worker.stdin, *worker.output.values()):
            assert not os.get_inheritable(fd)
            os.close(fd)

    def _descriptor(self) -> int:
        if self.broken and self._chance.random() < 0.1:
            return os.open(self._chance.choice(("/dev/null", "/", __file__)), os.O_RDONLY)
        end, other = os.pipe()
        os.close(other)
        return end

    def close(self) -> None:
        self._process.close()
        self._ranks.finish()
        self._rank.close()
        self._selector.close()


def _is_taken(data: bytes) -> bool:
    """Whether they are frames of such a process, as far as their forms go. Raises AssertionError."""
    try:
        list(Decoder(_REPORTS, 0).feed(data))
    except BadFrame as error:
        check_line(str(error))
        return False
    return True


def _is_whole(data: bytes, *, is_answer: bool) -> bool:
    """Whether the agent, which has been sent it, waits for no more."""
    decoder = Decoder(_REPORTS, 0)
    try:
        kinds = {header["type"] for header, _ in decoder.feed(data)}
    except BadFrame:
        return True
    return not decoder._have and not (is_answer and kinds <= {"parting"})


def _descriptors() -> set[str]:
    links = list(Path("/proc/self/fd").iterdir())
    return {link.name for link in links if link.is_symlink()}  # the listing's own is gone by now


@contextmanager
def _no_descriptor_left() -> Iterator[None]:
    before = _descriptors()  # of which earlier tests may have left some, until their objects go
    yield
    assert not _descriptors() - before


def rank_session(seed: int, *, is_broken: bool = True) -> int:
    """What a launcher's process sends to its agent; how many frames were broken.

    Raises AssertionError, and whatever the agent raises.
    """
    with _no_descriptor_left():
        session = _Session(seed, _TRIES if is_broken else 1)
        try:
            session.run()
            assert is_broken or (session.ends, session.is_over) == (2, False)
        finally:
            session.close()
    return session.broken
