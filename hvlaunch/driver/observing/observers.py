"""The hosts' observers, as the driver has them: what is asked, and what comes of it. docs/architecture.md, "The observer"."""

import json
import threading
import zlib
from binascii import a2b_base64
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hvlaunch.agent.wire.shapes import or_null, plain, record, text, whole

if TYPE_CHECKING:
    from hvlaunch.driver.links.errands import Errand
    from hvlaunch.driver.links.host_link import HostLink

__all__ = ["Agenda", "Answer", "Answered", "Observers", "Target"]


_LONGEST = 1 << 24
"""Bytes of an answer, before it was compressed."""
_LONGEST_PROBLEM = 512
_AWAY = "the connection to it is lost"
_LONGEST_PAUSE = 64.0
_LOOK = 0.1
"""Seconds after which it is looked whether a connection is there again."""
_LONGEST_LINE = 1 << 19
"""As LONGEST_ANSWER of agent/errands/observer.py."""
_SAID = record(
    {"id": whole(1, 1 << 53), "answer": lambda _: True, "problem": or_null(text(1 << 16, raw=True))},
    optional=("answer", "problem"),
)


class Agenda:
    """For any thread. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._has_thread = False

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have it called then, or soon after. It must not wait for anything."""
        with self._changed:
            heappush(self._calls, (when, next(self._numbers), call))
            self._changed.notify()
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="agenda", daemon=True).start()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while self._calls:
                left = self._calls[0][0] - self._clock()
                if left <= 0:
                    return heappop(self._calls)[2]
                self._changed.wait(left)
            self._has_thread = False
            return None


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
            return self._observers[link]


class _Observer:
    """The observer of one host. One that does not answer is replaced, with pauses that grow as long as none answers."""

    def __init__(self, link: "HostLink", agenda: Agenda, clock: Callable[[], float]) -> None:
        self._link = link
        self._agenda = agenda
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, Answered] = {}
        self._last = 0
        self._errand: Errand | None = None
        self._is_ending = False
        """Whether the errand was told to stop. Its process may hang, and another would hang beside it."""
        self._line = bytearray()
        """The beginning of an answer."""
        self._failures = 0
        """In a row."""
        self._not_before = 0.0
        self._problem = ""

    @property
    def is_closed(self) -> bool:
        return self._link.is_closed

    def ask(self, kind: str, content: Mapping[str, Any], within: float, answered: Answered) -> None:
        """Ask now. While the connection is lost, the question waits for another connection, at most `within` seconds."""
        if not self._link.is_away:
            self._ask(kind, content, within, answered)
        elif within > 0 and not self.is_closed:
            again = partial(self.ask, kind, content, within - _LOOK, answered)
            self._agenda.at(self._clock() + _LOOK, again)
        else:
            answered(Answer(self._link.host.name, problem=_AWAY))

    def _ask(self, kind: str, content: Mapping[str, Any], within: float, answered: Answered) -> None:
        data: bytes = content.get("data", b"")
        with self._lock:
            problem = self._refusal()
            if problem is None:
                self._last += 1
                number = self._last
                self._open[number] = answered
                header = {**content, "kind": kind, "id": number, "size": len(data)}
                header.pop("data", None)
                errand = self._errand
                if errand is not None:
                    errand.write(json.dumps(header).encode("ascii") + b"\n" + data)
        if problem is not None:
            answered(Answer(self._link.host.name, problem=problem))
        else:
            self._agenda.at(self._clock() + within, partial(self._overdue, number, within))

    def _refusal(self) -> str | None:
        """Start the observer unless there is one; the reason why there can't be any. The lock is held."""
        if self._is_ending or (self._errand is None and self._clock() < self._not_before):
            return self._problem
        if self._errand is None:
            from hvlaunch.driver.links.errands import ErrandFailed, Limits  # noqa: PLC0415 (when somebody asks)

            # Its questions have their own time, and py-spy needs much memory for debug symbols.
            unlimited = Limits(seconds=None, memory=None, output=None)
            try:
                self._errand = self._link.errands.start(
                    "observer", {}, unlimited, on_data=self._hear, on_end=self._ended
                )
            except ErrandFailed as error:
                return f"its observer: {error.detail}"
        return None

    def _hear(self, data: bytes) -> None:
        """Bytes of the stream. They are no agent's word: any process of this user may have written them."""
        *lines, last = (bytes(self._line) + data).split(b"\n")
        self._line[:] = last
        answers = [_said(line) for line in lines if len(line) <= _LONGEST_LINE]
        for answer in answers:
            if answer is None:
                break
            with self._lock:
                self._failures = 0
                answered = self._open.pop(answer["id"], None)
            if answered is not None:
                problem = answer.get("problem")
                problem = None if problem is None else plain(problem, _LONGEST_PROBLEM)
                answered(Answer(self._link.host.name, answer.get("answer"), problem))
        if None in answers or len(answers) < len(lines) or len(last) > _LONGEST_LINE:
            self._fail("its observer does not speak as one")

    def _ended(self, errand: "Errand") -> None:
        from hvlaunch.driver.links.errands import ErrandFailed  # noqa: PLC0415 (as above)

        cause = "it has ended"
        try:
            errand.result()
        except ErrandFailed as error:
            cause = error.detail
        with self._lock:
            self._errand = None
            was_ending, self._is_ending = self._is_ending, False
            self._line.clear()
        if not was_ending:
            self._fail(f"its observer: {cause}")

    def _overdue(self, number: int, within: float) -> None:
        with self._lock:
            answered = self._open.pop(number, None) if self._link.is_away else None
            is_open = number in self._open
        if answered is not None:
            # Its answer comes over the next connection, too late: no reason to replace the observer.
            answered(Answer(self._link.host.name, problem=_AWAY))
        elif is_open:
            self._fail(f"its observer did not answer within {within:g} s")

    def _fail(self, problem: str) -> None:
        """Stop the observer, and tell everybody who waits for an answer. The next question starts another."""
        with self._lock:
            was_asked, self._open = self._open, {}
            errand = self._errand
            self._is_ending = errand is not None
            self._problem = problem
            if was_asked:
                self._failures += 1
                self._not_before = self._clock() + min(2.0**self._failures, _LONGEST_PAUSE)
        if errand is not None:
            errand.stop()
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
