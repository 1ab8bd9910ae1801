"""Noise on a model whose weights torch's `fully_shard` divides among two processes, as FSDP2 trainers do.

The noise does not depend on the sharding: both processes compute the batch under the noise that a whole model has.
"""

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

import aqnpipe
from aqnpipe.config.model import builtin_folder
from aqnpipe.models.loading import load_model

NUM_PROCESSES = 2


def noisy_step(model, ids):
    """Return the logits and the gradients of a step under 5 % noise, forward and backward, and its checked receipt."""
    with aqnpipe.noisy(model, scale=0.05, seed=0, backward=True) as receipt:
        result = model(input_ids=ids, labels=ids)
        result.loss.backward()
    return result.logits.detach(), {name: weight.grad for name, weight in model.named_parameters()}, receipt.check()


def work(rank, address):
    """Compute a step with the whole model and with the sharded one, and compare them."""
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=NUM_PROCESSES)
    ids = torch.randint(5, 60, (4, 32), generator=torch.Generator().manual_seed(0))
    model = load_model(builtin_folder("tiny"), dtype="float32", attention="eager").train()
    whole_logits, whole_gradients, _ = noisy_step(model, ids)
    model.zero_grad()

    mesh = distributed.init_device_mesh("cpu", (NUM_PROCESSES,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    logits, gradients, receipt = noisy_step(model, ids)

    # Both processes have the same batch, so the gradients that `fully_shard` averages are those of the whole model.
    full = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    torch.testing.assert_close(logits, whole_logits, rtol=0, atol=0)
    torch.testing.assert_close(full, whole_gradients, rtol=0, atol=0)
    if rank == 0:
        print(f"same logits and gradients as the whole model; {receipt.recomputed_numbers} numbers were recomputed")
    distributed.destroy_process_group()


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(f"file://{folder}/rendezvous",), nprocs=NUM_PROCESSES)
