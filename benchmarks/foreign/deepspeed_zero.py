"""DeepSpeed without its own launcher: ZeRO 1 on processors, by Gloo."""

import os

import deepspeed
import torch

deepspeed.init_distributed("gloo")
model = torch.nn.Linear(4, 1)
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=settings
)
for _ in range(3):
    engine.backward(engine(torch.randn(2, 4)).square().mean())
    engine.step()
weights = [torch.zeros(1) for _ in range(int(os.environ["WORLD_SIZE"]))]
torch.distributed.all_gather(weights, model.weight.detach().float().sum().reshape(1))
assert engine.world_size == len(weights)
assert torch.allclose(weights[0], weights[-1])
print("right", os.environ["RANK"], flush=True)
torch.distributed.destroy_process_group()
