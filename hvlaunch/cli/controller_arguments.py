"""The flags that say who starts the workers."""

import argparse

from hvlaunch.cli import values

__all__ = ["add_controller"]


def add_controller(parser: argparse.ArgumentParser) -> None:
    """The flags that choose a controller, of which one may be said, and those for a launcher of others."""
    controller = parser.add_argument_group("controller")
    which = controller.add_mutually_exclusive_group()
    which.add_argument(
        "--gloo",
        dest="launcher",
        action="store_const",
        const=None,
        help="hvlaunch itself starts the workers (default)",
    )
    which.add_argument(
        "--mpi",
        dest="launcher",
        action="store_const",
        const="mpirun",
        help="mpirun starts them: of Open MPI, MPICH, Intel MPI, MVAPICH or IBM Spectrum MPI, whichever it is",
    )
    which.add_argument(
        "--srun",
        dest="launcher",
        action="store_const",
        const="srun",
        help="Slurm's srun starts them, inside of a job of Slurm",
    )
    which.add_argument(
        "--jsrun",
        dest="launcher",
        action="store_const",
        const="jsrun",
        help="LSF's jsrun starts them, inside of a job of LSF",
    )
    controller.add_argument(
        "--mpirun",
        metavar="PATH",
        type=values.some,
        help="the mpirun that --mpi calls; default: the one on PATH",
    )
    controller.add_argument(
        "--mpi-args",
        metavar="FLAGS",
        action="append",
        type=values.words,
        default=[],
        help="more flags for the launcher, in one word: --mpi-args='--report-bindings'; may be repeated",
    )
    controller.add_argument(
        "--binding-args",
        metavar="FLAGS",
        action="append",
        type=values.words,
        default=[],
        help="the launcher's flags that bind workers to processors: --binding-args='--bind-to core'; "
        "default: none is bound",
    )
