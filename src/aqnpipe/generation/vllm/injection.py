"""Puts noise and faults on vLLM's modules for one batch, measures them, and always removes them.

The counterpart of `noise.injection`, with its parts (`PhaseState` places and measures errors, `FaultInjection` lets faults
strike). vLLM's operators are no torch functions but modules of known classes, so that each is reached at its module:

- linear modules at `quant_method.apply`, the product itself. Of merged ones (qkv_proj, gate_up_proj) each projection
  gets an error of its own and a line of its own in the receipt; the bias is added after it.
- attention is one operator, noised on its output (`attention: fused`); the two products inside are out of reach.
- RMSNorm, with or without the addition that vLLM fuses into it, on the normalised output.
- the activation, which vLLM fuses with the product that follows it, by computing both apart.

A decoder layer returns (hidden, residual) whose sum is what transformers' layer returns; faults strike the sum, which
is also what AQN on hidden states is put on.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aqnpipe.config.noise import ErrorModel, FakeQuantization, OperatorNoise, OutputErrorModel
from aqnpipe.errors import ModelError
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.vllm.modules import EngineModel, Linear
from aqnpipe.generation.vllm.reference_check import EngineReferenceCheck
from aqnpipe.models.layout import layer_of
from aqnpipe.noise.injection.checkpoint_replay import ACTIVE_MARK
from aqnpipe.noise.injection.fault_injection import FaultInjection
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.injection.hooks import keep
from aqnpipe.noise.injection.module_errors import ModuleErrors
from aqnpipe.noise.injection.phase_state import NoiseKey, PhaseState, Place
from aqnpipe.noise.kernels.stream import NoiseStream
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

_GATED: dict[str, tuple[str, Callable[..., Tensor]]] = {"SiluAndMul": ("silu", F.silu), "GeluAndMul": ("gelu", F.gelu)}
"""Activations of vLLM that multiply what they return with the other half of their input."""


def refuse_what_cannot_be_mapped(engine: EngineModel, noise: PassNoise) -> None:
    """Raise ModelError if any part of `noise` has no counterpart in vLLM's model."""
    name = f"vLLM's {type(engine.model).__name__}"
    advice = "generation.backend: transformers computes it"
    modules = noise.module_noise_in(noise.phase)
    if modules is not None:
        engine.select(modules.modules)
        if engine.out_of_reach:
            raise ModelError(f"{name}: noise does not reach {', '.join(engine.out_of_reach[:3])}; {advice}")
    for fault in noise.faults:
        engine.site_module(engine.model, fault.layer, fault.site)
    operators = noise.operator_noise_in(noise.phase)
    if operators is None:
        return
    if isinstance(operators.error, FakeQuantization):
        raise ModelError(f"{name}: {operators.error.kind} is not mapped to vLLM; {advice}")
    if operators.attention != "fused":
        raise ModelError(
            f"{name} computes attention as one operator, expected noise with attention: fused (a model with "
            f"attention: sdpa), found {operators.attention}; {advice}"
        )
    if engine.out_of_reach:
        raise ModelError(f"{name}: noise does not reach {', '.join(engine.out_of_reach[:3])}; {advice}")
    for index, layer in enumerate(engine.layers):
        unknown = [type(one).__name__ for one in layer.activations if type(one).__name__ not in _GATED]
        if operators.operators == "all" and (unknown or not layer.norms):
            raise ModelError(
                f"{name}: noise does not reach {', '.join(unknown) or 'the norms'} of layer {index}; {advice}"
            )


@contextmanager
def engine_noise(
    engine: EngineModel,
    noise: PassNoise,
    key: NoiseKey,
    recorder: ReceiptRecorder,
    faults: ActiveFaults,
    hidden_sigmas: Mapping[int, float] | None = None,
) -> Iterator[None]:
    """Let the model compute under exactly `noise` for the duration of the body, which no one may nest.

    `hidden_sigmas` is AQN on hidden states: relative noise on the sum that each decoder layer puts out. Raises
    ModelError for what vLLM's modules cannot be given.
    """
    refuse_what_cannot_be_mapped(engine, noise)
    if hasattr(engine.model, ACTIVE_MARK):
        raise ModelError(f"noise is already installed on this {type(engine.model).__name__}; injections do not nest")
    state = PhaseState(engine.model, noise.phase, key, recorder)
    recorder.note_installed(
        noise.phase, operator_noise=noise.operator_noise, module_noise=noise.module_noise, faults=noise.faults
    )
    with ExitStack() as stack:
        setattr(engine.model, ACTIVE_MARK, state)
        stack.callback(delattr, engine.model, ACTIVE_MARK)
        _EngineInjection(engine, state, noise, faults, hidden_sigmas or {}).install(stack)
        yield
    recorder.settle()


