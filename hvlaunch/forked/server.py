"""The process that forks drivers. It has one thread, and never waits for one of those who ask."""

import gc
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from hvlaunch.agent.quick import prctl
from hvlaunch.forked.programs import Program, preload, programs_of
from hvlaunch.forked.request import unpacked
from hvlaunch.forked.spare import Spare, fork_spare
from hvlaunch.outside.forked import (
    ENDED,
    FORKED,
    GO,
    HEAD_SIZE,
    MOST_DESCRIPTORS,
    READY,
    REFUSED,
    answer,
)

__all__ = ["ForkServer", "main"]

_PR_SET_NAME = 15  # prctl(2)
_OBJECTS_PER_COLLECTION = 100_000  # see hvlaunch/__main__.py
_READ_SIZE = 1 << 16
_LONGEST_REQUEST = 1 << 23
"""Bytes. The kernel takes 2 MiB of arguments and environment, by default."""
_PATIENCE = 5.0
"""Seconds for who asks, until there is a driver."""
_SIGNALS = frozenset(
    (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGSTOP,
        signal.SIGCONT,
    )
)
"""What may be sent to a driver."""
_SPARE_AFTER = 0.1
"""Seconds after the end of a job, in which there may be more to do for it."""
_SPARE_AGAIN = 10.0
"""Seconds after one could not be had, or somebody has ended it."""


