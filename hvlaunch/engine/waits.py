"""The table of a job's waits: thing, time limit and consequence; and cool-downs, which get longer. Pure."""

import heapq
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from enum import Enum, unique

__all__ = ["ALWAYS", "AT_WORK_ALWAYS", "ROUND_WAITS", "Cooldown", "Wait", "Waits"]


@unique
class Wait(Enum):
    """A kind of wait: thing, end, bound, and consequence of reaching the bound."""

    FIRST_LIST = (
        "the first list of hosts",
        "it comes, or the script fails",
        "`--discovery-timeout` + 5 s",
        "the job ends",
    )
    CONNECTING = (
        "a host's agent, and its copy of the project",
        "its hello; the copy is complete",
        "`--start-timeout` + 0.5 s; 60 s after the copy's last progress",
        "the host is excluded; a static job ends, or skips it",
    )
    PARTING = "an agent that ends on its own account", "it closes", "grace + 25 s", "it is abandoned"
    CLOSING = (
        "an agent that was released",
        "its bye, and the end of its channel",
        "25 s; 60 s after the last progress of `--collect`",
        "it is abandoned",
    )
    PROBING = (
        "addresses between hosts",
        "all hosts have answered",
        "8 s; 0.3 s once each host is reached",
        "the network is used as it is",
    )
    PROBING_AGAIN = (
        "a host that does not answer, or that another can't reach",
        "it answers, or is lost",
        "`--lease` + 16 s",
        "one of the two is left out, the one that does not answer if the other does",
    )
    PROBE_RETRY = (
        "the next try of two hosts that can't reach each other",
        "its time",
        "2 s",
        "they try once more",
    )
    SLOTS = "slots for a round", "enough are there", "`--elastic-timeout`", "the job ends"
    GATHERING = (
        "hosts or workers on their way, when there are enough others",
        "all have come",
        "5 s; 30 s before the first round",
        "the round begins without them",
    )
    HOLD = "a pool that flaps", "its time", "15 to 240 s", "the round may end for a change of the pool"
    COOLDOWN = (
        "an excluded host",
        "its time; a lost host's also ends when it is needed",
        "the option's second number",
        "the host is used again",
    )
    SLOT_COOLDOWN = (
        "a slot whose worker never asked",
        "its time, or its host is excluded",
        "300 s",
        "another worker is started",
    )
    MOVING = (
        "workers that are to take over those of a host (`hvlaunch move HOST`)",
        "enough wait for a place",
        "`--elastic-timeout`",
        "the host keeps its workers",
    )
    RESTART = (
        "the restart of a failed worker, or of all workers of its role",
        "its time",
        "4 s",
        "they start again in their slots",
    )
    MEETING = (
        "the workers of a round",
        "all have said that they have met",
        "`--reset-timeout`",
        "the round is broken",
    )
    LEAVING = (
        "workers of a round that is broken, or that others have left",
        "they ask for their next place",
        "`--reset-timeout`; `--exit-grace` where a new training begins",
        "they are killed",
    )
    LEAVING_UNHEARD = (
        "the same, on hosts that did not answer",
        "they ask",
        "twice `--reset-timeout`, and `--lease`",
        "they are killed",
    )
    RETURNING = (
        "workers of a host that was set aside (`--suspect-after`), and answers again",
        "they ask for their next place",
        "`--reset-timeout`",
        "they are stopped, and others are started",
    )
    COMMIT = "the next commit of a round", "it comes", "`--commit-timeout`", "the round is broken"
    SETTLING = (
        "the cause of a failure that looks like a consequence",
        "another worker fails",
        "`--settle`",
        "the first failure counts",
    )
    DRAINING = "a worker whose slot is gone", "its next commit", "`--drain-timeout`", "it is stopped"
    ENDING = (
        "the end of a worker that was stopped",
        "it ends",
        "SIGKILL + 12 to 17 s, in a static job + 25 to 30 s; longer where its host did not answer, by `--lease` at most",
        "its host is lost, or tells its pids when it closes",
    )
    SILENCE_LOOK = (
        "the next look for silent workers",
        "its time",
        "an eighth of `--worker-timeout`",
        "workers that were silent for `--worker-timeout` are killed; twice this and `--lease` where their host does not answer",
    )
    ENDING_LOOK = "the next look for workers that do not end", "its time", "5 s", "see the end of a worker"

    def __init__(self, thing: str, end: str, bound: str, then: str) -> None:
        self.thing = thing
        self.end = end
        self.bound = bound
        self.then = then
        self.index = len(type(self).__members__)
        self.is_prolonged = True
        """False if the wait is over at its time whether the driver was stopped or not, since it is for no message."""
        self.may_pass = False
        """True if nothing must follow at once when the time is over."""


