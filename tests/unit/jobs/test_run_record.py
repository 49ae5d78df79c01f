"""The record of a job's run, `hvlaunch rerun` and `hvlaunch diff`, with jobs on this machine."""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.spec import job_spec
from hvlaunch.outside import KnownJob, known_jobs, prune
from hvlaunch.outside.run_record import RUN, differences

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
SECRET = "hunter2-7f3a"
LIMIT = 100.0
SCRIPT = """\
import os, sys, time
from model import NAME
print(NAME, os.environ.get("LR"), os.environ.get("API_TOKEN"), *sys.argv[1:], flush=True)
while "wait" in sys.argv:
    time.sleep(0.1)
    if os.path.exists(sys.argv[-1]):
        break
"""


class Machine:
    """A user's machine with a project, and the jobs of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.project = path / "project"
        (self.project / "src").mkdir(parents=True)
        (self.project / "src/train.py").write_text(SCRIPT)
        (self.project / "src/model.py").write_text("NAME = 'first'\n")
        (self.project / "uv.lock").write_text("torch 2.4\n")
        self.environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(path),
            "XDG_STATE_HOME": str(path / "state"),
            "XDG_CACHE_HOME": str(path / "cache"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.root = path / "state/hvlaunch/jobs"
        self.git("init", "-q")
        self.commit()

    def git(self, *words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, *words], cwd=self.project, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "a commit")

    def run(
        self, *words: object, cwd: Path | None = None, code: int = 0, environ: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [*HVLAUNCH, *map(str, words)],
            cwd=cwd or self.project / "src",
            env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done

    def train(self, *words: object, args: tuple[object, ...] = (), **environ: str) -> KnownJob:
        """Run the script to its end; return the job."""
        self.run("--sync", "-np", "1", *words, "python", "train.py", *args, environ=environ)
        return self.newest

    def observed(self, *words: object, args: tuple[object, ...] = (), **environ: str) -> KnownJob:
        """As train(), with a job that runs until its host has been asked for versions."""
        seen = self.path / "seen"
        seen.unlink(missing_ok=True)
        known = {job.id for job in known_jobs(self.root)}
        command = [*HVLAUNCH, "--sync", "-np", "1", *words, "python", "train.py", *args, "wait", seen]
        with subprocess.Popen(
            [*map(str, command)],
            cwd=self.project / "src",
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ) as process:
            while process.poll() is None and not seen.exists():
                if any(job.id not in known and hosts_of(job) for job in known_jobs(self.root)):
                    seen.touch()
                time.sleep(0.05)
        assert process.returncode == 0
        return self.newest

    @property
    def newest(self) -> KnownJob:
        return known_jobs(self.root)[-1]


def record_of(job: KnownJob) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((job.directory / RUN).read_bytes())
    return record


def hosts_of(job: KnownJob) -> Mapping[str, Any]:
    try:
        return dict(record_of(job)["hosts"])
    except OSError:
        return {}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_job_keeps_what_it_ran(machine: Machine) -> None:
    (machine.project / "notes").write_text("not committed")
    job = machine.observed(
        *("-x", "LR=0.1", "-x", f"API_TOKEN={SECRET}", "-x", "PYTHONHASHSEED=7"),
        args=("--seed", 4, "--api-key", SECRET),
    )
    record = record_of(job)
    assert record["command"][1:6] == ["train.py", "--seed", "4", "--api-key", "****"]
    assert record["options"] == [["--sync"], ["--num-proc", "1"]]
    assert record["environment"]["LR"] == "0.1"
    assert record["masked"] == ["API_TOKEN"]
    assert record["seeds"] == {"PYTHONHASHSEED": "7", "--seed": "4"}
    assert record["code"]["commit"] == machine.git("rev-parse", "HEAD")
    assert record["code"]["is_dirty"] is True
    assert list(record["locks"]) == ["uv.lock"]
    [(host, versions)] = record["hosts"].items()
    assert host == "localhost"
    assert versions["python"] == "{}.{}.{}".format(*sys.version_info)
    assert versions["executable"] == shutil.which("python", path=machine.environ["PATH"])
    assert stat.S_IMODE((job.directory / RUN).stat().st_mode) == 0o600
    assert SECRET not in (job.directory / RUN).read_text()


def test_jobs_and_reports_show_the_code(machine: Machine) -> None:
    machine.run("--sync", "-np", 1, "--report", machine.path / "r.json", "false", code=1)
    tree, commit = machine.newest.about["code"]["hash"][:8], machine.git("rev-parse", "HEAD")[:8]
    table = machine.run("jobs").stdout.splitlines()
    assert [line.split()[-3:-1] for line in table] == [["CODE", "COMMIT"], [tree, commit]]
    record = json.loads(machine.run("jobs", "--json").stdout)
    report = json.loads((machine.path / "r.json").read_bytes())
    assert record["code"] == report["job"]["code"] == machine.newest.about["code"]
    assert f"\n  Its code: {tree}, commit {commit}\n" in report["text"]
    done = machine.run("--sync", "-np", 1, "--report", machine.path / "r.html", "true")
    assert done.stderr.endswith(f", exit code 0; code {tree}, commit {commit}\n")
    assert f"<dt>code</dt><dd>{tree}, commit {commit}</dd>" in (machine.path / "r.html").read_text()


def test_a_job_runs_again_after_its_tree_is_gone(machine: Machine) -> None:
    job = machine.train("--job-name", "base", "-x", "LR=0.1", "--prefix", "p ", args=("--epochs", 3))
    code = job.about["code"]
    (machine.project / "src/model.py").write_text("NAME = 'second'\n")
    assert "second 0.2" in machine.run("--sync", "-np", 1, "-x", "LR=0.2", "python", "train.py").stdout
    shutil.rmtree(machine.project)
    # Neither the hosts' copies nor the cache of this machine are needed.
    shutil.rmtree(machine.path / "cache")
    again = machine.run("rerun", "base", cwd=Path("/"))
    assert again.stdout == "p first 0.1 None --epochs 3\n"
    assert machine.newest.about["code"] == code
    assert machine.run("rerun", "base", cwd=Path("/")).stdout == again.stdout
    other = machine.run("rerun", machine.newest.id, "-np", 2, "-x", "LR=0.3", cwd=Path("/"))
    assert other.stdout == "p first 0.3 None --epochs 3\n" * 2
    assert machine.newest.about["code"] == code
    assert record_of(machine.newest)["options"] == [["--sync"], ["--num-proc", "2"], ["--prefix", "p "]]


def test_secrets_come_from_the_environment_of_the_rerun(machine: Machine) -> None:
    job = machine.train("-x", "API_TOKEN", API_TOKEN=SECRET)
    error = machine.run("rerun", job.id, code=2).stderr
    assert "had secrets, which were not kept, and they are not set here: API_TOKEN" in error
    assert "first None new" in machine.run("rerun", job.id, environ={"API_TOKEN": "new"}).stdout
    assert "first None typed" in machine.run("rerun", job.id, "-x", "API_TOKEN=typed").stdout


def test_variables_of_now_do_not_replace_the_jobs(machine: Machine) -> None:
    job = machine.train(OMP_NUM_THREADS="1")
    machine.run("rerun", job.id, environ={"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"})
    assert [*differences(job, machine.newest)] == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "rerun needs the id or the name of a job"),
        (("nosuch",), "there is no job nosuch"),
        (("JOB", "python"), "rerun: 'python' is not an option"),
        (("JOB", "--nosuch"), "unknown option '--nosuch'"),
    ],
)
def test_a_wrong_line_starts_nothing(machine: Machine, words: tuple[str, ...], error: str) -> None:
    job = machine.train()
    done = machine.run("rerun", *(job.id if word == "JOB" else word for word in words), code=2)
    assert error in done.stderr
    assert machine.newest.id == job.id


def test_without_a_kept_copy_the_host_has_it_or_there_is_an_error(machine: Machine) -> None:
    job = machine.train()
    for pack in job.directory.glob("*.pack"):
        pack.unlink()
    # The host has its copy.
    assert "first" in machine.run("rerun", job.id).stdout
    shutil.rmtree(machine.path / "cache/hvlaunch/trees")
    error = machine.run("rerun", job.id, code=69).stderr
    assert "it lacks the earlier job's files, and they are no longer kept here" in error
    (job.directory / "manifest").unlink()
    assert "is no longer kept; try: hvlaunch rerun" in machine.run("rerun", job.id, code=2).stderr
    (machine.project / "src/model.py").write_text("NAME = 'now'\n")
    assert "now" in machine.run("rerun", job.id, "--sync").stdout


def test_a_job_without_sync_runs_the_files_of_now(machine: Machine) -> None:
    machine.run("-np", 1, "sh", "-c", "exit 3", code=3)
    done = machine.run("rerun", machine.newest.id, code=3)
    assert "had no --sync: it runs the files that are there now" in done.stderr


def test_a_job_with_roles_runs_again(machine: Machine) -> None:
    roles = ["--role", "a=1: sh -c 'exit $CODE'", "--role", "b=1: true", "--role-env", "a:CODE=3"]
    machine.run(*roles, "--role-env", "b:API_TOKEN=hidden", code=3)
    job = machine.newest
    assert "its --role-env had a secret, which was not kept" in machine.run("rerun", job.id, code=2).stderr
    done = machine.run("rerun", job.id, "--role-env", "a:CODE=4", code=4)
    assert "a:0 (rank 0 of 2) on host localhost failed first" in done.stderr
    assert machine.newest.about["command"] == job.about["command"]


def test_diff_names_ten_differences_of_ten(machine: Machine, tmp_path: Path) -> None:
    """Each is seeded alone between the two jobs; versions come from packages that the worker's Python finds."""
    site = tmp_path / "site"
    package(site, "2.4.0", "12.1", "2.20.5")
    a = machine.observed("-x", f"PYTHONPATH={site}", "-x", "LR=0.1", "--grace", 3, args=("--seed", 1))
    (machine.project / "src/model.py").write_text("NAME = 'second'\n")
    (machine.project / "src/new.py").write_text("")
    (machine.project / "uv.lock").write_text("torch 2.5\n")
    machine.commit()
    (machine.project / "dirty").write_text("")
    shutil.rmtree(site)
    package(site, "2.5.1", "12.4", "2.21.5")
    b = machine.observed("-x", f"PYTHONPATH={site}", "-x", "LR=0.2", "--grace", 4, args=("--seed", 2))
    changes = {(change.part, change.name): (change.a, change.b) for change in differences(a, b)}
    wanted_names = {
        ("file", "src/model.py"),
        ("file", "src/new.py"),
        ("code", "commit"),
        ("code", "is_dirty"),
        ("lock", "uv.lock"),
        ("option", "--grace"),
        ("environment", "LR"),
        ("seed", "--seed"),
        ("host localhost", "torch"),
        ("host localhost", "nccl"),
    }
    assert wanted_names <= changes.keys()
    # What follows from them, and nothing else.
    assert changes.keys() - wanted_names == {
        ("code", "hash"),
        ("file", "uv.lock"),
        ("file", "dirty"),
        ("job", "command"),
        ("host localhost", "cuda"),
    }
    assert changes["host localhost", "torch"] == ("2.4.0", "2.5.1")
    text = machine.run("diff", a.id, b.id).stdout
    assert f"a is job {a.id}, b is job {b.id}\n" in text
    assert "file src/new.py: added\n" in text
    assert "host localhost nccl: 2.20.5 → 2.21.5\n" in text
    rows = json.loads(machine.run("diff", "--json", a.id, b.id).stdout)["differences"]
    assert {(row["part"], row["name"]): (row["a"], row["b"]) for row in rows}.keys() == changes.keys()


