"""Exact diagnosis: run every probe on every layer, and name the fault behind every wrong answer.

A probe expects something of the structure of a layer: that its output is the input plus two branches, or that a gate
multiplies. Layers of other families do something else, and the probe then fails on every healthy device. A copy of the
layer on the CPU, without hooks and without patched forwards, decides which of the two it is: where the copy fails too,
the probe does not fit. It is in float64, whose kernels share little with those under test; in float32 where the probe
runs fused experts, because torch multiplies groups of matrices in no wider format. Other layers decide nothing, because
a fault of the device is in all of them.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from aqnpipe.artifacts.diagnoses import LocatedFault, Untested
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.device import determinism_requested
from aqnpipe.diagnosis.capture import LayerInput, capture_layer_inputs, inference
from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, Check, Mismatch
from aqnpipe.diagnosis.classify import Evidence, Mark, classify, mark_of, mismatching, most_informative, suspects
from aqnpipe.diagnosis.coverage import metered, untested_norms, untested_parts, untested_sites
from aqnpipe.diagnosis.probes import linears
from aqnpipe.diagnosis.probes.layers import LayerProber, norm_offset, subtracts_mean
from aqnpipe.diagnosis.probes.model import model_checks, without_consequences
from aqnpipe.diagnosis.probes.outer_modules import outer_norms
from aqnpipe.diagnosis.probes.patterns import ProbeInputs, exponent_ladder
from aqnpipe.diagnosis.probes.reference import LEAST_ROWS
from aqnpipe.diagnosis.probes.repeats import Part, as_repeated, repeat, without_false_noise
from aqnpipe.diagnosis.stored_weights import (
    compare_with_earlier,
    compare_with_file,
    refuse_weights_that_are_not_finite,
    row_checksums,
)
from aqnpipe.models.layout import LayerSites, decoder_layers, layer_sites

_STRUCTURAL = ("identity", "attention", "mlp", "norm")
"""Probes that expect something of the structure of a layer; a linear is a linear in every family."""

_LOWERED_BY = 4
"""The largest value of the second call is smaller by this many powers of two."""
_WITH_REFERENCE = ("dead_zone", "saturation", "bias", "noise")


@dataclass
class ExactResult:
    """Result of the exact probes. `reordered`: sites whose repeats differ within the error bound of their sum.

    `elements_per_channel` and `calls_per_site` are minima over layers and sites. `float32_product_bits`: bits of an
    operand that products keep, measured where torch allows fewer than 24 or a fault of the device suggests it.
    """

    checks: list[Check]
    faults: tuple[LocatedFault, ...]
    untested: tuple[Untested, ...]
    reordered: tuple[str, ...]
    elements_per_channel: int
    calls_per_site: int
    forward_equivalents: float
    num_tokens: int
    device: str
    float32_product_bits: int | None = None


def run_exact(
    model: nn.Module,
    config: DiagnosisConfig,
    show_progress: Callable[[str], None] = lambda line: None,
    weights: Path | None = None,
) -> ExactResult:
    """Probe the decoder layers of `model` one after the other; weights are restored bit for bit, also after an error.

    With `weights`, the folder that the model was loaded from, every weight in memory is compared with its file first,
    and in any case with itself before and after the probes.

    Cost is measured in multiply-adds of the linear modules of the layers. One forward equivalent is one pass of the
    probe's batch of tokens through all layers. Raises ModelError if the structure of the layers is unknown
    or a weight is not finite and its file, if there is one, says the same.
    """
    layers = [layer_sites(layer) for layer in decoder_layers(model)]
    like = next(iter(layers[0].layer.parameters()))
    num_tokens = tokens_needed(config, like.dtype)
    inputs = ProbeInputs(num_tokens, like.dtype, like.device, seed=config.seed)
    checks: list[Check] = [] if weights is None else compare_with_file(model, weights)
    if not any(check.mismatch for check in checks):  # what differs from its file is a fault of the memory
        refuse_weights_that_are_not_finite(model)
    before = row_checksums(model)
    reordered: set[str] = set()
    with inference(model), determinism_requested(), metered(layers, num_tokens) as cost:
        one_token, sequences = _layer_inputs(model, num_tokens, len(inputs.ladder), like.device)
        offsets = _norm_offsets(layers, like.dtype, like.device)
        probers = [LayerProber(index, sites, one_token[index].kwargs, offsets) for index, sites in enumerate(layers)]
        for prober in probers:
            show_progress(f"exact probes: layer {prober.index + 1} of {len(layers)}")
            found, changing = probe_layer(prober, inputs, sequences[prober.index], config.exact_repeats)
            checks += found
            reordered |= set(changing)
            sequences[prober.index] = replace(sequences[prober.index], kwargs={})
        parts, unreached = model_checks(model, layers, config.seed, show_progress, elements_needed(config))
        more = [check for part in parts for check in part.checks] + compare_with_earlier(model, before)
        checks, unfit = _without_misfits(without_consequences(checks + more), probers, inputs)
        faults = _faults(checks, probers, inputs, parts)
    return ExactResult(
        checks=checks,
        faults=faults,
        untested=(
            *untested_sites(layers, checks),
            *unfit,
            *unreached,
            *untested_norms(layers, outer_norms(model), checks),
            *untested_parts(checks, len(layers), like.dtype, inputs),
        ),
        reordered=tuple(sorted(reordered)),
        elements_per_channel=_least(checks, lambda check: check.elements_per_channel),
        calls_per_site=_least(checks, lambda check: check.calls),
        forward_equivalents=cost.forward_equivalents,
        num_tokens=num_tokens,
        device=like.device.type,
        float32_product_bits=_product_bits(layers, inputs, faults),
    )


def tokens_needed(config: DiagnosisConfig, dtype: torch.dtype) -> int:
    """Return the number of tokens of a batch: whole Latin squares, enough to detect an intermittent fault anywhere.

    A fault with probability p per element is missed in n elements with probability (1-p)^n. Every site is checked at
    least `exact_repeats + 1` times per channel and token. A batch has more than 512 rows, so that every linear, norm
    and sum of every layer runs the kernels for many rows.
    """
    elements = elements_needed(config)
    period = len(exponent_ladder(dtype))
    squares = ceil(elements / (config.exact_repeats + 1) / period)
    return period * max(_LEAST_SQUARES, squares, ceil(LEAST_ROWS / period))


def elements_needed(config: DiagnosisConfig) -> int:
    """Return the values per channel that an intermittent fault escapes with the probability of the settings."""
    return ceil(log(config.miss_probability) / log(1 - config.intermittent_rate))


_COUNTED = (
    *("identity", "linear", "mantissa", "integer", "accumulator", "bias", "attention", "mlp", "norm", "repeat"),
    *("head", "norm_range"),
)
"""Probes whose values count for the probability of a miss: those of linears, norms, cores, sums and lm_head."""

_LEAST_SQUARES = 4
"""Two for each half of a linear probe: one of powers of two, one of full mantissas."""


def probe_layer(
    prober: LayerProber, inputs: ProbeInputs, own_input: LayerInput, num_repeats: int
) -> tuple[list[Check], list[str]]:
    """Run every probe that fits the layer; return all checks and the sites that add in changing order."""
    repeats = repeat(prober.index, prober.sites, own_input.hidden, own_input.kwargs, num_repeats)
    checks = [*repeats.checks, *_composite_probes(prober, inputs)]
    for name, module in prober.sites.linears.items():
        for probe in (linears.selecting, linears.summing, linears.biased):
            checks += probe(prober.index, name, module, inputs)
        fed, output = repeats.trace.inputs[name], repeats.trace.outputs[name]
        checks.append(linears.monomial(prober.index, name, module, fed, output))
    if repeats.reordered:
        # Repeats get different inputs behind such a site and are not compared there; known answers take their place.
        for _ in range(num_repeats - 2):
            checks += _composite_probes(prober, inputs)
    return checks, repeats.reordered


def _composite_probes(prober: LayerProber, inputs: ProbeInputs) -> list[Check]:
    """Run the probes of the layer, attention, MLP and norms that fit the modules of the layer."""
    names = prober.sites.linears.keys()
    checks: list[Check] = []
    if {"o_proj", "down_proj"} <= names:
        checks += prober.identity(inputs)
        if "v_proj" in names:
            checks += prober.attention(inputs)
    if {"gate_proj", "up_proj", "down_proj"} <= names:
        checks += prober.mlp(inputs)
    for name, module in prober.sites.norms.items():
        if not subtracts_mean(module):
            checks += prober.norm(name, inputs)
    return checks


def _without_misfits(
    checks: list[Check], probers: Sequence[LayerProber], inputs: ProbeInputs
) -> tuple[list[Check], tuple[Untested, ...]]:
    """Return the checks without those of structural probes that do not fit their layer, and a note on each site."""
    wrong_alone = {(c.layer, c.site) for c in checks if c.mismatch and c.probe in ("linear", "mantissa")}
    failing = {
        (c.layer, c.probe)
        for c in checks
        if c.mismatch and c.probe in _STRUCTURAL and (c.layer, c.site) not in wrong_alone
    }
    wrong = {
        (layer, probe, site) for layer, probe in sorted(failing) for site in _misfits(probers[layer], probe, inputs)
    }
    layers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for layer, probe, site in sorted(wrong):
        layers[probe, site].append(layer)
    notes = tuple(
        Untested(
            part=f"{site} (probe {probe})",
            layers=tuple(found),
            reason="the layer computes something else here, also on a copy on the host",
        )
        for (probe, site), found in sorted(layers.items())
    )
    return [c for c in checks if (c.layer, c.probe, c.site) not in wrong], notes


def _faults(
    checks: Sequence[Check], probers: Sequence[LayerProber], inputs: ProbeInputs, parts: Sequence[Part]
) -> tuple[LocatedFault, ...]:
    evidence: Evidence = mismatching(checks)
    faults = []
    for suspect in suspects(evidence, checks):
        elements = [check for check in checks if check.site == suspect.site and check.layer == suspect.layers[0]]
        fault = classify(suspect, elements)
        if suspect.layers[0] != OUTSIDE_LAYERS:
            fault = _refine_fault(fault, suspect.evidence, probers[suspect.layers[0]], inputs)
        faults.append(without_false_noise(fault, suspect.layers[0], parts))
    return tuple(sorted(faults, key=lambda fault: (fault.scope != "device", fault.layers, fault.site)))


def _product_bits(layers: Sequence[LayerSites], inputs: ProbeInputs, faults: Sequence[LocatedFault]) -> int | None:
    """Return the bits that float32 products keep in the first linear; None where nothing says that they are fewer."""
    first = next(iter(layers[0].linears.values()), None)
    is_suspect = any(fault.scope == "device" and "mantissa" in fault.probes for fault in faults)
    if first is None or inputs.dtype != torch.float32 or (inputs.bits == 24 and not is_suspect):
        return None
    return linears.product_bits(first)


def _least(checks: Sequence[Check], count: Callable[[Check], int]) -> int:
    """Return the least sum of `count` at a site, of those that were compared at all; others are named as untested."""
    seen: dict[tuple[int, str], int] = defaultdict(int)
    for check in checks:
        if check.probe in _COUNTED:
            seen[check.layer, check.site] += count(check)
    return min(total for total in seen.values() if total)


def _layer_inputs(
    model: nn.Module, num_tokens: int, length: int, device: torch.device
) -> tuple[list[LayerInput], list[LayerInput]]:
    """Return layer inputs for one token, whose keyword arguments fit any batch of single tokens, and for sequences."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    ids = (torch.arange(num_tokens, device=device) * 7919 + 1) % embedding.num_embeddings
    one_token = capture_layer_inputs(model, ids[:1].unsqueeze(0))
    return one_token, [finite_input(own) for own in capture_layer_inputs(model, ids.reshape(-1, length))]


