"""The bill of a job: its numbers and its words."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.gloo.run_record import gpus_of
from hvlaunch.job import JobResult, JobSpec, LeaseOptions
from hvlaunch.report.bill import Bill, best_interval, bill_words, commit_words, make_bill
from hvlaunch.report.failure_report import FailureReport
from hvlaunch.report.text import as_text
from hvlaunch.telemetry.sample import Energy, HostSample, host_sample
from tests.unit.telemetry.samples import SAMPLE_OF_A_HOST

PARTS = {"start": 41.0, "training": 7488.0, "lost": 0.0, "recovery": 3.0, "hung": 0.0, "end": 268.0}
TOTALS = {
    "parts": PARTS,
    "has_steps": True,
    "workers": [
        {"host": "a", "workers": 8, "seconds": 7800.0},
        {"host": "b", "workers": 8, "seconds": 7800.0},
    ],
    "recoveries": {"counts": [1, 1]},
    "failures": 3,
}
COSTS = {"commits": 132, "delayed": 52.8, "whole": 1.0, "saves": (), "trouble": None}


def bill_of(energy: tuple[float, float] = (0.0, 0.0), gpus: int | None = 8, **parts: float) -> Bill:
    return make_bill({**TOTALS, "parts": {**PARTS, **parts}}, lambda _host, _workers: gpus, energy)


def test_a_bill_has_hours_of_all_gpus() -> None:
    bill = bill_of()
    assert (bill.wall_seconds, bill.gpu_hours, bill.idle_gpu_hours) == (7800.0, 34.667, 1.387)
    assert bill_of(gpus=None).gpu_hours is None


@pytest.mark.parametrize(
    ("bill", "words"),
    [
        (bill_of(), "96 % training, 2 recoveries 3.0 s, end 4 min 28 s, 34.7 GPU hours (1.4 idle)"),
        (bill_of(start=410.0, end=0.0, gpus=None), "95 % training, start 6 min 50 s, 2 recoveries 3.0 s"),
        # Energy stands for the job only if it was measured nearly all the time.
        (bill_of(energy=(40_000_000.0, 124_000.0), end=0.0), "99 % training, 2 recoveries 3.0 s, 34.7 GPU hours (0.2 idle), 11.1 kWh"),
        (bill_of(energy=(40_000_000.0, 100_000.0), end=0.0), "99 % training, 2 recoveries 3.0 s, 34.7 GPU hours (0.2 idle)"),
        (bill_of(gpus=0, end=0.0)._replace(recoveries=0, has_steps=False), ""),
        (bill_of(gpus=0, end=0.0, hung=1800.0)._replace(recoveries=0, has_steps=False), "80 % running, hung 30 min 0 s"),
        (bill_of(gpus=0, training=10.0, end=0.0), ""),
        (None, ""),
    ],
)  # fmt: skip
def test_the_words_are_few(bill: Bill | None, words: str) -> None:
    assert bill_words(bill) == words


@pytest.mark.parametrize(
    ("cost", "between", "interval"),
    [
        (0.4, 2460.0, 44.362),
        (2.0, 100.0, 20.0),
        (0.0, 60.0, 0.0),
        (199.0, 100.0, 199.499),
        (500.0, 100.0, 100.0),
    ],
)
def test_the_best_interval_is_youngs_and_never_longer_than_dalys_bound(
    cost: float, between: float, interval: float
) -> None:
    assert best_interval(cost, between) == pytest.approx(interval, abs=1e-3)


def test_the_best_interval_costs_least() -> None:
    def loss(interval: float) -> float:
        """Share of the time that goes into commits, and into work made again: half an interval at each failure."""
        return 0.4 / interval + interval / 2 / 2460

    best = best_interval(0.4, 2460.0)
    assert loss(best) < min(loss(best * 0.99), loss(best * 1.01))


def commits_of(costs: dict[str, Any] | None, failures: int = 3, **parts: float) -> Bill:
    totals = {**TOTALS, "failures": failures, "parts": {**PARTS, **parts}}
    return make_bill(totals, lambda _host, _workers: None, costs=costs)


SUGGESTION = (
    "commits: 132, 0.40 s each; a failure every 41 min 36 s; "
    "saving every 44.7 s would cost least (Young/Daly); you saved every 56.7 s"
)


@pytest.mark.parametrize(
    ("bill", "words"),
    [
        (commits_of(COSTS), SUGGESTION),
        # Lost work was training too, before the failure.
        (commits_of(COSTS, training=7000.0, lost=488.0), SUGGESTION),
        (
            commits_of({**COSTS, "saves": (10.0, 14.0)}),
            f"{SUGGESTION}; a write to --save-to took 12.0 s: --save-every 245",
        ),
        (
            commits_of({**COSTS, "delayed": 0.264, "whole": 20.0}),
            (
                "commits: 132, 2.0 ms each; a failure every 41 min 36 s; "
                "saving every 20.0 s would cost least (Young/Daly); you saved every 56.7 s"
            ),
        ),
        (commits_of(COSTS, failures=0), ""),
        (
            commits_of(
                {**COSTS, "trouble": "ranks commit different steps: rank 0 step 9, rank 1 step 3"}, failures=0
            ),
            "commits were not saved to --save-to: ranks commit different steps: rank 0 step 9, rank 1 step 3",
        ),
        (commits_of(None), ""),
        (commits_of(COSTS, training=10.0, end=0.0, start=0.0), ""),
        (None, ""),
    ],
)
def test_the_words_about_commits_need_commits_and_failures(bill: Bill | None, words: str) -> None:
    assert commit_words(bill) == words


def test_a_report_suggests_the_interval() -> None:
    result = JobResult(exit_code=0, elapsed=7759.0)
    text = as_text(FailureReport(outcome="failed", result=result, size=16, bill=commits_of(COSTS)))
    assert f"\n  {SUGGESTION[0].upper()}{SUGGESTION[1:]}\n" in text


def test_a_failed_job_says_what_it_took_before_the_advice() -> None:
    result = JobResult(exit_code=3, elapsed=7759.0)
    text = as_text(FailureReport(outcome="failed", result=result, size=16, bill=bill_of()))
    assert text.splitlines()[-1].startswith("  It took 2 h 10 min: 96 % training, 2 recoveries 3.0 s, ")
    assert "took" not in as_text(FailureReport(outcome="failed", result=result, size=16))


SPEC = JobSpec(command=("train",), hosts=(), cwd="/")


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, [4, 8, None]),
        ({"gpus_per_worker": 2}, [8, 8, None]),
        ({"visible_gpus": {"a": (1, 2, 3)}}, [3, 3, None]),
        ({"leases": LeaseOptions()}, [4, 12, 1]),
        ({"leases": LeaseOptions(slots=4)}, [4, 8, None]),
    ],
)
def test_a_worker_has_a_gpu_if_its_host_has_enough(
    changes: dict[str, Any], counts: list[int | None], tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"hosts": {"a": {"gpus": ["H100"] * 8}}}))
    count = gpus_of(dataclasses.replace(SPEC, **changes), tmp_path)
    assert [count("a", 4), count("a", 12), count("b", 1)] == counts


def test_without_a_record_of_the_hosts_their_gpus_are_unknown(tmp_path: Path) -> None:
    assert gpus_of(SPEC, tmp_path)("a", 4) is None
    (tmp_path / "run.json").write_text('{"hosts": [1]}')
    assert gpus_of(SPEC, tmp_path)("a", 4) is None


def sample(time: float, joules: float | None, host: str = "a", used: tuple[int, ...] = (0,)) -> HostSample:
    """A sample of a host with GPU 0, and the GPUs that its worker uses."""
    answer = {
        **SAMPLE_OF_A_HOST,
        "gpus": [{**SAMPLE_OF_A_HOST["gpus"][0], "energy_joules": joules}],
        "workers": [{**SAMPLE_OF_A_HOST["workers"][0], "gpus": list(used)}],
    }
    parsed = host_sample(host, time, answer, {})
    assert parsed is not None
    return parsed


def test_energy_is_the_difference_of_a_counter() -> None:
    energy = Energy()
    for time, joules, host, used in (
        (0.0, 1000.0, "a", (0,)),
        (0.0, 50.0, "b", (0,)),
        (10.0, 1500.0, "a", (0,)),
        (600.0, 1600.0, "a", (0,)),  # however long nobody has looked
        (601.0, 5.0, "a", (0,)),  # the driver of the GPU was loaded anew
        (602.0, 15.0, "a", (0,)),
        (603.0, 900.0, "a", ()),  # another's job
        (604.0, 1900.0, "a", (0,)),
        (605.0, None, "a", (0,)),
        (606.0, 2000.0, "a", (0,)),
    ):
        energy.add(sample(time, joules, host, used))
    assert (energy.joules, energy.seconds) == (610.0, 601.0)
