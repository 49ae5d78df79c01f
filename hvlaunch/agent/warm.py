"""The warm agent: keeps Python and the agent's program ready on a host, and forks an agent for each job.

The warm pool talks to the warm agent in frames, over a single channel. Each forked agent has a pool stream on this
channel: a number (`stream` in frames), and bytes in both directions. Each has a guardian of its own too, and outlives the
warm agent: after the end of the pool, the agents wait for another connection, as after any lost connection.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from hvlaunch.agent import guardian, reaper
from hvlaunch.agent.quick import READ, WRITE, Selector, deque, prctl, signal, socket
from hvlaunch.agent.wire import frames
from hvlaunch.agent.wire.frames import (
    PROTOCOL,
    BadFrame,
    Decoder,
    Form,
    PieceWriter,
    encode,
    record,
    whole,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, NoReturn, Optional, Tuple

__all__ = ["LANE", "ORDERS", "main", "take_own_pages"]

LANE = whole(1, 1 << 53)
_SECONDS = frames.number(0, 1 << 53)
_BYTES = whole(0, 1 << 53)
_CONFIG = {"lease": _SECONDS, "grace": _SECONDS, "window": _BYTES, "reconnect": _SECONDS, "spill": _BYTES}
ORDERS = {
    "open": Form(lane=LANE, config=record(_CONFIG)),
    "data": Form(1 << 20, 1, lane=LANE),
    "close": Form(lane=LANE),
    "pong": Form(),
}
"""Forms of a warm pool's frames."""

_READ_SIZE = 1 << 16
_MOST_WAITING = 1 << 18
"""Bytes waiting for the channel, beyond which the agents are not read."""
_MOST_KEPT = 64 << 20
"""Bytes waiting for an agent, beyond which its connection is closed; the agent may get another."""
_STDERR_KEPT = 1 << 14
_PULSES_PER_LEASE = 4
_SPARE_AFTER = 0.1
"""Seconds between a job's end and the next fork, in which the job's driver may still be busy."""
_NEVER = float("inf")
_PR_SET_DUMPABLE, _PR_SET_NAME = 4, 15  # prctl(2)
_MADV_POPULATE_WRITE = 23  # madvise(2), since Linux 5.14
_PATIENCE = 5.0
# Modules for failures and questions, imported beforehand: an upgrade may replace Python's files while the pool stands.
_LATER = ("traceback", "subprocess", "shutil", "signal", "ctypes", "struct", "_operator")


def main(config: Dict[str, Any]) -> NoReturn:
    """Run the warm agent over fds 0 and 1; `config` has the `lease` in seconds, and names of `rare` modules. Never returns."""
    if not sys.platform.startswith("linux"):
        sys.exit("hvlaunch agent: workers need Linux, and this host runs " + sys.platform)
    prctl(_PR_SET_DUMPABLE, 0)
    prctl(_PR_SET_NAME, b"hvl-warm")
    reaper.adopt_descendants()
    _prepare(config["rare"])
    signal.setitimer(signal.ITIMER_REAL, 0)  # the command line set it
    _WarmAgent(float(config["lease"])).run()


def _prepare(rare: Iterable[str]) -> None:
    """Import and do in advance whatever each forked agent would repeat."""
    from hvlaunch.agent import facts, main, quick  # noqa: F401, PLC0415 (main is for the agents)

    for name in _LATER:
        try:
            __import__(name)
        except ImportError:  # noqa: PERF203 (a handful)
            pass
    for name in rare:
        __import__(name)
    quick.mac(b"key", b"message")
    quick.loads(quick.dumps({"a": [1]}))
    facts.host_facts()
    # Frozen objects are not visited by the collectors of the forked agents, so their pages stay shared.
    gc.collect()
    gc.freeze()


class _PoolStream:
    """A forked agent: the warm agent's ends of its channel and stderr."""

    def __init__(self, pid: int, fd: int, stderr: int) -> None:
        self.pid = pid
        self.fd = fd
        """-1 once closed."""
        self.stderr = stderr
        self.errors = b""
        self.waiting: Deque[bytes] = deque()
        self.size = 0
        self.is_closing = False
        self.interest = 0
        """The watched events of its channel."""
        self.status: Optional[int] = None


