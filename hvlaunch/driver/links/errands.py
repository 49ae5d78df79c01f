"""The driver's end of one host's errands: it sends programs and arguments, and takes streams and results.

An errand's program is its file, with the agent's modules among its imports. docs/internals/errands.md describes the mechanism.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from hvlaunch import agent
from hvlaunch.agent import errands
from hvlaunch.agent.quick import dumps, loads
from hvlaunch.agent.wire.frames import (
    ERRAND_CHUNK,
    ERRAND_WINDOW,
    LONGEST_ARGUMENTS,
    LONGEST_TEXT,
    BadFrame,
    of,
    plain,
    record,
    text,
)
from hvlaunch.driver.program import make_program, without_types
from hvlaunch.errors import HostError
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "DEFAULT_LIMITS",
    "Answers",
    "Errand",
    "ErrandFailed",
    "HostErrands",
    "Limits",
    "errand_program",
    "lines_of",
    "write_line",
]

_FAILURE = record({"reason": of("raised", "memory"), "cause": text(LONGEST_TEXT, raw=True)})
_Send: TypeAlias = Callable[[Mapping[str, Any], bytes], None]


class Limits(NamedTuple):
    """Limits of an errand; None for no limit."""

    seconds: float | None = 60.0
    memory: int | None = 1 << 30
    """Bytes of private writable memory."""
    output: int | None = 1 << 30
    """Bytes for its stream."""


DEFAULT_LIMITS = Limits()


class ErrandFailed(HostError):
    """A helper of hvlaunch on a host failed, such as the sampler; the workers are not affected.

    `reason` is `unknown` (no such errand), `arguments` (they do not fit its schema), `start` (the host can't start it), `raised` (its
    function raised an exception), `time`, `memory` or `output` (a limit), `killed` (its process ended without a result), `stopped` (by
    stop()), `result` (it does not fit the schema), or `lost` (the host is gone).

    Try: `cause` has the reason; the job itself continues.
    """

    def __init__(self, name: str, reason: str, cause: str, *, host: str) -> None:
        super().__init__(f"errand {name}: {cause}", host=host)
        self.name = name
        self.reason = reason
        self.detail = cause


class Errand:
    """An errand on a host. For any thread.

    `on_data` gets the bytes of its stream on the link's thread, and must not block; without `on_data`, read() returns them.
    `on_end` is called once, on the same thread, when result() has an answer.
    """

    def __init__(
        self,
        name: str,
        number: int,
        host: str,
        send: Callable[..., None],
        on_data: Callable[[bytes], None] | None,
        on_end: "Callable[[Errand], None]",
    ) -> None:
        self.name = name
        self._number = number
        self._host = host
        self._send_frame = send
        self._on_data = on_data
        self._on_end = on_end
        self._changed = threading.Condition()
        self._has_ended = self._is_stopped = False
        self._result: Any = None
        self._failure: tuple[str, str] | None = None
        # Towards the host.
        self._unsent = bytearray()
        self._credit = ERRAND_WINDOW
        self._is_input_over = False
        # From the host.
        self._unread: deque[bytes] = deque()
        self._arriving = 0
        """Bytes received without credit for them yet."""
        self._to_credit = 0
        """Bytes read since the last credit."""

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    @property
    def has_data(self) -> bool:
        """True if read() returns at once."""
        return bool(self._unread) or self._has_ended

    def write(self, data: bytes) -> None:
        """Send bytes to the errand's stream as its credit allows. Never blocks; drain() waits."""
        with self._changed:
            if not self._has_ended:
                self._unsent += data
                self._send_on()

    def close_input(self) -> None:
        """End the errand's input after the data written so far."""
        with self._changed:
            self._is_input_over = True
            if not self._has_ended and not self._unsent:
                self._send_frame(self._number, "end")

    def drain(self, timeout: float) -> bool:
        """Wait until the data written so far is on its way; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unsent or self._has_ended, timeout)

    def read(self, timeout: float) -> bytes | None:
        """The next bytes of the errand's stream; empty at its end, None if nothing comes in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._unread or self._has_ended, timeout):
                return None
            if not self._unread:
                return b""
            data = self._unread.popleft()
            self._give_credit(len(data))
            return data

    def stop(self) -> None:
        """Kill the process. The errand ends with the reason `stopped`, unless it has ended before."""
        with self._changed:
            if self._is_stopped or self._has_ended:
                return
            self._is_stopped = True
            self._unsent.clear()
        self._send_frame(self._number, "stop")

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end, without a limit for None; False on timeout, while the errand continues."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_ended, timeout)

    def result(self) -> Any:
        """Return the result of an errand that has ended. It fits the errand's schema. Raises ErrandFailed."""
        if self._failure is not None:
            raise ErrandFailed(self.name, *self._failure, host=self._host)
        return self._result

    # For HostErrands

    def _send_on(self) -> None:
        """The lock is held."""
        while self._unsent and self._credit:
            data = bytes(self._unsent[: min(ERRAND_CHUNK, self._credit)])
            del self._unsent[: len(data)]
            self._credit -= len(data)
            self._send_frame(self._number, "data", data)
        if not self._unsent:
            if self._is_input_over:
                self._send_frame(self._number, "end")
            self._changed.notify_all()

    def _give_credit(self, size: int) -> None:
        """The lock is held. Large portions: a frame for each read would cost more than the reading."""
        self._to_credit += size
        if self._to_credit >= ERRAND_WINDOW // 4 and not self._has_ended:
            self._send_frame(self._number, "credit", bytes=self._to_credit)
            self._arriving -= self._to_credit
            self._to_credit = 0

    def take_credit(self, size: int) -> None:
        """Take credit for bytes that the process has read. Raises BadFrame for more than it was sent."""
        with self._changed:
            self._credit += size
            # A host with false credit could make the driver send without end.
            if self._credit > ERRAND_WINDOW:
                raise BadFrame("credit for more than an errand was sent")
            self._send_on()

    def take_data(self, data: bytes) -> None:
        """Raises BadFrame for data beyond the window."""
        with self._changed:
            self._arriving += len(data)
            if self._arriving > ERRAND_WINDOW:
                raise BadFrame("data of an errand beyond its window")
            # Kept until read() takes them; the window bounds their size.
            if self._on_data is None:
                self._unread.append(data)
                self._changed.notify_all()
                return
        self._on_data(data)
        with self._changed:
            self._give_credit(len(data))

    def finish(self, result: Any, failure: tuple[str, str] | None) -> None:
        """The errand is over."""
        with self._changed:
            self._result, self._failure = result, failure
            self._has_ended = True
            self._unsent.clear()
            self._changed.notify_all()
        self._on_end(self)


