"""The name of a worker at the rendezvous: what HVLAUNCH_WORKER says."""

__all__ = ["worker_id", "worker_of"]


def worker_id(host: str, slot: int, start: int) -> str:
    """No two workers of a job have the same. `start` counts those of the slot from 0."""
    return f"{host}/{slot}/{start}"


def worker_of(name: str) -> tuple[str, int, int]:
    """Host, slot and start of a worker_id. Raises ValueError."""
    host, slot, start = name.rsplit("/", 2)
    return host, int(slot), int(start)
