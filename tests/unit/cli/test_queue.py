"""`hvlaunch queue`: real servers, drivers and workers on this machine, killed at random."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hvlaunch.cli.jobs.assistant import Tools
from hvlaunch.cli.jobs.queue_commands import submit
from hvlaunch.errors import BadUsage
from hvlaunch.outside import SUCCESSOR_LOG, has_driver, has_minder, known_jobs, prune, queue_server
from hvlaunch.outside.queue import OPEN, Queue
from hvlaunch.outside.queue_server import QueueServer
from tests.testhosts.places import wait_until
from tests.unit.cli.job_site import DEADLINE, Site

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]


class QueueSite(Site):
    """A user with a queue, and two slots on this machine."""

    def __init__(self, place: Path) -> None:
        super().__init__(place / "state")
        self.place = place
        self.environ["XDG_CACHE_HOME"] = str(place / "cache")
        self.queue = Queue(place / "state/hvlaunch/queue")
        self.leases = ["--lease-slots", "2", "--lease-directory", str(place / "leases"), "-H", "localhost"]
        self.marks = place / "marks"

    def hvlaunch(self, *words: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [*HVLAUNCH, *words],
            env=self.environ,
            cwd=self.place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done

    def run(self, *words: str, code: int = 0) -> str:
        done = self.hvlaunch("queue", *words, code=code)
        return done.stdout if code == 0 else done.stderr

    def add(self, *words: str) -> str:
        return self.run("add", "--quiet", *self.leases, *words).strip()

    def sbatch(self, *words: str, script: str, code: int = 0) -> str:
        """Submit a batch script; return what sbatch prints."""
        (self.place / "s.sh").write_text(f"#!/bin/bash\n{script}\n")
        done = self.hvlaunch("sbatch", *self.leases, *words, "s.sh", code=code)
        return done.stdout.removeprefix("Submitted batch job ").strip() if not code else done.stdout

    def output(self, name: str) -> str:
        path = self.place / name
        return path.read_text() if path.exists() else ""

    def add_marked(self, *options: str, seconds: float = 0.0, until: str = "") -> str:
        """Queue a job that leaves its number in a file, and then waits so long, or for another file."""
        wait = f"until [ -e {self.place / until} ]; do sleep 0.05; done" if until else f"sleep {seconds}"
        number = self.queue.read().next
        return self.add(*options, "-np", "1", "sh", "-c", f"echo {number} >> {self.marks}; {wait}")

    def starts(self) -> list[str]:
        """Return the numbers of jobs with workers, in the order of their starts."""
        return self.marks.read_text().split() if self.marks.exists() else []

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in map(json.loads, self.run("ls", "--json").splitlines())}

    def state(self, number: str) -> str:
        return self.queue.read().jobs[number].state

    def wait_for(self, number: str, state: str) -> None:
        wait_until(lambda: self.state(number) == state, f"{number} is not {state}")

    def processes(self, *words: str) -> list[psutil.Process]:
        """All processes of this user, or those with these words."""
        chosen = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                state = process.environ().get("XDG_STATE_HOME")
                if state == self.environ["XDG_STATE_HOME"] and {*words} <= {*process.cmdline()}:
                    chosen.append(process)
        return chosen

    def servers(self) -> list[psutil.Process]:
        """The server's process; its keeper runs another function."""
        directory, servers = str(self.queue.directory), []
        for process in self.processes(directory):
            with suppress(psutil.Error):
                # A process that was just killed has no words.
                words = process.cmdline()
                is_server = words[-1:] == [directory] and "run_server()" in words[-2]
                servers += [process] if is_server else []
        return servers

    def kill(self) -> None:
        """Kill all that is left, whatever starts another meanwhile."""
        while processes := self.processes():
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[QueueSite]:
    site = QueueSite(tmp_path)
    yield site
    site.kill()


def test_jobs_start_in_order_and_leave_nothing(site: QueueSite) -> None:
    first = site.add_marked(until="go")
    second = site.add_marked("--job-name", "second", until="go")
    third = site.add_marked()
    site.wait_for(third, "starting")
    # Both slots are taken.
    wait_until(lambda: "0 of 2 free on localhost" in site.run("ls"), "what it waits for is not shown")
    behind = site.add_marked()
    assert site.rows()[behind]["text"] == f"waits: behind {third}"
    assert site.starts() == [first, second]
    assert site.do("logs", first) == 0
    (site.place / "go").touch()
    site.wait_for(behind, "ended")
    assert site.starts() == [first, second, third, behind]
    assert [row["text"] for row in site.rows().values()] == ["done"] * 4
    # Directories of submissions go, and the server ends with its last job.
    wait_until(lambda: not site.processes(), "the server goes on")
    assert {path.name for path in site.queue.directory.iterdir()} == {
        OPEN,
        "lock",
        "log",
        "log.lock",
        "minder",
    }
    assert not list((site.queue.directory / OPEN).iterdir())


