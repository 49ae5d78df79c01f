"""The working tree on real hosts, which have none of it: copied, updated, pinned to the job's start, and whole or not used."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from benchmarks.sync import Bench, contenders, make_tree, measure, rows
from tests.cluster.heirs import Heir
from tests.cluster.jobs import HVLAUNCH, Job
from tests.testhosts.hosts import CHECKOUT, TestHosts, wait_until

LIMIT = 90.0
SHOW = (
    "import os, train; print(f\"{os.environ['RANK']}: {train.VERSION} in {os.path.basename(os.getcwd())}\")\n"
)


@pytest.fixture
def project(tmp_path: Path, cluster: TestHosts) -> Path:
    """A work tree that hosts can't see, since their /tmp is their own; no host has a copy of any."""
    for host in cluster:
        host.run(["sh", "-c", "rm -rf ~/.cache/hvlaunch"])
    path = tmp_path / "proj"
    (path / "sub").mkdir(parents=True)
    (path / "sub/train.py").write_text("VERSION = 1\n")
    (path / "sub/show.py").write_text(SHOW)
    (path / ".gitignore").write_text("*.secret\n")
    (path / "my.secret").write_text("stays here")
    subprocess.run(["git", "init", "-q", path], check=True)
    return path


class SyncJob(Job):
    """A job in the project's directory `sub`."""

    def __init__(self, cluster: TestHosts, project: Path, *words: object) -> None:
        env = {"PWD": str(project / "sub"), "PYTHONDONTWRITEBYTECODE": "1"}
        super().__init__(cluster, ["--sync", "--cwd", project / "sub", *words], env)


def on_host(cluster: TestHosts, host: str, command: str) -> str:
    return str(cluster[host].run(["sh", "-c", command], check=True).stdout)


def kill_script(cluster: TestHosts, host: str) -> None:
    """Whatever of it runs there, if anything."""
    cluster[host].run(["pkill", "-9", "-f", "show.py"])


TREE = "/run/home/root/.cache/hvlaunch/trees/proj-*/0/tree"


def test_hosts_get_the_tree_and_then_what_changed(cluster: TestHosts, project: Path) -> None:
    words = ("-np", 3, "-H", "a:2,b:1", "python3", "show.py")
    job = SyncJob(cluster, project, *words)
    assert job.code(LIMIT) == 0, job.stderr
    assert [line.split(">: ")[1] for line in sorted(job.stdout.splitlines())] == [
        f"{rank}: 1 in sub" for rank in range(3)
    ]
    assert on_host(cluster, "b", f"cd {TREE} && find . -type f | sort").split() == [
        "./.gitignore",
        "./sub/show.py",
        "./sub/train.py",
    ]
    assert on_host(cluster, "a", "stat -c %a ~/.cache/hvlaunch/trees").strip() == "700"
    (project / "sub/train.py").write_text("VERSION = 22\n")
    job = SyncJob(cluster, project, *words)
    assert job.code(LIMIT) == 0, job.stderr
    assert job.stdout.count(": 22 in sub") == 3


def test_a_restarted_worker_runs_the_tree_of_the_jobs_start(cluster: TestHosts, project: Path) -> None:
    """The tree changes here while the job runs; the first worker fails after that, and the job begins another round."""
    (project / "sub/show.py").write_text(
        SHOW + "import time\nif os.environ['HVLAUNCH_ROUND'] == '0':\n    time.sleep(1e3)\n"
    )
    job = SyncJob(
        cluster,
        project,
        "-np",
        1,
        "--min-np",
        1,
        "--max-restarts",
        3,
        "-H",
        "a:1,b:1",
        "python3",
        "-u",
        "show.py",
    )
    job.saw("0: 1 in sub")
    (project / "sub/train.py").write_text("VERSION = 2\n")
    for host in "ab":
        kill_script(cluster, host)
    job.saw("0: 1 in sub", times=2)
    assert job.code(LIMIT) == 0, job.stderr
    assert ": 2 in sub" not in job.stdout


