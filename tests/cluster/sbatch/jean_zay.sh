#!/bin/bash
#SBATCH --job-name=TravailGPU      # nom du job
#SBATCH --output=TravailGPU%j.out  # fichier de sortie (%j = job ID)
#SBATCH --error=TravailGPU%j.err   # fichier d'erreur (%j = job ID)
#SBATCH --constraint=v100-32g      # demander des GPU a 32 Go de RAM
#SBATCH --nodes=2                  # deux noeuds
#SBATCH --ntasks=4                 # 4 taches en tout
#SBATCH --gres=gpu:2               # deux GPU par noeud
#SBATCH --hint=nomultithread       # desactiver l'hyperthreading
#SBATCH --qos=qos_gpu-dev

cd ${SLURM_SUBMIT_DIR}
module purge
conda deactivate
set -x
srun python3 -u -c 'import os; print("tache", os.environ["SLURM_PROCID"], "de", os.environ["SLURM_NTASKS"])'
