"""Rounds of pairs name the slow or broken host."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlaunch.check.deep import (
    DeviceTimes,
    SumOfGroup,
    findings_of_groups,
    findings_of_products,
    next_groups,
)


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