def finite_input(own: LayerInput) -> LayerInput:
    """Replace NaN and infinity, which a faulty layer passes on, so that the layers behind it can be probed."""
    if own.hidden.isfinite().all():
        return own
    return replace(own, hidden=own.hidden.nan_to_num(nan=1.0, posinf=1.0, neginf=-1.0))


def _norm_offsets(layers: Sequence[LayerSites], dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Return the weight offset of each norm (1 if it multiplies by 1 + weight, else 0) by majority of the layers."""
    votes: dict[str, list[float]] = defaultdict(list)
    for sites in layers:
        for name, module in sites.norms.items():
            votes[name].append(norm_offset(module, dtype, device))
    return {name: float(round(sum(found) / len(found))) for name, found in votes.items()}


def _misfits(prober: LayerProber, probe: str, inputs: ProbeInputs) -> set[str]:
    """Return the sites at which the structural `probe` does not give the known answer on a copy on the host."""
    host = _on_host(prober, runs_experts=probe == "identity")
    dtype = next(iter(host.sites.layer.parameters())).dtype
    small = ProbeInputs(2 * len(inputs.ladder), dtype, torch.device("cpu"), inputs.ladder)
    if probe == "norm":
        checks = [check for name in host.sites.norms for check in host.norm(name, small)]
    else:
        checks = getattr(host, probe)(small)
    return {check.site for check in checks if check.mismatch}


def _on_host(prober: LayerProber, *, runs_experts: bool) -> LayerProber:
    # A patched forward, such as a closure, computes with the modules and on the device of the original.
    patched = [own for module in prober.sites.layer.modules() if (own := module.__dict__.get("forward")) is not None]
    layer = copy.deepcopy(prober.sites.layer, {id(forward): None for forward in patched})
    for module in layer.modules():
        module.__dict__.pop("forward", None)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    has_fused_experts = any(parameter.ndim > 2 for parameter in layer.parameters())
    dtype = torch.float32 if has_fused_experts and runs_experts else torch.float64
    return replace(
        prober,
        sites=layer_sites(layer.to("cpu", dtype)),
        one_token_kwargs=_to_host(prober.one_token_kwargs, dtype),
        attention_kwargs=_to_host(prober.attention_kwargs, dtype),
    )


def _to_host(values: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return `values` with the floating-point tensors in them as `dtype` on the CPU."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to("cpu", dtype) if value.is_floating_point() else value.cpu()

    return dict(tree_map(moved, values))


def _refine_fault(
    fault: LocatedFault, evidence: Sequence[Check], prober: LayerProber, inputs: ProbeInputs
) -> LocatedFault:
    """Return `fault` with its `threshold`, found by a second call with a smaller maximum and the same small values.

    If the level decreases with the maximum, the threshold is dynamic, else cached. The magnitude of a dynamic dead zone
    is narrowed from a power of two to 2 %. The magnitude of a cached fault is removed, because it refers to an earlier,
    unknown call. A noise or spike that is the same in every call is changed to type other.
    """
    drive = _drive(fault.site, prober)
    mark = mark_of(most_informative(evidence))
    if drive is not None and fault.type in ("noise", "spike") and _is_repeatable(fault.site, drive, inputs):
        return as_repeated(fault, "the same in every call")
    if drive is None or fault.type not in _WITH_REFERENCE or mark.level is None:
        return fault
    lowered = ProbeInputs(inputs.num_tokens, inputs.dtype, inputs.device, _lowered(inputs.ladder))
    lowered.top_gain = inputs.top_gain / 2.0**_LOWERED_BY
    again = _mismatch_at(fault.site, drive(lowered))
    threshold = "cached" if _kept_level(mark, again) else "dynamic"
    if threshold == "cached":
        unknown = {"magnitude": None, "magnitude_low": None, "magnitude_high": None}
        words = f"{fault.evidence}; absolute level {mark.level:.4g}, which does not change with the largest value"
        return fault.model_copy(update={"threshold": threshold, "evidence": words, **unknown})
    # The mean square of norm inputs is fixed, so they cannot take other values.
    can_narrow = fault.type == "dead_zone" and fault.site not in prober.sites.norms
    narrowed = _narrowed(fault.site, mark, drive, inputs) if can_narrow else {}
    return fault.model_copy(update={"threshold": threshold, **narrowed})


def _is_repeatable(site: str, drive: Callable[[ProbeInputs], list[Check]], inputs: ProbeInputs) -> bool:
    """Return whether two more calls have the same wrong output, which rules out a random fault."""
    first, second = (_mismatch_at(site, drive(inputs)) for _ in range(2))
    return first is not None and second is not None and torch.equal(first.observed, second.observed)


def _drive(site: str, prober: LayerProber) -> Callable[[ProbeInputs], list[Check]] | None:
    """Return the probe with known answers that covers `site`; None if there is none."""
    names = prober.sites.linears.keys()
    if site in names:
        return partial(linears.selecting, prober.index, site, prober.sites.linears[site])
    if site in prober.sites.norms and not subtracts_mean(prober.sites.norms[site]):
        return partial(prober.norm, site)
    if site == "layer_output" and {"o_proj", "down_proj"} <= names:
        return prober.identity
    if site == "attention_output" and {"v_proj", "o_proj", "down_proj"} <= names:
        return prober.attention
    if site == "mlp_output" and {"gate_proj", "up_proj", "down_proj"} <= names:
        return prober.mlp
    return None


def _lowered(ladder: Tensor) -> Tensor:
    """Return a ladder of the same length in which the largest values are replaced by the smallest ones."""
    return torch.cat([ladder[:_LOWERED_BY], ladder[:-_LOWERED_BY]])


def _mismatch_at(site: str, checks: Sequence[Check]) -> Mismatch | None:
    """Return the mismatch of the most informative check of `site`; None if nothing differs."""
    differing = [check for check in checks if check.site == site and check.mismatch]
    return most_informative(differing) if differing else None


def _kept_level(mark: Mark, again: Mismatch | None) -> bool:
    """Return whether the level stayed the same although the reference decreased by a factor of 2^4."""
    if again is None:
        # A limit that the smaller values no longer reach is absolute. A dead zone that now passes all values has moved.
        return mark.kind == "saturation"
    second = mark_of(again)
    if second.kind != mark.kind or not second.level or not mark.level:
        return False
    return abs(second.level / mark.level) > 2.0 ** (-_LOWERED_BY / 2)


def _narrowed(
    site: str, mark: Mark, drive: Callable[[ProbeInputs], list[Check]], inputs: ProbeInputs
) -> dict[str, float]:
    """Return magnitudes from a probe with about 60 steps between the largest zeroed and the smallest kept value."""
    if mark.level is None:
        return {}
    steps = len(inputs.ladder) - 1
    # Seven fractional bits are exact in every dtype.
    fractions = (torch.arange(steps, dtype=torch.float64) * 128 / steps).round() / 128
    ladder = torch.cat([mark.level * (1 + fractions), inputs.ladder[-1:]])
    finer = ProbeInputs(inputs.num_tokens, inputs.dtype, inputs.device, ladder)
    mismatch = _mismatch_at(site, drive(finer))
    second = mark_of(mismatch) if mismatch else None
    if second is None or second.kind != "dead_zone" or second.low is None or second.high is None:
        return {}
    return {"magnitude": (second.low * second.high) ** 0.5, "magnitude_low": second.low, "magnitude_high": second.high}
