"""Simulated hardware faults on sites of decoder layers, as a context manager over pure tensor functions.

m is the fault's magnitude, relative to a reference: max|h| (dead zone, saturation, spike), mean|h| (noise) or std(h)
(bias), over the whole tensor of one call (all tokens, all channels, faulty or not). A dynamic reference is computed in
each call. A cached one is kept from the first call, so that thresholds are absolute. For autograd the reference is a
constant.

Helpers for the hooks of all parts of an injection are at the end.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from aqnpipe.config.noise import Fault
from aqnpipe.errors import ModelError
from aqnpipe.models.sites import site_module
from aqnpipe.noise.receipts.table import Row, fault_operator
from aqnpipe.seeding import keyed_generator

SPIKE_PROBABILITY = 0.01
"""Probability of a spike per element at magnitude 1."""

SPIKE_SCALE = 10.0
"""Standard deviation of a spike, in multiples of max|h|."""


def fault_reference(hidden: Tensor, fault: Fault) -> Tensor:
    """Return the reference of `fault`'s magnitude in this call, as a float32 scalar without gradient."""
    values = hidden.detach().float()
    match fault.type:
        case "dead_zone" | "saturation" | "spike":
            return values.abs().max()
        case "noise":
            return values.abs().mean()
        case "bias":
            return values.std(correction=0)


def dead_zone(hidden: Tensor, magnitude: float, maximum: Tensor) -> Tensor:
    """Set values with `|h| < m*max|h|` to exactly 0; their gradient is 0 too."""
    return torch.where(hidden.detach().abs().float() < magnitude * maximum, torch.zeros_like(hidden), hidden)


def saturation(hidden: Tensor, magnitude: float, maximum: Tensor) -> Tensor:
    """Clamp to `+-(1-m)*max|h|`; the gradient is 0 where a value was clamped."""
    limit = ((1 - magnitude) * maximum).to(hidden.dtype)
    return torch.clamp(hidden, min=-limit, max=limit)


def additive_noise(hidden: Tensor, magnitude: float, mean: Tensor, generator: torch.Generator) -> Tensor:
    """Return `h + z*m*mean|h|`, z ~ N(0, 1) from `generator`."""
    return hidden + (_standard_normal(hidden, generator) * magnitude * mean).to(hidden.dtype)


def bias(hidden: Tensor, magnitude: float, std: Tensor) -> Tensor:
    """Return `h + m*std(h)` (population standard deviation)."""
    return hidden + (magnitude * std).to(hidden.dtype)


def spike(hidden: Tensor, magnitude: float, maximum: Tensor, generator: torch.Generator) -> Tensor:
    """Replace each value with probability 0.01*m by `10*max|h|*z`, z ~ N(0, 1) from `generator`."""
    is_spike = torch.rand(hidden.shape, generator=generator, device=hidden.device) < SPIKE_PROBABILITY * magnitude
    spikes = SPIKE_SCALE * maximum * _standard_normal(hidden, generator)
    return torch.where(is_spike, spikes.to(hidden.dtype), hidden)


def faulty_channels(num_channels: int, sparsity: float, seed: int) -> Tensor:
    """Return the boolean mask [num_channels] of faulty channels: Bernoulli(sparsity), a pure function of its arguments.

    At least one channel is faulty: if the draw has none, the channel with the smallest number. The mask does not depend
    on the layer or the device.
    """
    draws = torch.rand(num_channels, generator=keyed_generator("cpu", seed, "fault.channels"))
    mask = draws < sparsity
    mask[draws.argmin()] = True
    return mask


def apply_fault(hidden: Tensor, fault: Fault, channels: Tensor, call: int, threshold: Tensor | None = None) -> Tensor:
    """Return `hidden` [..., channels] with `fault` on the masked `channels`; all others stay bit for bit the same.

    `call` numbers the calls of the faulty site; noise and spikes are a pure function of (fault.seed, call, shape).
    `threshold` is the reference of a cached fault (`fault_reference` of the first call); None uses this call's own.
    """
    reference = fault_reference(hidden, fault) if threshold is None else threshold
    generator = keyed_generator(hidden.device, fault.seed, f"fault.{fault.type}", call)
    return torch.where(channels.to(hidden.device), _faulty(hidden, fault, reference, generator), hidden)


@contextmanager
def simulated_faults(model: nn.Module, faults: Sequence[Fault]) -> Iterator[tuple[Row, ...]]:
    """Apply `faults` to their sites in a transformers model during the body; yield a row about each, in order.

    Faults on one site are applied one after the other. The hooks are removed on exit, and no parameter is changed.
    Works on modules that return a tensor, or a tuple that begins with one. Meant for single forward passes: in training
    and evaluation `phase_noise` applies the faults and records them for the receipt. Raises ModelError if a layer or
    site does not exist or the model already has simulated faults.
    """
    for name in simulated_fault_hooks(model):
        raise ModelError(f"{name} of {type(model).__name__} has a simulated fault already, expected none")
    rows = tuple(Row("forward", None, fault.layer, fault_operator(number)) for number, fault in enumerate(faults))
    with ExitStack() as stack:
        for fault, row in zip(faults, rows, strict=True):
            module = site_module(model, fault.layer, fault.site)
            stack.callback(module.register_forward_hook(FaultHook(fault, row)).remove)
        yield rows


