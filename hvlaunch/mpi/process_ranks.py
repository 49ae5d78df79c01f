"""The rank of a process, from its launcher's variables."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvlaunch.mpi import Kind

__all__ = ["ALL_NAMES", "Names", "ProcessRanks", "names_of", "ranks_of", "shell_shim"]


class Names(NamedTuple):
    """The names of a launcher's variables; empty for a missing variable."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_OPEN_MPI = Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_MVAPICH = Names(
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
_HYDRA = Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = Names("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")
_JSM = Names(
    "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
)
_PMIX = Names("PMIX_RANK", "", "", "")

# A job inside of another job finds the variables of both: only those of its own launcher count.
_OF = {
    Kind.OPEN_MPI: (_OPEN_MPI, _PMIX),
    Kind.SPECTRUM: (_OPEN_MPI, _PMIX),
    Kind.MPICH: (_HYDRA,),
    Kind.INTEL: (_HYDRA,),
    Kind.MVAPICH: (_MVAPICH, _HYDRA),
    Kind.SRUN: (_SLURM, _PMIX, _HYDRA),
    Kind.JSRUN: (_JSM, _OPEN_MPI, _PMIX),
}

_MOST_DIGITS = 9

ALL_NAMES = frozenset(name for families in _OF.values() for family in families for name in family if name)


class ProcessRanks(NamedTuple):
    """A process's ranks and sizes from its launcher; None for a missing variable."""

    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None


def names_of(kind: Kind) -> Sequence[Names]:
    """Return the launcher's variables, the most reliable first."""
    return _OF[kind]


def ranks_of(kind: Kind, environ: Mapping[str, str]) -> ProcessRanks | None:
    """Return the ranks in a process's environment; None without a rank."""
    for names in names_of(kind):
        rank = _number(environ, names.rank)
        if rank is not None:
            size, local_rank, local_size = (_number(environ, name) for name in names[1:])
            return ProcessRanks(rank, size, local_rank, local_size)
    return None


def shell_shim(kind: Kind) -> tuple[str, ...]:
    """Return words of a shell that set torch's variables for the command behind, for a pasted command."""
    names = names_of(kind)[0]
    sources = zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), names, strict=True)
    exports = " ".join(f"{name}=${source}" for name, source in sources if source)
    return ("sh", "-c", f'export {exports}; exec "$@"', "sh")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    # isdigit() alone would permit digits of other scripts, and int() is slow for a million digits.
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None
