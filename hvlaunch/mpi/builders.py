"""The builder for each launcher."""

from hvlaunch.mpi.command import Command, Request
from hvlaunch.mpi.detect import Kind, Launcher
from hvlaunch.mpi.intel import intel
from hvlaunch.mpi.jsrun import jsrun
from hvlaunch.mpi.mpich import mpich
from hvlaunch.mpi.mvapich import mvapich
from hvlaunch.mpi.openmpi import open_mpi
from hvlaunch.mpi.spectrum import spectrum
from hvlaunch.mpi.srun import srun

__all__ = ["build"]

_OTHERS = {
    Kind.SPECTRUM: spectrum,
    Kind.MPICH: mpich,
    Kind.INTEL: intel,
    Kind.MVAPICH: mvapich,
    Kind.SRUN: srun,
    Kind.JSRUN: jsrun,
}


def build(launcher: Launcher, request: Request) -> Command:
    """The launcher's command line. Raises BadUsage for what it can't do."""
    if launcher.kind is Kind.OPEN_MPI:
        return open_mpi(request, launcher.version)
    return _OTHERS[launcher.kind](request)
