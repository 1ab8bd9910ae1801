"""Simulated hardware faults on the output of one decoder layer, as a context manager over pure tensor functions.

m is the fault's magnitude. Maxima, means and standard deviations run over the whole tensor of one call (all tokens, all
channels), so a threshold is dynamic: it differs from call to call. They are constants for autograd.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aqnpipe.config.noise import Fault
from aqnpipe.errors import ModelError
from aqnpipe.noise.layout import decoder_layers
from aqnpipe.seeding import keyed_generator

SPIKE_PROBABILITY = 0.01
"""Probability of a spike per element at magnitude 1."""

SPIKE_SCALE = 10.0
"""Standard deviation of a spike in multiples of max|h|."""


def dead_zone(hidden: Tensor, magnitude: float) -> Tensor:
    """Set values with `|h| < m*max|h|` to exactly 0; their gradient is 0 too."""
    threshold = magnitude * _max_magnitude(hidden)
    return torch.where(hidden.detach().abs().float() < threshold, torch.zeros_like(hidden), hidden)


def saturation(hidden: Tensor, magnitude: float) -> Tensor:
    """Clamp to `+-(1-m)*max|h|`; the gradient is 0 where a value was clamped."""
    limit = ((1 - magnitude) * _max_magnitude(hidden)).to(hidden.dtype)
    return torch.clamp(hidden, min=-limit, max=limit)


def additive_noise(hidden: Tensor, magnitude: float, generator: torch.Generator) -> Tensor:
    """Return `h + z*m*mean|h|`, z ~ N(0, 1) from `generator`."""
    noise = _standard_normal(hidden, generator)
    return hidden + (noise * magnitude * hidden.detach().abs().float().mean()).to(hidden.dtype)


def bias(hidden: Tensor, magnitude: float) -> Tensor:
    """Return `h + m*std(h)` (population standard deviation)."""
    return hidden + (magnitude * hidden.detach().float().std(correction=0)).to(hidden.dtype)


def spike(hidden: Tensor, magnitude: float, generator: torch.Generator) -> Tensor:
    """Replace each value with probability 0.01*m by `10*max|h|*z`, z ~ N(0, 1) from `generator`."""
    struck = torch.rand(hidden.shape, generator=generator, device=hidden.device) < SPIKE_PROBABILITY * magnitude
    spikes = SPIKE_SCALE * _max_magnitude(hidden) * _standard_normal(hidden, generator)
    return torch.where(struck, spikes.to(hidden.dtype), hidden)


def faulty_channels(hidden_size: int, sparsity: float, seed: int) -> Tensor:
    """Return the boolean mask [hidden_size] of faulty channels: Bernoulli(sparsity), a pure function of its arguments.

    At least one channel is always faulty: if the draw has none, the channel that came closest is. The mask does not
    depend on the layer or the device.
    """
    draws = torch.rand(hidden_size, generator=keyed_generator("cpu", seed, "fault.channels"))
    mask = draws < sparsity
    mask[draws.argmin()] = True
    return mask


def apply_fault(hidden: Tensor, fault: Fault, channels: Tensor, call: int) -> Tensor:
    """Return `hidden` [..., hidden_size] with `fault` on the masked `channels`, all others bit for bit as they were.

    `call` numbers the calls of the faulty layer; noise and spikes are a pure function of (fault.seed, call, shape).
    """
    generator = keyed_generator(hidden.device, fault.seed, f"fault.{fault.type}", call)
    return torch.where(channels.to(hidden.device), _faulty(hidden, fault, generator), hidden)


@dataclass
class FaultRecord:
    """What a simulated fault has done so far; elements are all values of the layer's output, on any channel."""

    fault: Fault
    num_channels: int = 0
    num_faulty_channels: int = 0
    calls: int = 0
    elements: int = 0
    affected_elements: int = 0

    @property
    def survival_rate(self) -> float:
        """Share of elements that passed the fault unchanged; 1 before the first call."""
        return 1 - self.affected_elements / self.elements if self.elements else 1.0


@contextmanager
def simulated_fault(model: nn.Module, fault: Fault) -> Iterator[FaultRecord]:
    """Put `fault` on the output of decoder layer `fault.layer` of a transformers model for the body's duration.

    The hook is removed on any exit and no parameter is touched. Works on layers that return the summed hidden states,
    alone or first in a tuple. Gradient checkpointing would run the hook again in the backward pass, as a new call.
    Raises ModelError if the layer does not exist or the model has a simulated fault already.
    """
    layers = decoder_layers(model)
    if fault.layer >= len(layers):
        raise ModelError(f"fault.layer is {fault.layer}, expected 0 to {len(layers) - 1} ({type(model).__name__})")
    for index, layer in enumerate(layers):
        if any(isinstance(hook, _FaultHook) for hook in layer._forward_hooks.values()):
            raise ModelError(f"layer {index} of {type(model).__name__} has a simulated fault already, expected none")
    record = FaultRecord(fault)
    handle = layers[fault.layer].register_forward_hook(_FaultHook(record))
    try:
        yield record
    finally:
        handle.remove()


class _FaultHook:
    """Forward hook that replaces a layer's output and keeps count."""

    def __init__(self, record: FaultRecord) -> None:
        self.record = record
        self.channels = torch.empty(0, dtype=torch.bool)

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], output: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, tuple):
            return (self._strike(output[0]), *output[1:])
        return self._strike(output)

    def _strike(self, hidden: Tensor) -> Tensor:
        record = self.record
        if len(self.channels) != hidden.shape[-1]:
            self.channels = faulty_channels(hidden.shape[-1], record.fault.sparsity, record.fault.seed)
            record.num_channels = len(self.channels)
            record.num_faulty_channels = int(self.channels.sum())
        struck = apply_fault(hidden, record.fault, self.channels, record.calls)
        record.calls += 1
        record.elements += hidden.numel()
        record.affected_elements += int((struck.detach() != hidden.detach()).sum())
        return struck


def _faulty(hidden: Tensor, fault: Fault, generator: torch.Generator) -> Tensor:
    match fault.type:
        case "dead_zone":
            return dead_zone(hidden, fault.magnitude)
        case "saturation":
            return saturation(hidden, fault.magnitude)
        case "noise":
            return additive_noise(hidden, fault.magnitude, generator)
        case "bias":
            return bias(hidden, fault.magnitude)
        case "spike":
            return spike(hidden, fault.magnitude, generator)


def _max_magnitude(hidden: Tensor) -> Tensor:
    return hidden.detach().abs().max().float()


def _standard_normal(hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Draw in float32 whatever the dtype of `hidden`, so that all dtypes see the same numbers."""
    return torch.randn(hidden.shape, generator=generator, device=hidden.device)
