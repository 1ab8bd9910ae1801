"""Between the modules of a layer: what attention and MLP read, and the sum that ends a mixture of experts.

Every tensor that a block reads has to be one that the layer has read or written before, bit for bit: its input, the
output of a norm, or the sum of its input and a branch. Which of them it is depends on the architecture, so the one that
fits best is compared.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aqnpipe.diagnosis.checks import Check, compare, differs
from aqnpipe.diagnosis.experts import experts_of
from aqnpipe.diagnosis.reference import on_host
from aqnpipe.diagnosis.trace import first_input, first_tensor
from aqnpipe.error_bounds import few_roundings
from aqnpipe.models.sites import LayerSites

ATTENTION_INPUT = "attention_input"
MLP_INPUT = "mlp_input"

_SHARED = ("shared_expert", "shared_experts")
_GATE_OF_SHARED = "shared_expert_gate"


def block_hooks(sites: LayerSites, layer: int, record: Callable[[Check], None]) -> list[RemovableHandle]:
    """Register hooks that pass the checks of a layer's blocks to `record` in every call of the layer."""
    return [*_handoff_hooks(sites, layer, record), *_mixture_hooks(sites.mlp, layer, record)]


@dataclass
class _Written:
    """The input of the layer in its current call, and what its modules wrote so far: norms and attention."""

    hidden: Tensor | None = None
    outputs: list[Tensor] = field(default_factory=list)

    def begin(self, hidden: Tensor) -> None:
        self.hidden, self.outputs = hidden, []

    def candidates(self, like: Tensor) -> list[Tensor]:
        """Return on the host, in the shape of `like`, what a block that reads `like` may have read."""
        if self.hidden is None or self.hidden.numel() != like.numel():
            return []
        same = (tensor for tensor in (self.hidden, *self.outputs) if tensor.numel() == like.numel())
        hidden, *outputs = (tensor.detach().cpu().reshape(like.shape) for tensor in same)
        return [hidden, *outputs, *(hidden + output for output in outputs)]


def _handoff_hooks(sites: LayerSites, layer: int, record: Callable[[Check], None]) -> list[RemovableHandle]:
    written = _Written()

    def compare_input(site: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with on_host():
            seen = first_input(args, kwargs).detach().cpu()
            candidates = written.candidates(seen)
            if candidates:
                best = min(candidates, key=lambda tensor: int(differs(tensor, seen).sum()))
                record(compare("handoff", layer, site, best, seen))

    blocks = [(ATTENTION_INPUT, sites.attention)]
    if not isinstance(sites.mlp, nn.Linear):  # the layers of OPT have no module around their MLP
        blocks.append((MLP_INPUT, sites.mlp))
    handles = [
        sites.layer.register_forward_pre_hook(lambda m, a, kw: written.begin(first_input(a, kw)), with_kwargs=True),
        *(
            module.register_forward_hook(lambda m, a, out: written.outputs.append(first_tensor(out)))
            for module in sites.layer.children()
        ),
    ]
    return handles + [
        block.register_forward_pre_hook(lambda m, a, kw, s=site: compare_input(s, a, kw), with_kwargs=True)
        for site, block in blocks
    ]


def _mixture_hooks(block: nn.Module, layer: int, record: Callable[[Check], None]) -> list[RemovableHandle]:
    """Compare the output of a mixture with that of its routed and shared experts; no hooks on other blocks."""
    routed, children = experts_of(block), dict(block.named_children())
    if routed is None or routed not in children.values():
        return []
    shared = next((children[name] for name in _SHARED if name in children), None)
    parts = {"routed": routed, "shared": shared, "gate": children.get(_GATE_OF_SHARED)}
    seen: dict[str, Tensor] = {}

    def compare_sum(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if "routed" in seen:
            with on_host():
                host = {name: tensor.detach().cpu() for name, tensor in seen.items()}
                record(_sum_check(layer, host, first_tensor(output).detach().cpu()))
        seen.clear()

    # Some versions of transformers add the shared experts to the output of the routed ones in place.
    handles = [
        module.register_forward_hook(lambda m, a, out, n=name: seen.__setitem__(n, first_tensor(out).clone()))
        for name, module in parts.items()
        if module is not None
    ]
    return [*handles, block.register_forward_hook(compare_sum)]


def _sum_check(layer: int, terms: dict[str, Tensor], output: Tensor) -> Check:
    """Compare with the sum of the terms, which is rounded once; a gate and its product are rounded before it."""
    shared, gate = terms.get("shared"), terms.get("gate")
    flat = output.reshape(-1, output.shape[-1])
    expected = terms["routed"].reshape(flat.shape)
    if shared is None:
        return compare("output", layer, "mlp_output", expected, flat)
    other = shared.reshape(flat.shape)
    if gate is None:
        return compare("output", layer, "mlp_output", expected + other, flat)
    product = gate.reshape(-1, 1).double().sigmoid() * other.double()
    total = expected.double() + product
    one_rounding = torch.finfo(output.dtype).eps / 2 * (expected.double().abs() + product.abs())
    return compare(
        "output", layer, "mlp_output", total, flat, allowed=few_roundings(product, output.dtype) + 1.1 * one_rounding
    )