_OF_TIME_ALONE = frozenset(
    {
        Wait.PROBE_RETRY,
        Wait.GATHERING,
        Wait.HOLD,
        Wait.COOLDOWN,
        Wait.SLOT_COOLDOWN,
        Wait.RESTART,
        Wait.LEAVING_UNHEARD,
        Wait.SILENCE_LOOK,
        Wait.ENDING_LOOK,
    }
)
_PASSING = frozenset(
    {
        Wait.PROBING,
        Wait.PROBING_AGAIN,
        Wait.PROBE_RETRY,
        Wait.GATHERING,
        Wait.HOLD,
        Wait.COOLDOWN,
        Wait.SLOT_COOLDOWN,
    }
)

for _wait in Wait:
    _wait.is_prolonged = _wait not in _OF_TIME_ALONE
    _wait.may_pass = _wait in _PASSING

ROUND_WAITS = (
    Wait.HOLD,
    Wait.MEETING,
    Wait.LEAVING,
    Wait.LEAVING_UNHEARD,
    Wait.COMMIT,
    Wait.SETTLING,
)
"""Waits that end with their round."""
ALWAYS = (Wait.CONNECTING, Wait.PARTING, Wait.CLOSING, Wait.ENDING_LOOK)
"""Waits that count in each phase of a job."""
AT_WORK_ALWAYS = (
    Wait.FIRST_LIST,
    Wait.DRAINING,
    Wait.RETURNING,
    Wait.GATHERING,
    Wait.COOLDOWN,
    Wait.MOVING,
)
"""Waits that count while another round is possible."""


