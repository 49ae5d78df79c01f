"""The rank of this process, as its launcher gives it: hvlaunch, torchrun, mpirun or srun."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hvlaunch.torch.group_errors import BadPlace

__all__ = ["Place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One worker's place in a round. Workers exchange whatever a place does not say about its peers."""

    rank: int
    size: int
    local_rank: int
    host: str
    """A name that only this host's workers share."""
    launcher: str
    """The launcher's usual name; "" without a launcher."""
    slot: int | None = None
    """The worker's slot on the host for its whole life; its local rank may change from round to round."""
    round: int = 0
    master_addr: str | None = None
    """Rank 0's host, as this host reaches it."""
    master_port: int | None = None
    """Port for rank 0's store if no rendezvous publishes another."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Place:
        """Read the place that the nearest launcher gave to this process; without a launcher, rank 0 of 1.

        Raises BadPlace if the environment gives only a part, or nonsense.
        """
        launcher = next((candidate for candidate in _LAUNCHERS if candidate.started(environ)), None)
        if launcher is None:
            return _alone(environ)
        rank, size, local_rank = launcher.ranks(environ)
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            host=environ.get(launcher.host, "") or socket.gethostname(),
            launcher=launcher.name,
            round=_number(environ, "HVLAUNCH_ROUND") if launcher.name == "hvlaunch" else 0,
            master_addr=environ.get("MASTER_ADDR") or None,
            master_port=_number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None,
        )


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of one launcher; among several names the first present counts."""

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    host: str
    """Variable that names or numbers the host; the machine's own name if unset."""

    def started(self, environ: Mapping[str, str]) -> bool:
        if self.rank not in environ:
            return False
        # Another launcher may stand between hvlaunch and this process.
        if self.name == "hvlaunch":
            ours = (
                ("RANK", self.rank),
                ("WORLD_SIZE", *self.size),
                ("TORCHELASTIC_RUN_ID", "HVLAUNCH_JOB_ID"),
            )
            return all(environ.get(torchs) in (None, environ.get(variable)) for torchs, variable in ours)
        # A batch script has SLURM_PROCID, too.
        if self.name == "srun":
            return "SLURM_STEP_ID" in environ
        return True

    def ranks(self, environ: Mapping[str, str]) -> tuple[int, int, int]:
        rank, size, local_rank = (
            _number(environ, _first(environ, names), besides=self.rank)
            for names in ((self.rank,), self.size, self.local_rank)
        )
        if rank >= size:
            raise BadPlace(self.rank, f"{rank} is too high, since {self.size[0]} is {size}")
        return rank, size, local_rank


_LAUNCHERS = (
    _Launcher("hvlaunch", "HVLAUNCH_RANK", ("HVLAUNCH_SIZE",), ("HVLAUNCH_LOCAL_RANK",), "HVLAUNCH_HOST"),
    _Launcher("torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), "GROUP_RANK"),
    _Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",), ""
    ),
    # Before srun, which starts Hydra's proxies.
    _Launcher(
        "MPICH", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID"), ""
    ),
    _Launcher(
        "srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), "SLURM_NODEID"
    ),
)


def _alone(environ: Mapping[str, str]) -> Place:
    # PMIx alone does not give the number of processes. Guessing 1 would train as many single jobs.
    if "PMIX_RANK" in environ:
        raise BadPlace(
            "PMIX_RANK",
            "it is set, but no variable has the number of processes",
            hint="set RANK, WORLD_SIZE and LOCAL_RANK",
        )
    return Place(rank=0, size=1, local_rank=0, host=socket.gethostname(), launcher="")


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in environ), names[0])


def _number(environ: Mapping[str, str], name: str, *, besides: str = "") -> int:
    text = environ.get(name, "")
    if not text:
        cause = f"it is not set, but {besides} is" if besides else "it is not set"
        raise BadPlace(name, cause, hint=f"set {name}, or start this program with hvlaunch")
    if not (text.isascii() and text.isdigit()):
        raise BadPlace(name, f"{text!r} is not a whole number (0 or more)")
    return int(text)
