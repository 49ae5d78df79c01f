"""One host of a warm pool: a connection, and the warm agent there; both are made anew where they are lost."""

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import random as any_random
from typing import TYPE_CHECKING, Any, Literal

from hvlaunch.agent.warm import LANE
from hvlaunch.agent.wire.frames import PROTOCOL, BadFrame, Decoder
from hvlaunch.agent.wire.shapes import Form, text, whole
from hvlaunch.driver.links import host_ends
from hvlaunch.driver.links.agent_channel import CommandChannel
from hvlaunch.driver.links.piece_reader import Garbled
from hvlaunch.errors import AgentFailed, HostError, HvlaunchError, Problem
from hvlaunch.job import Host
from hvlaunch.outside.pools import LANE_DATA, LANE_ENDED, LANE_HEAD
from hvlaunch.ssh.connection import Connection

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["Lane", "WarmHost"]

_LONGEST_DATA = 1 << 20
_REPORTS = {
    "ready": Form(protocol=whole(0, 1 << 31), python=text(64)),
    "data": Form(_LONGEST_DATA, 1, lane=LANE),
    "ended": Form(1 << 14, lane=LANE, status=whole(0, 255)),
    "ping": Form(),
}
"""The frames that a warm agent may send."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_STEADY = 60.0
"""Seconds after which a connection that is lost counts as the first of its kind."""
_STATUS_WAIT = 2.0
_NOISE_KEPT = 4096


_MOST_KEPT = 64 << 20
"""Bytes that wait for a driver that takes none: its connection is broken then, and it may make another."""


class Lane:
    """The driver's side. Nothing here waits for a driver but the thread that a slow one needs."""

    def __init__(self, link: socket.socket, job: str, begun: bytes = b"") -> None:
        self.job = job
        self.begun = begun
        """What the driver has sent already."""
        self._link = link
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._is_over = False

    def deliver(self, data: bytes) -> None:
        """To the driver. Never blocks."""
        self._put(LANE_DATA, data)

    def report_exit(self, status: int, stderr: str) -> None:
        """The agent has ended so."""
        self._put(LANE_ENDED, json.dumps({"status": status, "stderr": stderr}).encode())

    def read(self) -> bytes:
        """What the driver sends next; empty at its end. Blocks."""
        try:
            return self._link.recv(1 << 16)
        except OSError:
            return b""

    def break_off(self) -> None:
        """The driver sees the end of its connection, and not that of its agent. May be repeated."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def _put(self, kind: int, data: bytes) -> None:
        part = LANE_HEAD.pack(kind, len(data)) + data
        with self._lock:
            if self._waiting:
                self._keep(part)
                return
            try:
                sent = self._link.send(part, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:  # the driver is gone
                return
            if sent < len(part):
                self._keep(part[sent:])
                threading.Thread(target=self._flush, name=f"to job {self.job}", daemon=True).start()

    def _keep(self, part: bytes) -> None:
        self._waiting.append(part)
        self._size += len(part)
        if self._size > _MOST_KEPT:
            self.break_off()

    def _flush(self) -> None:
        """For a driver that takes less than comes."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                part = self._waiting[0]
            try:
                self._link.sendall(part)
            except OSError:
                self._is_over = True
            with self._lock:
                if self._is_over:
                    self._waiting.clear()
                    return
                self._waiting.popleft()
                self._size -= len(part)


