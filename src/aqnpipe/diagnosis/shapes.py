"""Linears with other numbers of rows: one (decode), few, as many as a prefill, and enough to fill a large device.

Libraries choose a kernel by the shape of the operands, and a fault of one shows in no other. Every linear runs with 1,
4, 8 and 97 rows, the last an odd number beyond whole tiles. Larger batches take turns with the layers, from an offset
that the seed sets, so that the cost is bounded and repeated runs with other seeds cover the rest.
"""

import torch
from torch import nn

from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.patterns import selection, selection_weight
from aqnpipe.diagnosis.reference import PRODUCT_BITS, full_mantissas, mantissa_bits
from aqnpipe.diagnosis.substitute import substituted, zero_bias

SMALL = (1, 4, 8, 97)
LARGE = (512, 4096)
LAYERS_OF_LARGE = {512: 4, 4096: 1}
"""Number of layers of a diagnosis in which each large batch runs."""


def rows_of_layer(layer: int, num_layers: int, seed: int) -> tuple[int, ...]:
    """Return the numbers of rows with which the linears of a layer run."""
    large = tuple(rows for rows in LARGE if (layer - seed) % num_layers in _places(rows, num_layers))
    return SMALL + large


def _places(rows: int, num_layers: int) -> set[int]:
    count = min(LAYERS_OF_LARGE[rows], num_layers)
    return {place * num_layers // count for place in range(count)}


def probe_shape(name: str, module: nn.Linear, layer: int, rows: int, generator: torch.Generator) -> Check:
    """Run a linear on `rows` rows: every output copies one input, times a factor, both with full mantissas.

    The rows are one sequence, as in a prefill; one row is one token, as in decoding.
    """
    weight = module.weight
    bits = min(mantissa_bits(weight.dtype), PRODUCT_BITS)
    x = full_mantissas((rows, module.in_features), bits, generator)
    chosen, _ = selection(module.out_features, module.in_features)
    shift = int(torch.randint(0, module.in_features, (1,), generator=generator))
    chosen = (chosen + shift) % module.in_features  # another seed reads other columns where rows are few
    factors = full_mantissas((module.out_features,), bits, generator)
    with substituted([(weight, selection_weight(chosen, factors, weight)), *zero_bias(module)]):
        output = module(x.unsqueeze(0).to(weight.device, weight.dtype))
    expected = x[:, chosen].float() * factors.float()  # exact: the product has twice PRODUCT_BITS at most
    return compare("shapes", layer, name, expected, output)
