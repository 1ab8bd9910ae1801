"""Outputs of layers and of sites with simulated faults, as the audit expects them in an observed pass.

Hooks of the audit's own see a module's output before all its other hooks and behind them. Noise on modules comes
between them and is seen by itself (`modules`); what is left is computed again here: every fault from its formula, its
channels and its random numbers, each derived a second time. A layer of which nothing was requested returns what it
computed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from aqnpipe.config.noise import Fault
from aqnpipe.proof.observation import Observation, OutputCall, first_of, is_same
from aqnpipe.proof.random_numbers import derived_key
from aqnpipe.proof.request import RequestedFault, RequestedOutput

_SPIKES = 0.01
"""Probability of a spike per element at magnitude 1."""

_SPIKE_SIZE = 10.0
"""Standard deviation of a spike, in multiples of the largest value."""

_CLOSE = 1e-5
"""Relative difference that another order of summation may make in a mean or standard deviation in float32."""

_UNITS = 4.0
"""Allowed difference of a faulty value, in spacings of its number format."""


Key = Callable[[str, int, int, int], int]
"""Key of random numbers: stream, pass, number of the fault, number of its application."""


@dataclass(frozen=True)
class OutputWatch:
    """The hooks of an observation on outputs; `note` gets a line for every output that is not the expected one."""

    observation: Observation
    key: Key
    note: Callable[[str], None]

    def install(self, requested: Iterable[RequestedOutput]) -> None:
        """Register the hooks."""
        for one in requested:
            self.observation.watch(one.module, None, partial(self._enter, one), partial(self._leave, one))

    def _enter(self, one: RequestedOutput, module: nn.Module, args: Any, output: Any) -> None:
        # Only hooks of this module run until it is left, so these calls do not nest.
        own = _tensor(output)
        if own is not None and self.observation.is_on and torch._C._current_autograd_node() is None:
            thresholds = {each.number: each.threshold() for each in one.faults}
            version = 0 if own.is_inference() else own._version
            self.observation.at_output = OutputCall(own, version, thresholds, [])

    def _leave(self, one: RequestedOutput, module: nn.Module, args: Any, output: Any) -> None:
        call, self.observation.at_output = self.observation.at_output, None
        left = _tensor(output)
        if call is None or left is None:
            return
        own = call.own
        with _disable_current_modes(), torch.no_grad():
            for place, exact, result in call.errors:
                self._compare(one, one.steps(before_noise=True) if place == one.noise else [], own, exact, call)
                own = result
            self._compare(one, one.steps(before_noise=False), own, left, call)
        # In inference mode nobody counts changes.
        if not call.own.is_inference() and call.own._version != call.version:
            self.note(f"{one.where} was changed in place behind what it computed")
        self.observation.compared_outputs.add(module)

    def _compare(
        self,
        one: RequestedOutput,
        steps: Sequence[tuple[RequestedFault, int]],
        before: Tensor,
        after: Tensor,
        call: OutputCall,
    ) -> None:
        """Compare an output with what these faults make of the one before them."""
        if before.shape != after.shape:
            self.note(f"{one.where} returns {list(after.shape)}, expected {list(before.shape)}")
            return
        if not steps and is_same(before, after):
            return
        expected = before.detach()
        for requested, application in steps:
            seed = self.key(one.stream, self.observation.passed, requested.number, application)
            expected = _faulty(requested, expected, seed, call.thresholds)
        plain, wide, found = (values.detach().double() for values in (before, expected, after))
        spacing = torch.finfo(after.dtype).eps * torch.maximum(wide.abs(), plain.abs())
        allowed = _UNITS * spacing + _CLOSE * (wide - plain).abs() if steps else 0.5 * spacing
        # `not <=`, so that a value that is no number is wrong unless the expected one is none either.
        wrong = ~((found - wide).abs() <= allowed) & (found != wide) & ~(found.isnan() & wide.isnan())
        if number := int(wrong.sum()):
            names = " and ".join(requested.fault.type for requested, _ in steps)
            expected_values = f"those of a fault {names} on what it computed" if steps else "what it computed"
            self.note(f"{one.where}: {number} of {wrong.numel()} values are not {expected_values}")


def _faulty(requested: RequestedFault, hidden: Tensor, seed: int, thresholds: dict[int, Tensor | None]) -> Tensor:
    """Return the values with a fault, in the format of `hidden`.

    References are float32 numbers, as the definition says, so that no value can be on the other side of a threshold.
    """
    fault, dtype = requested.fault, hidden.dtype
    size = thresholds.get(requested.number) if fault.threshold == "cached" else None
    if size is None:
        size = thresholds[requested.number] = _reference(fault, hidden.float())
    size = size.to(hidden.device)
    match fault.type:
        case "dead_zone":
            changed = hidden.masked_fill(hidden.abs().float() < fault.magnitude * size, 0.0)
        case "saturation":
            bound = ((1 - fault.magnitude) * size).to(dtype)
            changed = hidden.clamp(-bound, bound)
        case "bias":
            changed = hidden + (fault.magnitude * size).to(dtype)
        case "noise":
            changed = hidden + (_normal(hidden, _generator(hidden, fault, seed)) * fault.magnitude * size).to(dtype)
        case "spike":
            generator = _generator(hidden, fault, seed)
            chosen = torch.rand(hidden.shape, generator=generator, device=hidden.device) < _SPIKES * fault.magnitude
            changed = torch.where(chosen, (_SPIKE_SIZE * size * _normal(hidden, generator)).to(dtype), hidden)
    return torch.where(_channels(hidden.shape[-1], fault).to(hidden.device), changed, hidden)


def _reference(fault: Fault, values: Tensor) -> Tensor:
    """Return what a fault's magnitude is relative to: the largest value, the mean or the standard deviation."""
    match fault.type:
        case "bias":
            return values.std(correction=0)
        case "noise":
            return values.abs().mean()
        case _:
            return values.abs().max()


def _channels(number: int, fault: Fault) -> Tensor:
    """Return which channels are faulty: each with the probability `sparsity`, and at least one."""
    generator = torch.Generator("cpu")
    generator.manual_seed(derived_key(fault.seed, "fault.channels"))
    draws = torch.rand(number, generator=generator)
    return (draws < fault.sparsity) | (torch.arange(number) == draws.argmin())


def _generator(hidden: Tensor, fault: Fault, seed: int) -> torch.Generator:
    generator = torch.Generator(hidden.device)
    generator.manual_seed(derived_key(fault.seed, f"fault.{fault.type}", seed))
    return generator


def _normal(hidden: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(hidden.shape, generator=generator, device=hidden.device)


def _tensor(output: Any) -> Tensor | None:
    first = first_of(output)
    return first if isinstance(first, Tensor) else None
