"""Controllers that hand the starting to mpirun, srun or jsrun."""
