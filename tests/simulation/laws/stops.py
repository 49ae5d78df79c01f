"""Stops: when a job ends, every worker that lives is told to, those too that are still starting."""

from hvlaunch.gloo.engine.course import Phase
from tests.simulation.laws.law import Law

__all__ = ["Stops"]


class Stops(Law):
    def after(self) -> None:
        if self.world.engine.phase in (Phase.FINISHING, Phase.STOPPING):
            left = next(self.ledger.living(), None)
            assert left is None, f"{left} was not told that the job ends"
