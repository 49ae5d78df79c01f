"""The process of a warm pool, `hvlaunch pool up`: keeps a connection and a warm agent on each host, and serves this user's programs.

It answers at the socket in its directory (outside/pools.py): one request for each connection, a line of JSON. The request
`lane` turns the connection into a pool stream; every other request gets an answer.
"""

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from hvlaunch import __version__
from hvlaunch.agent.quick import loads
from hvlaunch.agent.warm import ORDERS
from hvlaunch.agent.wire.frames import misfit
from hvlaunch.console.printer import Printer
from hvlaunch.console.status import AskStatus, OnStatus, Status, counted
from hvlaunch.driver.program import agent_command, python_candidates, warm_bundle
from hvlaunch.engine.codec import encode
from hvlaunch.errors import BadUsage, HostsFailed, Problem
from hvlaunch.hosts.local import is_local
from hvlaunch.hosts.parse import host_set
from hvlaunch.job import ConsoleOptions, Host, JobSpec, SSHOptions
from hvlaunch.outside import IN_MAKING, JobDirectory, has_driver, remove
from hvlaunch.owners import peer_is_own
from hvlaunch.pool.host import PoolStream, WarmHost
from hvlaunch.rendezvous.serving.certificate import Certificate
from hvlaunch.ssh import Connection, Ways, connect_by_agent

__all__ = ["WarmPool", "hold_pool", "printed_status"]

_LAST_WORDS = 1.0
"""Seconds that a blocked terminal gets for the last message."""


def hold_pool(
    root: Path,
    name: str,
    spec: JobSpec,
    *,
    idle_timeout: float,
    on_ready: Callable[[list[Problem]], None],
    on_status: OnStatus,
    owner: int | None = None,
) -> None:
    """Connect to the hosts of `spec`, call `on_ready` with the problems of some hosts, and serve until the end.

    The pool's directory is in `root`, under its name. The pool ends after `idle_timeout` seconds without a job, or when the
    `owner`, a file descriptor, is at its end. `on_status` gets the progress of connecting.

    Raises BadUsage, NoJobDirectory, HostsFailed.
    """
    if has_driver(root / name):
        raise BadUsage(
            f"pool {name} is up",
            hint=f"hvlaunch pool status {name}, hvlaunch pool down {name}, or another name",
        )
    # A pool whose process was killed leaves its directory, or one that is not whole.
    with suppress(OSError):
        remove(root / name)
    with suppress(OSError):
        remove(root / f"{IN_MAKING}{name}")
    # This machine needs neither ssh nor a warm agent.
    hosts = [host for host in spec.hosts if not is_local(host)]
    with (
        _signals() as on_signal,
        closing(JobDirectory(root, name, _about(name, spec))) as directory,
        closing(directory.listen()) as listener,
        _connect(spec) as connect,
        closing(WarmPool(name, spec, hosts, connect, idle_timeout=idle_timeout)) as pool,
    ):
        on_signal(pool.stop)
        problems = list(pool.start(on_status))
        # A pool without any host is of no use, whatever the options say.
        if problems and (not spec.skip_bad_hosts or len(problems) == len(spec.hosts)):
            raise HostsFailed(problems)
        on_ready(problems)
        pool.serve(listener, owner)


def printed_status(console: ConsoleOptions, stderr: BinaryIO) -> OnStatus:
    """Return a function that shows the progress on `stderr` until it gets None."""
    printer = Printer(stderr, stderr, options=console)

    def show(ask: AskStatus | None) -> None:
        if not console.quiet:
            printer.status(ask)
        if ask is None:
            printer.close(_LAST_WORDS)

    return show


def _about(name: str, spec: JobSpec) -> dict[str, object]:
    return {
        "name": name,
        "version": __version__,
        "machine": os.uname().nodename,
        "pid": os.getpid(),
        "began": time.time(),
        "hosts": encode(tuple[Host, ...], spec.hosts),
        "ssh": encode(SSHOptions, spec.ssh),
        "remote_python": spec.remote_python,
    }


