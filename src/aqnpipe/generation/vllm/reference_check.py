"""Recomputes vLLM's linear modules with plain torch and compares. It shares no code with the injection of noise.

Every hook and mode of torch is bypassed, so this covers what the audit takes as given: that the operations which it saw
are the products of these inputs and weights, and that nothing is added to the module's output.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aqnpipe.config.noise import OperatorNoise
from aqnpipe.generation.vllm.linears import Linear
from aqnpipe.generation.vllm.replacement import replace
from aqnpipe.generation.vllm.state import EngineState
from aqnpipe.noise.injection.hooks import keep
from aqnpipe.noise.receipts.rows import ReferenceSums

_PLAIN_LINEAR = torch.nn.functional.linear
_SAMPLED_ELEMENTS = 64
_STRIDE = 8
"""One in _STRIDE linear modules is compared in the first forward over prompts."""


class EngineReferenceCheck:
    """Compares linear modules in the first forwards of a batch; `operator_noise` is the noise that they should have."""

    def __init__(self, state: EngineState, operator_noise: OperatorNoise | None) -> None:
        self._state = state
        self._operator_noise = operator_noise
        self._offset = (state.key.step + state.key.micro_step) % _STRIDE
        self._number = 0
        self._handles: list[Any] = []
        self._sums = ReferenceSums()

    def install(self, stack: ExitStack, linear: Linear) -> None:
        """Compare the output of one linear module, ahead of the hooks of any fault on it.

        Of a row-parallel module the product of this worker is compared, before those of all workers are added up.
        """
        number, self._number = self._number, self._number + 1
        is_selected = number % _STRIDE == self._offset
        if linear.is_summed:
            method = linear.module.quant_method
            replace(stack, method, "apply", partial(self._compared_product, is_selected, method.apply))
            return
        hook = partial(self._compare_linear, is_selected)
        self._keep(stack, linear.module.register_forward_hook(hook, prepend=True))

    def install_on_head(self, stack: ExitStack, logits: Any, head: Linear) -> None:
        """Compare the output projection, unless its logits are scaled or capped."""
        noised = self._operator_noise is None or self._operator_noise.include_lm_head
        if noised and logits.scale == 1.0 and logits.soft_cap is None:
            self._keep(stack, logits.register_forward_hook(partial(self._compare_head, head), prepend=True))

    def enter_model(self) -> None:
        """Start a forward; remove the hooks if no later forward needs them."""
        if self._state.forward_index > 1:
            # A hook takes time even if it does nothing.
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def report(self) -> None:
        """Give the recorder what was found."""
        self._state.recorder.add_audit(self._state.phase, 0, 0.0, {}, self._sums)

    def _keep(self, stack: ExitStack, handle: Any) -> None:
        self._handles.append(handle)
        keep(stack, handle)

    def _is_due(self, is_selected: bool) -> bool:
        """Return whether a module is compared in this forward.

        The first one reads the prompts and is the most expensive: only an eighth of the modules is compared in it,
        another eighth in each batch.
        """
        return is_selected or self._state.forward_index > 0

    def _compare_linear(self, is_selected: bool, module: Any, args: tuple[Tensor, ...], output: Any) -> None:
        if self._is_due(is_selected):
            used = output[0] if isinstance(output, tuple) else output
            self.compare(args[0], module.weight, None if module.skip_bias_add else module.bias, used)

    def _compared_product(
        self, is_selected: bool, apply: Callable[..., Tensor], layer: Any, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        product = apply(layer, x, bias)
        if self._is_due(is_selected):
            self.compare(x, layer.weight, bias, product, is_noised=False)
        return product

    def _compare_head(self, head: Linear, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        _, hidden, *_ = args
        shard = head.projections[0].output_shard
        self.compare(hidden, head.module.weight, None, output if shard is None else shard.of(output))

    def compare(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, used: Tensor, *, is_noised: bool | None = None
    ) -> None:
        """Compare the product of `x` and `weight` with `used`, the output in use, which includes any bias.

        `is_noised`: whether it should have noise; None if as all products of the current place. An output with the
        noise of several merged projections is compared by its size, any other exactly.

        Code that changes inputs or outputs inside a linear module calls this itself: the module's own input and output
        then no longer belong to one product.
        """
        if self._state.forward_index > 1:
            return
        if is_noised is None:
            is_noised = self._operator_noise is not None and self._state.place.error is not None
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            product = _PLAIN_LINEAR(x, weight, bias)[..., : used.shape[-1]]
            self._sums.elements += min(used.numel(), _SAMPLED_ELEMENTS)
            if is_noised:
                self._note_scale(product, used)
            elif used.numel():
                difference = (used.double() - product.double()).abs().max().item()
                self._sums.largest_difference = max(self._sums.largest_difference, difference)

    def _note_scale(self, reference: Tensor, used: Tensor) -> None:
        product, found = (values.flatten()[:_SAMPLED_ELEMENTS].double().cpu().numpy() for values in (reference, used))
        known = product != 0
        self._sums.squares += float(np.square(found[known] / product[known] - 1).sum())
        self._sums.relative_elements += int(known.sum())
