#!/bin/bash
#SBATCH -N 3
#SBATCH -n 6
#SBATCH --gpus-per-node=2
#SBATCH -t 00:10
#SBATCH -o jax-%j.log

set -euo pipefail
# As jax.distributed.initialize() without arguments reads them, with a step of some of the nodes.
srun -N 2 -n 4 --gpu-bind=none python3 slurm_world.py
srun python3 -c 'import os; print("coordinator", os.environ["SLURM_STEP_NODELIST"], os.environ["SLURM_PROCID"])' | sort
