"""Applies simulated faults and AQN's noise on hidden states to the outputs of sites, after all other noise."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aqnpipe.models.parts import PlaceHook
from aqnpipe.noise.injection.faults import ActiveFault, keep, on_output
from aqnpipe.noise.receipts.table import fault_operator

if TYPE_CHECKING:
    from aqnpipe.noise.injection.phase import _RunningPhase


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


class FaultInjection:
    """The sites of one phase: those of the machine's faults, and decoder layers with a sigma above 0.

    `find` returns the module of a site (model, layer index, name), or raises ModelError if there is no such site.
    `shared` is for sites whose output is spread over tensor-parallel workers.
    """

    def __init__(
        self,
        state: "_RunningPhase",
        active_faults: Sequence[ActiveFault],
        hidden_sigmas: Mapping[int, float],
        find: Callable[[nn.Module, int, str], nn.Module],
        shared: SharedSite | None,
    ) -> None:
        self.state = state
        self._active_faults = active_faults
        self._hidden_sigmas = hidden_sigmas
        self._site_module = find
        self._shared = shared
        self._sites = self._find()

    def install(self, stack: ExitStack) -> None:
        """Register the hooks on the sites. Call it after all other hooks are registered."""
        for site in self._sites:
            keep(stack, site.module.register_forward_hook(PlaceHook(partial(self._leave, site))))

    def _find(self) -> list[_Site]:
        faults: dict[tuple[int, str], dict[int, ActiveFault]] = {
            (layer, "layer_output"): {} for layer, sigma in self._hidden_sigmas.items() if sigma > 0
        }
        for number, active in enumerate(self._active_faults):
            faults.setdefault((active.fault.layer, active.fault.site), {})[number] = active
        return [
            _Site(
                layer,
                self._site_module(self.state.model, layer, site),
                site_faults,
                self._hidden_sigmas.get(layer, 0.0) if site == "layer_output" else 0.0,
            )
            for (layer, site), site_faults in faults.items()
        ]

    def _leave(self, site: _Site, module: nn.Module, args: Any, output: Any) -> Any:
        through: Callable[[Tensor], Tensor] = partial(self._through, site)
        if self._shared is not None:
            through = self._shared(module, through)
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
