"""A program that knows nothing of noise: three optimiser steps, and a product outside all modules."""

import multiprocessing
import os
import signal
import sys

import torch
from torch import nn


def multiply(number: int) -> None:
    """Compute a product in a process of its own."""
    torch.ones(number, 4) @ torch.ones(4, 3)


if "pool" in sys.argv:
    for _ in range(2):
        process = multiprocessing.get_context("fork").Process(target=multiply, args=(2,))
        process.start()
        process.join()
if "kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 16)
for _ in range(3):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if "late" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
print(f"{loss.item():.6f} {(x @ x.T).sum().item():.6f}")
if "fork" in sys.argv and os.fork() == 0:
    for _ in range(3):
        x @ x.T
    raise SystemExit
if "die" in sys.argv:
    raise SystemExit(7)
