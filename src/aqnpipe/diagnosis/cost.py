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


@contextmanager
def metered(layers: Sequence[LayerSites], num_tokens: int) -> Iterator[Cost]:
    """Count multiply-adds in the linear modules of `layers`; the unit is `num_tokens` tokens through all layers."""
    linears = [module for sites in layers for module in sites.layer.modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ModelError("the decoder layers have no linear modules to probe; use a model of another family")
    cost = Cost(whole_model=num_tokens * sum(module.weight.numel() for module in linears))

    def count(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, nn.Linear):
            cost.multiply_adds += args[0].numel() // module.in_features * module.weight.numel()

    handles = [module.register_forward_pre_hook(count) for module in linears]
    try:
        yield cost
    finally:
        for handle in handles:
            handle.remove()
