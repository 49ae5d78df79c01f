"""The warm agent: keeps Python and the agent's program ready on a host, and forks an agent for each job that comes.

The warm pool talks to it over one channel, in frames. Each agent has a lane: a number, and bytes to and fro, which
are passed on as they are. What is alive of an agent has its own guardian, and does not depend on us: when the pool is gone
we end, and the agents that we have forked wait for another connection, as after any that is lost.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from hvlaunch.agent import guardian, reaper
from hvlaunch.agent.own_pages import take_own_pages
from hvlaunch.agent.quick import READ, WRITE, Selector, deque, prctl, signal, socket
from hvlaunch.agent.wire import shapes
from hvlaunch.agent.wire.frames import PROTOCOL, BadFrame, Decoder, PieceWriter, encode
from hvlaunch.agent.wire.shapes import Form, record, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Deque, Dict, Iterable, List, NoReturn, Optional

__all__ = ["LANE", "ORDERS", "main"]

LANE = whole(1, 1 << 53)
_SECONDS = shapes.number(0, 1 << 53)
_BYTES = whole(0, 1 << 53)
_CONFIG = {"lease": _SECONDS, "grace": _SECONDS, "window": _BYTES, "reconnect": _SECONDS, "spill": _BYTES}
ORDERS = {
    "open": Form(lane=LANE, config=record(_CONFIG)),
    "data": Form(1 << 20, 1, lane=LANE),
    "close": Form(lane=LANE),
    "pong": Form(),
}
"""The frames that a warm pool may send."""

_READ_SIZE = 1 << 16
_MOST_WAITING = 1 << 18
"""Bytes that wait for the channel before no more are read of the agents."""
_MOST_KEPT = 64 << 20
"""Bytes that wait for an agent that takes none: its connection is broken then, and it may get another."""
_STDERR_KEPT = 1 << 14
_PULSES_PER_LEASE = 4
_SPARE_AFTER = 0.1
"""Seconds after a job's end, in which there may be more to do for it elsewhere."""
_NEVER = float("inf")
_PR_SET_DUMPABLE, _PR_SET_NAME = 4, 15  # prctl(2)
_PATIENCE = 5.0
# What an agent imports where something goes wrong or somebody asks: Python may be another by then.
_LATER = ("traceback", "subprocess", "shutil", "signal", "ctypes", "struct", "_hashlib", "_operator")


def main(config: Dict[str, Any]) -> NoReturn:
    """Be the warm agent over fds 0 and 1; `config` has the `lease` in seconds, and the modules that are `rare`. Never returns."""
    if not sys.platform.startswith("linux"):
        sys.exit("hvlaunch agent: workers need Linux, and this host runs " + sys.platform)
    prctl(_PR_SET_DUMPABLE, 0)
    prctl(_PR_SET_NAME, b"hvl-warm")
    reaper.adopt_descendants()
    _prepare(config["rare"])
    signal.setitimer(signal.ITIMER_REAL, 0)  # that of the command line
    _WarmAgent(float(config["lease"])).run()


def _prepare(rare: Iterable[str]) -> None:
    """Whatever each agent would do again, or could not do later; `rare` are modules of the agent's."""
    from hvlaunch.agent import facts, main, quick  # noqa: F401, PLC0415 (main is for the agents)

    for name in _LATER:
        try:
            __import__(name)
        except ImportError:  # noqa: PERF203 (a few)
            pass
    for name in rare:
        __import__(name)
    quick.mac(b"key", b"message")
    quick.loads(quick.dumps({"a": [1]}))
    facts.host_facts()
    gc.collect()
    gc.freeze()


