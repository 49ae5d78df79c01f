"""The choice of GPUs or slots for a job, and the first claim of waiting jobs. Pure.

The hosts' kernels keep the leases, as locks; this module only chooses among units free a moment ago.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Holder", "HostOffer", "Ticket", "Unit", "choose", "first_claim", "offer_of"]


class Holder(NamedTuple):
    """The holder of a lease, or a user whose process is on a GPU without a lease."""

    user: str
    job: str
    """The holder's own word; the command of a process without a lease."""
    since: float | None = None
    """Wall clock time, by the holder's own word."""
    is_outside: bool = False
    """True for a process without a lease."""


class Unit(NamedTuple):
    """A GPU or a slot of a host."""

    name: str
    """Name of its lock, and a GPU's name for CUDA_VISIBLE_DEVICES."""
    is_free: bool
    holder: Holder | None = None


class Ticket(NamedTuple):
    """A waiting job's claim on a host; tickets are in the order of their times on all hosts."""

    since: float
    job: str
    user: str
    is_mine: bool
    """True if it is of the user who asks."""


class HostOffer(NamedTuple):
    """The units of a host."""

    host: str
    units: tuple[Unit, ...]
    tickets: tuple[Ticket, ...] = ()
    most: int | None = None
    """Most workers that the user wants there; None for any number."""

    @property
    def free(self) -> tuple[str, ...]:
        """Names of free units."""
        return tuple(unit.name for unit in self.units if unit.is_free)

    def room(self, size: int, *, per_worker: int) -> int:
        """Return the number of workers for which so many units suffice."""
        room = size // per_worker
        return room if self.most is None else min(room, self.most)


def offer_of(host: str, most: int | None, state: Mapping[str, Any]) -> HostOffer:
    """Return a host's offer by a state of the errand `leases`."""
    units = []
    for unit in state["units"]:
        holder = unit["holder"] and Holder(*(unit["holder"][name] for name in ("user", "job", "since")))
        if holder is None and not unit["is_free"]:
            processes = unit["processes"] or [{"user": "?", "command": "?"}]
            holder = Holder(processes[0]["user"], processes[0]["command"], is_outside=True)
        units.append(Unit(unit["name"], unit["is_free"], holder))
    tickets = (
        Ticket(*(ticket[name] for name in ("since", "job", "user", "is_mine"))) for ticket in state["tickets"]
    )
    return HostOffer(host, tuple(units), tuple(tickets), most)


def first_claim(
    offer: HostOffer, job: str, since: float, fair_wait: float, now: float, *, passes_own: bool = False
) -> Ticket | None:
    """Return the ticket of an earlier job with the first claim: it has waited for `fair_wait` seconds.

    `since` is when the job has queued up, infinite if it has not. The order, by time and then by job, is the same for all jobs on all
    hosts, so no two jobs keep each other away. With `passes_own`, tickets of the same user do not count.
    """
    for ticket in sorted(offer.tickets):
        if (ticket.since, ticket.job) >= (since, job):
            return None
        is_passed = ticket.is_mine and (passes_own or ticket.job == job)
        if now - ticket.since >= fair_wait and not is_passed:
            return ticket
    return None


def choose(offers: Sequence[HostOffer], workers: int, per_worker: int) -> dict[str, tuple[str, ...]] | None:
    """Return the units to lease by host, on as few hosts as possible; None if too few are free."""
    rooms = {offer.host: offer.room(len(offer.free), per_worker=per_worker) for offer in offers}
    chosen: dict[str, tuple[str, ...]] = {}
    left = workers
    # Stable: equal hosts in the user's order.
    waiting = sorted(offers, key=lambda offer: -rooms[offer.host])
    while left > 0 and waiting and rooms[waiting[0].host]:
        # The last host is the smallest sufficient host: larger gaps stay for others.
        enough = [offer for offer in waiting if rooms[offer.host] >= left]
        offer = min(enough, key=lambda offer: rooms[offer.host]) if enough else waiting[0]
        waiting.remove(offer)
        count = min(left, rooms[offer.host])
        chosen[offer.host] = offer.free[: count * per_worker]
        left -= count
    return chosen if left <= 0 else None