def test_a_tree_that_is_gone_runs(site: QueueSite) -> None:
    tree = site.place / "project"
    tree.mkdir()
    (tree / "t.py").write_text("print('as it was')")
    blocker = site.add("-np", "2", "sh", "-c", f"until [ -e {site.place}/go ]; do sleep 0.05; done")
    job = site.add("--cwd", str(tree), "--sync", "-np", "1", sys.executable, "t.py")
    shutil.rmtree(tree)
    (site.place / "go").touch()
    site.wait_for(job, "ended")
    assert site.state(blocker) == "ended"
    (record,) = [known for known in known_jobs(site.root) if known.about["queue"] == job]
    assert record.ended_well
    output = subprocess.run(
        [*HVLAUNCH, "logs", job], env=site.environ, capture_output=True, text=True, check=True
    )
    assert output.stdout == "[0]<stdout>: as it was\n"


def test_arrays_and_dependencies(site: QueueSite) -> None:
    words = "echo {array}-$HVLAUNCH_ARRAY-$V >> " + str(site.place / "tasks") + "; exit $(( {array} == 2 ))"
    array = site.add("--array", "0-3%1", "-np", "1", "-x", "V=v{array}", "sh", "-c", words)
    ok, some, more = (
        site.add_marked("--after", array),
        site.add_marked("--after-any", array),
        site.add_marked("--after", f"{array}_1"),
    )
    for number in (some, more):
        site.wait_for(number, "ended")
    assert (site.place / "tasks").read_text().split() == [f"{n}-{n}-v{n}" for n in range(4)]
    assert site.rows()[ok]["text"].startswith(f"waits: never: {array}_2 has failed, exit code 1")
    assert site.rows()[f"{array}_2"]["text"] == "exit code 1, rank 0 on localhost"
    site.run("release", ok)
    site.wait_for(ok, "ended")
    assert site.starts()[-1] == ok


def test_rm_top_and_hold_act_on_jobs_that_wait_at_their_hosts(site: QueueSite) -> None:
    blocker = site.add("-np", "2", "sh", "-c", f"until [ -e {site.place}/go ]; do sleep 0.05; done")
    site.wait_for(blocker, "running")
    jobs = [site.add_marked() for _ in range(4)]
    site.wait_for(jobs[0], "starting")
    site.run("top", jobs[3])
    # The job at its hosts comes back for it.
    site.wait_for(jobs[3], "starting")
    assert site.state(jobs[0]) == "waiting"
    site.run("hold", jobs[3])
    site.wait_for(jobs[0], "starting")
    assert site.rows()[jobs[3]]["text"] == "waits: held"
    site.run("rm", jobs[0])
    site.wait_for(jobs[0], "ended")
    assert "runs" in site.run("hold", blocker, code=2)
    (site.place / "go").touch()
    site.wait_for(jobs[2], "ended")
    site.run("release", jobs[3])
    site.wait_for(jobs[3], "ended")
    assert site.starts() == [jobs[1], jobs[2], jobs[3]]
    assert site.rows()[jobs[0]]["text"] == "removed"
    assert "has ended" in site.run("rm", jobs[0], code=2)


def test_running_jobs_end_by_rm_and_by_their_limit(site: QueueSite) -> None:
    removed = site.add_marked(seconds=1000)
    late = site.add_marked("--time-limit", "1s", seconds=1000)
    site.wait_for(removed, "running")
    site.run("rm", removed)
    for number, reason in ((removed, "removed"), (late, "time limit")):
        site.wait_for(number, "ended")
        assert site.rows()[number]["text"].endswith(reason)


def test_a_running_job_has_its_time_of_grace(site: QueueSite, monkeypatch: pytest.MonkeyPatch) -> None:
    number = site.add("--hold", "--grace", "100", "-np", "1", "true")
    posts: list[bool] = []

    class Client:
        def __init__(self, *_: object) -> None:
            pass

        def post(self, _path: str, body: dict[str, bool]) -> None:
            posts.append(body["kill"])

    monkeypatch.setattr(queue_server, "ControlClient", Client)
    monkeypatch.setattr(queue_server, "known_job", lambda _: SimpleNamespace(has_driver=True))
    server = QueueServer(site.queue.directory)
    for now in range(1000, 1200):
        # A second stop is a kill.
        server._stop(site.queue.read().jobs[number], float(now))
    assert posts[0] is False
    assert len(posts) == 2
    assert posts[1] is True