def test_a_tree_that_can_not_be_copied_starts_nothing(cluster: TestHosts, project: Path) -> None:
    (project / "out").symlink_to("/etc")
    job = SyncJob(cluster, project, "-H", "a:1", "true")
    assert job.code(LIMIT) == 2
    assert "out is a link that leads out of" in job.stderr
    (project / "out").unlink()
    (project / "big").write_bytes(bytes(1 << 20))
    job = SyncJob(cluster, project, "--sync-limit", "512K", "-H", "a:1", "true")
    assert job.code(LIMIT) == 2
    assert "its largest entries: big 1.05 MB" in job.stderr


def test_a_host_that_can_not_keep_it_is_named(cluster: TestHosts, project: Path) -> None:
    on_host(cluster, "b", "mkdir -p ~/.cache && touch ~/.cache/hvlaunch")
    job = SyncJob(cluster, project, "-H", "a:1,b:1", "true")
    assert job.code(LIMIT) == 69
    assert "host b: " in job.stderr
    assert "/.cache/hvlaunch" in job.stderr
    on_host(cluster, "b", "rm ~/.cache/hvlaunch")


@pytest.mark.parametrize("moment", [0.3, 0.6, 0.9])
def test_a_copy_does_not_count_if_its_driver_was_killed(
    cluster: TestHosts, project: Path, moment: float
) -> None:
    """64 MB are on their way; the next job is right whatever came."""
    (project / "data").write_bytes(os.urandom(64 << 20))
    job = SyncJob(cluster, project, "-H", "c:1", "sh", "-c", "sha256sum ../data")
    time.sleep(moment)
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    wait_until(lambda: not cluster["c"].user_processes(), "nothing runs on c", LIMIT)
    job = SyncJob(cluster, project, "-H", "c:1", "sh", "-c", "sha256sum ../data")
    assert job.code(LIMIT) == 0, job.stderr
    here = subprocess.run(["sha256sum", project / "data"], capture_output=True, text=True, check=True).stdout
    assert here.split()[0] in job.stdout


def test_a_host_that_joins_a_taken_over_job_gets_the_tree_of_its_start(
    cluster: TestHosts, project: Path, tmp_path: Path
) -> None:
    """The tree has changed here, its cache is gone, and the driver that had it open was killed."""
    (project / "sub/show.py").write_text(
        SHOW + "import time\nif os.environ['HVLAUNCH_ROUND'] == '0':\n    time.sleep(1e3)\n"
    )
    pool = tmp_path / "pool"
    pool.write_text("a:1\n")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {pool}\n")
    script.chmod(0o755)
    job = SyncJob(
        cluster, project, "-np", 1, "--min-np", 1, "--max-np", 1, "--host-discovery-script", script,
        "--reconnect-timeout", 30, "--lease", 30, "python3", "-u", "show.py",
    )  # fmt: skip
    job.saw("0: 1 in sub")
    heir = Heir(cluster, job.process)
    (project / "sub/train.py").write_text("VERSION = 2\n")
    heir.kill()
    shutil.rmtree(cluster.driver.home / ".cache/hvlaunch/snapshots")
    successor = heir.succeed()
    pool.write_text("b:1\n")
    kill_script(cluster, "a")
    assert successor.wait(LIMIT) == 0
    assert "0: 1 in sub" in heir.stored
    assert on_host(cluster, "b", f"cat {TREE}/sub/train.py") == "VERSION = 1\n"


def sent_to(cluster: TestHosts, host: str) -> int:
    """Bytes that the driver's place has sent to a host, as its kernel has counted what came in from there."""
    words = ["sh", "-c", "cat /sys/class/net/*/statistics/tx_bytes | sort -n | tail -1"]
    place = cluster.driver if host == "driver" else cluster[host]
    return int(place.run(words, check=True).stdout)


SUM = ["sh", "-c", "sha256sum ../data"]


def sum_of(path: Path) -> str:
    done = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
    return done.stdout.split()[0]


def test_hosts_pass_large_content_on(cluster: TestHosts, project: Path) -> None:
    """The driver sends the tree about once, and not once for each of four hosts."""
    (project / "data").write_bytes(os.urandom(64 << 20))
    before = sent_to(cluster, "driver")
    job = SyncJob(cluster, project, "-H", "a:1,b:1,c:1,d:1", *SUM)
    assert job.code(LIMIT) == 0, job.stderr
    assert job.stdout.count(sum_of(project / "data")) == 4
    assert sent_to(cluster, "driver") - before < 1.3 * (64 << 20)


