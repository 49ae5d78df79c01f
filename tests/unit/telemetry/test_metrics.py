"""Metrics of jobs, read by Prometheus' own parser, and Prometheus' rules for names and units."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hvlaunch.telemetry.metrics import METRICS, JobNow, metrics_text
from hvlaunch.telemetry.sample import as_json, host_sample
from tests.unit.telemetry.samples import SAMPLE_OF_A_HOST

DOCS = Path(__file__).resolve().parents[3] / "docs"
WORKER = {"rank": 7, "host": "a", "state": "working", "progress": {"step": 12, "rate": 2.5, "total": None}}
STATE = {
    "id": "0123456789ab",
    "name": 'a "name"\n',
    "began": 1000.0,
    "phase": "running",
    "round": {"number": 2, "size": 1},
    "workers": [WORKER],
    "hosts": [{"host": "a", "state": "ready"}, {"host": "b", "state": "none"}],
    "hang": None,
}
TOTALS = {
    "seconds": 200.0,
    "useful_seconds": 150.0,
    "rounds": 3,
    "restarts": 2,
    "lost_hosts": 1,
    "recoveries": {"bounds": [1.0, 5.0], "counts": [0, 1, 1], "seconds": 11.0},
}


def now(**changes) -> JobNow:
    sample = host_sample("a", 50.0, SAMPLE_OF_A_HOST, {7: 40.0})
    assert sample is not None
    return JobNow(
        {**STATE, **changes}, TOTALS, {"now": 51.0, "hosts": [as_json(sample)], "problems": {}}, 2000.0
    )


def read(*jobs: JobNow) -> dict[str, dict[tuple[str, ...], float]]:
    """Read the values of each series by name and by the labels after the job's labels."""
    families = text_string_to_metric_families(metrics_text(jobs).decode())
    series: dict[str, dict[tuple[str, ...], float]] = {}
    for family in families:
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["job_name"] == (
                STATE["name"] if sample.labels["job_id"] == STATE["id"] else ""
            )
            labels_left = tuple(value for name, value in sample.labels.items() if not name.startswith("job_"))
            key = (sample.labels["job_id"][:2], *labels_left)
            series.setdefault(sample.name, {})[key] = sample.value
    return series


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("hvlaunch_job_start_time_seconds", (), 1000.0),
        ("hvlaunch_job_phase", ("running",), 1),
        ("hvlaunch_job_hanging", (), 0),
        ("hvlaunch_round", (), 2),
        ("hvlaunch_workers", ("working",), 1),
        ("hvlaunch_workers", ("hanging",), 0),
        ("hvlaunch_hosts", ("ready",), 1),
        ("hvlaunch_rounds_total", (), 3),
        ("hvlaunch_restarts_total", (), 2),
        ("hvlaunch_lost_hosts_total", (), 1),
        ("hvlaunch_recovery_seconds_bucket", ("1.0",), 0),
        ("hvlaunch_recovery_seconds_bucket", ("5.0",), 1),
        ("hvlaunch_recovery_seconds_bucket", ("+Inf",), 2),
        ("hvlaunch_recovery_seconds_count", (), 2),
        ("hvlaunch_recovery_seconds_sum", (), 11.0),
        ("hvlaunch_useful_seconds_total", (), 150.0),
        ("hvlaunch_goodput_ratio", (), 0.75),
        ("hvlaunch_worker_step", ("a", "7"), 12),
        ("hvlaunch_worker_steps_per_second", ("a", "7"), 2.5),
        ("hvlaunch_worker_cpu_seconds_total", ("a", "7"), 12.5),
        ("hvlaunch_worker_last_output_timestamp_seconds", ("a", "7"), 1989.0),
        ("hvlaunch_host_cpu_ratio", ("a",), 1.5 / 8),
        ("hvlaunch_host_free_bytes", ("a", "cwd"), 1),
        ("hvlaunch_gpu_utilization_ratio", ("0", "a"), 0.5),
        ("hvlaunch_gpu_throttled", ("0", "a"), 1),
    ],
)
def test_a_job_in_numbers(name, labels, value):
    key = ("01", *labels)
    assert read(now())[name][key] == value


def test_every_metric_appears_and_no_other():
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in read(now())}
    assert names == set(METRICS)


def test_jobs_share_families_and_unknown_values_are_left_out():
    other = JobNow({**STATE, "id": "ffff", "name": None, "round": None, "workers": []}, None, None, 2000.0)
    series = read(now(), other)
    assert set(series["hvlaunch_job_hanging"]) == {("01",), ("ff",)}
    assert set(series["hvlaunch_round"]) == set(series["hvlaunch_rounds_total"]) == {("01",)}
    assert metrics_text([]) == b""


@pytest.mark.parametrize("name", METRICS)
def test_names_follow_prometheus_rules(name):
    """What `promtool check metrics` looks for."""
    kind = METRICS[name].kind
    assert re.fullmatch("hvlaunch(_[a-z]+)+", name)
    assert name.endswith("_total") is (kind == "counter")
    assert not re.search("_(count|sum|bucket|info|counter|gauge|histogram|metric)(_|$)", name)
    units = (
        "milliseconds",
        "minutes",
        "hours",
        "percent",
        "kilobytes",
        "megabytes",
        "bits",
        "ms",
        "kb",
        "mb",
    )
    assert not set(name.split("_")) & set(units)
    assert METRICS[name].help.endswith(".")


def test_the_dashboard_and_the_page_name_existing_metrics():
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 10
    page = (DOCS / "interfaces" / "metrics.md").read_text()
    named = set(re.findall(r"hvlaunch_[a-z_]+", "\n".join([*queries, page])))
    existing = set(METRICS) | {f"hvlaunch_recovery_seconds_{part}" for part in ("bucket", "sum", "count")}
    assert named - existing == set()
    assert set(METRICS) - set(re.findall(r"hvlaunch_[a-z_]+", page)) == set()
