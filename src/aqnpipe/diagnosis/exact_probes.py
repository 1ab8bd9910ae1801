"""Exact diagnosis: run every probe on every layer, and name the fault behind every wrong answer.

A probe expects something of the structure of a layer: that its output is the input plus two branches, or that a gate
multiplies. Layers of other families do something else, and the probe then fails on every healthy device. A copy of the
layer on the CPU, without hooks and without patched forwards, decides which of the two it is: where the copy fails too,
the probe does not fit. It is in float64, whose kernels share little with those under test; in float32 where the probe
runs fused experts, because torch multiplies groups of matrices in no wider format. Other layers decide nothing, because
a fault of the device is in all of them.

Beyond single layers on single tokens there are probes of the ends of the model, ranges, shapes, experts, gradients and
whole sequences.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log
from pathlib import Path

import torch
from torch import nn

from aqnpipe.artifacts.diagnoses import LocatedFault, Untested
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.device import determinism_requested
from aqnpipe.diagnosis.capture import LayerInput, capture_layer_inputs, host_copy, inference, values_on_host
from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, Bench, Check, Mismatch
from aqnpipe.diagnosis.classify import Mark, classify, mark_of, most_informative, suspects
from aqnpipe.diagnosis.coverage import Gap, by_part, limits, metered, untested_norms, untested_parts, untested_sites
from aqnpipe.diagnosis.probes import elementwise, experts, linears
from aqnpipe.diagnosis.probes.elementwise import ACTIVATION_SITE, CORE_SITE, Norm
from aqnpipe.diagnosis.probes.experts import EXPERT_SITE, ROUTER_SITE, experts_of, router_of
from aqnpipe.diagnosis.probes.flow import (
    EMBEDDING_GRADIENT,
    FINITE,
    is_known,
    model_type,
    outer_norms,
    probe_outer_modules,
)
from aqnpipe.diagnosis.probes.layers import LayerProber, Part, as_repeated, repeat, without_false_noise
from aqnpipe.diagnosis.probes.patterns import LEAST_ROWS, ProbeInputs, exponent_ladder
from aqnpipe.diagnosis.probes.sequences import ROTARY_SITE, probe_sequences
from aqnpipe.diagnosis.stored_weights import (
    compare_with_earlier,
    compare_with_file,
    refuse_weights_that_are_not_finite,
    row_checksums,
)
from aqnpipe.models.layout import LayerSites, decoder_layers, layer_sites
from aqnpipe.seeding import keyed_generator

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
        probers = [LayerProber(index, sites, one_token[index].kwargs) for index, sites in enumerate(layers)]
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
        forward_equivalents=cost(),
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
    checks = repeats.checks + structure(prober, inputs)
    for name, module in prober.sites.linears.items():
        for probe in (linears.selecting, linears.summing, linears.biased):
            checks += probe(prober.index, name, module, inputs)
        fed, output = repeats.trace.inputs[name], repeats.trace.outputs[name]
        checks.append(linears.monomial(prober.index, name, module, fed, output))
    if repeats.reordered:
        # Repeats get different inputs behind such a site and are not compared there; known answers take their place.
        for _ in range(num_repeats - 2):
            checks += structure(prober, inputs)
    return checks, repeats.reordered


def structure(prober: LayerProber, inputs: ProbeInputs, only: Collection[str] = _STRUCTURAL) -> list[Check]:
    """Run the structural probes that fit the layer, or some of them."""
    sites = {"layer_output": "identity", "attention_output": "attention", "mlp_output": "mlp"}
    probes = [probe for site, probe in prober.structural.items() if sites.get(site, "norm") in only]
    return [check for probe in probes for check in probe(inputs)]


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
    wrong = {(layer, probe, site) for layer, probe in failing for site in _misfits(probers[layer], probe, inputs)}
    reason = "the layer computes something else here, also on a copy on the host"
    notes = by_part((f"{site} (probe {probe})", reason, layer) for layer, probe, site in sorted(wrong))
    return [c for c in checks if (c.layer, c.probe, c.site) not in wrong], notes


def _faults(
    checks: Sequence[Check], probers: Sequence[LayerProber], inputs: ProbeInputs, parts: Sequence[Part]
) -> tuple[LocatedFault, ...]:
    faults = []
    for suspect in suspects(checks):
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


def _misfits(prober: LayerProber, probe: str, inputs: ProbeInputs) -> set[str]:
    """Return the sites at which the structural `probe` does not give the known answer on a copy on the host."""
    has_fused_experts = any(parameter.ndim > 2 for parameter in prober.sites.layer.parameters())
    dtype = torch.float32 if has_fused_experts and probe == "identity" else torch.float64
    host = LayerProber(
        prober.index,
        layer_sites(host_copy(prober.sites.layer, dtype)),
        values_on_host(prober.one_token_kwargs, dtype),
        values_on_host(prober.attention_kwargs, dtype),
    )
    small = ProbeInputs(2 * len(inputs.ladder), dtype, torch.device("cpu"), inputs.ladder)
    return {check.site for check in structure(host, small, (probe,)) if check.mismatch}


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
    # Of the same length, with the smallest values in place of the largest.
    ladder = torch.cat([inputs.ladder[:_LOWERED_BY], inputs.ladder[:-_LOWERED_BY]])
    lowered = ProbeInputs(inputs.num_tokens, inputs.dtype, inputs.device, ladder)
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
    if site in prober.sites.linears:
        return partial(linears.selecting, prober.index, site, prober.sites.linears[site])
    return prober.structural.get(site)


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


_NO_GRADIENT = "the module has no gradient"
_NORMS_OF_HEADS = frozenset({"q_norm", "k_norm", "q_layernorm", "k_layernorm"})
"""Norms between the projections and the rotation."""
_OTHER_ROUTER = "it returns something else than logits, shares and experts, or has more experts than inputs"
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k")


def model_checks(
    model: nn.Module,
    layers: Sequence[LayerSites],
    seed: int,
    show_progress: Callable[[str], None] = lambda line: None,
    elements_at_ends: int = 1,
) -> tuple[list[Part], tuple[Untested, ...]]:
    """Return the parts of the probes of a model with their checks, and what did not fit it, with the reason.

    `elements_at_ends`: least number of values on each channel of the final norm and lm_head.
    """
    gaps: list[Gap] = []
    unreached: dict[str, str] = {}
    show_progress("exact probes: embedding, final norm, lm_head")
    parts = [Part(lambda: probe_outer_modules(model, seed, is_known=is_known(model), num_elements=elements_at_ends))]
    for index, sites in enumerate(layers):
        show_progress(f"exact probes: ranges, shapes and gradients of layer {index + 1} of {len(layers)}")
        parts.append(Part(partial(_checks_of_layer, model, index, sites, len(layers), seed, gaps)))
    show_progress("exact probes: sequences")
    parts.append(Part(lambda: probe_sequences(model, layers, seed, unreached)))
    checks = [check for part in parts for check in part.checks]
    if not any(check.site == EMBEDDING_GRADIENT for check in checks):
        unreached["gradient of the embedding"] = f"{_NO_GRADIENT}, or a class of its own"
    if not is_known(model):
        reason = f"not tried on model type {model_type(model)}"
        unreached["ranges and gradients of norms, experts, router"] = reason
    untested = [Untested(part=part, reason=reason) for part, reason in sorted(unreached.items())]
    return parts, (*untested, *by_part(gaps), *limits(model, layers, checks))


def _checks_of_layer(
    model: nn.Module, index: int, sites: LayerSites, num_layers: int, seed: int, gaps: list[Gap]
) -> list[Check]:
    like = next(iter(sites.layer.parameters()))
    bench = Bench(index, like.dtype, like.device, keyed_generator("cpu", seed, "diagnosis.further", index))
    checks: list[Check] = []
    for name, module in sites.norms.items() if is_known(model) else ():
        norm = Norm.of(module)
        backward = [*(found := norm.sweep(name, bench)), *norm.gradient(name, bench)]
        checks += backward
        if not found:
            gaps.append((name, "a norm without a known epsilon", index))
        elif backward == found:
            gaps.append((f"gradients of {name}", _NO_GRADIENT, index))
    checks += _core_checks(model, sites, bench, gaps)
    for name, linear in sites.linears.items():
        if type(linear).forward is not nn.Linear.forward:
            gaps.append((name, "a linear with another output, such as a choice of experts", index))
            continue
        gradients = linears.probe_gradients(name, linear, bench, large=index == seed % num_layers)
        if len({check.site for check in gradients}) < 2:
            gaps.append((f"gradients of {name}", _NO_GRADIENT, index))
        rows = linears.rows_of_layer(index, num_layers, seed)
        checks += gradients + linears.probe_shapes(name, linear, rows, bench)
    return checks + (_mixture_checks(model, sites, bench, gaps) if is_known(model) else [])


def _core_checks(model: nn.Module, sites: LayerSites, bench: Bench, gaps: list[Gap]) -> list[Check]:
    name, module = elementwise.activation_name(model.config), elementwise.activation_of(sites.layer)
    if name is None or module is None:
        gaps.append((f"{CORE_SITE}, activation", "no reference of its activation is known", bench.layer))
        return []
    checks = elementwise.activation_sweep(module, name, bench)
    backward = elementwise.activation_gradient(module, name, bench)
    if not backward:
        gaps.append((f"gradients of {ACTIVATION_SITE}", _NO_GRADIENT, bench.layer))
    return checks + backward + elementwise.gated_sweep(sites, name, bench)


def _mixture_checks(model: nn.Module, sites: LayerSites, bench: Bench, gaps: list[Gap]) -> list[Check]:
    module, router = experts_of(sites.layer), router_of(sites.layer)
    top_k = next((int(value) for key in _TOP_K if (value := getattr(model.config, key, None))), 1)
    checks = [] if module is None else experts.probe_experts(module, top_k, bench)
    found = [] if router is None else experts.probe_router(router, bench)
    if not found and (module is not None or router is not None):
        gaps.append((ROUTER_SITE, _OTHER_ROUTER, bench.layer))
    return checks + found


def without_consequences(checks: Sequence[Check]) -> list[Check]:
    """Return `checks` without those whose mismatch follows from another: one fault is not reported twice.

    Gradients go back through the output of their linear, a core through its activation, and the sum of experts through
    each of them. The rotation is compared between two passes, through the norms of heads, which differ between them
    if their fault is random. A number that is not finite leaves its layer from the site that made it.
    A check of a faulty source says nothing about what follows it.
    """
    wrong = {(check.layer, check.site) for check in checks if check.mismatch and check.probe != "backward"}
    explained = {c.layer for c in checks if c.mismatch and c.probe != FINITE and c.layer != OUTSIDE_LAYERS}

    def follows(check: Check) -> bool:
        if check.probe == FINITE:
            return check.layer in explained
        if check.probe == "backward":
            return (check.layer, check.site.rsplit(".", 1)[0]) in wrong
        if check.site == EXPERT_SITE:
            return any(layer == check.layer and site.startswith(f"{EXPERT_SITE}.") for layer, site in wrong)
        if check.site == ROTARY_SITE:
            return any((check.layer, name) in wrong for name in _NORMS_OF_HEADS)
        return check.site == CORE_SITE and (check.layer, ACTIVATION_SITE) in wrong

    return [check for check in checks if not (check.mismatch and follows(check))]