class WarmHost:
    """Its thread connects, and passes on what agents say. Others send through it. `clock` and `random` are for its pauses."""

    def __init__(
        self,
        host: Host,
        connect: Callable[[Host], Connection],
        program: tuple[str, bytes],
        lease: float,
        *,
        start_timeout: float,
        random: Callable[[], float] = any_random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`program` is the command for a login shell, and what goes to its stdin."""
        self.host = host
        self.state: Literal["connecting", "ready", "away"] = "connecting"
        self.problem: Problem | None = None
        """Why it is not ready."""
        self.since = clock()
        self.python = ""
        self.tried = threading.Event()
        """Set when it is known for the first time whether it can be reached."""
        self._connect = connect
        self._program = program
        self._lease = lease
        self._start_timeout = start_timeout
        self._random = random
        self._clock = clock
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._connection: Connection | None = None
        self._channel: CommandChannel | None = None
        self._lanes: dict[int, Lane] = {}
        self._opened = 0
        self._last_heard = 0.0
        self._noise = b""
        self._closed = threading.Event()
        self._retry = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"warm {self.host.name}", daemon=True).start()

    @property
    def lanes(self) -> list[Lane]:
        with self._lock:
            return [*self._lanes.values()]

    def facts(self) -> dict[str, Any]:
        """What drivers and users are told of it."""
        connection = self._connection
        return {
            "state": self.state,
            "problem": None if self.problem is None else self.problem.cause,
            "seconds": self._clock() - self.since,
            "python": self.python,
            "local_address": None if connection is None else connection.local_address,
            "remote_address": None if connection is None else connection.remote_address,
            "jobs": sorted({lane.job for lane in self.lanes}),
        }

    def serve(self, lane: Lane, config: Mapping[str, Any]) -> None:
        """Have an agent forked for it, and pass on what its driver sends, until one of the two ends."""
        with self._lock:
            if self.state != "ready":
                lane.break_off()
                return
            self._opened += 1
            number = self._opened
            self._lanes[number] = lane
        try:
            opening = {"type": "open", "lane": number, "config": dict(config)}, b""
            about = {"type": "data", "lane": number}
            self._send(opening, *([(about, lane.begun)] if lane.begun else []))
            while data := lane.read():
                self._send((about, data))
            if number in self._lanes:  # else its agent has ended
                self._send(({"type": "close", "lane": number}, b""))
        except OSError:
            lane.break_off()
        with self._lock:
            self._lanes.pop(number, None)

    def check_lease(self) -> None:
        """Give up a connection over which nothing was heard for the lease."""
        if self.state == "ready" and self._clock() > self._last_heard + self._lease:
            self._hang_up()

    def try_now(self) -> None:
        """Do not wait until the next attempt is due."""
        self._retry.set()

    def close(self) -> None:
        """Let the warm agent end. May be repeated."""
        self._closed.set()
        self._retry.set()
        self._hang_up()

    def _hang_up(self) -> None:
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.close()

    def _send(self, *frames: "Frame") -> None:
        """Raises OSError where there is no connection."""
        channel = self._channel
        if channel is None:
            raise ConnectionResetError("no connection")
        with self._writing:
            channel.send(*frames)

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            began = self._clock()
            try:
                self._serve_connection()
            except HvlaunchError as error:
                self._lose(error.problem)
            except Exception as error:  # noqa: BLE001 (a thread's end would be seen by nobody)
                cause = f"internal error: {type(error).__name__}: {error}"
                self._lose(HostError(cause, host=self.host.name).problem)
            if self._clock() > began + _STEADY:
                pause = _FIRST_PAUSE
            self._retry.wait(pause * (1 + self._random()) / 2)
            self._retry.clear()
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _lose(self, problem: Problem) -> None:
        """Every lane is broken off: sessions go on over other connections."""
        self._hang_up()
        with self._lock:
            self.state, self.problem, self.since = "away", problem, self._clock()
            self._connection = self._channel = None
            lanes = [*self._lanes.values()]
        for lane in lanes:
            lane.break_off()
        self.tried.set()

    def _serve_connection(self) -> None:
        """To its end. Raises HostError with the cause of that."""
        name = self.host.name
        connection = self._connect(self.host)
        with self._lock:
            self._connection = connection
        if self._closed.is_set():
            connection.close()
        self._noise = b""
        broken: str | None = None
        late = threading.Timer(self._start_timeout, connection.close)
        late.daemon = True
        late.start()
        command, data = self._program
        try:
            channel = CommandChannel(connection.run(command), data, self, _decoder)
            channel.send()
            for header, body in channel.frames():
                late.cancel()
                self._obey(channel, header, body)
        except (BadFrame, Garbled) as error:
            raise AgentFailed(
                f"its warm agent sent what none of hvlaunch's sends: {error}", host=name
            ) from None
        except OSError as error:
            broken = str(error) or type(error).__name__
        finally:
            late.cancel()
        if self.state == "ready":
            raise HostError(f"lost: {broken or 'its warm agent has ended'}", host=name)
        stderr = channel.stderr().decode("utf-8", "replace").strip()
        raise host_ends.never_began(name, channel.exit_status(_STATUS_WAIT), stderr, broken, self._noise)

    def _obey(self, channel: CommandChannel, header: Mapping[str, Any], body: bytes) -> None:
        kind = header["type"]
        if kind == "ready":
            if header["protocol"] != PROTOCOL:
                raise AgentFailed("its warm agent is of another hvlaunch", host=self.host.name)
            with self._lock:
                self._channel, self.python = channel, header["python"]
                self.state, self.problem, self.since = "ready", None, self._clock()
            self.tried.set()
        elif kind == "ping":
            self._send(({"type": "pong"}, b""))
        else:
            with self._lock:
                lane = self._lanes.get(header["lane"])
                if kind == "ended":
                    self._lanes.pop(header["lane"], None)
            if lane is None:
                return  # its driver has gone
            if kind == "data":
                lane.deliver(body)
            else:
                lane.report_exit(header["status"], body.decode("utf-8", "replace"))

    def heard_agent(self) -> None:
        """For the channel, as a Listener."""
        self._last_heard = self._clock()

    def heard_noise(self, data: bytes) -> None:
        """For the channel, as a Listener."""
        self._noise = (self._noise + data)[-_NOISE_KEPT:]


def _decoder() -> Decoder:
    return Decoder(_REPORTS, _LONGEST_DATA)
