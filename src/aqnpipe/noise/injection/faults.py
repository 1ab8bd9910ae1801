"""Simulated hardware faults on sites of decoder layers: the values, what stays of them between calls, and their hooks.

m is the fault's magnitude, relative to a reference: max|h| (dead zone, saturation, spike), mean|h| (noise) or std(h)
(bias), over the whole tensor of one call (all tokens, all channels, faulty or not). A dynamic reference is computed in
each call. A cached one is kept from the first call, so that thresholds are absolute. For autograd the reference is a
constant.

`FaultInjection` applies the faults of a phase, and AQN's noise on hidden states between them, behind all other noise.
Helpers for the hooks of all parts of an injection are at the end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from aqnpipe.config.noise import Fault
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import site_module
from aqnpipe.models.parts import PlaceHook
from aqnpipe.noise.receipts.table import Row, fault_operator
from aqnpipe.seeding import keyed_generator

if TYPE_CHECKING:
    from aqnpipe.noise.injection.phase import _RunningPhase

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


def faulty_values(hidden: Tensor, fault: Fault, reference: Tensor, generator: torch.Generator) -> Tensor:
    """Return all values with a fault; z are numbers ~ N(0, 1) from `generator`, r the reference.

    - dead_zone: values with |h| < m*r become exactly 0; their gradient is 0 too.
    - saturation: clamped to +-(1-m)*r; the gradient is 0 where a value was clamped.
    - bias: h + m*r. noise: h + z*m*r.
    - spike: each value is replaced with probability 0.01*m by 10*r*z.
    """
    magnitude, dtype = fault.magnitude, hidden.dtype
    match fault.type:
        case "dead_zone":
            return torch.where(hidden.detach().abs().float() < magnitude * reference, torch.zeros_like(hidden), hidden)
        case "saturation":
            limit = ((1 - magnitude) * reference).to(dtype)
            return torch.clamp(hidden, min=-limit, max=limit)
        case "bias":
            return hidden + (magnitude * reference).to(dtype)
        case "noise":
            return hidden + (_standard_normal(hidden, generator) * magnitude * reference).to(dtype)
        case "spike":
            draws = torch.rand(hidden.shape, generator=generator, device=hidden.device)
            spikes = SPIKE_SCALE * reference * _standard_normal(hidden, generator)
            return torch.where(draws < SPIKE_PROBABILITY * magnitude, spikes.to(dtype), hidden)


def faulty_channels(num_channels: int, sparsity: float, seed: int) -> Tensor:
    """Return the boolean mask [num_channels] of faulty channels: Bernoulli(sparsity), a pure function of its arguments.

    At least one channel is faulty: if the draw has none, the channel with the smallest number. The mask does not depend
    on the layer or the device.
    """
    draws = torch.rand(num_channels, generator=keyed_generator("cpu", seed, "fault.channels"))
    mask = draws < sparsity
    mask[draws.argmin()] = True
    return mask


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
        """Return `hidden` [..., channels] with the fault on its channels; all others stay bit for bit the same.

        `call` numbers the calls of the site; noise and spikes are a pure function of (fault.seed, call, shape).
        """
        if len(self.channels) != hidden.shape[-1]:
            self.channels = faulty_channels(hidden.shape[-1], self.fault.sparsity, self.fault.seed)
        fault, reference = self.fault, self.threshold
        reference = fault_reference(hidden, fault) if reference is None else reference.to(hidden.device)
        if fault.threshold == "cached":
            self.threshold = reference
        generator = keyed_generator(hidden.device, fault.seed, f"fault.{fault.type}", call)
        changed = faulty_values(hidden, fault, reference, generator)
        return torch.where(self.channels.to(hidden.device), changed, hidden)

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


SharedSite = Callable[[nn.Module, Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
"""Makes a function of a module's whole output one of this worker's share of it.

The size of a fault and its channels depend on the whole output.
"""


@dataclass(frozen=True)
class _Site:
    """A module whose output gets faults, AQN noise, or both; faults by their index among the machine's faults."""

    layer: int
    module: nn.Module
    faults: dict[int, ActiveFault]
    sigma: float


