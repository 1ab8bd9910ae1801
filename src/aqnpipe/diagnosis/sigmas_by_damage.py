"""Sigmas in every layer by what a measured machine's error there costs, with the energy of uniform sigmas.

A parity has the error e of each matrix product, relative to its results; that of a layer is the root mean square over
its products. The sensitivity c is what relative noise of 10 % in the layer adds to the loss. It grows with the square
of the noise, so the machine's error in the layer is predicted to cost `d = c (e/0.1)^2` nats per token.

`damage_first` sets `sigma ~ sqrt(d)`, measured error times root sensitivity: most noise in training where the machine
will do most damage. `shuffled_damage` is its control, the same sigmas in an order drawn at random. Both are clamped and
have the energy of the base sigma in every layer, as the sigmas by sensitivity alone.

What is assumed: the products of a layer share its sensitivity by equal relative errors; errors in one layer are
independent of those in another; norms and residual sums, whose sensitivity is not measured, are left out.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from aqnpipe.artifacts.diagnoses import SENSITIVITY_SCALE
from aqnpipe.config.diagnosis import SigmaRule
from aqnpipe.diagnosis.sigmas_by_sensitivity import measured_sensitivity, placed_sigmas
from aqnpipe.errors import DataError
from aqnpipe.seeding import derive_seed

DamageStrategy = Literal["damage_first", "shuffled_damage"]


def damage_sigmas(
    table: pl.DataFrame, rule: SigmaRule, strategy: DamageStrategy, errors: Mapping[int, float] | None
) -> tuple[dict[int, float], dict[int, str]]:
    """Return the sigma of every layer by `strategy`, and the reasons; `errors` are the measured ones by layer.

    Raises DataError without a measured sensitivity, without errors of the same layers, or if nothing costs anything;
    ConfigError if the base sigma is outside the bounds of sigmas.
    """
    layers = [int(layer) for layer in table["layer"]]
    error = _errors_of(layers, errors)
    sensitivity = measured_sensitivity(table)
    damage = sensitivity * (error / SENSITIVITY_SCALE) ** 2
    if not damage.any():
        raise DataError("the measured error costs nothing in any layer, expected an error and a sensitivity above 0")
    order = np.argsort(-damage, kind="stable")
    rank = {int(row): number for number, row in enumerate(order, start=1)}
    words = "more noise where the measured error costs more"
    if strategy == "shuffled_damage":
        order = np.random.default_rng(derive_seed(rule.seed, "sigmas.shuffled_damage")).permutation(len(order))
        words = f"control: the sigmas of damage_first in an order drawn at random (seed {rule.seed})"
    weights = np.sqrt(np.maximum(damage, np.finfo(np.float64).tiny))
    sigmas = placed_sigmas(layers, weights, order, rule)
    reasons = {
        layer: f"{words}; error {100 * error[row]:.3g} %, sensitivity {sensitivity[row]:.3g}, predicted cost "
        f"{damage[row]:.3g} nats per token, number {rank[row]} of {len(layers)}: sigma {sigmas[layer]:.4g}"
        for row, layer in enumerate(layers)
    }
    return sigmas, reasons


def _errors_of(layers: list[int], errors: Mapping[int, float] | None) -> NDArray[np.float64]:
    if errors is None:
        raise DataError(
            "no measured error of the layers was given, expected that of a machine with a counterpart, or `aqnpipe "
            "sigmas --parity` with a file of `aqnpipe parity --json`"
        )
    if sorted(errors) != layers:
        raise DataError(f"the parity has layers {sorted(errors)}, expected those of the diagnosis, {layers}")
    return np.array([errors[layer] for layer in layers])
