"""Real launchers in place of hvlaunch's own ssh: what they start, and how it ends, is as with --gloo."""

import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import PROGRAMS, Job
from tests.cluster.test_training import DIGITS, TORCH, accuracy, alone
from tests.testhosts.hosts import Process, TestHosts, wait_until

__all__ = ["alone"]

HOSTS = "a:1,b:1"
RANKS = 2
SECRET = f"s3cr3t-{secrets.token_hex(8)}"
"""Other tests' processes are seen in the driver place, too, and may have theirs on a command line until hvlaunch runs."""
# MPICH's own name for its library is not the one that mpi4py's build for MPICH asks for.
WITH_LIBRARY = {
    "mpirun.openmpi": "export MPI4PY_LIBMPI=libmpi.so.40",
    "mpirun.mpich": "mkdir -p /tmp/mpich; ln -sf /usr/lib/*/libmpich.so.12 /tmp/mpich/libmpi.so.12;"
    " export LD_LIBRARY_PATH=/tmp/mpich",
}


@pytest.fixture(params=["mpirun.openmpi", "mpirun.mpich"])
def mpirun(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"no {name}")
    return name


def job(cluster: TestHosts, mpirun: str, *arguments: object, env: dict[str, str] | None = None) -> Job:
    return Job(cluster, ["--mpi", "--mpirun", mpirun, *arguments], env)


def with_mpi4py(mpirun: str, *python: object) -> list[object]:
    words = ["sh", "-c", f'{WITH_LIBRARY[mpirun]}; exec "$@"', "-", sys.executable, *python]
    return [*words]


@TORCH
@pytest.mark.long  # test_mpi4py_beside_torch has its groups, and test_training.py the training
@pytest.mark.timeout(300)
def test_digits_are_learned_as_well_as_by_one_process(cluster: TestHosts, alone: float, mpirun: str) -> None:
    run = job(cluster, mpirun, "-H", HOSTS, "-x", "OMP_NUM_THREADS=1", *DIGITS)
    assert run.code(timeout=240) == 0, run.stderr
    assert accuracy(run.stdout) > 0.95
    assert accuracy(run.stdout) == pytest.approx(alone, abs=0.01)


@TORCH
@pytest.mark.timeout(300)
def test_mpi4py_beside_torch(cluster: TestHosts, mpirun: str) -> None:
    program = with_mpi4py(mpirun, PROGRAMS / "mpi_and_torch.py")
    run = job(cluster, mpirun, "-H", HOSTS, "-x", "OMP_NUM_THREADS=1", *program)
    assert run.code(timeout=240) == 0, run.stderr
    for rank in range(RANKS):
        assert re.search(
            rf"^\[{rank}\]<stdout>: rank {rank} of {RANKS} on . is right, by (Open MPI|MPICH)",
            run.stdout,
            re.MULTILINE,
        )


def test_a_program_can_spawn_processes_in_the_slots_that_are_left(cluster: TestHosts, mpirun: str) -> None:
    if mpirun == "mpirun.mpich":
        pytest.skip("Debian's MPICH 4.0.2 can't spawn, under its own mpirun either")
    child = "from mpi4py import MPI; MPI.Comm.Get_parent().gather(MPI.Get_processor_name())"
    script = (
        "import sys; from mpi4py import MPI\n"
        f"there = MPI.COMM_SELF.Spawn(sys.executable, ['-c', {child!r}], maxprocs=3)\n"
        "print('children on', *sorted(there.gather(None, root=MPI.ROOT)))"
    )
    run = job(cluster, mpirun, "-np", 1, "-H", "a:2,b:2", *with_mpi4py(mpirun, "-c", script))
    assert run.code() == 0, run.stderr
    assert run.stdout == "[0]<stdout>: children on a b b\n"


