"""A fuzzer for the rendezvous server: broken requests on real connections, for as long as you like.

    python benchmarks/fuzz_rendezvous.py --seconds 3600
    python benchmarks/fuzz_rendezvous.py --seed 7 --executions 500    # the same ones again

It breaks requests of tests/unit/rendezvous/corpus.py, some with the right token and some with a wrong one, and sends
each in pieces. Whatever is sent, what comes back is a row of whole answers, or nothing, and then the end; without the
token none of them is a success; no exception reaches the event loop; no connection and no waiter is left; the
process' memory stops growing. The numbers are printed every so often, and with the seed at a failure.
"""

import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.command_line import argument_parser
from benchmarks.measure import mebibytes
from hvlaunch.rendezvous.serving import RendezvousServer, routes
from hvlaunch.rendezvous.serving.traffic import HttpLimits
from hvlaunch.rendezvous.store import StoreLimits
from tests.unit.rendezvous.corpus import HOSTILE, VALID
from tests.unit.rendezvous.wire import TOKEN

__all__ = ["Broken", "Fuzzer", "serve"]

_ANSWER = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) [A-Za-z ]+\r\n((?:[A-Za-z-]+: [ -~]*\r\n)*)\r\n")
_LENGTH = re.compile(rb"(?:^|\n)Content-Length: ([0-9]+)\r\n")
_PATIENCE = 30.0
_LONGEST = 1_000_000
_WORDS = [
    *(
        b"\r\n",
        b"\r",
        b"\n",
        b"\0",
        b" ",
        b"\t",
        b":",
        b"%",
        b"%00",
        b"%2f",
        b"/",
        b"//",
        b"/-/",
        b"?",
        b"&",
        b"=",
    ),
    *(
        b"-1",
        b"0",
        b"1",
        b"ffffffffffffffff",
        b"18446744073709551616",
        b"9" * 5000,
        b"1e9",
        b"\xff",
        b"\xc3\x28",
    ),
    *(
        b"Content-Length: 5\r\n",
        b"Content-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: close\r\n",
    ),
    *(
        b"Connection: upgrade\r\nUpgrade: h2c\r\n",
        b"Expect: 100-continue\r\n",
        b"HTTP/1.0",
        b"HTTP/2.0",
        b"chunked",
    ),
    *(
        b"0\r\n\r\n",
        b"\r\n\r\n",
        b"?wait=0.01",
        b"?since=1",
        b"?version=0",
        b"?id=x",
        b'"',
        b"[",
        b"]",
        b"{",
        b"null",
    ),
]


class Broken(Exception):
    """The server did what it must not do; the text says what, and what was sent."""


@contextmanager
def serve() -> Iterator[RendezvousServer]:
    """A server with limits that a fuzzer gets to, and waits that it has the time for."""
    longest, routes.MAX_WAIT = routes.MAX_WAIT, 0.05
    try:
        with RendezvousServer(
            TOKEN,
            host="127.0.0.1",
            store_limits=StoreLimits(value=50_000, total=1_000_000, keys=500, deletions=500, waiting=1000),
            http_limits=HttpLimits(head=8 << 10, body=60_000, exchange=20.0, linger=1.0),
        ) as server:
            server.expect(["127.0.0.1"])
            yield server
    finally:
        routes.MAX_WAIT = longest


