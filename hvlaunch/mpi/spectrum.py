"""IBM Spectrum MPI's mpirun: an Open MPI of before 5, with a transport of its own."""

from hvlaunch.mpi.command import Command, Request
from hvlaunch.mpi.openmpi import open_mpi_4

__all__ = ["spectrum"]


def spectrum(request: Request) -> Command:
    """Workers talk by Gloo or NCCL, so MPI itself may use TCP: -tcp needs no adapter of a certain make."""
    return open_mpi_4(request, own=("-tcp",))
