"""Figures of real processes, and of a /proc written by the test."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvlaunch.agent import commits
from hvlaunch.agent.errands.observer.samples import Machine, Processes, Samples, Space
from hvlaunch.agent.proc import cgroup_memory
from tests.testhosts.places import wait_until
from tests.unit.agent.harness import Hunt, python

FAMILY = "import subprocess, sys, time; subprocess.Popen(['sleep', sys.argv[1]]); print(1, flush=True); sys.stdin.read()"
ALONE = "import sys; print(1, flush=True); sys.stdin.read()"
STAT = "cpu  100 0 50 900 10 0 5 0 0 0\ncpu0 100 0 50 900 10 0 5 0 0 0\n"
MEMORY = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\n"
NET = "Inter-|\n face |\n    lo: 9 0 0 0 0 0 0 0 9 0\n  eth0: {0} 0 0 0 0 0 0 0 {1} 0\n"
DISKS = " 8 0 sda 1 0 {0} 0 1 0 {1} 0\n 8 1 sda1 1 0 7 0 1 0 7 0\n 7 0 loop0 1 0 7 0 1 0 7 0\n"


@pytest.fixture
def begin() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Starts workers; they live until their stdin ends."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, *args: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            python(code, *args), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def only(sampled: list[dict[str, Any]]) -> dict[str, Any]:
    [first] = sampled
    return first


def test_a_worker_is_measured_with_all_its_descendants(begin: Any, hunt: Hunt) -> None:
    worker = begin(FAMILY, hunt.mark)
    processes = Processes()
    sample = lambda: only(processes.sample([(3, worker.pid)], 1.0))  # noqa: E731
    wait_until(lambda: sample()["state"] == "S", "both of them wait")
    sampled = sample()
    assert (sampled["rank"], sampled["pid"], sampled["processes"]) == (3, worker.pid, 2)
    assert sampled["memory"] > 1 << 20
    assert sampled["io"] > 0
    [child] = wait_until(
        lambda: {*hunt.pids()} - {worker.pid}, "its child, which may be in the middle of exec"
    )
    assert processes.worker_of(child) == worker.pid
    assert processes.worker_of(os.getpid()) is None


def test_an_orphan_stays_with_its_worker(begin: Any, hunt: Hunt) -> None:
    worker = begin(
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sh', '-c', 'sleep %s & read x' % sys.argv[1]], stdin=subprocess.PIPE)\n"
        "print(1, flush=True); sys.stdin.read(1); child.kill(); child.wait(); print(2, flush=True); sys.stdin.read()",
        hunt.mark,
    )
    processes = Processes()
    wait_until(lambda: only(processes.sample([(0, worker.pid)], 1.0))["processes"] == 3, "a grandchild")
    worker.stdin.write(b"\n")
    worker.stdin.flush()
    worker.stdout.readline()
    assert only(processes.sample([(0, worker.pid)], 1.0))["processes"] == 2


def test_a_busy_process_gives_its_state_and_its_time(begin: Any) -> None:
    worker = begin("import os\nif os.fork():\n print(1, flush=True)\n os.wait()\nwhile 1: pass")
    processes = Processes()
    first = only(processes.sample([(0, worker.pid)], 1.0))

    def has_worked() -> Any:
        sampled = only(processes.sample([(0, worker.pid)], 1.0))
        return sampled if sampled["cpu"] > 0 else None

    sampled = wait_until(has_worked, "a tick")
    assert sampled["cpu_time"] > first["cpu_time"]
    assert (sampled["state"], sampled["waits_in"]) == ("R", None)
    assert sampled["busiest"] != worker.pid  # which waits for its child


def test_a_worker_that_ended_or_was_replaced_is_forgotten(begin: Any) -> None:
    first, other = begin(ALONE), begin(ALONE)
    processes = Processes()
    assert len(processes.sample([(0, first.pid), (1, other.pid)], 1.0)) == 2
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED)
    assert only(processes.sample([(0, first.pid), (1, other.pid)], 1.0))["rank"] == 1
    assert only(processes.sample([(5, other.pid)], 1.0))["rank"] == 5
    assert processes.sample([], 1.0) == []


def test_an_unreadable_proc_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Processes(str(tmp_path / "none")).sample([(0, 1)], 1.0)
    (tmp_path / "1").mkdir()  # as with hidepid, where another user's has no files
    assert Processes(str(tmp_path)).sample([(0, 1)], 1.0) == []


def test_a_lack_of_descriptors_is_not_taken_for_dead_workers() -> None:
    code = (
        "import resource, os\nfrom hvlaunch.agent.errands.observer.samples import Processes\n"
        "processes = Processes()\nfd = os.open('/', 0)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 2, fd + 2))\nos.close(fd)\n"
        "try: processes.sample([(0, os.getpid()), (1, os.getppid())], 1.0)\n"
        "except OSError as error: print(error.errno)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, check=True)
    assert int(done.stdout) == errno.EMFILE


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A root with a /proc and a /sys."""
    (tmp_path / "proc/net").mkdir(parents=True)
    for device in ("net/eth0", "block/sda"):
        (tmp_path / "sys" / ("class" if device.startswith("net") else "") / device / "device").mkdir(
            parents=True
        )
    (tmp_path / "proc/stat").write_text(STAT)
    (tmp_path / "proc/meminfo").write_text(MEMORY)
    (tmp_path / "proc/loadavg").write_text("1.25 1 1 1/1 1\n")
    (tmp_path / "proc/net/dev").write_text(NET.format(1000, 500))
    (tmp_path / "proc/diskstats").write_text(DISKS.format(10, 20))
    return tmp_path


