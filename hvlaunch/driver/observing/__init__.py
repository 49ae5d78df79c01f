"""Observing a job: requests to the loop, which answers them between two events, and the hosts' observers.

Only the loop's thread may look at the engine. An observer is an errand on a host; this end has its questions and answers, and
replaces observers that hang.
"""

import json
import threading
import zlib
from binascii import a2b_base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hvlaunch.agent.wire.frames import or_null, plain, record, text, whole
from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from hvlaunch.driver.links.errands import Errand
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.driver.observing.observation import Observation
    from hvlaunch.engine.events import MoveWanted
    from hvlaunch.job import CollectOptions
    from hvlaunch.telemetry.stack import ProcessStack

__all__ = [
    "Agenda",
    "Answer",
    "Answered",
    "CollectWanted",
    "Collector",
    "Inquiry",
    "MoveRequest",
    "Observe",
    "Observers",
    "StacksWanted",
    "Target",
]


class Inquiry(NamedTuple):
    """A request for the overview of the job."""

    answer: Callable[[Mapping[str, Any]], None]


class Observe(NamedTuple):
    """A request for the object that has the samples of the hosts."""

    answer: "Callable[[Observation], None]"


class MoveRequest(NamedTuple):
    """A user's request to move a host's workers."""

    event: "MoveWanted"
    answer: Callable[[str | None], None]
    """Called once, with the reason of a refusal, or None if the move begins."""


class StacksWanted(NamedTuple):
    """A request for the stacks of workers."""

    answer: "Callable[[list[ProcessStack]], None]"
    """Called once, from any thread."""
    ranks: tuple[range, ...] | None = None
    """Ranks to take stacks of, or None for every rank."""
    native: bool = False
    """Include the frames of C and C++."""


class CollectWanted(NamedTuple):
    """A request for files of the workers."""

    answer: Callable[[Mapping[str, Any]], None]
    """Called once, from any thread."""
    options: "tuple[CollectOptions, ...]"
    """The files, or nothing for the files of `--collect`."""


class Collector(Protocol):
    """Brings files of the workers back."""

    def release(self, link: "HostLink", directory: str, then: Callable[[], None]) -> None:
        """Collect the files of `--collect` from a host; call `then` at the end, in any thread."""

    def collect(self, hosts: "Sequence[tuple[HostLink, str]]", request: CollectWanted) -> None:
        """Collect files of running workers' hosts. The hosts come with the workers' directories."""


_LONGEST = 1 << 24
"""Bytes of an answer before compression."""
_LONGEST_PROBLEM = 512
_AWAY = "the connection to it is lost"
_LONGEST_PAUSE = 64.0
_LOOK = 0.1
"""Seconds between two looks for another connection."""
_LONGEST_LINE = 1 << 19
"""As LONGEST_ANSWER of agent/errands/observer/."""
_SAID = record(
    {"id": whole(1, 1 << 53), "answer": lambda _: True, "problem": or_null(text(1 << 16, raw=True))},
    optional=("answer", "problem"),
)


class Agenda:
    """Makes calls at given times, on a thread that lives while calls are due. For any thread; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._has_thread = False

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Make the call at this time or soon after. The call must not block."""
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
    """An observer's answer. `value` is JSON; its form is unchecked."""

    host: str
    value: Any = None
    problem: str | None = None
    """Reason for the lack of an answer."""


class Target(NamedTuple):
    """A host to ask."""

    host: str
    scratch: str
    """The job's private directory there."""
    workers: Mapping[int, int]
    """Pids of living workers by rank."""
    last_output: Mapping[int, float]
    """Time of each rank's last output by the driver's clock."""


Answered: TypeAlias = Callable[[Answer], None]
"""Called once for each question, on any thread. It must not block."""


class Observers:
    """All observers, started with the first question to their host. For any thread; `links` returns the links."""

    def __init__(
        self,
        links: "Callable[[], Iterable[HostLink]]",
        rank_of: Callable[[str, int, int], int | None],
        clock: Callable[[], float],
    ) -> None:
        """`rank_of` returns the newest rank of a worker by host, slot and start."""
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
        """Ask every connected host its question, as returned by `question`, if any. Return the names of these hosts.

        Bytes under `data` follow the question unchanged. `answered` is called for each of these hosts, `within` seconds at
        the latest, perhaps before ask() returns.
        """
        asked: list[str] = []
        for link in list(self._links()):
            # A host without a hello, or after its bye, has no agent that could start an observer.
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
        # A worker without a rank was replaced, and its process is about to end.
        ranks = {self._rank_of(link.host.name, slot, start): pid for (slot, start), pid in pids}
        return {rank: pid for rank, pid in ranks.items() if rank is not None}

    def _of(self, link: "HostLink") -> "_Observer":
        with self._making:
            if link not in self._observers:
                # Hosts come and go in an elastic job: their observers must not pile up.
                for old in [old for old in self._observers if old.is_closed]:
                    del self._observers[old]
                self._observers[link] = _Observer(link, self._agenda, self._clock)
            return self._observers[link]


class _Observer:
    """A host's observer. A silent observer is replaced, after pauses that grow until an answer comes."""

    def __init__(self, link: "HostLink", agenda: Agenda, clock: Callable[[], float]) -> None:
        self._link = link
        self._agenda = agenda
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, Answered] = {}
        self._last = 0
        self._errand: Errand | None = None
        self._is_ending = False
        """True once the errand was told to stop. A hanging process must end before the next starts beside it."""
        self._line = bytearray()
        """Beginning of the next answer."""
        self._failures = 0
        """Failures in a row."""
        self._not_before = 0.0
        self._problem = ""

    @property
    def is_closed(self) -> bool:
        return self._link.is_closed

    def ask(self, kind: str, content: Mapping[str, Any], within: float, answered: Answered) -> None:
        """Ask now. While the connection is lost the question waits for the next connection, at most `within` seconds."""
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
                    # Under the lock, so that two questions of different threads do not mix.
                    errand.write(json.dumps(header).encode("ascii") + b"\n" + data)
        if problem is not None:
            answered(Answer(self._link.host.name, problem=problem))
        else:
            self._agenda.at(self._clock() + within, partial(self._overdue, number, within))

    def _refusal(self) -> str | None:
        """Start the observer if needed. Return the reason if there can't be an observer now. The lock is held."""
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
        """Take bytes of the stream. Any process of this user may have written them: nonsense never costs the host."""
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
            self._fail("its observer sent an invalid answer")

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
        """Stop the observer, and answer every open question with the problem. The next question starts another observer."""
        with self._lock:
            # Answers of the old observer may still come: their numbers are unknown from here on.
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
    """Parse an answer, which may be compressed; None for a wrong form."""
    try:
        if not body.startswith(b"{"):
            # Bounded, since a few bytes could unpack to gigabytes.
            unpacking = zlib.decompressobj()
            body = unpacking.decompress(a2b_base64(body), _LONGEST)
            if not unpacking.eof:
                return None
        answer = json.loads(body)
    except (ValueError, RecursionError, zlib.error):
        return None
    return answer if _SAID(answer) else None