def test_batch_scripts_wait_and_end_as_other_jobs(site: QueueSite) -> None:
    first = site.sbatch("--ntasks=2", "-J", "two", script="until [ -e go ]; do sleep 0.05; done; exit 3")
    second = site.sbatch(
        *("--array=1-3:2%1", "-o", "o-%A-%a-%j"),
        script="srun echo $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_JOB_ID; exit $((SLURM_ARRAY_TASK_ID == 3))",
    )
    never = site.sbatch("--dependency=afterok:1", script="")
    after = site.sbatch(f"--dependency=afterok:{second}_1,afterany:{first}", script="echo after")
    # An array of two tasks has two numbers.
    assert (first, second, never, after) == ("1", "2", "4", "5")
    wait_until(lambda: "waits: 1 slot, 0 of 2 free" in site.rows()["2_1"]["text"], "its turn")
    assert site.rows()["1"]["name"] == "two"
    assert site.rows()["1"]["command"] == "sbatch s.sh"
    (site.place / "go").touch()
    site.wait_for(after, "ended")
    site.wait_for("2_3", "ended")
    texts = {number: row["text"] for number, row in site.rows().items()}
    assert texts == {
        "1": "exit code 3",
        "2_1": "done",
        "2_3": "exit code 1",
        "4": "waits: never: 1 has failed, exit code 3",
        "5": "done",
    }
    assert (site.output("o-2-1-2"), site.output("o-2-3-3")) == ("1 of 2\n", "3 of 2\n")
    assert site.output("slurm-5.out") == "after\n"
    site.run("rm", never)
    # --wait returns the first code of an array that is not 0.
    assert site.sbatch("--wait", "--array=5-7", script="exit $((SLURM_ARRAY_TASK_ID - 5))", code=1)
    wait_until(lambda: not site.processes(), "the server goes on")
    assert not [path for path in site.queue.directory.iterdir() if path.name.isdigit()]


def test_batch_scripts_are_stopped_by_rm_and_by_their_limit(site: QueueSite) -> None:
    trap = "trap 'echo saves; exit 4' TERM; echo begins; srun sleep 600; echo step ended with $?"
    removed, late = site.sbatch(script=trap), site.sbatch("-t", "0:01", script=trap)
    wait_until(lambda: "begins" in site.output(f"slurm-{removed}.out"), "the script")
    site.run("rm", removed)
    for number, reason, cause in (
        (removed, "removed", "it was removed from the queue"),
        (late, "time limit", "its time limit of 1.0 s is over"),
    ):
        site.wait_for(number, "ended")
        assert site.rows()[number]["text"] == f"exit code 4, {reason}"
        text = site.output(f"slurm-{number}.out")
        assert f"hvlaunch: the job is stopped: {cause}\n" in text
        assert "saves\n" in text
    wait_until(lambda: not site.processes(), "something is left")


def test_a_batch_script_runs_the_tree_and_variables_of_its_submission(site: QueueSite) -> None:
    tree = site.place / "project"
    (tree / "sub").mkdir(parents=True)
    (tree / "text").write_text("as it was\n")
    blocker = site.sbatch("--ntasks=2", script="until [ -e go ]; do sleep 0.05; done")
    site.environ["OF_THE_JOB"] = "then"
    script = "cat text; srun cat text; cd sub; srun cat ../text; srun printenv OF_THE_JOB"
    job = site.sbatch("--sync", "--cwd", str(tree), "--export=ALL,OF_THE_JOB", script=script)
    del site.environ["OF_THE_JOB"]
    shutil.rmtree(tree)
    (site.place / "s.sh").unlink()
    (site.place / "go").touch()
    site.wait_for(job, "ended")
    assert site.state(blocker) == "ended"
    assert site.output(f"slurm-{job}.out") == "as it was\n" * 3 + "then\n"


def test_a_batch_job_without_its_host_tells_why_it_waits(site: QueueSite) -> None:
    site.leases = []
    (site.place / "hosts").write_text("away slots=1 address=127.0.0.1 port=1\n")
    number = site.sbatch("--hostfile", "hosts", script="")
    wait_until(lambda: "again in" in site.rows()[number]["text"], "its failed start")
    assert site.rows()[number]["text"].startswith("waits: host away: ")
    assert "hvlaunch: host away: " in site.output(f"slurm-{number}.out")


