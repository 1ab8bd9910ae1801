"""Runs a batch of vLLM's model on a simulated machine: `noise.injection.phase` on the sites of an engine.

vLLM's products are those of torch. What is different is where they are:

- Merged modules (qkv_proj, gate_up_proj) compute several projections in one product, which has one error. Module noise
  and faults of single projections act on their columns, through `Tap` modules. Where operands are rounded, every
  projection is a product with a rounded weight of its own.
- Attention is a kernel of the engine over its own cache. Its module is one operator, with noise on its result
  (`attention: fused`). The two products inside are out of reach.
- Keys and values are rounded where a module of attention gets them, before it writes them into its cache.
- RMSNorms have noise on their normalised output, with or without the addition that vLLM fuses into them.
- An activation is fused with the product that follows; here both are computed separately.
- The output projection is called when the forward of the model has returned; columns that pad its vocabulary have no
  noise.
- A decoder layer returns (hidden, residual), whose sum is the output of transformers' layer. Faults and AQN noise on
  hidden states act on this sum.

With tensor parallelism a worker has some columns of most results. Noise is numbered by the elements of the whole, so
that several workers get the noise of one. Row-parallel products are added up over the workers before the noise, which
is then the same on all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aqnpipe.config.generation import is_without_vllm
from aqnpipe.config.noise import FakeQuantization, ModuleNoise, OperatorNoise, Phase
from aqnpipe.errors import ModelError
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.vllm.modules import EngineModel, Linear
from aqnpipe.machine.machine import Machine, NoiseKey, Request
from aqnpipe.machine.norms import ATTENTION, SUM
from aqnpipe.models.layout import layer_of
from aqnpipe.models.parts import Replace, Update
from aqnpipe.noise.injection.faults import ActiveFaults, keep, on_input, on_output
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.injection.sites import ModelSites
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

_SAMPLES = 64
"""Elements of each observed result that the audit of an engine compares."""

_GATED: dict[str, Callable[..., Tensor]] = {"SiluAndMul": F.silu, "GeluAndMul": F.gelu}
"""vLLM's gated activations: they multiply the activation of one half of their input by the other half."""


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
    if noise.cache_noise_in(noise.phase) is not None:
        for index, layer in enumerate(engine.layers):
            if len(layer.attentions) != 1 or getattr(layer.attentions[0], "kv_sharing_target_layer_name", None):
                raise ModelError(f"{name}: kv_cache: layer {index} stores no keys and values; {advice}")
    if modules is not None:
        engine.select(modules.modules, modules.exclude)
    for fault in noise.faults:
        engine.site_module(engine.model, fault.layer, fault.site)
    if operators is None:
        return
    if isinstance(operators.error, FakeQuantization):
        if engine.shards:
            raise ModelError(f"{name}: rounding of operands needs whole ones, expected tensor_parallel: 1")
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
    sites = EngineSites(engine, noise, hidden_sigmas or {})
    with phase_noise(sites, noise, noise.phase, key, recorder, faults=faults, hidden_sigmas=hidden_sigmas):
        yield sites.noised_shards


class _Columns:
    """The columns that a worker has of a result: `own` of each projection by its name, and `placed` in all of them."""

    def __init__(self, own: Mapping[str, Shard]) -> None:
        self.own, start, placed = own, 0, []
        width = sum(shard.width for shard in own.values())
        for shard in own.values():
            placed.append(Shard(start + shard.start, shard.size, width))
            start += shard.width
        self.placed = tuple(placed)


class _CountedPasses:
    """Does not observe the passes of an engine, which mixes rows of different lengths: they are counted."""

    columns: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def begin(self, args: Any, kwargs: Any) -> None:
        """Begin a pass."""

    def leave_part(self, output: Any, *, is_noised: bool) -> None:
        """Leave a part of the model."""

    def end(self, output: Any) -> None:
        """End a pass."""


