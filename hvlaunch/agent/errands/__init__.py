"""Errands: hvlaunch's own functions for hosts, one file or package each. docs/internals/errands.md describes them.

This file runs in an errand's own process: limits, arguments in, the function, the result out.
"""

from __future__ import annotations

import _thread
import os
import select

from hvlaunch.agent.quick import dumps, loads, prctl, signal, struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, NoReturn

__all__ = ["ErrandStream", "answer_lines", "main", "write_line"]

_STDIN, _STREAM, _RESULT = 0, 3, 4
_PREAMBLE = struct.Struct("!QI")  # as in agent/errand_processes.py
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # prctl(2)
_READ_SIZE = 1 << 16
_LONGEST_MESSAGE = 2048


def main(name: str) -> NoReturn:
    """Run the errand of this name and exit. Its program has been read from stdin, and its arguments come next."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_NAME, b"hvl-" + name.encode()[:11])
    _volunteer_for_oom()
    for fd in (_STREAM, _RESULT):
        # A program that the errand starts must not hold them open: the agent takes their end for the errand's.
        os.set_inheritable(fd, False)
    stream = ErrandStream(_STDIN, _STREAM)
    try:
        memory, size = _PREAMBLE.unpack(stream.read_exactly(_PREAMBLE.size))
        arguments = loads(stream.read_exactly(size).decode("ascii"))
    except EOFError:
        os._exit(1)  # the agent stopped it before it began
    if memory:
        _limit_memory(memory)
    try:
        module = __import__("hvlaunch.agent.errands." + name, fromlist=["run"])
        words = dumps({"result": module.run(arguments, stream)})
    except MemoryError:
        # Little can be allocated now, so the words are a constant.
        words = '{"reason":"memory","cause":"it needed more memory than its limit"}'
    except BaseException as error:  # noqa: BLE001 (whatever it is, the driver must hear of it)
        message = ": ".join(filter(None, (type(error).__name__, str(error))))
        words = dumps({"reason": "raised", "cause": message[:_LONGEST_MESSAGE]})
    try:
        _write_all(_RESULT, words.encode("ascii"))
    except OSError:
        pass  # the agent has ended
    # Threads that hang in the kernel must not hold up the end, which closes both pipes.
    os._exit(0)


def _volunteer_for_oom() -> None:
    """Let the kernel take this process first if memory runs out: the job's workers have to stay."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def _limit_memory(most: int) -> None:
    """RLIMIT_DATA counts private writable memory; RLIMIT_AS would count mapped files and libraries too."""
    import resource  # noqa: PLC0415 (some builds of Python have none)

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class ErrandStream:
    """Bytes from the driver and to the driver. write() blocks while the driver gives no credit, and is for any thread."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._unread = b""
        self._writing = _thread.allocate_lock()

    def wait(self, seconds: float) -> bool:
        """Wait for input or its end. Return False after `seconds` without either."""
        return bool(self._unread) or bool(select.select([self._read_fd], [], [], seconds)[0])

    def read(self, most: int) -> bytes:
        """Read the next bytes, `most` at most; empty at the end."""
        # More than asked for: a read per line would cost a call of the kernel each.
        data = self._unread or os.read(self._read_fd, max(most, _READ_SIZE))
        self._unread = data[most:]
        return data[:most]

    def read_exactly(self, size: int) -> bytes:
        """Read this many bytes. Raises EOFError if the input ends before."""
        parts = []
        while size:
            data = self.read(size)
            if not data:
                raise EOFError
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def read_line(self) -> bytes:
        """Read a line with its end. Raises EOFError if the input ends before."""
        parts = []
        while True:
            data = self.read(_READ_SIZE)
            if not data:
                raise EOFError
            line, end, rest_of_data = data.partition(b"\n")
            parts.append(line + end)
            if end:
                self._unread = rest_of_data + self._unread
                return b"".join(parts)

    def write(self, data: bytes) -> None:
        """Send the data, after the data of other threads. Raises OSError if the agent has ended."""
        with self._writing:
            _write_all(self._write_fd, data)


def write_line(stream: ErrandStream, value: Any) -> None:
    """Send a value as a line of JSON. Raises OSError if the agent has ended."""
    stream.write(dumps(value).encode("ascii") + b"\n")


def answer_lines(stream: ErrandStream, obey: Callable[[Any], Any]) -> None:
    """Answer each value from the driver by that of `obey`, each a line of JSON, until the driver ends the input."""
    while True:
        try:
            line = stream.read_line()
        except EOFError:
            return
        write_line(stream, obey(loads(line.decode("ascii").rstrip())))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
