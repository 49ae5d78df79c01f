"""Which launcher the flags mean, what `--version` of each implementation prints, and launchers' variables, seen under real ones or documented."""

import stat
import subprocess

import pytest

from hvlaunch.errors import BadUsage
from hvlaunch.job import MPIOptions
from hvlaunch.mpi import (
    ALL_NAMES,
    Kind,
    LauncherProgram,
    NoLauncher,
    ProcessRanks,
    UnknownLauncher,
    detect,
    find,
    ranks_of,
    read_version,
    shell_shim,
    version_text,
)

OPEN_MPI_4_DEBIAN = """\
mpirun.openmpi (OpenRTE) 4.1.4

Report bugs to http://www.open-mpi.org/community/help/
"""
OPEN_MPI_4 = """\
mpirun (Open MPI) 4.1.5

Report bugs to http://www.open-mpi.org/community/help/
"""
OPEN_MPI_3 = "mpirun (Open MPI) 3.1.0\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
OPEN_MPI_5 = """\
mpirun (Open MPI) 5.0.11

Report bugs to https://www.open-mpi.org/community/help/
"""
PRRTE = "prterun (PRRTE) 3.0.13\n\nReport bugs to https://github.com/openpmix/prrte/\n"
SPECTRUM = """\
mpirun (IBM Spectrum MPI) 10.3.1.02rtm0
Built from Open MPI
"""
MPICH_4_DEBIAN = """\
HYDRA build details:
    Version:                                 4.0.2
    Release Date:                            Thu Apr  7 12:34:45 CDT 2022
    CC:                              gcc -Wdate-time -D_FORTIFY_SOURCE=2 -g -O2
    Configure options:                       '--with-hwloc-prefix=/usr' '--with-device=ch4:ucx' '--prefix=/usr'
    Process Manager:                         pmi
    Launchers available:                     ssh rsh fork slurm ll lsf sge manual persist
    Topology libraries available:            hwloc
    Resource management kernels available:   user slurm ll lsf sge pbs cobalt
    Demux engines available:                 poll select
"""
MPICH_5 = """\
HYDRA build details:
    Version:                                 5.0.2
    Release Date:                            Fri Sep 25 20:45:26 UTC 2026
    CC:                              cc
    Configure options:                       --with-device=ch4:ucx,ofi --with-pm=hydra:gforker
    Process Manager:                         pmi
"""
MVAPICH = """\
HYDRA build details:
    Version:                                 3.2.1
    Release Date:                            General Availability Release
    CC:                              gcc
    Configure options:                       '--prefix=/opt/mvapich2-2.3.7' '--with-pm=hydra'
    Process Manager:                         pmi
"""
INTEL_2019 = """\
Intel(R) MPI Library for Linux* OS, Version 2019 Update 7 Build 20200312 (id: 5dc2dd3e9)
Copyright 2003-2020, Intel Corporation.
"""
INTEL_2021 = """\
Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619 (id: c2e19c2f3e)
Copyright 2003-2023, Intel Corporation.
"""
INTEL_2017 = """\
Intel(R) MPI Library for Linux* OS, Version 2017 Update 2 Build 20170125 (id: 16752)
Copyright (C) 2003-2017, Intel Corporation. All rights reserved.
"""


@pytest.mark.parametrize(
    ("said", "kind", "version"),
    [
        (OPEN_MPI_4_DEBIAN, Kind.OPEN_MPI, (4, 1, 4)),
        (OPEN_MPI_4, Kind.OPEN_MPI, (4, 1, 5)),
        (OPEN_MPI_3, Kind.OPEN_MPI, (3, 1, 0)),
        (OPEN_MPI_5, Kind.OPEN_MPI, (5, 0, 11)),
        (PRRTE, Kind.OPEN_MPI, (5,)),
        (SPECTRUM, Kind.SPECTRUM, (10, 3, 1, 2)),
        (MPICH_4_DEBIAN, Kind.MPICH, (4, 0, 2)),
        (MPICH_5, Kind.MPICH, (5, 0, 2)),
        (MVAPICH, Kind.MVAPICH, (2, 3, 7)),
        (INTEL_2017, Kind.INTEL, (2017,)),
        (INTEL_2019, Kind.INTEL, (2019,)),
        (INTEL_2021, Kind.INTEL, (2021, 10)),
    ],
)
def test_kind_and_version(said, kind, version):
    assert read_version(said) == (kind, version)
    assert detect("mpirun", lambda _: said) == LauncherProgram(kind, version, "mpirun")


