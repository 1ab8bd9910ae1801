"""Applies noise and faults to vLLM's modules for one batch, measures them, and always removes them.

This is the counterpart of `noise.injection.phase`, and has `FaultInjection` in common with it. vLLM's operators are not
torch's but modules of known classes, so noise is applied at these modules:

- Linear modules: at `quant_method.apply`, the product itself. In merged modules (qkv_proj, gate_up_proj) each
  projection gets its own error and its own line in the receipt. The bias is added after the error.
- Attention: one operator, with noise on its output (`attention: fused`). The two products inside are out of reach.
- RMSNorm: on the normalised output, with or without the addition that vLLM fuses into it.
- Activation: vLLM fuses it with the product that follows; here both are computed separately.

With tensor parallelism a worker has some columns of most outputs. Noise is numbered by the elements of the whole, so
that several workers get the noise of one. Row-parallel products are added up over the workers before the noise, which
is then the same on all.

A decoder layer returns (hidden, residual), whose sum is the output of transformers' layer. Faults and AQN noise on
hidden states act on this sum.

Two checks find what this misses. `EngineAudit` observes forwards drawn at random: it classifies every operation of
noised layers and recomputes sampled numbers of the noise. And noise must reach all operators of a noised layer in every
forward.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aqnpipe.config.noise import OperatorNoise, PlacedError, TensorError
from aqnpipe.config.vllm_support import is_without_vllm
from aqnpipe.errors import ModelError
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.vllm.linears import Linear
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.generation.vllm.reference_check import EngineReferenceCheck
from aqnpipe.generation.vllm.replacement import replace
from aqnpipe.generation.vllm.state import EngineState, Place
from aqnpipe.generation.vllm.tensor_parallel import on_share, summed, whole_bias
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import layer_of
from aqnpipe.noise.injection.fault_injection import FaultInjection
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.injection.hooks import keep, on_input, on_output
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.kernels.stream import NoiseStream
from aqnpipe.noise.receipts.passes import PassRow
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

_GATED: dict[str, tuple[str, Callable[..., Tensor]]] = {"SiluAndMul": ("silu", F.silu), "GeluAndMul": ("gelu", F.gelu)}
"""vLLM's gated activations: they multiply the activation of one half of their input by the other half."""

_ACTIVE = "_aqnpipe_noise"
"""Attribute of a model while noise is installed on it."""

_FIRST_MODULE = 16
"""Streams of random numbers of modules have higher numbers than those of operators and hidden states."""


def check_noise_is_supported(engine: EngineModel, noise: PassNoise) -> None:
    """Raise ModelError if any part of `noise` is not supported on vLLM's model."""
    name = f"vLLM's {type(engine.model).__name__}"
    advice = "generation.backend: transformers supports it"
    operators, modules = noise.operator_noise_in(noise.phase), noise.module_noise_in(noise.phase)
    for part in (operators, modules):
        if part is not None and is_without_vllm(part.error):
            raise ModelError(f"{name}: {part.error.kind} is not supported on vLLM; {advice}")
        if part is not None and engine.out_of_reach:
            raise ModelError(f"{name}: noise does not reach {', '.join(engine.out_of_reach[:3])}; {advice}")
    if modules is not None:
        engine.select(modules.modules, modules.exclude)
    for fault in noise.faults:
        engine.site_module(engine.model, fault.layer, fault.site)
    if operators is None:
        return
    if operators.attention != "fused":
        raise ModelError(
            f"{name} computes attention as one operator, expected noise with attention: fused (a model with "
            f"attention: sdpa), found {operators.attention}; {advice}"
        )
    for index, layer in enumerate(engine.layers):
        missing = [kind for kind in (type(module).__name__ for module in layer.activations) if kind not in _GATED]
        missing += [] if layer.norms or layer.layer_norms else ["the norms"]
        missing += [] if layer.activations else ["the activation"]
        if operators.operators == "all" and missing:
            raise ModelError(f"{name}: noise does not reach {', '.join(missing)} of layer {index}; {advice}")


