"""The job that hvlaunch itself runs in, where there is one: what it told this process, and workers must not believe."""

from collections.abc import Mapping

from hvlaunch.hosts.patterns import matcher

__all__ = ["PLACE_IN_IT", "without_place"]

PLACE_IN_IT = (
    # A job of hvlaunch or torchrun.
    "HVLAUNCH_*",
    "HOROVOD_ELASTIC",
    "TORCHELASTIC_USE_AGENT_STORE",
    # Slurm: what it tells each task, as it does a batch script and the shell of `srun --pty`.
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
"""Names, as patterns, of what says which of that job's processes this one is; all workers would find the same rank."""


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what holds for this process alone."""
    tells_a_place = matcher(*PLACE_IN_IT)
    return {name: value for name, value in environ.items() if not tells_a_place(name)}
