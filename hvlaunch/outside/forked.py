"""Drivers that a warm pool forks: what asks for one, and has it from then on as if it had started it.

Beside the process of a pool is its fork server (hvlaunch/forked/), which has loaded all that a job needs. Asked at the socket
in the pool's directory it forks a driver, in a tenth of the time that Python takes to start one. On the wire:

1. A request: its length, and a body of words. The server answers READY, or REFUSED where it can't do it.
2. One byte, GO, and with it descriptors: the working directory, and those that the driver is to have as 0, 1, 2 ... Until then
   either side may go away, and nothing was begun. The server answers FORKED with the driver's pid, or REFUSED.
3. A byte for each signal that the driver is to get. The server tells ENDED with how the driver has ended. Who hangs up
   before that kills a driver that has asked for it.
"""

from __future__ import annotations

import os
import sys

from hvlaunch.agent.quick import peer_uid, signal, socket
from hvlaunch.outside.setting import setting, soft_limits, umask

TYPE_CHECKING = False  # typing takes 4 ms, more than all else here
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "ANSWER_SIZE",
    "ENDED",
    "FORKED",
    "GO",
    "HEAD_SIZE",
    "MOST_DESCRIPTORS",
    "READY",
    "REFUSED",
    "SOCKET",
    "ForkedDriver",
    "answer",
    "begin_driver",
    "packed",
]

SOCKET = "drivers"
"""Its name in the directory of the pool."""
GO = 0
READY, REFUSED, FORKED, ENDED = range(4)
HEAD_SIZE = 4
ANSWER_SIZE = 5
MOST_DESCRIPTORS = 5
_PATIENCE = 1.0
"""Seconds for a server that is asked; it takes milliseconds."""
_KILLED = -signal.SIGKILL
_LONGEST = 100  # bytes, as in directory.py


def packed(program: str, argv: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """A driver that is wanted, as this process would have started it: forked/request.py reads it. Raises OSError, ValueError."""
    # A function's driver is always started alike; see api/child.py.
    about = setting(environ if program == "command line" else None)
    lists: list[Sequence[str]] = [
        [program, about, str(umask())],
        argv,
        sys.path,
        [f"{name}={value}" for name, value in environ.items()],
        [f"{number}={limit}" for number, limit in soft_limits().items()],
        [*map(str, os.sched_getaffinity(0))],
        [str(number) for number in range(1, 32) if signal.getsignal(number) == signal.SIG_IGN],
    ]
    words = [word for each in lists for word in each]
    if any("\0" in word for word in words):
        raise ValueError("a word with a NUL")
    return os.fsencode("\0".join([",".join(str(len(each)) for each in lists), *words]))


def answer(kind: int, number: int = 0) -> bytes:
    """What the server says: READY, REFUSED, FORKED with a pid, ENDED with an exit code or a signal, which is negative."""
    return bytes([kind]) + number.to_bytes(4, "big", signed=True)


class ForkedDriver:
    """A driver, as if it were a child of this process: with what of subprocess.Popen is needed of one."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self.pid = pid
        self._link = link
        self._end: int | None = None

    def send_signal(self, number: int) -> None:
        """For any thread, and for handlers of signals. Nothing happens when it has ended."""
        if self._end is None:
            try:  # noqa: SIM105 (as above: contextlib)
                self._link.send(bytes([number]))
            except OSError:
                pass  # it has ended in this moment

    def wait(self) -> int:
        """How it has ended: its exit code, or the signal, which is negative. Once, by one thread."""
        if self._end is None:
            try:
                kind, number = _receive(self._link)
            except OSError:
                kind, number = ENDED, _KILLED  # with the server, see there
            self._end = number if kind == ENDED else _KILLED
            self._link.close()
        return self._end


def begin_driver(
    pool: str, program: str, descriptors: Sequence[int], *, argv: Sequence[str], environ: Mapping[str, str]
) -> ForkedDriver | None:
    """A driver that the fork server of this pool forks; None where it can't be, and nothing was begun.

    `pool` is the pool's directory, `program` one of those of the server, and `descriptors` are what the driver has as 0, 1, 2 ...
    """
    if not sys.platform.startswith("linux"):
        return None
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(_PATIENCE)
        pid = _ask(link, pool, program, descriptors, argv, environ)
        if pid is not None:
            link.settimeout(None)
            return ForkedDriver(link, pid)
    except (OSError, ValueError):
        pass
    link.close()
    return None


def _ask(
    link: socket.socket,
    pool: str,
    program: str,
    descriptors: Sequence[int],
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> int | None:
    """The driver's pid. Raises OSError and ValueError, where nothing was begun."""
    _connect(link, pool)
    if peer_uid(link) not in (0, os.geteuid()):
        return None
    request = packed(program, argv, environ)
    link.sendall(len(request).to_bytes(HEAD_SIZE, "big") + request)
    if _receive(link)[0] != READY:
        return None
    here = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        link.settimeout(None)  # from here on there is no way back
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (here, *descriptors))
        link.sendmsg([bytes([GO])], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    finally:
        os.close(here)
    kind, pid = _receive(link)
    return pid if kind == FORKED else None


def _connect(link: socket.socket, pool: str) -> None:
    """Raises OSError."""
    path = f"{pool}/{SOCKET}"
    if len(os.fsencode(path)) <= _LONGEST:
        link.connect(path)
        return
    directory = os.open(pool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        link.connect(f"/proc/self/fd/{directory}/{SOCKET}")
    finally:
        os.close(directory)


def _receive(link: socket.socket) -> tuple[int, int]:
    """What the server says next: kind and number. Raises OSError where it says no more."""
    data = b""
    while len(data) < ANSWER_SIZE:
        part = link.recv(ANSWER_SIZE - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data[0], int.from_bytes(data[1:], "big", signed=True)