class Waits(Mapping[tuple[Wait, Hashable], float]):
    """The current waits and their time limits, in seconds of the driver's clock.

    `of` is the host, worker, seat or pair of hosts that the job waits for; None for a unique wait.
    """

    def __init__(self) -> None:
        self._begun: list[dict[Hashable, tuple[float, float]]] = [{} for _ in Wait]
        """By kind: start and bound in seconds."""
        # A heap for each kind: which kinds count changes from turn to turn. An entry that the table
        # above does not have any more is skipped when it comes to the top.
        self._heaps: list[list[tuple[float, int, Hashable]]] = [[] for _ in Wait]
        self._count = 0

    def __getitem__(self, key: tuple[Wait, Hashable]) -> float:
        since, bound = self._begun[key[0].index][key[1]]
        return since + bound

    def __iter__(self) -> Iterator[tuple[Wait, Hashable]]:
        return ((wait, of) for wait in Wait for of in self._begun[wait.index])

    def __len__(self) -> int:
        return sum(map(len, self._begun))

    def begin(self, wait: Wait, of: Hashable, until: float, bound: float = 0.0) -> None:
        """Begin to wait until then, or for `bound` seconds more than that; replaces the same wait."""
        # The two are added when they are needed: so a wait that is prolonged ends at the same time as one that began later.
        self._begun[wait.index][of] = until, bound
        self._push(wait, of)

    def _push(self, wait: Wait, of: Hashable) -> None:
        # The counter decides between equal times: hosts and workers have no order.
        self._count += 1
        heapq.heappush(self._heaps[wait.index], (self[wait, of], self._count, of))

    def end(self, wait: Wait, of: Hashable = None) -> None:
        """End the wait, if it has begun."""
        self._begun[wait.index].pop(of, None)

    def end_all(self, waits: Iterable[Wait]) -> None:
        """End all waits of these kinds."""
        for wait in waits:
            self._begun[wait.index].clear()
            self._heaps[wait.index].clear()

    def until(self, wait: Wait, of: Hashable = None) -> float | None:
        """Return the time limit; None if the wait has not begun."""
        return self[wait, of] if of in self._begun[wait.index] else None

    def since(self, wait: Wait, of: Hashable = None) -> float | None:
        """Return the start of a wait with a bound of its own."""
        begun = self._begun[wait.index].get(of)
        return None if begun is None else begun[0]

    def has(self, wait: Wait, of: Hashable = None) -> bool:
        return of in self._begun[wait.index]

    def is_over(self, wait: Wait, now: float, of: Hashable = None) -> bool:
        """True if the wait has begun, and its time has passed."""
        until = self.until(wait, of)
        return until is not None and now >= until

    def all_of(self, wait: Wait) -> Mapping[Hashable, object]:
        """Return everything that is awaited in this way, in order of beginning."""
        return self._begun[wait.index]

    def due(self, wait: Wait, now: float) -> list[Hashable]:
        """Return everything whose wait is over, in order of beginning."""
        return [of for of, (since, bound) in self._begun[wait.index].items() if since + bound <= now]

    def prolong(self, seconds: float) -> None:
        """Extend all waits for messages."""
        for wait in Wait:
            begun = self._begun[wait.index]
            # A heap cannot change its entries in place, so it is built anew.
            if not wait.is_prolonged or not begun:
                continue
            for of, (since, bound) in begun.items():
                begun[of] = since + seconds, bound
            self._heaps[wait.index].clear()
            for of in begun:
                self._push(wait, of)

    def forget_over(self, wait: Wait, now: float) -> None:
        """Drop the waits of this kind that are over."""
        if self._begun[wait.index]:
            for of in self.due(wait, now):
                self.end(wait, of)

    def next(self, waits: Iterable[Wait], now: float) -> float | None:
        """Return the first time limit among these kinds; passed ones count only if something must follow."""
        first = None
        for wait in waits:
            if self._heaps[wait.index]:
                until = self._top(wait, now)
                if until is not None and (first is None or until < first):
                    first = until
        return first

    def _top(self, wait: Wait, now: float) -> float | None:
        heap, begun = self._heaps[wait.index], self._begun[wait.index]
        while heap:
            until, _, of = heap[0]
            # An entry counts only if the table still has this time limit.
            if of in begun and self[wait, of] == until and not (wait.may_pass and until <= now):
                return until
            heapq.heappop(heap)
        return None


_MOST_DOUBLINGS = 30
"""Of a cool-down: the exponent is bounded, since 2.0 ** 1024 overflows."""


class Cooldown:
    """A cool-down that doubles each time, until the host or slot was well for twice the longest one."""

    def __init__(self) -> None:
        self.until = -math.inf
        self._before: float | None = None
        """End of the newest cool-down of a retired host."""
        self.count = 0
        """Cool-downs in a row."""

    def begin(self, now: float, bounds: tuple[float, float] | None) -> float:
        """Begin a cool-down at `now`, between the bounds (least, most); None excludes for good. Returns its seconds."""
        if self._before is not None:
            self.until, self._before = self._before, None
        if bounds is None:
            self.until = math.inf
            return math.inf
        least, most = bounds
        # A host that was well for this long begins with the shortest cool-down again.
        if now > self.until + 2 * most:
            self.count = 0
        seconds = min(most, least * 2.0 ** min(self.count, _MOST_DOUBLINGS))
        self.count += 1
        self.until = now + seconds
        return seconds

    def holds(self, now: float) -> bool:
        return now < self.until

    @property
    def is_for_good(self) -> bool:
        return self.until == math.inf

    def retire(self) -> None:
        """Exclude for good without any failure."""
        self._before, self.until = self.until, math.inf

    def cut_short(self, now: float) -> None:
        """End the cool-down now; the next one is still twice as long."""
        self.until = min(self.until, now)

    def lift(self) -> None:
        """End a cool-down that is for good."""
        if self.is_for_good:
            self.until = -math.inf if self._before is None else self._before
            self._before = None
