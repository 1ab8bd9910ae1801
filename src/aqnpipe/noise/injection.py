"""Installs an arm's noise on a model for one phase, measures it, and always removes it.

From operator to receipt: while a noised decoder layer computes, `_OperatorMode` sees every torch function and passes
operators to `_Injection.operator_call`. That runs the function, puts the error on its output in place (`_put_error`),
and hands a sample from before and after to the recorder. On the way in, operands that need gradients are wrapped so
that their exact gradients get an error too (`_wrap_operands`). Modules are noised by forward hooks. The simulated
faults of the recorder's machine strike last of all what their sites put out (`_leave_site`), in every phase alike.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

from aqnpipe.config.noise import ErrorModel, FakeQuantization, OutputErrorModel, Phase, RelativeGaussian
from aqnpipe.errors import ModelError
from aqnpipe.noise.error_models import apply_error_
from aqnpipe.noise.faults import ActiveFault, simulated_fault_hooks
from aqnpipe.noise.flops import FlopCounter
from aqnpipe.noise.layout import decoder_layers, is_rms_norm, layer_of, output_projection, select_modules
from aqnpipe.noise.operators import (
    KEEPS_ITS_OUTPUT,
    GradientError,
    TorchFunction,
    escaping_functions,
    noised_functions,
    renormalise,
)
from aqnpipe.noise.quantization import fake_quantize
from aqnpipe.noise.recorder import MEASURED_ELEMENTS_PER_CALL, ReceiptRecorder
from aqnpipe.noise.sites import site_module
from aqnpipe.noise.stream import NoiseStream
from aqnpipe.seeding import derive_seed, keyed_generator

_BARE_LINEAR = torch.nn.functional.linear
_MARK = "_aqnpipe_injection"
_WITNESS_STRIDE = 8
_WITNESSED_FORWARDS = 2
_MEASURE_STRIDE = 8

# Streams under one layer's key: outputs of operators, the gradients of their operands, hidden states, modules.
_OUTPUT, _FIRST_GRADIENT, _HIDDEN, _FIRST_MODULE = 0, 1, 8, 16


@dataclass(frozen=True)
class NoiseKey:
    """Names the random numbers of one phase: equal keys replay equal noise. Data-parallel ranks differ in `rank`."""

    seed: int
    step: int
    micro_step: int = 0
    rank: int = 0


@dataclass
class _Place:
    """Where in the model the computation is, and what names its random numbers.

    `layer` is None outside the decoder layers and in the output projection; `error` is what operators get here.
    """

    layer: int | None = None
    key: int = 0
    error: ErrorModel | None = None
    calls: int = 0
    module_calls: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class _StruckSite:
    """A module whose output faults strike, AQN noises, or both; faults by their number among the machine's."""

    layer: int
    module: nn.Module
    faults: dict[int, ActiveFault]
    sigma: float


@contextmanager
def phase_noise(
    model: nn.Module,
    recorder: ReceiptRecorder,
    phase: Phase,
    key: NoiseKey,
    *,
    backward: bool = False,
    hidden_sigmas: Mapping[int, float] | None = None,
) -> Iterator[None]:
    """Run `phase` on `model` with exactly the noise that the recorder's specs ask for it, on the recorder's machine.

    With `backward`, the graph built inside also noises the gradients when "backward" is among the asked phases; layers
    under gradient checkpointing are recomputed with the same noise, also after the context has ended. `hidden_sigmas`
    is AQN on hidden states: relative noise on the output of each decoder layer. The machine's simulated faults strike
    in every phase; `Fault.order` says where AQN's noise has its place among them. Everything is removed on every way
    out. Raises ModelError when another injection is active on the model, or the model is compiled.
    """
    if hasattr(model, _MARK):
        raise ModelError(f"noise is already installed on this {type(model).__name__}; injections do not nest")
    if any(isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl is not None for m in model.modules()):
        raise ModelError(
            f"this {type(model).__name__} is compiled (torch.compile): compiled code would run without the noise, "
            "expected an uncompiled model"
        )
    injection = _Injection(model, recorder, phase, key, backward, hidden_sigmas or {})
    with ExitStack() as stack:
        setattr(model, _MARK, injection)
        stack.callback(delattr, model, _MARK)
        injection.install(stack)
        yield
    recorder.settle()


