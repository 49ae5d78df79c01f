"""A worker's conversation with the driver of an elastic job: ask for a place, receive it, hear of broken rounds, send beats."""

import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from hvlaunch.rendezvous import RendezvousClosed, RendezvousError, RendezvousUnreachable
from hvlaunch.rendezvous.client import Client, WrongCertificate
from hvlaunch.rendezvous.messages import (
    ASKS,
    BEATS,
    PLACES,
    ROUNDS,
    Ask,
    Beat,
    Grant,
    Notice,
    decode,
    encode,
)

__all__ = ["Dismissed", "Membership", "patiently"]

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
            # A wrong certificate never becomes right by waiting; repeating would hide an attack.
            if isinstance(error.__cause__, ssl.SSLError | WrongCertificate):
                raise
            time.sleep(_PAUSE)


def _nothing() -> None:
    pass