def test_a_source_that_dies_is_replaced(cluster: TestHosts, project: Path) -> None:
    """The first host is killed while others fetch from it: an elastic job goes on with whole copies on the others."""
    (project / "data").write_bytes(os.urandom(128 << 20))
    job = SyncJob(
        cluster,
        project,
        "-np",
        2,
        "--min-np",
        2,
        "-H",
        "a:1,b:1,c:1",
        "--start-timeout",
        60,
        "--lease",
        6,
        *SUM,
    )
    incoming = "ls ~/.cache/hvlaunch/trees/*/incoming/*.part"
    wait_until(lambda: not cluster["b"].run(["sh", "-c", incoming]).returncode, "content comes to b", LIMIT)
    cluster["a"].kill()
    assert job.code(LIMIT) == 0, job.stderr
    assert job.stdout.count(sum_of(project / "data")) == 2


def test_hosts_that_can_not_reach_each_other_get_all_from_the_driver(
    cluster: TestHosts, project: Path
) -> None:
    (project / "data").write_bytes(os.urandom(16 << 20))
    cluster["a"].part(cluster["b"])
    # Such hosts can't train together, but that is known only when both are ready.
    job = SyncJob(cluster, project, "-H", "a:1,b:1", *SUM)
    assert job.code(LIMIT) == 69
    assert "can't connect" in job.stderr or "reach" in job.stderr
    for host in "ab":
        assert sum_of(project / "data") in on_host(cluster, host, f"sha256sum {TREE}/data")


def test_a_fixed_place_is_for_one_job_at_a_time(cluster: TestHosts, project: Path) -> None:
    """Files of the user stay there; a second job is refused while the first one runs."""
    on_host(cluster, "a", "rm -rf ~/place && mkdir -m 700 ~/place && echo mine > ~/place/notes")
    words = ["--sync-to", "~/place", "-H", "a:1", "sh", "-c"]
    job = SyncJob(cluster, project, *words, "echo begins in $PWD; sleep 1000")
    job.saw("begins in /run/home/root/place/sub")
    (project / "sub/train.py").write_text("VERSION = 2\n")
    other = SyncJob(cluster, project, *words, "true")
    assert other.code(LIMIT) == 69
    assert "host a: BlockingIOError: /run/home/root/place is in use by another running job" in other.stderr
    job.send(signal.SIGINT)
    assert job.code(LIMIT) == 130
    job = SyncJob(cluster, project, *words, "cat train.py ../notes; rm -r ~/place")
    assert job.code(LIMIT) == 0, job.stderr
    assert [line.split(">: ")[1] for line in job.stdout.splitlines()] == ["VERSION = 2", "mine"]


def test_a_disk_that_is_full_is_named_and_nothing_is_left(cluster: TestHosts, project: Path) -> None:
    """By its size before anything comes, and by its number of files while they come."""
    (project / "data").write_bytes(os.urandom(16 << 20))
    words = ("-H", "a:1,b:1", *SUM)
    for options, cause in (
        ("size=8m", "MB free, and the files need 16 MB"),
        ("nr_inodes=9", "No space left"),
    ):
        on_host(cluster, "b", f"mkdir -p ~/.cache && mount -t tmpfs -o {options} tmpfs ~/.cache")
        job = SyncJob(cluster, project, *words)
        assert job.code(LIMIT) == 69
        assert "host b: " in job.stderr
        assert cause in job.stderr
        assert "sha" not in job.stdout
        on_host(cluster, "b", "umount ~/.cache")
    job = SyncJob(cluster, project, *words)
    assert job.code(LIMIT) == 0, job.stderr
    assert job.stdout.count(sum_of(project / "data")) == 2


