"""Temporary replacement of the weights of a layer by test weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor


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
