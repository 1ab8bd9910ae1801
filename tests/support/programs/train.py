"""A program that knows nothing of noise: three optimiser steps, and a product outside all modules."""

import os
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 16)
for _ in range(3):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"{loss.item():.6f} {(x @ x.T).sum().item():.6f}")
if "fork" in sys.argv and os.fork() == 0:
    for _ in range(3):
        x @ x.T
    raise SystemExit
if "die" in sys.argv:
    raise SystemExit(7)