def test_a_host_that_joins_later_gets_the_tree_of_the_jobs_start(
    cluster: TestHosts, project: Path, tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    pool.write_text("a:1\n")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {pool}\n")
    script.chmod(0o755)
    (project / "sub/show.py").write_text(
        SHOW + "import time\nif os.environ['WORLD_SIZE'] == '1':\n    time.sleep(1e3)\n"
    )
    job = SyncJob(
        cluster, project, "-np", 1, "--min-np", 1, "--max-np", 2, "--host-discovery-script", script,
        "python3", "-u", "show.py",
    )  # fmt: skip
    job.saw("0: 1 in sub")
    (project / "sub/train.py").write_text("VERSION = 2\n")
    pool.write_text("a:1\nb:1\n")
    job.saw("1: 1 in sub")
    assert job.code(LIMIT) == 0, job.stderr
    assert ": 2 in sub" not in job.stdout
    assert on_host(cluster, "b", f"cat {TREE}/sub/train.py") == "VERSION = 1\n"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["driver", "source", "receiver"])
def test_whatever_is_killed_at_whichever_moment_a_copy_is_whole_or_not_used(
    cluster: TestHosts, project: Path, victim: str
) -> None:
    """Twenty random moments. The next job gets all files on all hosts, soon, and nothing is left of the one before."""
    host = {"source": "a", "receiver": "c"}.get(victim)
    random = Random(victim)
    words = ("-H", "a:1,b:1,c:1", "sh", "-c", "cat ../data ../files/* | sha256sum")
    (project / "files").mkdir()
    whole, codes, slowest = 1.0, [], 0.0
    for number in range(21):
        (project / "data").write_bytes(random.randbytes(24 << 20))
        for name in range(200):
            (project / f"files/{name:03}").write_bytes(random.randbytes(2000))
        began = time.monotonic()
        job = SyncJob(cluster, project, *words)
        if number:
            # The moment is random.
            time.sleep(random.uniform(0.1, whole))
            if host is None:
                job.process.kill()
            else:
                cluster[host].run(["pkill", "-9", "hvl-sync"])
            codes.append(code := job.process.wait(LIMIT))
            assert code in (0, -9 if host is None else 69), job.stderr
            assert code != 69 or f"host {host}: " in job.stderr
            wait_until(
                lambda: not any(each.user_processes() for each in cluster), "nothing runs on hosts", LIMIT
            )
            began = time.monotonic()
            job = SyncJob(cluster, project, *words)
        assert job.code(LIMIT) == 0, job.stderr
        took = time.monotonic() - began
        whole = whole if number else took
        slowest = max(slowest, took)
        files = b"".join((project / f"files/{name:03}").read_bytes() for name in range(200))
        total = sha256((project / "data").read_bytes() + files).hexdigest()
        assert job.stdout.count(total) == 3, "each host has all files"
        left = "ls ~/.cache/hvlaunch/trees/*/ | grep -v '^[0-9]*$' | grep -v lock; true"
        assert {on_host(cluster, name, left).strip() for name in "abc"} == {""}
    sys.stderr.write(f"{victim}: codes {codes}; whole {whole:.1f} s, slowest next {slowest:.1f} s\n")
    assert slowest < 3 * whole + 3


@pytest.mark.long
def test_a_network_that_loses_packets_brings_it_all(cluster: TestHosts, project: Path) -> None:
    """One of a hundred packets, in each direction, on each host."""
    (project / "data").write_bytes(os.urandom(32 << 20))
    for host in cluster:
        host.touched = True
        loss = "-m statistic --mode random --probability 0.01 -j DROP"
        on_host(cluster, host.name, f"iptables -A INPUT {loss}; iptables -A OUTPUT {loss}")
    job = SyncJob(cluster, project, "-H", "a:1,b:1,c:1,d:1", *SUM)
    assert job.code(LIMIT) == 0, job.stderr
    assert job.stdout.count(sum_of(project / "data")) == 4


@pytest.mark.long
def test_no_host_sees_one_change_of_two(cluster: TestHosts, project: Path) -> None:
    """A program writes a number into two files, again and again, while jobs start."""
    script = project.parent / "writer.py"
    script.write_text(
        "import itertools, time\n"
        "for number in itertools.count():\n"
        "    for name in 'az':\n"
        f"        open('{project}/' + name, 'w').write(str(number))\n"
        "    time.sleep(0.25)\n"
    )
    writer = subprocess.Popen([sys.executable, script])
    try:
        wait_until((project / "z").exists, "it writes", LIMIT)
        numbers = []
        for _ in range(8):
            job = SyncJob(cluster, project, "-H", "a:1,b:1", "sh", "-c", "echo $(cat ../a) $(cat ../z)")
            assert job.code(LIMIT) == 0, job.stderr
            pairs = {tuple(line.split(">: ")[1].split()) for line in job.stdout.splitlines()}
            [(first, second)] = pairs
            assert first == second
            numbers.append(first)
        assert len(set(numbers)) > 1, "it has written meanwhile"
    finally:
        writer.kill()
        writer.wait()


