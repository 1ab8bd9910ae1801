"""Derivation of one AQN sigma per layer from a diagnosis: the published rule, two alternatives, and a control.

| strategy | sigma |
|---|---|
| published | base sigma times the published factors for low gain, high kurtosis and instability |
| robust_first | more noise where the model is robust, by the measured sensitivity |
| damage_first | more noise where a measured machine's error costs more, error times root sensitivity |
| shuffled_layers | control: the sigmas of robust_first in a random order |

All but published have the energy (sum of sigma^2 over layers) of the base sigma in every layer, so that a difference
between arms is due to the place of the noise and not to its amount. Gain, kurtosis and instability describe the output
of a layer; what noise in it costs is in the column sensitivity (diagnosis/sensitivity/first_order.py).

The sensitivity c of a layer is the first-order estimate of what noise of 10 % in it adds to the loss. Since that grows
with sigma squared, `sigma ~ 1/sqrt(c)` spreads the predicted damage equally over the layers: `robust_first`. The factor
is chosen so that the energy (sum of sigma squared), after clamping, is that of the base sigma in every layer. An arm
with uniform AQN is therefore a control of equal energy. `shuffled_layers`, the same sigmas in an order drawn at random,
is another.

A parity has the error e of each matrix product, relative to its results; that of a layer is the root mean square over
its products. The machine's error in the layer is predicted to cost `d = c (e/0.1)^2` nats per token. `damage_first`
sets `sigma ~ sqrt(d)`: most noise in training where the machine will do most damage.

What is assumed: c is of noise on matrix products, and AQN adds its noise to norm weights or hidden states, so that the
order must carry over, which the arms test; the products of a layer share its sensitivity by equal relative errors;
errors in one layer are independent of those in another; norms and residual sums, whose sensitivity is not measured, are
left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from aqnpipe.artifacts.diagnoses import SENSITIVITY_SCALE, SigmaFile, Verdict
from aqnpipe.config.diagnosis import SigmaRule, SigmaStrategy
from aqnpipe.config.noise import LayerSigmas
from aqnpipe.errors import ConfigError, DataError
from aqnpipe.seeding import derive_seed

_Floats = NDArray[np.float64]
_HALVINGS = 200
_TINY = np.finfo(np.float64).tiny


_Plan = dict[int, tuple[float, str]]
"""The sigma of every layer, and the reason for it."""


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

    damage_first also needs the measured `errors` by layer. Raises DataError for a table without rows, a sat_prop layer
    without a source, or a sensitivity or error that is needed and was not measured; ConfigError for a base sigma
    outside the bounds, where equal energy is impossible.
    """
    plan = _plan(table.sort("layer"), rule, strategy, errors)
    sigmas = {layer: sigma for layer, (sigma, _) in plan.items()}
    known: dict[str, int | float | str] = {
        "num_layers": table.height,
        "strategy": strategy,
        "total_noise_energy": round(sum(sigma**2 for sigma in sigmas.values()), 12),
        "verdict": verdict.verdict,
    }
    if verdict.layer is not None and verdict.type is not None:
        known |= {"fault_layer": verdict.layer, "fault_type": verdict.type}
    return SigmaFile(
        aqn=LayerSigmas(
            base_sigma=rule.base_sigma,
            layer_sigmas=sigmas,
            schedule=schedule_kind,
            high_priority_layers=tuple(
                layer for layer, sigma in sigmas.items() if sigma > rule.high_priority_ratio * rule.base_sigma
            ),
        ),
        reasons={layer: reason for layer, (_, reason) in plan.items()},
        srdd_metadata=known | (metadata or {}),
    )


def _plan(table: pl.DataFrame, rule: SigmaRule, strategy: SigmaStrategy, errors: Mapping[int, float] | None) -> _Plan:
    if strategy == "published":
        return _published(table, rule)
    if strategy == "damage_first":
        return _damage_first(table, rule, errors)
    return _robust_first(table, rule, is_shuffled=strategy == "shuffled_layers")


@dataclass
class _LayerDecision:
    """Decision of the published rule for a layer: reasons to raise and to lower sigma (one factor each), and notes."""

    raises: list[str] = field(default_factory=list)
    lowers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def outcome(self, rule: SigmaRule) -> tuple[float, str]:
        """Return the sigma and the reason for it."""
        factor = rule.raise_factor ** len(self.raises) * rule.lower_factor ** len(self.lowers)
        # Rounded, so that 0.05 * 1.5 * 1.5 is 0.1125 and not 0.11250000000000002.
        wanted = float(round(rule.base_sigma * factor, 12))
        sigma = min(max(wanted, rule.sigma_min), rule.sigma_max)
        parts = [f"{reason}: x{rule.raise_factor:g}" for reason in self.raises]
        parts += [f"{reason}: x{rule.lower_factor:g}" for reason in self.lowers]
        parts += [*self.notes, *([f"clamped to {sigma:g}"] if sigma != wanted else [])]
        return sigma, "; ".join(parts) or "no rule applies: base sigma"


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
    return {layer: decision.outcome(rule) for layer, decision in decisions.items()}


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
                raise DataError(f"layer {layer} is sat_prop, but no layer before it is source")
            if decisions[layer].raises:
                decisions[layer].notes.append(
                    f"raise goes to source layer {source} ({'; '.join(decisions[layer].raises)})"
                )
                decisions[layer].raises.clear()
                moved.setdefault(source, []).append(layer)
    for target, layers in moved.items():
        decisions[target].raises.append(f"saturation propagated to layers {', '.join(map(str, layers))}")


