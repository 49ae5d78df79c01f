"""The process of a warm pool: it keeps a connection and a warm agent on each host, and serves this user's other programs.

It answers at the socket in its directory (outside/pools.py): one request on a connection, a line of JSON. `lane` makes a
lane of the connection, everything else has an answer.
"""

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hvlaunch import __version__
from hvlaunch.agent.quick import loads
from hvlaunch.agent.warm import ORDERS
from hvlaunch.agent.wire.shapes import misfit
from hvlaunch.console.status import OnStatus, Status, counted
from hvlaunch.driver.program.agent_program import agent_command, python_candidates, warm_bundle
from hvlaunch.errors import Problem
from hvlaunch.hosts.parse import host_set
from hvlaunch.job import Host, JobSpec
from hvlaunch.outside.pools import peer_is_own
from hvlaunch.pool.host import Lane, WarmHost
from hvlaunch.rendezvous.serving.certificate import Certificate
from hvlaunch.ssh.connection import Connection

__all__ = ["WarmPool"]

_LOOK = 1.0
_SOON = 0.1
"""Seconds until the next look where there is something to make for the next job."""
_PAUSE = 0.05
_REQUEST_PATIENCE = 10.0
_READ_SIZE = 1 << 16
_LONGEST_REQUEST = 1 << 22


class WarmPool:
    """The hosts, and what serves them. Pool and warm agents give each other up after the lease of `spec`. `connect` connects to one; `idle_timeout` is how many seconds it stays without a job."""

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
        """For the next job, which need not load what makes one."""
        self._lock = threading.Lock()

    def start(self, on_status: OnStatus) -> Sequence[Problem]:
        """Connect to all; what is wrong with those that can't be reached now, which are tried again.

        `on_status` gets what it waits for, and None at the end.
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
        """Until somebody ends it, nobody has used it for long, or the `owner` (a descriptor) has ended."""
        listener.setblocking(False)
        poll = select.poll()
        for each in (listener, self._stopped):
            poll.register(each, select.POLLIN)
        if owner is not None:
            threading.Thread(target=self._await, args=(owner,), name="owner", daemon=True).start()
        look_at = self._clock()
        while not self._over.is_set():
            if self._clock() >= look_at:  # not for each that comes: a job comes once for each host
                self._look()
                look_at = self._clock() + (_LOOK if self.has_certificate else _SOON)
            poll.poll(max(0.0, look_at - self._clock()) * 1000)
            self._accept(listener)

    @property
    def has_certificate(self) -> bool:
        """Whether the next job gets one."""
        return self._certificate is not None

    def _prepare_certificate(self) -> None:
        if not self.has_certificate:
            made = Certificate()
            made.key  # noqa: B018 (it is made now)
            with self._lock:
                self._certificate = made

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            self._over.wait(_PAUSE)  # no descriptor is left
            return
        link.setblocking(True)
        threading.Thread(target=self._hear, args=(link,), name="request", daemon=True).start()

    def _look(self) -> None:
        for host in self._hosts.values():
            host.check_lease()
        if any(host.lanes for host in self._hosts.values()):
            self._used = self._clock()
            return
        self._prepare_certificate()  # while no job has anything to do
        if self._clock() > self._used + self._idle_timeout:
            self._over.set()

    def _await(self, owner: int) -> None:
        with suppress(OSError):
            while os.read(owner, 1 << 10):
                pass
        self.stop()

    def stop(self) -> None:
        """Let serve() return. For signals and other threads."""
        self._over.set()
        with suppress(OSError):  # it is closed
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
            request, rest = _request_of(link)
            if request is None:
                link.sendall(_line({"refused": "the request is not understood"}))
            elif request["what"] == "lane":
                self._serve_lane(link, request, rest)
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
        """What a job needs to begin. No other gets the same certificate."""
        with self._lock:
            certificate, self._certificate = self._certificate, None
        pem = None if certificate is None else (certificate.key + certificate.pem).decode("ascii")
        return {"hosts": self._facts(), "certificate": pem}

    def _facts(self) -> dict[str, dict[str, Any]]:
        return {name: host.facts() for name, host in self._hosts.items()}

    def _serve_lane(self, link: socket.socket, request: Mapping[str, Any], begun: bytes) -> None:
        host, job, config = (request.get(name) for name in ("host", "job", "config"))
        known = self._hosts.get(str(host))
        opening = {"type": "open", "lane": 1, "config": config}
        if known is None or not isinstance(job, str) or misfit(ORDERS, opening, b"") is not None:
            return
        self._used = self._clock()
        known.serve(Lane(link, job, begun), request["config"])


def _request_of(link: socket.socket) -> tuple[dict[str, Any] | None, bytes]:
    """Its line, and what came behind it, which is the lane's; None where it is no request."""
    link.settimeout(_REQUEST_PATIENCE)
    found = b""
    while b"\n" not in found and len(found) < _LONGEST_REQUEST:
        data = link.recv(_READ_SIZE)
        if not data:
            break
        found += data
    link.settimeout(None)
    line, _, rest = found.partition(b"\n")
    try:
        request = loads(line.decode())
    except (ValueError, RecursionError):
        return None, b""
    is_one = isinstance(request, dict) and isinstance(request.get("what"), str)
    return (request if is_one else None), rest


def _line(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"