@contextmanager
def engine_noise(
    engine: EngineModel,
    noise: PassNoise,
    key: NoiseKey,
    recorder: ReceiptRecorder,
    faults: ActiveFaults,
    hidden_sigmas: Mapping[int, float] | None = None,
) -> Iterator[Mapping[str, set[Shard]]]:
    """Apply exactly `noise` and `faults` to the model in the body; contexts must not be nested.

    `hidden_sigmas` is AQN on hidden states: relative noise on the output sum of each decoder layer. Yields, by
    operator, the tensor-parallel shares that were noised so far. Raises ModelError for noise that is not supported on
    vLLM's modules.
    """
    check_noise_is_supported(engine, noise)
    if hasattr(engine.model, _ACTIVE):
        raise ModelError(f"noise is already installed on this {type(engine.model).__name__}; injections do not nest")
    state = EngineState(engine, noise, key, recorder, hidden_sigmas or {})
    recorder.note_installed(
        noise.phase, operator_noise=noise.operator_noise, module_noise=noise.module_noise, faults=noise.faults
    )
    with ExitStack() as stack:
        replace(stack, engine.model, _ACTIVE, True)
        _EngineInjection(engine, state, noise, faults, hidden_sigmas or {}).install(stack)
        yield state.shards
    recorder.settle()


