#!/bin/sh
#SBATCH --array=1-3
#SBATCH --job-name sweep
#SBATCH --output=sweep_%A-%2a.txt

# A line of the grid for each task, without srun.
RATE=$(sed -n "${SLURM_ARRAY_TASK_ID}p" grid.txt)
echo "task $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT on $(hostname): rate $RATE"
[ "$RATE" != bad ]
