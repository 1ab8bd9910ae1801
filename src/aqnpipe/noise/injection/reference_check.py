"""The witness: recomputes linear modules by bare torch and compares. It knows nothing of how noise is put there."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.config.noise import ErrorModel, OperatorNoise, RelativeGaussian
from aqnpipe.noise.injection.hooks import keep
from aqnpipe.noise.injection.phase_state import PhaseState
from aqnpipe.noise.receipts.sampling import sample

_BARE_LINEAR = torch.nn.functional.linear
_ROUNDING_TO_ERROR = 0.05
"""How large the rounding of a sum may be against the error that is looked for in one of its terms."""

STRIDE = 8
"""One in so many linear modules is compared in the first forward that reads prompts, others at each step."""


class ReferenceCheck:
    """Compares linear modules in the first forwards of a phase; `operator_noise` is what they should have.

    All of them in the first forward of a single token per row, where that is cheap; an eighth of them in the first of
    more, another eighth at each step.
    """

    def __init__(self, state: PhaseState, operator_noise: OperatorNoise | None) -> None:
        self._state = state
        self._operator_noise = operator_noise
        self._handles: list[Any] = []

    def install(self, stack: ExitStack) -> None:
        """Register the hooks; to be called before those of module noise, which measures itself."""
        state = self._state
        linears = [module for module in state.layers.modules() if isinstance(module, nn.Linear)]
        if isinstance(state.head, nn.Linear) and (self._operator_noise is None or self._operator_noise.include_lm_head):
            linears.append(state.head)
        offset = (state.key.step + state.key.micro_step) % STRIDE
        for index, module in enumerate(linears):
            hook = partial(self._compare, index % STRIDE == offset)
            self._handles.append(module.register_forward_hook(hook, prepend=True))
            keep(stack, self._handles[-1])

    def enter_model(self) -> None:
        """Note the start of a forward."""
        if self._state.reads_one_token and not self._state.is_first_of_kind:
            # A hook costs time even if it has nothing left to do.
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _compare(self, has_its_turn: bool, module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        state = self._state
        if state.recomputing or not state.is_first_of_kind or not (state.reads_one_token or has_its_turn):
            return
        compare_with_reference(state, self._operator_noise, args[0], module.weight, module.bias, output)


def compare_with_reference(
    state: PhaseState,
    operator_noise: OperatorNoise | None,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    used: Tensor,
) -> None:
    """Record how a linear module's bare product differs from what is used of it; `used` has the bias, if there is one.

    `used` may lack the last rows of `weight`, as of a vocabulary that is padded: they are multiplied, since the order
    of a sum depends on the shape, but not compared.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        product = _BARE_LINEAR(inputs, weight, bias if operator_noise is None else None)
        bare, found = sample(product[..., : used.shape[-1]]), sample(used)
        if operator_noise is not None and bias is not None:
            bare, found = _without_bias(bare, found, sample(bias.expand_as(used)), operator_noise.error)
        state.recorder.record_reference_check(state.phase, bare, found)


def _without_bias(bare: Tensor, used: Tensor, bias: Tensor, error: ErrorModel) -> tuple[Tensor, Tensor]:
    """Return products and what was used of them, where both can be told: `used` had the bias added (same flat shapes).

    The bias comes after the noise, so it must not dilute the relative error. Of a product much smaller than its bias
    the sum keeps few digits, and their rounding would pass for relative noise; those are left out.
    """
    used = used - bias
    if not isinstance(error, RelativeGaussian) or not error.scale:
        return bare, used
    rounding = torch.finfo(used.dtype).eps * bias.abs()
    told = rounding <= _ROUNDING_TO_ERROR * error.scale * bare.abs()
    return bare[told], used[told]
