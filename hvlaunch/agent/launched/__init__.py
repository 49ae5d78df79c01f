"""Agents that a launcher (mpirun, srun) starts, and the launcher's other processes on a host."""
