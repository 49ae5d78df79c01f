"""The first code in a process of a launcher (mpirun, srun): become the host's agent, or a starter.

The host's first process becomes the agent. The others get the program of a starter from it, at a Unix socket in the
abstract namespace, which leaves no file. No other user can know its name before it is taken, and both sides check the
other's user.
"""

from __future__ import annotations

import marshal
import os
import sys
import time
import zlib
from _frozen_importlib_external import MAGIC_NUMBER
from binascii import a2b_base64

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import NoReturn, Optional, Sequence, Tuple
else:
    try:
        import _socket as socket
    except ImportError:
        import socket

__all__ = ["main"]

_MOST = 4096  # processes that may wait to be let in
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05


def main(pairs: Sequence[Tuple[str, str]], caller: str) -> None:
    """Become this host's agent, or a starter.

    `pairs` name the variables for the rank in the job and on the host, the most reliable first; `caller` is the packed
    program for the agent, agent/wire/caller.py.
    """
    rank, local = _ranks(pairs)
    # A checksum in the name is no help in guessing the word itself.
    mark = zlib.crc32(os.environ["HVLAUNCH_ENTRY"].encode("ascii"))
    name_of_socket = "\0hvlaunch %s %08x %d" % (os.environ["HVLAUNCH_DRIVER_CERT"], mark, rank - local)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if local > 0:
        # Only the agent calls the driver, so workers of other ranks need not have the word.
        for name in ("HVLAUNCH_ENTRY", "HVLAUNCH_DRIVER_CERT", "HVLAUNCH_DRIVER"):
            del os.environ[name]
        _join(link, name_of_socket, rank, local)
    ranks: Optional[socket.socket] = None
    if rank >= 0:
        try:
            link.bind(name_of_socket)
        except OSError as error:
            _fail("the launcher's processes on it can't connect to each other: %s" % error)
        link.listen(_MOST)
        ranks = link
    exec(zlib.decompress(a2b_base64(caller)), {"__name__": "__main__", "ranks": ranks})  # noqa: S102


def _ranks(pairs: Sequence[Tuple[str, str]]) -> Tuple[int, int]:
    """Return the rank in the job and on this host; -1 and 0 without these variables, which the driver then reports."""
    for names in pairs:
        rank, local = (os.environ.get(name, "") for name in names)
        if rank.isdigit() and local.isdigit():
            return int(rank), int(local)
    return -1, 0


def _join(link: socket.socket, name_of_socket: str, rank: int, local: int) -> NoReturn:
    """Get the starter's program from this host's agent and run it; wait for the agent while the launcher lives."""
    parent = os.getppid()
    pause = _FIRST_PAUSE
    while True:
        try:
            link.connect(name_of_socket)
            break
        except OSError:
            # The launcher's daemon is gone if another process has become the parent.
            if os.getppid() != parent:
                sys.exit(1)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid = int.from_bytes(peer[4:8], sys.byteorder)
    if uid != os.geteuid():
        _fail("user %d listens in place of its first process" % uid)
    try:
        link.sendall(b"%8d%8d" % (rank, local) + MAGIC_NUMBER)
        program = _exactly(link, int.from_bytes(_exactly(link, 4), "big"))
    except OSError:
        sys.exit(1)  # the agent does not need this process, and reports the reason itself
    for name, code in marshal.loads(program):  # noqa: S302 (from this user's own agent)
        # Made by hand, because an import system for the few modules would take longer than they do.
        module = sys.modules[name] = type(sys)(name)
        exec(code, module.__dict__)  # noqa: S102
    os.dup2(link.fileno(), 0)
    link.close()
    sys.modules["hvlaunch.agent.starter"].main()
    os._exit(1)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise OSError("the agent closed the connection")
        data += part
    return data


def _fail(cause: str) -> NoReturn:
    sys.exit("hvlaunch: host %s: %s" % (os.uname().nodename, cause))
