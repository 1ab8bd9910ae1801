"""The backward products of a linear, with known answers: gradients of its input and of its weight.

Operands are integers whose sums are exact in any order, selections with full mantissas, and sums that need wide
accumulators, as in the forward probes. The backward pass has kernels of its own: the operands of its products are
transposed differently.
"""

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.patterns import accumulating_operands, integer_operands, selection, selection_weight
from aqnpipe.diagnosis.reference import PRODUCT_BITS, full_mantissas, operand_bits, substituted

_NUM_TOKENS = 32
SMALL = (1, _NUM_TOKENS)
LARGE = 513
"""Tokens of the selections: kernels are chosen by their number. The large one runs in one layer."""
_LEAST_TERMS = 8


def probe_gradients(
    name: str, module: nn.Linear, layer: int, generator: torch.Generator, *, large: bool = False
) -> list[Check]:
    """Return the checks of both gradients of a linear, of many tokens too if `large`; those that the model has
    accumulated are left alone.
    """
    checks = _summing(name, module, layer, generator)
    for tokens in (*SMALL, LARGE) if large else SMALL:
        checks += _selecting(name, module, layer, tokens, generator)
    if min(module.weight.shape) >= _LEAST_TERMS:
        checks += _accumulating(name, module, layer, generator)
    return checks


def _selecting(name: str, module: nn.Linear, layer: int, tokens: int, generator: torch.Generator) -> list[Check]:
    """Give every value of both gradients one product, of operands with full mantissas.

    The products have 24 bits, or as many as exact products of the dtype have.
    """
    outputs, inputs = module.weight.shape
    dtype = module.weight.dtype
    gradient = full_mantissas((tokens, outputs), min(operand_bits(dtype), 24 - PRODUCT_BITS), generator)
    bits = min(operand_bits(dtype), PRODUCT_BITS)
    of_outputs, factors = selection(inputs, outputs)[0], full_mantissas((inputs,), bits, generator)
    weight = selection_weight(of_outputs, factors, torch.zeros(inputs, outputs, dtype=torch.float64)).T
    of_tokens, values = selection(inputs, tokens)[0], full_mantissas((inputs,), bits, generator)
    x = selection_weight(of_tokens, values, torch.zeros(inputs, tokens, dtype=torch.float64)).T
    seen = _gradients(module, x, weight, gradient)
    wanted = (gradient[:, of_outputs] * factors, gradient[of_tokens].T * values)
    return [
        compare("backward", layer, f"{name}.{operand}_gradient", answer, found)
        for operand, answer, found in zip(("input", "weight"), wanted, seen, strict=True)
        if found is not None
    ]


def _summing(name: str, module: nn.Linear, layer: int, generator: torch.Generator) -> list[Check]:
    """Run both gradients on integers in their real shape."""
    dtype, (outputs, inputs) = module.weight.dtype, module.weight.shape
    gradient, weight, of_input = integer_operands(_NUM_TOKENS, inputs, outputs, dtype, generator)
    seen, _ = _gradients(module, torch.zeros(_NUM_TOKENS, inputs), weight.T, gradient)
    checks = [] if seen is None else [compare("backward", layer, f"{name}.input_gradient", of_input, seen)]
    x, gradient, of_weight = integer_operands(inputs, outputs, _NUM_TOKENS, dtype, generator)
    _, seen = _gradients(module, x.T, torch.zeros(outputs, inputs), gradient.T)
    if seen is not None:
        checks.append(compare("backward", layer, f"{name}.weight_gradient", of_weight, seen.T))
    return checks


def _accumulating(name: str, module: nn.Linear, layer: int, generator: torch.Generator) -> list[Check]:
    """Run both gradients on sums that a narrow accumulator gets wrong."""
    dtype, (outputs, inputs) = module.weight.dtype, module.weight.shape
    gradient, weight, of_input, allowed = accumulating_operands(_NUM_TOKENS, inputs, outputs, dtype, generator)
    seen, _ = _gradients(module, torch.zeros(_NUM_TOKENS, inputs), weight.T, gradient)
    site = f"{name}.input_gradient"
    checks = [] if seen is None else [compare("backward", layer, site, of_input, seen, allowed=allowed)]
    x, gradient, of_weight, allowed = accumulating_operands(inputs, outputs, _NUM_TOKENS, dtype, generator)
    _, seen = _gradients(module, x.T, torch.zeros(outputs, inputs), gradient.T)
    if seen is not None:
        site = f"{name}.weight_gradient"
        checks.append(compare("backward", layer, site, of_weight, seen.T, allowed=allowed))
    return checks


def _gradients(
    module: nn.Linear, x: Tensor, test_weight: Tensor, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input [tokens, in] and weight [out, in] for `gradient` [tokens, out] of the output.

    None where the module (a hook of it) cuts the graph, so that there is no gradient.
    """
    weight = module.weight
    required = weight.requires_grad
    x, test_weight, gradient = (
        tensor.contiguous().to(weight.device, weight.dtype) for tensor in (x, test_weight, gradient)
    )
    with torch.enable_grad(), substituted([(weight, test_weight)]):
        weight.requires_grad_(True)
        try:
            leaf = x.unsqueeze(1).requires_grad_(True)
            output = module(leaf)
            if not output.requires_grad:
                return None, None
            # The graph is kept, because a hook that keeps earlier outputs may have made it a part of a later one.
            found = torch.autograd.grad(
                output, (leaf, weight), gradient.unsqueeze(1), allow_unused=True, retain_graph=True
            )
        finally:
            weight.requires_grad_(required)
    return None if found[0] is None else found[0].squeeze(1), found[1]
