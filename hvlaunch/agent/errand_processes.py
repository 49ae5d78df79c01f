"""The agent's end of errands: starts their processes, feeds them, enforces limits and reports ends.

An errand's purpose is unknown to the agent. docs/internals/errands.md describes the mechanism.
"""

from __future__ import annotations

import os
import sys
import time

from hvlaunch.agent.quick import READ, WRITE, signal, signal_name, struct
from hvlaunch.agent.wire.frames import (
    ERRAND_CHUNK,
    ERRAND_WINDOW,
    LONGEST_RESULT,
    LONGEST_TEXT,
    MOST_ERRANDS,
    BadFrame,
    plain,
)
from hvlaunch.agent.workers import spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Tuple

    from hvlaunch.agent.quick import Selector
    from hvlaunch.agent.wire.channel import DriverChannel

__all__ = ["ErrandProcesses"]

_BOOT = (
    "import _io,zlib;pack=zlib.decompressobj();"
    "exec(pack.decompress(_io.BufferedReader(_io.FileIO(0,closefd=False),1).read(%d)))"
)
_PREAMBLE = struct.Struct("!QI")
"""The memory limit in bytes (0 for none) and the size of the arguments; agent/errands/__init__.py reads it."""
_REAP_TRIES = 20
_REAP_PAUSE = 0.001
_KILL_PATIENCE = 5.0
"""Seconds after an exceeded limit until the report, even if the kernel can't end the process."""


class ErrandProcesses:
    """The errands of this host. `channel` takes frames to the driver."""

    def __init__(self, channel: DriverChannel, selector: Selector) -> None:
        self._channel = channel
        self._selector = selector
        self._programs: Dict[str, bytes] = {}
        self._running: List[_ErrandProcess] = []

    def obey(self, header: Dict[str, Any], body: bytes) -> None:
        """Carry out an `errand` frame. Raises BadFrame."""
        action = header["what"]
        if action == "code":
            self._programs[header["name"]] = body
            return
        if action == "start":
            self._start(header, body)
            return
        process = self._find(header["id"])
        # The errand may have ended while the frame was on its way.
        if process is not None:
            process.obey(action, header, body)

    def _find(self, number: int) -> Optional[_ErrandProcess]:
        return next((process for process in self._running if process.number == number), None)

    def deadline(self) -> float:
        """The next time.monotonic() at which end_overdue() has something to do."""
        return min((process.deadline for process in self._running), default=float("inf"))

    def end_overdue(self, now: float) -> None:
        """Kill the errands whose time is over."""
        for process in list(self._running):
            if now >= process.deadline:
                process.overrun()

    def reaped(self, pid: int, status: int) -> None:
        """The agent has reaped a child that is no worker."""
        for process in list(self._running):
            if process.pid == pid:
                process.reaped(status)

    def end_all(self) -> None:
        """Kill the errands without a report: their driver is gone."""
        for process in list(self._running):
            process.abandon()

    def _start(self, header: Dict[str, Any], arguments: bytes) -> None:
        number, name = header["id"], header["name"]
        if self._find(number) is not None:
            raise BadFrame("errand %d for the second time" % number)
        cause = None
        if name not in self._programs:
            cause = "no program of that name has been sent"
        elif len(self._running) >= MOST_ERRANDS:
            cause = "%d errands run on this host already" % MOST_ERRANDS
        else:
            program = self._programs[name]
            words = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _BOOT % len(program)]
            preamble = program + _PREAMBLE.pack(header["memory"] or 0, len(arguments)) + arguments
            try:
                pid, fds = _spawn(words)
            except OSError as error:
                from hvlaunch.agent.workers.diagnosis import reason  # noqa: PLC0415 (2 ms, and needed after a failure only)

                cause = reason(error, sys.executable, words, {})[1]
        if cause is not None:
            self._send(number, "failed", reason="start", cause=plain(cause, LONGEST_TEXT))
            return
        process = _ErrandProcess(header, pid, fds, self._selector, self._send, self._running.remove)
        self._running.append(process)
        process.begin(preamble)

    def _send(self, number: int, action: str, body: bytes = b"", **more: Any) -> None:
        # On the relay's lane, frames of errands and output take turns, so neither waits long for the other.
        self._channel.send({"type": "errand", "what": action, "id": number, **more}, body, relayed=True)