class EngineSites(ModelSites):
    """The sites of a model of vLLM on one worker, for one batch.

    `noised_shards`: by operator, the shares of results that a tensor-parallel worker has put errors on.
    """

    reads_back_cache = False

    def __init__(self, engine: EngineModel, noise: PassNoise, hidden_sigmas: Mapping[int, float]) -> None:
        self.model = engine.model
        self.layers = [layer.module for layer in engine.layers]
        self.head = engine.logits[0] if engine.logits else engine.head.module
        self.shared = engine.on_share
        self.noised_shards: dict[str, set[Shard]] = {}
        self._engine, self._noise, self._hidden_sigmas = engine, noise, hidden_sigmas
        self._operators: OperatorNoise | None = noise.operator_noise_in(noise.phase)
        modules: ModuleNoise | None = noise.module_noise_in(noise.phase)
        self._selected = engine.select(modules.modules, modules.exclude) if modules is not None else []
        self._is_quantized = self._operators is not None and isinstance(self._operators.error, FakeQuantization)
        self._noises_inputs = modules is not None and modules.point == "input"
        # Merged modules then compute every projection by itself: of an input of its own, or of a rounded weight.
        self._separates = self._is_quantized or self._noises_inputs
        self._faulty = {(fault.layer, fault.site) for fault in noise.faults}
        self._sums = {layer for layer, site in self._faulty if site == "layer_output"}
        self._sums |= {layer for layer, sigma in hidden_sigmas.items() if sigma > 0}
        # Of the modules that compute now and have columns of a whole.
        self._running: list[_Columns] = []
        self._in_front: list[Replace] = []

    # -- what a phase asks for -----------------------------------------------------------------------------------------

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """See `ModelSites`."""
        return (self.model,)

    @property
    def attention(self) -> str | None:
        """See `ModelSites`."""
        return "fused"

    def modules(self, noise: ModuleNoise) -> Mapping[str, nn.Module]:
        """See `ModelSites`: norms, and taps at projections and at inputs of norms."""
        projections, modules = self._engine.projections(), dict(self.model.named_modules())
        inputs: Mapping[str, nn.Module] = self._engine.norm_inputs
        found: dict[str, nn.Module] = {}
        for name in self._selected:
            if name not in projections:
                found[name] = inputs[name] if self._noises_inputs else modules[name]
                continue
            found[name] = projections[name].input if self._noises_inputs else projections[name].output
            for shard in self.shards_of(found[name]) or ():
                self.noised_shards.setdefault(f"module.{projections[name].name}", set()).add(shard)
        return found

    def site(self, model: nn.Module, layer: int, site: str) -> nn.Module:
        """See `ModelSites`."""
        return self._engine.site_module(model, layer, site)

    def layer_output(self, layer: int) -> nn.Module:
        """See `ModelSites`; the sum of what a layer returns, if something acts on it."""
        return self._engine.layers[layer].output if layer in self._sums else self.layers[layer]

    def shards_of(self, module: nn.Module) -> tuple[Shard, ...] | None:
        """See `ModelSites`."""
        shard = self._engine.shards.get(module)
        for projection in self._engine.projections().values():
            if module in (projection.input, projection.output):
                shard = projection.input_shard if module is projection.input else projection.output_shard
        return None if shard is None else (shard,)

    def requested_sigma(self, recorder: ReceiptRecorder, step: int, target: int | str) -> float:
        """See `ModelSites`: the trainer sends the sigmas of a rollout."""
        if isinstance(target, int):
            return self._hidden_sigmas.get(target, 0.0)
        return self._noise.norm_sigmas.get(target, 0.0)

    def reads_one_token(self, number: int, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """See `ModelSites`. All prompts are read first, mostly in one forward; rows may differ in their numbers."""
        return number > 0

    def observation(self, phase: Phase, *, rounds: bool, rounds_cache: bool) -> _CountedPasses:
        """See `ModelSites`."""
        return _CountedPasses()

    def put_in_front_of_caches(self, replace: Replace) -> list[Any]:
        """See `ModelSites`: what a module of attention is called with, it writes into its cache and reads."""
        self._in_front.append(replace)
        if len(self._in_front) > 1:
            return []
        attentions = [layer.attentions[0] for layer in self._engine.layers]
        return [
            attention.register_forward_pre_hook(partial(_stored, self._in_front, number))
            for number, attention in enumerate(attentions)
        ]

    def request(self, request: Request) -> Request:
        """See `ModelSites`."""
        results = {module: kind for module, (_, kind, _) in self._results.items()}
        return request._replace(results=results, shards=self._present_shards)

    def audit_settings(self) -> Mapping[str, Any]:
        """See `ModelSites`."""
        return {
            "counts_operations": False,
            "linears": self._plain_linears(),
            "results": {module: (part, name) for module, (part, _, name) in self._results.items()},
            "shards": {module: (part, columns.placed) for module, (part, columns) in self._columns.items()},
            "late": {len(self.layers)},
            "watches_launches": True,
            "num_samples": _SAMPLES,
        }

    def _present_shards(self) -> tuple[Shard, ...] | None:
        """Return the columns of the result that gets an error now."""
        if not self._running:
            return None
        columns = self._running[-1]
        for name, shard in columns.own.items():
            if shard.size < shard.width:
                self.noised_shards.setdefault(name, set()).add(shard)
        return columns.placed

    # -- structure -----------------------------------------------------------------------------------------------------

    @cached_property
    def _linears(self) -> list[tuple[int, Linear]]:
        """The linear modules with their parts."""
        found = [(index, linear) for index, layer in enumerate(self._engine.layers) for linear in layer.linears]
        return [*found, (len(self.layers), self._engine.head)]

    def _has_error(self, part: int) -> bool:
        return self._operators is not None and part in self._operators.errors_by_part(len(self.layers))

    @cached_property
    def _results(self) -> dict[nn.Module, tuple[int, str, str]]:
        """The modules that compute one operator as a whole: part, operator, and name in words."""
        found: dict[nn.Module, tuple[int, str, str]] = {}
        for part, layer in enumerate(self._engine.layers):
            # A rounding of operands has no result of its own.
            if self._has_error(part) and not self._is_quantized:
                found |= dict.fromkeys(layer.attentions, (part, ATTENTION, f"attention in {layer.name}"))
                for linear in layer.linears:
                    if linear.is_summed:
                        name = f"{linear.projections[0].name} in {layer.name}"
                        found[linear.module] = (part, SUM, name)
        return found

    @cached_property
    def _columns(self) -> dict[nn.Module, tuple[int, _Columns]]:
        """The modules whose result is columns of a whole, with their parts."""
        found: dict[nn.Module, tuple[int, _Columns]] = {}
        for part, linear in self._linears:
            own = {f"linear.{each.name}": each.output_shard for each in linear.projections if each.output_shard}
            if linear is self._engine.head:
                width = linear.width
                found[self.head] = (part, _Columns(own or {"linear.lm_head": Shard(0, width, width)}))
            elif own:
                found[linear.module] = (part, _Columns(own))
                for each, (name, shard) in zip(linear.projections, own.items(), strict=True):
                    found[each.product] = (part, _Columns({name: shard}))
        for part, layer in enumerate(self._engine.layers):
            for module in (*layer.attentions, *layer.activations, *layer.norms.values(), *layer.layer_norms):
                if module in layer.shards:
                    found[module] = (part, _Columns({type(module).__name__: layer.shards[module]}))
        return found

    def _is_changed_inside(self, part: int, linear: Linear) -> bool:
        """Return whether noise or faults act on single projections, or on the output projection."""
        if linear.is_merged and self._is_quantized:
            return True
        layer = part if part < len(self.layers) else None
        names = {projection.name for projection in linear.projections}
        faulty = linear.is_merged and any((layer, name) in self._faulty for name in names)
        return faulty or any(layer_of(path) == layer and path.rpartition(".")[2] in names for path in self._selected)

    def _plain_linears(self) -> dict[nn.Module, tuple[int, str]]:
        """Return the linear modules whose output is that of one product on this worker, with part and path."""
        paths, head = {module: path for path, module in self.model.named_modules()}, self._engine.head
        found = {}
        for part, linear in self._linears:
            is_split = linear.is_merged and self._separates and self._is_changed_inside(part, linear)
            if linear is not head and not linear.is_summed and not is_split:
                found[linear.module] = (part, paths[linear.module])
        is_changed = self._is_changed_inside(len(self.layers), head) or head.projections[0].output_shard is not None
        scale, cap = getattr(self.head, "scale", None), getattr(self.head, "soft_cap", None)
        if self._engine.head_is_plain and not is_changed and scale == 1.0 and cap is None:
            found[self.head] = (len(self.layers), paths[self.head])
        return found

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def install_before(self, stack: ExitStack, machine: Machine) -> None:
        """See `ModelSites`."""
        keep(stack, self.model.register_forward_pre_hook(_refuse_compiled))
        for module, (_, columns) in self._columns.items():
            keep(stack, module.register_forward_pre_hook(partial(self._enter, columns), prepend=True))
        for module, (_, kind, _) in self._results.items():
            replace(stack, module, "forward", partial(_exact, machine, module.forward))
            if kind == SUM and module.bias is not None and not module.skip_bias_add:
                # vLLM gives it to one worker, which adds it to the sum; here it comes behind the error.
                replace(stack, module, "skip_bias_add", True)
        for part, linear in self._linears:
            if self._is_changed_inside(part, linear):
                self._install_taps(stack, linear)
        if self._noises_inputs:
            modules = dict(self.model.named_modules())
            for name in self._selected:
                if (tap := self._engine.norm_inputs.get(name)) is not None:
                    replace(stack, modules[name], "forward", partial(_norm_of_tapped, tap, modules[name].forward))
        if self._operators is not None and self._operators.operators == "all":
            for part, layer in enumerate(self._engine.layers):
                for activation in layer.activations if self._has_error(part) else ():
                    replace(stack, activation, "forward", partial(_gated, activation))

    def install_behind(self, stack: ExitStack) -> None:
        """See `ModelSites`."""
        for module in self._columns:
            keep(stack, module.register_forward_hook(self._leave, always_call=True))
        for module, (_, kind, _) in self._results.items():
            if kind == SUM:
                keep(stack, module.register_forward_hook(_add_bias))
        for part, linear in self._linears:
            if linear is not self._engine.head and self._is_changed_inside(part, linear):
                keep(stack, linear.module.register_forward_hook(partial(_through_outputs, linear)))
        for layer in self._sums:
            output = self._engine.layers[layer].output
            keep(stack, self.layers[layer].register_forward_hook(partial(_through_sum, output)))

    def _install_taps(self, stack: ExitStack, linear: Linear) -> None:
        """Pass the input of a linear module through its tap; of a merged one, only if projections get their own."""
        method = linear.module.quant_method
        if linear is self._engine.head:
            replace(stack, method, "apply", partial(_tapped_head, linear, method.apply))
        elif not linear.is_merged:
            tap = linear.projections[0].input
            keep(stack, linear.module.register_forward_pre_hook(partial(on_input, tap)))
        elif self._separates:
            replace(stack, method, "apply", partial(_separate_products, linear))

    def _enter(self, columns: _Columns, *_: Any) -> None:
        self._running.append(columns)

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()


def replace(stack: ExitStack, owner: Any, name: str, value: object) -> None:
    """Set an attribute of `owner`; `stack` restores what the instance had, or removes what it had only of its class."""
    own = vars(owner)
    if name in own:
        stack.callback(setattr, owner, name, own[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _refuse_compiled(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        raise ModelError(f"vLLM compiles {type(module).__name__}; noise needs enforce_eager")


def _stored(in_front: Sequence[Replace], layer: int, module: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a module of attention, with keys and values [tokens, heads, channels] replaced."""
    query, keys, values, *rest = args
    update: Update = _unchanged
    for put in in_front:
        update = _nearer(put, layer, update)
    heads = (module.num_kv_heads, -1)
    keys, values = update(keys.unflatten(-1, heads), values.unflatten(-1, heads))
    return (query, keys.flatten(-2), values.flatten(-2), *rest)


def _nearer(put: Replace, layer: int, update: Update) -> Update:
    return lambda keys, values: put(layer, keys, values, update)


def _unchanged(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys, values


def _exact(machine: Machine, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with machine.exactly():
        return forward(*args, **kwargs)


def _add_bias(module: Any, args: Any, output: Any) -> Any:
    """Add the bias of a row-parallel module, which it returns beside its product."""
    if not isinstance(output, tuple) or output[1] is None:
        return output
    return output[0].add_(output[1]), None


def _separate_products(linear: Linear, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a merged module projection by projection, each of its own input."""
    weights = layer.weight.split(linear.widths)
    biases = [None] * len(weights) if bias is None else bias.split(linear.widths)
    parts = zip(linear.projections, weights, biases, strict=True)
    return torch.cat([each.product(each.input(x), weight, added) for each, weight, added in parts], dim=-1)


def _tapped_head(
    linear: Linear, apply: Callable[..., Tensor], layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    return _joined(linear, apply(layer, linear.projections[0].input(x), bias))


def _through_outputs(linear: Linear, module: nn.Module, args: Any, output: Any) -> Any:
    """Pass the columns of each projection through its tap."""
    return on_output(partial(_joined, linear), module, args, output)


def _joined(linear: Linear, output: Tensor) -> Tensor:
    """Return the output with the columns of each projection as its tap returns them; those behind are padding."""
    outputs = linear.split(output)
    parts = [each.output(part) for each, part in zip(linear.projections, outputs, strict=False)]
    parts += outputs[len(parts) :]
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def _norm_of_tapped(
    tap: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a norm whose input `tap` may change; the residual sum that vLLM computes in it stays unchanged."""
    if residual is None:
        return forward(tap(x))
    total = x + residual
    return forward(tap(total)), total


def _gated(activation: Any, x: Tensor) -> Tensor:
    function, kind = _GATED[type(activation).__name__], type(activation).__name__
    gate, up = x.chunk(2, dim=-1)
    settings = {"approximate": activation.approximate} if kind == "GeluAndMul" else {}
    return function(gate.contiguous(), **settings) * up


def _through_sum(tap: nn.Module, module: nn.Module, args: Any, output: Any) -> Any:
    """Pass the sum of a decoder layer's outputs through `tap`; return it with a residual of zero."""
    if not isinstance(output, tuple):
        return tap(output)
    hidden, residual = output
    return tap(hidden + residual), torch.zeros_like(residual)
