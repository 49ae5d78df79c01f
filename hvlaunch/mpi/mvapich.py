"""MVAPICH's mpirun: Hydra, with a binding of the library's own."""

from dataclasses import replace

from hvlaunch.mpi.command import Command, Request
from hvlaunch.mpi.mpich import mpich

__all__ = ["mvapich"]

_UNBOUND = {"MV2_ENABLE_AFFINITY": "0", "MVP_ENABLE_AFFINITY": "0"}


def mvapich(request: Request) -> Command:
    """The library binds processes to cores in MPI_Init, whatever Hydra was told; workers have threads."""
    if request.binding:
        return mpich(request)
    command = mpich(replace(request, env=(*request.env, *_UNBOUND)))
    return Command(command.argv, {**_UNBOUND, **command.env})
