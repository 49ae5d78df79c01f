"""Launchers' variables, as they were seen under real ones or are documented."""

import subprocess

import pytest

from hvlaunch.mpi import ALL_NAMES, Kind, ProcessRanks, ranks_of, shell_shim

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
JSM = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}
WHOLE = ProcessRanks(3, 8, 1, 2)
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("kind", "environ", "expected"),
    [
        (Kind.OPEN_MPI, OPEN_MPI, WHOLE),
        (Kind.OPEN_MPI, OPEN_MPI | BATCH, WHOLE),
        (Kind.OPEN_MPI, {"PMIX_RANK": "3"}, ProcessRanks(3, None, None, None)),
        (Kind.SPECTRUM, OPEN_MPI, WHOLE),
        (Kind.MPICH, HYDRA, WHOLE),
        (Kind.MPICH, HYDRA | BATCH | OPEN_MPI, WHOLE),
        (Kind.MPICH, {"PMI_RANK": "3", "PMI_SIZE": "8"}, ProcessRanks(3, 8, None, None)),
        (Kind.INTEL, HYDRA, WHOLE),
        (Kind.MVAPICH, HYDRA, WHOLE),
        (Kind.MVAPICH, MVAPICH | {"PMI_RANK": "0"}, WHOLE),
        (Kind.SRUN, SLURM, ProcessRanks(3, 8, 1, None)),
        (Kind.SRUN, SLURM | {"PMI_RANK": "0"}, ProcessRanks(3, 8, 1, None)),
        (Kind.JSRUN, JSM | OPEN_MPI, WHOLE),
        (Kind.JSRUN, OPEN_MPI, WHOLE),
        (Kind.MPICH, OPEN_MPI, None),
        (Kind.OPEN_MPI, {}, None),
        (Kind.OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "-1"}, None),
    ],
)
def test_ranks_of_a_process(kind, environ, expected):
    assert ranks_of(kind, environ) == expected
    assert ranks_of(kind, {name: value for name, value in environ.items() if name in ALL_NAMES}) == expected


@pytest.mark.parametrize(
    ("kind", "environ"),
    [(Kind.OPEN_MPI, OPEN_MPI), (Kind.MPICH, HYDRA), (Kind.MVAPICH, MVAPICH), (Kind.JSRUN, JSM)],
)
def test_shell_shim_sets_the_variables_of_torch(kind, environ):
    words = [
        *shell_shim(kind),
        "sh",
        "-c",
        "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $*",
        "-",
        "a b",
    ]
    assert (
        subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout
        == "3 8 1 2 a b\n"
    )


def test_a_shell_under_slurm_has_no_local_size():
    shell = [
        *shell_shim(Kind.SRUN),
        "sh",
        "-c",
        "echo $RANK $WORLD_SIZE $LOCAL_RANK ${LOCAL_WORLD_SIZE-none}",
    ]
    assert (
        subprocess.run(shell, env=SLURM, capture_output=True, text=True, check=True).stdout == "3 8 1 none\n"
    )
