"""Whole jobs, by a stand-in for mpirun that starts its processes here; the launcher as a child."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvlaunch.mpi import controller as module
from hvlaunch.mpi.builders import LauncherCommand
from hvlaunch.mpi.controller import LauncherProcess

MPIRUN = """\
#!{python}
import os, subprocess, sys, time
if sys.argv[1:] == ["--version"]:
    sys.exit(print("mpirun (Open MPI) 4.1.4"))
assert os.environ["HVLAUNCH_ENTRY"] not in " ".join(sys.argv)
assert os.getpgid(0) == os.getpid() != os.getppid()
argv = sys.argv[1:]
size = int(argv[argv.index("-np") + 1])
command = argv[argv.index("/bin/sh"):]
print("a word of mpirun's", flush=True)
def start(rank, **more):
    env = dict(os.environ, OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE=str(size),
               OMPI_COMM_WORLD_LOCAL_RANK=str(rank), **more)
    return subprocess.Popen(command, env=env, preexec_fn=lambda: before(rank), close_fds=False)
def before(rank):
    pass
{body}
sys.exit(max(one.wait() for one in started))
"""
ALL = "started = [start(rank) for rank in range(size)]"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run on Linux")


@pytest.fixture
def line(tmp_path):
    def made(body, *words):
        program = tmp_path / "mpirun"
        program.write_text(MPIRUN.format(python=sys.executable, body=body))
        program.chmod(0o755)
        return [sys.executable, "-m", "hvlaunch", "--mpi", "--mpirun", str(program), *words]

    return made


def run(line, **env):
    return subprocess.run(
        line, env={**os.environ, **env}, capture_output=True, text=True, timeout=100, check=False
    )


def test_a_job(line, tmp_path):
    files = tmp_path / "out"
    words = [
        "-np",
        "3",
        "-x",
        "A=b c",
        "--output-filename",
        str(files),
        "sh",
        "-c",
        "echo $RANK $LOCAL_RANK $A; cat",
    ]
    done = run(line(ALL, *words))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>: {rank} {rank} b c" for rank in range(3)]
    said = done.stderr.splitlines()
    assert said[0] == "hvlaunch: mpirun: a word of mpirun's"
    assert [line.partition(";")[0] for line in said[1:]] == [
        "hvlaunch: 3 workers on host localhost",
        said[-1],
    ]
    assert [(files / "latest" / f"rank.{rank}" / "stdout").read_text() for rank in range(3)] == [
        "0 0 b c\n",
        "1 1 b c\n",
        "2 2 b c\n",
    ]


def test_first_failure_of_a_job(line):
    done = run(line(ALL, "-np", "2", "sh", "-c", "test $RANK = 1 && exit 7; exec sleep 3600"))
    assert done.returncode == 7
    assert "rank 1 of 2 on host localhost failed first" in done.stderr


def test_launcher_starts_before_the_loop_is_loaded():
    script = "import sys, hvlaunch.mpi.controller; print('hvlaunch.driver.loop' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_launcher_that_ends_too_soon(line):
    body = "print('no such host', file=sys.stderr); started = [subprocess.Popen(['false'])]"
    done = run(line(body, "-np", "2", "true"))
    assert done.returncode == 69
    assert "hvlaunch: mpirun: no such host\n" in done.stderr
    assert re.search(
        r"host localhost: .*mpirun ended with exit code 1 before all agents were connected",
        done.stderr,
    )


def test_a_launcher_that_starts_too_few_in_time(line):
    done = run(line("started = [start(0)]; time.sleep(3600)", "-np", "2", "--start-timeout", "1", "true"))
    assert done.returncode == 69
    assert "within 1 s" in done.stderr


def test_launcher_without_ranks(line):
    body = "started = [subprocess.Popen(command) for _ in range(size)]"
    done = run(line(body, "-np", "2", "true"), OMPI_COMM_WORLD_RANK="", PMIX_RANK="")
    assert done.returncode == 69
    assert "has no rank: none of OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK" in done.stderr


def test_a_launcher_that_ends_its_processes_itself(line, tmp_path):
    mark = tmp_path / "running"
    wait = "while not os.path.exists(os.environ['MARK']): time.sleep(0.01)"
    end = "for one in started: one.terminate()\nfor one in started: one.wait()\nsys.exit(5)"
    script = "test $RANK = 0 || : > $MARK; exec sleep 3600"
    done = run(line(f"{ALL}\n{wait}\n{end}", "-np", "2", "-x", "MARK", "sh", "-c", script), MARK=str(mark))
    assert done.returncode == 5, done.stderr
    assert "the launcher ended its processes, and then ended with exit code 5" in done.stderr


def test_worker_has_the_environment_and_descriptors_of_its_rank(line):
    """Variables, descriptors, processors: a host's workers are not all started by its agent."""
    body = (
        "def before(rank):\n"
        "    os.dup2(os.open('/dev/null', os.O_RDONLY), 40 + rank)\n"
        "    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]])\n"
        "started = [start(rank, OWN=f'own {rank}') for rank in range(size)]"
    )
    script = "echo $RANK $OWN $(ls /proc/self/fd | grep 4.) $(grep Cpus_allowed_list /proc/self/status)"
    done = run(line(body, "-np", "3", "sh", "-c", script))
    assert done.returncode == 0, done.stderr
    cpus = sorted(os.sched_getaffinity(0))
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}]<stdout>: {rank} own {rank} {40 + rank} Cpus_allowed_list: {cpus[rank % len(cpus)]}"
        for rank in range(3)
    ]


