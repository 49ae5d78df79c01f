"""The search for a bad host or link, with a simulated runner."""

import random
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest

from hvlaunch.check.bisection import Bisection, Conclusion, most_rounds

Fails = Callable[[frozenset[str]], bool]


def names(count: int) -> list[str]:
    return [f"h{number:02}" for number in range(count)]


def search(hosts: Sequence[str], fails: Fails, repeats: int = 1) -> Conclusion:
    """The conclusion of a search by runs that fail if `fails` says so."""
    bisection = Bisection(hosts)
    while sets := bisection.next_round():
        together = [host for members in sets for host in members]
        assert len(together) == len(set(together)), "a host takes part in one run at a time"
        assert set(together) <= set(hosts)
        for members in sets:
            for _ in range(repeats):
                failed = fails(frozenset(members))
                bisection.add(members, failed=failed)
                if failed:
                    break
    assert bisection.conclusion is not None
    assert bisection.conclusion.rounds <= most_rounds(len(hosts))
    return bisection.conclusion


def with_all(*hosts: str) -> Fails:
    return lambda members: {*hosts} <= members


def with_partner(host: str) -> Fails:
    return lambda members: host in members and len(members) > 1


def test_thirty_seeded_faults_on_sixteen_hosts() -> None:
    """30 of 30 within 2 log2(16) + 2 rounds: 10 hosts, 10 networks of hosts, 10 links."""
    hosts = names(16)
    assert most_rounds(16) == 10
    for seed in range(10):
        dice = random.Random(seed)
        host, (one, two) = dice.choice(hosts), sorted(dice.sample(hosts, 2))
        cases: list[tuple[str, tuple[str, ...], Fails]] = [
            ("host", (host,), with_all(host)),
            ("network", (host,), with_partner(host)),
            ("link", (one, two), with_all(one, two)),
        ]
        for cause, culprits, fails in cases:
            found = search(hosts, fails)
            assert (found.cause, found.hosts) == (cause, culprits), seed
            assert found.confidence >= 0.98


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_fault_of_few_hosts(count: int) -> None:
    hosts = names(count)
    for host in hosts:
        assert search(hosts, with_all(host))[:2] == ("host", (host,))
        if count > 2:
            found = search(hosts, with_partner(host))
            assert found[:2] == ("network", (host,))
    for link in combinations(hosts, 2):
        found = search(hosts, with_all(*link))
        if count > 2:
            assert found[:2] == ("link", link)


def test_nothing_wrong_and_everything_wrong() -> None:
    nothing = search(names(16), lambda _: False, repeats=5)
    assert nothing[:2] == ("nothing", ())
    assert nothing.confidence == pytest.approx(1 - 0.5**5)
    assert search(["a"], lambda _: True).cause == "everything"
    everything = search(names(16), lambda _: True)
    assert everything[:2] == ("everything", tuple(names(16)))


def test_several_bad_hosts_and_a_bad_link_beside_a_bad_host() -> None:
    hosts = names(16)
    assert search(hosts, lambda members: bool({"h03", "h11"} & members))[:2] == ("host", ("h03", "h11"))
    found = search(hosts, lambda members: "h03" in members or {"h07", "h12"} <= members)
    assert found.cause == "link"
    assert found.hosts == ("h07", "h12")


def test_two_links_without_a_host_are_unclear() -> None:
    """No host and no link explains both; a small set that fails is named."""
    found = search(names(8), lambda members: {"h00", "h01"} <= members or {"h05", "h06"} <= members)
    assert found.cause in ("unclear", "link")
    if found.cause == "link":
        assert found.hosts in (("h00", "h01"), ("h05", "h06"))


def test_flaky_faults_are_found_by_repeats() -> None:
    """A fault in every second run: right in nearly all searches, and never wrong with confidence."""
    hosts = names(16)
    right = 0
    for seed in range(20):
        dice = random.Random(seed)
        if seed % 2:
            culprits: tuple[str, ...] = (dice.choice(hosts),)
        else:
            culprits = tuple(sorted(dice.sample(hosts, 2)))
        hits = with_all(*culprits)

        def fails(members: frozenset[str], hits: Fails = hits, dice: random.Random = dice) -> bool:
            return hits(members) and dice.random() < 0.5

        found = search(hosts, fails, repeats=5)
        right += found.hosts == culprits
        assert found.hosts == culprits or found.confidence < 0.98, (seed, found, culprits)
    assert right >= 17
