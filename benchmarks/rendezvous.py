"""The rendezvous server beside others: small PUTs and GETs, and the bootstrap of 64 of Horovod's workers.

    pip install aiohttp uvloop torch    # for the table only; without them they are left out, and said so
    python benchmarks/rendezvous.py --runs 5

Each server is a process of its own, and so is the load (benchmarks/load.py, the same for all: it sends bytes and
counts bytes). What torch's TCPStore is sent is what torch's own client says, recorded at the start. Rates depend on
what else the machine does; the server's CPU per request, from /proc, hardly does. A server that has less than a
whole processor ("of one CPU") was waiting for the load, and could do more.
"""

import importlib.util
import json
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser
from benchmarks.horovod_workers import Bootstrap, Mesh
from benchmarks.load import Done, Plan, Step
from benchmarks.measure import Contender, heading, in_turns, spread, table
from benchmarks.rendezvous_servers import SERVERS, TOKEN

HERE = Path(__file__).parent
VALUE = b"v" * 100
PATH = "/benchmark/key"
TITLES = {
    ("hvlaunch", True): "hvlaunch",
    ("hvlaunch-asyncio", True): "hvlaunch without uvloop",
    ("hvlaunch-file", True): "hvlaunch with a store file",
    ("hvlaunch-fsync", True): "hvlaunch with --fsync",
    ("aiohttp", True): "aiohttp",
    ("http.server-kept", True): "http.server, tuned",
    ("TCPStore", True): "TCPStore",
    ("hvlaunch", False): "hvlaunch, a connection each",
    ("aiohttp", False): "aiohttp, a connection each",
    ("http.server-kept", False): "http.server, tuned, a connection each",
    ("http.server", False): "http.server, default",
}
SMALL = [
    *("verb", "connections", "server", "1000/s", "its CPU, us each", "of one CPU"),
    *("its CPU / hvlaunch's", "hvlaunch's rate / its"),
]
BOOTSTRAP = [
    *("server", "s", "workers not ready", "requests", "found nothing", "failed", "its CPU, us each"),
    *("s / hvlaunch's", "its CPU / hvlaunch's"),
]