def write_line(errand: Errand, value: Any) -> None:
    """Send a value to an errand's stream as a line of JSON. Never blocks."""
    errand.write(dumps(value).encode("ascii") + b"\n")


def lines_of(errand: Errand, timeout: float, longest: int) -> Iterator[list[str]]:
    """Yield the lines of each read of an errand's stream until its end; none if nothing comes within `timeout` seconds.

    Raises ValueError for more than `longest` bytes without an end of line, and for other text than ASCII.
    """
    data = b""
    while (more := errand.read(timeout)) != b"":
        *lines, data = (data + (more or b"")).split(b"\n")
        if len(data) > longest:
            raise ValueError("a line without an end")
        yield [line.decode("ascii") for line in lines]


_LOOK = 1.0
_LONGEST_ANSWER = 1 << 20
_ENDING = 1.0
"""Seconds for the result of an errand whose stream has ended."""


class Answers:
    """The answers of an errand, each a line of JSON."""

    def __init__(self, errand: Errand, host: str, patience: float = inf) -> None:
        """`host` is for errors; `patience` is the number of seconds for an answer, and may change."""
        self._errand = errand
        self._host = host
        self.patience = patience
        self._reads = lines_of(errand, _LOOK, _LONGEST_ANSWER)
        self._lines: deque[str] = deque()

    def next(self, form: Callable[[Any], bool]) -> Any:
        """Return the next answer. Raises ErrandFailed, also for an answer of another form."""
        try:
            value = loads(self._line())
            is_right = form(value)
        except (ValueError, RecursionError):
            is_right = False
        if not is_right:
            raise self._failed("result", "its answer makes no sense")
        return value

    def _line(self) -> str:
        deadline = time.monotonic() + self.patience
        while not self._lines:
            lines = next(self._reads, None)
            if lines is None:
                self._errand.wait(_ENDING)
                self._errand.result()
                raise self._failed("result", "it ended without an answer")
            self._lines += lines
            if not self._lines and time.monotonic() > deadline:
                raise self._failed("time", f"no answer within {self.patience:.0f} s")
        return self._lines.popleft()

    def _failed(self, reason: str, cause: str) -> ErrandFailed:
        return ErrandFailed(self._errand.name, reason, cause, host=self._host)


