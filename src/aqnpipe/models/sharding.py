"""Models whose weights are divided among the workers of a run: torch's FSDP2, with whole norms on every worker.

Each decoder layer is one unit: its weights are gathered before it computes and freed afterwards. What is left
(embedding, output projection) is another. A weight is divided along its first dimension, as `torch.chunk` divides it.
Between the two states a module has two parameter objects for one weight: a DTensor with this worker's share, and the
gathered one.

The weights of norms stay whole on every worker, because AQN draws noise on them, and receipts compare them whole. FSDP
does not know them, so it does not average their gradients: see `average_whole_gradients`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from aqnpipe.errors import ReceiptError
from aqnpipe.models.layout import decoder_layers, is_norm

WHOLE_WEIGHTS = "_aqnpipe_whole_weights"
"""Attribute of a sharded model: the names of the weights that every worker has whole."""

_FULLY_SHARD = "torch.distributed.fsdp."

_SAMPLED_VALUES = 64


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


def shard_model(model: nn.Module, device: torch.device, *, is_trained: bool = True) -> None:
    """Divide the weights of `model` among all workers, in place, and move it to `device`.

    The embedding and output projection of a model that is trained stay gathered between its forward and backward pass;
    otherwise they are freed, too. A collective operation. Hooks that are registered later with `prepend` still find the
    weights of a layer gathered.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    names = {parameter: name for name, parameter in model.named_parameters()}
    whole = {
        parameter for module in model.modules() if is_norm(module) for parameter in module.parameters(recurse=False)
    }
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    units = [*decoder_layers(model), model]
    for unit in units:
        # None: freed after the forward pass, except for the last unit.
        fully_shard(unit, mesh=mesh, ignored_params=whole, reshard_after_forward=None if is_trained else True)
        unit._forward_pre_hooks = GatheringFirst(unit._forward_pre_hooks)
    setattr(model, WHOLE_WEIGHTS, frozenset(names[parameter] for parameter in whole))


@contextmanager
def gathered_weights(model: nn.Module) -> Iterator[None]:
    """Keep all weights gathered on every worker while the body runs; a model that is not sharded is left alone.

    Gathering is a collective operation. In the body workers may compute different numbers of forward passes, or none:
    there is no communication. Changes of gathered weights are lost.
    """
    if not is_sharded(model):
        yield
        return
    units = _units(model)
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            # The embedding is needed again as soon as the backward pass begins.
            unit.set_reshard_after_forward(unit is not model, recurse=False)


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model`, of a sharded model only inside `gathered_weights`.

    FSDP's own state dict would free the gathered weights.
    """
    if not is_sharded(model):
        return dict(model.state_dict())
    return {name: tensor.detach() for name, tensor in _named_weights(model, tied=True)}


def distinct_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in the state dict of `model`, one after the other; tied ones once, by the first name.

    Those of a sharded model are shares, which `shares.whole` gathers; `free_gathered` comes first.
    """
    if is_sharded(model):
        yield from _named_weights(model, tied=False)
        return
    seen = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if place not in seen:
            seen.add(place)
            yield name, tensor


def free_gathered(model: nn.Module) -> None:
    """Free the weights that a forward pass left gathered: such a copy may be older than the last update."""
    if is_sharded(model):
        for unit in _units(model):
            unit.reshard()


def average_whole_gradients(model: nn.Module) -> None:
    """Average the gradients of the weights that every worker has whole; a collective operation.

    In the order of data parallelism (divided, then summed), so that the bits are the same.
    """
    workers, whole = distributed.get_world_size(), getattr(model, WHOLE_WEIGHTS)
    for name, weight in model.named_parameters():
        if name in whole and weight.requires_grad:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.div_(workers)
            distributed.all_reduce(weight.grad)


def split_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimiser with shares and whole weights in different groups.

    One operation on several weights cannot mix the two.
    """
    found: list[dict[str, Any]] = []
    for group in groups:
        parts = [[weight for weight in group["params"] if is_share(weight) is kind] for kind in (True, False)]
        found.extend({**group, "params": part} for part in parts if part)
    return found


def _named_weights(model: nn.Module, *, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers; with `tied` a tied parameter comes by each of its names."""
    yield from model.named_parameters(remove_duplicate=not tied)
    for owner, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{owner}.{name}" if owner else name, buffer


def _units(model: nn.Module) -> list[Any]:
    return [*decoder_layers(model), model]


class GatheringFirst(OrderedDict[int, Any]):
    """Hooks of a module; whatever is prepended comes behind FSDP's, which gather the weights."""

    def move_to_end(self, key: int, last: bool = True) -> None:
        """Move a hook to an end, and then those that gather to the start."""
        super().move_to_end(key, last)
        for gathering in reversed(_gathering(self)):
            super().move_to_end(gathering, last=False)


def _gathering(hooks: dict[int, Any]) -> list[int]:
    return [key for key, hook in hooks.items() if (getattr(hook, "__module__", None) or "").startswith(_FULLY_SHARD)]


def matrices_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of about 64 evenly spaced values of every matrix of `model`.

    It is cheap to compute, and every optimiser step changes it. Of a sharded model it covers this worker's share.
    """
    samples = []
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            values = own_share(model, name, parameter.detach()).reshape(-1)
            samples.append(values[:: max(1, values.numel() // _SAMPLED_VALUES)].float())
    return hashlib.sha256(torch.cat(samples).cpu().numpy().tobytes()).hexdigest()
