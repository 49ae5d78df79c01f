"""What commands print with --json has the form that docs/reference/json.md shows."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from docs.options_pages import json_page
from hvlaunch.cli.hosts.doctor import run_doctor_command
from hvlaunch.cli.jobs.pool_commands import _record
from hvlaunch.cli.jobs.queue_commands import queue_rows
from hvlaunch.cli.options.parser import JOB_WORDS
from hvlaunch.cli.pages.json_forms import FORMS, json_schema
from hvlaunch.outside import known_jobs
from hvlaunch.outside.ledger import Ledger, ledger_directory
from hvlaunch.outside.pools import KnownPool, PoolGone
from hvlaunch.outside.queue import Added, Queue, QueuedJob, Schedule
from tests.testhosts.places import wait_until
from tests.unit.cli.job_site import DEADLINE, Site

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
ROOT = Path(__file__).parents[3]
CLOSED = json_schema(is_closed=True)
FAILS = "import os; print('hello', flush=True); raise SystemExit(int(os.environ['RANK']) * 3)"


def check(name: str, value: Any) -> None:
    """Check a value against a form; a field without a line in the table is an error."""
    Draft202012Validator({**CLOSED, "$ref": f"#/$defs/{name}"}).validate(value)


Print = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A job that has failed, and a running one whose output is stored."""
    directory = tmp_path_factory.mktemp("state")
    site = Site(directory)
    for _ in range(2):
        failed = subprocess.run(
            [*HVLAUNCH, "-np", "2", "--report", directory / "report.json", sys.executable, "-c", FAILS],
            env=site.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DEADLINE,
            check=False,
        )
        assert failed.returncode == 3, failed.stderr
    site.start("--job-name", "running")
    yield site
    site.close()


