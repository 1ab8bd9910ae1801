"""Memory for measuring a distance: it must neither end the run nor make one worker wait for another.

The first worker measures. Where the workers share the weights (FSDP), it needs all of them, and gathering is a
collective operation: all workers agree before it whether each has the memory, and none communicates until the
measurement has ended, whatever happens in it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.sharding import gathered_weights
from aqnpipe.models.shares import is_sharded, is_share
from aqnpipe.training.ranks import gathered


@contextmanager
def whole_weights(network: nn.Module, *, is_needed: bool) -> Iterator[bool]:
    """Gather the weights of a sharded `network` for the body, if a worker needs them and all have the memory.

    Yields False if memory is missing on any worker, then nothing is gathered; True otherwise. A collective operation if
    `network` is sharded, otherwise nothing is done.
    """
    if not is_sharded(network):
        yield True
        return
    answers = gathered((is_needed, has_room_to_gather(network)))
    if not any(needed for needed, _ in answers):
        yield True
    elif not all(has_room for _, has_room in answers):
        yield False
    else:
        with gathered_weights(network):
            yield True


def has_room_to_gather(network: nn.Module) -> bool:
    """Return whether this worker has the memory for all weights of a sharded model.

    FSDP gathers unit by unit into a buffer and copies that, so the largest unit is needed twice.
    """
    layers = [[weight for weight in layer.parameters() if is_share(weight)] for layer in decoder_layers(network)]
    in_layers = {id(weight) for layer in layers for weight in layer}
    rest = [weight for weight in network.parameters() if is_share(weight) and id(weight) not in in_layers]
    units = [*layers, rest]
    largest = max(units, key=lambda unit: sum(weight.numel() * weight.element_size() for weight in unit))
    held = []
    try:
        for unit in (*units, largest):
            held += [torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) for weight in unit]
    except torch.OutOfMemoryError:
        return False
    return True


def free_memory() -> None:
    """Free what an interrupted measurement has left; call after its exception was handled."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def end_forward(network: Any) -> None:
    """End a forward pass that an exception interrupted, by a whole pass of one token.

    FSDP's hooks would otherwise take the next forward for a part of the interrupted one: they would not free its
    weights, nor wait for the optimiser's update. Inside `gathered_weights`, so without communication.
    """
    if is_sharded(network):
        place = torch.zeros(1, dtype=torch.long, device=network.device)
        with torch.no_grad():
            network(input_ids=place[None], logits_to_keep=place, use_cache=False)
