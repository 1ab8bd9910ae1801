"""Counts floating-point operations from the shapes of the tensors that are computed, by torch's own formulas."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class FlopCounter(TorchDispatchMode):
    """Sums the operations of all matrix products and attentions while it is active, in `total`.

    Element-wise operators count as 0, as in torch's FlopCounterMode. That class also tracks modules, by hooks
    that stay in the autograd graph. This one leaves the forward pass unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and add its operations."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=output)
        return output