@pytest.fixture
def printed(site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Print:
    """Run a command that prints objects, each on its own line; return them."""
    monkeypatch.setenv("XDG_STATE_HOME", site.environ["XDG_STATE_HOME"])

    def run(*words: str, code: int = 0) -> list[Any]:
        capsys.readouterr()
        assert site.do(*words, "--json") == code
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def all_of(name: str, values: list[Any]) -> list[Any]:
    """Check that there are objects, and all of this form."""
    assert values
    for value in values:
        check(name, value)
    return values


def test_jobs(site: Site, printed: Print) -> None:
    first, _, running = all_of("job", printed("jobs"))
    assert first["result"]["bill"]["wall_seconds"] > 0
    assert running["state"]["phase"] == "running"
    assert running["result"] is None


def test_report(site: Site) -> None:
    report = json.loads((site.root.parents[1] / "report.json").read_text())
    check("report", report)
    assert report["bill"]["end_seconds"] < report["bill"]["wall_seconds"]
    assert [worker["role"] for worker in report["workers"]] == ["finished", "cause"]


def test_output_and_the_view(printed: Print) -> None:
    # The view comes first: it has the output stored from then on.
    (view,) = all_of("view", printed("top", "running"))
    assert [rank["state"] for host in view["hosts"] for rank in host["ranks"]] == ["working"] * 2
    all_of("output", printed("logs", "running"))


def test_stacks(printed: Print) -> None:
    assert {process["rank"] for process in all_of("process", printed("stacks", "running"))} == {0, 1}


def test_differences_between_jobs(site: Site, printed: Print) -> None:
    wait_until(lambda: all((job.directory / "run.json").exists() for job in known_jobs(site.root)), "records")
    one, other, running = (job.id for job in known_jobs(site.root))
    all_of("differences", printed("diff", one, other))
    (found,) = all_of("differences", printed("diff", one, running))
    assert "job" in {difference["part"] for difference in found["differences"]}


def test_collected_files(printed: Print, tmp_path: Path) -> None:
    (collection,) = all_of("collection", printed("collect", "running", f"nothing-*.pt:{tmp_path}"))
    assert list(collection["hosts"]) == ["localhost"]


def test_copied_files(printed: Print, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("content")
    words = ("cp", "-H", "localhost", str(tmp_path / "source"), str(tmp_path / "copy"))
    (copies,) = all_of("copies", printed(*words))
    assert copies["hosts"]["localhost"] == {"received": 7, "error": None}


def test_the_ledger(site: Site, printed: Print) -> None:
    assert printed("hosts") == []
    Ledger(ledger_directory(site.environ), pytest.fail).record("m1", "gpu7", "lost", "job", 1e9, "silent")
    Ledger(ledger_directory(site.environ), pytest.fail).record("m1", "gpu7", "lost", "job", 4e9, "silent")
    all_of("record", printed("hosts"))


def test_units_of_hosts(printed: Print, tmp_path: Path) -> None:
    words = ("-H", "localhost", "--lease-slots", "2", "--lease-directory", str(tmp_path / "leases"))
    (units,) = all_of("units", printed("hosts", *words))
    assert [unit["is_free"] for unit in units["units"]] == [True, True]


def test_compared_hosts(printed: Print) -> None:
    (comparison,) = all_of("comparison", printed("check", "-H", "localhost"))
    assert comparison["hosts"]["localhost"]["values"]["cpus"] >= 1


def test_a_conclusion(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.do("bisect", "-H", "localhost", "--json", "--", "true") == 0
    check("conclusion", json.loads(capsys.readouterr().out))


def test_findings_of_the_doctor(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_doctor_command(["--json"], site.environ)
    answer = json.loads(capsys.readouterr().out)
    check("doctor", answer)
    assert answer["exit_code"] == code


def test_pools(printed: Print, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert printed("pool", "status") == []
    about = {"machine": "m", "pid": 7, "version": "1", "began": 1.0}
    check("pool", _record(KnownPool("base", tmp_path, {}, is_up=False)))
    host: dict[str, Any] = {"state": "ready", "problem": None, "jobs": []}
    monkeypatch.setattr(
        "hvlaunch.cli.jobs.pool_commands.ask", lambda *_, **__: {"hosts": {"a": host}, "idle": 3.0}
    )
    up = _record(KnownPool("base", tmp_path, about, is_up=True))
    check("pool", up)
    assert up["state"] == "up"

    def fail(*_: object, **__: object) -> None:
        raise PoolGone("gone")

    monkeypatch.setattr("hvlaunch.cli.jobs.pool_commands.ask", fail)
    check("pool", _record(KnownPool("base", tmp_path, about, is_up=True)))


def test_the_queue(tmp_path: Path) -> None:
    hosts: dict[str, Any] = {"hosts": ("a", "b"), "workers": 2, "per_worker": 1}
    waiting = QueuedJob("1", "big", "python train.py", 5.0, **hosts, after=(("7", "ok"),))
    ended = QueuedJob(
        "2_3", "", "true", 5.0, **hosts, state="ended", job="4a5fac6ebd8e", code=0, units={"b": 2}
    )
    schedule = Schedule()
    schedule.apply(Added((waiting, ended)))
    rows = all_of(
        "queued", [json.loads(json.dumps(row)) for row in queue_rows(Queue(tmp_path), schedule, 9.0)]
    )
    assert [(row["id"], row["name"], row["after"]) for row in rows] == [
        ("1", "big", ["7"]),
        ("2_3", None, []),
    ]


def test_presets(printed: Print) -> None:
    assert "vllm" in {preset["name"] for preset in all_of("preset", printed("presets"))}


def test_every_command_with_objects_has_a_form() -> None:
    commands = {word.name for word in JOB_WORDS.values() if "--json" in word.usage} | {"pool", "queue"}
    shown = {form.command.split()[1] for form in FORMS.values() if form.command}
    assert commands == shown - {"--report"}


def test_the_forms_are_json_schemas_and_all_are_used() -> None:
    Draft202012Validator.check_schema(json_schema())
    text = json.dumps(json_schema())
    assert [
        name for name, form in FORMS.items() if not form.command and f'"#/$defs/{name}"' not in text
    ] == []


def test_a_wrong_value_is_noticed() -> None:
    good = {"time": 1.0, "rank": None, "stream": "stdout", "text": ""}
    check("output", good)
    for wrong in ({**good, "more": 1}, {**good, "time": "1"}, {"time": 1.0}, {**good, "stream": None}):
        assert list(Draft202012Validator({**CLOSED, "$ref": "#/$defs/output"}).iter_errors(wrong))


def test_the_page_is_made_of_the_table() -> None:
    assert (ROOT / "docs/reference/json.md").read_text() == json_page(), "run `make options-page`"