class Fuzzer:
    """Breaks requests, by `seed`, and sends them to the server."""

    def __init__(self, server: RendezvousServer, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._seeds = [*(data for data, _ in HOSTILE.values()), *VALID * 8]
        self.executions = 0
        self.statuses: Counter[int] = Counter()
        self._mutations: list[Callable[[bytes], bytes]] = [
            *(self._flip, self._insert, self._insert, self._cut, self._repeat, self._splice, self._number),
        ]

    def run_one(self) -> None:
        """One connection. Raises Broken."""
        data = self._make()
        known = self._random.random() < 0.8  # noqa: PLR2004 - a fifth are strangers
        if not known:
            data = data.replace(TOKEN.encode(), b"another-token!")
        given = self._talk(data)
        self.executions += 1
        for status in self._answers(given, data):
            self.statuses[status] += 1
            if not known and status < 400:  # noqa: PLR2004 - success
                raise Broken(f"a stranger got {status} for {data!r}")

    def check(self) -> None:
        """That nothing is left of what was sent. Raises Broken."""
        until = time.monotonic() + _PATIENCE
        while (stats := self._server.stats()).connections or stats.waiting:
            if time.monotonic() > until:
                raise Broken(f"connections or waiters are left: {stats}")
            time.sleep(0.01)
        if stats.faults:
            raise Broken(f"{stats.faults} exceptions reached the event loop")

    def _make(self) -> bytes:
        data = b"".join(self._random.choices(self._seeds, k=self._random.choice((1, 1, 2, 3))))
        for _ in range(self._random.choice((0, 1, 1, 2, 3, 5, 10))):
            data = self._random.choice(self._mutations)(data)[:_LONGEST]
        return data

    def _talk(self, data: bytes) -> bytes:
        given = bytearray()
        address = ("127.0.0.1", self._server.port)
        with suppress(ConnectionError), socket.create_connection(address, _PATIENCE) as connection:
            for piece in self._pieces(data):
                connection.sendall(piece)
            with suppress(OSError):  # it has cut us off already
                connection.shutdown(socket.SHUT_WR)
            try:
                while piece := connection.recv(1 << 16):
                    given += piece
            except TimeoutError as error:
                raise Broken(f"the server neither answers nor hangs up after {data!r}") from error
        return bytes(given)

    def _pieces(self, data: bytes) -> list[bytes]:
        cuts = sorted(self._random.choices(range(len(data) + 1), k=self._random.choice((0, 0, 1, 3))))
        return [
            data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if end > begin
        ]

    def _answers(self, given: bytes, data: bytes) -> list[int]:
        """Their statuses. A last one may lack its end: the server cuts off who sends more than it takes."""
        found = []
        at = 0
        while at < len(given):
            answer = _ANSWER.match(given, at)
            if answer is None:
                raise Broken(f"no answer is {given[at:][:200]!r}, to {data!r}")
            status = int(answer[1])
            found.append(status)
            at = answer.end()
            if status != 100:  # noqa: PLR2004 - Continue
                length = _LENGTH.search(answer[2])
                if length is None:
                    raise Broken(f"an answer without its length: {answer[0]!r}")
                # The answer to a HEAD says nothing of a body, and what it would have is not sent.
                end = at + int(length[1])
                at = at if _ANSWER.match(given, at) and b"HEAD" in data else end
        return found

    # Mutations:

    def _place(self, data: bytes) -> int:
        return self._random.randrange(len(data) + 1)

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return data
        at = self._random.randrange(len(data))
        return data[:at] + self._random.randbytes(1) + data[at + 1 :]

    def _insert(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + self._random.choice(_WORDS) + data[at:]

    def _cut(self, data: bytes) -> bytes:
        begin, end = sorted((self._place(data), self._place(data)))
        return data[:begin] + data[min(end, begin + self._random.choice((1, 5, 50, 10_000))) :]

    def _repeat(self, data: bytes) -> bytes:
        begin, end = sorted((self._place(data), self._place(data)))
        return data[:end] + data[begin:end] * self._random.choice((1, 2, 20)) + data[end:]

    def _splice(self, data: bytes) -> bytes:
        other = self._random.choice(self._seeds)
        return data[: self._place(data)] + other[self._place(other) :]

    def _number(self, data: bytes) -> bytes:
        numbers = list(re.finditer(rb"[0-9]+", data))
        if not numbers:
            return data
        number = self._random.choice(numbers)
        new = self._random.choice(
            (b"0", b"1", b"-1", b"%d" % self._random.randrange(1 << 70), number[0] + b"0")
        )
        return data[: number.start()] + new + data[number.end() :]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long (default 60)")
    parser.add_argument("--executions", type=int, default=sys.maxsize, help="how many at most")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="the same fuzz again")
    parser.add_argument("--asyncio", action="store_true", help="on asyncio's own event loop, not uvloop")
    options = parser.parse_args()
    if options.asyncio:
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # as where it is not installed
    process = psutil.Process()
    begun = shown = time.monotonic()
    with serve() as server:
        fuzzer = Fuzzer(server, options.seed)
        print(f"seed {options.seed}", flush=True)
        try:
            while fuzzer.executions < options.executions and time.monotonic() - begun < options.seconds:
                fuzzer.run_one()
                if time.monotonic() - shown > 30:  # noqa: PLR2004 - seconds
                    shown = time.monotonic()
                    fuzzer.check()
                    memory = mebibytes(process.memory_info().rss)
                    print(f"{shown - begun:.0f} s, {fuzzer.executions} executions, {memory} MiB", flush=True)
            fuzzer.check()
        except Broken as error:
            print(f"seed {options.seed}, execution {fuzzer.executions}: {error}")
            return 1
        stats = server.stats()
        print(
            f"{fuzzer.executions} executions, {stats.faults} faults, {mebibytes(process.memory_info().rss)} MiB"
        )
        print(" ".join(f"{status}:{count}" for status, count in sorted(fuzzer.statuses.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
