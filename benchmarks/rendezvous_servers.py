"""The key-value servers that benchmarks/rendezvous.py compares: one, in a process of its own.

    python benchmarks/rendezvous_servers.py NAME

prints its port and serves until stdin ends, or until SIGTERM. Those that speak HTTP have the same routes: `/<scope>/<key>` is a
value, PUT sets it, GET gives it or 404, DELETE forgets it.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

__all__ = ["SERVERS", "TOKEN"]

TOKEN = "the-token-of-the-benchmark"


def until_stdin_ends() -> None:
    with contextlib.suppress(ValueError):
        sys.stdin.read()


def ready(port: int) -> None:
    print(port, flush=True)


def hvlaunch(*, uvloop: bool = True, on_disk: bool = False, sync: bool = False) -> None:
    if not uvloop:
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # as where it is not installed
    from hvlaunch.rendezvous.serving import RendezvousServer  # noqa: PLC0415 (each only where it is used)
    from hvlaunch.rendezvous.serving.store_record import StoreFile  # noqa: PLC0415 (as above)

    # /tmp may be in memory, where a sync costs nothing.
    place = os.environ.get("TMPDIR", "/var/tmp")
    with tempfile.TemporaryDirectory(prefix="rendezvous-", dir=place) as directory:
        file = StoreFile.create(Path(directory, "store"), sync=sync) if on_disk else None
        with RendezvousServer(TOKEN, host="127.0.0.1", file=file) as server:
            ready(server.port)
            until_stdin_ends()


def standard_library(*, at_its_best: bool = False) -> None:
    """A thread for each connection. As it comes: HTTP/1.0, a connection for each request, as Horovod has it.

    At its best: kept connections, and answers that leave in one piece, so that nobody waits for TCP's delayed
    acknowledgements.
    """
    values: dict[str, bytes] = {}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        if at_its_best:
            protocol_version = "HTTP/1.1"
            wbufsize = -1

        def answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            with lock:
                value = values.get(self.path)
            if value is None:
                self.answer(404)
            else:
                self.answer(200, value)

        def do_PUT(self) -> None:
            value = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                values[self.path] = value
            self.answer(200)

        def do_DELETE(self) -> None:
            with lock:
                values.pop(self.path, None)
            self.answer(200)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        if at_its_best:
            request_queue_size = 1024

        def handle_error(self, *_: object) -> None:
            pass  # the load ends with its connections open

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ready(server.server_address[1])
    until_stdin_ends()


def aiohttp() -> None:
    """On uvloop, as hvlaunch's."""
    import uvloop  # noqa: PLC0415 (each only where it is used)
    from aiohttp import web  # noqa: PLC0415 (each only where it is used)

    values: dict[str, bytes] = {}

    async def get(request: web.Request) -> web.Response:
        value = values.get(request.path)
        return web.Response(status=404) if value is None else web.Response(body=value)

    async def put(request: web.Request) -> web.Response:
        values[request.path] = await request.read()
        return web.Response()

    async def delete(request: web.Request) -> web.Response:
        values.pop(request.path, None)
        return web.Response()

    async def serve() -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/{scope}/{key}", get),
                web.put("/{scope}/{key}", put),
                web.delete("/{scope}/{key}", delete),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        ready(runner.addresses[0][1])
        await asyncio.get_running_loop().run_in_executor(None, until_stdin_ends)

    uvloop.run(serve())


def tcp_store() -> None:
    """Torch's, with libuv, as it comes."""
    from torch.distributed import TCPStore  # noqa: PLC0415 (each only where it is used)

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ready(store.port)
    until_stdin_ends()


SERVERS: dict[str, Callable[[], None]] = {
    "hvlaunch": hvlaunch,
    "hvlaunch-asyncio": lambda: hvlaunch(uvloop=False),
    "hvlaunch-file": lambda: hvlaunch(on_disk=True),
    "hvlaunch-fsync": lambda: hvlaunch(on_disk=True, sync=True),
    "http.server": standard_library,
    "http.server-kept": lambda: standard_library(at_its_best=True),
    "aiohttp": aiohttp,
    "TCPStore": tcp_store,
}

if __name__ == "__main__":
    # By default Python ends at once, and its temporary folders stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    SERVERS[sys.argv[1]]()