class HostErrands:
    """The errands of a host. start() is for any thread, obey() for the link's; `send` takes frames and never blocks.

    Near hosts get compiled programs: these are larger, and begin 10 to 20 ms earlier.
    """

    def __init__(self, host: str, send: _Send, *, is_near: bool = False) -> None:
        self._host = host
        self._send = send
        self._is_near = is_near
        self._lock = threading.Lock()
        self._last = 0
        self._running: dict[int, Errand] = {}
        self._programs: set[str] = set()
        """Names of the programs on the host."""
        self._is_lost = False

    def start(
        self,
        name: str,
        arguments: Mapping[str, Any],
        limits: Limits = DEFAULT_LIMITS,
        *,
        on_data: Callable[[bytes], None] | None = None,
        on_end: Callable[[Errand], None] = lambda _errand: None,
    ) -> Errand:
        """Begin an errand. Raises ErrandFailed if it can't be sent: on_end is not called then."""
        if name not in _errand_names():
            raise ErrandFailed(name, "unknown", "there is no errand of this name", host=self._host)
        if not _module(name).ARGUMENTS(arguments):
            raise ErrandFailed(name, "arguments", "its arguments do not fit its schema", host=self._host)
        body = dumps(dict(arguments)).encode("ascii")
        if len(body) > LONGEST_ARGUMENTS:
            cause = f"its arguments have more than {LONGEST_ARGUMENTS} bytes"
            raise ErrandFailed(name, "arguments", cause, host=self._host)
        # Under the lock, so that no other thread starts the errand before its program is on its way.
        with self._lock:
            if self._is_lost:
                raise ErrandFailed(name, "lost", "the connection has ended", host=self._host)
            self._last += 1
            number = self._last
            errand = Errand(name, number, self._host, self._send_about, on_data, on_end)
            self._running[number] = errand
            if name not in self._programs:
                self._programs.add(name)
                program = errand_program(name, is_near=self._is_near)
                self._send({"type": "errand", "what": "code", "name": name}, program)
            self._send_about(number, "start", body, name=name, **limits._asdict())
        return errand

    def obey(self, header: Mapping[str, Any], body: bytes) -> None:
        """Carry out a frame of the agent. Raises BadFrame for an unexpected frame."""
        number, action = header["id"], header["what"]
        with self._lock:
            errand = self._running.get(number)
        if errand is None:
            raise BadFrame("a frame of an errand that does not run")
        if action == "data":
            errand.take_data(body)
        elif action == "credit":
            errand.take_credit(header["bytes"])
        else:
            with self._lock:
                # Before its callbacks: they may start the next errand.
                del self._running[number]
            if action == "failed":
                errand.finish(None, (header["reason"], header["cause"]))
            else:
                errand.finish(*_outcome(errand.name, body))

    def lose(self) -> None:
        """Fail every errand: the host is gone."""
        with self._lock:
            # From here on start() refuses: no frame would ever end its errand.
            self._is_lost = True
            running, self._running = self._running, {}
        for errand in running.values():
            errand.finish(None, ("lost", "the connection to the host has ended"))

    def _send_about(self, number: int, action: str, body: bytes = b"", **more: Any) -> None:
        self._send({"type": "errand", "what": action, "id": number, **more}, body)