@dataclass(eq=False)
class FaultInjection:
    """The sites of one phase: those of the machine's faults, and decoder layers with a sigma above 0.

    `_site_module` returns the module of a site (model, layer index, name), or raises ModelError if there is none.
    `shared` is for sites whose output is spread over tensor-parallel workers.
    """

    state: "_RunningPhase"
    active_faults: Sequence[ActiveFault]
    hidden_sigmas: Mapping[int, float]
    _site_module: Callable[[nn.Module, int, str], nn.Module]
    shared: SharedSite | None

    def __post_init__(self) -> None:
        self._sites = self._find()

    def install(self, stack: ExitStack) -> None:
        """Register the hooks on the sites. Call it after all other hooks are registered."""
        for site in self._sites:
            keep(stack, site.module.register_forward_hook(PlaceHook(partial(self._leave, site))))

    def _find(self) -> list[_Site]:
        faults: dict[tuple[int, str], dict[int, ActiveFault]] = {
            (layer, "layer_output"): {} for layer, sigma in self.hidden_sigmas.items() if sigma > 0
        }
        for number, active in enumerate(self.active_faults):
            faults.setdefault((active.fault.layer, active.fault.site), {})[number] = active
        return [
            _Site(
                layer,
                self._site_module(self.state.model, layer, site),
                site_faults,
                self.hidden_sigmas.get(layer, 0.0) if site == "layer_output" else 0.0,
            )
            for (layer, site), site_faults in faults.items()
        ]

    def _leave(self, site: _Site, module: nn.Module, args: Any, output: Any) -> Any:
        through: Callable[[Tensor], Tensor] = partial(self._through, site)
        if self.shared is not None:
            through = self.shared(module, through)
        return on_output(through, module, args, output)

    def _through(self, site: _Site, hidden: Tensor) -> Tensor:
        """Return the output of a site after its faults before AQN's noise, the noise, and its faults after the noise.

        Without noise the order has no meaning, so every fault is applied once.
        """
        before, after = [], list(site.faults)
        if site.sigma > 0:
            before = [number for number, active in site.faults.items() if active.fault.order != "after_noise"]
            after = [number for number, active in site.faults.items() if active.fault.order != "before_noise"]
        observed = bool(site.faults) and hidden.requires_grad and torch.is_grad_enabled()
        # A view, so that its gradient is exactly the gradient that passes the faults.
        entering = hidden.view_as(hidden) if observed else hidden
        changed: dict[int, Tensor] = {}
        leaving = self._apply(site, before, 0, entering, changed)
        if site.sigma > 0:
            leaving = self.state.noised_hidden(site.layer, site.sigma, leaving)
        leaving = self._apply(site, after, 1, leaving, changed)
        if not self.state.recomputing:
            for number, elements in changed.items():
                channels = site.faults[number].channels
                self.state.recorder.add(
                    self.state.phase,
                    layer=site.layer,
                    operator=fault_operator(number),
                    num_channels=len(channels),
                    num_faulty_channels=channels.sum(),
                    calls=1,
                    elements=elements.numel(),
                    changed=elements.sum(),
                )
        if observed:
            self._observe_gradient(site.layer, entering, leaving, changed)
        return leaving

    def _apply(
        self, site: _Site, numbers: list[int], application: int, hidden: Tensor, changed: dict[int, Tensor]
    ) -> Tensor:
        """Apply faults one after the other; `changed` collects a mask of the changed elements for each of them."""
        for number in numbers:
            # Keyed by place, as noise is, so that a random fault is the same when a layer is recomputed.
            call = self.state.seed(f"fault.{self.state.phase}", number, application)
            faulted = site.faults[number].apply(hidden, call)
            different = faulted.detach() != hidden.detach()
            changed[number] = changed[number] | different if number in changed else different
            hidden = faulted
        return hidden

    def _observe_gradient(self, layer: int, entering: Tensor, leaving: Tensor, changed: Mapping[int, Tensor]) -> None:
        """Compare, in the backward pass, the gradient that arrives behind the faults with the gradient that passes."""
        arrived: list[Tensor] = []

        def measure(passed: Tensor) -> None:
            gradient = arrived.pop()
            zeroed, squares = (gradient != 0) & (passed == 0), gradient.double().square()
            for number, elements in changed.items():
                self.state.recorder.add(
                    "backward",
                    layer=layer,
                    operator=fault_operator(number),
                    calls=1,
                    elements=(gradient != 0).sum(),
                    zeroed=zeroed.sum(),
                    leaked=(elements & (passed != 0)).sum(),
                    squares=squares.sum(),
                    zeroed_squares=(squares * zeroed).sum(),
                )

        leaving.register_hook(lambda gradient: arrived.append(gradient.detach()))
        entering.register_hook(lambda gradient: measure(gradient.detach()))


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
