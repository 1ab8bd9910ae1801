"""Audit of the graph of the loss: it depends on the weights through the logits, and through nothing else.

The gradient that reaches the logits is compared elsewhere. A term such as a penalty of the weights, or of the hidden
states, does not reach the logits.
"""

from typing import Any

from torch import Tensor

_PASSED_ON = "_DDPSink"
"""Node in which data parallelism passes the outputs of the network on."""


def reaches_around(loss: Tensor, logits: Tensor) -> bool:
    """Return whether autograd gets from `loss` to a weight on a path that `logits` are not on."""
    seen: set[Any] = {logits.grad_fn, None}
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or _PASSED_ON in node.name():
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            return True
        waiting += [following for following, _ in node.next_functions]
    return False
