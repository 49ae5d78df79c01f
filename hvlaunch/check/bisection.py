"""Search for a bad host or link by runs of a command on sets of hosts. Pure.

Each round runs the command on disjoint sets at the same time: first on every host together, then on each host alone, then
on the sets with the most informative results. Explanations are weighed by Bayes' rule. Hence flaky faults are found too,
and the conclusion has a confidence.
"""

from collections.abc import Iterator, Sequence
from math import ceil, floor, log, log2
from typing import Literal

from hvlaunch.named_tuples import NamedTuple

__all__ = ["Bisection", "Conclusion", "most_rounds"]

Cause = Literal["nothing", "everything", "host", "network", "link", "unclear"]
Sets = tuple[tuple[str, ...], ...]

_CHANCES = {1.0: 0.7, 0.8: 0.1, 0.5: 0.1, 0.3: 0.1}
"""Chances of a failure in a run with the fault, with their weights before any run."""
_OTHER = 0.01
"""Chance of a failure for another reason."""
_WEIGHTS: dict[Cause, float] = {"host": 0.4, "network": 0.2, "link": 0.3, "unclear": 0.1}
_ENOUGH = 0.98
"""Confidence at which the search ends."""
_GUESSES = 4
"""Odd halves among the designs for a round."""


class Conclusion(NamedTuple):
    """The explanation of the results."""

    cause: Cause
    """A `host` fails alone, a `network` of a host fails with any other host; `unclear` without a single bad host or link."""
    hosts: tuple[str, ...]
    """The bad hosts, both ends of a bad link, or the smallest failing set of an unclear fault."""
    confidence: float
    rounds: int


class _Explanation(NamedTuple):
    cause: Cause
    hosts: frozenset[str]
    chance: float

    def likelihood(self, hosts: frozenset[str], *, failed: bool) -> float:
        """Return the probability of a run's result on these hosts."""
        match self.cause:
            case "host" | "link":
                is_hit = self.hosts <= hosts
            case "network":
                is_hit = self.hosts <= hosts and len(hosts) > 1
            case _:
                return 0.5
        fails = max(_OTHER, min(1 - _OTHER / 10, self.chance)) if is_hit else _OTHER
        return fails if failed else 1 - fails


def most_rounds(count: int) -> int:
    """Return the limit of rounds for so many hosts."""
    return floor(2 * log2(count) + 2)


