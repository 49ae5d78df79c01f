"""The hosts' observers, as the driver has them: what is asked, and what comes of it. docs/architecture.md, "The observer"."""

import json
import threading
import zlib
from binascii import a2b_base64
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hvlaunch.agent.wire.shapes import or_null, plain, record, text, whole
from hvlaunch.driver.observing.agenda import Agenda

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink

__all__ = ["Answer", "Answered", "Observers", "Target"]

_LONGEST = 1 << 24
"""Bytes of an answer, before it was compressed."""
_LONGEST_PROBLEM = 512
_LONGEST_PAUSE = 64.0
_LOOK = 0.1
"""Seconds after which it is looked whether a connection is there again."""
_SAID = record(
    {"id": whole(1, 1 << 53), "answer": lambda _: True, "problem": or_null(text(1 << 16, raw=True))},
    optional=("answer", "problem"),
)


class Answer(NamedTuple):
    """What a host's observer has said to a question. Nothing of `found` has been checked but that it is JSON."""

    host: str
    found: Any = None
    problem: str | None = None
    """Why there is none."""


class Target(NamedTuple):
    """A host that may be asked."""

    host: str
    scratch: str
    """The job's private directory there."""
    workers: Mapping[int, int]
    """The pids of those that live there, by rank."""
    last_output: Mapping[int, float]
    """When a rank has printed last, by the driver's clock."""


Answered: TypeAlias = Callable[[Answer], None]
"""Called once for each question, in any thread; it must not wait for anything."""


class Observers:
    """One for each host that was asked something; begun with the first question. `links` has the links, for any thread."""

    def __init__(
        self,
        links: "Callable[[], Iterable[HostLink]]",
        rank_of: Callable[[str, int, int], int | None],
        clock: Callable[[], float],
    ) -> None:
        """`rank_of` has the newest rank of a worker, by host, slot and start."""
        self._links = links
        self._rank_of = rank_of
        self._clock = clock
        self._agenda = Agenda(clock)
        self._observers: dict[HostLink, _Observer] = {}
        self._making = threading.Lock()

    def ask(
        self,
        kind: str,
        question: Callable[["Target"], Mapping[str, Any] | None],
        within: float,
        answered: Answered,
    ) -> list[str]:
        """Ask all hosts that are there, each what `question` has for it.

        None is no question; bytes under `data` go with it as they are. `answered` is called for each of the hosts that
        are returned, `within` seconds at the latest, perhaps before this returns.
        """
        asked: list[str] = []
        for link in list(self._links()):
            if link.last_heard is None or link.is_closed or link.has_parted:
                continue
            content = question(Target(link.host.name, link.scratch, self._workers(link), link.last_output))
            if content is not None:
                asked.append(link.host.name)
                self._of(link).ask(kind, content, within, answered)
        return asked

    def at(self, when: float, call: Callable[[], None]) -> None:
        """As Agenda.at()."""
        self._agenda.at(when, call)

    def _workers(self, link: "HostLink") -> dict[int, int]:
        pids = list(link.pids.items())
        ranks = {self._rank_of(link.host.name, slot, start): pid for (slot, start), pid in pids}
        return {rank: pid for rank, pid in ranks.items() if rank is not None}

    def _of(self, link: "HostLink") -> "_Observer":
        with self._making:
            if link not in self._observers:
                for old in [old for old in self._observers if old.is_closed]:
                    del self._observers[old]
                self._observers[link] = _Observer(link, self._agenda, self._clock)
                link.observed = self._observers[link].heard
            return self._observers[link]


class _Observer:
    """One host's. One that does not answer is begun anew, with pauses that grow as long as none ever answers."""

    def __init__(self, link: "HostLink", agenda: Agenda, clock: Callable[[], float]) -> None:
        self._link = link
        self._agenda = agenda
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, Answered] = {}
        self._last = 0
        self._is_there = False
        """As far as is known."""
        self._failures = 0
        """In a row."""
        self._not_before = 0.0
        self._problem = ""

    @property
    def is_closed(self) -> bool:
        return self._link.is_closed

    def ask(self, kind: str, content: Mapping[str, Any], within: float, answered: Answered) -> None:
        """What is sent while the connection is lost never comes there: a question waits for another, as it does after a takeover."""
        if not self._link.is_away:
            self._ask(kind, content, within, answered)
        elif within > 0 and not self.is_closed:
            again = partial(self.ask, kind, content, within - _LOOK, answered)
            self._agenda.at(self._clock() + _LOOK, again)
        else:
            answered(Answer(self._link.host.name, problem="the connection to it is lost"))

    def _ask(self, kind: str, content: Mapping[str, Any], within: float, answered: Answered) -> None:
        data: bytes = content.get("data", b"")
        with self._lock:
            is_refused = not self._is_there and self._clock() < self._not_before
            if not is_refused:
                self._last += 1
                number = self._last
                self._open[number] = answered
                header = {**content, "kind": kind, "id": number, "size": len(data)}
                header.pop("data", None)
                if not self._is_there:
                    self._is_there = True
                    from hvlaunch.driver.program.observer_bundle import observer_bundle  # noqa: PLC0415 (when somebody asks)

                    code, program = observer_bundle()
                    self._link.send({"type": "observe", "what": "begin", "code": code}, program)
                line = json.dumps(header).encode("ascii") + b"\n"
                self._link.send({"type": "observe", "what": "ask"}, line + data)
        if is_refused:
            answered(Answer(self._link.host.name, problem=self._problem))
        else:
            self._agenda.at(self._clock() + within, partial(self._overdue, number, within))

    def heard(self, header: Mapping[str, Any], body: bytes) -> None:
        """A frame of type `observed`. What is in it is no agent's word: any process of this user may have said it."""
        if header["what"] == "ended":
            self._fail(f"its observer: {header['cause']}")
            return
        said = _said(body)
        if said is None:
            self._fail("its observer does not speak as one")
            return
        with self._lock:
            self._failures = 0
            answered = self._open.pop(said["id"], None)
        if answered is not None:
            problem = said.get("problem")
            problem = None if problem is None else plain(problem, _LONGEST_PROBLEM)
            answered(Answer(self._link.host.name, said.get("answer"), problem))

    def _overdue(self, number: int, within: float) -> None:
        with self._lock:
            is_open = number in self._open
        if is_open:
            self._fail(f"its observer did not answer within {within:g} s")

    def _fail(self, problem: str) -> None:
        """Another is begun with the next question; the agent ends the one that may be there first."""
        with self._lock:
            was_asked, self._open = self._open, {}
            self._is_there = False
            self._problem = problem
            if was_asked:
                self._failures += 1
                self._not_before = self._clock() + min(2.0**self._failures, _LONGEST_PAUSE)
        for answered in was_asked.values():
            answered(Answer(self._link.host.name, problem=problem))


def _said(body: bytes) -> dict[str, Any] | None:
    """None where it is no answer. Long ones are compressed."""
    try:
        if not body.startswith(b"{"):
            unpacking = zlib.decompressobj()
            body = unpacking.decompress(a2b_base64(body), _LONGEST)
            if not unpacking.eof:
                return None
        said = json.loads(body)
    except (ValueError, RecursionError, zlib.error):
        return None
    return said if _SAID(said) else None
