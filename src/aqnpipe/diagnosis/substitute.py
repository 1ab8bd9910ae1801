"""Temporary replacement of the weights of a layer by test weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def substituted(replacements: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Replace the data of each parameter by its tensor while the body runs.

    Only the reference to the storage is exchanged. The original values are never written, so no exception or interrupt
    can leave them changed, and the only extra memory is that of the test tensors.
    """
    pairs = list(replacements)
    own = [(parameter, parameter.data) for parameter, _ in pairs]
    try:
        for parameter, tensor in pairs:
            parameter.data = tensor
        yield
    finally:
        for parameter, tensor in own:
            parameter.data = tensor


def zero_bias(module: nn.Linear) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the replacement of the bias of a linear by zeros, if it has one."""
    if module.bias is not None:
        yield module.bias, torch.zeros_like(module.bias)
