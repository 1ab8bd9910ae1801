"""Chooses the elements of a tensor that are measured."""

from functools import lru_cache

import torch
from torch import Tensor

from aqnpipe.seeding import keyed_generator

MEASURED_ELEMENTS_PER_CALL = 256


def sample(tensor: Tensor) -> Tensor:
    """Return a copy of at most MEASURED_ELEMENTS_PER_CALL elements, spread over the whole tensor."""
    values, numel = tensor.detach().reshape(-1), tensor.numel()
    if numel <= MEASURED_ELEMENTS_PER_CALL:
        return values.clone()
    return values.index_select(0, sample_positions(numel, values.device))


@lru_cache(maxsize=4096)
def sample_positions(num_elements: int, device: torch.device) -> Tensor:
    """Return one position in each of MEASURED_ELEMENTS_PER_CALL equal stretches of a flat tensor, in rising order.

    Random, because a regular stride aliases with the row length: it could hit, for example, only rows without a
    gradient.
    """
    drawn = torch.rand(
        MEASURED_ELEMENTS_PER_CALL, generator=keyed_generator("cpu", 0, "sample", num_elements), dtype=torch.float64
    )
    places = (torch.arange(MEASURED_ELEMENTS_PER_CALL) + drawn) * (num_elements / MEASURED_ELEMENTS_PER_CALL)
    return places.long().clamp_max(num_elements - 1).to(device)
