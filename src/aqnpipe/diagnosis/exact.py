"""The exact set: every probe on every layer, what a healthy device may deviate, and the faults that remain."""

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
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.sites import LayerSites, layer_sites

ROUNDING = 64.0
"""A deviation of more than this many times the dtype's epsilon is no rounding, on any device."""

HEALTHY_SPREAD = 4.0
"""On a device that is not exact at a probe, a layer may deviate this many times as far as the median layer."""


@dataclass
class ExactResult:
    """What the exact set found. `unfit`: deviations of the probes that most layers fail by more than rounding."""

    checks: list[Check]
    faults: tuple[LocatedFault, ...]
    tolerance: dict[str, float]
    unfit: dict[str, float]
    uncovered: tuple[str, ...]
    elements_per_channel: int
    forward_equivalents: float
    num_tokens: int


def run_exact(model: nn.Module, config: DiagnosisConfig, say: Callable[[str], None] = lambda line: None) -> ExactResult:
    """Probe every decoder layer of `model`, one after the other; weights come back bit for bit on every way out.

    Cost is counted in multiply-adds of the layers' linears; one forward equivalent is the probe's batch of tokens once
    through all layers. Raises ModelError if the layers are not understood.
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
            say(f"exact probes: layer {prober.index + 1} of {len(layers)}")
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
    """Return the tokens of a batch: whole Latin squares, and enough to see an intermittent fault on any channel.

    A fault of probability p per element escapes n elements with probability (1-p)^n; every site is checked at least
    `exact_repeats + 1` times per channel and token.
    """
    elements = log(config.miss_probability) / log(1 - config.intermittent_rate)
    period = len(exponent_ladder(dtype))
    squares = ceil(elements / (config.exact_repeats + 1) / period)
    return period * max(2, squares)


def probe_layer(prober: LayerProber, inputs: ProbeInputs, own_input: LayerInput, num_repeats: int) -> list[Check]:
    """Run every probe that the layer's modules allow and return all checks."""
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
    """Return (bounds by "probe:site" where the device is not exact, deviations of probes that do not fit at all).

    Where at least half of the layers agree in every bit, all are held to bits. Where they do not, but deviate by no
    more than rounding, the device rounds there, and a layer may deviate HEALTHY_SPREAD times the median. A larger
    median of three layers or more means that the probe's answer is not this model's, or that most layers are faulty:
    nobody can tell which from inside.
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
    """Return the checks beyond tolerance by (layer, site), each with only the channels that are beyond it."""
    found: dict[tuple[int, str], list[Check]] = defaultdict(list)
    for check in checks:
        key = f"{check.probe}:{check.site}"
        beyond = check.mismatch.beyond(tolerance.get(key, 0.0)) if check.mismatch and key not in unfit else None
        if beyond:
            found[check.layer, check.site].append(replace(check, mismatch=beyond))
    return dict(found)


def elements_per_channel(checks: Sequence[Check]) -> int:
    """Return how many values were seen on every channel of every site: the smallest number over layers and sites."""
    seen: dict[tuple[int, str], int] = defaultdict(int)
    for check in checks:
        if check.probe != "monomial":
            seen[check.layer, check.site] += check.elements_per_channel
    return min(seen.values())


@dataclass
class Cost:
    """Multiply-adds of the layers' linears so far, in units of one batch through all layers."""

    whole_model: int
    multiply_adds: int = field(default=0)

    @property
    def forward_equivalents(self) -> float:
        """Cost in whole-model forwards."""
        return self.multiply_adds / self.whole_model


@contextmanager
def metered(layers: Sequence[LayerSites], num_tokens: int) -> Iterator[Cost]:
    """Count what the linears of `layers` compute during the body; the unit is `num_tokens` through all of them."""
    linears = [module for sites in layers for module in sites.layer.modules() if isinstance(module, nn.Linear)]
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
    """Return layer inputs for one token (whose keyword arguments fit any batch of single tokens) and for sequences."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    ids = (torch.arange(num_tokens, device=device) * 7919 + 1) % embedding.num_embeddings
    return capture_layer_inputs(model, ids[:1].unsqueeze(0)), capture_layer_inputs(model, ids.reshape(-1, length))


def _norm_offsets(layers: Sequence[LayerSites], dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Return for each norm whether it multiplies by 1 + weight; the majority of layers decides."""
    votes: dict[str, list[float]] = defaultdict(list)
    for sites in layers:
        for name, module in sites.norms.items():
            votes[name].append(norm_offset(module, dtype, device))
    return {name: float(round(sum(found) / len(found))) for name, found in votes.items()}


def _uncovered(layers: Sequence[LayerSites], checks: Sequence[Check]) -> tuple[str, ...]:
    """Return the sites that only a repeat saw: no known answer could be built for them."""
    known = {check.site for check in checks if check.probe not in ("repeat", "monomial")}
    sites = {name for layer in layers for name in layer.modules}
    repeated = {name for layer in layers for path, _ in layer.layer.named_modules() if (name := _last(path))}
    linears = {
        _last(path) for layer in layers for path, module in layer.layer.named_modules() if isinstance(module, nn.Linear)
    }
    return tuple(sorted((sites | (linears & repeated)) - known))


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]
