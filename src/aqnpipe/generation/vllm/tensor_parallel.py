"""Exchange between tensor-parallel workers: row-parallel sums, whole outputs for faults, and measurements."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, distributed, nn

from aqnpipe.generation.vllm.linears import Linear
from aqnpipe.noise.kernels.shards import Shard


def summed(linear: Linear, product: Tensor) -> Tensor:
    """Return the sum of a row-parallel module's products on all workers; other products as they are."""
    if not linear.is_summed:
        return product
    from vllm.distributed import tensor_model_parallel_all_reduce

    total: Tensor = tensor_model_parallel_all_reduce(product)
    # On a CPU the sum is written over the product. The audit compares the noised sum with a tensor of its own.
    return total.clone() if total.data_ptr() == product.data_ptr() else total


def whole_bias(linear: Linear, bias: Tensor | None) -> Tensor | None:
    """Return the bias of a module. For row-parallel ones vLLM gives it to one worker, which adds it to the sum."""
    if not linear.is_summed:
        return bias
    added: Tensor | None = None if linear.module.skip_bias_add else linear.module.bias
    return added


def on_share(
    shards: Mapping[nn.Module, Shard], module: nn.Module, function: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return `function`, a fault on the whole output of `module`, as a function of this worker's share of it."""
    shard = shards.get(module)
    if shard is None:
        return function
    from vllm.distributed import tensor_model_parallel_all_gather

    def of_own(own: Tensor) -> Tensor:
        # Rows may consist of heads, whose elements are then the channels.
        whole = shard.whole(tensor_model_parallel_all_gather(own.flatten(1).contiguous()))
        changed = function(whole.unflatten(1, (-1, *own.shape[2:])) if own.dim() > 2 else whole)
        return shard.of(changed.flatten(1)).reshape(own.shape)

    return of_own


def texts_of_all_workers(text: str) -> list[str]:
    """Return the `text` of every worker, by rank; every worker must call this. Nothing is pickled."""
    from vllm.distributed import get_tp_group

    return exchanged(text, get_tp_group().cpu_group)


def exchanged(text: str, group: distributed.ProcessGroup | None) -> list[str]:
    """Return the `text` of every process of a group that can send tensors on the CPU, by rank."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    num_workers = distributed.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_workers)]
    distributed.all_gather(sizes, torch.tensor([len(own)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.cat([own, torch.zeros(longest - len(own), dtype=torch.uint8)])
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(num_workers)]
    distributed.all_gather(texts, padded, group=group)
    return [bytes(data[: int(size)].tolist()).decode() for data, size in zip(texts, sizes, strict=True)]
