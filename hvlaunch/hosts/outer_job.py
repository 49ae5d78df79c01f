"""A job around hvlaunch (of Slurm, an MPI, torchrun, hvlaunch): its variables that workers must not see."""

from collections.abc import Mapping

from hvlaunch.hosts.patterns import matcher

__all__ = ["OUTER_RANK_VARIABLES", "without_outer_rank"]

OUTER_RANK_VARIABLES = (
    # A job of hvlaunch or torchrun.
    "HVLAUNCH_*",
    "HOROVOD_ELASTIC",
    "TORCHELASTIC_USE_AGENT_STORE",
    # Slurm sets these for each task, and for a batch script and the shell of `srun --pty` too.
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_GTIDS",
    "SLURM_TASK_PID",
    # mpirun, jsrun.
    "OMPI_COMM_WORLD_*",
    "MV2_COMM_WORLD_*",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "PMI_*",
    "PMIX_*",
    "JSM_NAMESPACE_*",
)
"""Patterns of the variables that say which of that job's processes this one is: all workers would find the same rank."""


def without_outer_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that hold for this process alone."""
    is_outer_rank = matcher(*OUTER_RANK_VARIABLES)
    return {name: value for name, value in environ.items() if not is_outer_rank(name)}
