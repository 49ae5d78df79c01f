"""The network of ddp_digits.py, trained by Hugging Face's accelerate. hvlaunch takes the place of `accelerate launch`."""

import torch
from accelerate import Accelerator
from ddp_digits import Net, digits
from torch import nn
from torch.utils.data import DataLoader

EPOCHS = 6


def main() -> None:
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available()
    )  # without this it makes no group on processors
    torch.manual_seed(0)
    train_set, test_set = digits()
    net = Net()
    model, optimizer, batches, tests = accelerator.prepare(
        net,
        torch.optim.Adam(net.parameters(), 3e-3),
        DataLoader(train_set, batch_size=120 // accelerator.num_processes, shuffle=True),
        DataLoader(test_set, batch_size=120),
    )
    for _ in range(EPOCHS):
        for images, labels in batches:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    right, seen = 0, 0
    with torch.no_grad():
        for images, labels in tests:
            found = accelerator.gather_for_metrics(model(images).argmax(dim=1) == labels)
            right, seen = right + int(found.sum()), seen + len(found)
    total = sum(weight.detach().double().sum().item() for weight in net.parameters())
    rank, size = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank} of {size} has weights whose sum is {total:.9f}", flush=True)
    if accelerator.is_main_process:
        print(f"accuracy {right / seen:.3f}", flush=True)
    # Else the model may go while Gloo still drops the last gather: each waits for the other's lock, and the rank never ends.
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