class _Link:
    """The connection of one who asks."""

    def __init__(self, connection: socket.socket, pid: int, since: float) -> None:
        self.connection = connection
        self.pid = pid
        self.since = since
        self.data = b""
        """What has come and is not yet understood."""
        self.descriptors: list[int] = []
        self.request = b""
        self.program: Program | None = None
        """What was asked for; who asks was told that it is READY."""
        self.driver: int | None = None
        """The pid of the driver, until it has ended."""
        self.is_killed = False
        self.is_gone = False

    def close(self) -> None:
        self.connection.close()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class ForkServer:
    """Answers at `listener` until `owner` ends, and goes on with the drivers that there are then."""

    def __init__(
        self,
        listener: socket.socket,
        owner: socket.socket,
        programs: Mapping[str, Program],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._owner = owner
        self._programs = programs
        self._clock = clock
        self._links: list[_Link] = []
        self._is_up = True
        self._is_ending = False
        """Whether it was told so."""
        self._spare: Spare | None = None
        self._spare_at = clock()
        """When there is to be one."""
        self._woken, self._wake = socket.socketpair()
        for each in (listener, self._woken, self._wake):
            each.setblocking(False)

    def serve(self) -> None:
        """Must be called in the main thread of a process that has no other."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end_soon)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        while self._is_up or self._links:
            self._renew_spare()
            self._turn()

    def _turn(self) -> None:
        ready: dict[int, Callable[[], None]] = {self._woken.fileno(): self._wake_up}
        if self._is_up:
            ready[self._listener.fileno()] = self._accept
            ready[self._owner.fileno()] = self._end
        for link in self._links:
            if not link.is_gone:
                ready[link.connection.fileno()] = lambda link=link: self._read(link)  # type: ignore[misc]
        poll = select.poll()
        for descriptor in ready:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(self._patience()):
            ready[descriptor]()
        for link in [each for each in self._links if self._is_over(each)]:
            self._links.remove(link)
            link.close()
            self._spare_at = self._clock() + _SPARE_AFTER

    def _patience(self) -> float | None:
        """Milliseconds until there may be something to do."""
        if any(link.driver is None for link in self._links):
            return _PATIENCE * 1000
        if self._is_up and self._spare is None and not self._links:
            return max(0.0, self._spare_at - self._clock()) * 1000
        return None

    def _is_over(self, link: _Link) -> bool:
        return link.driver is None and (link.is_gone or self._clock() > link.since + _PATIENCE)

    def _end(self) -> None:
        """The pool has ended, in whichever way, or somebody ends all processes."""
        self._is_up = False
        self._listener.close()
        self._owner.close()
        if self._spare is not None:
            self._spare.drop()
            self._spare = None

    def _end_soon(self, *_: object) -> None:
        self._is_ending = True

    def _accept(self) -> None:
        with suppress(OSError):  # it has gone, or no descriptor is left
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            pid, uid, _ = struct.unpack(
                "iii", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iii"))
            )
            if uid == os.geteuid():
                self._links.append(_Link(connection, pid, self._clock()))
            else:
                connection.close()

    def _read(self, link: _Link) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                link.connection, _READ_SIZE, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        link.descriptors += descriptors
        link.data += data
        if not data:
            self._hang_up(link)
        elif link.driver is None:
            self._hear(link)
        if link.driver is not None:
            for number in link.data:
                self._send_signal(link, number)
            link.data = b""
            link.close_descriptors()

    def _hang_up(self, link: _Link) -> None:
        link.is_gone = True
        if link.driver is not None and link.is_killed:
            os.kill(link.driver, signal.SIGKILL)

    def _send_signal(self, link: _Link, number: int) -> None:
        if number in _SIGNALS and link.driver is not None:
            os.kill(link.driver, number)

    def _hear(self, link: _Link) -> None:
        """Go on with what has come of a request, or of GO."""
        if link.program is not None:
            if link.data[0] == GO and len(link.descriptors) == link.program.descriptors:
                link.data = link.data[1:]
                self._begin(link, link.program)
            else:
                self._say(link, REFUSED)
            return
        size = int.from_bytes(link.data[:HEAD_SIZE], "big")
        if len(link.data) < HEAD_SIZE or (len(link.data) < HEAD_SIZE + size <= _LONGEST_REQUEST):
            return
        link.request, link.data = link.data[HEAD_SIZE:], b""
        link.program = self._program(link.request) if len(link.request) == size else None
        self._say(link, REFUSED if link.program is None else READY)

    def _program(self, data: bytes) -> Program | None:
        """What it asks for; None where it can't be had here."""
        try:
            request = unpacked(data)
        except ValueError:
            return None
        program = self._programs.get(request.program)
        if program is None or program.setting != request.setting:
            return None
        return program if program.may_run(request) else None

    def _say(self, link: _Link, kind: int, number: int = 0) -> None:
        with suppress(OSError):  # it has gone, which is seen when it is read
            link.connection.send(answer(kind, number))
        if kind in (REFUSED, ENDED):
            link.is_gone = True

    def _begin(self, link: _Link, program: Program) -> None:
        try:
            link.driver = self._give(link)
        except OSError:  # too many processes
            self._say(link, REFUSED)
            return
        link.is_killed = program.is_killed
        self._say(link, FORKED, link.driver)

    def _give(self, link: _Link) -> int:
        """The pid of the driver. Raises OSError."""
        if self._spare is not None:
            spare, self._spare = self._spare, None
            with suppress(OSError):  # somebody has ended it
                spare.give(link.pid, link.request, link.descriptors)
                return spare.pid
        spare = fork_spare(self._let_go, self._programs, is_wanted=True)
        spare.give(link.pid, link.request, link.descriptors)
        return spare.pid

    def _renew_spare(self) -> None:
        if self._is_up and self._spare is None and not self._links and self._clock() >= self._spare_at:
            self._spare_at = self._clock() + _SPARE_AGAIN
            with suppress(OSError):  # too many processes
                self._spare = fork_spare(self._let_go, self._programs, is_wanted=False)

    def _let_go(self) -> None:
        """In the driver: close what is the server's."""
        for each in (self._listener, self._owner, self._woken, self._wake):
            each.close()
        for link in self._links:
            link.close()

    def _wake_up(self) -> None:
        """A driver has ended, or this is to end."""
        with suppress(BlockingIOError):
            while self._woken.recv(_READ_SIZE):
                pass
        if self._is_ending:
            self._end()
        if self._spare is not None and os.waitpid(self._spare.pid, os.WNOHANG)[0]:
            self._spare.link.close()
            self._spare = None
        for link in self._links:
            if link.driver is not None:
                ended, status = os.waitpid(link.driver, os.WNOHANG)
                if ended:
                    link.driver = None
                    self._say(link, ENDED, os.waitstatus_to_exitcode(status))


def main(listener: int, owner: int, pool: str) -> NoReturn:
    """Serve at the socket of this pool."""
    prctl(_PR_SET_NAME, b"hvl-drivers")
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    for each in (signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    preload()
    gc.collect()
    gc.freeze()  # else looking for garbage makes copies of it all in a driver
    ForkServer(socket.socket(fileno=listener), socket.socket(fileno=owner), programs_of(pool)).serve()
    os._exit(0)
