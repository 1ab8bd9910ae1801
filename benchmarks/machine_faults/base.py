"""A fault as data: its operations, its places by role, and the answer that a report must give."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from machine_faults.device import OUTPUT, Behaviour, Call, emulated
from machine_faults.models import ARCHITECTURES, DTYPES, LAYERS, Architecture, Place

INSIDE_ATTENTION = "attention_core|core|score|softmax|mask|rotary|rope|pv|value|sdpa|flash|self_attn|attention$"
INSIDE_CACHE = f"{INSIDE_ATTENTION}|cache|decod"
INSIDE_MLP = "mlp_core|act|silu|gelu|exp|mlp$"
RESIDUAL = "layer_output|residual|add"
NORMS = "norm|rsqrt"
ENDS = {"embedding": "embed", "final_norm": "final_norm", "lm_head": "lm_head"}
"""Names that a report uses for the modules before and after the layers, whatever an architecture calls them."""


@dataclass(frozen=True)
class Change:
    """What an operation at the place of a role does instead; `change` gets the call and the place."""

    role: str
    ops: str
    change: Callable[[Call, Place], Any]
    when: Callable[[Call], bool] = lambda call: True
    layer_offset: int = 0
    """Layers between the layer of the fault and this change (faults at several places)."""


@dataclass(frozen=True)
class MachineFault:
    """A fault of a machine.

    sites: regular expression of the operations that a report may name; empty: the modules of the roles.
    where: one layer, every layer (device), or outside of the layers (ends).
    weights: change of the stored weights instead of the arithmetic: (model, path of the layer).
    """

    name: str
    group: str
    changes: tuple[Change, ...] = ()
    sites: str = ""
    where: Literal["layer", "device", "ends"] = "layer"
    needs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = DTYPES
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)
    attention: Literal["eager", "sdpa"] = "eager"
    permanent: bool = True
    backward: bool = False
    weights: Callable[[nn.Module, Architecture, int], None] | None = None
    weight_roles: tuple[str, ...] = ()
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext

    def fits(self, name: str, dtype: str) -> bool:
        """Whether this fault can occur in an architecture and dtype."""
        architecture = ARCHITECTURES[name]
        roles = {change.role for change in self.changes} | set(self.weight_roles)
        return (
            name in self.architectures
            and dtype in self.dtypes
            and roles - {"*"} <= architecture.places.keys()
            and set(self.needs) <= architecture.traits
        )

    def behaviours(self, architecture: Architecture, layer: int) -> list[Behaviour]:
        """Return the behaviours of the device with this fault in `layer`."""
        return [self._behaviour(change, architecture, layer) for change in self.changes]

    def _behaviour(self, change: Change, architecture: Architecture, layer: int) -> Behaviour:
        place = Place(".*") if change.role == "*" else architecture.places[change.role]
        layers = frozenset([(layer + change.layer_offset) % LAYERS]) if self.where == "layer" else None
        return Behaviour(
            ops=frozenset(change.ops.split()),
            change=lambda call: change.change(call, place),
            where=".*" if change.role == "*" else re.escape(place.path),
            layers=layers,
            when=change.when,
        )

    def accepted_sites(self, architecture: Architecture) -> str:
        """Return a regular expression of the sites that a report may name."""
        roles = [change.role for change in self.changes] + list(self.weight_roles)
        end = r"(\.\w+_gradient)?$" if self.backward else r"(\.\d+)?$"  # experts have numbers
        own = [f"^{re.escape(architecture.places[role].site)}{end}" for role in roles if role != "*"]
        return self.sites or "|".join(own + [ENDS[role] for role in roles if role in ENDS])

    @contextmanager
    def put_in(self, model: nn.Module, architecture: Architecture, layer: int) -> Iterator[None]:
        """Run `model` on a device with this fault; stored weights are restored afterwards."""
        device = emulated(model, self.behaviours(architecture, layer))
        with self.settings(), _corrupted(self, model, architecture, layer), device:
            yield


@contextmanager
def _corrupted(fault: MachineFault, model: nn.Module, architecture: Architecture, layer: int) -> Iterator[None]:
    if fault.weights is None:
        yield
        return
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        fault.weights(model, architecture, layer)
    try:
        yield
    finally:
        model.load_state_dict(kept)


def output(role: str, change: Callable[[Tensor, Place], Tensor], **more: Any) -> Change:
    """Return a change of the output of a module."""
    return Change(role, OUTPUT, lambda call, place: change(call.compute(), place), **more)


def result(role: str, ops: str, change: Callable[[Tensor], Tensor], **more: Any) -> Change:
    """Return a change of the result of operations in a module."""
    return Change(role, ops, lambda call, place: change(call.compute()), **more)


def layer_module(model: nn.Module, architecture: Architecture, layer: int, role: str) -> nn.Module:
    """Return the module of a role, in a layer or outside of layers."""
    place = architecture.places[role]
    if role in ("embedding", "final_norm", "lm_head"):
        return model.get_submodule(place.path)
    prefix = "gpt_neox" if architecture.model_type == "gpt_neox" else "model"
    return model.get_submodule(f"{prefix}.layers.{layer}.{place.path}")