def test_its_name_for_people():
    assert str(LauncherProgram(Kind.OPEN_MPI, (5, 0, 11), "mpirun")) == "Open MPI 5.0.11"
    assert str(LauncherProgram(Kind.SRUN, (), "srun")) == "Slurm's srun"


@pytest.mark.parametrize(
    ("program", "shown"), [(None, "no mpirun on PATH"), ("/opt/m/mpirun", "no /opt/m/mpirun:")]
)
def test_missing_launcher_is_named(program, shown):
    with pytest.raises(NoLauncher, match=shown) as caught:
        detect(program, lambda _: None)
    assert caught.value.exit_code == 2
    assert "--mpirun" in str(caught.value)


@pytest.mark.parametrize(
    ("said", "shown"),
    [("\n  LAM 7.0.6\nmore", "'LAM 7.0.6'"), ("", "'nothing'"), ("x" * 999, "x" * 120 + "'")],
)
def test_unknown_launcher_is_an_error_with_its_answer(said, shown):
    with pytest.raises(UnknownLauncher) as caught:
        detect("mpirun", lambda _: said)
    assert shown in str(caught.value)
    assert "hvlaunch knows Open MPI, IBM Spectrum MPI, MPICH, Intel MPI, MVAPICH" in str(caught.value)
    assert caught.value.answer == said


def test_the_program_is_asked(tmp_path):
    program = tmp_path / "mpirun"
    program.write_text('#!/bin/sh\ntest "$1" = --version && echo "mpirun (Open MPI) 5.0.3" >&2\nexit 3\n')
    assert version_text(str(program)) is None
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert version_text(str(program)) == "mpirun (Open MPI) 5.0.3\n"
    assert version_text(str(tmp_path / "none")) is None


def test_mpirun_is_asked_what_it_is(tmp_path):
    program = tmp_path / "mpirun"
    program.write_text('#!/bin/sh\necho "mpirun (Open MPI) 5.0.3"\n')
    program.chmod(0o755)
    assert find(MPIOptions(program=str(program)), {}) == LauncherProgram(
        Kind.OPEN_MPI, (5, 0, 3), str(program)
    )


@pytest.mark.parametrize(
    ("name", "kind", "variable"), [("srun", Kind.SRUN, "SLURM_JOB_ID"), ("jsrun", Kind.JSRUN, "LSB_JOBID")]
)
def test_a_schedulers_launcher_needs_its_job(name, kind, variable):
    options = MPIOptions(launcher=name)
    assert find(options, {variable: "7"}, lambda _: f"/bin/{name}") == LauncherProgram(kind, (), name)
    with pytest.raises(BadUsage, match=f"{variable} is not set"):
        find(options, {}, lambda _: f"/bin/{name}")
    with pytest.raises(NoLauncher, match=f"no {name} on PATH"):
        find(options, {variable: "7"}, lambda _: None)


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH_VARIABLES = {
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
        (Kind.MVAPICH, MVAPICH_VARIABLES | {"PMI_RANK": "0"}, WHOLE),
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
    [(Kind.OPEN_MPI, OPEN_MPI), (Kind.MPICH, HYDRA), (Kind.MVAPICH, MVAPICH_VARIABLES), (Kind.JSRUN, JSM)],
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
