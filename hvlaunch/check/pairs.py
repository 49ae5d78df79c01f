"""Pairs of hosts: each host dials some others, and what is suspicious is measured again before it counts."""

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hvlaunch.agent.errands.pairs import MEASURES, PORTS
from hvlaunch.agent.quick import dumps, loads
from hvlaunch.check.findings import Finding
from hvlaunch.check.matrix import Fault, Measure, Pair, find_faults, partners
from hvlaunch.driver.links.errands import Errand, Limits, lines_of
from hvlaunch.engine.network import candidates

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["Pairs", "findings_of_pairs"]

_LIMITS = Limits(seconds=None, memory=1 << 30, output=1 << 24)
_LONGEST_LINE = 1 << 20
_MOST_ADDRESSES = 4
_MOST_AGAIN = 8
"""Pairs that a host measures again at most."""
_STEP = 30.0
"""Seconds for one step of all hosts; the rest of it counts as not measured."""
# Seconds for connections, and from the first success on; bytes at a slow pace, the pace, bytes at full speed.
_FIRST = {
    "patience": 1.3,
    "settle": 0.5,
    "paced": 1 << 18,
    "pace": 12_500_000,
    "size": 1 << 21,
    "seconds": 0.15,
}
_AGAIN = {
    "patience": 2.5,
    "settle": 1.5,
    "paced": 1 << 21,
    "pace": 12_500_000,
    "size": 1 << 23,
    "seconds": 0.5,
}
_T = TypeVar("_T")


class _Gathering:
    """Where the threads of all hosts meet: each brings a value, and gets those of all hosts that are left."""

    def __init__(self, names: Iterable[str]) -> None:
        self._changed = threading.Condition()
        self._left = set(names)
        self._values: dict[str, dict[str, Any]] = {}

    def meet(self, step: str, name: str, value: _T, patience: float | None = None) -> Mapping[str, _T]:
        """Return the values of the step by host, when all have come or `patience` seconds are over."""
        with self._changed:
            values = self._values.setdefault(step, {})
            values[name] = value
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._left <= values.keys(), patience)
            return dict(values)

    def leave(self, name: str) -> None:
        """Let nobody wait for this host."""
        with self._changed:
            self._left.discard(name)
            self._changed.notify_all()


class _Place:
    """A host as others dial it."""

    def __init__(self, addresses: Sequence[str], ports: Sequence[int]) -> None:
        self.addresses = list(addresses)[:_MOST_ADDRESSES]
        self.ports = list(ports)


class Pairs:
    """Measures between the hosts `names` of a visit. `ports` are ports of the job, if its user has chosen some."""

    def __init__(self, names: Sequence[str], ports: Sequence[int] = ()) -> None:
        self._names = names
        self._ports = list(ports)
        self._key = secrets.token_hex(32)
        self._gathering = _Gathering(names)
        self.measures: dict[Pair, Measure] = {}
        self.ephemeral = (1 << 16, 1)
        """First and last port that kernels choose for connections."""
        self.seconds = 0.0
        """Time of all measures, from the first host that waits for no other any more."""

    def gone(self, name: str) -> None:
        """Let the others measure without this host."""
        self._gathering.leave(name)

    def work(self, link: "HostLink", facts: "HostFacts") -> None:
        """Measure from one host, in its thread, while the threads of the others do so. Raises ErrandFailed."""
        name = link.host.name
        try:
            errand = link.errands.start(
                "pairs",
                {"key": self._key, "name": name, "address": facts.peer_address or None, "ports": self._ports},
                _LIMITS,
            )
            try:
                self._measure(name, facts, errand)
            finally:
                errand.stop()
        except BaseException:
            self.gone(name)
            raise

    def _measure(self, name: str, facts: "HostFacts", errand: Errand) -> None:
        lines = chain.from_iterable(lines_of(errand, 1.0, _LONGEST_LINE))
        listening = _read(errand, lines, PORTS)
        low, high = self.ephemeral
        self.ephemeral = min(low, listening["low"]), max(high, listening["high"])
        place = _Place(candidates(facts), listening["ports"])
        places = self._gathering.meet("places", name, place)
        begin = time.monotonic()
        hosts = [host for host in self._names if host in places]
        own = hosts.index(name)
        targets = [hosts[(own + step) % len(hosts)] for step in partners(len(hosts))]
        first = self._dial(name, targets, places, errand, lines, _FIRST)
        by_host = self._gathering.meet("first", name, first, _STEP)
        measures = dict(chain.from_iterable(by_pair.items() for by_pair in by_host.values()))
        again = _suspicious(measures, hosts).get(name, [])
        second = self._dial(name, again, places, errand, lines, _AGAIN)
        confirmed = self._gathering.meet("second", name, second, _STEP)
        if not self.measures:
            for pair, measure in chain.from_iterable(by_pair.items() for by_pair in confirmed.values()):
                measures[pair] = _best(measures[pair], measure) if pair in measures else measure
            self.measures = measures
            self.seconds = time.monotonic() - begin

    def _dial(
        self,
        name: str,
        targets: Sequence[str],
        places: Mapping[str, _Place],
        errand: Errand,
        lines: Iterable[str],
        how: Mapping[str, Any],
    ) -> dict[Pair, Measure]:
        if not targets:
            return {}
        dials = [
            {"name": target, "addresses": places[target].addresses, "ports": places[target].ports, **how}
            for target in targets
        ]
        errand.write(dumps(dials).encode("ascii") + b"\n")
        answers = _read(errand, lines, MEASURES)
        return {
            (name, target): Measure(
                frozenset(places[target].ports),
                frozenset(answer["reached"]) & frozenset(places[target].ports),
                *(answer[key] for key in ("address", "rtt", "loss", "rate", "mtu")),
            )
            for target, answer in zip(targets, answers, strict=False)
        }


