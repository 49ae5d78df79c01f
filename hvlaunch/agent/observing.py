"""The observer: a process that answers what the driver asks of this host, and may get stuck where the agent may not.

The agent passes on questions and answers, and knows nothing of them: docs/architecture.md, "The observer".
"""

from __future__ import annotations

import os
import sys

from hvlaunch.agent.diagnosis import reason
from hvlaunch.agent.quick import READ, WRITE, signal
from hvlaunch.agent.wire.frames import LONGEST_ANSWER, LONGEST_TEXT
from hvlaunch.agent.wire.shapes import plain
from hvlaunch.agent.worker import spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

    from hvlaunch.agent.quick import Selector
    from hvlaunch.agent.wire.channel import DriverChannel

__all__ = ["Observing"]

_CHUNK = 1 << 16
_MOST_WAITING = 1 << 25


class Observing:
    """The agent's end. There is at most one observer: another begins when the last one has ended.

    Its end is that of its stdout: it may be reaped by others.
    """

    def __init__(self, channel: DriverChannel, selector: Selector) -> None:
        self._channel = channel
        self._selector = selector
        self._pid: Optional[int] = None
        self._stdin = self._stdout = -1
        self._code: Optional[str] = None
        """Of one that is to begin."""
        self._waiting = bytearray()
        """What it has not read yet."""
        self._said = bytearray()
        self._due = 0
        """How many answers may come."""

    def obey(self, header: Dict[str, Any], body: bytes) -> None:
        """Carry out an `observe` frame."""
        if header["what"] == "begin":
            self._code, self._due = header["code"], 0
            self._kill()
            self._waiting = bytearray(body)
            if self._pid is None:
                self._begin()
        elif self._pid is None and self._code is None:
            self._tell_end("there is no observer")
        elif len(self._waiting) > _MOST_WAITING:
            self._kill()
        else:
            self._due += 1
            self._waiting += body
            if self._code is None:
                self._feed()

    def _begin(self) -> None:
        code, self._code = self._code, None
        fds: List[int] = []
        words = [sys.executable, "-I", "-S", "-X", "utf8", "-c", code or ""]
        try:
            fds.extend((*os.pipe(), *os.pipe(), os.open(os.devnull, os.O_WRONLY)))
            stdin, self._stdin, self._stdout, stdout, stderr = fds
            self._pid = spawn(sys.executable, words, dict(os.environ), [stdin, stdout, stderr])
        except OSError as error:
            for fd in fds:
                os.close(fd)
            self._stdin = self._stdout = -1
            self._waiting.clear()
            self._tell_end(reason(error, sys.executable, words, {})[1])
            return
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        for fd in (self._stdin, self._stdout):
            os.set_blocking(fd, False)
        self._selector.register(self._stdout, READ, self._listen)
        self._feed()

    def _kill(self) -> None:
        """It, and what it has started. What it says from now on is no answer."""
        self._close_stdin()
        self._waiting.clear()
        if self._pid is not None:
            try:
                os.killpg(self._pid, signal.SIGKILL)
            except OSError:
                pass  # it has ended, and its end is on its way

    def _close_stdin(self) -> None:
        if self._stdin < 0:
            return
        if self._stdin in self._selector:
            self._selector.unregister(self._stdin)
        os.close(self._stdin)
        self._stdin = -1

    def _feed(self) -> None:
        if self._stdin < 0:
            return
        try:
            while self._waiting:
                del self._waiting[: os.write(self._stdin, self._waiting[:_CHUNK])]
        except BlockingIOError:
            if self._stdin not in self._selector:
                self._selector.register(self._stdin, WRITE, self._feed)
            return
        except OSError:
            self._close_stdin()
            return
        if self._stdin in self._selector:
            self._selector.unregister(self._stdin)

    def _listen(self) -> None:
        try:
            data = os.read(self._stdout, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        *lines, rest = (self._said + data).split(b"\n")
        self._said = rest
        for line in lines:
            self._due -= 1
            if self._due >= 0 and len(line) <= LONGEST_ANSWER:
                self._channel.send({"type": "observed", "what": "answer"}, bytes(line))
        if self._due < 0 or len(rest) > LONGEST_ANSWER:
            self._kill()

    def _end(self) -> None:
        self._selector.unregister(self._stdout)
        os.close(self._stdout)
        self._stdout, self._pid = -1, None
        self._said.clear()
        self._close_stdin()
        if self._code is not None:
            self._begin()
        else:
            self._waiting.clear()
            self._tell_end("it has ended")

    def _tell_end(self, cause: str) -> None:
        self._channel.send({"type": "observed", "what": "ended", "cause": plain(cause, LONGEST_TEXT)})
