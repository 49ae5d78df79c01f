"""Whole jobs, by a stand-in for mpirun that starts its processes here."""

import os
import re
import signal
import subprocess
import sys

import pytest

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
    env = dict(os.environ, OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE=str(size), **more)
    return subprocess.Popen(command, env=env)
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
    assert done.stderr == "hvlaunch: mpirun: a word of mpirun's\n"
    assert [(files / "latest" / f"rank.{rank}" / "stdout").read_text() for rank in range(3)] == [
        "0 0 b c\n",
        "1 1 b c\n",
        "2 2 b c\n",
    ]


def test_its_first_failure(line):
    done = run(line(ALL, "-np", "2", "sh", "-c", "test $RANK = 1 && exit 7; exec sleep 3600"))
    assert done.returncode == 7
    assert "rank 1 of 2 on host localhost failed first" in done.stderr


def test_a_launcher_that_ends_too_soon(line):
    body = "print('no such host', file=sys.stderr); started = [subprocess.Popen(['false'])]"
    done = run(line(body, "-np", "2", "true"))
    assert done.returncode == 69
    assert "hvlaunch: mpirun: no such host\n" in done.stderr
    assert re.search(
        r"host localhost: .*mpirun ended with exit code 1 before all of its processes were connected",
        done.stderr,
    )


def test_a_launcher_that_starts_too_few_in_time(line):
    done = run(line("started = [start(0)]; time.sleep(3600)", "-np", "2", "--start-timeout", "1", "true"))
    assert done.returncode == 69
    assert "within 1 s" in done.stderr


def test_a_launcher_that_tells_no_ranks(line):
    body = "started = [subprocess.Popen(command) for _ in range(size)]"
    done = run(line(body, "-np", "2", "true"), OMPI_COMM_WORLD_RANK="", PMIX_RANK="")
    assert done.returncode == 69
    assert "has no rank: none of OMPI_COMM_WORLD_RANK, PMIX_RANK is set there" in done.stderr


def test_a_launcher_that_ends_its_processes_itself(line, tmp_path):
    mark = tmp_path / "running"
    wait = "while not os.path.exists(os.environ['MARK']): time.sleep(0.01)"
    end = "for one in started: one.terminate()\nfor one in started: one.wait()\nsys.exit(5)"
    script = "test $RANK = 0 || : > $MARK; exec sleep 3600"
    done = run(line(f"{ALL}\n{wait}\n{end}", "-np", "2", "-x", "MARK", "sh", "-c", script), MARK=str(mark))
    assert done.returncode == 5, done.stderr
    assert "the launcher ended its processes, and then ended with exit code 5" in done.stderr


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
