"""The network of ddp_digits.py, sharded by torch's FSDP2: each rank keeps its part of weights, gradients and optimizer."""

import torch
import torch.distributed as dist
from ddp_digits import Net, accuracy, digits, join, leave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 6


def sharded(net: nn.Module, device: torch.device) -> nn.Module:
    """Layer by layer: of the others a rank has the weights only while it computes with them."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in net.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    model: FSDPModule = fully_shard(net, mesh=mesh)
    assert isinstance(model, nn.Module)
    return model


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def train(device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = digits()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train_set)
    batches = DataLoader(train_set, batch_size=120 // world_size, sampler=sampler)
    model = sharded(Net().to(device), device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    share = accuracy(model, test_set, device)
    weights = [whole(weight.detach()) for weight in model.parameters()]
    total = sum(weight.double().sum().item() for weight in weights)
    kept = sum(weight.to_local().numel() for weight in model.parameters() if isinstance(weight, DTensor))
    size = sum(weight.numel() for weight in weights)
    print(f"rank {rank} of {world_size} keeps {kept} of {size} weights, whose sum is {total:.9f}", flush=True)
    if rank == 0:
        print(f"accuracy {share:.3f}", flush=True)


def main() -> None:
    device = join()
    train(device)
    leave()


if __name__ == "__main__":
    main()
