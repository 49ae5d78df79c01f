#!/bin/bash -l
#SBATCH -C gpu
#SBATCH --account=m1234
#SBATCH -q regular
#SBATCH -N 2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=32
#SBATCH --time=00:20:00
#SBATCH -J vit-era5
#SBATCH -o %x-%j.out

module load pytorch/2.6.0

export FI_MR_CACHE_MONITOR=userfaultfd
export MASTER_ADDR=$(hostname)

# Reversing order of GPUs to match default CPU affinities from Slurm
export CUDA_VISIBLE_DEVICES=1,0

args="$@"
set -x
srun -u --mpi=pmi2 --cpu_bind=cores \
    bash -c "
    source export_ddp_vars.sh
    echo rank \$RANK of \$WORLD_SIZE local \$LOCAL_RANK at \$MASTER_ADDR:\$MASTER_PORT devices \$CUDA_VISIBLE_DEVICES $args
    "
