"""A driver that is there before anybody asks for it: forked, and with memory of its own."""

import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from hvlaunch.agent.own_pages import take_own_pages
from hvlaunch.agent.quick import prctl
from hvlaunch.forked.driver import Asker, be_driver
from hvlaunch.forked.programs import Program
from hvlaunch.forked.request import unpacked
from hvlaunch.outside.forked import HEAD_SIZE, MOST_DESCRIPTORS

__all__ = ["Spare", "fork_spare"]

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # prctl(2)


class Spare(NamedTuple):
    """Waits at `link` for who asks."""

    pid: int
    link: socket.socket

    def give(self, asker: int, request: bytes, descriptors: Sequence[int]) -> None:
        """Let it be the driver for this process. Raises OSError where it has ended."""
        with self.link:
            head = asker.to_bytes(HEAD_SIZE, "big") + len(request).to_bytes(HEAD_SIZE, "big")
            socket.send_fds(self.link, [head], descriptors)
            self.link.sendall(request)

    def drop(self) -> None:
        """Nobody will ask any more. Waits for its end."""
        self.link.close()
        os.waitpid(self.pid, 0)


def fork_spare(let_go: Callable[[], None], programs: Mapping[str, Program], *, is_wanted: bool) -> Spare:
    """One that calls `let_go` first; `is_wanted` is whether somebody waits for it. Raises OSError."""
    server = os.getpid()
    ours, theirs = socket.socketpair()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            ours.close()
            let_go()
            _be_spare(theirs, server, programs, is_wanted=is_wanted)
    except OSError:  # too many processes
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return Spare(pid, ours)


def _be_spare(
    link: socket.socket, server: int, programs: Mapping[str, Program], *, is_wanted: bool
) -> NoReturn:
    try:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would hear how it ended
        if os.getppid() != server:
            os._exit(0)
        prctl(_PR_SET_NAME, b"hvl-spare")
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if not is_wanted:
            take_own_pages()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())  # who ends it now ends no job
        asker = _receive(link)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        link.close()
    except (OSError, ValueError):
        os._exit(0)
    be_driver(asker, programs[asker.request.program].run)


def _receive(link: socket.socket) -> Asker:
    """Raises OSError, ValueError."""
    head, descriptors, _, _ = socket.recv_fds(link, 2 * HEAD_SIZE, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    size = int.from_bytes(head[HEAD_SIZE:], "big")
    data = bytearray()
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            break
        data += part
    if not data:
        raise ConnectionResetError
    return Asker(int.from_bytes(head[:HEAD_SIZE], "big"), unpacked(bytes(data)), descriptors)
