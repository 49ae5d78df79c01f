"""Dask: rank 0 is scheduler and client, the other ranks are its workers."""

import asyncio
import os
from operator import pow as power

from distributed import Client, Scheduler, Worker

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


async def lead() -> None:
    async with (
        Scheduler(host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]), dashboard=False),
        Client(where, asynchronous=True) as client,
    ):
        await client.wait_for_workers(size - 1)
        assert await client.gather(client.map(power, range(4), [2] * 4)) == [0, 1, 4, 9]
        await client.shutdown()


async def serve() -> None:
    async with Worker(where, nthreads=1, dashboard=False, death_timeout=60) as worker:
        await worker.finished()


asyncio.run(lead() if rank == 0 else serve())
print("right", rank, flush=True)
