"""An elastic training as Horovod's users write it, with another import; it obeys and reports as elastic_sums.py does.

horovod_elastic.py DIR: a network learns the sum of its inputs. What is asked of it is in DIR.
"""

import json
import sys
import time
from pathlib import Path

import torch
from orders import Orders
from torch import nn

import hvlaunch.torch as hvd  # the one line that differs: Horovod's is `import horovod.torch as hvd`
from hvlaunch.torch.current import world  # for the report alone

COMMIT_EVERY = 4
BATCH = 8
STEP = 0.02
RATE = 0.01

orders = Orders(Path(sys.argv[1]))
hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
inputs = torch.rand(2000, 4, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=RATE * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    number = world().place.round
    if hvd.rank() == 0:
        print(f"round {number} has {hvd.size()} at step {state.step}", flush=True)
    state.rounds.append([number, state.step, hvd.size()])
    while not state.is_over:
        for state.batch, (batch, wanted) in enumerate(loader):
            train_step(state, batch, wanted)
            if state.is_over:
                return
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


def train_step(state: hvd.elastic.TorchState, batch: torch.Tensor, wanted: torch.Tensor) -> None:
    time.sleep(STEP)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), wanted).backward()
    optimizer.step()
    state.weight += int(hvd.allreduce(torch.tensor(1), op=hvd.Sum, name="workers"))
    state.is_over = bool(hvd.allreduce(torch.tensor(int(orders.is_over)), op=hvd.Max, name="over"))
    state.step += 1
    state.sampler.record_batch(state.batch, BATCH)
    if state.step % COMMIT_EVERY == 0 or state.is_over:
        state.commit()
        if hvd.rank() == 0:
            print(f"commit at step {state.step}", flush=True)


def on_state_reset() -> None:
    for group in optimizer.param_groups:
        group["lr"] = RATE * hvd.size()


state = hvd.elastic.TorchState(
    model, optimizer, sampler=sampler, epoch=0, batch=0, step=0, weight=0, rounds=[], is_over=False
)
state.register_reset_callbacks([on_state_reset])
train(state)
loss = hvd.allreduce(
    nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)), name="avg_loss"
).item()
alike = len(
    {json.dumps(each) for each in hvd.allgather_object([*map(torch.Tensor.tolist, model.parameters())])}
)
if hvd.rank() == 0:
    rate = optimizer.param_groups[0]["lr"] / RATE
    report = {"step": state.step, "weight": state.weight, "rounds": state.rounds}
    print("done " + json.dumps({**report, "loss": loss, "alike": alike, "rate": rate}), flush=True)