def test_every_ranks_environment_is_as_with_gloo(cluster: TestHosts, mpirun: str) -> None:
    def environments(*flags: object) -> list[dict[str, Any]]:
        arguments = [*flags, "-np", 4, "-H", "a:2,b:1,c:3", "-x", "A='b c'\nd"]
        run = Job(cluster, [*arguments, sys.executable, PROGRAMS / "dump_env.py"])
        assert run.code() == 0, run.stderr
        lines = re.findall(r"^\[(\d+)\]<stdout>: (\{.*\})$", run.stdout, re.MULTILINE)
        return [json.loads(line) for _, line in sorted(lines)]

    differ = re.compile(
        r"(.*_)?(JOB_ID|RUN_ID|TOKEN|PORT|RENDEZVOUS|RENDEZVOUS_ADDR|RENDEZVOUS_CERT|ERROR_FILE|SCRATCH)"
    )
    ours = re.compile(
        r"HVLAUNCH_|HOROVOD_|TORCHELASTIC_|MASTER_|[A-Z_]*RANK$|[A-Z_]*WORLD_SIZE$|[A-Z]*_SOCKET_IFNAME|A$"
    )
    launchers = re.compile(r"OMPI_|PMI|MPI|HVLAUNCH_SPARE")
    gloo, mpi = environments(), environments("--mpi", "--mpirun", mpirun)
    assert len(gloo) == len(mpi) == 4
    for expected, found in zip(gloo, mpi, strict=True):
        assert found["hostname"] == expected["hostname"]
        assert found["cwd"] == expected["cwd"]
        wanted = {name: value for name, value in expected["env"].items() if ours.match(name)}
        got = {
            name: value
            for name, value in found["env"].items()
            if ours.match(name) and not launchers.match(name)
        }
        assert got.keys() == wanted.keys()
        assert {name: value for name, value in got.items() if not differ.fullmatch(name)} == {
            name: value for name, value in wanted.items() if not differ.fullmatch(name)
        }


def test_the_first_failure_is_named_and_its_code_is_ours(cluster: TestHosts, mpirun: str) -> None:
    script = "test $RANK = 3 || exec sleep 3600; echo why >&2; exit 7"
    run = job(cluster, mpirun, "-H", "a:2,b:2", "sh", "-c", script)
    assert run.code() == 7
    assert "rank 3 of 4 on host b failed first" in run.stderr
    assert "exit code 7" in run.stderr
    assert "why" in run.stderr.partition("failed first")[2]
    assert "3 stopped by hvlaunch (SIGTERM): ranks 0-2" in run.stderr


def test_an_abort_by_mpi_has_its_code(cluster: TestHosts, mpirun: str) -> None:
    # Rank 0 is done with MPI by then: in the middle of it, MPICH's might crash when it loses its launcher.
    script = (
        "from mpi4py import MPI; import time; w = MPI.COMM_WORLD\n"
        "if w.rank == 1: w.recv(); w.Abort(3)\n"
        "w.send(None, 1); time.sleep(3600)"
    )
    run = job(cluster, mpirun, "-H", "a:1,b:1", *with_mpi4py(mpirun, "-c", script))
    assert run.code() == 3, run.stderr
    assert re.search("rank 1 of 2 on host b failed first|the launcher ended its processes", run.stderr)


def test_a_worker_that_is_killed(cluster: TestHosts, mpirun: str) -> None:
    run = job(cluster, mpirun, "-H", "a:1,b:1", "sh", "-c", "test $RANK = 0 && kill -9 $$; exec sleep 3600")
    assert run.code() == 137
    assert "SIGKILL" in run.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(cluster: TestHosts, mpirun: str, number: int) -> None:
    run = job(
        cluster,
        mpirun,
        "-H",
        "a:2,b:2",
        "--grace",
        1,
        sys.executable,
        PROGRAMS / "detach.py",
        "--ignore-term",
    )
    run.saw("ready", 4).send(number)
    assert run.code() == 128 + number
    assert f"interrupted by {signal.Signals(number).name}" in run.stderr
    nothing_is_left(cluster)


def test_a_killed_launcher_ends_its_workers(cluster: TestHosts, mpirun: str) -> None:
    run = job(cluster, mpirun, "-H", "a:1,b:1", "--grace", 1, sys.executable, PROGRAMS / "detach.py")
    run.saw("ready", 2)
    (launcher,) = [one for one in cluster.driver.processes() if one.argv[0] == mpirun]
    os.kill(launcher.pid, signal.SIGKILL)
    assert run.code() != 0
    nothing_is_left(cluster)


def test_a_connection_is_lost_and_the_agent_calls_again(cluster: TestHosts, mpirun: str) -> None:
    count = "import time\nfor number in range(150): print('line', number, flush=True); time.sleep(0.05)"
    run = job(cluster, mpirun, "-H", "a:2,b:1", sys.executable, "-c", count).saw("line 20\n", 3)
    listing = cluster.driver.run(["ss", "-Htnp", "state", "established"], check=True).stdout
    mine = [line.split()[2:4] for line in listing.splitlines() if f"pid={run.process.pid}," in line]
    [(ours, theirs)] = [
        [end.rpartition(":")[2] for end in ends] for ends in mine if cluster["b"].address in ends[1]
    ]
    cluster.driver.run(["ss", "-K", "dst", cluster["b"].address, "dport", theirs, "sport", ours], check=True)
    run.saw("host b: connected again after", 1)
    assert run.code() == 0, run.stderr
    for rank in range(3):
        lines = re.findall(rf"^\[{rank}\]<stdout>: line (\d+)$", run.stdout, re.MULTILINE)
        assert lines == [str(number) for number in range(150)]


