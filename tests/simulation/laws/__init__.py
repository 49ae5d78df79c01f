"""Laws of an elastic job over time, one for each noun. Each law sees every turn of the engine."""

from tests.simulation.laws.bounds import Bounds
from tests.simulation.laws.breaks import Breaks
from tests.simulation.laws.causes import Causes
from tests.simulation.laws.commits import Commits
from tests.simulation.laws.cooldowns import Cooldowns
from tests.simulation.laws.failures import Failures
from tests.simulation.laws.graces import Graces
from tests.simulation.laws.groups import Groups
from tests.simulation.laws.holds import Holds
from tests.simulation.laws.inspections import Inspections
from tests.simulation.laws.law import Law
from tests.simulation.laws.moves import Moves
from tests.simulation.laws.names import Names
from tests.simulation.laws.networks import Networks
from tests.simulation.laws.proofs import Proofs
from tests.simulation.laws.reports import Reports
from tests.simulation.laws.restarts import Restarts
from tests.simulation.laws.seniority import Seniority
from tests.simulation.laws.silence import Silence
from tests.simulation.laws.spares import Spares
from tests.simulation.laws.stops import Stops
from tests.simulation.laws.strikes import Strikes
from tests.simulation.laws.suspicion import Suspicion

__all__ = ["LAWS", "Law"]

LAWS: tuple[type[Law], ...] = (
    Bounds,
    Breaks,
    Causes,
    Commits,
    Cooldowns,
    Failures,
    Graces,
    Groups,
    Holds,
    Inspections,
    Moves,
    Names,
    Networks,
    Proofs,
    Reports,
    Restarts,
    Seniority,
    Silence,
    Spares,
    Stops,
    Strikes,
    Suspicion,
)
