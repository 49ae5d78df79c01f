"""What this host knows of how its workers and those of other hosts reach each other.

The kernel knows which of their connections get no acknowledgement (/proc/net/tcp: proc(5)). NCCL from 2.24 on answers
on a port of its own (RAS: docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html).
"""

from __future__ import annotations

import os
import socket
import struct
import time

from hvlaunch.agent.observer.proc import descendants, parents, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, Optional, Set

__all__ = ["RAS_PORT", "answer", "ask_ras"]

RAS_PORT = 28028
_RAS_SECONDS = 3
"""For the NCCL process that is asked, to hear from all others."""
_MORE_SECONDS = 3.0
_MOST_RAS = 4 << 20
_LONGEST_LINE = 256
_ESTABLISHED, _LISTENS = "01", "0A"
_REPEATS = "01"
"""The timer of a connection that repeats what it has sent; one whose peer does not read has another."""
_LEAST_REPEATS = 5
"""6 s at least, since pauses double from 0.2 s on."""
_MOST_PIDS = 4096
_MOST_ADDRESSES = 256


class _Connection:
    """A line of /proc/net/tcp."""

    def __init__(self, line: str) -> None:
        _, local, peer, self.state, _, timer, repeats, uid, _, self.inode = line.split()[:10]
        address, _, port = local.partition(":")
        self.address = _address(address)
        self.port = int(port, 16)
        self.peer = _address(peer.partition(":")[0])
        self.timer = timer.partition(":")[0]
        self.repeats = int(repeats, 16)
        self.uid = int(uid)


def answer(question: Dict[str, Any]) -> Dict[str, Any]:
    """Of `workers` (rank and pid): all their processes, the addresses that they use, who does not answer them, and what NCCL says."""
    ranks = {pid: rank for rank, pid in question["workers"]}
    trees = descendants(ranks, parents())
    addresses: Set[str] = set()
    unanswered = set()
    for root, tree in trees.items():
        sockets = {inode for pid in tree for inode in _sockets(pid)}
        for one in _connections("/proc/%d/net" % root):
            if one.inode in sockets and one.state == _ESTABLISHED:
                addresses.add(one.address)
                if one.timer == _REPEATS and one.repeats >= _LEAST_REPEATS:
                    unanswered.add((ranks[root], one.peer))
    return {
        "pids": [(ranks[root], pid) for root, tree in trees.items() for pid in tree][:_MOST_PIDS],
        "addresses": sorted(addresses)[:_MOST_ADDRESSES],
        "unanswered": sorted(unanswered)[:_MOST_ADDRESSES],
        "nccl": ask_ras(RAS_PORT),
    }


def _sockets(pid: int) -> Iterator[str]:
    """The inodes of those that a process has open."""
    try:
        descriptors = os.listdir("/proc/%d/fd" % pid)
    except OSError:
        return
    for descriptor in descriptors:
        try:
            target = os.readlink("/proc/%d/fd/%s" % (pid, descriptor))
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _connections(folder: str) -> Iterator[_Connection]:
    """All TCP sockets of a network namespace."""
    for name in ("tcp", "tcp6"):
        for line in (read_text("%s/%s" % (folder, name)) or "").splitlines()[1:]:
            yield _Connection(line)


def _address(text: str) -> str:
    """The kernel writes words of 4 bytes as numbers."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack("=%dI" % len(words), *words)
    if packed.startswith(bytes(10) + b"\xff\xff"):
        packed = packed[12:]  # IPv4 by a socket of IPv6
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)  # noqa: PLR2004 (bytes)


def ask_ras(port: int) -> Optional[str]:
    """What NCCL says of its communicators, as JSON, or as text where it knows no JSON; None where no NCCL of this user's answers."""
    ours = {
        one.address
        for one in _connections("/proc/self/net")
        if one.state == _LISTENS and one.port == port and one.uid == os.geteuid()
    }
    for address, anywhere in (("127.0.0.1", "0.0.0.0"), ("::1", "::")):  # noqa: S104 (it is only compared)
        if ours & {address, anywhere}:
            try:
                return _Ras(address, port).status()
            except (OSError, ValueError):
                continue
    return None


class _Ras:
    """A client, which asks for the state and changes nothing."""

    def __init__(self, address: str, port: int) -> None:
        self._deadline = time.monotonic() + _RAS_SECONDS + _MORE_SECONDS
        self._socket = socket.create_connection((address, port), _MORE_SECONDS)
        self._read = b""

    def status(self) -> str:
        """Raises OSError, ValueError."""
        with self._socket:
            if not self._say(b"CLIENT PROTOCOL 2").startswith(b"SERVER PROTOCOL "):
                raise ValueError("not NCCL")
            self._say(b"TIMEOUT %d" % _RAS_SECONDS)
            self._say(b"SET FORMAT json")  # where it is not known, the answer is an error, and text follows
            self._socket.sendall(b"VERBOSE STATUS\n")
            while self._more() and len(self._read) < _MOST_RAS:
                pass
            return self._read.decode("utf-8", "replace")

    def _say(self, words: bytes) -> bytes:
        """What it answers, in a line."""
        self._socket.sendall(words + b"\n")
        while b"\n" not in self._read:
            if len(self._read) > _LONGEST_LINE or not self._more():
                raise ValueError("no line")
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _more(self) -> bool:
        self._socket.settimeout(max(0.01, self._deadline - time.monotonic()))
        data = self._socket.recv(1 << 16)
        self._read += data
        return bool(data)
