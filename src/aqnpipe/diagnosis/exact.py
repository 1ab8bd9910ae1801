"""Exact diagnosis: run every probe on every layer, allow for the rounding of the device, and classify the faults."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil, log

import torch
from torch import nn

from aqnpipe.artifacts.diagnoses import LocatedFault
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.capture import LayerInput, capture_layer_inputs, inference
from aqnpipe.diagnosis.checks import Check
from aqnpipe.diagnosis.classify import classify
from aqnpipe.diagnosis.patterns import exponent_ladder
from aqnpipe.diagnosis.probes import LayerProber, ProbeInputs, norm_offset
from aqnpipe.diagnosis.refine import refine_fault
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.sites import LayerSites, layer_sites

ROUNDING = 64.0
"""Deviations above this multiple of the dtype's epsilon are not rounding, on any device."""

HEALTHY_SPREAD = 4.0
"""On a device that rounds in a probe, a layer may deviate by this multiple of the median layer's deviation."""


@dataclass
class ExactResult:
    """Result of the exact probes. `unfit`: deviations of probes that most layers fail by more than rounding."""

    checks: list[Check]
    faults: tuple[LocatedFault, ...]
    tolerance: dict[str, float]
    unfit: dict[str, float]
    uncovered: tuple[str, ...]
    elements_per_channel: int
    forward_equivalents: float
    num_tokens: int


def run_exact(
    model: nn.Module, config: DiagnosisConfig, show_progress: Callable[[str], None] = lambda line: None
) -> ExactResult:
    """Probe the decoder layers of `model` one after the other; weights are restored bit for bit, also after an error.

    Cost is measured in multiply-adds of the linear modules of the layers. One forward equivalent is one pass of the
    probe's batch of tokens through all layers. Raises ModelError if the structure of the layers is unknown.
    """
    layers = [layer_sites(layer) for layer in decoder_layers(model)]
    like = next(iter(layers[0].layer.parameters()))
    num_tokens = tokens_needed(config, like.dtype)
    inputs = ProbeInputs(num_tokens, like.dtype, like.device)
    checks: list[Check] = []
    with inference(model), metered(layers, num_tokens) as cost:
        one_token, sequences = _layer_inputs(model, num_tokens, len(inputs.ladder), like.device)
        offsets = _norm_offsets(layers, like.dtype, like.device)
        probers = [
            LayerProber(index, sites, one_token[index].kwargs, offsets, config.seed)
            for index, sites in enumerate(layers)
        ]
        for prober in probers:
            show_progress(f"exact probes: layer {prober.index + 1} of {len(layers)}")
            checks += probe_layer(prober, inputs, sequences[prober.index], config.exact_repeats)
            sequences[prober.index] = replace(sequences[prober.index], kwargs={})
        tolerance, unfit = tolerances(checks, torch.finfo(like.dtype).eps, len(layers))
        suspects = suspected(checks, tolerance, unfit)
        faults = []
        for (layer, site), evidence in suspects.items():
            elements = [check for check in checks if (check.layer, check.site) == (layer, site)]
            fault = classify(layer, site, evidence, elements)
            faults.append(refine_fault(fault, evidence, probers[layer], inputs))
    return ExactResult(
        checks=checks,
        faults=tuple(sorted(faults, key=lambda fault: (fault.layer, fault.site))),
        tolerance=tolerance,
        unfit=unfit,
        uncovered=_uncovered(layers, checks),
        elements_per_channel=elements_per_channel(checks),
        forward_equivalents=cost.forward_equivalents,
        num_tokens=num_tokens,
    )


def tokens_needed(config: DiagnosisConfig, dtype: torch.dtype) -> int:
    """Return the number of tokens of a batch: whole Latin squares, enough to detect an intermittent fault anywhere.

    A fault with probability p per element is missed in n elements with probability (1-p)^n. Every site is checked at
    least `exact_repeats + 1` times per channel and token.
    """
    elements = log(config.miss_probability) / log(1 - config.intermittent_rate)
    period = len(exponent_ladder(dtype))
    squares = ceil(elements / (config.exact_repeats + 1) / period)
    return period * max(2, squares)


def probe_layer(prober: LayerProber, inputs: ProbeInputs, own_input: LayerInput, num_repeats: int) -> list[Check]:
    """Run every probe that fits the modules of the layer and return all checks."""
    linears = prober.sites.linears
    checks, trace = prober.repeat(own_input.hidden, own_input.kwargs, num_repeats)
    if {"o_proj", "down_proj"} <= linears.keys():
        checks += prober.identity(inputs)
        if "v_proj" in linears:
            checks += prober.attention(inputs)
    if {"gate_proj", "up_proj", "down_proj"} <= linears.keys():
        checks += prober.mlp(inputs)
    for name in linears:
        checks += prober.linear(name, inputs)
        checks += prober.integer(name, inputs)
        checks += prober.monomial(name, trace)
    for name in prober.sites.norms:
        checks += prober.norm(name, inputs)
    return checks


