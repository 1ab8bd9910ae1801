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
    seen, _ = _gradients(module, torch.zeros(_NUM_TOKENS, inputs), weight.T, gradient)
    checks = [] if seen is None else [compare("backward", layer, f"{name}.input_gradient", of_input, seen)]
    x, gradient, of_weight = integer_operands(inputs, outputs, _NUM_TOKENS, dtype, generator)
    _, seen = _gradients(module, x.T, torch.zeros(outputs, inputs), gradient.T)
    if seen is not None:
        checks.append(compare("backward", layer, f"{name}.weight_gradient", of_weight, seen.T))
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