def test_nothing_is_left_of_a_job_whose_driver_was_killed(cluster: TestHosts, mpirun: str) -> None:
    """Nobody waits for another driver, which can't come: the user was told so."""
    words = ["--detach-on-hangup", "-H", "a:2,b:1", "--grace", 1, "--lease", 600]
    run = job(cluster, mpirun, *words, sys.executable, PROGRAMS / "detach.py")
    run.saw("ready", 3).send(signal.SIGKILL).code()
    assert "no other driver can take over a job of mpirun" in run.stderr
    nothing_is_left(cluster)


def test_a_permanent_cut_leaves_no_process_on_either_side(cluster: TestHosts, mpirun: str) -> None:
    """The launcher waits for its daemon there, and its daemon for the launcher: each is ended by who is on its side."""

    def files() -> str:
        return cluster["b"].run(["ls", "/tmp"], check=True).stdout

    before = files()  # of other tests, too
    run = job(
        cluster, mpirun, "-H", "a:1,b:2", "--grace", 1, "--lease", 3, sys.executable, PROGRAMS / "detach.py"
    )
    run.saw("ready", 3)
    (launcher,) = [one for one in cluster.driver.processes() if one.argv[0] == mpirun]
    cluster["b"].cut()
    assert run.code(120) == 69
    assert "host b: lost: silent for 3 s" in run.stderr
    assert cluster.driver.processes() == []
    assert [*Path(tempfile.gettempdir()).glob(f"ompi.*/pid.{launcher.pid}")] == []
    nothing_is_left(cluster)
    wait_until(lambda: files() == before, "its files are removed")


def nothing_is_left(cluster: TestHosts) -> None:
    def left() -> Sequence[Process]:
        return [one for host in cluster for one in host.user_processes()] + cluster.driver.processes()

    wait_until(lambda: not left(), "nothing is left", 60)


def test_ps_shows_neither_secret_nor_token(cluster: TestHosts, mpirun: str) -> None:
    report = "import os, time; print('TOKEN', os.environ['HVLAUNCH_TOKEN'], os.environ['API_KEY'], flush=True); time.sleep(3600)"
    run = job(
        cluster, mpirun, "-H", "a:1,b:1", "-x", f"API_KEY={SECRET}", "--verbose", sys.executable, "-c", report
    )
    run.saw(SECRET, 2)
    token = run.stdout.split("TOKEN ")[1].split()[0]
    for place in (cluster.driver, cluster["a"], cluster["b"]):
        listing = place.run(["ps", "-ef", "-ww"], check=True).stdout
        assert "hvlaunch-agent" in listing  # the caller, which is on the launcher's command line
        assert SECRET not in listing
        assert token not in listing
    run.interrupt()
    assert run.code() == 130
    assert SECRET not in run.stderr
    assert token not in run.stderr


def test_flags_that_reach_the_hosts(cluster: TestHosts, mpirun: str) -> None:
    flags = ["-p", 22, "--ssh-user", "root", "--network-interfaces", "eth0", "--host-keys", "accept-new"]
    run = job(
        cluster, mpirun, *flags, "-H", "a:1,b:1", "sh", "-c", "echo on $(hostname) by $GLOO_SOCKET_IFNAME"
    )
    assert run.code() == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["[0]<stdout>: on a by eth0", "[1]<stdout>: on b by eth0"]


def test_the_command_of_a_dry_run_is_ready_to_paste(cluster: TestHosts, mpirun: str) -> None:
    script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT in $(pwd) $A"
    run = job(
        cluster, mpirun, "--dry-run", "-H", "a:2,b:1", "--cwd", "/usr", "-x", "A=b c", "sh", "-c", script
    )
    assert run.code() == 0, run.stderr
    command = run.stdout.partition(" to paste ")[2].splitlines()[1]
    pasted = cluster.driver.run(["sh", "-c", command])
    for rank, local, size in ((0, 0, 2), (1, 1, 2), (2, 0, 1)):
        assert f"{rank} of 3, {local} of {size} at a:29500 in /usr b c" in pasted.stdout, pasted.stderr


def test_a_missing_host(cluster: TestHosts) -> None:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("no mpirun.openmpi")
    run = job(cluster, "mpirun.openmpi", "-H", "a:1,nosuch:1", "true")
    assert run.code() == 69
    assert "mpirun.openmpi: ssh: Could not resolve hostname nosuch" in run.stderr
    assert "hosts a and nosuch: mpirun.openmpi ended with exit code" in run.stderr
