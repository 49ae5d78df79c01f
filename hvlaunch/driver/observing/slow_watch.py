"""Watches a job for a slow host: samples the hosts now and then, and reports a persistent difference."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from hvlaunch.driver.observing import Observe
from hvlaunch.engine import events as on
from hvlaunch.job import JobSpec

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.driver.observing.observation import Observation
    from hvlaunch.telemetry.sample import HostSample
    from hvlaunch.telemetry.slow import SlowHost

__all__ = ["SlowWatch"]

_BEGINS_AFTER = 60.0
"""Seconds of a job before its first samples."""
_INTERVAL, _EAGER_INTERVAL = 10.0, 5.0
_HOSTS_PER_SECOND = 20
_SAMPLED_FOR = 0.5
_PATIENCE = 4.0
_FRESH = 2.0
_AGAIN = 300.0
"""Seconds after which the same verdict is reported again."""


class SlowWatch:
    """Watches a job of several hosts. A look begins after the last, so no lock is needed.

    `post` puts requests and events on the driver's queue, `at` makes calls at times of `clock`.
    """

    def __init__(
        self,
        spec: JobSpec,
        links: "Iterable[HostLink]",
        post: "Callable[[Observe | on.Event], None]",
        at: Callable[[float, Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._links = links
        self._post = post
        self._at = at
        self._clock = clock
        is_eager = spec.elastic is not None and spec.elastic.evict_slow is not None
        self._interval = _EAGER_INTERVAL if is_eager else _INTERVAL
        self._delay = self._interval if is_eager else _BEGINS_AFTER
        self._is_on = self._is_over = False
        self._rounds: deque[Mapping[str, HostSample]] = deque()
        self._verdict: SlowHost | None = None
        self._posted: dict[tuple[str, str], float] = {}

    def watch(self, event: on.Event, _actions: object, now: float) -> None:
        """Begin at the first start of a worker."""
        if isinstance(event, on.WorkerStarted) and not self._is_on:
            self._is_on = True
            self._at(now + self._delay, self._look)

    def stop(self) -> None:
        """End the watch: the job is over."""
        self._is_over = True

    def _look(self) -> None:
        if self._is_over:
            return
        hosts = sum(1 for link in self._links if link.pids)
        # A single host can't be compared.
        if hosts > 1:
            self._post(Observe(self._observe))
        self._at(self._clock() + max(self._interval, hosts / _HOSTS_PER_SECOND), self._look)

    def _observe(self, observation: "Observation") -> None:
        observation.keep_on(_SAMPLED_FOR)
        observation.when_fresh(_PATIENCE, lambda: self._sampled(observation))

    def _sampled(self, observation: "Observation") -> None:
        from hvlaunch.hosts.roles import ranks_of  # noqa: PLC0415 (most jobs end before)
        from hvlaunch.telemetry.slow import LEAST_INTERVALS, SPAN, slow_host  # noqa: PLC0415 (as above)

        now = self._clock()
        samples = [sample for sample in observation.newest() if sample.time >= now - _PATIENCE - _FRESH]
        self._rounds.append({sample.host: sample for sample in samples if sample.workers})
        # As short as possible: the end of a difference shows sooner.
        while len(self._rounds) > LEAST_INTERVALS + 1 and _span(self._rounds) >= SPAN:
            self._rounds.popleft()
        roles = self._spec.roles
        names = {rank: role.name for role in roles for rank in ranks_of(roles, role.name)}
        verdict = slow_host(self._rounds, names)
        before, self._verdict = self._verdict, verdict
        if verdict is None:
            if before is not None:
                self._post(on.HostJudged(before.host))
            return
        key = verdict.host, verdict.reason
        if self._posted.get(key, -_AGAIN) + _AGAIN <= now:
            self._posted[key] = now
            self._post(on.HostJudged(*verdict))


def _span(rounds: "deque[Mapping[str, HostSample]]") -> float:
    """Return the seconds without the oldest round."""
    newest = min((sample.time for sample in rounds[-1].values()), default=0.0)
    return newest - max((sample.time for sample in rounds[1].values()), default=newest)
