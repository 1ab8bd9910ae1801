"""The share of a worker in the weights of a sharded model (see `sharding`), without importing FSDP."""

from typing import Any

import torch
from torch import Tensor, distributed, nn

from aqnpipe.errors import ReceiptError

WHOLE_WEIGHTS = "_aqnpipe_whole_weights"
"""Attribute of a sharded model: the names of the weights that every worker has whole."""


def is_sharded(model: nn.Module) -> bool:
    """Return True if the weights of `model` are divided among workers, gathered at the moment or not."""
    return hasattr(model, WHOLE_WEIGHTS)


def is_share(tensor: Tensor) -> bool:
    """Return True if `tensor` is a DTensor, of which this worker has a share."""
    return hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """Return this worker's share of a DTensor, or the tensor itself."""
    share: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return share


def own_share(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Return this worker's share of a weight of `model`, whether it is gathered or not; a whole weight as it is."""
    if not is_sharded(model) or name in getattr(model, WHOLE_WEIGHTS):
        return weight
    return local(weight) if is_share(weight) else own_rows(weight)


def whole(weight: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return all of a DTensor, gathered from all workers (a collective operation); another tensor as it is.

    With `dtype` shares are rounded before they are gathered. Raises ReceiptError if this worker's share is not in it.
    """
    if not is_share(weight):
        plain: Tensor = weight.detach()
        return plain
    shares = weight.detach() if dtype is None else weight.detach().to(dtype)
    gathered: Tensor = shares.full_tensor()
    if not same_bits(own_rows(gathered), local(shares)):
        raise ReceiptError(f"a weight of shape {tuple(gathered.shape)} was gathered without this worker's share of it")
    return gathered


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors on one device have the same dtype, shape and bits: 0.0 is not -0.0, NaN equals itself.

    >>> zero, nan = torch.tensor(0.0), torch.tensor(float("nan"))
    >>> same_bits(zero, -zero), same_bits(nan, nan.clone())
    (False, True)
    """
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    # A tensor without dimensions has no view in another dtype.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def own_rows(weight: Tensor) -> Tensor:
    """Return the rows of a whole weight that this worker has of a sharded one."""
    chunks = weight.chunk(distributed.get_world_size())
    rank = distributed.get_rank()
    return chunks[rank] if rank < len(chunks) else weight[:0]


def like_share(weight: Any, share: Tensor) -> Tensor:
    """Return a DTensor that is divided as `weight` is, of which this worker has `share`."""
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        share, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return made


def element_of(tensor: Tensor, index: tuple[int, ...]) -> tuple[Tensor, bool]:
    """Return one element of a tensor as float64, and whether it is of a DTensor; 0 on workers that do not have it."""
    if not is_share(tensor):
        return tensor.detach()[index].double(), False
    rows = -(-tensor.shape[0] // distributed.get_world_size())
    first, share = rows * distributed.get_rank(), local(tensor).detach()
    row = index[0] - first
    if 0 <= row < share.shape[0]:
        return share[(row, *index[1:])].double(), True
    return torch.zeros((), dtype=torch.float64, device=share.device), True


def sum_of_workers(values: Tensor) -> Tensor:
    """Return the sum over workers of float64 `values`, each of which all workers but one have as 0; bit for bit.

    A collective operation. Summed as integers, which every backend can.
    """
    bits = values.contiguous().view(torch.int64).clone()
    distributed.all_reduce(bits)
    return bits.view(torch.float64)
