"""The reference check: recomputes linear modules in plain torch and compares. It does not depend on the injection."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.config.noise import ErrorModel, OperatorNoise, RelativeGaussian
from aqnpipe.noise.injection.hooks import keep
from aqnpipe.noise.injection.phase_state import PhaseState
from aqnpipe.noise.receipts.rounding import ROUNDED_DTYPES
from aqnpipe.noise.receipts.sampling import sample

_PLAIN_LINEAR = torch.nn.functional.linear
_ROUNDING_TO_ERROR = 0.05
"""Largest rounding error of product + bias, as a share of the expected noise on the product."""

_ROUNDING_TO_ERROR_16_BIT = 0.5
"""The same for the root mean square of the rounding in 16 bits, which the expected scale takes into account."""

STRIDE = 8
"""One in STRIDE linear modules is compared in the first forward pass over prompts; each step compares other ones."""


class ReferenceCheck:
    """Compares linear modules in the first forward passes of a phase; `operator_noise` is their requested noise.

    The first pass over single tokens compares all modules, which is cheap. The first pass over more tokens compares an
    eighth of them, another eighth at each step.
    """

    def __init__(self, state: PhaseState, operator_noise: OperatorNoise | None) -> None:
        self._state = state
        self._operator_noise = operator_noise
        self._handles: list[Any] = []

    def install(self, stack: ExitStack) -> None:
        """Register the hooks. Call it before module noise is installed, which has measurements of its own."""
        state = self._state
        linears = [module for module in state.layers.modules() if _is_plain(module)]
        if _is_plain(state.head) and (self._operator_noise is None or self._operator_noise.include_lm_head):
            linears.append(state.head)
        offset = (state.key.step + state.key.micro_step) % STRIDE
        for index, module in enumerate(linears):
            hook = partial(self._compare, index % STRIDE == offset)
            self._handles.append(module.register_forward_hook(hook, prepend=True))
            keep(stack, self._handles[-1])

    def enter_model(self) -> None:
        """Note the start of a forward pass."""
        if self._state.reads_one_token and not self._state.is_first_of_kind:
            # Even an idle hook costs time.
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _compare(self, has_its_turn: bool, module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        state = self._state
        if state.recomputing or not state.is_first_of_kind or not (state.reads_one_token or has_its_turn):
            return
        compare_with_reference(state, self._operator_noise, args[0], module.weight, module.bias, output)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module computes what `nn.Linear` does. A subclass with a forward of its own may return anything."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def compare_with_reference(
    state: PhaseState,
    operator_noise: OperatorNoise | None,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    used: Tensor,
) -> None:
    """Record the difference of a linear module's recomputed output from the output `used`, which includes the bias.

    `used` may lack the outputs of the last rows of `weight` (a padded vocabulary). These rows are multiplied, because
    the order of summation depends on the shape, but not compared.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        product = _PLAIN_LINEAR(inputs, weight, bias if operator_noise is None else None)
        reference, found = sample(product[..., : used.shape[-1]]), sample(used)
        error = operator_noise.error if operator_noise is not None else None
        added = None
        if error is not None and bias is not None:
            reference, found, added = _without_bias(reference, found, sample(bias.expand_as(used)), error)
        state.recorder.record_reference_check(state.phase, reference, found, added)


def _without_bias(products: Tensor, used: Tensor, bias: Tensor, error: ErrorModel) -> tuple[Tensor, Tensor, Tensor]:
    """Return recomputed products, `used` minus its bias, and the bias, where the difference is precise enough.

    All have the same flat shape. The bias is added after the noise, so it must not dilute the relative error. If a
    product is much smaller than its bias, few of its digits remain in the sum, and their rounding could pass for
    relative noise. Such products are left out. The sum was rounded to the number format of `used`, even if
    the bias has another format.
    """
    rounds_to_16_bits = used.dtype in ROUNDED_DTYPES
    epsilon = torch.finfo(used.dtype).eps
    used = used.float() - bias.float() if rounds_to_16_bits else used - bias
    if not isinstance(error, RelativeGaussian) or not error.scale:
        return products, used, bias
    if rounds_to_16_bits:
        rounding = epsilon / 12**0.5 * (products.float().abs() + bias.float().abs())
        precise = rounding <= _ROUNDING_TO_ERROR_16_BIT * error.scale * products.float().abs()
    else:
        precise = epsilon * bias.abs() <= _ROUNDING_TO_ERROR * error.scale * products.abs()
    return products[precise], used[precise], bias[precise]