def test_a_job_runs_again_on_other_hosts_after_its_tree_is_gone(
    cluster: TestHosts, project: Path, tmp_path: Path
) -> None:
    """From another terminal, whose directory is another one too; then it is compared with the first."""
    job = SyncJob(cluster, project, "--job-name", "base", "-np", 2, "-H", "a:1,b:1", "python3", "show.py")
    assert job.code(LIMIT) == 0, job.stderr
    (project / "sub/train.py").write_text("VERSION = 2\n")
    shutil.rmtree(project)
    shutil.rmtree(cluster.driver.home / ".cache/hvlaunch/snapshots")
    again = Job(cluster, ["rerun", "base", "-H", "c:1,d:1", "--job-name", "again"])
    assert again.code(LIMIT) == 0, again.stderr
    assert [line.split(">: ")[1] for line in sorted(again.stdout.splitlines())] == [
        "0: 1 in sub",
        "1: 1 in sub",
    ]
    text = cluster.driver.run([*HVLAUNCH, "diff", "base", "again"], check=True).stdout
    assert "option --hosts: a:1,b:1 → c:1,d:1\n" in text
    assert "\ncode " not in text
    assert "\nfile " not in text


CALL = """\
import json, sys
import hvlaunch
import model

options = {"sync": True, "setup": "echo prepared > by-setup", "collect": f"made/*:{sys.argv[2]}"}
print(json.dumps(hvlaunch.run(model.place, hosts=sys.argv[1], quiet=True, lease=5.0, **options)))
"""


def test_a_function_is_called_in_the_projects_copy(cluster: TestHosts, project: Path, tmp_path: Path) -> None:
    """Its module is the project's, which the hosts have from the copy alone; so is a module of another directory on the path.

    What it writes in the copy comes back.
    """
    (project / "lib").mkdir()
    (project / "lib/helper.py").write_text("NAME = 'helper'\n")
    (project / "sub/model.py").write_text(
        "import os, pathlib, helper\n\ndef place():\n"
        "    pathlib.Path('made').mkdir(exist_ok=True)\n"
        "    pathlib.Path('made', os.environ['RANK']).write_text('by ' + os.environ['RANK'])\n"
        "    return os.environ['RANK'], os.environ['HVLAUNCH_HOST'], os.path.basename(os.getcwd()), __file__, helper.NAME, open('by-setup').read()\n"
    )
    (project / "sub/run.py").write_text(CALL)
    done = cluster.driver.run(
        [sys.executable, str(project / "sub/run.py"), "a:1,b:1", str(tmp_path / "results")],
        cwd=project,
        env={**cluster.driver.env, "PYTHONPATH": f"{CHECKOUT}:{project}/lib", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row[:2] for row in rows] == [["0", "a"], ["1", "b"]]
    for _, _, directory, file, name, setup in rows:
        assert setup == "prepared\n"
        assert directory == "tree"
        assert "/.cache/hvlaunch/trees/proj-" in file
        assert name == "helper"
    made = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert sorted(path.read_text() for path in made) == ["by 0", "by 1"]


def test_the_benchmark_runs(cluster: TestHosts, tmp_path: Path) -> None:
    """A small tree, with hvlaunch alone."""
    root = tmp_path / "tree"
    root.mkdir()
    make_tree(root, files=200, size=20_000_000)
    bench = Bench(cluster, root)
    ours = next(iter(contenders(bench, cluster.names, root)))
    results = measure(bench, {ours: bench.launch("--sync")}, runs=1)
    assert results[ours].keys() == {"first", "plain", "unchanged", "changed"}
    [row] = rows(results, 20_000_000)
    assert row[0] == ours
    assert float(row[2]) < 1.3, "the driver's bytes"
    assert results[ours]["unchanged"].sent < 2_000_000
    bench.wipe()
