"""Test weights in place of a layer's own, which come back bit for bit on every way out."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def substituted(replacements: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let each parameter show the tensor beside it while the body runs.

    Only the reference to the storage is exchanged: the own values are never written, so nothing (an exception, an
    interrupt) can leave them changed, and extra memory is that of the test tensors alone.
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
