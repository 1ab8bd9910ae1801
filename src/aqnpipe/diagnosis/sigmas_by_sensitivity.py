"""Sigmas in every layer by its measured sensitivity, with the energy of uniform sigmas.

c is the first-order estimate of what noise of a fixed scale in a layer adds to the loss. Since that grows with sigma
squared, `sigma ~ 1/sqrt(c)` spreads the predicted damage equally over the layers: `robust_first`. Its sigmas are
clamped, and the factor is chosen so that the energy (sum of sigma squared) is that of the base sigma in every layer. An
arm with uniform AQN is therefore a control of equal energy. Two more strategies use the same values in another order:
`fragile_first` with the largest where the model is most fragile, `shuffled_layers` in an order drawn at random.

c is of noise on matrix products, and AQN adds its noise to norm weights or hidden states: that the order carries over
is an assumption, which the arms test.
"""

from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from aqnpipe.config.diagnosis import SigmaRule
from aqnpipe.errors import ConfigError, DataError
from aqnpipe.seeding import derive_seed

GradedStrategy = Literal["robust_first", "fragile_first", "shuffled_layers"]
Floats = NDArray[np.float64]

_HALVINGS = 200


def measured_sensitivity(table: pl.DataFrame) -> Floats:
    """Return the sensitivity of every row of a LayerTable; DataError if the diagnosis did not measure it."""
    column = table["sensitivity"] if "sensitivity" in table.columns else None
    if column is None or column.null_count():
        raise DataError(
            "the diagnosis has no sensitivity of the layers, expected that of a study, or `aqnpipe sigmas "
            "--sensitivity` with a file of `aqnpipe sensitivity --json`"
        )
    return column.to_numpy().astype(np.float64)


def graded_sigmas(
    table: pl.DataFrame, rule: SigmaRule, strategy: GradedStrategy
) -> tuple[dict[int, float], dict[int, str]]:
    """Return the sigma of every layer by `strategy`, and the reasons.

    Raises DataError without a measured sensitivity, ConfigError if the base sigma is outside the bounds of sigmas.
    """
    sensitivity = measured_sensitivity(table)
    order = np.argsort(sensitivity, kind="stable")
    match strategy:
        case "robust_first":
            placed, words = order, "more noise where the model is robust"
        case "fragile_first":
            placed, words = order[::-1], "the sigmas of robust_first in reverse: more noise where the model is fragile"
        case "shuffled_layers":
            draws = np.random.default_rng(derive_seed(rule.seed, "sigmas.shuffled_layers"))
            placed = draws.permutation(len(order))
            words = f"control: the sigmas of robust_first in an order drawn at random (seed {rule.seed})"
    layers = [int(layer) for layer in table["layer"]]
    weights = 1 / np.sqrt(np.maximum(sensitivity, np.finfo(np.float64).tiny))
    sigmas = placed_sigmas(layers, weights, placed, rule)
    rank = {int(row): number for number, row in enumerate(order[::-1], start=1)}
    reasons = {
        layer: f"{words}; sensitivity {sensitivity[row]:.3g}, number {rank[row]} of {len(layers)} in fragility: "
        f"sigma {sigmas[layer]:.4g}"
        for row, layer in enumerate(layers)
    }
    return sigmas, reasons


def placed_sigmas(layers: list[int], weights: Floats, order: NDArray[np.intp], rule: SigmaRule) -> dict[int, float]:
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
