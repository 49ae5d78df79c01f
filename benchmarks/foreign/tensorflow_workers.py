"""TensorFlow's MultiWorkerMirroredStrategy: TF_CONFIG is made from HVLAUNCH_HOSTS, with a port for each worker."""

import json
import os

rank, first = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
workers: list[str] = []
for host in os.environ["HVLAUNCH_HOSTS"].split(","):
    address, _, slots = host.partition("=")[2].rpartition(":")
    workers += [f"{address}:{first + len(workers) + slot}" for slot in range(int(slots))]
os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
)
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf  # noqa: E402

strategy = tf.distribute.MultiWorkerMirroredStrategy()
assert strategy.num_replicas_in_sync == len(workers)
with strategy.scope():
    total = strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, tf.constant(rank + 1.0)
        )
    )
assert float(strategy.experimental_local_results(total)[0]) == len(workers) * (len(workers) + 1) / 2
print("right", rank, flush=True)
