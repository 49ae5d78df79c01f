"""Faults over a matrix of measures are laid to the right host, direction or link, and rounds of pairs name the slow or broken host."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlaunch.check.measures import (
    DeviceTimes,
    Measure,
    Pair,
    SumOfGroup,
    attribute,
    find_faults,
    findings_of_groups,
    findings_of_products,
    next_groups,
    partners,
)

PORTS = frozenset({20000, 40000, 50000})


def matrix(count: int, seed: int = 0) -> tuple[list[str], dict[Pair, Measure]]:
    """A good network: rates and round trips differ by a factor of two."""
    dice = random.Random(seed)
    hosts = [f"h{number}" for number in range(count)]
    measures = {
        (hosts[number], hosts[(number + step) % count]): Measure(
            PORTS, PORTS, "10.0.0.1", 1e-4 * dice.uniform(1, 2), 0.0, 1e9 * dice.uniform(1, 2), None
        )
        for number in range(count)
        for step in partners(count)
    }
    return hosts, measures


FAULTS: dict[str, dict[str, Any]] = {
    "reach": {"reached": frozenset(), "address": None, "rtt": None, "loss": None, "rate": None},
    "ports": {"reached": frozenset({20000})},
    "mtu": {"mtu": 1400, "rate": None, "loss": None},
    "loss": {"loss": 0.02},
    "latency": {"rtt": 0.05, "rate": None},
    "rate": {"rate": 1.2e6},
}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200))
def test_partners_are_few_and_mutual(count: int) -> None:
    steps = partners(count)
    assert len(set(steps)) == len(steps) == min(count - 1, len(steps)) <= 6
    assert all(0 < step < count for step in steps)
    assert {-step % count for step in steps} == set(steps)
    if count > 7:
        assert len(steps) >= 5


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 64), st.integers())
def test_good_network_has_no_fault(count: int, seed: int) -> None:
    hosts, measures = matrix(count, seed)
    assert find_faults(measures, hosts) == []


@settings(max_examples=40, deadline=None)
@given(
    st.integers(3, 64),
    st.sampled_from(sorted(FAULTS)),
    st.sampled_from(["host", "to", "from", "link", "way"]),
    st.integers(),
)
def test_single_fault_is_attributed(count: int, kind: str, scope: str, seed: int) -> None:
    hosts, measures = matrix(count, seed)
    dice = random.Random(seed)
    dialer, listener = dice.choice(sorted(measures))
    if scope == "link":
        dialer, listener = sorted((dialer, listener))
    bad = {
        "host": [pair for pair in measures if dialer in pair],
        "to": [pair for pair in measures if pair[1] == dialer],
        "from": [pair for pair in measures if pair[0] == dialer],
        "link": [(dialer, listener), (listener, dialer)],
        "way": [(dialer, listener)],
    }[scope]
    for pair in bad:
        measures[pair] = measures[pair]._replace(**FAULTS[kind])
    [fault] = find_faults(measures, hosts)
    assert (fault.kind, fault.scope) == (kind, scope)
    assert fault.hosts == ((dialer, listener) if scope in ("link", "way") else (dialer,))
    assert set(fault.measures) == set(bad)


@settings(max_examples=40, deadline=None)
@given(st.integers(5, 64), st.integers())
def test_two_bad_hosts_are_both_named(count: int, seed: int) -> None:
    hosts, measures = matrix(count, seed)
    names = random.Random(seed).sample(hosts, 2)
    bad = {pair for pair in measures if not set(names).isdisjoint(pair)}
    causes = list(attribute(bad, measures, hosts))
    assert sorted(host for _, hosts, _ in causes for host in hosts) == sorted(names)
    assert {scope for scope, _, _ in causes} == {"host"}


def test_rates_of_busy_hosts_are_no_fault_of_links() -> None:
    """Single pairs are far below the others, and far above a slow link; a host with all its pairs there is named."""
    hosts, measures = matrix(32)
    dice = random.Random(1)
    for pair in dice.sample(sorted(measures), 40):
        measures[pair] = measures[pair]._replace(rate=6e7)
    assert find_faults(measures, hosts) == []
    for pair in measures:
        if "h5" in pair:
            measures[pair] = measures[pair]._replace(rate=1e8)
    [fault] = find_faults(measures, hosts)
    assert (fault.kind, fault.scope, fault.hosts) == ("rate", "host", ("h5",))


def test_whole_network_is_one_fault() -> None:
    hosts, measures = matrix(5)
    slow = {pair: measure._replace(rate=1e6) for pair, measure in measures.items()}
    [fault] = find_faults(slow, hosts)
    assert (fault.kind, fault.scope, fault.hosts) == ("rate", "all", tuple(hosts))


@pytest.mark.parametrize("way", [("h0", "h1"), ("h1", "h0")])
def test_two_hosts_have_a_link(way: Pair) -> None:
    hosts, measures = matrix(2)
    measures[way] = measures[way]._replace(loss=0.01)
    [fault] = find_faults(measures, hosts)
    assert (fault.scope, fault.hosts) == ("way", way)


def test_graver_fault_hides_its_consequences() -> None:
    """Streams to a host that loses segments are slow, and some pairs are lucky."""
    hosts, measures = matrix(8)
    for pair in measures:
        if pair[1] == "h2":
            measures[pair] = measures[pair]._replace(rate=1.25e6, loss=0.03)
    measures["h2", "h1"] = measures["h2", "h1"]._replace(rate=2e6)
    [fault] = find_faults(measures, hosts)
    assert (fault.kind, fault.scope, fault.hosts) == ("loss", "to", ("h2",))


def test_two_of_three_lossy_streams_name_the_host() -> None:
    hosts, measures = matrix(4)
    to_host = [pair for pair in measures if pair[1] == "h2"]
    for pair in to_host[:2]:
        measures[pair] = measures[pair]._replace(loss=0.05)
    assert len(to_host) == 3
    [fault] = find_faults(measures, hosts)
    assert (fault.kind, fault.scope, fault.hosts) == ("loss", "to", ("h2",))


def play(hosts: list[str], bad: set[str], seed: int, *, fails: bool) -> list[list[SumOfGroup]]:
    """All rounds of hosts, with slow or failing ones."""
    dice = random.Random(seed)
    rounds: list[list[SumOfGroup]] = []
    while groups := next_groups(hosts, rounds):
        names = [name for group in groups for name in group]
        assert len(names) == len(set(names))
        assert all(len(group) == min(2, len(hosts)) for group in groups)
        results = []
        for group in groups:
            seconds: float | None = 0.01 * dice.uniform(1, 2)
            if bad & {*group}:
                seconds = None if fails else 0.5
            results.append(SumOfGroup(group, seconds, "NCCL error" if seconds is None else ""))
        rounds.append(results)
    return rounds


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 33), st.booleans(), st.integers(0, 1000))
def test_only_the_bad_host_is_named(count: int, fails: bool, seed: int) -> None:
    hosts = [f"h{number}" for number in range(count)]
    bad = random.Random(seed).choice(hosts)
    rounds = play(hosts, {bad}, seed, fails=fails)
    assert len(rounds) == 2 + count % 2
    assert all(sum(host in group.hosts for groups in rounds for group in groups) >= 2 for host in hosts)
    [finding] = findings_of_groups(rounds)
    assert (finding.host, finding.level) == (bad, "error" if fails else "warning")


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 33), st.integers(0, 1000))
def test_good_hosts_have_no_finding(count: int, seed: int) -> None:
    hosts = [f"h{number}" for number in range(count)]
    assert list(findings_of_groups(play(hosts, set(), seed, fails=False))) == []


def test_two_slow_hosts_of_eight_do_not_hide_each_other() -> None:
    hosts = list("abcdefgh")
    findings = list(findings_of_groups(play(hosts, {"a", "c"}, 1, fails=False)))
    assert sorted(finding.host for finding in findings) == ["a", "c"]


def test_single_bad_pair_is_a_finding_of_the_pair() -> None:
    [finding] = findings_of_groups([[SumOfGroup(("a", "b"), None, "no route")]])
    assert (finding.host, finding.level) == ("b", "error")
    assert finding.text == "it fails with a: no route"


@pytest.mark.parametrize(("is_gpu", "factor"), [(True, 1.5), (False, 4.0)])
def test_slow_device_is_named(is_gpu: bool, factor: float) -> None:
    times = {host: DeviceTimes(is_gpu, [0.01, 0.01]) for host in "abc"}
    assert list(findings_of_products(times)) == []
    times["b"] = DeviceTimes(is_gpu, [0.01, 0.01 * factor])
    [finding] = findings_of_products(times)
    assert (finding.host, finding.level, finding.subject) == ("b", "warning", "matmul")
    assert ("GPU 1" in finding.text) == is_gpu