def test_rates_are_since_the_last_sample(fake: Path) -> None:
    machine = Machine(str(fake))
    first = machine.sample(1.0, 0.0, {})
    assert (first["load"], first["memory_used"], first["memory_total"]) == (1.25, 600 << 10, 1000 << 10)
    assert (first["network_in"], first["disk_read"], first["problems"]) == (0.0, 0.0, [])
    (fake / "proc/net/dev").write_text(NET.format(3000, 900))
    (fake / "proc/diskstats").write_text(DISKS.format(14, 28))
    (fake / "proc/stat").write_text(STAT.replace("cpu  100", "cpu  150"))
    second = machine.sample(2.0, 2.0, {})
    assert (second["network_in"], second["network_out"]) == (1000.0, 200.0)
    assert (second["disk_read"], second["disk_write"]) == (4 * 512 / 2, 8 * 512 / 2)
    assert second["cpu"] == 50 / os.sysconf("SC_CLK_TCK") / 2


def test_hidden_figures_are_problems_and_others_are_measured(fake: Path) -> None:
    (fake / "proc/diskstats").unlink()
    (fake / "proc/stat").write_text("nothing of the kind\n")
    sampled = Machine(str(fake)).sample(1.0, 0.0, {})
    assert sampled["problems"] == ["/proc/diskstats: no such file or directory", "/proc/stat: unknown form"]
    assert (sampled["memory_total"], sampled["cpu"]) == (1000 << 10, 0.0)


def test_memory_is_the_cgroups_if_it_is_less(fake: Path) -> None:
    group = fake / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (fake / "proc/self").mkdir()
    (fake / "proc/self/cgroup").write_text("0::/job\n")
    for name, text in {
        "max": "500000",
        "current": "300000",
        "stat": "anon 1\ninactive_file 100000\n",
    }.items():
        (group / f"memory.{name}").write_text(text)
    sampled = Machine(str(fake)).sample(1.0, 0.0, {})
    assert (sampled["memory_used"], sampled["memory_total"]) == (200_000, 500_000)


@pytest.mark.parametrize(
    ("groups", "files", "room"),
    [
        ("0::/a/b", {"a/b/memory.max": "max"}, None),
        ("0::/a/b", {"a/b/memory.max": "900", "a/b/memory.current": "300"}, 600),
        # The ancestor's limit is narrower, by what other groups of it use.
        ("0::/a/b", {"a/b/memory.max": "900", "a/b/memory.current": "300", "a/memory.max": "1000", "a/memory.current": "950",
                     "a/memory.stat": "anon 1\ninactive_file 100\n"}, 150),
        ("0::/a/b", {"a/b/memory.max": "900", "a/b/memory.current": "1200"}, 0),
        ("0::/", {"memory.max": "500"}, 500),
        ("4:cpu:/x\n5:memory:/x", {"memory/x/memory.limit_in_bytes": "800", "memory/x/memory.usage_in_bytes": "700",
                                   "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n"}, 150),
    ],
)  # fmt: skip
def test_room_in_cgroups_is_what_the_narrowest_leaves(
    tmp_path: Path, groups: str, files: dict[str, str], room: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
    for name, text in files.items():
        (tmp_path / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)
    memory = cgroup_memory(str(tmp_path))
    assert (None if memory is None else memory[1]) == room


def test_a_sample_has_the_memory_of_commits_and_copies() -> None:
    scratch = f"/tmp/hvlaunch-{uuid.uuid4().hex}"
    assert Samples().take([], {"scratch": scratch})["commits"] == 0
    folder = Path(commits.make_directory(scratch))
    try:
        (folder / commits.COPIES).mkdir()
        for path in (folder / "default.0.0", folder / commits.COPIES / "default.1.0"):
            path.write_bytes(bytes(1 << 20))
        assert 2 << 20 <= Samples().take([], {"scratch": scratch})["commits"] < 3 << 20
    finally:
        shutil.rmtree(folder)


def test_a_file_system_that_hangs_is_a_problem_and_blocks_nobody() -> None:
    go_on = threading.Event()
    asked: list[str] = []

    def look(path: str) -> Any:
        asked.append(path)
        if path == "/dead":
            go_on.wait()
        return SimpleNamespace(f_bavail=1, f_frsize=10, f_blocks=2)

    space = Space(look)
    paths = {"cwd": "/dead", "shm": "/shm"}
    for now in (0.0, 5.0, 10.0):
        assert space.now(paths, now) == ({"shm": [10, 20]}, ["cwd (/dead) does not answer"])
    assert asked == ["/dead", "/shm", "/shm"]
    go_on.set()
    # It is asked again only some seconds later, which pass between two looks here.
    later = count(1000.0, 100.0)
    assert wait_until(lambda: space.now(paths, next(later))[1] == [], "its answer")
