"""A worker's reports to the driver: progress, `progress(120, total=1000, loss=0.31)`; and its conversation with the driver of an elastic job.

docs/interfaces/rendezvous-http.md has the format of progress for other languages. In an elastic job a worker asks for a place,
receives it, hears of broken rounds, and sends beats.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import isfinite
from operator import index
from typing import TYPE_CHECKING, Protocol, SupportsFloat, SupportsIndex, TypeVar

from hvlaunch.rendezvous import RendezvousClosed, RendezvousError, RendezvousUnreachable
from hvlaunch.rendezvous.messages import (
    ASKS,
    BEATS,
    LONGEST_NAME,
    MOST_METRICS,
    PLACES,
    PROGRESS,
    ROUNDS,
    Ask,
    Beat,
    Grant,
    Notice,
    decode,
    encode,
)

# Reports outside of hvlaunch need no client, which takes 20 ms.
if TYPE_CHECKING:
    from hvlaunch.rendezvous.client import Client

__all__ = ["Dismissed", "Membership", "Teller", "new_teller", "patiently", "progress"]

_PROGRESS_PAUSE = 0.5
"""Seconds between two messages."""
_LATE = 1.0
"""Seconds after which the newest step is sent without a successor; more than _PROGRESS_PAUSE."""


class _Tells(Protocol):
    def tell(
        self, step: SupportsIndex, total: SupportsIndex | None, metrics: Mapping[str, SupportsFloat]
    ) -> None: ...


def progress(step: SupportsIndex, total: SupportsIndex | None = None, **metrics: SupportsFloat) -> None:
    """Report this worker's step, the total number of steps, and some numbers, such as the loss.

    A call takes a microsecond and never waits: a thread sends the newest report twice a second at most, and only then are
    metrics read. Without hvlaunch a call does nothing. Raises TypeError and ValueError for values without a number.
    """
    global _teller  # noqa: PLW0603 (a process has one)
    if _teller is None:
        _teller = new_teller(PROGRESS)
    _teller.tell(step, total, metrics)


class Teller:
    """Sends reports with `put` from a daemon thread; errors of `put` are its own affair."""

    def __init__(self, put: Callable[[bytes], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._put = put
        self._clock = clock
        self._due = 0.0
        self._newest: tuple[int, int | None] = 0, None
        self._metrics: Mapping[str, float | None] = {}
        self._has_news = threading.Event()
        threading.Thread(target=self._run, name="hvlaunch progress", daemon=True).start()

    def tell(
        self, step: SupportsIndex, total: SupportsIndex | None, metrics: Mapping[str, SupportsFloat]
    ) -> None:
        """Take a report, as progress() does."""
        newest = index(step), None if total is None else index(total)
        now = self._clock()
        # Metrics may live on a GPU: reading them is left to the calls whose report is sent.
        if now >= self._due:
            self._metrics = _numbers(metrics)
            self._due = now + _PROGRESS_PAUSE
            self._newest = newest
            self._has_news.set()
        else:
            self._newest = newest

    def _run(self) -> None:
        self._has_news.wait()
        while True:
            self._has_news.clear()
            sent = self._newest
            step, total = sent
            self._put(json.dumps({"step": step, "total": total, "metrics": self._metrics}).encode("ascii"))
            # The last step of a burst must arrive too, even without a following step.
            if not self._has_news.wait(_LATE) and self._newest == sent:
                self._has_news.wait()


class _Silent:
    """Ignores reports: no driver listens."""

    def tell(self, step: object, total: object, metrics: object) -> None:
        pass


_teller: _Tells | None = None


def new_teller(scope: str, prefix: str = "") -> _Tells:
    """Return a teller for this worker's key in the scope, behind `prefix`; a silent one outside of hvlaunch."""
    # Missing outside of hvlaunch, where progress() may be called too.
    worker = os.environ.get("HVLAUNCH_WORKER")
    if not worker or not os.environ.get("HVLAUNCH_RENDEZVOUS") or not os.environ.get("HVLAUNCH_TOKEN"):
        return _Silent()
    from hvlaunch.rendezvous.client import Client  # noqa: PLC0415 (see the top)

    client = Client.from_environment()

    def put(message: bytes) -> None:
        with suppress(RendezvousError):  # training must go on; the next step may get through
            client.put(scope, prefix + worker, message)

    return Teller(put)


def _numbers(metrics: Mapping[str, SupportsFloat]) -> dict[str, float | None]:
    """Return the metrics for JSON, which has only finite numbers. Raises TypeError, ValueError."""
    if len(metrics) > MOST_METRICS or any(len(name) > LONGEST_NAME for name in metrics):
        raise ValueError(f"at most {MOST_METRICS} metrics, with names of at most {LONGEST_NAME} letters")
    numbers = {name: float(value) for name, value in metrics.items()}
    return {name: value if isfinite(value) else None for name, value in numbers.items()}


def _forget() -> None:
    """Start anew in a forked child, which lacks the thread."""
    global _teller  # noqa: PLW0603 (as above)
    _teller = None


os.register_at_fork(after_in_child=_forget)


T = TypeVar("T")

_LONGEST_CAUSE = 4096

_POLL = 30.0
_PAUSE = 1.0


class Dismissed(Exception):
    """Not an error: the job has no place for this worker. The worker ends with 0; `args[0]` is the reason.

    Try: leave this to `elastic.run`.
    """


