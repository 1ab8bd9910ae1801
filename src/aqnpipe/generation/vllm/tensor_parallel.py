"""Exchange between tensor-parallel workers: whole outputs for faults, and measurements."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, distributed, nn

from aqnpipe.noise.kernels.shards import Shard


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
