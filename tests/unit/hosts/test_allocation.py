"""Schedulers' variables and files, as they look in real allocations, and the hosts and slots that they mean."""

import pytest

from hvlaunch.errors import BadHost, BadUsage
from hvlaunch.hosts.parse import allocation, lsf_slots

JOB = {"SLURM_JOB_ID": "4711"}


def slurm(nodes, tasks=None, **more):
    said = {} if tasks is None else {"SLURM_TASKS_PER_NODE": tasks}
    return {**JOB, "SLURM_JOB_NODELIST": nodes, **said, **more}


ASKED = {"SLURM_NTASKS": "9"}
SLURM = [
    (slurm("n1", "1"), {"n1": 1}),
    (slurm("n1"), {"n1": 1}),
    (slurm("n[1-3]", "2(x3)", **ASKED), {"n1": 2, "n2": 2, "n3": 2}),
    (
        slurm("gpu[01-03,07],login", "2(x3),1,16", **ASKED),
        {"gpu01": 2, "gpu02": 2, "gpu03": 2, "gpu07": 1, "login": 16},
    ),
    (slurm("r[1-2]n[1-2]", "4(x4)", **ASKED), {"r1n1": 4, "r1n2": 4, "r2n1": 4, "r2n2": 4}),
    (slurm("n[099-101]", "1(x3)"), {"n099": 1, "n100": 1, "n101": 1}),
    # one task on each node, to start the launcher: the GPUs are what counts
    (slurm("n[1-2]", "1(x2)", SLURM_GPUS_PER_NODE="8"), {"n1": 8, "n2": 8}),
    (slurm("n[1-2]", "1(x2)", SLURM_NTASKS="2", SLURM_GPUS_PER_NODE="a100:8"), {"n1": 8, "n2": 8}),
    (slurm("n[1-2]", "1(x2)", SLURM_GPUS_ON_NODE="4"), {"n1": 4, "n2": 4}),
    (slurm("n1", "1", SLURM_GPUS_PER_NODE="a100:2,v100:3"), {"n1": 5}),
    # tasks that were asked for count before GPUs; those that are merely processors do not
    (slurm("n[1-2]", "4(x2)", SLURM_NTASKS_PER_NODE="4", SLURM_GPUS_PER_NODE="8"), {"n1": 4, "n2": 4}),
    (slurm("n[1-2]", "64(x2)", SLURM_GPUS_PER_NODE="8"), {"n1": 8, "n2": 8}),
    (slurm("n[1-2]", "64(x2)"), {"n1": 64, "n2": 64}),
]


@pytest.mark.parametrize(("environ", "slots"), SLURM)
def test_slurm(environ, slots):
    found = allocation(environ)
    assert found is not None
    assert found.origin == "Slurm job 4711"
    assert {host.name: host.slots for host in found.hosts} == slots
    assert list(slots) == [host.name for host in found.hosts]


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        (slurm("n[1-2]", "two"), "SLURM_TASKS_PER_NODE=two can't be read; it should look like"),
        (slurm("n[1-2]", "1(x3)"), "does not have 2 nodes, as SLURM_JOB_NODELIST has"),
        (slurm("n[1-2]", "1"), "does not have 2 nodes, as SLURM_JOB_NODELIST has"),
        (slurm("n[1-2]", "1(x999999999)"), "does not have 2 nodes, as SLURM_JOB_NODELIST has"),
        (slurm("n[1-"), "range"),
        (slurm("n1", "0"), "has no hosts"),
    ],
)
def test_malformed_variables_of_slurm_are_refused(environ, error):
    with pytest.raises((BadUsage, BadHost), match=error):
        allocation(environ)


FILES = {
    "/lsf": "a\na\nb\nb\nb\n",
    "/csm": "batch3\nh1\nh1\nh2\nh2\n",
    "/pbs": "node1.example.com\nnode1.example.com\nnode2.example.com\n",
    "/sge": "a.example.com 4 all.q@a.example.com UNDEFINED\nb.example.com 2 all.q@b.example.com <NULL>\n",
    "/bad": "a four\n",
    "/etc/mpi/hostfile": "job-worker-0 slots=2\njob-worker-1 slots=2\n",
    "/intel": "job-worker-0:2\njob-worker-1:1\n",
    "/empty": "",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
OTHERS = [
    ({"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/lsf", "LSB_MCPU_HOSTS": "x 9"}, "LSF job 7", {"a": 2, "b": 3}),
    ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 16 b 8 "}, "LSF job 7", {"a": 16, "b": 8}),
    (
        {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/csm", "CSM_ALLOCATION_ID": "1"},
        "LSF job 7",
        {"h1": 2, "h2": 2},
    ),
    (
        {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch1 1 h1 42 h2 42", "CSM_ALLOCATION_ID": "1"},
        "LSF job 7",
        {"h1": 42, "h2": 42},
    ),
    (
        {"PBS_JOBID": "8.pbs", "PBS_NODEFILE": "/pbs"},
        "PBS job 8.pbs",
        {"node1.example.com": 2, "node2.example.com": 1},
    ),
    ({"JOB_ID": "9", "PE_HOSTFILE": "/sge"}, "Grid Engine job 9", {"a.example.com": 4, "b.example.com": 2}),
    (
        POD | {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"},
        "the MPI operator's job",
        {"job-worker-0": 2, "job-worker-1": 2},
    ),
    (
        POD | {"I_MPI_HYDRA_HOST_FILE": "/intel"},
        "the MPI operator's job",
        {"job-worker-0": 2, "job-worker-1": 1},
    ),
]


@pytest.mark.parametrize(("environ", "origin", "slots"), OTHERS)
def test_other_schedulers(environ, origin, slots):
    found = allocation(environ, FILES.__getitem__)
    assert found is not None
    assert (found.origin, {host.name: host.slots for host in found.hosts}) == (origin, slots)
    assert found.remote_agent is None


@pytest.mark.parametrize(
    ("agent", "expected"),
    [("/etc/mpi/kubexec.sh", "/etc/mpi/kubexec.sh"), ("/usr/bin/ssh -q", None), ("ssh", None)],
)
def test_the_remote_agent_of_the_mpi_operator(agent, expected):
    environ = POD | {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile", "OMPI_MCA_plm_rsh_agent": agent}
    found = allocation(environ, FILES.__getitem__)
    assert found is not None
    assert found.remote_agent == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        JOB,
        {"SLURM_JOB_NODELIST": "n1"},
        {"LSB_JOBID": "7"},
        {"PBS_JOBID": "8"},
        {"JOB_ID": "9"},
        {"JOB_ID": "a CI's own"},
        {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"},
    ],
)
def test_no_allocation(environ):
    assert allocation(environ, FILES.__getitem__) is None


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 16 b"}, "hosts and numbers in turn"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a x"}, "hosts and numbers in turn"),
        ({"JOB_ID": "9", "PE_HOSTFILE": "/bad"}, "must have lines of a host and its slots"),
        ({"PBS_JOBID": "8", "PBS_NODEFILE": "/empty"}, "has no hosts"),
    ],
)
def test_malformed_variables_and_files_are_refused(environ, error):
    with pytest.raises(BadUsage, match=error):
        allocation(environ, FILES.__getitem__)


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "nodes"
    environ = {"PBS_JOBID": "8", "PBS_NODEFILE": str(path)}
    with pytest.raises(BadUsage, match="nodes, which the scheduler names: No such file"):
        allocation(environ)
    path.write_text("a\n")
    found = allocation(environ)
    assert found is not None
    assert found.hosts[0].name == "a"


def test_outside_of_lsf_there_are_no_slots():
    assert lsf_slots({}) is None