def _median(table: pl.DataFrame, column: str) -> float:
    median = table[column].median()
    if not isinstance(median, float):
        raise DataError(f"the layer table has no rows for the median {column}, expected one row per decoder layer")
    return median


def _robust_first(table: pl.DataFrame, rule: SigmaRule, *, is_shuffled: bool) -> _Plan:
    """Return the plan of robust_first, or its sigmas in a random order.

    Raises DataError without a measured sensitivity, ConfigError if the base sigma is outside the bounds of sigmas.
    """
    _median(table, "gain")  # refuses a table without rows
    layers, sensitivity = table["layer"].to_list(), _measured_sensitivity(table)
    order = np.argsort(sensitivity, kind="stable")
    placed, words = order, "more noise where the model is robust"
    if is_shuffled:
        placed = np.random.default_rng(derive_seed(rule.seed, "sigmas.shuffled_layers")).permutation(len(order))
        words = f"control: the sigmas of robust_first in a random order (seed {rule.seed})"
    rank = np.argsort(order[::-1]) + 1
    reasons = [
        f"{words}; sensitivity {sensitivity[row]:.3g}, number {rank[row]} of {len(layers)} in fragility"
        for row in range(len(layers))
    ]
    return _placed(layers, 1 / np.sqrt(np.maximum(sensitivity, _TINY)), placed, rule, reasons)


def _damage_first(table: pl.DataFrame, rule: SigmaRule, errors: Mapping[int, float] | None) -> _Plan:
    """Return the plan of damage_first; `errors` are the measured ones by layer.

    Raises DataError without a measured sensitivity, without errors of the same layers, or if nothing costs anything;
    ConfigError if the base sigma is outside the bounds of sigmas.
    """
    layers = table["layer"].to_list()
    error, sensitivity = _errors_of(layers, errors), _measured_sensitivity(table)
    damage = sensitivity * (error / SENSITIVITY_SCALE) ** 2
    if not damage.any():
        raise DataError("the measured error costs nothing in any layer, expected an error and a sensitivity above 0")
    order = np.argsort(-damage, kind="stable")
    rank = np.argsort(order) + 1
    reasons = [
        f"more noise where the measured error costs more; error {100 * error[row]:.3g} %, sensitivity "
        f"{sensitivity[row]:.3g}, predicted cost {damage[row]:.3g} nats per token, number {rank[row]} of {len(layers)}"
        for row in range(len(layers))
    ]
    return _placed(layers, np.sqrt(np.maximum(damage, _TINY)), order, rule, reasons)


def _measured_sensitivity(table: pl.DataFrame) -> _Floats:
    """Return the sensitivity of every row of a LayerTable; DataError if the diagnosis did not measure it."""
    column = table["sensitivity"] if "sensitivity" in table.columns else None
    if column is None or column.null_count():
        raise DataError(
            "the diagnosis has no sensitivity of the layers, expected that of a study, or `aqnpipe sigmas "
            "--sensitivity` with a file of `aqnpipe sensitivity --json`"
        )
    return column.to_numpy().astype(np.float64)


def _errors_of(layers: list[int], errors: Mapping[int, float] | None) -> NDArray[np.float64]:
    if errors is None:
        raise DataError(
            "no measured error of the layers was given, expected that of a machine with a `counterpart`, or `aqnpipe "
            "sigmas --parity` with a file of `aqnpipe parity --json`"
        )
    if sorted(errors) != layers:
        raise DataError(f"the parity has layers {sorted(errors)}, expected those of the diagnosis, {layers}")
    return np.array([errors[layer] for layer in layers])


def _placed(layers: list[int], weights: _Floats, order: NDArray[np.intp], rule: SigmaRule, reasons: list[str]) -> _Plan:
    """Return a sigma per layer: proportional to `weights`, clamped, with the energy of the base sigma in every layer.

    The largest goes to the first row of `order`, whichever weight is its own. Raises ConfigError if the base sigma is
    outside the bounds of sigmas.
    """
    falling = np.sort(_with_energy_of_base(weights, rule))[::-1]
    sigmas = {int(row): round(float(sigma), 12) for row, sigma in zip(order, falling, strict=True)}
    return {layer: (sigmas[row], f"{reasons[row]}: sigma {sigmas[row]:.4g}") for row, layer in enumerate(layers)}


def _with_energy_of_base(weights: _Floats, rule: SigmaRule) -> _Floats:
    """Return `weights` times a common factor, clamped, with the energy of the base sigma in every layer."""
    low, high, base = rule.sigma_min, rule.sigma_max, rule.base_sigma
    if not low <= base <= high:
        raise ConfigError(
            f"sigma_rule: base_sigma is {base:g}, outside sigma_min {low:g} to sigma_max {high:g}; clamped sigmas "
            "cannot have its total variance"
        )
    wanted = len(weights) * base**2
    # Logarithms, because the smallest factor clamps all sigmas to the lower bound and the largest all to the upper one.
    smallest, largest = np.log(low / weights.max()), np.log(high / weights.min())
    for _ in range(_HALVINGS):
        middle = (smallest + largest) / 2
        energy = float((np.clip(weights * np.exp(middle), low, high) ** 2).sum())
        smallest, largest = (middle, largest) if energy < wanted else (smallest, middle)
    return np.asarray(np.clip(weights * np.exp(smallest), low, high))