class Server:
    """One of benchmarks/rendezvous_servers.py, running."""

    def __init__(self, name: str) -> None:
        self.name = name
        argv = [sys.executable, str(HERE / "rendezvous_servers.py"), name]
        # TCPStore asks the DNS for the name of each client's address, and all wait: so not for long.
        env = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())

    def __enter__(self) -> "Server":  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def request(method: str, body: bytes = b"") -> bytes:
    """What Horovod's workers send, with the token that hvlaunch wants besides."""
    head = f"{method} {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def http_step(server: Server, method: str) -> Step:
    """One request, and what this server answers."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        sent = request(method, VALUE if method == "PUT" else b"")
        connection.sendall(sent)
        reader = connection.makefile("rb")
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += reader.readline()
        announced = re.search(rb"(?i)content-length: *(\d+)", head)
        length = int(announced[1]) if announced else 0
        if b" 200 " not in head[:16] or reader.read(length) != (VALUE if method == "GET" else b""):
            raise SystemExit(f"{server.name} answered a {method} with {head!r}")
    return Step(sent.decode("latin-1"), head[:12].decode("latin-1"), len(head) + length)


def _relay(listener: socket.socket, port: int, said: list[tuple[bytes, bytes]]) -> None:
    """Pass on what one client and the server say, and note it: a question may come in pieces, and so may its answer."""
    client, _ = listener.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as onwards:
        question = b""
        while True:
            for side in select.select([client, onwards], [], [])[0]:
                data = side.recv(1 << 16)
                if not data:
                    return
                # Noted before it is passed on: who has the answer also finds the note.
                if side is client:
                    question += data
                elif question:
                    said.append((question, data))
                    question = b""
                else:
                    said[-1] = (said[-1][0], said[-1][1] + data)
                (onwards if side is client else client).sendall(data)


def tcp_store_steps(server: Server) -> tuple[list[Step], list[Step]]:
    """What torch's client says when it connects, and for a get: each thing sent, and what came back."""
    from torch.distributed import TCPStore  # noqa: PLC0415 (only where it is used)

    TCPStore("127.0.0.1", server.port, is_master=False).set("key", VALUE.decode())
    said: list[tuple[bytes, bytes]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relaying = threading.Thread(target=_relay, args=(listener, server.port, said))
        relaying.start()
        store = TCPStore("127.0.0.1", listener.getsockname()[1], is_master=False)
        greeting = len(said)
        if store.get("key") != VALUE:
            raise SystemExit("TCPStore lost the value")
        del store
        relaying.join()
    steps = [Step(sent.decode("latin-1"), back.decode("latin-1"), len(back)) for sent, back in said]
    return steps[:greeting], steps[greeting:]


@dataclass(frozen=True, slots=True)
class Rate:
    """One run. Requests per second, microseconds of CPU per request, the server's share of one processor.

    `client_cpu` as `cpu`; `failed` is how many connections were reset, of a hundred requests."""

    rate: float
    cpu: float
    busy: float
    client_cpu: float
    failed: float


def load(plan: Plan) -> Rate:
    done = Done(**_answer("load.py", plan))
    each = 1e6 / done.rounds
    return Rate(
        done.rounds / done.seconds,
        done.server_cpu * each,
        done.server_cpu / done.seconds,
        done.client_cpu * each,
        100 * done.failures / done.rounds,
    )


def _answer(script: str, given: Plan | Mesh) -> dict[str, Any]:
    argv = [sys.executable, str(HERE / script)]
    ended = subprocess.run(
        argv, input=json.dumps(asdict(given)), text=True, stdout=subprocess.PIPE, check=True
    )
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


class Small:
    """Small PUTs and GETs: for each number of connections and each verb, those who can."""

    def __init__(self, servers: Mapping[str, Server], connections: Sequence[int], seconds: float) -> None:
        self._servers = servers
        self._seconds = seconds
        self.cases = [(verb, count) for verb in ("PUT", "GET") for count in connections]
        kept = [
            "hvlaunch",
            "hvlaunch-file",
            "hvlaunch-fsync",
            "hvlaunch-asyncio",
            "aiohttp",
            "http.server-kept",
        ]
        self._ways = [*((name, True) for name in kept), ("hvlaunch", False), ("http.server", False)]

    def contenders(self, verb: str, count: int) -> list[Contender]:
        found = [
            self._contender(name, kept, verb, count) for name, kept in self._ways if name in self._servers
        ]
        if verb == "GET" and "TCPStore" in self._servers:
            found.append(self._tcp_store(count))
        return found

    def _contender(self, name: str, kept: bool, verb: str, count: int) -> Contender:
        server = self._servers[name]
        steps = [http_step(server, verb)]
        plan = Plan(server.port, server.process.pid, count, self._seconds, [], steps, kept)
        return Contender(TITLES[name, kept], partial(load, plan))

    def _tcp_store(self, count: int) -> Contender:
        server = self._servers["TCPStore"]
        greeting, steps = tcp_store_steps(server)
        plan = Plan(server.port, server.process.pid, count, self._seconds, greeting, steps, kept=True)
        return Contender(TITLES["TCPStore", True], partial(load, plan))


def small_rows(verb: str, count: int, found: Sequence[Contender]) -> list[list[str]]:
    """hvlaunch, the first, is compared with each, turn by turn."""
    lines = []
    for one in found:
        pairs = list(zip(found[0].samples, one.samples, strict=True))
        lines.append(
            [
                verb,
                str(count),
                one.name,
                spread([sample.rate / 1000 for sample in one.samples], 1),
                spread([sample.cpu for sample in one.samples], 0),
                f"{one.median('busy'):.2f}",
                f"{statistics.median(other.cpu / ours.cpu for ours, other in pairs):.1f}",
                f"{statistics.median(ours.rate / other.rate for ours, other in pairs):.1f}",
            ]
        )
    return lines


def bootstraps(servers: Mapping[str, Server], hosts: int, slots: int, limit: float) -> list[Contender]:
    found = []
    for name in ("hvlaunch", "aiohttp", "http.server-kept", "http.server"):
        if name in servers:
            headers = f"Authorization: Bearer {TOKEN}\r\n"
            mesh = Mesh(servers[name].port, servers[name].process.pid, hosts, slots, headers, limit)
            found.append(Contender(TITLES[name, False], partial(bootstrap, mesh)))
    return found


def bootstrap(mesh: Mesh) -> Bootstrap:
    return Bootstrap(**_answer("horovod_workers.py", mesh))


def bootstrap_rows(found: Sequence[Contender]) -> list[list[str]]:
    """hvlaunch, the first, is compared with each; CPU by the request, since not all ended."""
    each = {one.name: one.median("server_cpu") / one.median("requests") * 1e6 for one in found}
    return [
        [
            one.name,
            spread([sample.seconds for sample in one.samples], 1),
            f"{one.median('unfinished'):.0f}",
            f"{one.median('requests'):.0f}",
            f"{one.median('in_vain'):.0f}",
            f"{one.median('failures'):.0f}",
            f"{each[one.name]:.0f}",
            f"{one.median('seconds') / found[0].median('seconds'):.1f}",
            f"{each[one.name] / each[found[0].name]:.1f}",
        ]
        for one in found
    ]


def able() -> tuple[list[str], list[str]]:
    """The servers that can run here, and why the others can't."""
    needs = {"aiohttp": ("aiohttp", "uvloop"), "TCPStore": ("torch",), "hvlaunch": ("uvloop",)}
    missing = {
        name: [module for module in needs.get(name, ()) if importlib.util.find_spec(module) is None]
        for name in SERVERS
    }
    left_out = [
        f"{name} is left out: pip install {' '.join(wanted)}" for name, wanted in missing.items() if wanted
    ]
    return [name for name, wanted in missing.items() if not wanted], left_out


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="turns that count (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long one run lasts (default 1)")
    parser.add_argument(
        "--connections", type=int, nargs="*", default=[1, 16, 128, 512], help="how many (1 16 128 512)"
    )
    parser.add_argument("--hosts", type=int, default=8, help="of the bootstrap; 0 is none (default 8)")
    parser.add_argument("--slots", type=int, default=8, help="workers on each of them (default 8)")
    parser.add_argument("--bootstraps", type=int, default=3, help="turns of it that count (default 3)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one may take (default 120)")
    parser.add_argument(
        "--servers", nargs="*", choices=list(SERVERS), default=list(SERVERS), help="which (all)"
    )
    options = parser.parse_args()
    names, left_out = able()
    names = [name for name in names if name in options.servers]
    with ExitStack() as stack:
        servers = {name: stack.enter_context(Server(name)) for name in names}
        print(heading(f"Small values; median (least-most) of {options.runs} runs"), *left_out, sep="\n")
        small = Small(servers, options.connections, options.seconds)
        rows = []
        for verb, count in small.cases:
            found = small.contenders(verb, count)
            in_turns(found, options.runs)
            rows += small_rows(verb, count, found)
        if rows:
            print(table(SMALL, rows))
        if options.hosts:
            found = bootstraps(servers, options.hosts, options.slots, options.limit)
            in_turns(found, options.bootstraps)
            workers = options.hosts * options.slots
            print(heading(f"Bootstrap of {workers} of Horovod's workers; {options.bootstraps} runs"))
            print(table(BOOTSTRAP, bootstrap_rows(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
