"""Cost of the exact probes: multiply-adds of the linear modules of the layers, in forwards of the whole model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from aqnpipe.errors import ModelError
from aqnpipe.models.sites import LayerSites


@dataclass
class Cost:
    """Multiply-adds so far in the linear modules of the layers, and those of one batch through all layers."""

    whole_model: int
    multiply_adds: int = field(default=0)

    @property
    def forward_equivalents(self) -> float:
        """Cost in forwards of the whole model."""
        return self.multiply_adds / self.whole_model


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a linear of GPT-2, whose weight is [in, out]; its products have no known answer."""
    return type(module).__name__ == "Conv1D"


def _weight(module: nn.Module) -> tuple[int, int] | None:
    """Return the number of inputs and the size of the weight of a linear; None for other modules."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not (isinstance(module, nn.Linear) or is_transposed(module)):
        return None
    return weight.shape[0 if is_transposed(module) else 1], weight.numel()


@contextmanager
def metered(layers: Sequence[LayerSites], num_tokens: int) -> Iterator[Cost]:
    """Count multiply-adds in the linear modules of `layers`; the unit is `num_tokens` tokens through all layers."""
    linears = {module: weight for sites in layers for module in sites.layer.modules() if (weight := _weight(module))}
    if not linears:
        raise ModelError("the decoder layers have no linear modules to probe; use a model of another family")
    cost = Cost(whole_model=num_tokens * sum(size for _, size in linears.values()))

    def count(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs, size = linears[module]
        cost.multiply_adds += args[0].numel() // inputs * size

    handles = [module.register_forward_pre_hook(count) for module in linears]
    try:
        yield cost
    finally:
        for handle in handles:
            handle.remove()
