"""Why a worker leaves a round: not failures of the script, so run() catches them and goes on."""

__all__ = ["CollectiveFailed", "HorovodInternalError", "HostsUpdatedInterrupt", "WorkersChanged"]


class WorkersChanged(Exception):
    """Workers come or go: the round ends here, where all workers are at the same place. Nothing is lost."""


class CollectiveFailed(RuntimeError):
    """A peer is gone, or the driver has declared the round broken: go back to the last commit."""


HostsUpdatedInterrupt = WorkersChanged
HorovodInternalError = CollectiveFailed
