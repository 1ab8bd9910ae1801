"""Installs an arm's operator noise on a model for one phase, measures it, and always removes it."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aqnpipe.config.noise import Phase
from aqnpipe.errors import ModelError
from aqnpipe.noise.layout import decoder_layers, is_rms_norm, layer_of, output_projection
from aqnpipe.noise.operators import (
    ESCAPING,
    GradientError,
    RelativeError,
    TorchFunction,
    add_relative_error_,
    noised_functions,
    renormalise,
)
from aqnpipe.noise.recorder import MEASURED_ELEMENTS_PER_CALL, ReceiptRecorder
from aqnpipe.seeding import derive_seed, keyed_generator

T = TypeVar("T")

_BARE_LINEAR = torch.nn.functional.linear
_MARK = "_aqnpipe_injection"
_WITNESS_STRIDE = 8
_MEASURE_STRIDE = 8


@dataclass(frozen=True)
class NoiseKey:
    """Names the random numbers of one phase: equal keys replay equal noise."""

    seed: int
    step: int
    micro_step: int = 0


@contextmanager
def phase_noise(
    model: nn.Module, recorder: ReceiptRecorder, phase: Phase, key: NoiseKey, *, backward: bool = False
) -> Iterator[None]:
    """Run `phase` on `model` with exactly the operator noise that the recorder's spec asks for it.

    With `backward`, the graph built inside also noises the gradients when "backward" is among the asked phases. Hooks
    are removed on every way out. Raises ModelError when another injection is active on the model.
    """
    if getattr(model, _MARK, False):
        raise ModelError(f"noise is already installed on this {type(model).__name__}; injections do not nest")
    injection = _Injection(model, recorder, phase, key, backward)
    with ExitStack() as stack:
        setattr(model, _MARK, True)
        stack.callback(delattr, model, _MARK)
        injection.install(stack)
        yield
    recorder.settle()


class _Injection:
    """One phase on one model: knows where in the model the computation is, and noises operators there."""

    def __init__(
        self, model: nn.Module, recorder: ReceiptRecorder, phase: Phase, key: NoiseKey, backward: bool
    ) -> None:
        noise = recorder.operator_noise
        self.model = model
        self.recorder = recorder
        self.phase: Phase = phase
        self.key = key
        self.layers = decoder_layers(model)
        self.head = output_projection(model)
        self.head_index = len(self.layers)
        self.noise = noise if noise and noise.relative_scale > 0 and phase in noise.phases else None
        self.backward_noise = noise if noise and backward and self.noise and "backward" in noise.phases else None
        self.forward_index = -1
        self.location: int | None = None
        self.call_index = 0
        self.generator = torch.Generator(device=next(model.parameters()).device)
        self._mode = _OperatorMode(self, noised_functions(self.noise.operators)) if self.noise else None

    def install(self, stack: ExitStack) -> None:
        """Register all hooks; `stack` removes them."""

        def hook(handle: Any) -> None:
            stack.callback(handle.remove)

        hook(self.model.register_forward_pre_hook(self._enter_model))
        stack.callback(self._deactivate)
        for index, layer in enumerate([*self.layers, self.head]):
            hook(layer.register_forward_pre_hook(partial(self._enter_layer, index)))
            hook(layer.register_forward_hook(self._leave_layer, always_call=True))
        self._install_witness(hook)
        if self.noise is not None and self.noise.operators == "all":
            for name, module in self.model.named_modules():
                if is_rms_norm(module) and layer_of(name) is not None:
                    hook(module.register_forward_pre_hook(self._before_norm))
                    hook(module.register_forward_hook(self._after_norm))

    def _install_witness(self, hook: Any) -> None:
        linears = [module for module in self.layers.modules() if isinstance(module, nn.Linear)]
        if isinstance(self.head, nn.Linear) and (self.noise is None or self.noise.include_lm_head):
            linears.append(self.head)
        offset = (self.key.step + self.key.micro_step) % _WITNESS_STRIDE
        for index, module in enumerate(linears):
            in_first_forward = index % _WITNESS_STRIDE == offset
            hook(module.register_forward_hook(partial(self._witness, in_first_forward)))

    # -- where the computation is ------------------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        self.forward_index += 1
        self.recorder.count_forward(self.phase)

    def _enter_layer(self, index: int, module: nn.Module, args: Any) -> None:
        self.location = index
        self.call_index = 0
        if self.noise is not None and self._mode is not None and self._wants_noise_in(index):
            # Keyed by place, not by history: a recomputed layer (gradient checkpointing) replays its noise.
            self.generator.manual_seed(self._seed(self.phase, self.forward_index, index))
            self._mode.activate()

    def _leave_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        self.location = None
        self._deactivate()

    def _deactivate(self) -> None:
        if self._mode is not None:
            self._mode.deactivate()

    def _seed(self, stream: str, *counters: int) -> int:
        return derive_seed(self.key.seed, stream, self.key.step, self.key.micro_step, *counters)

    def _wants_noise_in(self, index: int) -> bool:
        if self.noise is None:
            return False
        if index == self.head_index:
            return self.noise.include_lm_head
        return self.noise.layers is None or index in self.noise.layers

    @property
    def layer_label(self) -> int | None:
        """Current decoder layer as receipts name it: None is the output projection."""
        return None if self.location == self.head_index else self.location

    # -- noise --------------------------------------------------------------------------------------------------------

    def noised_call(self, function: TorchFunction, operator: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run `function` with noise on its output, and on its operands' gradients where asked."""
        bias = None
        if operator == "linear":
            # The error belongs to the product, so the bias is added after it.
            inputs, weight, bias = _linear_arguments(*args, **kwargs)
            args, kwargs = (inputs, weight), {}
        if self.backward_noise is not None and torch.is_grad_enabled():
            args = self.noise_gradients(operator, args)
        output = function(*args, **kwargs)
        if operator == "softmax":
            return self._noise_softmax(output, kwargs["dim"] if "dim" in kwargs else args[1])
        output = self.noise_output(operator, output)
        return output if bias is None else output + bias

    def _noise_softmax(self, output: Tensor, dim: int) -> Tensor:
        # Softmax keeps its output for the backward pass, so the noise goes onto a copy.
        noised = self.noise_output("softmax", output.detach().clone())
        return output + (renormalise(noised, dim) - output).detach()

    def noise_output(self, operator: str, output: Tensor) -> Tensor:
        """Add the forward error to `output` in place; the gradient passes straight through."""
        noise = _known(self.noise)
        layer = self.layer_label
        self.call_index += 1
        self.recorder.count_call(self.phase, operator, layer, noise.relative_scale, output.numel())
        measured = self.forward_index < 2 or self.forward_index % _MEASURE_STRIDE == 0
        add_error_ = partial(
            self._add_error_, self.phase, operator, layer, noise.relative_scale, self.generator, measured
        )
        if output.requires_grad:
            return RelativeError.apply(output, add_error_)
        add_error_(output)
        return output

    def noise_gradients(self, operator: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the operands, each wrapped so that its exact gradient gets a relative error on the way back."""
        return tuple(
            self._noise_gradient(f"{operator}.gradient_{position}", operand) if _needs_gradient(operand) else operand
            for position, operand in enumerate(args)
        )

    def _noise_gradient(self, operator: str, operand: Tensor) -> Tensor:
        noise, location, layer = _known(self.backward_noise), _known(self.location), self.layer_label
        seed = self._seed("backward", self.forward_index, location, self.call_index, int(operator[-1]))

        # Place and key are bound now: by the time of the backward pass the model has moved on.
        def add_error_(gradient: Tensor) -> None:
            generator = keyed_generator(gradient.device, seed, "gradient")
            self.recorder.count_call("backward", operator, layer, noise.relative_scale, gradient.numel())
            self._add_error_("backward", operator, layer, noise.relative_scale, generator, True, gradient)

        return GradientError.apply(operand, add_error_)

    def _add_error_(
        self,
        phase: Phase,
        operator: str,
        layer: int | None,
        relative_scale: float,
        generator: torch.Generator,
        measured: bool,
        output: Tensor,
    ) -> None:
        if not measured:
            add_relative_error_(output, relative_scale, generator)
            return
        sample = _sample(output)
        before = sample.clone()
        add_relative_error_(output, relative_scale, generator)
        self.recorder.measure(phase, operator, layer, before, sample.clone())

    def count_escape(self, function: str) -> None:
        """Note a matrix product that the noise cannot reach at the current place."""
        self.recorder.count_escape(self.phase, function)

    def _before_norm(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._in_noised_layer() and self.backward_noise is not None and torch.is_grad_enabled():
            return self.noise_gradients("rms_norm", args)
        return None

    def _after_norm(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return self.noise_output("rms_norm", output) if self._in_noised_layer() else None

    def _in_noised_layer(self) -> bool:
        return self.location is not None and self._wants_noise_in(self.location)

    # -- witness ------------------------------------------------------------------------------------------------------

    def _witness(self, in_first_forward: bool, module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        # The second forward of a generation is one token long, so all modules are cheap to check there; in the first
        # one an eighth of them is checked, another eighth at each step.
        if self.forward_index > 1 or (self.forward_index == 0 and not in_first_forward):
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if self.noise is None:
                bare, used = _BARE_LINEAR(args[0], module.weight, module.bias), output
            else:
                # The bias comes after the noise, so it must not dilute the relative error.
                bare = _BARE_LINEAR(args[0], module.weight)
                used = output if module.bias is None else output - module.bias
            self.recorder.witness(self.phase, _sample(bare), _sample(used))


class _OperatorMode(TorchFunctionMode):
    """Sees every torch function while a noised layer computes; passes the noised operators to the injection."""

    def __init__(self, injection: _Injection, functions: Mapping[TorchFunction, str]) -> None:
        super().__init__()
        self._injection = injection
        self._functions = functions
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
        operator = self._functions.get(func)
        if operator is not None:
            return self._injection.noised_call(func, operator, args, kwargs or {})
        if func in ESCAPING:
            self._injection.count_escape(ESCAPING[func])
        return func(*args, **kwargs) if kwargs else func(*args)


def _known(value: T | None) -> T:
    if value is None:
        raise RuntimeError("a noised operator was called outside a noised layer; this is a bug")
    return value


def _sample(tensor: Tensor) -> Tensor:
    """Return a strided view of at most MEASURED_ELEMENTS_PER_CALL elements, spread over the whole tensor."""
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().reshape(-1)
    # An odd stride visits all columns of the usual even shapes.
    stride = max(1, -(-flat.numel() // MEASURED_ELEMENTS_PER_CALL)) | 1
    return flat[::stride]


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _needs_gradient(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.requires_grad and operand.is_floating_point()
