"""A worker's part in an elastic job, as it speaks of it with the driver: asking, being placed, being warned, beating."""

import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.client_errors import RendezvousClosed, RendezvousError, RendezvousUnreachable
from hvlaunch.rendezvous.requests import WrongCertificate
from hvlaunch.rendezvous.round_messages import (
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
    """The driver has no use for this worker any more; `args[0]` is why."""


class Membership:
    """Speaks for the worker `worker` (its id) through `client`. `beat` is seconds between signs of life.

    The signs of life come from a thread of Python, on purpose: a process that is stopped, or whose
    interpreter is held, is silent.
    """

    def __init__(self, client: Client, worker: str, *, beat: float) -> None:
        self._client = client
        self._worker = worker
        self._beat = beat
        self.last_round = -1
        """The last round that this process was placed in."""
        self._commits = -1
        self._met = -1
        self._beat_now = threading.Event()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._notices: dict[int, Notice] = {}
        self._round: int | None = None
        self._on_broken: Callable[[], object] = _nothing

    def start(self) -> None:
        """Begin to beat, and to listen to what becomes of rounds, in threads that end with the process."""
        self._ended = threading.Event()
        self._commits = -1
        for work in (self._send_beats, self._watch_rounds):
            threading.Thread(
                target=work, args=(self._ended,), name=f"hvlaunch {work.__name__}", daemon=True
            ).start()

    def finish(self, *, is_done: bool = False) -> None:
        """Tell the driver that it will hear no more, and whether training is done; what is left to do may take its time."""
        self._ended.set()
        self._beat_now.set()
        with suppress(RendezvousError):
            self._client.put(
                BEATS, self._worker, encode(Beat(self._commits, last=True, round=self._met, done=is_done))
            )

    def ask(self, commit: int, cause: str | None) -> None:
        """Tell the driver that this worker is ready for a place (see Ask). Raises RendezvousError."""
        ask = encode(Ask(self.last_round, commit, cause and cause[:_LONGEST_CAUSE]))
        patiently(lambda: self._client.put(ASKS, self._worker, ask))

    def grant(self) -> Grant:
        """The worker's place in a round later than its last, as soon as there is one.

        Raises Dismissed where there will be none, and RendezvousError.
        """
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
        """From now on call `on_broken`, in another thread, once, when the round is said to be broken."""
        with self._changed:
            self._round, self._on_broken = round_number, on_broken
        self._warn()

    def leave(self) -> None:
        """The round is over for this worker."""
        with self._changed:
            self._round, self._on_broken = None, _nothing

    @property
    def is_changing(self) -> bool:
        """Whether the round is to be left at the next occasion."""
        with self._changed:
            return self._round in self._notices

    def broken(self, round_number: int, timeout: float) -> Notice | None:
        """The word that the round is broken, if it comes within `timeout` seconds."""

        def found() -> bool:
            notice = self._notices.get(round_number)
            return notice is not None and notice.state == "broken"

        with self._changed:
            return self._notices[round_number] if self._changed.wait_for(found, timeout) else None

    def committed(self, commits: int) -> None:
        """Let the next sign of life come now, with the number of commits."""
        self._commits = commits
        self._beat_now.set()

    def met(self) -> None:
        """The workers of the round have all come together: let the driver know."""
        self._met = self.last_round
        self._beat_now.set()

    def _send_beats(self, ended: threading.Event) -> None:
        while not ended.is_set():
            try:
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
            notice = None if self._round is None else self._notices.get(self._round)
            if notice is None or notice.state != "broken":
                return
            call, self._on_broken = self._on_broken, _nothing
        call()


def patiently(request: Callable[[], T]) -> T:
    """What it returns as soon as the driver can be reached: the network may be cut, and heal.

    Where it does not, the agent of this host notices too, and ends this process when the lease is over. Raises other RendezvousErrors.
    """
    while True:
        try:
            return request()
        except RendezvousUnreachable as error:  # noqa: PERF203 (an attempt each)
            if isinstance(error.__cause__, ssl.SSLError | WrongCertificate):
                raise
            time.sleep(_PAUSE)


def _nothing() -> None:
    pass