class _Injection:
    """One phase on one model: knows where in the model the computation is, and noises operators and modules there."""

    def __init__(
        self,
        model: nn.Module,
        recorder: ReceiptRecorder,
        phase: Phase,
        key: NoiseKey,
        backward: bool,
        hidden_sigmas: Mapping[int, float],
    ) -> None:
        self.model = model
        self.recorder = recorder
        self.phase: Phase = phase
        self.key = key
        self.hidden_sigmas = hidden_sigmas
        self.layers = decoder_layers(model)
        self.head = output_projection(model)
        noise, modules = recorder.operator_noise, recorder.module_noise
        self.operator_noise = noise if noise and noise.is_active and phase in noise.phases else None
        self.module_noise = modules if modules and modules.is_active and phase in modules.phases else None
        self.noises_gradients = bool(backward and self.operator_noise and "backward" in self.operator_noise.phases)
        self.noised_modules = select_modules(model, self.module_noise.modules) if self.module_noise else {}
        self.struck_sites = self._find_struck_sites()
        self.forward_index = -1
        self.outside = self.place = _Place()
        self.recomputing = False
        self._flops: FlopCounter | None = None
        self._witness_handles: list[Any] = []
        self._quantized_weights: dict[int, Tensor] = {}
        self._mode = _OperatorMode(self) if self.operator_noise else None

    # -- installation --------------------------------------------------------------------------------------------------

    def install(self, stack: ExitStack) -> None:
        """Register all hooks; `stack` removes them."""
        hook = partial(_keep, stack)
        stack.callback(self._stop)
        if self.module_noise is not None:
            self.recorder.expect_modules(len(self.noised_modules))
        hook(self.model.register_forward_pre_hook(self._enter_model))
        hook(self.model.register_forward_hook(self._leave_model, always_call=True))
        for index, layer in enumerate([*self.layers, self.head]):
            hook(layer.register_forward_pre_hook(partial(self._enter_layer, index)))
            hook(layer.register_forward_hook(self._leave_layer, always_call=True))
        self._install_witness(stack)
        self._install_on_modules(stack, self.model, "")
        self.recorder.note_foreign_faults(simulated_fault_hooks(self.model))
        for index in range(len(self.layers)):
            self._install_on_sites(stack, index)
        if torch.is_grad_enabled():
            self._install_on_checkpoints(stack)

    def _install_on_modules(self, stack: ExitStack, root: nn.Module, prefix: str) -> None:
        """Register the hooks of single modules within `root`, whose own qualified name is `prefix`."""
        hook = partial(_keep, stack)
        ordinals = {name: ordinal for ordinal, name in enumerate(self.noised_modules)}
        norms = self.operator_noise is not None and self.operator_noise.operators == "all"
        for name, module in root.named_modules(prefix=prefix):
            if norms and is_rms_norm(module) and layer_of(name) is not None:
                hook(module.register_forward_pre_hook(self._before_norm))
                hook(module.register_forward_hook(self._after_norm))
            if self.module_noise is not None and name in ordinals:
                noised = partial(self._noise_module, name, ordinals[name])
                if self.module_noise.point == "input":
                    hook(module.register_forward_pre_hook(partial(_on_input, noised)))
                else:
                    hook(module.register_forward_hook(partial(_on_output, noised)))

    def _find_struck_sites(self) -> list[_StruckSite]:
        faults: dict[tuple[int, str], dict[int, ActiveFault]] = {
            (layer, "layer_output"): {} for layer, sigma in self.hidden_sigmas.items() if sigma > 0
        }
        for number, active in enumerate(self.recorder.active_faults):
            faults.setdefault((active.fault.layer, active.fault.site), {})[number] = active
        return [
            _StruckSite(
                layer,
                site_module(self.model, layer, site),
                struck,
                self.hidden_sigmas.get(layer, 0.0) if site == "layer_output" else 0.0,
            )
            for (layer, site), struck in faults.items()
        ]

    def _install_on_sites(self, stack: ExitStack, layer: int) -> None:
        """Register the faults and the hidden-state noise of one decoder layer, after all other hooks."""
        for site in self.struck_sites:
            if site.layer == layer:
                _keep(stack, site.module.register_forward_hook(partial(self._leave_site, site)))

    def _install_on_checkpoints(self, stack: ExitStack) -> None:
        """Let checkpointed layers replay their noise and faults when the backward pass computes them again."""
        names = {module: name for name, module in self.model.named_modules()}
        for index, layer in enumerate(self.layers):
            checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
            if checkpoint is None or not getattr(layer, "gradient_checkpointing", False) or not layer.training:
                continue
            layer._gradient_checkpointing_func = partial(  # type: ignore[assignment]
                self._checkpointed, checkpoint, index, layer, names[layer]
            )
            stack.callback(setattr, layer, "_gradient_checkpointing_func", checkpoint)

    def _checkpointed(
        self,
        checkpoint: Callable[..., Any],
        index: int,
        layer: nn.Module,
        name: str,
        run: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Checkpoint `run`, which calls `layer`: the first call has the hooks, the recomputation brings them back."""
        forward_index, computed_before = self.forward_index, False

        def run_noised(*inputs: Any, **keywords: Any) -> Any:
            nonlocal computed_before
            if not computed_before:
                computed_before = True
                return run(*inputs, **keywords)
            with ExitStack() as stack:
                active = getattr(self.model, _MARK, None)
                if active not in (None, self):
                    raise RuntimeError(
                        "a checkpointed layer is computed again while another phase has its noise on this model"
                    )
                # Inside the context (backward before its end) the hooks are still there.
                if active is None:
                    stack.callback(self._stop)
                    _keep(stack, layer.register_forward_pre_hook(partial(self._enter_layer, index)))
                    _keep(stack, layer.register_forward_hook(self._leave_layer, always_call=True))
                    self._install_on_modules(stack, layer, name)
                    self._install_on_sites(stack, index)
                stack.callback(setattr, self, "recomputing", self.recomputing)
                stack.callback(setattr, self, "forward_index", self.forward_index)
                self.recomputing, self.forward_index = True, forward_index
                return run(*inputs, **keywords)

        return checkpoint(run_noised, *args, **kwargs)

    def _install_witness(self, stack: ExitStack) -> None:
        linears = [module for module in self.layers.modules() if isinstance(module, nn.Linear)]
        if isinstance(self.head, nn.Linear) and (self.operator_noise is None or self.operator_noise.include_lm_head):
            linears.append(self.head)
        offset = (self.key.step + self.key.micro_step) % _WITNESS_STRIDE
        for index, module in enumerate(linears):
            in_first_forward = index % _WITNESS_STRIDE == offset
            # Before any hook of module noise: what those put on the output is measured by themselves.
            handle = module.register_forward_hook(partial(self._witness, in_first_forward), prepend=True)
            self._witness_handles.append(handle)
            _keep(stack, handle)

    # -- where the computation is --------------------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            raise ModelError(f"{type(self.model).__name__} is being compiled; noise and torch.compile do not combine")
        self.forward_index += 1
        self.recorder.count_forward(self.phase)
        if self.forward_index == _WITNESSED_FORWARDS:
            # A hook costs time even if it has nothing left to do.
            for handle in self._witness_handles:
                handle.remove()
        self.outside = self.place = self._place_at(None, len(self.layers) + 1, None)
        if self.forward_index == 0 and self.recorder.wants_flops(self.phase):
            self._flops = FlopCounter()
            self._flops.__enter__()

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._flops is not None:
            self.recorder.count_flops(self.phase, self._flops.total)
            self._stop_counting()

    def _enter_layer(self, index: int, module: nn.Module, args: Any) -> None:
        layer = index if index < len(self.layers) else None
        error = self.operator_noise.error_in(layer) if self.operator_noise else None
        self.place = self._place_at(layer, index, error)
        if error is not None and self._mode is not None:
            self._mode.activate()

    def _leave_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._mode is not None:
            self._mode.deactivate()
        self.place = self.outside

    def _place_at(self, layer: int | None, index: int, error: ErrorModel | None) -> _Place:
        # Keyed by place, not by history: a layer that is computed again (gradient checkpointing) replays its noise.
        if error is None and not self.noised_modules:
            return _Place(layer)
        key = self.key
        return _Place(
            layer,
            derive_seed(key.seed, self.phase, key.step, key.micro_step, key.rank, self.forward_index, index),
            error,
        )

    def _stop(self) -> None:
        if self._mode is not None:
            self._mode.deactivate()
        self._stop_counting()

    def _stop_counting(self) -> None:
        if self._flops is not None:
            self._flops.__exit__(None, None, None)
            self._flops = None

    # -- operators -----------------------------------------------------------------------------------------------------

    def operator_call(self, operator: str, function: TorchFunction, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run `function` with the place's error on its output, and on its operands' gradients where asked."""
        error = self.place.error
        if error is None:
            raise RuntimeError("an operator was seen outside a noised layer; this is a bug")
        flops_before = self._flops.total if self._flops is not None else 0
        # By exact type: isinstance of a pydantic class is a function of its own, and this runs at every operator.
        quantized = type(error) is FakeQuantization
        if quantized:
            output = self._quantized_call(function, operator, cast(FakeQuantization, error), args, kwargs)
        else:
            output = self._noised_call(function, operator, cast(OutputErrorModel, error), args, kwargs)
        if self._flops is not None and not (quantized and operator != "linear"):
            self.recorder.count_noised_flops(self.phase, self._flops.total - flops_before)
        return output

    def _noised_call(
        self, function: TorchFunction, operator: str, error: OutputErrorModel, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        bias = None
        if operator == "linear":
            # The error belongs to the product, so the bias is added after it.
            inputs, weight, bias = _linear_arguments(*args, **kwargs)
            args, kwargs = (inputs, weight), {}
        if self.noises_gradients and torch.is_grad_enabled():
            args = self._wrap_operands(operator, args)
        output = function(*args, **kwargs)
        if operator in KEEPS_ITS_OUTPUT:
            noised = output.detach().clone()
            self._noise_output(operator, error, noised)
            if operator == "softmax":
                noised = renormalise(noised, kwargs["dim"] if "dim" in kwargs else args[1])
            return output + (noised - output).detach()
        self._noise_output(operator, error, output)
        return output if bias is None else output.add_(bias)

    def _quantized_call(
        self, function: TorchFunction, operator: str, error: FakeQuantization, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        if operator != "linear":
            return function(*args, **kwargs)
        inputs, weight, bias = _linear_arguments(*args, **kwargs)
        if error.activations:
            inputs = self._quantized("linear.activation", error, inputs)
        if error.weights:
            weight = self._quantized_weight(error, weight)
        return function(inputs, weight, bias)

    def _quantized_weight(self, error: FakeQuantization, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self._quantized("linear.weight", error, weight)
        # Weights stand still inside a phase without gradients, and a rollout uses each of them once per token.
        key = id(weight)
        if key not in self._quantized_weights:
            self._quantized_weights[key] = self._quantized("linear.weight", error, weight)
        return self._quantized_weights[key]

    def _quantized(self, operand: str, error: FakeQuantization, tensor: Tensor) -> Tensor:
        quantized = fake_quantize(tensor, error.format)
        cell = (self.phase, operand, self.place.layer)
        if not self.recomputing:
            self.recorder.count_call(*cell, error, tensor.numel())
            self.recorder.measure(*cell, _sample(tensor), _sample(quantized))
        return quantized

    def _noise_output(self, operator: str, error: OutputErrorModel, output: Tensor) -> None:
        """Put the forward error on `output` in place; the gradient passes it straight through."""
        place = self.place
        place.calls += 1
        source = NoiseStream(place.key, place.calls, _OUTPUT)
        self._put_error(self.phase, operator, place.layer, error, source, output, repeats=True)

    def _put_error(
        self,
        phase: Phase,
        operator: str,
        layer: int | None,
        error: OutputErrorModel,
        source: NoiseStream,
        tensor: Tensor,
        *,
        repeats: bool,
    ) -> None:
        """Put `error` on `tensor` in place and record it; of calls that `repeats` every forward only some are measured.

        Autograd sees no operation, which is what passes gradients straight through. It does see a new version: if an
        operator needed its output as it was, its backward pass fails instead of using another value.
        """
        values = tensor.detach() if tensor.requires_grad else tensor
        if repeats and self.recomputing:
            apply_error_(values, error, source)
        else:
            self.recorder.count_call(phase, operator, layer, error, values.numel())
            if repeats and self.forward_index >= 2 and self.forward_index % _MEASURE_STRIDE:
                apply_error_(values, error, source)
            else:
                before = _sample(values)
                apply_error_(values, error, source)
                self.recorder.measure(phase, operator, layer, before, _sample(values))
        if torch.is_grad_enabled():
            increment_version(values)

    def _wrap_operands(self, operator: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the operands, those that need a gradient wrapped so that it gets an error on the way back."""
        positions = [position for position, operand in enumerate(args) if _needs_gradient(operand)]
        error = self.place.error
        if not positions or error is None or isinstance(error, FakeQuantization):
            return args
        # Place and key are bound now: by the time of the backward pass the model has moved on.
        layer, key, call = self.place.layer, self.place.key, self.place.calls + 1

        def add_error_(index: int, gradient: Tensor) -> None:
            position = positions[index]
            source = NoiseStream(key, call, _FIRST_GRADIENT + position)
            name = f"{operator}.gradient_{position}"
            self._put_error("backward", name, layer, error, source, gradient, repeats=False)

        wrapped = GradientError.apply(add_error_, *(args[position] for position in positions))
        operands = list(args)
        for position, operand in zip(positions, wrapped, strict=True):
            operands[position] = operand
        return tuple(operands)

    def escaping_call(self, operator: str, function: TorchFunction, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run `function`, noting that it holds a matrix product which the noise cannot reach."""
        if not self.recomputing:
            self.recorder.count_escape(self.phase, operator)
        return function(*args, **kwargs)

    def _before_norm(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.place.error is not None and self.noises_gradients and torch.is_grad_enabled():
            return self._wrap_operands("rms_norm", args)
        return None

    def _after_norm(self, module: nn.Module, args: Any, output: Tensor) -> None:
        error = self.place.error
        if error is not None and not isinstance(error, FakeQuantization):
            self._noise_output("rms_norm", error, output)

    # -- modules and hidden states -------------------------------------------------------------------------------------

    def _noise_module(self, name: str, ordinal: int, tensor: Tensor) -> Tensor:
        """Return a noised copy of what goes into or comes out of the module `name`."""
        if self.module_noise is None:
            raise RuntimeError("a module hook ran without module noise; this is a bug")
        place = self.place
        place.module_calls[ordinal] += 1
        source = NoiseStream(place.key, ordinal, _FIRST_MODULE + place.module_calls[ordinal])
        operator = f"module.{name.rsplit('.', 1)[-1]}"
        error = self.module_noise.error
        noised = tensor.detach().clone()
        self._put_error(self.phase, operator, layer_of(name), error, source, noised, repeats=True)
        self.recorder.count_module(self.phase, name)
        return tensor + (noised - tensor).detach() if tensor.requires_grad else noised

    def _leave_site(self, site: _StruckSite, module: nn.Module, args: Any, output: Any) -> Any:
        return _on_output(partial(self._through_site, site), module, args, output)

    def _through_site(self, site: _StruckSite, hidden: Tensor) -> Tensor:
        """Return what leaves a struck site: faults that come before AQN's noise, the noise, faults that come after.

        Without noise there is nothing to come before, so that every fault strikes once.
        """
        before, after = [], list(site.faults)
        if site.sigma > 0:
            before = [number for number, one in site.faults.items() if one.fault.order != "after_noise"]
            after = [number for number, one in site.faults.items() if one.fault.order != "before_noise"]
        observed = bool(site.faults) and hidden.requires_grad and torch.is_grad_enabled()
        # A tensor of its own, so that its gradient is what the faults let through and nothing else.
        entering = hidden.view_as(hidden) if observed else hidden
        changed: dict[int, Tensor] = {}
        leaving = self._strike(site, before, 0, entering, changed)
        if site.sigma > 0:
            leaving = self._noise_hidden(site.layer, site.sigma, leaving)
        leaving = self._strike(site, after, 1, leaving, changed)
        if not self.recomputing:
            for number, elements in changed.items():
                self.recorder.count_fault(self.phase, number, elements)
        if observed:
            self._observe_gradient(entering, leaving, changed)
        return leaving

    def _strike(
        self, site: _StruckSite, numbers: list[int], strike: int, hidden: Tensor, changed: dict[int, Tensor]
    ) -> Tensor:
        """Let faults strike one after the other; `changed` collects which elements each of them changed."""
        key = self.key
        for number in numbers:
            # Keyed by place, as noise is: a fault by chance strikes alike when a layer is computed again.
            call = derive_seed(
                key.seed, f"fault.{self.phase}", key.step, key.micro_step, key.rank, self.forward_index, number, strike
            )
            struck = site.faults[number].strike(hidden, call)
            different = struck.detach() != hidden.detach()
            changed[number] = changed[number] | different if number in changed else different
            hidden = struck
        return hidden

    def _observe_gradient(self, entering: Tensor, leaving: Tensor, changed: Mapping[int, Tensor]) -> None:
        """Compare, in the backward pass, the gradient that arrives behind the faults with what passes through them."""
        arrived: list[Tensor] = []

        def measure(passed: Tensor) -> None:
            gradient = arrived.pop()
            for number, elements in changed.items():
                self.recorder.count_fault_gradient(number, elements, gradient, passed)

        leaving.register_hook(lambda gradient: arrived.append(gradient.detach()))
        entering.register_hook(lambda gradient: measure(gradient.detach()))

    def _noise_hidden(self, layer: int, sigma: float, hidden: Tensor) -> Tensor:
        """Return hidden states of a decoder layer with AQN's relative noise; gradients pass straight through."""
        key = derive_seed(
            self.key.seed, "aqn.hidden", self.key.step, self.key.micro_step, self.key.rank, self.forward_index, layer
        )
        noised = hidden.clone()
        apply_error_(noised.detach(), RelativeGaussian(scale=sigma), NoiseStream(key, 0, _HIDDEN))
        if not self.recomputing:
            self.recorder.measure_hidden(layer, _sample(hidden), _sample(noised))
        return noised

    # -- witness -------------------------------------------------------------------------------------------------------

    def _witness(self, in_first_forward: bool, module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        # The second forward of a generation is one token long, so all modules are cheap to check there; in the first
        # one an eighth of them is checked, another eighth at each step.
        if self.recomputing or (self.forward_index == 0 and not in_first_forward):
            return
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if self.operator_noise is None:
                bare, used = _BARE_LINEAR(args[0], module.weight, module.bias), output
            else:
                # The bias comes after the noise, so it must not dilute the relative error.
                bare = _BARE_LINEAR(args[0], module.weight)
                used = output if module.bias is None else output - module.bias
            self.recorder.witness(self.phase, _sample(bare), _sample(used))


class _OperatorMode(TorchFunctionMode):
    """Sees every torch function while a noised layer computes; passes the noised operators to the injection."""

    def __init__(self, injection: _Injection) -> None:
        super().__init__()
        noise = injection.operator_noise
        operators = noised_functions(noise) if noise else {}
        escaping = escaping_functions(noise) if noise else {}
        self._handlers: dict[TorchFunction, Callable[..., Any]] = {
            **{function: partial(injection.operator_call, name) for function, name in operators.items()},
            **{function: partial(injection.escaping_call, name) for function, name in escaping.items()},
        }
        self._active = False

    def activate(self) -> None:
        """Start to see torch functions of this thread."""
        self.__enter__()
        self._active = True

    def deactivate(self) -> None:
        """Stop; a second call does nothing."""
        if self._active:
            self._active = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func: TorchFunction, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


def _keep(stack: ExitStack, handle: Any) -> None:
    stack.callback(handle.remove)


def _on_input(noised: Callable[[Tensor], Tensor], module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not args or not isinstance(args[0], Tensor):
        raise ModelError(
            f"{type(module).__name__} was called without a tensor as first argument; its input has no noise"
        )
    return (noised(args[0]), *args[1:])


def _on_output(noised: Callable[[Tensor], Tensor], module: nn.Module, args: Any, output: Any) -> Any:
    return (noised(output[0]), *output[1:]) if isinstance(output, tuple) else noised(output)


def _sample(tensor: Tensor) -> Tensor:
    """Return a copy of at most MEASURED_ELEMENTS_PER_CALL elements, spread over the whole tensor."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= MEASURED_ELEMENTS_PER_CALL:
        return flat.clone()
    return flat[_sample_positions(flat.numel(), flat.device)]


@lru_cache(maxsize=4096)
def _sample_positions(num_elements: int, device: torch.device) -> Tensor:
    """Return one position in each of MEASURED_ELEMENTS_PER_CALL equal stretches of a flat tensor, in rising order.

    Drawn, for any regular step meets the same few rows again where it comes near a fraction of the rows' length: all
    of them without a gradient, say.
    """
    drawn = torch.rand(
        MEASURED_ELEMENTS_PER_CALL, generator=keyed_generator("cpu", 0, "sample", num_elements), dtype=torch.float64
    )
    places = (torch.arange(MEASURED_ELEMENTS_PER_CALL) + drawn) * (num_elements / MEASURED_ELEMENTS_PER_CALL)
    return places.long().clamp_max(num_elements - 1).to(device)


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _needs_gradient(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.requires_grad and operand.is_floating_point()
