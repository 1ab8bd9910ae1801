"""Growth of the distance between sampler and policy over a run."""

import math
from statistics import fmean, variance

import polars as pl

from aqnpipe.artifacts.sampler_distance import DistanceGrowth, fifth_of

LEAST_ROLLOUTS = 20
"""With fewer rollouts a fifth of them has fewer than four, too few for a standard error."""

LEAST_FACTOR = 1.5
LEAST_STANDARD_ERRORS = 4.0
"""In 84 runs of the built-in models, with and without noise, the factor was at most 1.00 where nothing was wrong."""

LEAST_NATS = 1e-3
"""Below this, a token's probability differs by a thousandth: rounding of float32 may grow without harm."""


def growth_of(metrics: pl.DataFrame, steps_per_rollout: int) -> DistanceGrowth | None:
    """Return the mean distances in the first and the last fifth of the rollouts, and whether they differ by growth.

    `metrics`: columns step and logp_difference_mean. It has grown if the last mean is above the first by more than
    `LEAST_FACTOR` times and `LEAST_STANDARD_ERRORS` standard errors of their difference, and above `LEAST_NATS`.
    Returns None for fewer than `LEAST_ROLLOUTS` rollouts.
    """
    of_rollouts = metrics.sort("step").filter((pl.col("step") - 1) % steps_per_rollout == 0)
    values = of_rollouts["logp_difference_mean"].to_list()
    if len(values) < LEAST_ROLLOUTS:
        return None
    size = fifth_of(len(values))
    first, last = values[:size], values[-size:]
    before, after = fmean(first), fmean(last)
    error = math.sqrt((variance(first) + variance(last)) / size)
    is_beyond = after > LEAST_FACTOR * before and after - before > LEAST_STANDARD_ERRORS * error
    return DistanceGrowth(
        num_rollouts=len(values),
        first_mean=before,
        last_mean=after,
        standard_error=error,
        has_grown=is_beyond and after > LEAST_NATS,
    )


def growth_line(growth: DistanceGrowth) -> str:
    """Return the warning for the log of a run."""
    return (
        f"warning: the distance to the sampler has grown from {growth.first_mean:.2g} to {growth.last_mean:.2g} nats "
        f"per token (first and last fifth of {growth.num_rollouts} rollouts, standard error "
        f"{growth.standard_error:.2g})"
    )
