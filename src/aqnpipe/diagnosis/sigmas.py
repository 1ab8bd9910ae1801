"""From a diagnosis to one AQN sigma per layer: the published rule, sharper and smoother ones, and their controls.

| strategy | sigma |
|---|---|
| published | base sigma times the published factors for low gain, high kurtosis and instability |
| targeted | a double raise, clamped, on the faulty layers, or the most sensitive if none is faulty; 0 elsewhere |
| variable | base sigma times a continuous sensitivity that meets the published factors at the published thresholds |
| healthy_layers | control: every layer that targeted leaves out, at equal energy |
| random_layers | sham: as many layers as targeted has, drawn among the others |
| wrong_layers | sham: as many layers as targeted has, the farthest from it in depth |

Energy is the sum of sigma^2 over layers. The controls have exactly that of targeted, so that a difference between arms
is one of place, not of amount. They are not clamped: a clamp would break that.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from aqnpipe.artifacts.diagnoses import AqnSection, SigmaFile, Verdict
from aqnpipe.config.diagnosis import SigmaRule, SigmaStrategy
from aqnpipe.errors import DataError
from aqnpipe.noise.control_layers import control_layers


@dataclass(frozen=True)
class _Plan:
    """Sigma and its reason in words for every layer."""

    sigmas: dict[int, float]
    reasons: dict[int, str]


def layer_sigmas(
    table: pl.DataFrame,
    verdict: Verdict,
    rule: SigmaRule,
    strategy: SigmaStrategy = "published",
    *,
    schedule_kind: str = "epoch_aware",
    metadata: dict[str, int | float | str] | None = None,
) -> SigmaFile:
    """Return sigma and reasons for every row of a LayerTable by `strategy`; `metadata` is added to srdd_metadata.

    The published rule and `variable` work on the metrics alone, the others on the layers of the verdict's faults.
    Raises DataError on a table without rows, a sat_prop without a source, or a control that has no layer left.
    """
    plan = _plan(table.sort("layer"), verdict, rule, strategy)
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
        aqn=AqnSection(
            enabled=True,
            layer_specific=True,
            base_sigma=rule.base_sigma,
            layer_sigmas=plan.sigmas,
            schedule=schedule_kind,
            high_priority_layers=[
                layer for layer, sigma in plan.sigmas.items() if sigma > rule.high_priority_ratio * rule.base_sigma
            ],
        ),
        reasons=plan.reasons,
        srdd_metadata=known | (metadata or {}),
    )


def _plan(table: pl.DataFrame, verdict: Verdict, rule: SigmaRule, strategy: SigmaStrategy) -> _Plan:
    if strategy == "published":
        return _published(table, rule)
    if strategy == "variable":
        return _variable(table, rule)
    targets, why = _targets(table, verdict, rule)
    sigma = min(max(rule.base_sigma * rule.raise_factor**2, rule.sigma_min), rule.sigma_max)
    layers = [int(layer) for layer in table["layer"]]
    if strategy == "targeted":
        return _on(layers, targets, sigma, f"targeted: {why}", "not targeted: no noise")
    chosen = control_layers(layers, targets, strategy, rule.seed)
    words = {
        "healthy_layers": "control: not among the targeted layers",
        "random_layers": f"sham: drawn among the layers that are not targeted (seed {rule.seed})",
        "wrong_layers": "sham: as far in depth from the targeted layers as can be",
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
    """Return the faulty layers, or the most sensitive share of all, and why."""
    faulty = sorted({fault.layer for fault in verdict.faults})
    if faulty:
        return faulty, "the diagnosis found a fault there"
    sensitivity = _sensitivity(table, rule)
    count = max(1, round(rule.targeted_share * table.height))
    most = np.argsort(-sensitivity, kind="stable")[:count]
    return sorted(int(table["layer"][int(i)]) for i in most), f"no fault found; the {count} most sensitive layers"


def _sensitivity(table: pl.DataFrame, rule: SigmaRule) -> NDArray[np.float64]:
    """Return one factor per row: `(median gain/gain)^p * (kurtosis/median)^q * lower_factor^(instability/threshold)`.

    p and q are such that a metric at its published threshold gets the published raise_factor. Kurtosis is Pearson's
    (Fisher's + 3), which is positive; its threshold ratio is taken over as it is.
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
    """Return p with `ratio^p = factor`; 0 where the ratio asks for nothing."""
    return math.log(factor) / math.log(ratio) if ratio > 1 else 0.0


def _variable(table: pl.DataFrame, rule: SigmaRule) -> _Plan:
    _median(table, "gain")
    factors = _sensitivity(table, rule)
    sigmas, reasons = {}, {}
    for layer, factor in zip(table["layer"].to_list(), factors, strict=True):
        wanted = rule.base_sigma * float(factor)
        sigmas[layer] = _tidy(min(max(wanted, rule.sigma_min), rule.sigma_max))
        clamped = "" if rule.sigma_min <= wanted <= rule.sigma_max else f"; clamped to {sigmas[layer]:g}"
        reasons[layer] = f"sensitivity {factor:.3g} times the base sigma{clamped}"
    return _Plan(sigmas, reasons)


def _tidy(sigma: float) -> float:
    """Round so that 0.05 * 1.5 * 1.5 reads 0.1125 and not 0.11250000000000002."""
    return float(round(sigma, 12))


@dataclass
class _LayerDecision:
    """What the rule does to one layer: reasons to raise (each one factor), reasons to lower, and in words."""

    raises: list[str] = field(default_factory=list)
    lowers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _published(table: pl.DataFrame, rule: SigmaRule) -> _Plan:
    """The published rule.

    Start at base_sigma; gain below low_gain_ratio x median: x raise_factor; kurtosis above high_kurtosis_ratio x
    median: x raise_factor; instability above its threshold: x lower_factor; clamp. What would raise a sat_prop layer
    raises its source instead (the nearest one before it), once however many layers ask for it. A ratio to a median
    that is not positive means nothing: kurtosis then raises no layer.
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
    """Move the raises of sat_prop layers to their source; the source gets one raise in all."""
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
        raise DataError(f"layer table has no rows to take the median {column} of, expected one row per decoder layer")
    return median