class _WarmAgent:
    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._last_heard = time.monotonic()
        self._selector = Selector()
        self._decoder = Decoder(ORDERS, 1 << 20)
        self._writer = PieceWriter()
        self._out: Deque[bytes] = deque()
        self._waiting = 0
        self._is_writing = self._is_full = False
        self._streams: Dict[int, _PoolStream] = {}
        self._config: Dict[str, Any] = {}
        """The configuration of the newest job."""
        self._spare: Optional[_PoolStream] = None
        """An agent for another job with this configuration, forked beforehand and without a number."""
        self._spare_at = _NEVER
        """Time to fork a spare, or to end the present spare."""
        self._wake_read, self._wake_write = os.pipe()
        for fd in (0, 1, self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        # A handler, because the kernel's default for SIGCHLD would not write to the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(0, READ, self._receive)
        self._selector.register(self._wake_read, READ, self._reap)

    def run(self) -> NoReturn:
        """Work until the pool is gone, or silent for the lease."""
        self._send({"type": "ready", "protocol": PROTOCOL, "python": "%d.%d.%d" % sys.version_info[:3]})
        pulse = self._lease / _PULSES_PER_LEASE
        next_ping = time.monotonic() + pulse
        while True:
            now = time.monotonic()
            if now >= self._last_heard + self._lease:
                self._end()
            if now >= next_ping:
                next_ping = now + pulse
                self._send({"type": "ping"})
            if now >= self._spare_at:
                self._renew_spare(now)
            for call, _ in self._selector.select(max(0.0, min(next_ping, self._spare_at) - now)):
                call()

    def _end(self) -> NoReturn:
        """Exit; the agents see the end of their connections, and wait for others."""
        if not self._streams:
            reaper.kill_descendants(_PATIENCE)  # including a spare
        os._exit(0)

    def _receive(self) -> None:
        try:
            data = os.read(0, _READ_SIZE)
            frames = list(self._decoder.feed(data))
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            self._end()
        if not data:
            self._end()
        self._last_heard = time.monotonic()
        for header, body in frames:
            self._obey(header, body)

    def _obey(self, header: Dict[str, Any], body: bytes) -> None:
        kind = header["type"]
        if kind == "pong":
            return
        number = header["lane"]
        stream = self._streams.get(number)
        if kind == "open" and stream is None:
            self._open(number, header["config"])
        elif stream is None or stream.is_closing:
            return  # the agent has ended meanwhile
        elif kind == "data":
            stream.waiting.append(body)
            stream.size += len(body)
            self._feed(number)
        elif kind == "close":
            stream.is_closing = True
            self._feed(number)

    def _open(self, number: int, config: Dict[str, Any]) -> None:
        stream, self._spare = self._spare, None
        if stream is not None and config != self._config:
            self._drop(stream)
            stream = None
        self._config = config
        self._spare_at = _NEVER
        try:
            stream = self._streams[number] = stream or self._fork(config)
        except OSError as error:  # the limit of processes, or of descriptors
            text = "hvlaunch agent: can't start a process: %s" % os.strerror(error.errno or 0)
            self._send({"type": "ended", "lane": number, "status": 1}, text.encode())
            return
        agent = stream
        self._selector.register(stream.stderr, READ, lambda: self._read_stderr(agent))
        self._watch(number, stream)

    def _renew_spare(self, now: float) -> None:
        """Fork a spare for the next job while idle; end an unused spare."""
        # An unused spare has no driver, so its own lease would end it as a failure.
        spare, self._spare, self._spare_at = self._spare, None, _NEVER
        if spare is not None:
            self._drop(spare)
            return
        try:
            self._spare = self._fork(self._config, take_own_pages)
            self._spare_at = now + float(self._config["lease"]) / 2
        except OSError:
            pass  # the next job will report the error

    @staticmethod
    def _drop(spare: _PoolStream) -> None:
        """Close a spare's channel; its agent then ends."""
        os.close(spare.fd)
        os.close(spare.stderr)

    def _fork(self, config: Dict[str, Any], prepare: Callable[[], None] = lambda: None) -> _PoolStream:
        """Fork a guardian, whose agent calls `prepare` first. Raises OSError."""
        fds: List[int] = []
        try:
            fds.extend(end.detach() for end in socket.socketpair())
            fds.extend(os.pipe())
            pid = os.fork()
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        ours, theirs, read_end, write_end = fds
        if pid == 0:
            self._be_guardian(theirs, write_end, config, prepare)
        for fd in (theirs, write_end):
            os.close(fd)
        for fd in (ours, read_end):
            os.set_blocking(fd, False)
        return _PoolStream(pid, ours, read_end)

    def _be_guardian(
        self, channel: int, stderr: int, config: Dict[str, Any], prepare: Callable[[], None]
    ) -> NoReturn:
        """Become a guardian, in the forked process."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd, place in ((channel, 0), (channel, 1), (stderr, 2)):
                os.dup2(fd, place)
            # Another agent's channel in this process would stay open after the warm agent's end.
            others = [fd for stream in self._streams.values() for fd in (stream.fd, stream.stderr)]
            os.closerange(3, max(channel, stderr, *others) + 1)
            # A session of its own, so that signals to the pool's process group do not end a job.
            os.setsid()
            guardian.main(config, prepare=prepare)
        except SystemExit as error:
            os.write(2, str(error).encode("ascii", "replace"))
        finally:
            os._exit(1)

    def _watch(self, number: int, stream: _PoolStream) -> None:
        """Watch the agent's channel, for writing if bytes wait, for reading unless the pool's channel is full."""
        if stream.fd < 0:
            return
        # An unread agent blocks in write() like one whose network is slow, and slows its workers down.
        reads = 0 if self._is_full else READ
        events = reads | (WRITE if stream.waiting else 0)
        if events == stream.interest:
            return
        if not events:
            self._selector.unregister(stream.fd)
        elif stream.interest:
            self._selector.modify(stream.fd, events, lambda: self._pass_on(number))
        else:
            self._selector.register(stream.fd, events, lambda: self._pass_on(number))
        stream.interest = events

    def _pass_on(self, number: int) -> None:
        """Copy bytes between an agent and the pool's channel, in both directions."""
        stream = self._streams.get(number)
        if stream is None or stream.fd < 0:
            return
        if stream.waiting:
            self._feed(number)
        if stream.fd >= 0 and not self._is_full:
            self._read(number, stream)

    def _read(self, number: int, stream: _PoolStream) -> None:
        try:
            data = os.read(stream.fd, _READ_SIZE)
        except BlockingIOError:
            if stream.status is None:
                return
            data = b""  # the pipe is empty, and the agent has ended
        except OSError:
            data = b""
        if data:
            self._send({"type": "data", "lane": number}, data)
        else:
            self._hang_up(number, stream)

    def _feed(self, number: int) -> None:
        """Write waiting bytes, as many as the agent takes."""
        stream = self._streams[number]
        if stream.fd < 0:
            return
        try:
            while stream.waiting:
                written = os.write(stream.fd, stream.waiting[0])
                stream.size -= written
                unwritten = stream.waiting.popleft()[written:]
                if unwritten:
                    stream.waiting.appendleft(unwritten)
        except BlockingIOError:
            pass
        except OSError:
            stream.waiting.clear()
        if (stream.is_closing and not stream.waiting) or stream.size > _MOST_KEPT:
            self._hang_up(number, stream)
        else:
            self._watch(number, stream)

    def _hang_up(self, number: int, stream: _PoolStream) -> None:
        """Close an agent's channel; the agent has ended, or waits for another connection."""
        if stream.interest:
            self._selector.unregister(stream.fd)
        os.close(stream.fd)
        stream.fd = -1
        self._finish(number, stream)

    def _read_stderr(self, stream: _PoolStream) -> None:
        try:
            data = os.read(stream.stderr, _READ_SIZE)
        except BlockingIOError:
            return
        if data:
            stream.errors = (stream.errors + data)[-_STDERR_KEPT:]
        elif stream.stderr in self._selector:
            self._selector.unregister(stream.stderr)

    def _reap(self) -> None:
        try:
            os.read(self._wake_read, 512)
        except BlockingIOError:
            pass
        ended: Dict[int, int] = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ended[pid] = status
        if self._spare is not None and self._spare.pid in ended:
            self._renew_spare(0.0)
        for number, stream in list(self._streams.items()):
            if stream.pid in ended:
                stream.status = ended[stream.pid]
                # Bytes in the channel outlive the agent: its bye is among them.
                while stream.fd >= 0:
                    self._read(number, stream)
                self._finish(number, stream)
        if not self._streams:
            # Leftovers of an agent that was killed together with its guardian.
            reaper.kill_descendants(_PATIENCE)

    def _finish(self, number: int, stream: _PoolStream) -> None:
        """Report an agent's end, once its channel and its guardian have ended."""
        if stream.fd >= 0 or stream.status is None or self._streams.pop(number, None) is None:
            return
        self._read_stderr(stream)
        if stream.stderr in self._selector:
            self._selector.unregister(stream.stderr)
        os.close(stream.stderr)
        code = (
            128 + os.WTERMSIG(stream.status)
            if os.WIFSIGNALED(stream.status)
            else os.WEXITSTATUS(stream.status)
        )
        self._send({"type": "ended", "lane": number, "status": code}, stream.errors)
        if not self._streams:
            self._spare_at = time.monotonic() + _SPARE_AFTER

    def _send(self, header: Dict[str, Any], body: bytes = b"") -> None:
        for piece in self._writer.cut(encode(header, body)):
            self._out.append(piece)
            self._waiting += len(piece)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                written = os.write(1, self._out[0])
                self._waiting -= written
                unwritten = self._out.popleft()[written:]
                if unwritten:
                    self._out.appendleft(unwritten)
        except BlockingIOError:
            pass
        except OSError:
            self._end()
        if bool(self._out) != self._is_writing:
            self._is_writing = not self._is_writing
            if self._is_writing:
                self._selector.register(1, WRITE, self._flush)
            else:
                self._selector.unregister(1)
        if self._is_full is not (self._waiting >= _MOST_WAITING):
            self._is_full = not self._is_full
            for number, stream in self._streams.items():
                self._watch(number, stream)


def take_own_pages() -> None:
    """Copy this process's private writable pages now, before a job needs them."""
    # After a fork, parent and child share pages until either writes: each first write would copy a page during a job.
    # A kernel before 5.14 lacks the call, and copies page by page as before.
    try:
        import ctypes  # noqa: PLC0415 (some builds of Python have none)

        madvise = ctypes.CDLL(None).madvise
        for start, end in _private():
            if madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE) != 0:
                return
    except (ImportError, AttributeError, OSError, ValueError):
        pass


def _private() -> Iterator[Tuple[int, int]]:
    """Yield the ranges of private writable memory, from proc_pid_maps(5)."""
    with open("/proc/self/maps", "rb") as file:
        for line in file.read().splitlines():
            span, rights = line.split()[:2]
            if rights == b"rw-p":
                start, _, end = span.partition(b"-")
                yield int(start, 16), int(end, 16)