class _EngineInjection:
    """One batch on one worker's model: registers the hooks and keeps the place of the computation up to date."""

    def __init__(
        self,
        engine: EngineModel,
        state: PhaseState,
        noise: PassNoise,
        faults: ActiveFaults,
        hidden_sigmas: Mapping[int, float],
    ) -> None:
        self._engine = engine
        self._state = state
        self._noise: OperatorNoise | None = noise.operator_noise_in(noise.phase)
        modules = noise.module_noise_in(noise.phase)
        self._selected = engine.select(modules.modules) if modules is not None else []
        self._module_errors = ModuleErrors(state, modules, self._selected) if modules is not None else None
        self._noises_inputs = modules is not None and modules.point == "input"
        self._faulty = {(fault.layer, fault.site) for fault in noise.faults}
        self._sums = {layer for layer, site in self._faulty if site == "layer_output"}
        self._sums |= {layer for layer, sigma in hidden_sigmas.items() if sigma > 0}
        self._fault_injection = FaultInjection(state, faults, hidden_sigmas, engine.site_module)
        self._reference_check = EngineReferenceCheck(state, self._noise)

    def install(self, stack: ExitStack) -> None:
        """Register all hooks; `stack` removes them."""
        engine = self._engine
        keep(stack, engine.model.register_forward_pre_hook(self._enter_model))
        self._install_on_modules(stack)
        for index, layer in enumerate(engine.layers):
            self._install_place(stack, index, layer.module)
            self._install_on_linears(stack, index, layer.linears)
            if self._noise is not None and self._noise.error_in(index) is not None:
                self._install_on_operators(stack, index)
            if index in self._sums:
                keep(stack, layer.module.register_forward_hook(partial(_through_sum, layer.output)))
            self._fault_injection.install(stack, index)
        for logits in engine.logits:
            self._install_place(stack, len(engine.layers), logits)
            if engine.head_is_plain and not self._is_changed_within(engine.head, None):
                self._reference_check.install_on_head(stack, logits)
        self._install_on_linears(stack, None, [engine.head])

    def _is_changed_within(self, linear: Linear, layer: int | None) -> bool:
        """Tell whether inputs or outputs are changed within a linear module, so that they cannot be seen outside."""
        names = {part.name for part in linear.parts}
        struck = linear.is_merged and any((layer, name) in self._faulty for name in names)
        return struck or any(layer_of(one) == layer and one.rpartition(".")[2] in names for one in self._selected)

    def _install_on_linears(self, stack: ExitStack, layer: int | None, linears: list[Linear]) -> None:
        noised = self._noise is not None and self._noise.error_in(layer) is not None
        for linear in linears:
            within = self._is_changed_within(linear, layer)
            if noised or within:
                method = linear.module.quant_method
                product = self._product_of_parts if within else self._product
                method.apply = partial(product, linear, method.apply)
                stack.callback(delattr, method, "apply")
            if layer is not None and not within:
                self._reference_check.install(stack, linear)

    def _install_on_modules(self, stack: ExitStack) -> None:
        """Register module noise, ahead of faults, which strike last."""
        if self._module_errors is None:
            return
        projections, modules = self._engine.projections(), dict(self._engine.model.named_modules())
        for name in self._selected:
            if name in projections:
                part = projections[name]
                self._module_errors.install(stack, part.input if self._noises_inputs else part.output, name)
            elif self._noises_inputs:
                norm, tap = modules[name], self._engine.norm_inputs[name]
                norm.forward = partial(_norm_of_tapped, tap, norm.forward)
                stack.callback(delattr, norm, "forward")
                self._module_errors.install(stack, tap, name)
            else:
                self._module_errors.install(stack, modules[name], name)

    def _install_on_operators(self, stack: ExitStack, index: int) -> None:
        layer = self._engine.layers[index]
        for attention in layer.attentions:
            keep(stack, attention.register_forward_hook(partial(self._after, "scaled_dot_product_attention")))
        if self._noise is None or self._noise.operators != "all":
            return
        for norm in layer.norms.values():
            keep(stack, norm.register_forward_hook(partial(self._after, "rms_norm")))
        for activation in layer.activations:
            name, function = _GATED[type(activation).__name__]
            if name == "gelu":
                function = partial(function, approximate=activation.approximate)
            activation.forward = partial(self._gated, name, function)
            stack.callback(delattr, activation, "forward")

    def _install_place(self, stack: ExitStack, index: int, module: nn.Module) -> None:
        keep(stack, module.register_forward_pre_hook(partial(self._enter, index)))
        keep(stack, module.register_forward_hook(self._leave, always_call=True))

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        state = self._state
        if torch.compiler.is_compiling():
            raise ModelError(f"vLLM compiles {type(module).__name__}; noise needs enforce_eager")
        # Rows of a batch of vLLM may differ; all prompts are read first, mostly in one forward.
        state.start_forward(None if state.forward_index < 0 else 1)
        self._reference_check.enter_model()
        state.recorder.count_forward(state.phase)
        if state.forward_index == 0:
            state.recorder.watch_norms(state.phase, state.model)
        state.outside = state.place = self._place(None, len(self._engine.layers) + 1, None)

    def _enter(self, index: int, module: nn.Module, args: Any) -> None:
        layer = index if index < len(self._engine.layers) else None
        error = self._noise.error_in(layer) if self._noise is not None else None
        self._state.place = self._place(layer, index, error)

    def _place(self, layer: int | None, index: int, error: ErrorModel | None) -> Place:
        needs_key = error is not None or self._module_errors is not None
        return Place(layer, self._state.seed(self._state.phase, index) if needs_key else 0, error)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._state.place = self._state.outside

    def _put(self, operator: str, tensor: Tensor) -> Tensor:
        """Put the error of the place on a dense `tensor` in place, and return it."""
        state, place = self._state, self._state.place
        error: OutputErrorModel | None = place.error  # type: ignore[assignment]
        if error is None:
            raise RuntimeError(f"{operator} was computed outside a noised layer; this is a bug")
        place.calls += 1
        state.put_error(
            state.phase, operator, place.layer, error, NoiseStream(place.key, place.calls), tensor, repeats=True
        )
        return tensor

    def _product(
        self, linear: Linear, apply: Callable[..., Tensor], layer: Any, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Compute what `apply` would, with an error on every projection before its bias."""
        product = apply(layer, x, None)
        for part, columns in zip(linear.parts, linear.views(product), strict=True):
            self._put(f"linear.{part.name}", columns)
        return product if bias is None else product.add_(bias)

    def _product_of_parts(
        self, linear: Linear, apply: Callable[..., Tensor], layer: Any, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Compute what `apply` would where inputs or outputs of projections are changed within, errors and all.

        Where each has an input of its own, the merged product is computed in its parts.
        """
        if linear.is_merged and self._noises_inputs:
            inputs, weights = [part.input(x) for part in linear.parts], layer.weight.split(linear.widths)
            pieces = [F.linear(one, weight) for one, weight in zip(inputs, weights, strict=True)]
        else:
            inputs, weights = [x if linear.is_merged else linear.parts[0].input(x)], [layer.weight]
            pieces = linear.split(apply(layer, inputs[0], None))
        if self._state.place.error is not None:
            for part, piece in zip(linear.parts, pieces, strict=False):
                self._put(f"linear.{part.name}", piece)
        used = pieces if len(weights) > 1 else [_joined(pieces)]
        for one, weight, product in zip(inputs, weights, used, strict=True):
            self._reference_check.compare(one, weight, None, product)
        if bias is not None:
            pieces = [piece + its_bias for piece, its_bias in zip(pieces, linear.split(bias), strict=True)]
        pieces[: len(linear.parts)] = [part.output(piece) for part, piece in zip(linear.parts, pieces, strict=False)]
        return _joined(pieces)

    def _after(self, operator: str, module: nn.Module, args: Any, output: Any) -> None:
        self._put(operator, output[0] if isinstance(output, tuple) else output)

    def _gated(self, operator: str, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self._put(operator, function(gate.contiguous())) * up


def _joined(pieces: list[Tensor]) -> Tensor:
    return torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]


def _norm_of_tapped(
    tap: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a norm whose input `tap` may change; the sum that vLLM adds up in it goes on unchanged."""
    if residual is None:
        return forward(tap(x))
    total = x + residual
    return forward(tap(total)), total


def _through_sum(tap: nn.Module, module: nn.Module, args: Any, output: Any) -> Any:
    """Let `tap` see the sum of what a decoder layer returns, and return it in place of the two."""
    if not isinstance(output, tuple):
        return tap(output)
    hidden, residual = output
    total: Tensor = tap(hidden + residual)
    return total, torch.zeros_like(total)
