"""A job at one moment, as data for those who ask: its phase, its round, its workers and hosts. docs/control.md has the fields."""

from collections.abc import Callable, Mapping
from typing import Any

from hvlaunch.engine.engine import Engine
from hvlaunch.engine.pool import PoolHost
from hvlaunch.engine.round import Round
from hvlaunch.engine.workers import Worker

__all__ = ["overview"]


def overview(
    engine: Engine, now: float, progress: Callable[[tuple[str, int, int]], Mapping[str, Any] | None]
) -> Mapping[str, Any]:
    """What the engine knows at `now`, in seconds of the driver's clock; `progress` is what a worker tells of its own."""
    current = engine.round
    return {
        "phase": engine.phase.name.lower(),
        "round": None if current is None else _round(current, now),
        "workers": [
            _worker(worker, progress((worker.host, worker.slot, worker.start)))
            for worker in sorted(engine.workers, key=lambda worker: worker.rank)
        ],
        "hosts": [_host(host, now) for host in engine.pool],
        "hang": None if engine.hang is None else engine.hang._asdict(),
    }


def _round(current: Round, now: float) -> Mapping[str, Any]:
    return {
        "number": current.number,
        "size": current.size,
        "state": current.state.name.lower(),
        "elapsed": round(now - current.started_at, 3),
        "ended": sorted(current.exits),
    }


def _worker(worker: Worker, progress: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Of one that tells no steps, its commits are."""
    place = worker.launch.place
    if progress is None and worker.commit >= 0:
        progress = {"step": worker.commit, "total": None, "rate": None, "metrics": {}}
    return {
        "rank": place.rank,
        "local_rank": place.local_rank,
        "host": worker.host,
        "slot": worker.slot,
        "start": worker.start,
        "round": worker.round,
        "state": worker.state.name.lower(),
        "progress": progress,
    }


def _host(host: PoolHost, now: float) -> Mapping[str, Any]:
    return {
        "host": host.name,
        "state": host.state.value,
        "is_listed": host.listed,
        "is_excluded": host.cooldown.holds(now),
    }
