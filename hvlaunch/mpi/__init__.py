"""Jobs that mpirun, srun or jsrun starts."""
