#!/bin/bash -l

# SLURM SUBMIT SCRIPT
#SBATCH --nodes=3             # This needs to match Trainer(num_nodes=...)
#SBATCH --gres=gpu:2
#SBATCH --ntasks-per-node=2   # This needs to match Trainer(devices=...)
#SBATCH --mem=0
#SBATCH --time=0-02:00:00
#SBATCH --signal=SIGUSR1@90

# activate conda env
source activate $1

# debugging flags (optional)
export NCCL_DEBUG=INFO
export PYTHONFAULTHANDLER=1

# on your cluster you might need this:
# export NCCL_SOCKET_IFNAME=^docker0,lo

# run script from above
srun python3 slurm_world.py
