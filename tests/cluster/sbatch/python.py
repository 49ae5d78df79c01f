#!/usr/bin/env python3
# SBATCH --nodes=2
# SBATCH --ntasks-per-node=1
"""A batch script in Python."""

import subprocess
import sys

names = subprocess.check_output(["scontrol", "show", "hostnames"], text=True).split()
output = subprocess.check_output(["srun", "--label", "cat"], input="from stdin\n", text=True)
print(len(names), "nodes", sorted(output.splitlines()), sys.argv[1:])
sys.exit(subprocess.call(["srun", "-n1", "-r1", "sh", "-c", "test $SLURMD_NODENAME = b && exit 5"]))
