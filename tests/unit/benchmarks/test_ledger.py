"""benchmarks/ledger.py: memory of hosts helps, and no good host is out for long."""

from benchmarks.ledger import BAD, HOSTS, both
from hvlaunch.outside.ledger import HALF_LIFE


def test_retries_succeed_twice_as_often_with_memory() -> None:
    pairs = [both(seed, days=30) for seed in range(3)]
    without, remembered = ([pair[index] for pair in pairs] for index in range(2))
    of_bad = sum(outcome.of_bad for outcome in without)
    assert of_bad > sum(outcome.failures for outcome in without) / 2
    before, after = (
        sum(outcome.good_retries for outcome in outcomes) / sum(outcome.retries for outcome in outcomes)
        for outcomes in (without, remembered)
    )
    assert after >= 2 * before
    assert len(BAD) / len(HOSTS) < 0.05
    # A good host that is a suspect now and then, or the bound would say nothing.
    longest = max(outcome.longest_out for outcome in remembered)
    assert HALF_LIFE / 2 < longest <= HALF_LIFE
