#!/bin/sh
# Prints the nodes of all running Slurm jobs with a given name, for an elastic job: each job may start or be preempted at any time.
#
#   for i in 1 2 3 4; do sbatch --job-name=pool --nodes=1 --requeue --wrap='sleep infinity'; done
#   hvlaunch --min-np 4 --host-discovery-script 'hostfiles/discover-slurm.sh pool 8' python train.py
#
# The second argument is the number of slots of each node. Older jobs come first, so their nodes have the first ranks.

set -eu
name=${1:?usage: discover-slurm.sh JOB-NAME [SLOTS]}
squeue --noheader --user="$(id -un)" --name="$name" --states=RUNNING --sort=i --format=%N |
    awk -v slots="${2:+:$2}" 'NF && !seen[$1]++ { print $1 slots }'
