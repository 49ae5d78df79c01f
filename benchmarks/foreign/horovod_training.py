"""Horovod as its users have it: a DistributedOptimizer, a broadcast of the start, and an average over the ranks."""

import horovod.torch as hvd
import torch

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size()), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
everywhere = hvd.allgather(model.weight.detach())
assert everywhere.shape[0] == hvd.size()
assert torch.equal(everywhere, everywhere[:1].expand_as(everywhere))
assert hvd.allreduce(torch.tensor(float(hvd.rank()))).item() == (hvd.size() - 1) / 2
print("right", hvd.rank(), flush=True)
hvd.shutdown()