def _spawn(words: List[str]) -> Tuple[int, List[int]]:
    """The pid, and our ends of its stdin, stream and result. Raises OSError."""
    fds: List[int] = []
    try:
        # Collected as they come, so that a failure half-way closes all of them.
        fds.extend((*os.pipe(), *os.pipe(), *os.pipe(), os.open(os.devnull, os.O_WRONLY)))
        their_stdin, stdin, stream, their_stream, result, their_result, null = fds
        # Descriptors 1 and 2 are not the stream's: whatever the function or its programs print must not get into it.
        theirs = [their_stdin, null, null, their_stream, their_result]
        pid = spawn(sys.executable, words, dict(os.environ), theirs)
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    for fd in (their_stdin, their_stream, their_result, null):
        os.close(fd)
    for fd in (stdin, stream, result):
        os.set_blocking(fd, False)
    return pid, [stdin, stream, result]


class _ErrandProcess:
    """An errand: its process, and the bytes in both directions."""

    def __init__(
        self,
        header: Dict[str, Any],
        pid: int,
        fds: List[int],
        selector: Selector,
        send: Callable[..., None],
        forget: Callable[[_ErrandProcess], object],
    ) -> None:
        self.pid = pid
        self.number = header["id"]
        """0 once its driver is gone: the next driver counts anew."""
        seconds = header["seconds"]
        self.deadline = float("inf") if seconds is None else time.monotonic() + seconds
        self._limits = header
        self._stdin, self._stream, self._result = fds
        self._selector = selector
        self._send = send
        self._forget = forget
        self._to_stdin = bytearray()
        self._preamble = 0
        """Number of these bytes from the agent itself: they take no credit."""
        self._taken = 0
        """Bytes read by the process, but not credited to the driver yet."""
        self._has_input_ended = False
        self._credit = ERRAND_WINDOW
        self._sent = 0
        self._words = bytearray()
        """The result so far."""
        self._status: Optional[int] = None
        self._failure: Optional[Tuple[str, str]] = None
        """Reason and cause, set when the agent kills the process."""
        self._is_reported = False

    def begin(self, preamble: bytes) -> None:
        """Send the program and the arguments, and listen for output."""
        self._to_stdin += preamble
        self._preamble = len(preamble)
        self._selector.register(self._result, READ, self._read_result)
        self._watch_stream()
        self._feed()

    def obey(self, action: str, header: Dict[str, Any], body: bytes) -> None:
        """Carry out a frame about this errand. Raises BadFrame for data beyond the window."""
        if self._is_reported:
            return  # the driver did not know yet
        if action == "data":
            if len(self._to_stdin) - self._preamble + len(body) > ERRAND_WINDOW:
                raise BadFrame("data of an errand beyond the window")
            self._to_stdin += body
            self._feed()
        elif action == "end":
            self._has_input_ended = True
            self._feed()
        elif action == "credit":
            self._credit += header["bytes"]
            self._watch_stream()
        elif action == "stop":
            self._fail("stopped", "it was stopped")

    def overrun(self) -> None:
        """Handle a deadline: the errand's, or the deadline of its end."""
        if self._failure is None:
            self._fail("time", "it took longer than %g s" % self._limits["seconds"])
            return
        # The process is stuck in the kernel. The report must not wait for it, but it still counts against MOST_ERRANDS.
        self.deadline = float("inf")
        self._report("failed", reason=self._failure[0], cause=self._failure[1] + ", and can't be killed")

    def reaped(self, status: int) -> None:
        """Take the exit status. The errand's own children end with it."""
        self._status = status
        self._kill()

    def abandon(self) -> None:
        """Kill the process without a report."""
        self.number = 0
        self._is_reported = True
        self._fail("stopped", "")

    def _fail(self, kind: str, cause: str) -> None:
        """Kill the process. The report follows the end of the process, so that the driver never has two running instead of one."""
        if self._failure is not None:
            return
        self._failure = kind, cause
        # A stopped errand may hang in the kernel. Its caller waits as long as it takes: another errand would hang beside it.
        self.deadline = float("inf") if kind == "stopped" else time.monotonic() + _KILL_PATIENCE
        self._close_stdin()
        self._to_stdin.clear()
        self._close_stream()
        self._kill()
        self._end_if_over()

    def _kill(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except OSError:
            pass  # it has ended

    def _feed(self) -> None:
        """Write as much as the process takes."""
        try:
            while self._to_stdin and self._stdin >= 0:
                written = os.write(self._stdin, self._to_stdin[:ERRAND_CHUNK])
                del self._to_stdin[:written]
                of_driver = max(0, written - self._preamble)
                self._preamble = max(0, self._preamble - written)
                self._take(of_driver)
        except BlockingIOError:
            if self._stdin not in self._selector:
                self._selector.register(self._stdin, WRITE, self._feed)
            return
        except OSError:
            self._close_stdin()
        if self._stdin < 0:
            # The process reads no more: who sends must not wait for credit.
            self._take(max(0, len(self._to_stdin) - self._preamble))
            self._to_stdin.clear()
            self._preamble = 0
        elif self._has_input_ended:
            self._close_stdin()
        elif self._stdin in self._selector:
            self._selector.unregister(self._stdin)

    def _take(self, size: int) -> None:
        self._taken += size
        # An event of the closed stdin may come in the same turn as the end: behind its report nothing may be sent.
        if self._taken >= ERRAND_WINDOW // 4 and not self._is_reported:
            self._send(self.number, "credit", bytes=self._taken)
            self._taken = 0

    def _watch_stream(self) -> None:
        """Listen to the stream as long as the driver gives credit; else the pipe fills, and the process waits."""
        is_wanted = self._stream >= 0 and self._credit > 0
        if is_wanted and self._stream not in self._selector:
            self._selector.register(self._stream, READ, self._read_stream)
        elif not is_wanted and self._stream in self._selector:
            self._selector.unregister(self._stream)

    def _read_stream(self) -> None:
        if self._stream < 0:
            return  # closed by a call of the same turn
        data = _read(self._stream, min(ERRAND_CHUNK, self._credit))
        if data is None:
            return
        if not data:
            self._close_stream()
            self._end_if_over()
            return
        self._credit -= len(data)
        self._sent += len(data)
        # The excess is not sent: the limit protects the driver.
        most = self._limits["output"]
        if most is not None and self._sent > most:
            self._fail("output", "it wrote more than %d bytes" % most)
            return
        self._send(self.number, "data", data)
        self._watch_stream()

    def _read_result(self) -> None:
        data = _read(self._result, ERRAND_CHUNK)
        if data is None:
            return
        self._words += data
        if len(self._words) > LONGEST_RESULT:
            self._words.clear()
            self._fail("output", "its result has more than %d bytes" % LONGEST_RESULT)
        elif not data:
            self._close(self._result)
            self._result = -1
            self._end_if_over()

    def _end_if_over(self) -> None:
        """Report the end once both pipes have ended. The exit status may come earlier or later."""
        if self._stream >= 0 or self._result >= 0:
            return
        self._close_stdin()
        self._find_status()
        self.deadline = float("inf")
        self._forget(self)
        if self._failure is not None:
            self._report("failed", reason=self._failure[0], cause=self._failure[1])
        elif self._words:
            self._report("done", bytes(self._words))
        else:
            self._report("failed", reason="killed", cause=_how_it_ended(self._status))

    def _report(self, action: str, body: bytes = b"", **more: Any) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._send(self.number, action, body, **more)

    def _find_status(self) -> None:
        if self._status is not None:
            return
        self._kill()  # before it is reaped: afterwards its number may be another's
        # Closed pipes precede the end of the process by a moment. The loop must not wait longer for it.
        for _ in range(_REAP_TRIES):
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except OSError:
                return  # whoever kills all descendants at once has reaped it
            if pid:
                self._status = status
                return
            time.sleep(_REAP_PAUSE)

    def _close_stdin(self) -> None:
        self._close(self._stdin)
        self._stdin = -1

    def _close_stream(self) -> None:
        self._close(self._stream)
        self._stream = -1

    def _close(self, fd: int) -> None:
        if fd >= 0:
            if fd in self._selector:
                self._selector.unregister(fd)
            os.close(fd)


def _read(fd: int, most: int) -> Optional[bytes]:
    """Read the next bytes, empty at the end; None if the pipe is empty."""
    try:
        return os.read(fd, most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _how_it_ended(status: Optional[int]) -> str:
    if status is None:
        return "it has ended"
    if os.WIFSIGNALED(status):
        return "it was killed by %s" % signal_name(os.WTERMSIG(status))
    return "it ended with status %d and without a result" % os.WEXITSTATUS(status)
