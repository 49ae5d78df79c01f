#!/bin/bash

# Parameters
#SBATCH --array=0-2%2
#SBATCH --cpus-per-task=2
#SBATCH --error=logs/%A_%a_0_log.err
#SBATCH --gpus-per-node=1
#SBATCH --job-name=submitit
#SBATCH --mem=4GB
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=logs/%A_%a_0_log.out
#SBATCH --partition=dev
#SBATCH --signal=USR2@90
#SBATCH --time=5
#SBATCH --wckey=submitit

# setup
echo Running setup commands

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output logs/%A_%a_%t_log.out --error logs/%A_%a_%t_log.err python3 -u -c '
import os, sys
names = ["SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES"]
print(*(os.environ[name] for name in names), os.environ["SUBMITIT_EXECUTOR"])
print("to stderr", file=sys.stderr)
'
