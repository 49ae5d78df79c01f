"""Failures: the exit code is that of the first failure by the hosts' own clocks."""

import math
from typing import TYPE_CHECKING

from hvlaunch.engine.lifecycle import Phase
from hvlaunch.errors import EXIT_NO_PROGRESS
from hvlaunch.job import JobResult
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Failures"]

_EPSILON = 1e-6
_ROUNDING = 1e-9
"""An order and an end can be half a microsecond apart."""


class Failures(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._closed_at = math.inf
        """Time when the last worker had ended, or was given up: its end may still be heard of."""

    def after(self) -> None:
        if self.world.engine.phase in (Phase.CLOSING, Phase.DONE):
            self._closed_at = min(self._closed_at, self.ledger.now)

    def end(self, result: JobResult) -> None:
        began = self.ledger.began_at or 0.0
        last = max((end.at for end in self.ledger.ends if end.heard_at <= self._closed_at), default=began)
        assert 0.0 <= result.elapsed <= self.ledger.now - began + _EPSILON, f"it lasted {result.elapsed} s"
        is_whole = (
            self.ledger.began_at is None or result.elapsed >= min(last, self.ledger.now) - began - _EPSILON
        )
        assert is_whole or result.interrupted is not None, f"it lasted {result.elapsed} s, to {last - began}"
        heard = {(end.host, end.code, end.signal) for end in self.ledger.ends}
        times = {(end.host, round(end.at - began, 6)) for end in self.ledger.ends}
        for end in result.exits:
            if end.not_started is None:
                assert (end.host, end.code, end.signal) in heard, f"nobody ended like {end}"
                assert (end.host, round(end.when, 6)) in times, f"{end} has a wrong time"
        told_at = {(end.host, end.rank, round(end.at - began, 6)): end.told_at for end in self.ledger.ends}
        for end in result.exits:
            if end.not_started is None:
                is_told = told_at[end.host, end.rank, round(end.when, 6)] <= began + end.when + _ROUNDING
                assert end.was_told == is_told, f"{end} was{'' if is_told else ' not'} told to end"
        named = result.failure
        if named is None or result.error is not None or result.interrupted is not None:
            return
        causes = [
            end
            for end in result.exits
            if not (end.ok or end.stopped or end.was_told) and end.look in ("cause", "silent")
        ]
        if causes:
            first = min(end.when for end in causes)
            assert named.when <= first + _EPSILON, f"{named} was not the first failure: {causes}"
            assert result.exit_code in (named.exit_code, EXIT_NO_PROGRESS)
