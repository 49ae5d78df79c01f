"""accelerate, without its own launcher."""

import os

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (batch,) in data:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
weights = accelerator.gather(next(model.parameters()).sum().reshape(1))
assert accelerator.num_processes == len(weights) == int(os.environ["WORLD_SIZE"])
assert torch.allclose(weights, weights[0])
print("right", accelerator.process_index, flush=True)
accelerator.end_training()