def _module(name: str) -> Any:
    """The errand's own file, for its schemas: `ARGUMENTS` and `RESULT`."""
    return import_module(f"hvlaunch.agent.errands.{name}")


def _outcome(name: str, body: bytes) -> tuple[Any, tuple[str, str] | None]:
    """The result or the failure.

    Any process of the same user may have written these bytes: they are no reason to give the host up.
    """
    try:
        words = loads(body.decode("ascii"))
    except (ValueError, RecursionError):
        return None, ("result", "its result is not JSON")
    if type(words) is dict and words.keys() == {"result"} and _module(name).RESULT(words["result"]):
        return words["result"], None
    if _FAILURE(words):
        return None, (words["reason"], plain(words["cause"], LONGEST_TEXT))
    return None, ("result", "its result does not fit its schema")


_PACKAGE = "hvlaunch.agent"
_IMPORT = re.compile(rf"^( *)from ({re.escape(_PACKAGE)}[\w.]*) import \(?([\w, ]+|[\w,\s]+\))", re.MULTILINE)


def _errand_names() -> list[str]:
    """List the errands: the files in hvlaunch/agent/errands/, and the packages in it."""
    files = {file for folder in errands.__path__ for file in Path(folder).glob("*.py")}
    packages = {file.parent for folder in errands.__path__ for file in Path(folder).glob("*/__init__.py")}
    return sorted(file.stem for file in files | packages if file.stem != "__init__")


_MAKING = threading.Lock()


def errand_program(name: str, *, is_near: bool) -> bytes:
    """The program, as make_program() makes it: it runs agent/errands/__init__.py. Thread-safe."""
    # The cache alone would let each host's thread make it, as they all ask at the same time.
    with _MAKING:
        return _made(name, is_near=is_near)


@cache
def _made(name: str, *, is_near: bool) -> bytes:
    files: dict[str, Path] = {}
    collected: set[tuple[str, bool]] = set()
    _collect(errands.__name__, files, collected)
    _collect(f"{errands.__name__}.{name}", files, collected)
    begin = f"load(*packed)\nfrom {errands.__name__} import main\nmain({name!r})"
    return make_program(begin, files, {}, is_near=is_near)


def _collect(
    name: str, files: dict[str, Path], collected: set[tuple[str, bool]], *, is_called: bool = True
) -> None:
    """Add the module, its packages, and its imports from the agent; imports within functions if these are called."""
    if not collected.isdisjoint({(name, True), (name, is_called)}):
        return
    collected.add((name, is_called))
    file = _file_of(name)
    # Modules for annotations alone need not travel.
    text = without_types(file.read_text(encoding="ascii"))
    files[f"{name}.__init__" if file.name == "__init__.py" else name] = file
    if (package := name.rpartition(".")[0]) != "hvlaunch":
        # The observer's package imports ten modules in its functions, and others borrow a module of it.
        _collect(package, files, collected, is_called=False)
    for indent, module, names in _IMPORT.findall(text):
        if indent and not is_called:
            continue
        _collect(module, files, collected)
        if _file_of(module).name == "__init__.py":
            for part in re.findall(r"\w+", names):
                # A name of a package is a module, or is defined in the package itself.
                if _candidates(f"{module}.{part}"):
                    _collect(f"{module}.{part}", files, collected)


def _file_of(name: str) -> Path:
    return _candidates(name)[0]


def _candidates(name: str) -> list[Path]:
    """The files of a module of the agent. Errands of tests are in folders of their own."""
    package, folders = _PACKAGE, [str(Path(agent.__file__).parent)]
    if name.startswith(f"{errands.__name__}."):
        package, folders = errands.__name__, list(errands.__path__)
    path = name.removeprefix(package).strip(".").replace(".", "/")
    bases = [Path(folder) / path for folder in folders]
    # Not by is_dir(): a folder that was a package once may still have compiled files.
    candidates = (file for base in bases for file in (base / "__init__.py", base.with_suffix(".py")))
    return [file for file in candidates if file.is_file()]
