"""Models whose weights are divided among the workers of a run: torch's FSDP2, with whole norms on every worker.

Each decoder layer is one unit: its weights are gathered before it computes and freed afterwards. What is left
(embedding, output projection) is another. A weight is divided along its first dimension, as `torch.chunk` divides it.
Between the two states a module has two parameter objects for one weight: a DTensor with this worker's share, and the
gathered one.

The weights of norms stay whole on every worker, because AQN draws noise on them, and receipts compare them whole. FSDP
does not know them, so it does not average their gradients: see `average_whole_gradients`.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from aqnpipe.models.layout import decoder_layers, is_norm
from aqnpipe.models.shares import WHOLE_WEIGHTS, is_sharded, is_share

_FULLY_SHARD = "torch.distributed.fsdp."


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
