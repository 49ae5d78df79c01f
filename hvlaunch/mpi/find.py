"""The launcher that the user chose."""

import os
import shutil
from collections.abc import Callable, Mapping

from hvlaunch.errors import BadUsage
from hvlaunch.job import MPIOptions
from hvlaunch.mpi.detect import Kind, Launcher, detect
from hvlaunch.mpi.launcher_errors import NoLauncher

__all__ = ["find"]

_SCHEDULERS = {
    "srun": (Kind.SRUN, "SLURM_JOB_ID", "Slurm", "salloc or sbatch first"),
    "jsrun": (Kind.JSRUN, "LSB_JOBID", "LSF", "bsub first"),
}


def find(
    options: MPIOptions,
    environ: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
) -> Launcher:
    """The launcher on this machine. A scheduler's own needs a job of the scheduler's around us.

    Raises NoLauncher, UnknownLauncher, and BadUsage outside of such a job.
    """
    if options.launcher == "mpirun":
        return detect(options.program)
    kind, variable, scheduler, hint = _SCHEDULERS[options.launcher]
    name = options.launcher
    if which(name) is None:
        raise NoLauncher(f"no {name} on PATH", program=name, hint="--gloo, which needs no launcher")
    if not environ.get(variable):
        raise BadUsage(
            f"--{name} works only inside a job of {scheduler}, and {variable} is not set", hint=hint
        )
    return Launcher(kind, (), name)
