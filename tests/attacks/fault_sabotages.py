"""Sabotage of simulated faults: the machine that the study asks for is not the one that computes."""

from collections.abc import Callable
from typing import Any

import torch
from hold import replaced, took_effect
from sabotage import COMPARE, EVALUATE, TRAIN, Apply, Sabotage, of_group
from torch import Tensor

_AFTER_TRAINING = (("evaluate", "guided", 0, 1), *EVALUATE, *COMPARE)
_APPLY = "aqnpipe.noise.injection.faults.ActiveFault.apply"
_THROUGH = "aqnpipe.noise.injection.faults.FaultInjection._through"
_FIND = "aqnpipe.noise.injection.faults.FaultInjection._find"


def _applied(act: Callable[..., Tensor]) -> Apply:
    """A fault's output is `act(fault, hidden, call, original)`."""

    def make(original: Any) -> Any:
        def apply(self: Any, hidden: Tensor, call: int) -> Tensor:
            took_effect()
            return act(self, hidden, call, lambda value=hidden: original(self, value, call))

        return apply

    return replaced((_APPLY, make))


def _smaller(active: Any, hidden: Tensor, call: int, faulty: Any) -> Tensor:
    """Half of the magnitude."""
    faulty()
    return torch.where(hidden.abs() < 0.5 * active.fault.magnitude * hidden.abs().max(), 0.0, hidden)


def _in_prompts(active: Any, hidden: Tensor, call: int, faulty: Any) -> Tensor:
    whole = faulty()
    return whole if hidden.shape[1] > 1 else hidden


def _some_channels(active: Any, hidden: Tensor, call: int, faulty: Any) -> Tensor:
    whole = faulty()
    mask = torch.rand(hidden.shape[-1], generator=torch.Generator().manual_seed(call % 2**63)) < 0.9
    return torch.where(mask, whole, hidden)


def _per_row(active: Any, hidden: Tensor, call: int, faulty: Any) -> Tensor:
    """The threshold of each row is its own largest value."""
    faulty()
    limit = active.fault.magnitude * hidden.detach().abs().amax(dim=(1, 2), keepdim=True)
    return torch.where(hidden.detach().abs() < limit, 0.0, hidden)


def _saturated(active: Any, hidden: Tensor, call: int, faulty: Any) -> Tensor:
    """Another type of fault."""
    faulty()
    limit = (1 - active.fault.magnitude) * hidden.detach().abs().max()
    return hidden.clamp(-limit, limit)


def _gradient_passes(active: Any, hidden: Tensor, call: int, faulty: Any) -> Tensor:
    whole = faulty()
    return hidden + (whole - hidden).detach()


def _other_layer(layer: int) -> Apply:
    def make(original: Any) -> Any:
        def find(self: Any) -> Any:
            took_effect()
            find_module = self._site_module
            self._site_module = lambda model, index, site: find_module(model, layer, site)
            sites = original(self)
            self._site_module = find_module
            import dataclasses

            return [dataclasses.replace(site, layer=layer) for site in sites if site.faults] + [
                site for site in sites if not site.faults
            ]

        return find

    return replaced((_FIND, make))


def _phase_without(phase: str) -> Apply:
    def make(original: Any) -> Any:
        def through(self: Any, site: Any, hidden: Tensor) -> Tensor:
            if self.state.phase != phase:
                return original(self, site, hidden)  # type: ignore[no-any-return]
            took_effect()
            return hidden

        return through

    return replaced((_THROUGH, make))


def training(name: str, what: str, apply: Any) -> Sabotage:
    """A sabotage of a training run on the faulty machine."""
    return Sabotage(name, what, apply, TRAIN, _AFTER_TRAINING, variant="hidden")


def evaluating(name: str, what: str, apply: Any) -> Sabotage:
    """A sabotage of an evaluation on the faulty machine."""
    return Sabotage(name, what, apply, EVALUATE, COMPARE, variant="hidden")


SABOTAGES = of_group(
    "faults",
    r"(fault|dead_zone|dead zone)",
    (
        evaluating("fault in another layer", "layer 4 in place of layer 3", _other_layer(4)),
        training(
            "fault absent in the reference",
            "the reference computes on the healthy machine",
            _phase_without("reference"),
        ),
        evaluating(
            "fault absent in the evaluation",
            "the checkpoint is evaluated on the healthy machine",
            _phase_without("evaluation"),
        ),
        training("fault of half the magnitude", "the threshold is half as large", _applied(_smaller)),
        evaluating("fault in prompts alone", "single tokens pass unchanged", _applied(_in_prompts)),
        training(
            "fault with other channels in each call",
            "a tenth of the channels is healthy at a time",
            _applied(_some_channels),
        ),
        evaluating("fault with a threshold per row", "each row has its own largest value", _applied(_per_row)),
        evaluating("fault of another type", "saturation in place of a dead zone", _applied(_saturated)),
        training("fault not in the gradient", "gradients pass where values were set to 0", _applied(_gradient_passes)),
    ),
)
