"""Derivation of one AQN sigma per layer from a diagnosis: the published rule, alternatives, and controls.

| strategy | sigma |
|---|---|
| published | base sigma times the published factors for low gain, high kurtosis and instability |
| targeted | base sigma raised twice and clamped, in the faulty layers (or the most fragile ones); 0 elsewhere |
| variable | base sigma times a continuous factor equal to the published factors at the published thresholds |
| robust_first | more noise where the model is robust, by the measured sensitivity; energy of uniform sigmas |
| fragile_first | the sigmas of robust_first in reverse order: more noise where the model is fragile |
| shuffled_layers | control: the sigmas of robust_first in a random order |
| damage_first | more noise where a measured machine's error costs more, error times root sensitivity; same energy |
| shuffled_damage | control: the sigmas of damage_first in a random order |
| healthy_layers | control: all layers without noise in targeted, with equal energy |
| random_layers | control: as many layers as in targeted, drawn from the others |
| wrong_layers | control: as many layers as in targeted, those farthest from it in depth |

Energy is the sum of sigma^2 over layers. The controls have exactly the energy of what they control, so that a
difference between arms is due to the place of the noise and not to its amount. Controls of targeted are not clamped,
which would change their energy. Gain, kurtosis and instability describe the output of a layer; what noise in it costs
is in the column sensitivity (diagnosis/sensitivity_estimate.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from aqnpipe.artifacts.diagnoses import SigmaFile, Verdict
from aqnpipe.config.diagnosis import SigmaRule, SigmaStrategy
from aqnpipe.config.noise import LayerSigmas
from aqnpipe.diagnosis.sigmas_by_damage import damage_sigmas
from aqnpipe.diagnosis.sigmas_by_sensitivity import graded_sigmas, measured_sensitivity
from aqnpipe.errors import DataError
from aqnpipe.noise.control_layers import control_layers


@dataclass(frozen=True)
class _Plan:
    """The sigma of every layer, and the reason for it."""

    sigmas: dict[int, float]
    reasons: dict[int, str]


def layer_sigmas(
    table: pl.DataFrame,
    verdict: Verdict,
    rule: SigmaRule,
    strategy: SigmaStrategy = "published",
    *,
    errors: Mapping[int, float] | None = None,
    schedule_kind: str = "epoch_aware",
    metadata: dict[str, int | float | str] | None = None,
) -> SigmaFile:
    """Return a sigma and a reason for every row of a LayerTable by `strategy`; `metadata` is added to srdd_metadata.

    `targeted` and its controls use the layers of the verdict's faults, the others only the metrics, and damage_first
    with its control the measured `errors` by layer. Raises DataError for a table without rows, a sat_prop layer without
    a source, a control without any layer, or a sensitivity or error that is needed and was not measured; ConfigError
    for a base sigma outside the bounds, where equal energy is impossible.
    """
    plan = _plan(table.sort("layer"), verdict, rule, strategy, errors)
    energy = sum(sigma**2 for sigma in plan.sigmas.values())
    known: dict[str, int | float | str] = {
        "num_layers": table.height,
        "strategy": strategy,
        "total_noise_energy": round(energy, 12),
        "verdict": verdict.verdict,
    }
    if verdict.layer is not None and verdict.type is not None:
        known |= {"fault_layer": verdict.layer, "fault_type": verdict.type}
    return SigmaFile(
        aqn=LayerSigmas(
            base_sigma=rule.base_sigma,
            layer_sigmas=plan.sigmas,
            schedule=schedule_kind,
            high_priority_layers=tuple(
                layer for layer, sigma in plan.sigmas.items() if sigma > rule.high_priority_ratio * rule.base_sigma
            ),
        ),
        reasons=plan.reasons,
        srdd_metadata=known | (metadata or {}),
    )


def _plan(
    table: pl.DataFrame,
    verdict: Verdict,
    rule: SigmaRule,
    strategy: SigmaStrategy,
    errors: Mapping[int, float] | None,
) -> _Plan:
    if strategy == "published":
        return _published(table, rule)
    if strategy == "variable":
        return _variable(table, rule)
    if strategy == "robust_first" or strategy == "fragile_first" or strategy == "shuffled_layers":
        _median(table, "gain")  # refuses a table without rows
        return _Plan(*graded_sigmas(table, rule, strategy))
    if strategy == "damage_first" or strategy == "shuffled_damage":
        return _Plan(*damage_sigmas(table, rule, strategy, errors))
    return _targeted_or_control(table, verdict, rule, strategy)


def _targeted_or_control(
    table: pl.DataFrame,
    verdict: Verdict,
    rule: SigmaRule,
    strategy: Literal["targeted", "healthy_layers", "random_layers", "wrong_layers"],
) -> _Plan:
    targets, why = _targets(table, verdict, rule)
    sigma = min(max(rule.base_sigma * rule.raise_factor**2, rule.sigma_min), rule.sigma_max)
    layers = [int(layer) for layer in table["layer"]]
    if strategy == "targeted":
        return _on(layers, targets, sigma, f"targeted: {why}", "not targeted: no noise")
    chosen = control_layers(layers, targets, strategy, rule.seed)
    words = {
        "healthy_layers": "control: not among the targeted layers",
        "random_layers": f"control: drawn from the layers that are not targeted (seed {rule.seed})",
        "wrong_layers": "control: farthest in depth from the targeted layers",
    }[strategy]
    equal = sigma * math.sqrt(len(targets) / len(chosen))
    energy = f"energy of targeted layers {', '.join(map(str, targets))} ({why})"
    return _on(layers, chosen, equal, f"{words}; {energy}", "no noise")


def _on(layers: list[int], chosen: list[int], sigma: float, reason: str, otherwise: str) -> _Plan:
    return _Plan(
        {layer: _tidy(sigma) if layer in chosen else 0.0 for layer in layers},
        {layer: f"{reason}: sigma {sigma:.4g}" if layer in chosen else otherwise for layer in layers},
    )


def _targets(table: pl.DataFrame, verdict: Verdict, rule: SigmaRule) -> tuple[list[int], str]:
    """Return the faulty layers or, if there is none, the most fragile share of all layers, and the reason."""
    faulty = sorted({i for fault in verdict.faults for i in fault.layers or (fault.layer,) if i is not None})
    if faulty:
        return faulty, "the diagnosis found a fault there"
    count = max(1, round(rule.targeted_share * table.height))
    most = np.argsort(-measured_sensitivity(table), kind="stable")[:count]
    return sorted(int(table["layer"][int(i)]) for i in most), f"no fault found; the {count} most fragile layers"


def _continuous_factors(table: pl.DataFrame, rule: SigmaRule) -> NDArray[np.float64]:
    """Return one factor per row: `(median gain/gain)^p * (kurtosis/median)^q * lower_factor^(instability/threshold)`.

    p and q are chosen so that a metric at its published threshold gives the published raise_factor. Kurtosis is
    Pearson's (Fisher's + 3), which is positive; its published threshold ratio is used unchanged.
    """
    gain = table["gain"].to_numpy().astype(np.float64)
    pearson = table["kurtosis"].to_numpy().astype(np.float64) + 3
    power_gain = _power(rule.raise_factor, 1 / rule.low_gain_ratio)
    power_kurtosis = _power(rule.raise_factor, rule.high_kurtosis_ratio)
    tiny = np.finfo(np.float64).tiny
    raised = (np.median(gain) / np.maximum(gain, tiny)) ** power_gain * (pearson / np.median(pearson)) ** power_kurtosis
    lowered = rule.lower_factor ** (table["instability"].to_numpy().astype(np.float64) / rule.instability_threshold)
    return np.asarray(raised * lowered)


def _power(factor: float, ratio: float) -> float:
    """Return p with `ratio^p = factor`; 0 if the ratio is not above 1."""
    return math.log(factor) / math.log(ratio) if ratio > 1 else 0.0


def _variable(table: pl.DataFrame, rule: SigmaRule) -> _Plan:
    _median(table, "gain")  # refuses a table without rows
    factors = _continuous_factors(table, rule)
    sigmas, reasons = {}, {}
    for layer, factor in zip(table["layer"].to_list(), factors, strict=True):
        unclamped = rule.base_sigma * float(factor)
        sigmas[layer] = _tidy(min(max(unclamped, rule.sigma_min), rule.sigma_max))
        clamped = "" if rule.sigma_min <= unclamped <= rule.sigma_max else f"; clamped to {sigmas[layer]:g}"
        reasons[layer] = f"published factors without steps: {factor:.3g} times the base sigma{clamped}"
    return _Plan(sigmas, reasons)


def _tidy(sigma: float) -> float:
    """Round to 12 decimals, so that 0.05 * 1.5 * 1.5 is 0.1125 and not 0.11250000000000002."""
    return float(round(sigma, 12))


@dataclass
class _LayerDecision:
    """Decision of the published rule for a layer: reasons to raise and to lower sigma (one factor each), and notes."""

    raises: list[str] = field(default_factory=list)
    lowers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _published(table: pl.DataFrame, rule: SigmaRule) -> _Plan:
    """Return the sigmas of the published rule.

    Start with base_sigma. Multiply by raise_factor if gain is below low_gain_ratio x median, and if kurtosis is above
    high_kurtosis_ratio x median. Multiply by lower_factor if instability is above its threshold. Clamp the result.

    A raise of a sat_prop layer is applied to its source (the nearest before it) instead, and only once per source. If
    the median kurtosis is not positive, the ratio is meaningless and kurtosis raises no layer.
    """
    rows = table.to_dicts()
    decisions = _decide(rows, _median(table, "gain"), _median(table, "kurtosis"), rule)
    _move_to_sources(rows, decisions)
    sigmas = {layer: _sigma(decision, rule) for layer, decision in decisions.items()}
    return _Plan(sigmas, {layer: _in_words(decision, sigmas[layer], rule) for layer, decision in decisions.items()})


def _decide(
    rows: list[dict[str, float]], median_gain: float, median_kurtosis: float, rule: SigmaRule
) -> dict[int, _LayerDecision]:
    decisions = {}
    for row in rows:
        decision = decisions[int(row["layer"])] = _LayerDecision()
        if row["gain"] < rule.low_gain_ratio * median_gain:
            decision.raises.append(f"gain {row['gain']:.3g} < {rule.low_gain_ratio:g} x median {median_gain:.3g}")
        if median_kurtosis > 0 and row["kurtosis"] > rule.high_kurtosis_ratio * median_kurtosis:
            decision.raises.append(
                f"kurtosis {row['kurtosis']:.3g} > {rule.high_kurtosis_ratio:g} x median {median_kurtosis:.3g}"
            )
        if row["instability"] > rule.instability_threshold:
            decision.lowers.append(f"instability {row['instability']:.3g} > {rule.instability_threshold:g}")
    return decisions


def _move_to_sources(rows: list[dict[str, float]], decisions: dict[int, _LayerDecision]) -> None:
    """Move the raises of sat_prop layers to their source, as a single raise."""
    source: int | None = None
    moved: dict[int, list[int]] = {}
    for row in rows:
        layer = int(row["layer"])
        if row["role"] == "source":
            source = layer
        elif row["role"] == "sat_prop":
            if source is None:
                raise DataError(f"layer {layer} has role sat_prop, but no layer before it has role source")
            if decisions[layer].raises:
                decisions[layer].notes.append(
                    f"raise goes to source layer {source} ({'; '.join(decisions[layer].raises)})"
                )
                decisions[layer].raises.clear()
                moved.setdefault(source, []).append(layer)
    for target, layers in moved.items():
        decisions[target].raises.append(f"saturation propagated to layers {', '.join(map(str, layers))}")


def _sigma(decision: _LayerDecision, rule: SigmaRule) -> float:
    return min(max(_unclamped(decision, rule), rule.sigma_min), rule.sigma_max)


def _unclamped(decision: _LayerDecision, rule: SigmaRule) -> float:
    factor = rule.raise_factor ** len(decision.raises) * rule.lower_factor ** len(decision.lowers)
    return _tidy(rule.base_sigma * factor)


def _in_words(decision: _LayerDecision, sigma: float, rule: SigmaRule) -> str:
    parts = [f"{reason}: x{rule.raise_factor:g}" for reason in decision.raises]
    parts += [f"{reason}: x{rule.lower_factor:g}" for reason in decision.lowers]
    parts += decision.notes
    if sigma != _unclamped(decision, rule):
        parts.append(f"clamped to {sigma:g}")
    return "; ".join(parts) or "no rule applies: base sigma"


def _median(table: pl.DataFrame, column: str) -> float:
    median = table[column].median()
    if not isinstance(median, float):
        raise DataError(f"the layer table has no rows for the median {column}, expected one row per decoder layer")
    return median
