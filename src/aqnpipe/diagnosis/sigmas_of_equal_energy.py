"""Sigmas in every layer by what noise there costs, clamped, with the energy of the base sigma in every layer.

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
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from aqnpipe.artifacts.diagnoses import SENSITIVITY_SCALE
from aqnpipe.config.diagnosis import SigmaRule
from aqnpipe.errors import ConfigError, DataError
from aqnpipe.seeding import derive_seed

Floats = NDArray[np.float64]

_HALVINGS = 200


def graded_sigmas(
    table: pl.DataFrame, rule: SigmaRule, strategy: Literal["robust_first", "shuffled_layers"]
) -> tuple[dict[int, float], dict[int, str]]:
    """Return the sigma of every layer by `strategy`, and the reasons.

    Raises DataError without a measured sensitivity, ConfigError if the base sigma is outside the bounds of sigmas.
    """
    sensitivity = _measured_sensitivity(table)
    order = np.argsort(sensitivity, kind="stable")
    placed, words = order, "more noise where the model is robust"
    if strategy == "shuffled_layers":
        placed = np.random.default_rng(derive_seed(rule.seed, "sigmas.shuffled_layers")).permutation(len(order))
        words = f"control: the sigmas of robust_first in an order drawn at random (seed {rule.seed})"
    layers = [int(layer) for layer in table["layer"]]
    weights = 1 / np.sqrt(np.maximum(sensitivity, np.finfo(np.float64).tiny))
    sigmas = _placed(layers, weights, placed, rule)
    rank = {int(row): number for number, row in enumerate(order[::-1], start=1)}
    reasons = {
        layer: f"{words}; sensitivity {sensitivity[row]:.3g}, number {rank[row]} of {len(layers)} in fragility: "
        f"sigma {sigmas[layer]:.4g}"
        for row, layer in enumerate(layers)
    }
    return sigmas, reasons


def damage_sigmas(
    table: pl.DataFrame, rule: SigmaRule, errors: Mapping[int, float] | None
) -> tuple[dict[int, float], dict[int, str]]:
    """Return the sigma of every layer by damage_first, and the reasons; `errors` are the measured ones by layer.

    Raises DataError without a measured sensitivity, without errors of the same layers, or if nothing costs anything;
    ConfigError if the base sigma is outside the bounds of sigmas.
    """
    layers = [int(layer) for layer in table["layer"]]
    error = _errors_of(layers, errors)
    sensitivity = _measured_sensitivity(table)
    damage = sensitivity * (error / SENSITIVITY_SCALE) ** 2
    if not damage.any():
        raise DataError("the measured error costs nothing in any layer, expected an error and a sensitivity above 0")
    order = np.argsort(-damage, kind="stable")
    rank = {int(row): number for number, row in enumerate(order, start=1)}
    weights = np.sqrt(np.maximum(damage, np.finfo(np.float64).tiny))
    sigmas = _placed(layers, weights, order, rule)
    reasons = {
        layer: f"more noise where the measured error costs more; error {100 * error[row]:.3g} %, sensitivity "
        f"{sensitivity[row]:.3g}, predicted cost {damage[row]:.3g} nats per token, number {rank[row]} of "
        f"{len(layers)}: sigma {sigmas[layer]:.4g}"
        for row, layer in enumerate(layers)
    }
    return sigmas, reasons


def _measured_sensitivity(table: pl.DataFrame) -> Floats:
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
            "no measured error of the layers was given, expected that of a machine with a counterpart, or `aqnpipe "
            "sigmas --parity` with a file of `aqnpipe parity --json`"
        )
    if sorted(errors) != layers:
        raise DataError(f"the parity has layers {sorted(errors)}, expected those of the diagnosis, {layers}")
    return np.array([errors[layer] for layer in layers])


def _placed(layers: list[int], weights: Floats, order: NDArray[np.intp], rule: SigmaRule) -> dict[int, float]:
    """Return a sigma per layer: proportional to `weights`, clamped, with the energy of the base sigma in every layer.

    The largest goes to the first row of `order`, whichever weight is its own. Raises ConfigError if the base sigma is
    outside the bounds of sigmas.
    """
    falling = np.sort(_with_energy_of_base(weights, rule))[::-1]
    sigmas = {layers[row]: round(float(sigma), 12) for row, sigma in zip(order, falling, strict=True)}
    return dict(sorted(sigmas.items()))


def _with_energy_of_base(weights: Floats, rule: SigmaRule) -> Floats:
    """Return `weights` times a common factor, clamped, with the energy of the base sigma in every layer."""
    low, high, base = rule.sigma_min, rule.sigma_max, rule.base_sigma
    if not low <= base <= high:
        raise ConfigError(
            f"sigma_rule: base_sigma is {base:g}, outside sigma_min {low:g} to sigma_max {high:g}; clamped sigmas "
            "cannot have its energy"
        )
    wanted = len(weights) * base**2
    # Logarithms, because the smallest factor clamps all sigmas to the lower bound and the largest all to the upper one.
    smallest, largest = np.log(low / weights.max()), np.log(high / weights.min())
    for _ in range(_HALVINGS):
        middle = (smallest + largest) / 2
        energy = float((np.clip(weights * np.exp(middle), low, high) ** 2).sum())
        smallest, largest = (middle, largest) if energy < wanted else (smallest, middle)
    return np.asarray(np.clip(weights * np.exp(smallest), low, high))
