"""Connections of workers to other hosts, as the kernel and NCCL see them, and the collectives that they are at.

The kernel knows the connections without acknowledgement (/proc/net/tcp: proc(5)). NCCL from 2.24 on answers on a port
of its own (RAS: docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html). Workers with
hvlaunch.torch answer on a socket in the job's private directory (hvlaunch/torch/backends.py).
"""

from __future__ import annotations

import os
import socket
import struct
import time

from hvlaunch.agent.proc import descendants, parents, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

__all__ = ["RAS_PORT", "answer", "ask_ras"]

RAS_PORT = 28028
_RAS_SECONDS = 3
"""Seconds that NCCL gives its other processes to answer."""
_MORE_SECONDS = 3.0
_MOST_RAS = 4 << 20
_LONGEST_LINE = 256
_ESTABLISHED, _LISTENS = "01", "0A"
_REPEATS = "01"
"""Timer of a connection that repeats data. A peer that does not read causes another timer."""
_LEAST_REPEATS = 5
"""6 s at least, since pauses double from 0.2 s on."""
_MOST_PIDS = 4096
_MOST_ADDRESSES = 256
_MOST_COLLECTIVES = 1 << 13
"""Bytes of a worker's answer."""
_COLLECTIVES_SECONDS = 1.5
"""Seconds for all workers together. A worker whose Python is stuck never answers."""


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
    """Report on `workers` (rank and pid): processes, local addresses, silent peers, newest collectives, and NCCL's view."""
    ranks = {pid: rank for rank, pid in question["workers"]}
    trees = descendants(ranks, parents())
    addresses: Set[str] = set()
    unanswered = set()
    for root, tree in trees.items():
        sockets = {inode for pid in tree for inode in _sockets(pid)}
        for connection in _connections("/proc/%d/net" % root):
            if connection.inode in sockets and connection.state == _ESTABLISHED:
                addresses.add(connection.address)
                if connection.timer == _REPEATS and connection.repeats >= _LEAST_REPEATS:
                    unanswered.add((ranks[root], connection.peer))
    return {
        "pids": [(ranks[root], pid) for root, tree in trees.items() for pid in tree][:_MOST_PIDS],
        "addresses": sorted(addresses)[:_MOST_ADDRESSES],
        "unanswered": sorted(unanswered)[:_MOST_ADDRESSES],
        "collectives": [(ranks[root], words) for root, words in _collectives(trees, question["scratch"])],
        "nccl": ask_ras(RAS_PORT),
    }


def _collectives(trees: Mapping[int, Iterable[int]], scratch: str) -> Iterator[Tuple[int, str]]:
    """Ask the workers' processes for their newest collectives, all at once; yield their answers."""
    asked: List[Tuple[int, socket.socket]] = []
    for root, tree in trees.items():
        for pid in tree:
            client = socket.socket(socket.AF_UNIX)
            client.settimeout(0.0)
            try:
                client.connect(os.path.join(scratch, "collectives.%d" % pid))
            except OSError:  # it has no such socket, or does not take connections from it any more
                client.close()
            else:
                asked.append((root, client))
    deadline = time.monotonic() + _COLLECTIVES_SECONDS
    for root, client in asked:
        with client:
            try:
                yield root, _read_all(client, deadline).decode("ascii")
            except (OSError, ValueError):
                continue


def _read_all(client: socket.socket, deadline: float) -> bytes:
    """Raises OSError without an end in time, ValueError for a long answer."""
    text = b""
    while len(text) <= _MOST_COLLECTIVES:
        client.settimeout(max(0.01, deadline - time.monotonic()))
        data = client.recv(1 << 12)
        if not data:
            return text
        text += data
    raise ValueError("too long")


def _sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's open sockets."""
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
    """Yield the TCP sockets of a network namespace."""
    for name in ("tcp", "tcp6"):
        for line in (read_text("%s/%s" % (folder, name)) or "").splitlines()[1:]:
            yield _Connection(line)


def _address(text: str) -> str:
    """Parse an address: the kernel writes each 4 bytes as a number in its own byte order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack("=%dI" % len(words), *words)
    if packed.startswith(bytes(10) + b"\xff\xff"):
        packed = packed[12:]  # IPv4 by a socket of IPv6
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)  # noqa: PLR2004 (bytes)


def ask_ras(port: int) -> Optional[str]:
    """Ask NCCL for its communicators, as JSON, or as text from an old NCCL; None without a NCCL process of this user."""
    # Any user may listen on the port: only a NCCL process of this user is asked.
    ours = {
        connection.address
        for connection in _connections("/proc/self/net")
        if connection.state == _LISTENS and connection.port == port and connection.uid == os.geteuid()
    }
    # The port may be bound to the loopback or to every address.
    for address, anywhere in (("127.0.0.1", "0.0.0.0"), ("::1", "::")):  # noqa: S104 (it is only compared)
        if ours & {address, anywhere}:
            try:
                return _Ras(address, port).status()
            except (OSError, ValueError):
                continue
    return None


class _Ras:
    """A client of NCCL's RAS port that only reads."""

    def __init__(self, address: str, port: int) -> None:
        self._deadline = time.monotonic() + _RAS_SECONDS + _MORE_SECONDS
        self._socket = socket.create_connection((address, port), _MORE_SECONDS)
        self._read = b""

    def status(self) -> str:
        """Return NCCL's report. Raises OSError, ValueError."""
        with self._socket:
            if not self._say(b"CLIENT PROTOCOL 2").startswith(b"SERVER PROTOCOL "):
                raise ValueError("not NCCL")
            self._say(b"TIMEOUT %d" % _RAS_SECONDS)
            self._say(b"SET FORMAT json")  # where it is not known, the answer is an error, and text follows
            self._socket.sendall(b"VERBOSE STATUS\n")
            # Bounded: thousands of ranks make a long report.
            while self._more() and len(self._read) < _MOST_RAS:
                pass
            return self._read.decode("utf-8", "replace")

    def _say(self, words: bytes) -> bytes:
        """Send a line; return the line of the answer."""
        self._socket.sendall(words + b"\n")
        while b"\n" not in self._read:
            if len(self._read) > _LONGEST_LINE or not self._more():
                raise ValueError("no line")
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _more(self) -> bool:
        # One deadline for the whole exchange: a peer that sends byte by byte must not prolong it.
        self._socket.settimeout(max(0.01, self._deadline - time.monotonic()))
        data = self._socket.recv(1 << 16)
        self._read += data
        return bool(data)
