"""Two workers under torchrun that know nothing of noise: data parallel, or with sharded weights."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
if "shard" in sys.argv:
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(8, 16)
for _ in range(3):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"{loss.item():.6f}", flush=True)
dist.destroy_process_group()
