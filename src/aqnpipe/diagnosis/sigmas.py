"""From layer metrics to one AQN sigma per layer, by the published rule."""

from dataclasses import dataclass, field

import polars as pl

from aqnpipe.artifacts import AqnSection, SigmaFile
from aqnpipe.config.diagnosis import SigmaRule
from aqnpipe.errors import DataError


@dataclass
class _LayerDecision:
    """What the rule does to one layer: reasons to raise (each one factor), reasons to lower, and in words."""

    raises: list[str] = field(default_factory=list)
    lowers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def layer_sigmas(
    table: pl.DataFrame,
    rule: SigmaRule,
    schedule_kind: str = "epoch_aware",
    *,
    metadata: dict[str, int | float | str] | None = None,
) -> SigmaFile:
    """Return sigma and reasons for every row of a LayerTable; `metadata` is added to srdd_metadata.

    Start at base_sigma; gain below low_gain_ratio x median: x raise_factor; kurtosis above high_kurtosis_ratio x
    median: x raise_factor; instability above its threshold: x lower_factor; clamp. What would raise a sat_prop layer
    raises its source instead (the nearest one before it), once however many layers ask for it. A ratio to a median
    that is not positive means nothing: kurtosis then raises no layer. Raises DataError on a sat_prop without a source.
    """
    rows = table.sort("layer").to_dicts()
    decisions = _decide(rows, _median(table, "gain"), _median(table, "kurtosis"), rule)
    _move_to_sources(rows, decisions)
    sigmas = {layer: _sigma(decision, rule) for layer, decision in decisions.items()}
    return SigmaFile(
        aqn=AqnSection(
            enabled=True,
            layer_specific=True,
            base_sigma=rule.base_sigma,
            layer_sigmas=sigmas,
            schedule=schedule_kind,
            high_priority_layers=[
                layer for layer, sigma in sigmas.items() if sigma > rule.high_priority_ratio * rule.base_sigma
            ],
        ),
        reasons={layer: _in_words(decision, sigmas[layer], rule) for layer, decision in decisions.items()},
        srdd_metadata={"num_layers": len(rows), **(metadata or {})},
    )


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
    # rounded so that 0.05 * 1.5 * 1.5 reads 0.1125 and not 0.11250000000000002
    return float(round(rule.base_sigma * factor, 12))


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
