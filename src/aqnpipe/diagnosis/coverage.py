"""Gaps of an exact diagnosis: what it did not test. A verdict says no more than was tested, so every gap has a line."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from aqnpipe.artifacts.diagnoses import Untested
from aqnpipe.diagnosis.capture import hooked
from aqnpipe.diagnosis.checks import CHECKSUM_PROBES, OUTSIDE_LAYERS, Check
from aqnpipe.diagnosis.probes.flow import FINITE
from aqnpipe.diagnosis.probes.patterns import ProbeInputs
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import LayerSites

WITHOUT_ANSWER = ("repeat", "monomial", "finite", FINITE, *CHECKSUM_PROBES)
"""Probes that compare the device with itself, or weights in memory, with which no module was run."""

_OVER_RANGE = ("norm_range", "norm_in_model")

_ONLY_REPEATED = "no known answer for this structure, only repeated"
_TRANSPOSED = "a linear with a transposed weight (Conv1D), only repeated as a part of its block"
_WITHOUT_WEIGHT = "a norm without a weight, or of an ambiguous name, that no probe runs"
_NOT_COMPARED = "no known answer for this structure, and no repeats that could be compared on this device"

PARTS = {
    "embedding": ("embedding",),
    "lm_head": ("head",),
    "weights in memory": ("weights",),
}
"""Parts of a model outside its layers, and the probes that test them."""

PARTS_OF_LAYERS = {
    "activation outside the probed point": ("activation",),
    "attention over more than one key": ("attention_one_hot", "attention_uniform"),
    "KV cache and decode": ("cache",),
    "inputs of attention": ("attention_input",),
    "inputs of MLPs": ("mlp_input",),
    "backward pass": ("backward",),
    "kernels for other shapes": ("shapes",),
}
"""Parts of every layer, and the probes or sites of which one has to be compared in it."""


def untested_sites(layers: Sequence[LayerSites], checks: Sequence[Check]) -> tuple[Untested, ...]:
    """Return the sites of layers without a known answer; they were only repeated, or not compared at all.

    Repeats are not compared on a device that adds in another order in every call, where they have no error bound.
    """
    repeated = {(check.layer, check.site) for check in checks if check.probe == "repeat" and check.elements_per_channel}
    known = _tested_sites(checks)
    missing: dict[tuple[str, str], list[int]] = {}
    for index, sites in enumerate(layers):
        inside = {path.rsplit(".", 1)[-1] for path, m in sites.layer.named_modules() if isinstance(m, nn.Linear)}
        transposed = {_two_parts(path) for path, m in sites.layer.named_modules() if _is_transposed(m)}
        for name in sorted({*sites.modules} | inside | transposed | _norms_inside(sites)):
            if (index, name) not in known:
                reason = _ONLY_REPEATED if (index, name) in repeated else _NOT_COMPARED
                reason = _TRANSPOSED if name in transposed else reason
                reason = _WITHOUT_WEIGHT if name not in {*sites.modules} | inside | transposed else reason
                missing.setdefault((name, reason), []).append(index)
    return tuple(
        Untested(part=name, layers=tuple(found), reason=reason) for (name, reason), found in sorted(missing.items())
    )


def _two_parts(path: str) -> str:
    """Return the end of a path with its owner: GPT-2 has two modules of the name c_proj in every layer."""
    return ".".join(path.split(".")[-2:])


def _norms_inside(sites: LayerSites) -> set[str]:
    """Return the names of the norms of a layer, also of those without a weight."""
    paths = [path for path, module in sites.layer.named_modules() if "norm" in type(module).__name__.lower()]
    return {path.rsplit(".", 1)[-1] for path in paths}


def _tested_sites(checks: Sequence[Check]) -> set[tuple[int, str]]:
    """Return the sites at which a value was compared with a known answer."""
    return {
        (c.layer, c.site) for c in checks if c.probe not in WITHOUT_ANSWER and (c.elements_per_channel or c.mismatch)
    }


def untested_norms(
    layers: Sequence[LayerSites], outer: Collection[str], checks: Sequence[Check]
) -> tuple[Untested, ...]:
    """Return the norms of layers that ran with one mean square only, and those outside the layers, `outer`, not at all.

    Norms of layers without any known answer are among the untested sites.
    """
    tested = _tested_sites(checks)
    ranged = {(check.layer, check.site) for check in checks if check.probe in _OVER_RANGE}
    narrow: dict[str, list[int]] = {}
    for index, sites in enumerate(layers):
        for name in sites.norms:
            if (index, name) in tested - ranged:
                narrow.setdefault(f"{name} outside a mean square of 1024", []).append(index)
    found = [Untested(part=part, layers=tuple(own), reason="no probe of it ran") for part, own in narrow.items()]
    missing = [site for site in outer if (OUTSIDE_LAYERS, site) not in tested]
    found += [Untested(part=site.replace("_", " "), reason="no probe of it ran") for site in missing]
    return (*found, *([] if outer else [Untested(part="final norm", reason="no norm with a weight was found")]))


def untested_parts(
    checks: Sequence[Check], num_layers: int, dtype: torch.dtype, inputs: ProbeInputs
) -> tuple[Untested, ...]:
    """Return the parts of the model that no probe that ran tests, and the shapes and bits that probes leave out.

    A part of layers is named with the layers without it, if other layers have it.
    """
    ran = {(check.layer, name) for check in checks if check.elements_per_channel for name in (check.probe, check.site)}
    anywhere = {check.probe for check in checks if check.elements_per_channel}
    reason = "no probe of it ran"
    found = [Untested(part=part, reason=reason) for part, names in PARTS.items() if not anywhere & set(names)]
    for part, names in PARTS_OF_LAYERS.items():
        without = tuple(layer for layer in range(num_layers) if not any((layer, name) in ran for name in names))
        if without:
            found.append(Untested(part=part, layers=without if len(without) < num_layers else (), reason=reason))
    if dtype == torch.float32 and inputs.bits < 24:
        reason = f"torch allows products that keep {inputs.bits} bits (torch.get_float32_matmul_precision)"
        found.append(Untested(part=f"mantissa bits of float32 products below the first {inputs.bits}", reason=reason))
    return tuple(found)


@dataclass
class Cost:
    """Multiply-adds so far in the linear modules of the layers, and those of one batch through all layers."""

    whole_model: int
    multiply_adds: int = field(default=0)

    @property
    def forward_equivalents(self) -> float:
        """Cost in forwards of the whole model."""
        return self.multiply_adds / self.whole_model


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a linear of GPT-2, whose weight is [in, out]; its products have no known answer."""
    return type(module).__name__ == "Conv1D"


def _weight(module: nn.Module) -> tuple[int, int] | None:
    """Return the number of inputs and the size of the weight of a linear; None for other modules."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not (isinstance(module, nn.Linear) or _is_transposed(module)):
        return None
    return weight.shape[0 if _is_transposed(module) else 1], weight.numel()


@contextmanager
def metered(layers: Sequence[LayerSites], num_tokens: int) -> Iterator[Cost]:
    """Count multiply-adds in the linear modules of `layers`; the unit is `num_tokens` tokens through all layers."""
    linears = {module: weight for sites in layers for module in sites.layer.modules() if (weight := _weight(module))}
    if not linears:
        raise ModelError("the decoder layers have no linear modules to probe; use another model family")
    cost = Cost(whole_model=num_tokens * sum(size for _, size in linears.values()))

    def count(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs, size = linears[module]
        cost.multiply_adds += args[0].numel() // inputs * size

    with hooked(module.register_forward_pre_hook(count) for module in linears):
        yield cost
