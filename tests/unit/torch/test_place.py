"""Which rank a process is, under each launcher, and what is said where the environment does not tell."""

import socket

import pytest

from hvlaunch.torch.group_errors import BadPlace
from hvlaunch.torch.place import Place

HVLAUNCH = {
    "HVLAUNCH_RANK": "3",
    "HVLAUNCH_SIZE": "4",
    "HVLAUNCH_LOCAL_RANK": "1",
    "HVLAUNCH_HOST": "b",
    "HVLAUNCH_ROUND": "2",
    "HVLAUNCH_JOB_ID": "5f0c",
    "TORCHELASTIC_RUN_ID": "5f0c",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "41873",
}
HERE = socket.gethostname()
SLURM_BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def place(environ):
    found = Place.from_environment(environ)
    return found.launcher, found.rank, found.size, found.local_rank, found.host


def test_a_worker_of_hvlaunch():
    found = Place.from_environment(HVLAUNCH)
    assert found == Place(
        rank=3,
        size=4,
        local_rank=1,
        host="b",
        launcher="hvlaunch",
        round=2,
        master_addr="10.0.0.1",
        master_port=41873,
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("", 0, 1, 0, HERE)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1"}, ("torchrun", 5, 8, 1, "1")),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, ("torchrun", 5, 8, 1, HERE)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "PMIX_RANK": "2",
            },
            ("Open MPI", 2, 4, 0, HERE),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, ("MPICH", 1, 2, 1, HERE)),
        (  # mpiexec in a Slurm job: srun starts Hydra's proxies, and these the workers
            {**SLURM_BATCH, "SLURM_STEP_ID": "0", "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"},
            ("MPICH", 1, 2, 1, HERE),
        ),
        (  # srun --mpi=pmi2
            {**SLURM_BATCH, "SLURM_STEP_ID": "0", "PMI_RANK": "0", "PMI_SIZE": "8"},
            ("MPICH", 0, 8, 0, HERE),
        ),
        (
            {
                **SLURM_BATCH,
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "3",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "1",
                "SLURM_NODEID": "1",
            },
            ("srun", 3, 4, 1, "1"),
        ),
        (SLURM_BATCH, ("", 0, 1, 0, HERE)),
    ],
    ids=[
        "alone",
        "torchrun",
        "variables set by hand",
        "Open MPI",
        "Hydra",
        "Hydra in Slurm",
        "srun with PMI",
        "srun",
        "batch script, no srun",
    ],
)
def test_the_other_launchers(environ, expected):
    assert place(environ) == expected


@pytest.mark.parametrize(
    "inner",
    [{"RANK": "6"}, {"WORLD_SIZE": "8"}, {"TORCHELASTIC_RUN_ID": "none"}],
    ids=lambda inner: next(iter(inner)),
)
def test_torchrun_inside_a_worker_of_hvlaunch_is_nearer(inner):
    assert place({**HVLAUNCH, "WORLD_SIZE": "8", **inner})[0] == "torchrun"


@pytest.mark.parametrize(
    ("environ", "name", "text"),
    [
        ({"RANK": "0"}, "WORLD_SIZE", "variable WORLD_SIZE: it is not set, but RANK is"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK", "variable LOCAL_RANK: it is not set, but RANK is"),
        (
            {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "RANK",
            "variable RANK: 'x' is not a whole number (0 or more)",
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "RANK",
            "variable RANK: 2 is too high, since WORLD_SIZE is 2",
        ),
        ({"PMIX_RANK": "0"}, "PMIX_RANK", "it is set, but no variable has the number of processes"),
        ({**HVLAUNCH, "MASTER_PORT": "http"}, "MASTER_PORT", "'http' is not a whole number (0 or more)"),
    ],
)
def test_half_a_place_is_an_error_that_names_the_variable(environ, name, text):
    with pytest.raises(BadPlace) as error:
        Place.from_environment(environ)
    assert error.value.name == name
    assert text in str(error.value)
