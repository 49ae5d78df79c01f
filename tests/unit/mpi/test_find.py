"""Which launcher the flags mean."""

import pytest

from hvlaunch.errors import BadUsage
from hvlaunch.job import MPIOptions
from hvlaunch.mpi import Kind, LauncherProgram, NoLauncher, find


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