def tolerances(checks: Sequence[Check], eps: float, num_layers: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return (bounds by "probe:site" where the device rounds, deviations of probes that are unfit).

    - At least half of the layers agree bit for bit: every layer must.
    - The median deviation is within rounding: the device rounds there, and the bound is HEALTHY_SPREAD times the
      median.
    - The median deviation is larger, with three or more layers: the probe is unfit. Either its expected answer is wrong
      for this model or most layers are faulty, and the probe cannot distinguish the two.
    """
    by_place: dict[str, dict[int, float]] = defaultdict(dict)
    for check in checks:
        key = f"{check.probe}:{check.site}"
        by_place[key][check.layer] = max(check.deviation, by_place[key].get(check.layer, 0.0))
    bounds, unfit = {}, {}
    for key, deviations in by_place.items():
        middle = sorted(deviations.values())[(len(deviations) - 1) // 2]
        if middle == 0:
            continue
        if middle <= ROUNDING * eps:
            bounds[key] = HEALTHY_SPREAD * middle
        elif num_layers > 2:
            unfit[key] = middle
    return bounds, unfit


def suspected(
    checks: Sequence[Check], tolerance: dict[str, float], unfit: dict[str, float]
) -> dict[tuple[int, str], list[Check]]:
    """Return the checks that exceed their tolerance by (layer, site), each reduced to the channels that exceed it."""
    found: dict[tuple[int, str], list[Check]] = defaultdict(list)
    for check in checks:
        if check.mismatch and f"{check.probe}:{check.site}" not in unfit:
            found[check.layer, check.site].append(check)
    return dict(found)


def elements_per_channel(checks: Sequence[Check]) -> int:
    """Return the number of values probed per channel: the minimum over layers and sites."""
    seen: dict[tuple[int, str], int] = defaultdict(int)
    for check in checks:
        if check.probe != "monomial":
            seen[check.layer, check.site] += check.elements_per_channel
    return min(seen.values())


@dataclass
class Cost:
    """Multiply-adds so far in the linear modules of the layers, and those of one batch through all layers."""

    whole_model: int
    multiply_adds: int = field(default=0)

    @property
    def forward_equivalents(self) -> float:
        """Cost in forwards of the whole model."""
        return self.multiply_adds / self.whole_model


@contextmanager
def metered(layers: Sequence[LayerSites], num_tokens: int) -> Iterator[Cost]:
    """Count multiply-adds in the linear modules of `layers`; the unit is `num_tokens` tokens through all layers."""
    linears = [module for sites in layers for module in sites.layer.modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ModelError("the decoder layers have no linear modules to probe; use a model of another family")
    cost = Cost(whole_model=num_tokens * sum(module.weight.numel() for module in linears))

    def count(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, nn.Linear):
            cost.multiply_adds += args[0].numel() // module.in_features * module.weight.numel()

    handles = [module.register_forward_pre_hook(count) for module in linears]
    try:
        yield cost
    finally:
        for handle in handles:
            handle.remove()


def _layer_inputs(
    model: nn.Module, num_tokens: int, length: int, device: torch.device
) -> tuple[list[LayerInput], list[LayerInput]]:
    """Return layer inputs for one token, whose keyword arguments fit any batch of single tokens, and for sequences."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    ids = (torch.arange(num_tokens, device=device) * 7919 + 1) % embedding.num_embeddings
    return capture_layer_inputs(model, ids[:1].unsqueeze(0)), capture_layer_inputs(model, ids.reshape(-1, length))


def _norm_offsets(layers: Sequence[LayerSites], dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Return the weight offset of each norm (1 if it multiplies by 1 + weight, else 0) by majority of the layers."""
    votes: dict[str, list[float]] = defaultdict(list)
    for sites in layers:
        for name, module in sites.norms.items():
            votes[name].append(norm_offset(module, dtype, device))
    return {name: float(round(sum(found) / len(found))) for name, found in votes.items()}


def _uncovered(layers: Sequence[LayerSites], checks: Sequence[Check]) -> tuple[str, ...]:
    """Return the sites that only the repeat probe covered, because no known answer could be built for them."""
    known = {check.site for check in checks if check.probe not in ("repeat", "monomial")}
    sites = {name for layer in layers for name in layer.modules}
    repeated = {name for layer in layers for path, _ in layer.layer.named_modules() if (name := _last(path))}
    linears = {
        _last(path) for layer in layers for path, module in layer.layer.named_modules() if isinstance(module, nn.Linear)
    }
    return tuple(sorted((sites | (linears & repeated)) - known))


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]
