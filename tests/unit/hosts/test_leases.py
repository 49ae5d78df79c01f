"""Which units a job leases, and who comes first."""

import random
from math import inf

import pytest

from hvlaunch.gloo.leasing import Holder, HostOffer, Ticket, Unit, choose, first_claim, offer_of


def offer(
    name: str, free: int, taken: int = 0, *, most: int | None = None, tickets: tuple[Ticket, ...] = ()
) -> HostOffer:
    units = [Unit(f"{name}{number}", number >= taken) for number in range(free + taken)]
    return HostOffer(name, tuple(units), tickets, most)


def counts(offers: list[HostOffer], workers: int, per_worker: int = 1) -> dict[str, int] | None:
    chosen = choose(offers, workers, per_worker)
    return None if chosen is None else {name: len(units) for name, units in chosen.items()}


def test_few_hosts_are_taken_and_the_last_leaves_large_gaps() -> None:
    assert counts([offer("a", 2), offer("b", 8), offer("c", 8)], 16) == {"b": 8, "c": 8}
    assert counts([offer("a", 8), offer("b", 4), offer("c", 8)], 12) == {"a": 8, "b": 4}
    assert counts([offer("a", 8), offer("b", 2)], 2) == {"b": 2}
    assert counts([offer("a", 4, 4), offer("b", 4)], 4) == {"a": 4}
    assert choose([offer("a", 2, 2)], 2, 1) == {"a": ("a2", "a3")}


def test_too_few_units_give_no_choice_and_workers_stay_whole() -> None:
    assert counts([offer("a", 3), offer("b", 4)], 8) is None
    assert counts([], 1) is None
    assert counts([offer("a", 3), offer("b", 3)], 3, per_worker=2) is None
    assert counts([offer("a", 5), offer("b", 3)], 3, per_worker=2) == {"a": 4, "b": 2}
    assert counts([offer("a", 8, most=2), offer("b", 8, most=2)], 4) == {"a": 2, "b": 2}
    assert counts([offer("a", 8, most=2), offer("b", 8, most=2)], 5) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_is_whole_free_and_of_the_fewest_hosts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        per_worker = rng.choice([1, 1, 2, 4])
        offers = [
            offer(f"h{n}.", rng.randrange(9), rng.randrange(5), most=rng.choice([None, None, 2]))
            for n in range(rng.randrange(1, 6))
        ]
        workers = rng.randrange(1, 20)
        rooms = sorted((o.room(len(o.free), per_worker=per_worker) for o in offers), reverse=True)
        chosen = choose(offers, workers, per_worker)
        assert (chosen is None) is (sum(rooms) < workers)
        if chosen is not None:
            free = {o.host: set(o.free) for o in offers}
            assert all(set(units) <= free[name] for name, units in chosen.items())
            assert sum(map(len, chosen.values())) == workers * per_worker
            least = next(n for n in range(1, len(rooms) + 1) if sum(rooms[:n]) >= workers)
            assert len(chosen) == least


def ticket(job: str, since: float, *, is_mine: bool = False) -> Ticket:
    return Ticket(since, job, "ann", is_mine=is_mine)


def test_the_first_ticket_has_the_claim_after_its_wait() -> None:
    here = offer("a", 4, tickets=(ticket("j1", 100.0), ticket("j2", 50.0), ticket("me", 90.0, is_mine=True)))
    assert first_claim(here, "me", 90.0, 60.0, 105.0) is None
    assert first_claim(here, "me", 90.0, 60.0, 110.0) == ticket("j2", 50.0)
    # j1 has waited long, too, but came later.
    alone = here._replace(tickets=(ticket("j1", 100.0), ticket("me", 90.0, is_mine=True)))
    assert first_claim(alone, "me", 90.0, 60.0, 1000.0) is None
    assert first_claim(alone, "other", inf, 60.0, 1000.0) == ticket("me", 90.0, is_mine=True)
    # A ticket of this name that another user has made is not mine.
    forged = here._replace(tickets=(ticket("me", 10.0),))
    assert first_claim(forged, "me", 90.0, 60.0, 1000.0) == ticket("me", 10.0)
    # An earlier time of mine, before the limit for tickets, keeps nobody waiting for itself.
    assert (
        first_claim(here._replace(tickets=(ticket("me", 90.0, is_mine=True),)), "me", 95.0, 1.0, 1000.0)
        is None
    )


def test_two_jobs_never_keep_each_other_away() -> None:
    """Two tickets of about the same time, on hosts that list them in any order, or lack one of them."""
    mine, theirs = ticket("j1", 100.0), ticket("j2", 100.0)
    for tickets in ((mine, theirs), (theirs, mine), (theirs,), (mine,), ()):
        here = offer("a", 4, tickets=tickets)
        assert first_claim(here, "j1", 100.0, 60.0, 1000.0) is None
        assert first_claim(here, "j2", 100.0, 60.0, 1000.0) == (mine if mine in tickets else None)


def test_processes_without_a_lease_are_outside() -> None:
    holder = {"user": "ann", "pid": 7, "job": "j1", "since": 5.0, "busy_at": None}
    unit = {"name": "GPU-1", "is_free": False, "holder": holder, "processes": []}
    process = {"pid": 9, "user": "bob", "command": "python"}
    state = {
        "units": [
            unit,
            {**unit, "holder": None, "processes": [process]},
            {**unit, "holder": None},
            {**unit, "holder": None, "is_free": True},
        ],
        "tickets": [{"since": 1.0, "job": "j2", "user": "cat", "is_mine": False}],
    }
    shown = offer_of("a", 3, state)
    assert [unit.holder for unit in shown.units] == [
        Holder("ann", "j1", 5.0),
        Holder("bob", "python", is_outside=True),
        Holder("?", "?", is_outside=True),
        None,
    ]
    assert shown.tickets == (Ticket(1.0, "j2", "cat", is_mine=False),)
    assert (shown.free, shown.most) == (("GPU-1",), 3)
