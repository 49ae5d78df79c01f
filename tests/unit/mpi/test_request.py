"""From a job to what a launcher is asked for."""

import os
from pathlib import Path

import pytest

from hvlaunch.errors import BadUsage, NotEnoughSlots
from hvlaunch.job import Host, JobSpec, MPIOptions, SSHOptions
from hvlaunch.mpi import Kind, LauncherProgram
from hvlaunch.mpi.builders import LaunchRequest, build
from hvlaunch.mpi.request import counted, remote_python, request_of

MPIRUN = LauncherProgram(Kind.OPEN_MPI, (4, 1, 4), "mpirun.openmpi")


def spec(*hosts, **more):
    return JobSpec(command=("train",), hosts=hosts, cwd="/w", **more)


def ask(job, options=None):
    return request_of(job, options or MPIOptions(), MPIRUN, ("boot",), ("B", "A"))


def test_only_the_hosts_in_use():
    hosts = (Host("a", slots=2), Host("b", slots=4), Host("c", slots=2))
    assert counted(spec(*hosts, np=3)) == (("a", 2), ("b", 1))
    assert counted(spec(*hosts)) == (("a", 2), ("b", 4), ("c", 2))
    assert counted(spec(Host("a"), slots_per_host=3)) == (("a", 3),)
    with pytest.raises(NotEnoughSlots):
        counted(spec(*hosts, np=9))
    with pytest.raises(BadUsage, match="host a: a launcher needs the number of slots"):
        counted(spec(Host("a")))


def test_a_launcher_gets_all_slots_so_that_processes_may_be_spawned():
    hosts = (Host("a", slots=4), Host("b"))
    asked = ask(spec(*hosts, np=1, slots_per_host=2))
    assert (asked.hosts, asked.slots) == ((("a", 1),), (("a", 4), ("b", 2)))
    line = build(MPIRUN, asked).argv
    assert line[line.index("-np") :][:4] == ("-np", "1", "-H", "a:4,b:2")
    mpich = LauncherProgram(Kind.MPICH, (4, 0, 2), "mpirun")
    line = build(mpich, request_of(spec(*hosts, np=1, slots_per_host=2), MPIOptions(), mpich, (), ())).argv
    assert line[line.index("-np") :][:4] == ("-np", "1", "-hosts", "a:4,b:2")


def test_a_schedulers_launcher_gets_the_hosts_in_use():
    srun = LauncherProgram(Kind.SRUN, (22, 5), "srun")
    asked = request_of(spec(Host("a", slots=4), Host("b", slots=4), np=1), MPIOptions(), srun, (), ())
    assert asked.room == (("a", 4),)
    assert "--nodelist a" in " ".join(build(srun, asked).argv)


def test_request_has_every_option():
    job = spec(
        Host("a", slots=2, port=7),
        Host("b", slots=2, port=7),
        network_interfaces=("ib0",),
        ssh=SSHOptions(user="ml", identity=Path("/k"), config=Path("/c"), host_keys="accept-new"),
    )
    assert ask(job, MPIOptions(args=("--x",), binding=("--bind-to", "core"))) == LaunchRequest(
        program="mpirun.openmpi",
        command=("boot",),
        hosts=(("a", 2), ("b", 2)),
        slots=(("a", 2), ("b", 2)),
        env=("A", "B"),
        port=7,
        user="ml",
        identity="/k",
        ssh_words=("-F", "/c", "-o", "StrictHostKeyChecking=accept-new"),
        interfaces=("ib0",),
        binding=("--bind-to", "core"),
        extra=("--x",),
        root=os.geteuid() == 0,
    )


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        ({"port": 1}, {"port": 2}, r"one port for all hosts, and theirs differ \(1, 2\)"),
        ({"user": "x"}, {}, r"one user for all hosts, and theirs differ \(none, x\)"),
        ({"identity": "/k"}, {}, "one identity for all hosts, and theirs differ"),
    ],
)
def test_option_of_a_single_host_is_an_error(one, other, what):
    with pytest.raises(BadUsage, match=what):
        ask(spec(Host("a", slots=1, **one), Host("b", slots=1, **other)))
    srun = LauncherProgram(Kind.SRUN, (22, 5), "srun")
    job = spec(Host("a", slots=1, **one), Host("b", slots=1, **other), np=1)
    with pytest.raises(BadUsage, match=what):  # processes that are spawned may come to b
        ask(job)
    assert request_of(job, MPIOptions(), srun, (), ()).hosts == (("a", 1),)


def test_address_is_an_error_with_a_hint():
    with pytest.raises(BadUsage, match=r"HostName 10\.0\.0\.1 in ~/.ssh/config"):
        ask(spec(Host("a", slots=1, address="10.0.0.1")))


def test_the_interpreter():
    assert remote_python(spec(Host("a", slots=1))) is None
    assert remote_python(spec(Host("a", slots=1), remote_python="/p")) == "/p"
    with pytest.raises(BadUsage, match="one python for all hosts, and theirs differ"):
        remote_python(spec(Host("a", slots=1, python="/q"), Host("b", slots=1), remote_python="/p"))


@pytest.mark.parametrize(
    ("launcher", "bind", "flags"),
    [
        (MPIRUN, "none", ""),
        (MPIRUN, "socket", "--bind-to socket --map-by slot"),
        (LauncherProgram(Kind.OPEN_MPI, (5, 0, 1), "mpirun"), "socket", "--bind-to package --map-by slot"),
        (LauncherProgram(Kind.MPICH, (4, 0), "mpirun"), "cache", "-bind-to l3cache"),
        (LauncherProgram(Kind.SRUN, (), "srun"), "numa", "--cpu-bind ldoms"),
    ],
)
def test_bind_becomes_the_launchers_own_flags(launcher, bind, flags):
    job = spec(Host("a", slots=2), bind=bind)
    asked = request_of(job, MPIOptions(), launcher, ("boot",), ())
    assert " ".join(asked.binding) == flags
    assert (flags or "none") in " ".join(build(launcher, asked).argv)


@pytest.mark.parametrize(
    ("kind", "bind"),
    [(Kind.OPEN_MPI, "gpu"), (Kind.INTEL, "numa"), (Kind.JSRUN, "core"), (Kind.SRUN, "cache")],
)
def test_a_launcher_without_an_equal_of_bind_is_an_error(kind, bind):
    job = spec(Host("a", slots=2), bind=bind)
    with pytest.raises(BadUsage, match=f"--bind {bind} has no equal in"):
        request_of(job, MPIOptions(), LauncherProgram(kind, (4,), "x"), ("boot",), ())
