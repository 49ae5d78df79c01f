"""Batch scripts of Slurm on hosts without Slurm: `hvlaunch sbatch`."""

__all__: list[str] = []