class _Lane:
    """One agent that we have forked: our ends of its channel and of its stderr."""

    def __init__(self, pid: int, fd: int, stderr: int) -> None:
        self.pid = pid
        self.fd = fd
        """-1 once it is closed."""
        self.stderr = stderr
        self.said = b""
        self.waiting: Deque[bytes] = deque()
        self.size = 0
        self.is_closing = False
        self.interest = 0
        """What its channel is watched for."""
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
        self._lanes: Dict[int, _Lane] = {}
        self._config: Dict[str, Any] = {}
        """That of the newest job."""
        self._spare: Optional[_Lane] = None
        """An agent for a job like the last one, which is there already, and has no number yet."""
        self._spare_at = _NEVER
        """When another is to be forked, or this one to go."""
        self._wake_read, self._wake_write = os.pipe()
        for fd in (0, 1, self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(0, READ, self._receive)
        self._selector.register(self._wake_read, READ, self._reap)

    def run(self) -> NoReturn:
        """Until the pool is gone, or silent for the lease."""
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
        """The agents see the end of their connections, and wait for others."""
        if not self._lanes:
            reaper.kill_descendants(_PATIENCE)  # a spare too
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
        lane = self._lanes.get(number)
        if kind == "open" and lane is None:
            self._open(number, header["config"])
        elif lane is None or lane.is_closing:
            return  # it has ended meanwhile
        elif kind == "data":
            lane.waiting.append(body)
            lane.size += len(body)
            self._feed(number)
        elif kind == "close":
            lane.is_closing = True
            self._feed(number)

    def _open(self, number: int, config: Dict[str, Any]) -> None:
        lane, self._spare = self._spare, None
        if lane is not None and config != self._config:
            self._drop(lane)
            lane = None
        self._config = config
        self._spare_at = _NEVER
        try:
            lane = self._lanes[number] = lane or self._fork(config)
        except OSError as error:  # the limit of processes, or of descriptors
            said = "hvlaunch agent: it can't start a process: %s" % os.strerror(error.errno or 0)
            self._send({"type": "ended", "lane": number, "status": 1}, said.encode())
            return
        its_stderr = lane
        self._selector.register(lane.stderr, READ, lambda: self._hear(its_stderr))
        self._watch(number, lane)

    def _renew_spare(self, now: float) -> None:
        """Fork one for the next job, while nothing is to be done; one that was not needed goes before its own lease ends."""
        spare, self._spare, self._spare_at = self._spare, None, _NEVER
        if spare is not None:
            self._drop(spare)
            return
        try:
            self._spare = self._fork(self._config, take_own_pages)
            self._spare_at = now + float(self._config["lease"]) / 2
        except OSError:
            pass  # the next job will say it

    @staticmethod
    def _drop(spare: _Lane) -> None:
        """Its agent sees that nobody will come, and ends."""
        os.close(spare.fd)
        os.close(spare.stderr)

    def _fork(self, config: Dict[str, Any], prepare: Callable[[], None] = lambda: None) -> _Lane:
        """A guardian with an agent, which calls `prepare` first. Raises OSError."""
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
        return _Lane(pid, ours, read_end)

    def _be_guardian(
        self, channel: int, stderr: int, config: Dict[str, Any], prepare: Callable[[], None]
    ) -> NoReturn:
        """In the new process, which has nothing of the others' lanes."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd, place in ((channel, 0), (channel, 1), (stderr, 2)):
                os.dup2(fd, place)
            others = [fd for lane in self._lanes.values() for fd in (lane.fd, lane.stderr)]
            os.closerange(3, max(channel, stderr, *others) + 1)
            os.setsid()
            guardian.main(config, prepare=prepare)
        except SystemExit as error:
            os.write(2, str(error).encode("ascii", "replace"))
        finally:
            os._exit(1)

    def _watch(self, number: int, lane: _Lane) -> None:
        """Its channel, for what is of interest now: no more is read than our own channel takes."""
        if lane.fd < 0:
            return
        reads = 0 if self._is_full else READ
        wanted = reads | (WRITE if lane.waiting else 0)
        if wanted == lane.interest:
            return
        if not wanted:
            self._selector.unregister(lane.fd)
        elif lane.interest:
            self._selector.modify(lane.fd, wanted, lambda: self._pass_on(number))
        else:
            self._selector.register(lane.fd, wanted, lambda: self._pass_on(number))
        lane.interest = wanted

    def _pass_on(self, number: int) -> None:
        """What an agent has said, and what it takes."""
        lane = self._lanes.get(number)
        if lane is None or lane.fd < 0:
            return
        if lane.waiting:
            self._feed(number)
        if lane.fd >= 0 and not self._is_full:
            self._read(number, lane)

    def _read(self, number: int, lane: _Lane) -> None:
        try:
            data = os.read(lane.fd, _READ_SIZE)
        except BlockingIOError:
            if lane.status is None:
                return
            data = b""  # nothing is there, and nobody is any more
        except OSError:
            data = b""
        if data:
            self._send({"type": "data", "lane": number}, data)
        else:
            self._hang_up(number, lane)

    def _feed(self, number: int) -> None:
        """Give the agent what waits for it, as far as it takes it."""
        lane = self._lanes[number]
        if lane.fd < 0:
            return
        try:
            while lane.waiting:
                written = os.write(lane.fd, lane.waiting[0])
                lane.size -= written
                rest = lane.waiting.popleft()[written:]
                if rest:
                    lane.waiting.appendleft(rest)
        except BlockingIOError:
            pass
        except OSError:
            lane.waiting.clear()
        if (lane.is_closing and not lane.waiting) or lane.size > _MOST_KEPT:
            self._hang_up(number, lane)
        else:
            self._watch(number, lane)

    def _hang_up(self, number: int, lane: _Lane) -> None:
        """Its connection has ended; it has ended too, or waits for another."""
        if lane.interest:
            self._selector.unregister(lane.fd)
        os.close(lane.fd)
        lane.fd = -1
        self._finish(number, lane)

    def _hear(self, lane: _Lane) -> None:
        try:
            data = os.read(lane.stderr, _READ_SIZE)
        except BlockingIOError:
            return
        if data:
            lane.said = (lane.said + data)[-_STDERR_KEPT:]
        elif lane.stderr in self._selector:
            self._selector.unregister(lane.stderr)

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
        for number, lane in list(self._lanes.items()):
            if lane.pid in ended:
                lane.status = ended[lane.pid]
                while lane.fd >= 0:
                    self._read(number, lane)
                self._finish(number, lane)
        if not self._lanes:
            reaper.kill_descendants(
                _PATIENCE
            )  # what somebody has left whose guardian and agent were killed at once

    def _finish(self, number: int, lane: _Lane) -> None:
        """Once, when its connection and its guardian have ended; a pool that has closed the lane need not wait for that."""
        if lane.fd >= 0 or lane.status is None or self._lanes.pop(number, None) is None:
            return
        self._hear(lane)
        if lane.stderr in self._selector:
            self._selector.unregister(lane.stderr)
        os.close(lane.stderr)
        code = 128 + os.WTERMSIG(lane.status) if os.WIFSIGNALED(lane.status) else os.WEXITSTATUS(lane.status)
        self._send({"type": "ended", "lane": number, "status": code}, lane.said)
        if not self._lanes:
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
                rest = self._out.popleft()[written:]
                if rest:
                    self._out.appendleft(rest)
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
            for number, lane in self._lanes.items():
                self._watch(number, lane)
