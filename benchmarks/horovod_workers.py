"""The bootstrap of Horovod's workers, simulated: what their C++ client asks of the rendezvous, and when.

    python benchmarks/horovod_workers.py < MESH

MESH is one line of JSON (see Mesh), and so is the answer (see Bootstrap). As Horovod 0.28.1 does it, seen on the
wire: in each of the scopes global, local and cross, and in those of process set 0, a worker PUTs rank_<r>, GETs
rank_<i> of all i < r once, PUTs <r>, polls <i> of each other i every 10 ms and GETs it once more, meets the
others, and DELETEs <r>. Each request has a connection of its own. Any failure is tried again after 0.5 s, three times in all.
"""

import heapq
import json
import os
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load import cpu_of

__all__ = ["Bootstrap", "Mesh"]

_POLL = 0.010
_RETRY = 0.5
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Mesh:
    """`hosts` hosts with `slots` workers each, and the server: 127.0.0.1:`port`, process `pid`, `headers` for it.

    What has not ended after `limit` seconds is left.
    """

    port: int
    pid: int
    hosts: int
    slots: int
    headers: str
    limit: float


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Seconds until the last worker was ready, requests and how many of them found nothing, failed tries.

    `unfinished` workers were not ready when the time was over.
    """

    seconds: float
    requests: int
    in_vain: int
    failures: int
    unfinished: int
    client_cpu: float
    server_cpu: float


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; its status comes back."""

    method: str
    scope: str
    key: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Meet:
    """Wait until `size` workers are here."""

    place: str
    size: int


Action = Ask | Sleep | Meet


def worker(mesh: Mesh, host: int, slot: int) -> Iterator[Action]:
    """One worker; the status of each request is sent in."""
    scopes = [
        ("global", host * mesh.slots + slot, mesh.hosts * mesh.slots),
        (f"local_host{host}", slot, mesh.slots),
        (f"cross_{slot}", host, mesh.hosts),
    ]
    for suffix in ("", "_process_set_hash_0"):
        for scope, rank, size in scopes:
            yield from full_mesh(scope + suffix, rank, size)


def full_mesh(scope: str, rank: int, size: int) -> Iterator[Action]:
    yield Ask("PUT", scope, f"rank_{rank}", b"host-of-the-worker")
    for other in range(rank):
        yield Ask("GET", scope, f"rank_{other}")
    yield Ask("PUT", scope, str(rank), b"a" * 136 * (size - 1))
    for other in range(size):
        if other != rank:
            while (yield Ask("GET", scope, str(other))) == 404:  # noqa: PLR2004 - not there yet
                yield Sleep(_POLL)
            yield Ask("GET", scope, str(other))
    yield Meet(scope, size)
    yield Ask("DELETE", scope, str(rank))


class Call:
    """One request on a connection of its own."""

    def __init__(self, mesh: Mesh, number: int, ask: Ask) -> None:
        self.ask = ask
        self.number = number
        self.tries = 0
        self.got = b""
        head = f"{ask.method} /{ask.scope}/{ask.key} HTTP/1.1\r\nHost: 127.0.0.1\r\n{mesh.headers}"
        self.data = f"{head}Content-Length: {len(ask.body)}\r\n\r\n".encode() + ask.body
        self.where = "127.0.0.1", mesh.port
        self.source = f"127.0.1.{number // mesh.slots + 1}"

    def connect(self) -> int:
        self.tries += 1
        self.got = b""
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.bind((self.source, 0))
        self.socket.connect_ex(self.where)
        return self.socket.fileno()

    def receive(self) -> int | None:
        """The status, once the whole answer is there. Raises OSError."""
        piece = self.socket.recv(1 << 16)
        self.got += piece
        head, end, body = self.got.partition(b"\r\n\r\n")
        if end and len(body) >= length_in(head):
            return int(head[9:12])
        if not piece:
            raise ConnectionResetError("the server hung up")
        return None


def length_in(head: bytes) -> int:
    at = head.lower().index(b"content-length:")
    return int(head[at + 15 :].partition(b"\r\n")[0])


class Simulation:
    """All workers, in one thread."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        places = [(host, slot) for host in range(mesh.hosts) for slot in range(mesh.slots)]
        self.workers = [worker(mesh, host, slot) for host, slot in places]
        self.running = len(self.workers)
        self.epoll = select.epoll()
        self.calls: dict[int, Call] = {}
        self.sleepers: list[tuple[float, int, Call | None]] = []
        self.meetings: dict[str, list[int]] = {}
        self.statuses: Counter[int] = Counter()
        self.failures = 0

    def run(self) -> Bootstrap:
        client, server = cpu_of(os.getpid()), cpu_of(self.mesh.pid)
        begun = time.monotonic()
        for number in range(len(self.workers)):
            self._go_on(number, None)
        while self.running and time.monotonic() - begun < self.mesh.limit:
            self._wake()
            self._serve()
        seconds = time.monotonic() - begun
        client, server = cpu_of(os.getpid()) - client, cpu_of(self.mesh.pid) - server
        return Bootstrap(
            seconds, self.statuses.total(), self.statuses[404], self.failures, self.running, client, server
        )

    def _go_on(self, number: int, status: int | None) -> None:
        try:
            action = self.workers[number].send(status)  # type: ignore[attr-defined]
        except StopIteration:
            self.running -= 1
            return
        if isinstance(action, Ask):
            self._call(Call(self.mesh, number, action))
        elif isinstance(action, Sleep):
            heapq.heappush(self.sleepers, (time.monotonic() + action.seconds, number, None))
        else:
            here = self.meetings.setdefault(action.place, [])
            here.append(number)
            if len(here) == action.size:
                for one in self.meetings.pop(action.place):
                    self._go_on(one, None)

    def _call(self, call: Call) -> None:
        fd = call.connect()
        self.calls[fd] = call
        self.epoll.register(fd, select.EPOLLOUT)

    def _wake(self) -> None:
        while self.sleepers and self.sleepers[0][0] <= time.monotonic():
            _, number, call = heapq.heappop(self.sleepers)
            if call is None:
                self._go_on(number, None)
            else:
                self._call(call)

    def _serve(self) -> None:
        wait = 1.0
        if self.sleepers:
            wait = min(max(self.sleepers[0][0] - time.monotonic(), 0), wait)
        for fd, event in self.epoll.poll(wait):
            call = self.calls[fd]
            try:
                if event & select.EPOLLOUT and not event & select.EPOLLERR:
                    call.socket.send(call.data)
                    self.epoll.modify(fd, select.EPOLLIN)
                    continue
                status = call.receive()
            except OSError:
                status = 0
            if status is not None:
                self._ended(fd, call, status)

    def _ended(self, fd: int, call: Call, status: int) -> None:
        del self.calls[fd]
        call.socket.close()
        self.statuses[status] += 1
        if status in (200, 404):
            self._go_on(call.number, status)
            return
        self.failures += 1
        if call.tries == _TRIES:
            raise SystemExit(
                f"worker {call.number}: {call.ask} failed {_TRIES} times, the last with {status}"
            )
        heapq.heappush(self.sleepers, (time.monotonic() + _RETRY, call.number, call))


def main() -> None:
    print(json.dumps(asdict(Simulation(Mesh(**json.loads(sys.stdin.read()))).run())))


if __name__ == "__main__":
    main()