def package(site: Path, torch: str, cuda: str, nccl: str) -> None:
    (site / "torch").mkdir(parents=True)
    (site / f"nvidia_nccl_cu12-{nccl}.dist-info").mkdir()
    version = (
        f"__version__ = '{torch}'\ndebug = False\ncuda: Optional[str] = '{cuda}'\nhip: Optional[str] = None\n"
    )
    (site / "torch/version.py").write_text(version)
    # Reading versions must not import the package.
    (site / "torch/__init__.py").write_text("raise SystemExit('imported')\n")


def test_equal_jobs_have_no_difference_and_say_what_was_not_compared(machine: Machine) -> None:
    a = machine.train("-x", f"API_TOKEN={SECRET}")
    b = machine.train("-x", f"API_TOKEN={SECRET}")
    lines = machine.run("diff", a.id, b.id).stdout.splitlines()[1:]
    assert lines == [
        "not compared: API_TOKEN of the environment, a secret",
        "not compared: the versions of a's hosts, which ended before they were asked",
        "not compared: the versions of b's hosts, which ended before they were asked",
    ]


def test_the_content_of_old_jobs_goes_when_all_of_it_is_too_much(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []
    for name in "abc":
        (machine.project / "data").write_bytes(os.urandom(1 << 16))
        shutil.rmtree(machine.path / "cache", ignore_errors=True)
        jobs.append(machine.train("--job-name", name))
    monkeypatch.setattr("hvlaunch.outside._MOST_CONTENT", 150_000)
    prune(machine.root)
    assert [bool(list(job.directory.glob("*.pack"))) for job in jobs] == [False, True, True]
    assert all((job.directory / RUN).exists() for job in jobs)


def test_the_words_of_options_mean_the_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"PATH": "/bin", "HOME": str(tmp_path)}
    line = (
        "-np 4 -H a:2 -H b:2 --no-merge --grace 3 --output-filename out --report r.json --min-np 1 --blacklist-cooldown-range 1 5 "
        "--detach-on-hangup --on-hang restart --ssh-user me -m train --steps 3"
    )
    spec, _ = job_spec(parse(line.split()), environ)
    words = [word for option in spec.options for word in option]
    assert "-m" not in words
    monkeypatch.chdir("/")
    again, _ = job_spec(parse(["--cwd", spec.cwd, *words, "--", *spec.command]), environ)
    assert (again.output_dir, again.options) == (tmp_path / "out", spec.options)
    assert replace(again, output_dir=spec.output_dir) == spec


def test_a_fixed_place_stays_or_is_replaced(machine: Machine) -> None:
    job = machine.train("--sync-to", machine.path / "place", args=("a",))
    shutil.rmtree(machine.project)
    shutil.rmtree(machine.path / "place")
    machine.run("rerun", job.id, cwd=Path("/"))
    assert (machine.path / "place/src/model.py").read_text() == "NAME = 'first'\n"
    machine.run("rerun", job.id, "--sync-to", machine.path / "other", cwd=Path("/"))
    assert (machine.path / "other/src/model.py").exists()