def processes_with(mark):
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environ.read_bytes():
                found.append(environ.parent.name)
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_leftover_process_of_a_worker_is_ended(line, rank):
    mark = f"mark-{os.getpid()}-{rank}"
    script = f"test $RANK != {rank} || setsid sleep 3600 & test $RANK != {rank} || exit 3; exec sleep 3600"
    done = run(line(ALL, "-np", "2", "-x", f"MARK={mark}", "sh", "-c", script))
    assert done.returncode == 3, done.stderr
    assert processes_with(f"MARK={mark}\0") == []


def test_a_process_of_the_launchers_that_is_killed_ends_the_job_and_leaves_nothing(line):
    mark = f"mark-{os.getpid()}-killed"
    script = "test $RANK != 1 || kill -9 $PPID; exec sleep 3600"
    done = run(line(ALL, "-np", "2", "-x", f"MARK={mark}", "sh", "-c", script))
    assert done.returncode == 137, done.stderr
    assert "the launcher ended its processes, and then ended with exit code 137" in done.stderr
    assert processes_with(f"MARK={mark}\0") == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_guardian_that_is_killed_when_its_worker_has_ended_leaves_nothing(line, rank):
    mark = f"mark-{os.getpid()}-orphan-{rank}"
    kill = "while kill -0 $0; do sleep 0.01; done; kill -9 $1"
    script = (
        f"test $RANK = {rank} || exec sleep 3600; read -r _ _ _ guardian _ </proc/$PPID/stat; "
        f"setsid sh -c '{kill}' $$ $guardian >/dev/null 2>&1 & setsid sleep 3600 & exit 0"
    )
    done = run(line(ALL, "-np", "2", "-x", f"MARK={mark}", "sh", "-c", script))
    assert done.returncode != 0, done.stderr
    assert processes_with(f"MARK={mark}\0") == []


def test_missing_command(line):
    done = run(line(ALL, "-np", "2", "/no/such/command"))
    assert done.returncode == 127
    assert "/no/such/command: command not found" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_it_starts_ends_the_launcher(line, number):
    command = line("print('starting', os.getpid(), flush=True); time.sleep(3600)", "-np", "2", "true")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        pid = 0
        while not pid:
            found = re.search(r"starting (\d+)", job.stderr.readline())
            pid = int(found[1]) if found else 0
        job.send_signal(number)
        job.communicate(timeout=100)
    assert job.returncode == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_places_in_the_command_under_a_launcher(line):
    words = ("--templates", "-np", "2", "echo", "{local_rank}/{size}", "{port:x}", "{first:head}", "{{rank}}")
    done = run(line(ALL, "--quiet", "--prefix", "", *words))
    assert done.returncode == 0, done.stderr
    first, second = sorted(text.split() for text in done.stdout.splitlines())
    assert (first[0], second[0]) == ("0/2", "1/2")
    assert first[1] == second[1]
    assert (first[2:], second[2:]) == (["head", "{rank}"], ["{rank}"])


def test_killed_launcher_whose_ssh_holds_its_pipes_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(module, "_LAST_WORDS", 1000.0)
    ended: list[int] = []
    is_there = threading.Event()
    process = LauncherProcess(
        LauncherCommand(("sh", "-c", "sleep 3600 & echo there; wait"), {}),
        dict(os.environ),
        say=lambda _: is_there.set(),
        ended=ended.append,
    )
    assert is_there.wait(60)
    closing = threading.Thread(target=process.close, args=(0.0,), daemon=True)
    closing.start()
    closing.join(60)
    assert ended == [143]
