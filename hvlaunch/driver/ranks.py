"""Which worker has which rank: kept here alone, from the engine's actions, and asked by links and watchers."""

from collections.abc import Iterable

from hvlaunch.engine.actions import Action, Assign, Start
from hvlaunch.hosts.placement import Launch

__all__ = ["Ranks"]


class Ranks:
    """The newest rank of every worker that ever was. Only one thread may write; any may ask."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, int, int], int] = {}
        self._places: dict[int, tuple[str, int]] = {}
        self._born: dict[tuple[str, int, int], int] = {}

    def see(self, actions: Iterable[Action]) -> list[Launch]:
        """Learn from the engine's actions who gets which rank; these workers."""
        launches: list[Launch] = []
        for action in actions:
            if isinstance(action, Start):
                launches += action.launches
                for launch in action.launches:
                    self._born[launch.host, launch.slot, launch.start] = action.round
            elif isinstance(action, Assign):
                launches.append(action.launch)
        for launch in launches:
            place = launch.place
            self._ranks[launch.host, launch.slot, launch.start] = place.rank
            self._places[place.rank] = place.host, place.local_rank
        return launches

    def places(self) -> dict[int, tuple[str, int]]:
        """The newest host and local rank of each rank."""
        return dict(self._places)

    def of(self, host: str, slot: int, start: int) -> int | None:
        """None where there was no such worker."""
        return self._ranks.get((host, slot, start))

    def born(self, host: str, slot: int, start: int) -> int | None:
        """The round that the worker was started for; None where there was no such worker."""
        return self._born.get((host, slot, start))
