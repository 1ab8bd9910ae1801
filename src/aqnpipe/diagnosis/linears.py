"""Probes of single linear modules: selections, full mantissas, sums of integers, and a permutation of its own rows.

Every answer but those of the monomial probe and of the running sums in 16 bits is exact in any order of summation, so
every bit must agree.

Linears also run with other numbers of rows: one (decode), few, as many as a prefill, and enough to fill a large device.
Libraries choose a kernel by the shape of the operands, and a fault of one shows in no other. Every linear runs with 1,
4, 8 and 97 rows, the last an odd number beyond whole tiles. Larger batches take turns with the layers, from an offset
that the seed sets, so that the cost is bounded and repeated runs with other seeds cover the rest.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.inputs import ProbeInputs
from aqnpipe.diagnosis.patterns import (
    cancelling_operands,
    integer_operands,
    mantissas,
    running_operands,
    selection,
    selection_weight,
)
from aqnpipe.diagnosis.reference import PRODUCT_BITS, full_mantissas, mantissa_bits, substituted, zero_bias
from aqnpipe.error_bounds import linear_bound, sum_bound
from aqnpipe.seeding import keyed_generator

Replacement = tuple[Tensor, Tensor]

_LEAST_INPUTS = 8
"""Fewer cancel in no way that an accumulator could get wrong."""

_NUM_BIASED = 8
_NUM_RUNNING = 16
"""Tokens of the probes of the bias and of running sums, whose answer no position in the batch changes."""

SMALL = (1, 4, 8, 97)
LARGE = (512, 4096)
LAYERS_OF_LARGE = {512: 4, 4096: 1}
"""Number of layers of a diagnosis in which each large batch runs."""


def selecting(layer: int, name: str, module: nn.Linear, inputs: ProbeInputs) -> list[Check]:
    """Run the linear with outputs that each copy one input with a sign, and then times a weight of all mantissa bits.

    The first half of the tokens has full mantissas in the input, the second in the weight.
    """
    half = inputs.num_tokens // 2
    chosen, signs = selection(module.out_features, module.in_features)
    x = inputs.square(module.in_features)[:half]
    powers = inputs.powers(module.in_features)[half:]
    factors = signs * mantissas((module.out_features,), inputs.bits, torch.Generator().manual_seed(inputs.seed + layer))
    checks = []
    for probe, fed, weights in (("linear", x, signs), ("mantissa", powers, factors)):
        with substituted(selecting_weights(module, chosen, weights)):
            checks.append(compare(probe, layer, name, selected(fed, chosen, weights), module(fed)))
    return checks


def summing(layer: int, name: str, module: nn.Linear, inputs: ProbeInputs) -> list[Check]:
    """Run the linear in its real shape on small integers, and on sums that cancel but need wide accumulators."""
    size = (module.out_features, module.in_features, inputs.dtype)
    key = ("diagnosis.integer", layer, *name.encode())
    integers = integer_operands(inputs.num_tokens, *size, keyed_generator("cpu", inputs.seed, *key))
    checks = [_product("integer", layer, name, module, integers)]
    if module.in_features >= _LEAST_INPUTS:
        tokens = min(inputs.num_tokens, len(inputs.ladder))
        key = ("diagnosis.cancelling", layer, *name.encode())
        operands = cancelling_operands(tokens, *size, keyed_generator("cpu", inputs.seed, *key))
        checks.append(_product("accumulator", layer, name, module, operands))
        key = ("diagnosis.running", layer, *name.encode())
        operands = running_operands(_NUM_RUNNING, *size, keyed_generator("cpu", inputs.seed, *key))
        x, weight, _ = operands
        free = None
        if inputs.dtype != torch.float32:  # kernels that split a sum may round its parts to 16 bits
            free = sum_bound(x.abs() @ weight.abs().T, module.in_features, inputs.dtype)
        checks.append(_product("accumulator", layer, name, module, operands, free))
    return checks


def biased(layer: int, name: str, module: nn.Linear, inputs: ProbeInputs) -> list[Check]:
    """Run a linear with a bias of full mantissas on products of -1, 0 and 1; all sums are exact.

    The bias has one bit less than the dtype, for the carry.
    """
    if module.bias is None:
        return []
    key = ("diagnosis.bias", layer, *name.encode())
    generator = keyed_generator("cpu", inputs.seed, *key)
    chosen, signs = selection(module.out_features, module.in_features)
    x = torch.randint(-1, 2, (_NUM_BIASED, module.in_features), generator=generator).double()
    x[0] = 0
    own = 1.0 - 2 * torch.randint(0, 2, (module.out_features,), generator=generator).double()
    own *= mantissas((module.out_features,), mantissa_bits(inputs.dtype) - 1, generator)
    shown = [(module.weight, selection_weight(chosen, signs, module.weight)), (module.bias, own.to(module.bias))]
    with substituted(shown):
        output = module(x.unsqueeze(1).to(module.weight.device, inputs.dtype))
    return [compare("bias", layer, name, x[:, chosen] * signs + own, output)]


def monomial(layer: int, name: str, module: nn.Linear, fed: Tensor, own: Tensor) -> Check:
    """Run the linear on `fed` with its rows shifted by a third and scaled by +-1, +-2 or +-1/2, its output being `own`.

    A device that adds in another order at another place rounds differently: both results may be off by the forward
    error bound of their sum.
    """
    num_rows = module.out_features
    moved = torch.arange(num_rows).roll(num_rows // 3)
    scale = 1.0 - 2 * (torch.arange(num_rows) % 2)
    if module.weight.dtype != torch.float16:  # halving would lose bits of small float16 numbers
        scale = scale * 2.0 ** (torch.arange(num_rows) % 3 - 1)
    weight, bias = module.weight, module.bias
    factors = scale.to(weight.device, weight.dtype)
    rows = moved.to(weight.device)
    shown: list[Replacement] = [(weight, weight.data[rows] * factors.unsqueeze(1))]
    if bias is not None:
        shown.append((bias, bias.data[rows] * factors))
    with substituted(shown):
        output = module(fed)
        expected = own[..., rows] * factors
        allowed = None if torch.equal(expected, output) else 2 * linear_bound(fed, weight, bias)
    return compare("monomial", layer, name, expected, output, allowed=allowed)


def product_bits(module: nn.Linear) -> int:
    """Return how many significant bits of a float32 operand the products of the linear keep."""
    weight = module.weight
    x = torch.zeros(24, 1, module.in_features, device=weight.device, dtype=weight.dtype)
    x[:, 0, 0] = 1 + 2.0 ** -torch.arange(24).to(weight)  # row k needs k + 1 bits, row 0 holds 2
    chosen = torch.zeros(module.out_features, dtype=torch.long)
    with substituted(selecting_weights(module, chosen, torch.ones(module.out_features, dtype=torch.float64))):
        kept = module(x)[:, 0, 0] == x[:, 0, 0]
    return int(kept.cpu().long().cumprod(0).sum())


def selecting_weights(module: nn.Linear, chosen: Tensor, factors: Tensor) -> Iterator[Replacement]:
    """Replace the weight by `factors` at the chosen inputs, and the bias by 0."""
    yield module.weight, selection_weight(chosen, factors, module.weight)
    yield from zero_bias(module)


def zeroed(*modules: nn.Linear) -> Iterator[Replacement]:
    """Replace weights and biases by 0."""
    for module in modules:
        yield module.weight, torch.zeros_like(module.weight)
        yield from zero_bias(module)


def selected(x: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
    """Return what a selecting linear must output."""
    return x[..., chosen.to(x.device)] * factors.to(x.device, x.dtype)


def _product(
    probe: str,
    layer: int,
    name: str,
    module: nn.Linear,
    operands: tuple[Tensor, Tensor, Tensor],
    allowed: Tensor | None = None,
) -> Check:
    x, weight, product = operands
    own = module.weight
    with substituted([(own, weight.to(own.device, own.dtype)), *zero_bias(module)]):
        output = module(x.unsqueeze(1).to(own.device, own.dtype))
    return compare(probe, layer, name, product, output, allowed=allowed)


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
