"""Gaps of an exact diagnosis: what it did not test. A verdict says no more than was tested, so every gap has a line."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from aqnpipe.artifacts.diagnoses import Untested
from aqnpipe.diagnosis.capture import hooked
from aqnpipe.diagnosis.checks import CHECKSUM_PROBES, OUTSIDE_LAYERS, Check
from aqnpipe.diagnosis.probes import linears
from aqnpipe.diagnosis.probes.experts import experts_of, router_of
from aqnpipe.diagnosis.probes.flow import FINITE
from aqnpipe.diagnosis.probes.patterns import FEW_ROWS, ProbeInputs
from aqnpipe.diagnosis.probes.sequences import long_batch, longest_sequence
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import LayerSites

WITHOUT_ANSWER = ("repeat", "monomial", "finite", FINITE, *CHECKSUM_PROBES)
"""Probes that compare the device with itself, or weights in memory, with which no module was run."""

_OVER_RANGE = ("norm_range", "norm_in_model")

_ONLY_REPEATED = "no known answer for this structure, only repeated"
_TRANSPOSED = "a linear with a transposed weight (Conv1D), only repeated as a part of its block"
_WITHOUT_WEIGHT = "a norm without a weight, or of an ambiguous name, that no probe runs"
_NO_PROBE = "no probe of it ran"
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


Gap = tuple[str, str, int]
"""A part that was not tested, the reason, and the layer."""


def by_part(gaps: Iterable[Gap]) -> tuple[Untested, ...]:
    """Return gaps with all layers of each part and reason."""
    layers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for part, reason, layer in gaps:
        layers[part, reason].append(layer)
    return tuple(Untested(part=part, layers=tuple(own), reason=why) for (part, why), own in sorted(layers.items()))


def untested_sites(layers: Sequence[LayerSites], checks: Sequence[Check]) -> tuple[Untested, ...]:
    """Return the sites of layers without a known answer; they were only repeated, or not compared at all.

    Repeats are not compared on a device that adds in another order in every call, where they have no error bound.
    """
    repeated = {(check.layer, check.site) for check in checks if check.probe == "repeat" and check.elements_per_channel}
    known, gaps = _tested_sites(checks), []
    for index, sites in enumerate(layers):
        # GPT-2 has two modules named c_proj in every layer; the name of the module around it distinguishes them.
        reasons = {".".join(path.split(".")[-2:]): _TRANSPOSED for path, m in _named(sites) if _is_transposed(m)}
        plain = {path.rsplit(".", 1)[-1] for path, module in _named(sites) if isinstance(module, nn.Linear)}
        for name in plain | sites.modules.keys():
            reasons[name] = _ONLY_REPEATED if (index, name) in repeated else _NOT_COMPARED
        for path, module in _named(sites):
            if "norm" in type(module).__name__.lower():
                reasons.setdefault(path.rsplit(".", 1)[-1], _WITHOUT_WEIGHT)
        gaps += [(name, reason, index) for name, reason in reasons.items() if (index, name) not in known]
    return by_part(gaps)


def _named(sites: LayerSites) -> list[tuple[str, nn.Module]]:
    return list(sites.layer.named_modules())


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
    narrow = tested - {(check.layer, check.site) for check in checks if check.probe in _OVER_RANGE}
    norms = [(name, index) for index, sites in enumerate(layers) for name in sites.norms if (index, name) in narrow]
    found = by_part((f"{name} outside a mean square of 1024", _NO_PROBE, index) for name, index in norms)
    missing = [site.replace("_", " ") for site in outer if (OUTSIDE_LAYERS, site) not in tested]
    found += tuple(Untested(part=part, reason=_NO_PROBE) for part in missing)
    return found if outer else (*found, Untested(part="final norm", reason="no norm with a weight was found"))


def untested_parts(
    checks: Sequence[Check], num_layers: int, dtype: torch.dtype, inputs: ProbeInputs
) -> tuple[Untested, ...]:
    """Return the parts of the model that no probe that ran tests, and the shapes and bits that probes leave out.

    A part of layers is named with the layers without it, if other layers have it.
    """
    compared = [check for check in checks if check.elements_per_channel]
    ran = {(check.layer, name) for check in compared for name in (check.probe, check.site)}
    anywhere = {check.probe for check in compared}
    found = [Untested(part=part, reason=_NO_PROBE) for part, names in PARTS.items() if not anywhere & set(names)]
    for part, names in PARTS_OF_LAYERS.items():
        without = tuple(layer for layer in range(num_layers) if not any((layer, name) in ran for name in names))
        if without:
            found.append(Untested(part=part, layers=without if len(without) < num_layers else (), reason=_NO_PROBE))
    if dtype == torch.float32 and inputs.bits < 24:
        reason = f"torch allows products that keep {inputs.bits} bits (torch.get_float32_matmul_precision)"
        found.append(Untested(part=f"mantissa bits of float32 products below the first {inputs.bits}", reason=reason))
    return tuple(found)


def limits(model: nn.Module, layers: Sequence[LayerSites], checks: Sequence[Check]) -> tuple[Untested, ...]:
    """Return what no diagnosis tests: other shapes, learned positions, some gradients, other attention kernels."""
    used = getattr(model.config, "_attn_implementation", None)
    without_probe = ["gains", "biases", "rotary embedding", "gated products", "residual sums", "lm_head"]
    if any(experts_of(sites.layer) is not None or router_of(sites.layer) is not None for sites in layers):
        without_probe[:0] = ["experts", "router"]
    tokens = model.get_input_embeddings()  # type: ignore[operator]
    others = [name for name, m in model.named_modules() if isinstance(m, nn.Embedding) and m is not tokens]
    small, few = (", ".join(map(str, numbers)) for numbers in (linears.SMALL, FEW_ROWS))
    of_gradients = ", ".join(map(str, linears.SMALL_OF_GRADIENTS))
    parts = {
        "linears with other numbers of rows": f"{small} and those of the sequences in every layer, {linears.LARGE} in "
        f"1 of {len(layers)} layers, gradients with {of_gradients} in every layer, {linears.LARGE_OF_GRADIENTS} in one "
        "(by the seed)",
        **dict.fromkeys(others, "no probe reads its rows"),
        f"gradients of {', '.join(without_probe)}": "no probe differentiates them",
        "other numbers of sequences": f"1, 4, 6 and {long_batch(model)[0]} through the whole model, attention also "
        "with 2, 3 and 16, its gradients with 4",
        "operations beside linears with other numbers of rows": f"activations, experts and router ran with {few} and "
        "hundreds, norms and residual sums with those of the sequences and hundreds",
        "longer sequences": f"the longest had {longest_sequence(model)} tokens",
        "other attention kernels": f"the model ran with {used}",
    }
    if not any(check.probe == "shapes" for check in checks):
        del parts["linears with other numbers of rows"]
    return tuple(Untested(part=part, reason=reason) for part, reason in parts.items())


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a linear of GPT-2, whose weight is [in, out]; its products have no known answer."""
    return type(module).__name__ == "Conv1D"


@contextmanager
def metered(layers: Sequence[LayerSites], num_tokens: int) -> Iterator[Callable[[], float]]:
    """Count multiply-adds in the linear modules of `layers`; the body gets a function that returns the cost so far.

    The unit is a forward of the whole model: `num_tokens` tokens through all layers.
    """
    modules = (module for sites in layers for module in sites.layer.modules())
    sizes = {
        module: (weight.shape[0 if _is_transposed(module) else 1], weight.numel())
        for module in modules
        if (isinstance(module, nn.Linear) or _is_transposed(module))
        and isinstance(weight := getattr(module, "weight", None), torch.Tensor)
    }
    if not sizes:
        raise ModelError("the decoder layers have no linear modules to probe; use another model family")
    counted = [0]

    def count(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs, size = sizes[module]
        counted[0] += args[0].numel() // inputs * size

    with hooked(module.register_forward_pre_hook(count) for module in sizes):
        yield lambda: counted[0] / (num_tokens * sum(size for _, size in sizes.values()))