@dataclass(frozen=True)
class ActiveFaultState:
    """State of an active fault between calls: the number of channels of its site, and its cached threshold."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    num_channels: int
    threshold: float | None


class ActiveFault:
    """A fault active on one site. Its faulty channels stay the same from call to call, and so does a cached threshold:
    the reference of the first call, None before it.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.channels = torch.empty(0, dtype=torch.bool)
        self.threshold: Tensor | None = None

    def apply(self, hidden: Tensor, call: int) -> Tensor:
        """Return the faulty output for the correct output `hidden` [..., channels]; `call` as in `apply_fault`."""
        if len(self.channels) != hidden.shape[-1]:
            self.channels = faulty_channels(hidden.shape[-1], self.fault.sparsity, self.fault.seed)
        if self.fault.threshold == "cached":
            self.threshold = fault_reference(hidden, self.fault) if self.threshold is None else self.threshold
            self.threshold = self.threshold.to(hidden.device)
        return apply_fault(hidden, self.fault, self.channels, call, self.threshold)

    def state(self) -> ActiveFaultState:
        """Return the state that later calls depend on."""
        return ActiveFaultState(len(self.channels), None if self.threshold is None else self.threshold.item())

    def restore(self, state: ActiveFaultState) -> None:
        """Continue from `state`."""
        self.channels = torch.empty(0, dtype=torch.bool)
        if state.num_channels:
            self.channels = faulty_channels(state.num_channels, self.fault.sparsity, self.fault.seed)
        self.threshold = None if state.threshold is None else torch.tensor(state.threshold, dtype=torch.float32)


class ActiveFaults(tuple[ActiveFault, ...]):
    """The active faults of one run or pass, with the thresholds that it has cached."""

    __slots__ = ()

    @classmethod
    def of(cls, faults: Sequence[Fault], states: Sequence[ActiveFaultState] | None = None) -> Self:
        """Return `faults` before their first call, or in the given `states` (same length)."""
        active = cls(ActiveFault(fault) for fault in faults)
        if states is not None:
            active.restore(states)
        return active

    def states(self) -> tuple[ActiveFaultState, ...]:
        """Return the state of each fault that later calls depend on."""
        return tuple(active.state() for active in self)

    def restore(self, states: Sequence[ActiveFaultState]) -> None:
        """Continue from `states` (one per fault)."""
        for active, state in zip(self, states, strict=True):
            active.restore(state)


def simulated_fault_hooks(model: nn.Module) -> list[str]:
    """Return the names of the modules that have a fault from `simulated_faults` at present."""
    return [
        name
        for name, module in model.named_modules()
        if any(isinstance(hook, FaultHook) for hook in module._forward_hooks.values())
    ]


class FaultHook:
    """Forward hook that replaces a module's output and counts the changed elements in a row.

    `call` gives what the random numbers of a call are keyed by; by default calls are numbered.
    """

    def __init__(self, fault: Fault, row: Row, call: Callable[[], int] | None = None) -> None:
        self.row = row
        self.active = ActiveFault(fault)
        self._call = call

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output of the site with the fault."""
        return on_output(self.apply, module, args, output)

    def apply(self, hidden: Tensor) -> Tensor:
        """Return a faulty output, and count it."""
        row = self.row
        faulted = self.active.apply(hidden, row.calls if self._call is None else self._call())
        if torch._C._current_autograd_node() is not None:
            # A backward pass computes the layer again.
            return faulted
        row.num_channels, row.num_faulty_channels = len(self.active.channels), int(self.active.channels.sum())
        row.calls += 1
        row.elements += hidden.numel()
        row.changed += int((faulted.detach() != hidden.detach()).sum())
        return faulted


def _faulty(hidden: Tensor, fault: Fault, reference: Tensor, generator: torch.Generator) -> Tensor:
    match fault.type:
        case "dead_zone":
            return dead_zone(hidden, fault.magnitude, reference)
        case "saturation":
            return saturation(hidden, fault.magnitude, reference)
        case "noise":
            return additive_noise(hidden, fault.magnitude, reference, generator)
        case "bias":
            return bias(hidden, fault.magnitude, reference)
        case "spike":
            return spike(hidden, fault.magnitude, reference, generator)


def _standard_normal(hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Draw in float32 for every dtype of `hidden`, so that all dtypes get the same numbers."""
    return torch.randn(hidden.shape, generator=generator, device=hidden.device)


def keep(stack: ExitStack, handle: Any) -> None:
    """Remove the hook of `handle` when `stack` closes."""
    stack.callback(handle.remove)


def on_input(change: Callable[[Tensor], Tensor], module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply `change` to a module's first argument; ModelError if that is not a tensor."""
    if not args or not isinstance(args[0], Tensor):
        raise ModelError(
            f"{type(module).__name__} was called without a tensor as first argument; its input has no noise"
        )
    return (change(args[0]), *args[1:])


def on_output(change: Callable[[Tensor], Tensor], module: nn.Module, args: Any, output: Any) -> Any:
    """Apply `change` to a module's output, or to the first element of an output tuple."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
