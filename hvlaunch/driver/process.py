"""The driver's own process: its stdin, its signals, the uncaught exceptions of its threads, and its way from the terminal."""

import errno
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol

from hvlaunch.console.printer import Printer
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.events import Event, Interrupted, ThreadFailed, UserSignal
from hvlaunch.errors import Defect, Problem
from hvlaunch.job import Host

if TYPE_CHECKING:
    from hvlaunch.outside import JobDirectory

__all__ = [
    "Detachment",
    "StdinFeed",
    "StdinPump",
    "ThreadFailures",
    "failures_as_events",
    "leave_terminal",
    "loud",
    "signals_as_events",
]

P = ParamSpec("P")

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_READ_SIZE = 256
_SAME_WITHIN: dict[int, float] = {signal.SIGHUP: math.inf, signal.SIGTERM: 0.2}
"""Seconds within which a repeated signal counts once, because two senders delivered the same request."""


@contextmanager
def signals_as_events(
    post: Callable[[Event], None],
    on_hangup: Callable[[], None] | None = None,
    on_quit: Callable[[], None] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Post SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 as events while in the block.

    `on_hangup` is called for SIGHUP instead; `on_quit` is called for SIGQUIT (Ctrl and the backslash), which is left
    alone without it.

    SIGHUP counts once, since kernel and shell both send it, and SIGTERM once in 0.2 s: timeout(1) sends it to the process
    and again to its group. Each Ctrl-C counts.

    A signal that is ignored already stays ignored (nohup, jobs in the background of a shell script). Reading stdin in the
    background of a terminal becomes an error instead of stopping the process. Outside the main thread Python allows no
    signal handlers, and the block changes no signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    heard_at: dict[int, float] = {}

    def handle(number: int) -> None:
        now = clock()
        if now < heard_at.get(number, -math.inf) + _SAME_WITHIN.get(number, 0.0):
            return
        heard_at[number] = now
        if number == signal.SIGHUP and on_hangup is not None:
            on_hangup()
        elif number == signal.SIGQUIT and on_quit is not None:
            on_quit()
        else:
            post(Interrupted(number) if number in _ENDING else UserSignal(number))

    ours = (*_ENDING, *_PASSED_ON, *(() if on_quit is None else (signal.SIGQUIT,)))
    before = {number: signal.getsignal(number) for number in (*ours, signal.SIGTTIN)}
    for number in ours:
        # nohup and shells in scripts ignore signals on purpose.
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _heard_elsewhere)
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    try:
        with _heard(ours, handle):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _heard(numbers: Container[int], handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` in a thread for each of these signals whose handler is _heard_elsewhere() when it arrives."""
    # Python runs its own handlers in the main thread when that thread next executes bytecode, which may be long after: if
    # the kernel delivered the signal to another thread, the main thread does not wake from its wait. Python writes to the
    # wake-up descriptor at once, in whichever thread got the signal.

    def hear() -> None:
        while signals := reader.recv(_READ_SIZE):
            for number in signals:
                if number in numbers and signal.getsignal(number) is _heard_elsewhere:
                    handle(number)

    reader, writer = socket.socketpair()
    # A signal handler must never block, even if the thread below is behind.
    writer.setblocking(False)
    thread = threading.Thread(target=hear, name="signals", daemon=True)
    thread.start()
    with reader:
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            writer.close()
            thread.join()


def _heard_elsewhere(_number: int, _frame: object) -> None:
    """Do nothing: the thread of _heard() has handled the signal already."""


class ThreadFailures:
    """The exceptions that threads of the driver have not caught, in their order.

    Each ends the job, with a report and exit code 70: no thread of the driver may end unnoticed.
    """

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._errors: list[tuple[Problem, BaseException | None]] = []

    @property
    def first(self) -> Problem | None:
        return self._errors[0][0] if self._errors else None

    def hook(self, args: threading.ExceptHookArgs) -> None:
        """Record the exception and post it; this is threading.excepthook, called in the failing thread."""
        name = "of hvlaunch" if args.thread is None else args.thread.name
        words = " ".join(f"{args.exc_type.__name__}: {args.exc_value}".split())
        cause = f"internal error in thread {name}: {words}; this is a defect of hvlaunch"
        problem = Defect(cause, hint="the same with --verbose, and report it").problem
        self._errors.append((problem, args.exc_value))
        self._post(ThreadFailed(problem))

    def traceback(self) -> str:
        """Return the traceback of the first exception; empty if no thread has failed."""
        import traceback  # noqa: PLC0415 (after a defect only)

        error = self._errors[0][1] if self._errors else None
        return "" if error is None else "".join(traceback.format_exception(error))


@contextmanager
def failures_as_events(post: Callable[[Event], None]) -> Iterator[ThreadFailures]:
    """Post each exception that a thread does not catch as an event while in the block."""
    failures = ThreadFailures(post)
    before, threading.excepthook = threading.excepthook, failures.hook
    try:
        yield failures
    finally:
        threading.excepthook = before


def loud(call: Callable[P, None]) -> Callable[P, None]:
    """Wrap `call` to report its exceptions to threading.excepthook, for callers that swallow exceptions (an event loop)."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception:  # noqa: BLE001 (every exception is a defect, and is reported)
            kind, error, trace = sys.exc_info()
            _report(kind, error, trace)

    return run


def _report(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    if kind is not None:
        threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))


_CHUNK = 1 << 16
_WINDOW = 1 << 18


class StdinLink(Protocol):
    """The link to a host with readers."""

    host: Host
    stdin_taken: Callable[[int, int], None]

    def send(self, header: Mapping[str, Any], body: bytes, /) -> None: ...


class StdinFeed:
    """Feeds the workers that read the driver's stdin, once they are being started. For the loop's thread."""

    def __init__(self, stdin: int, printer: Printer) -> None:
        self._stdin = stdin
        self._printer = printer
        self._readers: list[tuple[StdinLink, int, int]] = []
        """Link, slot and rank of each worker that reads stdin."""
        self._pump: StdinPump | None = None

    @property
    def reading(self) -> list[int]:
        """The ranks with further input to come."""
        has_ended = self._pump is None or self._pump.has_ended
        return [] if has_ended else [rank for _, _, rank in self._readers]

    def add_reader(self, link: StdinLink, slot: int, rank: int) -> None:
        self._readers.append((link, slot, rank))

    def drop_readers(self) -> None:
        """Feed no worker: a killed driver's stdin cannot be continued, and its workers have got the end of it."""
        self._readers.clear()

    def begin(self, on_input: Callable[[], None]) -> None:
        """Start to read, if any worker reads stdin. `on_input` is called before each piece is passed on."""
        readers = self._readers
        if not readers or self._pump is not None:
            return
        if os.isatty(self._stdin):
            self._printer.read_by([rank for _, _, rank in readers])
        targets = [partial(_send, link, slot) for link, slot, _ in readers]
        pump = StdinPump(self._stdin, targets, self._printer.answered, on_input)
        numbers = {(link.host.name, slot): number for number, (link, slot, _) in enumerate(readers)}

        def take(host: str, slot: int, size: int) -> None:
            pump.taken(numbers[host, slot], size)

        for link, _, _ in readers:
            link.stdin_taken = partial(take, link.host.name)
        self._pump = pump
        pump.start()


def _send(link: StdinLink, slot: int, data: bytes) -> None:
    link.send({"type": "stdin", "slot": slot}, data)


class StdinPump:
    """Reads stdin and calls each of `targets` with the bytes, and with b"" at the end.

    taken() reports the bytes read by a target's worker; at most 256 KiB are on the way.
    """

    def __init__(
        self,
        stdin: int,
        targets: Sequence[Callable[[bytes], None]],
        on_echoed: Callable[[], None] | None = None,
        on_input: Callable[[], None] | None = None,
    ) -> None:
        """`on_echoed` is called for each line that the user has typed on a terminal, before the line is passed on.

        `on_input` is called before each piece of input is passed on.
        """
        self._fd = stdin
        self._on_echoed = on_echoed if os.isatty(stdin) else None
        self._targets = targets
        self._outstanding = [0] * len(targets)
        self._changed = threading.Condition()
        self._on_input = on_input
        self._has_ended = False

    def start(self) -> None:
        """Begin to read, in a thread that ends with the process."""
        # A daemon: a read of a terminal can't be interrupted, and must not keep the process alive.
        threading.Thread(target=self._run, name="stdin", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """True if stdin has ended."""
        return self._has_ended

    def taken(self, index: int, size: int) -> None:
        """Note that the worker behind targets[index] has read `size` bytes."""
        with self._changed:
            self._outstanding[index] -= size
            self._changed.notify()

    def _run(self) -> None:
        while True:
            # The slowest worker sets the pace: all get the same bytes, and none of the bytes are stored here.
            with self._changed:
                self._changed.wait_for(lambda: max(self._outstanding) < _WINDOW)
            if not self._pass_on(self._read()):
                return

    def _read(self) -> bytes | None:
        try:
            return os.read(self._fd, _CHUNK)
        except OSError as error:
            # EIO: the process is in the background of its terminal, whose input is another's and has not ended. Every
            # other error means that stdin is closed.
            return None if error.errno == errno.EIO and os.isatty(self._fd) else b""

    def _pass_on(self, data: bytes | None) -> bool:
        if data is None:
            return False
        if data and self._on_input is not None:
            self._on_input()
        if self._on_echoed is not None and data.endswith(b"\n") and _echoes(self._fd):
            self._on_echoed()
        with self._changed:
            self._outstanding = [size + len(data) for size in self._outstanding]
            self._has_ended = not data
        for target in self._targets:
            target(data)
        return bool(data)


def _echoes(fd: int) -> bool:
    """True if the terminal echoes typed characters."""
    import termios  # noqa: PLC0415 (few jobs read a terminal)

    try:
        return bool(termios.tcgetattr(fd)[3] & termios.ECHO)
    except termios.error:
        return False


def leave_terminal() -> None:
    """Take this process out of its terminal's session, and its standard streams from the terminal."""
    # A leader of a process group can't make a session; without its descriptors the terminal is gone all the same.
    with suppress(OSError):
        os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)


class Detachment:
    """Detaches this process from its terminal, session, stdin, stdout and stderr, once. For the driver's loop."""

    def __init__(
        self, directory: "JobDirectory", printer: Printer, on_detached: Callable[[str], None] | None
    ) -> None:
        """`on_detached` is called with the job's id afterwards."""
        self._directory = directory
        self._printer = printer
        self._on_detached = on_detached
        self._round, self._to_start = -1, 0
        self._is_done = False

    def leave_when_running(self, event: on.Event, actions: Sequence[do.Action], _now: float) -> None:
        """Leave when every worker of a round has started; a watcher."""
        for action in actions:
            if isinstance(action, do.Start):
                if action.round != self._round:
                    self._round, self._to_start = action.round, 0
                self._to_start += len(action.launches)
        if isinstance(event, on.WorkerStarted) and event.round == self._round:
            self._to_start -= 1
            if not self._to_start:
                self.leave()

    def leave(self) -> None:
        """Leave now. Further calls do nothing."""
        if self._is_done:
            return
        self._is_done = True
        self._directory.is_detached = True
        self._printer.go_headless()
        leave_terminal()
        if threading.current_thread() is threading.main_thread():
            # Not SIG_IGN: processes started by the driver would inherit that.
            signal.signal(signal.SIGHUP, lambda *_: None)
        from hvlaunch.outside import start_minder  # noqa: PLC0415 (few jobs leave)

        start_minder(self._directory.path)
        if self._on_detached is not None:
            self._on_detached(self._directory.about["id"])
