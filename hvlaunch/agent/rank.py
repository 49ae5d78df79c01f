"""The first code that runs where a launcher (mpirun, srun) starts a process: who of a host's processes is its agent.

The host's first process is. Each of the others asks it, at a Unix socket, for the program of a starter, and becomes
that. The socket's name is in no file system, so that nothing can be left behind; no other user can know it before it is
taken, and both sides look whose the other is.
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
    """Be this host's agent, or a starter of it.

    `pairs` name the variables of a process's rank among all and on its host, the best first; `caller` is the
    program of an agent, agent/wire/caller.py, packed.
    """
    rank, local = _ranks(pairs)
    mark = zlib.crc32(
        os.environ["HVLAUNCH_ENTRY"].encode("ascii")
    )  # so few of its bits help nobody to guess it
    where = "\0hvlaunch %s %08x %d" % (os.environ["HVLAUNCH_DRIVER_CERT"], mark, rank - local)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if local > 0:
        for name in ("HVLAUNCH_ENTRY", "HVLAUNCH_DRIVER_CERT", "HVLAUNCH_DRIVER"):
            del os.environ[name]
        _join(link, where, rank, local)
    ranks: Optional[socket.socket] = None
    if rank >= 0:
        try:
            link.bind(where)
        except OSError as error:
            _fail("its processes can't meet: %s" % error)
        link.listen(_MOST)
        ranks = link
    exec(zlib.decompress(a2b_base64(caller)), {"__name__": "__main__", "ranks": ranks})  # noqa: S102


def _ranks(pairs: Sequence[Tuple[str, str]]) -> Tuple[int, int]:
    """Our rank, and our rank on this host; -1 and 0 where the launcher tells none: that is the driver's to report."""
    for names in pairs:
        rank, local = (os.environ.get(name, "") for name in names)
        if rank.isdigit() and local.isdigit():
            return int(rank), int(local)
    return -1, 0


def _join(link: socket.socket, where: str, rank: int, local: int) -> NoReturn:
    """Become a starter, of the program that this host's agent has; wait for the agent as long as the launcher lives."""
    parent = os.getppid()
    pause = _FIRST_PAUSE
    while True:
        try:
            link.connect(where)
            break
        except OSError:
            if os.getppid() != parent:
                sys.exit(1)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid = int.from_bytes(peer[4:8], sys.byteorder)
    if uid != os.geteuid():
        _fail("user %d is where its first process should be" % uid)
    try:
        link.sendall(b"%8d%8d" % (rank, local) + MAGIC_NUMBER)
        program = _exactly(link, int.from_bytes(_exactly(link, 4), "big"))
    except OSError:
        sys.exit(1)  # the agent has no use for us, and says why itself
    for name, code in marshal.loads(program):  # noqa: S302 (our own user's, which is where our agent should be)
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
            raise OSError("the agent hung up")
        data += part
    return data


def _fail(cause: str) -> NoReturn:
    sys.exit("hvlaunch: host %s: %s" % (os.uname().nodename, cause))
