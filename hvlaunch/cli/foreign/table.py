"""All options of other launchers, by program; and those that a word may be."""

from typing import NamedTuple

from hvlaunch.cli.foreign.accelerate import ACCELERATE
from hvlaunch.cli.foreign.deepspeed import DEEPSPEED
from hvlaunch.cli.foreign.foreign_option import ForeignOption
from hvlaunch.cli.foreign.horovodrun import HOROVODRUN
from hvlaunch.cli.foreign.mpich import MPICH
from hvlaunch.cli.foreign.openmpi import OPENMPI
from hvlaunch.cli.foreign.pdsh import CLUSH, PDSH
from hvlaunch.cli.foreign.srun import SRUN
from hvlaunch.cli.foreign.torchrun import TORCHRUN

__all__ = ["PROGRAMS", "Row", "key", "rows_of"]

PROGRAMS: dict[str, tuple[ForeignOption, ...]] = {
    "horovodrun": HOROVODRUN,
    "torchrun": TORCHRUN,
    "mpirun (Open MPI)": OPENMPI,
    "mpirun (MPICH)": MPICH,
    "srun": SRUN,
    "deepspeed": DEEPSPEED,
    "accelerate launch": ACCELERATE,
    "pdsh": PDSH,
    "clush": CLUSH,
}


class Row(NamedTuple):
    program: str
    option: ForeignOption


def key(name: str) -> str:
    """What names have in common that differ in dashes and underscores alone, as many launchers have them: `nproc-per-node`."""
    return name.lstrip("-").replace("_", "-")


def rows_of(name: str) -> list[Row]:
    """The options of that name that hvlaunch does not have, under this or another dash."""
    return [
        Row(program, option)
        for program, options in PROGRAMS.items()
        for option in options
        if option.becomes not in ("same", "another meaning") and key(name) in map(key, option.names)
    ]
