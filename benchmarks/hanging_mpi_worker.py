"""As hanging_worker.py, by MPI: one rank does not come to the barrier."""

import sys
import time

from mpi4py import MPI

if __name__ == "__main__":
    world = MPI.COMM_WORLD
    world.Barrier()
    if world.rank == 0:
        print("step 0", flush=True)
    if world.rank == int(sys.argv[2]):
        time.sleep(1_000_000)  # HERE: mpi-barrier
    world.Barrier()
