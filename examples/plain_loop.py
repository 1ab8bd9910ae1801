"""Noise in a custom training loop: every matrix product, forward and backward, with a receipt."""

import torch

import aqnpipe
from aqnpipe.config.model import builtin_folder
from aqnpipe.models.loading import load_model

model = load_model(builtin_folder("tiny"), dtype="float32", attention="eager").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ids = torch.randint(5, 60, (4, 32), generator=torch.Generator().manual_seed(0))

receipt = None
for step in range(5):
    with aqnpipe.noisy(model, scale=0.05, seed=0, backward=True, receipt=receipt) as receipt:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

receipt.check()
print(f"{receipt.recomputed_numbers} numbers of the noise were recomputed")
