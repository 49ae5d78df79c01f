"""Whether jobs that remember hosts do better. docs/guides/lost-host.md is about the ledger.

    python benchmarks/ledger.py
    python benchmarks/ledger.py --seeds 5 --days 30

Simulated: 63 hosts, of which 3 cause more than half of all failures of hosts, as an outside study of such a cluster found.
Jobs come all day, of 4 to 48 hosts, and take those that are free in a random order. A failed job is tried again at once. The
bad hosts are bad for some days, then well for some. Good hosts fail now and then, and one verdict in twenty names a wrong
host. The same jobs run without memory, and with hvlaunch's own ledger.
"""

import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser
from benchmarks.measure import heading, table
from hvlaunch.hosts.placement import suspects_last
from hvlaunch.job import Host
from hvlaunch.outside.ledger import HALF_LIFE, Ledger

HOSTS = [f"gpu{number:02}" for number in range(1, 64)]
BAD = HOSTS[:3]
DAY = 86400.0
JOBS_A_DAY = 12
SIZES = (4, 8, 16, 32, 48)
BUSY = 8
"""Hosts that other users have."""
FAILS_WHEN_BAD = 0.6
"""Share of the jobs on a bad host in a bad spell that it breaks."""
FAILS_WHEN_GOOD = 0.005
SPELL, WELL = 12 * DAY, 5 * DAY
"""Mean lengths."""
WRONG = 0.05
KINDS = ("gpu fault", "lost", "workers fail", "hang", "crash")
CHANCES = (4, 3, 3, 2, 2)
"""How often each verdict comes."""
RETRIES = 3


class Outcome(NamedTuple):
    retries: int
    good_retries: int
    failures: int
    of_bad: int
    """Failures by a bad host."""
    longest_out: float
    """Seconds for which a good host was a suspect without a break."""


class Cluster:
    """The course of the hosts, the same with and without memory."""

    def __init__(self, seed: int, days: float) -> None:
        rng = random.Random(seed)
        self.spells: dict[str, list[tuple[float, float]]] = {}
        for host in BAD:
            at, spells = rng.uniform(0, WELL), []
            while at < days * DAY:
                end = at + rng.expovariate(1 / SPELL)
                spells.append((at, end))
                at = end + rng.expovariate(1 / WELL)
            self.spells[host] = spells

    def breaks(self, host: str, now: float, rng: random.Random) -> bool:
        is_bad = any(begin <= now < end for begin, end in self.spells.get(host, ()))
        return rng.random() < (FAILS_WHEN_BAD if is_bad else FAILS_WHEN_GOOD)


def simulate(seed: int, days: float, ledger: Ledger | None) -> Outcome:
    cluster, rng = Cluster(seed, days), random.Random(seed + 1)
    retries = good_retries = failures = of_bad = 0
    out_since: dict[str, float] = {}
    longest_out = now = 0.0
    while (now := now + rng.expovariate(JOBS_A_DAY / DAY)) < days * DAY:
        # Drawn before the job, so that both worlds get the same jobs.
        job = random.Random(rng.random())
        size = job.choice(SIZES)
        for attempt in range(RETRIES + 1):
            free = job.sample(HOSTS, len(HOSTS) - BUSY)
            suspects = {} if ledger is None else ledger.suspects(now)
            for host in HOSTS:
                if host in suspects:
                    longest_out = max(
                        longest_out, (now - out_since.setdefault(host, now)) * (host not in BAD)
                    )
                else:
                    out_since.pop(host, None)
            order = [*suspects]
            used = [host.name for host in suspects_last(map(Host, free), order[::-1])][:size]
            broken = [host for host in used if cluster.breaks(host, now, job)]
            retries += attempt > 0
            good_retries += attempt > 0 and not broken
            if not broken:
                break
            failures += 1
            of_bad += broken[0] in BAD
            blamed = job.choice(used) if job.random() < WRONG else broken[0]
            if ledger is not None:
                (kind,) = job.choices(KINDS, CHANCES)
                ledger.record(f"id-{blamed}", blamed, kind, "job", now)
            now += 120.0
    return Outcome(retries, good_retries, failures, of_bad, longest_out)


def both(seed: int, days: float) -> tuple[Outcome, Outcome]:
    with tempfile.TemporaryDirectory() as directory:
        return simulate(seed, days, None), simulate(seed, days, Ledger(Path(directory, "ledger"), print))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--days", type=float, default=60.0)
    options = parser.parse_args()
    print(heading(f"{len(HOSTS)} hosts, {options.days:g} days, {options.seeds} seeds"))
    rows = []
    totals = [[0, 0], [0, 0]]
    for seed in range(options.seeds):
        without, remembered = both(seed, options.days)
        for total, outcome in zip(totals, (without, remembered), strict=True):
            total[0] += outcome.good_retries
            total[1] += outcome.retries
        shares = [outcome.good_retries / outcome.retries for outcome in (without, remembered)]
        rows.append(
            [
                str(seed),
                f"{without.of_bad / without.failures:.0%}",
                f"{shares[0]:.0%} of {without.retries}",
                f"{shares[1]:.0%} of {remembered.retries}",
                f"{shares[1] / shares[0]:.1f}",
                f"{remembered.longest_out / HALF_LIFE:.2f}",
            ]
        )
    head = [
        "seed",
        "by 3 hosts",
        "good retries without",
        "with memory",
        "ratio",
        "a good host out, half-lives",
    ]
    print(table(head, rows))
    before, after = (good / number for good, number in totals)
    print(
        f"\nretries that succeed: {before:.0%} without memory, {after:.0%} with it: {after / before:.1f} times"
    )


if __name__ == "__main__":
    main()