class Bisection:
    """The search among `hosts`: run the command on each set of `next_round`, add the results, and continue until a conclusion.

    Several runs on a set in the same round are welcome: they raise the chance to see a flaky fault.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        self._left = self._hosts
        """Hosts that may still explain failures."""
        self._bad: list[str] = []
        """Hosts that fail alone."""
        self._results: list[tuple[frozenset[str], bool]] = []
        self._rounds = 0
        self.conclusion: Conclusion | None = None

    def next_round(self) -> Sets:
        """Return disjoint sets of hosts to run on; empty after the conclusion."""
        sets = () if self.conclusion is not None else self._next_sets()
        self._rounds += bool(sets)
        return sets

    def add(self, hosts: Sequence[str], *, failed: bool) -> None:
        """Add the result of a run."""
        self._results.append((frozenset(hosts), failed))

    def _next_sets(self) -> Sets:
        if not self._results:
            return (self._hosts,)
        if not any(failed for _, failed in self._results):
            runs = len(self._results)
            # Against a fault that shows itself in every second run.
            return self._conclude("nothing", (), 1 - 0.5**runs)
        if self._rounds == 1:
            if len(self._hosts) == 1:
                return self._conclude("everything", self._hosts, 1 - _OTHER)
            return tuple((host,) for host in self._hosts)
        if not self._bad and (bad := [host for host in self._left if self._failed({host})]):
            self._bad = bad
            self._left = tuple(host for host in self._hosts if host not in bad)
            if not self._left:
                return self._conclude("everything", self._hosts, 1 - _OTHER ** len(self._hosts))
            if len(self._left) > 1:
                return (self._left,)
        if self._bad and not self._failed(set(self._left)):
            return self._conclude("host", tuple(self._bad), 1 - _OTHER)
        return self._narrowed()

    def _failed(self, hosts: set[str]) -> bool:
        """True if a run on exactly these hosts has failed."""
        return any(failed and hosts == members for members, failed in self._results)

    def _conclude(self, cause: Cause, hosts: tuple[str, ...], confidence: float) -> Sets:
        self.conclusion = Conclusion(cause, hosts, confidence, self._rounds)
        return ()

    def _narrowed(self) -> Sets:
        """Conclude, or return the most informative sets."""
        weights = self._weights()
        causes: dict[tuple[Cause, frozenset[str]], float] = {}
        for explanation, weight in weights.items():
            key = explanation.cause, explanation.hosts
            causes[key] = causes.get(key, 0.0) + weight
        (cause, hosts), confidence = max(causes.items(), key=lambda item: item[1])
        is_over = self._rounds >= most_rounds(len(self._hosts))
        if confidence >= _ENOUGH or is_over:
            if cause == "unclear" or confidence < 0.5:  # noqa: PLR2004 (other explanations are as good)
                failing = [
                    members for members, failed in self._results if failed and members <= {*self._left}
                ]
                return self._conclude("unclear", self._ordered(min(failing, key=len)), confidence)
            return self._conclude(cause, self._ordered(hosts), confidence)
        likely = {
            explanation: weight
            for explanation, weight in weights.items()
            if weight > 1e-4  # noqa: PLR2004
        }
        return max(self._designs(likely), key=lambda sets: sum(_worth(members, likely) for members in sets))

    def _ordered(self, hosts: frozenset[str]) -> tuple[str, ...]:
        return tuple(host for host in self._hosts if host in hosts)

    def _weights(self) -> dict[_Explanation, float]:
        """Return the probability of each explanation after the results among the remaining hosts."""
        weights: dict[_Explanation, float] = {}
        results = [(members, failed) for members, failed in self._results if members <= {*self._left}]
        for explanation, weight in self._explanations():
            for members, failed in results:
                weight *= explanation.likelihood(members, failed=failed)  # noqa: PLW2901 (a product)
            weights[explanation] = weight
        total = sum(weights.values())
        return {explanation: weight / total for explanation, weight in weights.items()}

    def _explanations(self) -> Iterator[tuple[_Explanation, float]]:
        """Yield explanations with their weights before any run."""
        count = len(self._left)
        links = [
            frozenset((first, second))
            for number, first in enumerate(self._left)
            for second in self._left[number + 1 :]
        ]
        for chance, weight in _CHANCES.items():
            for host in self._left:
                yield _Explanation("host", frozenset((host,)), chance), weight * _WEIGHTS["host"] / count
                yield (
                    _Explanation("network", frozenset((host,)), chance),
                    weight * _WEIGHTS["network"] / count,
                )
            for link in links:
                yield _Explanation("link", link, chance), weight * _WEIGHTS["link"] / len(links)
        yield _Explanation("unclear", frozenset(), 1.0), _WEIGHTS["unclear"]

    def _designs(self, likely: dict[_Explanation, float]) -> Iterator[Sets]:
        """Yield partitions of the hosts to choose from."""
        count = len(self._left)
        # Numbers of hosts differ in some bit: both halves by each bit together tell a host, and nearly a link.
        for bit in range(ceil(log2(count))):
            yield self._halves([host for number, host in enumerate(self._left) if number >> bit & 1])
        for step in range(1, _GUESSES + 1):
            # Other halves in each round: a flaky fault needs more than one look.
            mixed = [(self._mixed(number, step), number) for number in range(count)]
            order = [number for _, number in sorted(mixed)]
            yield self._halves([self._left[number] for number in order[: count // 2]])
        # Likely links side by side, the rest as one set; and hosts with a bad network, with a partner each.
        by_weight = sorted(likely, key=likely.__getitem__, reverse=True)
        pairs: list[tuple[str, ...]] = []
        free = set(self._left)
        for explanation in by_weight:
            if explanation.cause == "link" and explanation.hosts <= free:
                pairs.append(self._ordered(explanation.hosts))
                free -= explanation.hosts
        remaining = self._ordered(frozenset(free))
        yield (*pairs, remaining) if len(remaining) > 1 else (*pairs,)
        for explanation in by_weight[:_GUESSES]:
            if explanation.cause in ("host", "network", "link"):
                host = min(explanation.hosts)
                yield self._halves([other for other in self._left if other != host])
                others = [other for other in self._left if other not in explanation.hosts]
                if others:
                    yield self._halves([host, others[self._rounds % len(others)]])

    def _mixed(self, number: int, step: int) -> int:
        return (number + 1) * (7 * step + 31 * self._rounds) % 1009

    def _halves(self, members: Sequence[str]) -> Sets:
        chosen = {*members}
        halves = (
            tuple(host for host in self._left if host in chosen),
            tuple(host for host in self._left if host not in chosen),
        )
        return tuple(half for half in halves if half)


def _worth(members: Sequence[str], likely: dict[_Explanation, float]) -> float:
    """Return the mutual information of a run's result and the explanation, in nats."""
    hosts = frozenset(members)
    chances = [(weight, explanation.likelihood(hosts, failed=True)) for explanation, weight in likely.items()]
    total = sum(weight for weight, _ in chances)
    mean = sum(weight * chance for weight, chance in chances) / total
    return _entropy(mean) - sum(weight * _entropy(chance) for weight, chance in chances) / total


def _entropy(chance: float) -> float:
    return -sum(part * log(part) for part in (chance, 1 - chance) if part > 0)
