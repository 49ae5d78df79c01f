"""One host of a warm pool: its connection and its warm agent, which are made anew after a loss, and its pool streams."""

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
from hvlaunch.agent.wire.frames import PROTOCOL, BadFrame, Decoder, Form, text, whole
from hvlaunch.driver.links import host_ends
from hvlaunch.driver.links.agent_channel import CommandChannel, Garbled
from hvlaunch.errors import AgentFailed, HostError, HvlaunchError, Problem
from hvlaunch.job import Host
from hvlaunch.outside.pools import STREAM_DATA, STREAM_ENDED, STREAM_HEAD
from hvlaunch.ssh import Connection

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["PoolStream", "WarmHost"]

_LONGEST_DATA = 1 << 20
_REPORTS = {
    "ready": Form(protocol=whole(0, 1 << 31), python=text(64)),
    "data": Form(_LONGEST_DATA, 1, lane=LANE),
    "ended": Form(1 << 14, lane=LANE, status=whole(0, 255)),
    "ping": Form(),
}
"""The frames that a warm agent may send; any other frame ends the connection."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_STEADY = 60.0
"""Seconds after which a lost connection does not make the pause before the next attempt longer."""
_STATUS_WAIT = 2.0
_NOISE_KEPT = 4096


_MOST_KEPT = 64 << 20
"""Bytes that may wait for a slow driver. Beyond that its stream is broken off; its session may use another connection."""


class PoolStream:
    """The driver's end of a byte stream between a job's driver and an agent, forked by a warm agent.

    A slow driver must not block the channel, which all jobs of a host share: the bytes for a slow driver wait here.
    """

    def __init__(self, link: socket.socket, job: str, begun: bytes = b"") -> None:
        self.job = job
        self.begun = begun
        """Bytes that the driver sent together with its request."""
        self._link = link
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._is_over = False

    def deliver(self, data: bytes) -> None:
        """Send data to the driver. Never blocks."""
        self._put(STREAM_DATA, data)

    def report_exit(self, status: int, stderr: str) -> None:
        """Tell the driver how its agent ended."""
        self._put(STREAM_ENDED, json.dumps({"status": status, "stderr": stderr}).encode())

    def read(self) -> bytes:
        """Return the driver's next bytes, or none at its end. Blocks."""
        try:
            return self._link.recv(1 << 16)
        except OSError:
            return b""

    def break_off(self) -> None:
        """End the connection, without an end of the agent: the driver's session goes on otherwise. May be repeated."""
        with suppress(OSError):
            # The driver has closed it.
            self._link.shutdown(socket.SHUT_RDWR)

    def _put(self, kind: int, data: bytes) -> None:
        part = STREAM_HEAD.pack(kind, len(data)) + data
        with self._lock:
            # Behind waiting parts: the bytes must stay in order.
            if self._waiting:
                self._keep(part)
                return
            try:
                sent = self._link.send(part, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:
                # The driver is gone.
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
        """Send what waits, in a thread of its own, since this blocks."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                part = self._waiting[0]
            # Not under the lock: this may block, and deliver() must not.
            try:
                self._link.sendall(part)
            except OSError:
                self._is_over = True
            with self._lock:
                # deliver() adds at the end only while something waits, so the part is removed after it was sent.
                if self._is_over:
                    self._waiting.clear()
                    return
                self._waiting.popleft()
                self._size -= len(part)


class WarmHost:
    """A thread connects, and delivers the agents' bytes; each stream has a thread for the other direction."""

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
        """`program` is the command for a login shell, and the bytes for its stdin; `random` spreads the pauses."""
        self.host = host
        self.state: Literal["connecting", "ready", "away"] = "connecting"
        self.problem: Problem | None = None
        """Why the host is not ready."""
        self.since = clock()
        self.python = ""
        self.tried = threading.Event()
        """Set after the first attempt to connect."""
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
        self._streams: dict[int, PoolStream] = {}
        self._opened = 0
        self._last_heard = 0.0
        self._noise = b""
        self._closed = threading.Event()
        self._retry = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"warm {self.host.name}", daemon=True).start()

    @property
    def streams(self) -> list[PoolStream]:
        with self._lock:
            return [*self._streams.values()]

    def facts(self) -> dict[str, Any]:
        """Return the host's state for drivers and users."""
        connection = self._connection
        return {
            "state": self.state,
            "problem": None if self.problem is None else self.problem.cause,
            "seconds": self._clock() - self.since,
            "python": self.python,
            "local_address": None if connection is None else connection.local_address,
            "remote_address": None if connection is None else connection.remote_address,
            "jobs": sorted({stream.job for stream in self.streams}),
        }

    def serve(self, stream: PoolStream, config: Mapping[str, Any]) -> None:
        """Have an agent forked for the stream, and send it the driver's bytes until one of the two ends."""
        with self._lock:
            if self.state != "ready":
                stream.break_off()
                return
            self._opened += 1
            number = self._opened
            self._streams[number] = stream
        try:
            opening = {"type": "open", "lane": number, "config": dict(config)}, b""
            about = {"type": "data", "lane": number}
            self._send(opening, *([(about, stream.begun)] if stream.begun else []))
            while data := stream.read():
                self._send((about, data))
            if number in self._streams:
                # The agent has not ended: it must be told that its driver is gone.
                self._send(({"type": "close", "lane": number}, b""))
        except OSError:
            stream.break_off()
        with self._lock:
            self._streams.pop(number, None)

    def check_lease(self) -> None:
        """Close a connection that was silent for the lease."""
        if self.state == "ready" and self._clock() > self._last_heard + self._lease:
            self._hang_up()

    def try_now(self) -> None:
        """Connect now, without waiting for the next attempt."""
        self._retry.set()

    def close(self) -> None:
        """End the warm agent. May be repeated."""
        self._closed.set()
        self._retry.set()
        self._hang_up()

    def _hang_up(self) -> None:
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.close()

    def _send(self, *frames: "Frame") -> None:
        """Raises OSError without a connection."""
        channel = self._channel
        if channel is None:
            raise ConnectionResetError("no connection")
        with self._writing:
            # The parts of two frames must not mix.
            channel.send(*frames)

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            began = self._clock()
            try:
                self._serve_connection()
            except HvlaunchError as error:
                self._lose(error.problem)
            except Exception as error:  # noqa: BLE001 (else the thread would end without a message)
                cause = f"internal error: {type(error).__name__}: {error}"
                self._lose(HostError(cause, host=self.host.name).problem)
            if self._clock() > began + _STEADY:
                pause = _FIRST_PAUSE
            self._retry.wait(pause * (1 + self._random()) / 2)
            self._retry.clear()
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _lose(self, problem: Problem) -> None:
        """Mark the host as away, and break off its streams: the jobs' sessions continue over other connections."""
        self._hang_up()
        with self._lock:
            self.state, self.problem, self.since = "away", problem, self._clock()
            self._connection = self._channel = None
            streams = [*self._streams.values()]
        for stream in streams:
            stream.break_off()
        self.tried.set()

    def _serve_connection(self) -> None:
        """Connect, and serve until the connection ends. Always raises HostError with the cause."""
        name = self.host.name
        connection = self._connect(self.host)
        with self._lock:
            self._connection = connection
        if self._closed.is_set():
            # close() came before the connection was known.
            connection.close()
        self._noise = b""
        broken: str | None = None
        # Closing the connection ends the reading below, which would otherwise wait for ever.
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
                f"its warm agent sent data that no hvlaunch agent sends: {error}", host=name
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
                raise AgentFailed(
                    "its warm agent belongs to another version of hvlaunch", host=self.host.name
                )
            with self._lock:
                self._channel, self.python = channel, header["python"]
                self.state, self.problem, self.since = "ready", None, self._clock()
            self.tried.set()
        elif kind == "ping":
            self._send(({"type": "pong"}, b""))
        else:
            with self._lock:
                stream = self._streams.get(header["lane"])
                if kind == "ended":
                    self._streams.pop(header["lane"], None)
            if stream is None:
                # The driver has gone meanwhile.
                return
            if kind == "data":
                stream.deliver(body)
            else:
                stream.report_exit(header["status"], body.decode("utf-8", "replace"))

    def heard_agent(self) -> None:
        """For the channel, as a Listener."""
        self._last_heard = self._clock()

    def heard_noise(self, data: bytes) -> None:
        """For the channel, as a Listener."""
        self._noise = (self._noise + data)[-_NOISE_KEPT:]


def _decoder() -> Decoder:
    return Decoder(_REPORTS, _LONGEST_DATA)
