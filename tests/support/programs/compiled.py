"""A model, a layer and a function compiled by inductor; each result is compared with the eager one."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
x = torch.randn(8, 16)
compiled, layer, product = torch.compile(model), torch.compile(model[0]), torch.compile(lambda a: a @ a.T)
exact = [nn.functional.linear(x.double(), model[0].weight.double(), model[0].bias.double()), x.double() @ x.double().T]
found = [layer(x), product(x)]
compiled(x).sum().backward()
for name, clean, noised in zip(("layer", "product"), exact, found, strict=True):
    print(name, ((noised - clean) / clean).abs().median().item() > 0.005)
