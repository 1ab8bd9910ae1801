"""Recomputes linear modules in plain torch, and compares their outputs with those that the model used.

Every hook and mode of torch is bypassed, so this covers what the observer takes as given: that the operations which it
saw are the products of these inputs and weights, and that nothing is added to the module's output.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aqnpipe.config.measured_noise import OperatorError
from aqnpipe.config.noise import FakeQuantization, PlacedError, quantity_of, requested_size
from aqnpipe.noise.audit.comparison import Comparison
from aqnpipe.noise.audit.expected_values import deviations, expected_values, measured_size, spacing
from aqnpipe.noise.audit.observer import Claim, Observer
from aqnpipe.noise.audit.random_numbers import Draws, FloatArray, IntArray
from aqnpipe.noise.receipts.recorder_state import ReferenceSums

_PLAIN_LINEAR = torch.nn.functional.linear
_SAMPLED_ELEMENTS = 64
_SUMMATION = 64.0
"""Allowance for another order of summation, in roundings of the largest sampled product."""


class LinearCheck:
    """Compares the plain linear modules within a module while it is installed."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.comparison = Comparison()
        self._handles: list[Any] = []
        self.sums = ReferenceSums()

    def install(self, observer: Observer, root: nn.Module, name: str, error: PlacedError | None) -> None:
        """Compare every plain linear module of `root` (qualified name `name`); `error` is the request for operators."""
        for path, module in root.named_modules():
            if is_plain_linear(module):
                # The hooks of `root` itself come too late for its present call.
                started = [len(observer.claims)]
                label = f"{name}.{path}".strip(".")
                self._handles += [
                    module.register_forward_pre_hook(partial(self._enter, observer, started)),
                    module.register_forward_hook(
                        partial(self._compare, observer, started, label, error), prepend=True, with_kwargs=True
                    ),
                ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        """Start again, after the result has been recorded."""
        self.comparison.clear()
        self.sums = ReferenceSums()

    def _enter(self, observer: Observer, started: list[int], module: nn.Module, args: Any) -> None:
        started[:] = [len(observer.claims)]

    def _compare(
        self,
        observer: Observer,
        started: list[int],
        label: str,
        error: PlacedError | None,
        module: nn.Linear,
        args: tuple[Tensor, ...],
        kwargs: Mapping[str, Tensor],
        output: Tensor,
    ) -> None:
        if module.weight.is_meta:
            self.comparison.note(
                "linear modules with offloaded weights cannot be computed again in plain torch, expected all weights "
                "in memory"
            )
            return
        inputs = args[0] if args else kwargs["input"]
        claims = [claim for claim in observer.claims[started[0] :] if claim.operator.startswith("linear")]
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self.compare(inputs, module.weight, module.bias, output, claims[-1] if claims else None, error, label)

    def compare(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output: Tensor,
        claim: Claim | None,
        error: PlacedError | None,
        label: str,
    ) -> None:
        """Compare the `output` that was used with the product of `inputs` and `weight`, its claimed noise and `bias`.

        `output` may lack the outputs of the last rows of `weight` (a padded vocabulary).
        """
        if claim is None and error is not None and not isinstance(error, FakeQuantization):
            self.comparison.note(f"linear module {label}: no noise was put on its product")
            return
        if isinstance(error, FakeQuantization) or not output.numel():
            # The operands are changed, which the cells of the receipt show.
            self._note_scale(_PLAIN_LINEAR(inputs, weight, bias), output)
            return
        # A measured error includes the bias, as the measurement did. Others are put on the product before its bias.
        is_measured = claim is not None and isinstance(claim.error, OperatorError)
        with_bias = claim is None or is_measured
        product = _PLAIN_LINEAR(inputs, weight, bias if with_bias else None)[..., : output.shape[-1]]
        count = min(output.numel(), _SAMPLED_ELEMENTS)
        places = ((np.arange(count) + self._rng.random(count)) * (output.numel() / count)).astype(np.int64)
        rows, columns = np.divmod(places, output.shape[-1])
        index = (torch.from_numpy(rows).to(output.device), torch.from_numpy(columns).to(output.device))
        clean, used = (values.reshape(-1, output.shape[-1])[index] for values in (product, output))
        added = bias[index[1]] if bias is not None and not with_bias else None
        input_rms = np.zeros(count)
        if is_measured:
            sampled = inputs.reshape(-1, inputs.shape[-1])[index[0]].double()
            input_rms = sampled.square().mean(-1).sqrt().cpu().numpy()
        self._judge(clean, used, added, claim, places, label, input_rms)

    def compare_engine(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, is_noised: bool
    ) -> None:
        """Compare an output that may have the noise of several merged projections: its size, or exact equality."""
        product = _PLAIN_LINEAR(inputs, weight, bias)[..., : output.shape[-1]]
        if is_noised:
            self._note_scale(product, output)
        else:
            difference = (output.double() - product.double()).abs().max().item() if output.numel() else 0.0
            self.sums.elements += min(output.numel(), _SAMPLED_ELEMENTS)
            self.sums.largest_difference = max(self.sums.largest_difference, difference)

    def _judge(
        self,
        clean: Tensor,
        used: Tensor,
        bias: Tensor | None,
        claim: Claim | None,
        places: IntArray,
        label: str,
        input_rms: FloatArray,
    ) -> None:
        dtype = used.dtype
        product, found = (values.double().cpu().numpy() for values in (clean, used))
        self.sums.elements += len(found)
        if claim is None:
            difference = float(np.abs(found - product).max(initial=0.0))
            self.sums.largest_difference = max(self.sums.largest_difference, difference)
            return
        draws = Draws.of(claim.key, claim.call, claim.stream)
        expected, allowed = expected_values(product, claim.error, dtype, draws, places, input_rms)
        added: FloatArray | float = 0.0
        if bias is not None:
            added = bias.double().cpu().numpy()
            expected = expected + added
            allowed = allowed + spacing(expected, dtype)
        allowed = allowed + _SUMMATION * spacing(np.array(np.abs(product).max(initial=0.0)), dtype)
        wrong = deviations(product + added, found, expected, allowed, dtype) > 1
        # The sum with a large bias keeps too few digits of the noise to measure its size. The choice must not depend on
        # the draw: the larger numbers alone would measure too large a size.
        noised = found - added
        if isinstance(claim.error, OperatorError):
            # In units of the measured machine, as the cells of the receipt.
            unit = measured_size(claim.error.figures, product, input_rms)
            noised, product = unit + (noised - product), unit
        else:
            unit = np.abs(product) if quantity_of(claim.error) == "relative" else np.ones(product.shape)
        precise = requested_size(claim.error) * unit > 8 * spacing(expected, dtype)
        self._note(product[precise], noised[precise])
        self.comparison.numbers += len(found)
        if wrong.any():
            self.comparison.note(
                f"linear module {label}: {np.count_nonzero(wrong) / len(wrong):.0%} of the sampled outputs are not the "
                "product with its noise and bias, recomputed in plain torch"
            )

    def _note(self, product: FloatArray, found: FloatArray) -> None:
        known = product != 0
        self.sums.squares += float(np.square(found[known] / product[known] - 1).sum())
        self.sums.relative_elements += int(known.sum())

    def _note_scale(self, reference: Tensor, used: Tensor) -> None:
        product, found = (values.flatten()[:_SAMPLED_ELEMENTS].double().cpu().numpy() for values in (reference, used))
        self.sums.elements += len(found)
        self._note(product, found)


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module computes what `nn.Linear` does, with a weight that is a parameter of its own.

    A subclass with its own forward may return anything. A parametrized weight is computed in the layer, where a product
    in it has noise too.
    """
    return (
        isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and "weight" in module._parameters
    )
