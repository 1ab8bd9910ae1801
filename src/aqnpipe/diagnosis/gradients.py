"""The backward products of a linear, with known answers: gradients of its input and of its weight.

Operands are integers whose sums are exact in any order, as in the forward probe, so both gradients are known bit for
bit. The backward pass has kernels of its own: the operands of its products are transposed differently.
"""

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.patterns import integer_operands
from aqnpipe.diagnosis.substitute import substituted

_NUM_TOKENS = 32


def probe_gradients(name: str, module: nn.Linear, layer: int, generator: torch.Generator) -> list[Check]:
    """Return the checks of both gradients of a linear; gradients that the model has accumulated are left alone."""
    dtype, (outputs, inputs) = module.weight.dtype, module.weight.shape
    gradient, weight, of_input = integer_operands(_NUM_TOKENS, inputs, outputs, dtype, generator)
    found = _gradients(module, torch.zeros(_NUM_TOKENS, inputs), weight.T, gradient)
    checks = [compare("backward", layer, f"{name}.input_gradient", of_input, found[0])]
    x, gradient, of_weight = integer_operands(inputs, outputs, _NUM_TOKENS, dtype, generator)
    found = _gradients(module, x.T, torch.zeros(outputs, inputs), gradient.T)
    return [*checks, compare("backward", layer, f"{name}.weight_gradient", of_weight, found[1].T)]


def _gradients(module: nn.Linear, x: Tensor, test_weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of input [tokens, in] and weight [out, in] for `gradient` [tokens, out] of the output."""
    weight = module.weight
    required = weight.requires_grad
    x, test_weight, gradient = (
        tensor.contiguous().to(weight.device, weight.dtype) for tensor in (x, test_weight, gradient)
    )
    with torch.enable_grad(), substituted([(weight, test_weight)]):
        weight.requires_grad_(True)
        try:
            leaf = x.unsqueeze(1).requires_grad_(True)
            of_input, of_weight = torch.autograd.grad(module(leaf), (leaf, weight), gradient.unsqueeze(1))
        finally:
            weight.requires_grad_(required)
    return of_input.squeeze(1), of_weight