class Membership:
    """Speaks for the worker with id `worker` through `client`; `beat` is the number of seconds between two beats.

    A Python thread sends the beats on purpose: a stopped process, or one whose interpreter is held, sends none.
    """

    def __init__(self, client: Client, worker: str, *, beat: float) -> None:
        self._client = client
        self._worker = worker
        self._beat = beat
        self.last_round = -1
        """The last round in which this process had a place."""
        self._commits = -1
        self._met = -1
        # An event instead of a sleep: a commit or the end must be reported at once, not at the next beat.
        self._beat_now = threading.Event()
        self._ended = threading.Event()
        # A slow beat must not arrive after the last one: the worker would seem to be silent.
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._notices: dict[int, Notice] = {}
        self._round: int | None = None
        self._on_broken: Callable[[], object] = _nothing

    def start(self) -> None:
        """Start the threads that send beats and watch rounds. They end with the process."""
        self._ended = threading.Event()
        self._commits = -1
        for work in (self._send_beats, self._watch_rounds):
            threading.Thread(
                target=work, args=(self._ended,), name=f"hvlaunch {work.__name__}", daemon=True
            ).start()

    def finish(self, *, is_done: bool = False) -> None:
        """Tell the driver that no beat will follow, and whether training is done. Work after training may take any time."""
        self._ended.set()
        self._beat_now.set()
        with suppress(RendezvousError), self._sending:
            self._client.put(
                BEATS, self._worker, encode(Beat(self._commits, last=True, round=self._met, done=is_done))
            )

    def ask(self, commit: int, cause: str | None) -> None:
        """Tell the driver that this worker is ready for a place (see Ask). Raises RendezvousError."""
        ask = encode(Ask(self.last_round, commit, cause and cause[:_LONGEST_CAUSE]))
        patiently(lambda: self._client.put(ASKS, self._worker, ask))

    def grant(self) -> Grant:
        """Wait for a place in a later round than the last one, and return it.

        Raises Dismissed if the job has no place for this worker, and RendezvousError.
        """
        # Version 0 asks for the present value too: the grant may have come before this request.
        since = 0
        while True:
            changes = patiently(partial(self._client.watch, PLACES, self._worker, since=since, timeout=_POLL))
            since = changes.version
            value = changes.values.get(self._worker)
            grant = None if value is None else decode(Grant, value)
            if grant is not None and grant.leave is not None:
                raise Dismissed(grant.leave)
            if grant is not None and grant.round > self.last_round:
                self.last_round = grant.round
                return grant

    def enter(self, round_number: int, on_broken: Callable[[], object]) -> None:
        """Call `on_broken` once, in another thread, when the driver announces that the round is broken."""
        with self._changed:
            # The lock pairs the round with its callback: a notice of the last round must not end the new one.
            self._round, self._on_broken = round_number, on_broken
        self._warn()

    def leave(self) -> None:
        """Stop watching the present round."""
        with self._changed:
            self._round, self._on_broken = None, _nothing

    @property
    def is_changing(self) -> bool:
        """True if the present round should be left at the next commit."""
        with self._changed:
            return self._round in self._notices

    def broken(self, round_number: int, timeout: float) -> Notice | None:
        """Wait up to `timeout` seconds for the notice that the round is broken; None if it does not come."""

        def found() -> bool:
            notice = self._notices.get(round_number)
            return notice is not None and notice.state == "broken"

        with self._changed:
            return self._notices[round_number] if self._changed.wait_for(found, timeout) else None

    def committed(self, commits: int) -> None:
        """Send the next beat now, with the number of commits."""
        self._commits = commits
        self._beat_now.set()

    def met(self) -> None:
        """Tell the driver that all workers of the round have met."""
        self._met = self.last_round
        self._beat_now.set()

    def _send_beats(self, ended: threading.Event) -> None:
        while not ended.is_set():
            try:
                with self._sending:
                    if ended.is_set():
                        return
                    self._client.put(BEATS, self._worker, encode(Beat(self._commits, round=self._met)))
            except RendezvousClosed:
                return
            except RendezvousError:
                ended.wait(_PAUSE)
                continue  # the driver is to hear of us as soon as it can
            self._beat_now.wait(self._beat)
            self._beat_now.clear()

    def _watch_rounds(self, ended: threading.Event) -> None:
        since = 0
        while not ended.is_set():
            try:
                changes = self._client.watch(ROUNDS, since=since, timeout=_POLL)
            except RendezvousClosed:
                return
            except RendezvousError:
                ended.wait(_PAUSE)
                continue
            since = changes.version
            with self._changed:
                for name, value in changes.values.items():
                    with suppress(ValueError):  # any worker may write here, nonsense too
                        if value is not None:
                            self._notices[int(name)] = decode(Notice, value)
                self._changed.notify_all()
            self._warn()

    def _warn(self) -> None:
        with self._changed:
            # Taken and cleared under the lock, called without it: the callback aborts groups, which may take
            # long.
            notice = None if self._round is None else self._notices.get(self._round)
            if notice is None or notice.state != "broken":
                return
            call, self._on_broken = self._on_broken, _nothing
        call()


def patiently(request: Callable[[], T]) -> T:
    """Repeat `request` until the driver can be reached: the network may be cut and heal.

    If the cut lasts, the agent of this host notices too and ends this process after the lease. Raises all other RendezvousErrors.
    """
    while True:
        try:
            return request()
        except RendezvousUnreachable as error:  # noqa: PERF203 (an attempt each)
            import ssl  # noqa: PLC0415 (see the top; the client that failed has loaded both)

            from hvlaunch.rendezvous.client import WrongCertificate  # noqa: PLC0415 (as above)

            # A wrong certificate never becomes right by waiting; repeating would hide an attack.
            if isinstance(error.__cause__, ssl.SSLError | WrongCertificate):
                raise
            time.sleep(_PAUSE)


def _nothing() -> None:
    pass