class _EngineInjection:
    """One batch on one worker's model: registers the hooks and keeps the place of the computation up to date."""

    def __init__(
        self,
        engine: EngineModel,
        state: EngineState,
        noise: PassNoise,
        faults: ActiveFaults,
        hidden_sigmas: Mapping[int, float],
    ) -> None:
        self._engine = engine
        self._state = state
        self._noise: OperatorNoise | None = noise.operator_noise_in(noise.phase)
        modules = noise.module_noise_in(noise.phase)
        self._selected = engine.select(modules.modules, modules.exclude) if modules is not None else []
        self._modules = modules
        if modules is not None:
            state.recorder.expect_modules(len(self._selected))
        self._noises_inputs = modules is not None and modules.point == "input"
        self._faulty = {(fault.layer, fault.site) for fault in noise.faults}
        self._sums = {layer for layer, site in self._faulty if site == "layer_output"}
        self._sums |= {layer for layer, sigma in hidden_sigmas.items() if sigma > 0}
        self._fault_injection = FaultInjection(
            state, faults, hidden_sigmas, engine.site_module, partial(on_share, engine.shards)
        )
        self._reference_check = EngineReferenceCheck(state, self._noise)
        # By place: the operators that noise must reach in every forward, and those that it reached in the present one.
        self._expected: dict[int, set[str]] = defaultdict(set)
        self._reached: set[str] = set()
        # Of the present forward. vLLM computes logits several times in it, one request after the other, if
        # log-probabilities of prompts are requested; each call needs its own random numbers.
        self._places: dict[int, Place] = {}

    def install(self, stack: ExitStack) -> None:
        """Register all hooks; `stack` removes them."""
        engine = self._engine
        stack.callback(self._reference_check.report)
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
            if engine.head_is_plain and not self._is_changed_inside(engine.head, None):
                self._reference_check.install_on_head(stack, logits, engine.head)
        self._install_on_linears(stack, None, [engine.head])
        self._state.audit.install(stack)

    def _is_changed_inside(self, linear: Linear, layer: int | None) -> bool:
        """Return whether noise or faults change inputs or outputs inside a linear module, unseen by its own hooks."""
        names = {projection.name for projection in linear.projections}
        faulty = linear.is_merged and any((layer, name) in self._faulty for name in names)
        return faulty or any(layer_of(path) == layer and path.rpartition(".")[2] in names for path in self._selected)

    def _install_on_linears(self, stack: ExitStack, layer: int | None, linears: list[Linear]) -> None:
        noised = self._noise is not None and self._noise.error_in(layer) is not None
        for linear in linears:
            changed_inside = self._is_changed_inside(linear, layer)
            if layer is not None and (linear.is_summed or not changed_inside):
                self._reference_check.install(stack, linear)
            if noised or changed_inside:
                method = linear.module.quant_method
                product = self._changed_product if changed_inside else self._product
                replace(stack, method, "apply", partial(product, linear, method.apply))
                if linear.is_summed:
                    replace(stack, linear.module, "reduce_results", False)
            if noised:
                index = len(self._engine.layers) if layer is None else layer
                self._expected[index] |= {f"linear.{projection.name}" for projection in linear.projections}

    def _install_on_modules(self, stack: ExitStack) -> None:
        """Register module noise. It comes before the faults, which are applied last."""
        if self._modules is None:
            return
        projections, modules = self._engine.projections(), dict(self._engine.model.named_modules())
        for ordinal, name in enumerate(self._selected):
            projection = projections.get(name)
            if projection is not None and self._noises_inputs:
                tap, shard = projection.input, projection.input_shard
            elif projection is not None:
                tap, shard = projection.output, projection.output_shard
            else:
                norm = tap = modules[name]
                shard = self._engine.shards.get(norm)
                if self._noises_inputs:
                    tap = self._engine.norm_inputs[name]
                    replace(stack, norm, "forward", partial(_norm_of_tapped, tap, norm.forward))
            noised = partial(self._noised_module, name, ordinal, self._modules.error, shard)
            if self._noises_inputs:
                keep(stack, tap.register_forward_pre_hook(partial(on_input, noised)))
            else:
                keep(stack, tap.register_forward_hook(partial(on_output, noised)))

    def _noised_module(
        self, name: str, ordinal: int, error: TensorError, shard: Shard | None, tensor: Tensor
    ) -> Tensor:
        """Return a noised copy of the input or output `tensor` of a selected module."""
        state, place = self._state, self._state.place
        place.module_calls[ordinal] += 1
        source = NoiseStream(place.key, ordinal, _FIRST_MODULE + place.module_calls[ordinal])
        noised = tensor.clone()
        state.put_error(f"module.{name.rpartition('.')[2]}", layer_of(name), error, source, noised, shard)
        state.recorder.count_module(state.phase, name)
        return noised

    def _install_on_operators(self, stack: ExitStack, index: int) -> None:
        layer = self._engine.layers[index]
        expected = self._expected[index]
        for attention in layer.attentions:
            self._noise_forward(stack, expected, "scaled_dot_product_attention", attention)
        if self._noise is None or self._noise.operators != "all":
            return
        for norm in layer.norms.values():
            expected.add("rms_norm")
            keep(stack, norm.register_forward_hook(partial(self._after, "rms_norm", self._engine.shards.get(norm))))
        for norm in layer.layer_norms:
            self._noise_forward(stack, expected, "layer_norm", norm)
        for activation in layer.activations:
            name, function = _GATED[type(activation).__name__]
            if name == "gelu":
                function = partial(function, approximate=activation.approximate)
            expected.add(name)
            shard = self._engine.shards.get(activation)
            replace(stack, activation, "forward", partial(self._gated, name, shard, function))

    def _noise_forward(self, stack: ExitStack, expected: set[str], operator: str, module: nn.Module) -> None:
        """Make the forward of `module`, one operator, a noised call."""
        expected.add(operator)
        shard = self._engine.shards.get(module)
        replace(stack, module, "forward", partial(self._noised, operator, shard, module.forward))

    def _install_place(self, stack: ExitStack, index: int, module: nn.Module) -> None:
        keep(stack, module.register_forward_pre_hook(partial(self._enter, index)))
        keep(stack, module.register_forward_hook(partial(self._leave, index), always_call=True))

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        state = self._state
        if torch.compiler.is_compiling():
            raise ModelError(f"vLLM compiles {type(module).__name__}; noise needs enforce_eager")
        state.forward_index += 1
        self._places.clear()
        self._reference_check.enter_model()
        state.recorder.count_forward(state.phase)
        state.recorder.note_passes(PassRow(state.phase, state.key.step, passes=1))
        if state.forward_index == 0:
            state.recorder.watch_norms(state.phase, state.model)
        state.outside = state.place = self._place(None, len(self._engine.layers) + 1, None)

    def _enter(self, index: int, module: nn.Module, args: Any) -> None:
        layer = index if index < len(self._engine.layers) else None
        error = self._noise.error_in(layer) if self._noise is not None else None
        place, before = self._place(layer, index, error), self._places.get(index)
        if before is not None:
            place.calls, place.module_calls = before.calls, before.module_calls
        self._state.place = self._places[index] = place
        self._reached.clear()

    def _place(self, layer: int | None, index: int, error: PlacedError | None) -> Place:
        needs_key = error is not None or self._modules is not None
        return Place(layer, self._state.seed(self._state.phase, index) if needs_key else 0, error)

    def _leave(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        state = self._state
        if state.place.error is not None:
            for operator in self._expected[index] - self._reached:
                name = "lm_head" if state.place.layer is None else self._engine.layers[index].name
                state.recorder.count_escape(state.phase, f"{operator} in {name}")
        state.place = state.outside

    def _noised_call(self) -> AbstractContextManager[None]:
        observer = self._state.audit.observer
        return observer.noised_call() if observer is not None else nullcontext()

    def _apply_error(self, operator: str, tensor: Tensor, shard: Shard | None) -> Tensor:
        """Apply the error of the current place to a contiguous `tensor`, in place, and return the tensor.

        `shard`: the columns that this worker has of the whole tensor, None for all.
        """
        state, place = self._state, self._state.place
        error: TensorError | None = place.error  # type: ignore[assignment]
        if error is None:
            raise RuntimeError(f"{operator} was computed outside a noised layer; this is a bug")
        place.calls += 1
        self._reached.add(operator)
        source = NoiseStream(place.key, place.calls)
        state.put_error(operator, place.layer, error, source, tensor, shard)
        return tensor

    def _product(
        self, linear: Linear, apply: Callable[..., Tensor], layer: Any, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Compute the product of `apply`, with an error on every projection before its bias."""
        with self._noised_call():
            product = summed(linear, apply(layer, x, None))
            for projection, columns in zip(linear.projections, linear.views(product), strict=True):
                self._apply_error(f"linear.{projection.name}", columns, projection.output_shard)
        bias = whole_bias(linear, bias)
        return product if bias is None else product.add_(bias)

    def _changed_product(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._noised_call():
            return self._separate_products(*args, **kwargs)

    def _separate_products(
        self, linear: Linear, apply: Callable[..., Tensor], layer: Any, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Compute the product of `apply` projection by projection, with the hooks on their inputs and outputs.

        If module noise gives each projection its own input, a merged product becomes one product per projection.
        """
        projections = linear.projections
        if linear.is_merged and self._noises_inputs:
            inputs, weights = [projection.input(x) for projection in projections], layer.weight.split(linear.widths)
            outputs = [F.linear(values, weight) for values, weight in zip(inputs, weights, strict=True)]
        else:
            inputs, weights = [x if linear.is_merged else projections[0].input(x)], [layer.weight]
            outputs = linear.split(summed(linear, apply(layer, inputs[0], None)))
        # `outputs` may have padding columns as one more item, which `strict=False` skips.
        if self._state.place.error is not None:
            for projection, output in zip(projections, outputs, strict=False):
                self._apply_error(f"linear.{projection.name}", output, projection.output_shard)
        products = outputs if len(weights) > 1 else [_joined(outputs)]
        for values, weight, product in zip(inputs, weights, [] if linear.is_summed else products, strict=False):
            self._reference_check.compare(values, weight, None, product)
        bias = whole_bias(linear, bias)
        if bias is not None:
            outputs = [output + added for output, added in zip(outputs, linear.split(bias), strict=True)]
        hooked = [projection.output(output) for projection, output in zip(projections, outputs, strict=False)]
        return _joined([*hooked, *outputs[len(projections) :]])

    def _noised(
        self, operator: str, shard: Shard | None, function: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        with self._noised_call():
            return self._apply_error(operator, function(*args, **kwargs), shard)

    def _after(self, operator: str, shard: Shard | None, module: nn.Module, args: Any, output: Any) -> None:
        self._apply_error(operator, output[0] if isinstance(output, tuple) else output, shard)

    def _gated(self, operator: str, shard: Shard | None, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self._noised(operator, shard, function, gate.contiguous()) * up


def _joined(outputs: list[Tensor]) -> Tensor:
    return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]


def _norm_of_tapped(
    tap: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a norm whose input `tap` may change; the residual sum that vLLM computes in it stays unchanged."""
    if residual is None:
        return forward(tap(x))
    total = x + residual
    return forward(tap(total)), total


def _through_sum(tap: nn.Module, module: nn.Module, args: Any, output: Any) -> Any:
    """Pass the sum of a decoder layer's outputs through `tap`; return it with a residual of zero."""
    if not isinstance(output, tuple):
        return tap(output)
    hidden, residual = output
    # Not of the sum, which the audit must find unread.
    zero = torch.zeros_like(residual)
    return tap(hidden + residual), zero