def _read(errand: Errand, lines: Iterable[str], shape: Callable[[Any], bool]) -> Any:
    """Return the next line. Raises ErrandFailed."""
    for line in lines:
        value = loads(line)
        if shape(value):
            return value
        break
    errand.stop()
    errand.wait(_STEP)
    errand.result()
    raise ValueError("an errand without an answer")


def _suspicious(measures: Mapping[Pair, Measure], hosts: Sequence[str]) -> Mapping[str, list[str]]:
    """Return the pairs to be measured again, as the hosts that each host dials.

    These are the bad pairs, and all pairs of each host that may be the cause of some. Loss is a matter of luck in a short
    stream, so it makes both ends suspicious.
    """
    pairs: set[Pair] = set()
    # A short stream may lose nothing on a link that loses 1 %, or a segment on a good one.
    for fault in find_faults(measures, hosts, lossy=0.0):
        pairs.update(fault.measures)
        if fault.scope in ("host", "to", "from") or fault.kind == "loss":
            pairs.update(pair for pair in measures if not {*fault.hosts}.isdisjoint(pair))
        else:
            pairs.update((listener, dialer) for dialer, listener in fault.measures)
    dials: dict[str, list[str]] = {}
    for dialer, listener in sorted(pairs):
        dials.setdefault(dialer, []).append(listener)
    return {dialer: listeners[:_MOST_AGAIN] for dialer, listeners in dials.items()}


def _best(first: Measure, second: Measure) -> Measure:
    """Join both measures of a pair: load may make a measure worse, and nothing makes it better."""
    return Measure(
        first.tried,
        first.reached | second.reached,
        second.address or first.address,
        min((rtt for rtt in (first.rtt, second.rtt) if rtt is not None), default=None),
        # The second is the longer one.
        first.loss if second.loss is None else second.loss,
        max((rate for rate in (first.rate, second.rate) if rate is not None), default=None),
        second.mtu,
    )


_WHERE: Mapping[str, str] = {
    "all": "between all hosts",
    "host": "to and from the other hosts",
    "to": "from the other hosts to it",
    "from": "from it to the other hosts",
    "link": "between hosts {} and {}",
    "way": "from host {} to host {}",
}
_REACH: Mapping[str, str] = {
    "all": "no host can connect to another host",
    "host": "no other host can connect to it, and it can connect to none",
    "to": "no other host can connect to it",
    "from": "it can't connect to other hosts",
    "link": "hosts {} and {} can't connect to each other",
    "way": "host {} can't connect to host {}",
}


def findings_of_pairs(
    measures: Mapping[Pair, Measure], hosts: Sequence[str], ephemeral: tuple[int, int]
) -> list[Finding]:
    """Return what is wrong between hosts; `ephemeral` are the first and last port that kernels choose for connections."""
    faults = find_faults(measures, hosts)
    bad = {pair for fault in faults for pair in fault.measures}
    good = [measure for pair, measure in measures.items() if pair not in bad]
    return [
        Finding(host, *_words(fault, good, ephemeral))
        # A host with a bad link can stay if the other end goes: the later one does.
        for fault in faults
        for host in (fault.hosts if fault.scope == "all" else fault.hosts[-1:])
    ]


def _words(
    fault: Fault, good: Sequence[Measure], ephemeral: tuple[int, int]
) -> tuple[Literal["error", "warning"], str, str, str]:
    """Return level, subject, text and remedy."""
    at = _WHERE[fault.scope].format(*fault.hosts)
    bad = list(fault.measures.values())
    match fault.kind:
        case "reach":
            text = _REACH[fault.scope].format(*fault.hosts)
            return "error", "connections", text, "let firewalls pass TCP between the hosts, and check routes"
        case "ports":
            blocked = sorted({port for measure in bad for port in measure.tried - measure.reached})
            text = f"blocked ports {at}: {', '.join(map(str, blocked))}"
            if reached := sorted({port for measure in bad for port in measure.reached} - {*blocked}):
                text += f"; open: {', '.join(map(str, reached))}"
            remedy = "let firewalls pass TCP ports {}-{} between the hosts: jobs choose ports there".format(
                *ephemeral
            )
            return "error", "ports", text, remedy
        case "mtu":
            size = min(measure.mtu or 0 for measure in bad)
            text = f"packets of more than {size} bytes vanish {at}" if size else f"large packets vanish {at}"
            remedy = (
                f"ip link set dev INTERFACE mtu {size}" if size else "check the MTU of interfaces and tunnels"
            )
            return "error", "packet size", text, f"{remedy}, or let firewalls pass ICMP"
        case "loss":
            lost = median(measure.loss or 0.0 for measure in bad)
            remedy = "look for a bad cable or port: ip -s link, ethtool -S INTERFACE"
            return "warning", "loss", f"{lost:.1%} of packets are lost {at}", remedy
        case "latency":
            text = f"round trips of {_ms(median(measure.rtt or 0.0 for measure in bad))} {at}"
            if others := [measure.rtt for measure in good if measure.rtt is not None]:
                text += f", {_ms(median(others))} elsewhere"
            return "warning", "latency", text, "check its route (a VPN, another site?), or leave it out"
        case "rate":
            text = f"{_rate(median(measure.rate or 0.0 for measure in bad))} {at}"
            if others := [measure.rate for measure in good if measure.rate is not None]:
                text += f", {_rate(median(others))} elsewhere"
            return (
                "warning",
                "bandwidth",
                text,
                "check the speed of the link (ethtool INTERFACE), or leave it out",
            )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _rate(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"  # noqa: PLR2004