@contextmanager
def _connect(spec: JobSpec) -> Iterator[Callable[[Host], Connection]]:
    if spec.ssh.remote_agent is not None:
        yield partial(connect_by_agent, spec.ssh.remote_agent)
        return
    with closing(Ways(spec.ssh, timeout=spec.start_timeout)) as ways:
        yield ways.connect


@contextmanager
def _signals() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Within the block, SIGTERM and SIGHUP call the functions that were registered, instead of ending the process."""
    # The block's end closes the pool, and must not be cut short. A signal may come before the first registration.
    calls: list[Callable[[], None]] = []
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        received.append(number)
        for call in calls:
            call()

    def on_signal(call: Callable[[], None]) -> None:
        calls.append(call)
        if received:
            call()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield on_signal
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_LOOK = 1.0
_SOON = 0.1
"""Seconds until the next check while the next job has no certificate yet."""
_PAUSE = 0.05
_REQUEST_PATIENCE = 10.0
_READ_SIZE = 1 << 16
_LONGEST_REQUEST = 1 << 22


class WarmPool:
    """The hosts of a pool, and the server for its socket."""

    def __init__(
        self,
        name: str,
        spec: JobSpec,
        hosts: Sequence[Host],
        connect: Callable[[Host], Connection],
        *,
        idle_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a pool. Pool and warm agents give each other up after the lease of `spec`.

        `connect` connects to a host; the pool ends after `idle_timeout` seconds without a job.
        """
        self._name = name
        self._idle_timeout = idle_timeout
        self._clock = clock
        self._used = clock()
        self._over = threading.Event()
        self._stop, self._stopped = socket.socketpair()
        program = warm_bundle(spec.lease)
        self._hosts = {
            host.name: WarmHost(
                host,
                connect,
                (
                    agent_command(
                        python_candidates(host.python or spec.remote_python), len(program), spec.start_timeout
                    ),
                    program,
                ),
                spec.lease,
                start_timeout=spec.start_timeout,
            )
            for host in hosts
        }
        self._certificate: Certificate | None = None
        """For the next job, to save the import of a library."""
        self._lock = threading.Lock()

    def start(self, on_status: OnStatus) -> Sequence[Problem]:
        """Connect to all hosts, and return the problems of unreachable hosts, to be tried again later.

        `on_status` gets the progress, and None at the end.
        """
        began = self._clock()
        for host in self._hosts.values():
            host.start()
        on_status(lambda: self._progress(began))
        for host in self._hosts.values():
            host.tried.wait()
        on_status(None)
        return [host.problem for host in self._hosts.values() if host.problem is not None]

    def _progress(self, began: float) -> Status:
        waiting = [name for name, host in self._hosts.items() if not host.tried.is_set()]
        failed = sum(host.problem is not None for host in self._hosts.values())
        ready, of = len(self._hosts) - len(waiting) - failed, len(self._hosts)
        so_far = f"connecting {counted(ready, of, failed, self._clock() - began)}"
        return Status(f"{so_far}\nwaiting for {host_set(waiting)}" if waiting else so_far, ready, of)

    def serve(self, listener: socket.socket, owner: int | None = None) -> None:
        """Serve until stop(), until the idle timeout, or until the `owner` (a descriptor) is at its end."""
        listener.setblocking(False)
        poll = select.poll()
        for socket_ in (listener, self._stopped):
            poll.register(socket_, select.POLLIN)
        if owner is not None:
            threading.Thread(target=self._await, args=(owner,), name="owner", daemon=True).start()
        look_at = self._clock()
        while not self._over.is_set():
            # Not at each request: a job sends one for each host.
            if self._clock() >= look_at:
                self._look()
                look_at = self._clock() + (_LOOK if self.has_certificate else _SOON)
            poll.poll(max(0.0, look_at - self._clock()) * 1000)
            self._accept(listener)

    @property
    def has_certificate(self) -> bool:
        """Whether the next job gets a certificate."""
        return self._certificate is not None

    def _prepare_certificate(self) -> None:
        if not self.has_certificate:
            certificate = Certificate()
            certificate.key  # noqa: B018 (a certificate is made when it is first used)
            with self._lock:
                self._certificate = certificate

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # Out of file descriptors. The connection stays in the queue, so poll() would return at once.
            self._over.wait(_PAUSE)
            return
        link.setblocking(True)
        threading.Thread(target=self._hear, args=(link,), name="request", daemon=True).start()

    def _look(self) -> None:
        for host in self._hosts.values():
            host.check_lease()
        if any(host.streams for host in self._hosts.values()):
            self._used = self._clock()
            return
        # Only while no job runs: it takes processor time.
        self._prepare_certificate()
        if self._clock() > self._used + self._idle_timeout:
            self._over.set()

    def _await(self, owner: int) -> None:
        with suppress(OSError):
            # The owner was killed.
            while os.read(owner, 1 << 10):
                pass
        self.stop()

    def stop(self) -> None:
        """Make serve() return. Safe in signal handlers and other threads."""
        self._over.set()
        with suppress(OSError):
            # The pool is closed already.
            self._stop.send(b"\0")

    def close(self) -> None:
        """End all warm agents."""
        for host in self._hosts.values():
            host.close()
        for end in (self._stop, self._stopped):
            end.close()

    def _hear(self, link: socket.socket) -> None:
        with link, suppress(OSError):
            if not peer_is_own(link):
                return
            request, surplus = _request_of(link)
            if request is None:
                link.sendall(_line({"refused": "the request is not understood"}))
            elif request["what"] == "lane":
                self._serve_stream(link, request, surplus)
            else:
                link.sendall(_line(self._answer(request)))

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        match request["what"]:
            case "begin":
                return self._begin()
            case "hosts":
                return {"hosts": self._facts(), "idle": self._clock() - self._used}
            case "down":
                jobs = sorted({job for facts in self._facts().values() for job in facts["jobs"]})
                if jobs:
                    return {"refused": f"pool {self._name} is used by {len(jobs)} jobs", "jobs": jobs}
                self.stop()
                return {}
            case _:
                return {"refused": f"hvlaunch {__version__} knows no such request"}

    def _begin(self) -> Mapping[str, Any]:
        """Return what a job needs at its start."""
        # A certificate has a private key: no two jobs may get the same.
        with self._lock:
            certificate, self._certificate = self._certificate, None
        pem = None if certificate is None else (certificate.key + certificate.pem).decode("ascii")
        return {"hosts": self._facts(), "certificate": pem}

    def _facts(self) -> dict[str, dict[str, Any]]:
        return {name: host.facts() for name, host in self._hosts.items()}

    def _serve_stream(self, link: socket.socket, request: Mapping[str, Any], begun: bytes) -> None:
        host, job, config = (request.get(name) for name in ("host", "job", "config"))
        warm_host = self._hosts.get(str(host))
        opening = {"type": "open", "lane": 1, "config": config}
        if warm_host is None or not isinstance(job, str) or misfit(ORDERS, opening, b"") is not None:
            return
        self._used = self._clock()
        warm_host.serve(PoolStream(link, job, begun), request["config"])


def _request_of(link: socket.socket) -> tuple[dict[str, Any] | None, bytes]:
    """Read a request, and the bytes behind its line, which belong to a pool stream; None for a malformed request."""
    link.settimeout(_REQUEST_PATIENCE)
    received = b""
    while b"\n" not in received and len(received) < _LONGEST_REQUEST:
        data = link.recv(_READ_SIZE)
        if not data:
            break
        received += data
    link.settimeout(None)
    line, _, surplus = received.partition(b"\n")
    try:
        request = loads(line.decode())
    except (ValueError, RecursionError):
        return None, b""
    is_request = isinstance(request, dict) and isinstance(request.get("what"), str)
    return (request if is_request else None), surplus


def _line(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"
