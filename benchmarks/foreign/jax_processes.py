"""JAX's distributed arrays on processors."""

import os

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", size, rank)
assert jax.process_count() == size
found = multihost_utils.process_allgather(jnp.array([rank]))
assert found.ravel().tolist() == list(range(size))
print("right", rank, flush=True)
jax.distributed.shutdown()
