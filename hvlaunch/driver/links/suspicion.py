"""Suspicion of silent hosts, long before the lease is over. Pure.

After SWIM (Das, Gupta, Motivala 2002) and Lifeguard (Dadgar, Phillips, Currey 2017): other hosts try to reach a silent host first, and a
late observer accuses no host. The driver is the only observer, since the driver pings each agent anyway. Agents try to reach other
hosts only at the driver's request.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from hvlaunch.named_tuples import NamedTuple

__all__ = ["Suspicion", "Vouch"]

_VOUCHERS = 3
"""Hosts that try to reach another one."""
_LATE = 0.25
"""Seconds of the driver's own delay, after which earlier silence is no proof."""
_PAUSES = 5
"""Requests to vouch for a host until it is suspected. TCP repeats a lost packet after a second: a new connection is quicker."""
_PROVE_AGAIN = 10.0
"""Seconds between attempts of two hosts that have never reached each other."""


class Vouch(NamedTuple):
    """A request to `voucher`: try to reach `host`."""

    voucher: str
    host: str


class Suspicion:
    """Suspects a host without a sign of life for `seconds`, to the driver and to hosts with an earlier answer of the host.

    Times are seconds of the driver's clock; check() must be called at `deadline`.
    """

    def __init__(self, seconds: float, now: float) -> None:
        self.seconds = seconds
        self._pause = seconds / _PAUSES
        self._not_before = now
        """The end of the driver's own newest delay."""
        self._proven: dict[str, dict[str, float]] = {}
        """When a host was last reached, by host and voucher."""
        self._tried: dict[Vouch, float] = {}
        self._asked: dict[str, float] = {}
        """When vouchers were last asked about a silent host."""
        self._first_asked: dict[str, float] = {}
        self.deadline = inf

    @property
    def pulse(self) -> float:
        """The longest time between two pings."""
        return self.seconds / 3

    def vouched(self, voucher: str, host: str, now: float) -> None:
        """Note that a host has reached another one."""
        self._proven.setdefault(host, {})[voucher] = now

    def forget(self, host: str) -> None:
        """Forget a host with a new agent, whose port is another one."""
        self._proven.pop(host, None)
        self._tried = {vouch: at for vouch, at in self._tried.items() if host not in vouch}

    def check(
        self,
        silent: Mapping[str, float],
        heard: Mapping[str, float],
        acknowledged: Callable[[str], float | None],
        now: float,
        due: float,
    ) -> tuple[list[Vouch], list[str]]:
        """Return requests to vouch for hosts, and the suspected hosts. The call was due at `due`.

        `silent` has the time of the first unanswered ping of each silent host, `heard` the time of each host's last bytes.
        `acknowledged` returns when a host's kernel last acknowledged data, None if unknown.
        """
        if now > due + _LATE:
            self._not_before = now
        requests: list[Vouch] = []
        suspected: list[str] = []
        self.deadline = inf
        for host in [host for host in self._first_asked if host not in silent]:
            del self._first_asked[host], self._asked[host]
        for host, since in silent.items():
            newest = max(since, self._not_before)
            # Right after a ping all hosts are silent: the kernel is asked about few of them.
            if now - newest >= self._pause:
                # The newest sign of life counts, whoever has seen it.
                signs = (newest, acknowledged(host) or 0.0, *self._proven.get(host, {}).values())
                silence = now - max(signs)
                vouchers = self._vouchers(host, silent)
                if silence >= self.seconds and self._have_tried(host, vouchers, heard):
                    suspected.append(host)
                    continue
                if silence >= self._pause and now >= self._asked.get(host, -inf) + self._pause:
                    self._asked[host] = now
                    self._first_asked.setdefault(host, now)
                    requests += [Vouch(voucher, host) for voucher in vouchers]
            # Soon again: a lost packet must not cost the host its last chance.
            self.deadline = min(self.deadline, now + self._pause)
        return requests, suspected

    def _vouchers(self, host: str, silent: Mapping[str, float]) -> Sequence[str]:
        """Return answering hosts with an earlier answer of this host."""
        able = [voucher for voucher in self._proven.get(host, ()) if voucher not in silent]
        return able[:_VOUCHERS]

    def _have_tried(self, host: str, vouchers: Sequence[str], heard: Mapping[str, float]) -> bool:
        """True if a voucher had time for a try, and was heard since. Without vouchers, our own link may be cut."""
        first = self._first_asked.get(host, inf)
        return any(heard.get(voucher, -inf) > first + self._pause for voucher in vouchers)

    def to_prove(self, hosts: Sequence[str], now: float) -> list[Vouch]:
        """Return requests to find vouchers before they are needed: each host tries its next neighbours in the list."""
        requests: list[Vouch] = []
        for index, host in enumerate(hosts):
            for step in range(1, min(_VOUCHERS + 1, len(hosts))):
                vouch = Vouch(hosts[(index + step) % len(hosts)], host)
                is_known = vouch.voucher in self._proven.get(host, ())
                if not is_known and now >= self._tried.get(vouch, -inf) + _PROVE_AGAIN:
                    self._tried[vouch] = now
                    requests.append(vouch)
        return requests