def play_kills(site: QueueSite, kills: int, jobs: int) -> None:
    """Queue jobs while the server is killed again and again."""
    draw = random.Random(kills)
    # For this one the server stays.
    held = site.add_marked("--hold")
    for number in range(jobs):
        site.add_marked(seconds=0.1)
        for _ in range(kills // jobs + (number < kills % jobs)):
            wait_until(site.servers, "no other server has come")
            time.sleep(draw.uniform(0.0, 0.5))
            for process in site.servers():
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
    numbers = [str(number + 2) for number in range(jobs)]
    site.wait_for(numbers[-1], "ended")
    site.run("release", held)
    wait_until(lambda: all(site.state(number) == "ended" for number in (held, *numbers)), "a job is left")
    assert site.starts() == [*numbers, held]
    assert [row["exit_code"] for row in site.rows().values()] == [0] * (jobs + 1)


def test_a_killed_server_loses_nothing(site: QueueSite) -> None:
    play_kills(site, kills=4, jobs=3)


def test_a_server_killed_in_its_first_moment_is_started_again(site: QueueSite) -> None:
    job = site.add_marked()
    wait_until(site.servers, "there is no server")
    first = site.servers()
    for process in first:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    # No other command of the queue follows.
    site.wait_for(job, "ended")


@pytest.mark.long
def test_a_server_killed_twenty_times_loses_nothing(site: QueueSite) -> None:
    play_kills(site, kills=20, jobs=10)


def test_after_a_restart_of_the_machine_nothing_is_lost_or_runs_twice(site: QueueSite) -> None:
    running, also = site.add_marked(seconds=1000), site.add_marked(seconds=1000)
    waiting, later = site.add_marked(), site.add_marked()
    for number, state in ((running, "running"), (also, "running"), (waiting, "starting")):
        site.wait_for(number, state)
    wait_until(lambda: len(site.starts()) == 2, "the first jobs do not run")
    site.kill()
    site.run("ls")
    for number in (running, also, waiting, later):
        site.wait_for(number, "ended")
    rows = site.rows()
    # Their workers are gone, and nobody starts them again.
    assert all(rows[number]["exit_code"] != 0 for number in (running, also)), rows
    assert [rows[number]["text"] for number in (waiting, later)] == ["done", "done"]
    assert sorted(site.starts()[:2]) == [running, also]
    assert site.starts()[2:] == [waiting, later]


def test_a_job_without_driver_and_minder_is_taken_over(site: QueueSite) -> None:
    job = site.add_marked(until="go")
    site.wait_for(job, "running")
    wait_until(site.starts, "it does not run")
    (record,) = known_jobs(site.root)
    wait_until(lambda: has_minder(record.directory), "it has no minder")
    for process in site.servers():
        process.suspend()
    # Of an earlier program that was too late.
    (record.directory / SUCCESSOR_LOG).write_text("hvlaunch: the job's driver lives\n")
    for process in (*site.processes(str(record.directory)), *site.processes(job, "wait")):
        process.kill()
    wait_until(lambda: not has_driver(record.directory), "its driver lives")
    for process in site.servers():
        process.resume()
    wait_until(lambda: has_driver(record.directory), "nobody takes it over")
    (site.place / "go").touch()
    site.wait_for(job, "ended")
    assert site.rows()[job]["text"] == "done"
    assert site.starts() == [job]


def test_another_machine_with_the_same_home_starts_nothing(site: QueueSite) -> None:
    job = site.add_marked("--hold")

    def have_ended() -> bool:
        # A process that keeps the server alive may have just started another one.
        for process in site.processes():
            process.kill()
        return not site.processes()

    wait_until(have_ended, "the queue's processes end")
    (site.queue.directory / "machine").write_text("elsewhere")
    assert "elsewhere" in site.run("add", *site.leases, "-np", "1", "true", code=2)
    site.run("release", job)
    assert [*site.rows()] == [job]
    assert not site.servers()
    (site.queue.directory / "machine").unlink()
    site.run("ls")
    site.wait_for(job, "ended")
    wait_until(lambda: not site.processes(), "the server goes on")
    assert not (site.queue.directory / "machine").exists()


@pytest.mark.parametrize("has_directory", [False, True])
def test_a_killed_driver_without_gpus_is_started_again(site: QueueSite, *, has_directory: bool) -> None:
    blocker = site.add("-np", "2", "sh", "-c", f"until [ -e {site.place}/go ]; do sleep 0.05; done")
    job = site.add_marked()
    site.wait_for(job, "starting")
    if has_directory:
        wait_until(lambda: "0 of 2 free" in site.rows()[job]["text"], "it does not come to its hosts")
    wait_until(lambda: site.processes(job, "wait"), "it has no process")
    before = site.queue.read().jobs[job]
    site.processes(job, "wait")[0].kill()
    if has_directory:
        wait_until(lambda: site.queue.read().jobs[job].tries > before.tries, "it is not started again")
    (site.place / "go").touch()
    site.wait_for(job, "ended")
    assert site.starts() == [job]
    assert site.state(blocker) == "ended"


def test_a_host_that_is_away_keeps_its_job_and_lets_others_pass(site: QueueSite) -> None:
    hostfile = site.place / "hosts"
    hostfile.write_text("away slots=1 address=127.0.0.1 port=1\n")
    words = ["--lease-slots", "2", "--hostfile", str(hostfile), "-np", "1", "true"]
    away = site.run("add", "--quiet", *words).strip()
    other = site.add_marked()
    wait_until(lambda: "away" in site.rows()[away]["text"], "its host's error is not shown")
    assert site.state(away) == "waiting"
    site.wait_for(other, "ended")


def test_usage(site: QueueSite) -> None:
    assert "missing" in site.run(code=2)
    assert "not one of" in site.run("shuffle", code=2)
    assert "no job 7 in the queue" in site.run("rm", "7", code=2)
    assert "no job 7 in the queue" in site.run(
        "add", *site.leases, "--after", "7", "-np", "1", "true", code=2
    )
    assert "not a time" in site.run("add", *site.leases, "--time-limit", "soon", "-np", "1", "true", code=2)
    assert "needs leases" in site.run("add", "--no-lease-gpus", "-np", "1", "true", code=2)
    assert "usage:" in site.run("--help")
    assert site.run("ls") == "the queue is empty\n"
    assert not site.processes()


def test_submit_is_for_other_commands(site: QueueSite) -> None:
    environ = {**site.environ}
    number = submit(
        [*site.leases, "-np", "1", "-x", "A={array}"],
        ["true"],
        environ,
        name="sweep",
        array="0-2%2",
        hold=True,
    )
    schedule = site.queue.read()
    assert [(job.id, job.name, job.most, job.is_held) for job in schedule.jobs.values()] == [
        (f"{number}_{index}", "sweep", 2, True) for index in range(3)
    ]
    with pytest.raises(BadUsage, match="no job 9"):
        submit([*site.leases, "-np", "1"], ["true"], environ, after=["9"])


def test_an_assistant_sees_the_queue(site: QueueSite) -> None:
    site.add_marked("--hold")
    tools = Tools(site.environ, allow_actions=False, run_own=lambda words: site.run(*words[1:]))
    text, is_error = tools.call("queue", {})
    assert not is_error
    assert [(row["id"], row["text"]) for row in json.loads(text)] == [("1", "waits: held")]


def test_a_full_disk_queues_nothing(site: QueueSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add_marked("--hold")
    before = (site.queue.directory / "log").read_bytes()
    # As a full disk: no write may make a file longer than it is.
    limit = f"ulimit -f 0; exec {' '.join(HVLAUNCH)} queue add {' '.join(site.leases)} -np 1 true"
    done = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; {limit}"],
        env=site.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 74, done.stderr
    assert re.search("not queued|can't be changed", done.stderr)
    assert (site.queue.directory / "log").read_bytes() == before
    assert [*site.rows()] == ["1"]
    assert not list(site.queue.directory.glob(".*"))


def test_a_damaged_list_keeps_what_can_be_read(site: QueueSite) -> None:
    site.add_marked("--hold")
    log = site.queue.directory / "log"
    whole = log.read_bytes()
    site.add_marked("--hold")
    log.write_bytes(whole + b"x" * 40)
    assert [*site.rows()] == ["1"]
    site.add_marked("--hold")
    assert [*site.rows()] == ["1", "2"]
    assert (site.queue.directory / "log.damaged").read_bytes() == whole + b"x" * 40


def test_directories_of_open_jobs_are_not_pruned(site: QueueSite) -> None:
    job = site.add_marked()
    site.wait_for(job, "ended")
    (record,) = known_jobs(site.root)
    lock = site.queue.directory / OPEN / record.id
    lock.touch()
    prune(site.root, time.time() + 100 * 86400)
    assert known_jobs(site.root)
    lock.unlink()
    prune(site.root, time.time() + 100 * 86400)
    assert not known_jobs(site.root)
