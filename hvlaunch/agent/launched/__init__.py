"""The processes that a launcher (mpirun, srun, jsrun) starts on a host beside its agent."""
