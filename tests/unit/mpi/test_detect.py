"""What --version really prints, of each implementation that there is."""

import stat

import pytest

from hvlaunch.mpi import (
    Kind,
    LauncherProgram,
    NoLauncher,
    UnknownLauncher,
    detect,
    read_version,
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
