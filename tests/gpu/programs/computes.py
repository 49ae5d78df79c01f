"""Keeps a GPU busy, with some memory of it, and says so until it is told to end."""

import time

import torch

one = torch.randn(4096, 4096, device="cuda")
kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
print("computes", flush=True)
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    for _ in range(50):
        one = (one @ one).clamp(-1, 1)
    torch.cuda.synchronize()
