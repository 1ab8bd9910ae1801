"""Distance between the policy that sampled the rollouts and the policy being trained."""

import math
from statistics import fmean, variance

import polars as pl
from torch import Tensor

from aqnpipe.artifacts.training_facts import DistanceGrowth, fifth_of
from aqnpipe.training.ranks import gathered

_LEAST_ROLLOUTS = 20
"""With fewer rollouts a fifth of them has fewer than four, too few for a standard error."""
_LEAST_FACTOR = 1.5
_LEAST_STANDARD_ERRORS = 4.0
"""In 84 runs of the built-in models, with and without noise, the factor was at most 1.00 where nothing was wrong."""
_LEAST_NATS = 1e-3
"""Below this, a token's probability differs by a thousandth: rounding of float32 may grow without harm."""


class SamplerDistance:
    """Statistics over the sampled tokens of one batch of rollouts, on all workers.

    For a sampled token let d = log p(actor) - log p(sampler). The figures are the mean and the maximum of |d|, and the
    mean of exp(d) - 1 - d, a non-negative estimate of KL(sampler || actor) (Schulman 2020, "k3").
    """

    def __init__(self) -> None:
        self._batches: list[tuple[int, float, float, float]] = []

    def add(self, sampler: Tensor, actor: Tensor, mask: Tensor) -> None:
        """Add the tokens with a non-zero `mask`; log-probabilities and mask have shape [batch, tokens]."""
        # Double precision, because exp(d) - 1 - d is of the order of d squared.
        difference = (actor.double() - sampler.double())[mask.bool()]
        if difference.numel():
            size = difference.abs()
            divergence = (difference.expm1() - difference).sum()
            self._batches.append((difference.numel(), size.sum().item(), size.max().item(), divergence.item()))

    def settle(self) -> dict[str, float]:
        """Return the figures over all workers by their log names, and reset them. All workers must call this."""
        batches = [batch for batches_of_worker in gathered(self._batches) for batch in batches_of_worker]
        self._batches = []
        tokens, absolute, largest, divergence = zip(*batches, strict=True)
        return {
            "sampler/logp_difference_mean": sum(absolute) / sum(tokens),
            "sampler/logp_difference_max": max(largest),
            "sampler/kl": sum(divergence) / sum(tokens),
        }


def growth_of(metrics: pl.DataFrame, steps_per_rollout: int) -> DistanceGrowth | None:
    """Return the mean distances in the first and the last fifth of the rollouts, and whether they differ by growth.

    `metrics`: columns step and logp_difference_mean. It has grown if the last mean is above the first by more than
    `_LEAST_FACTOR` times and `_LEAST_STANDARD_ERRORS` standard errors of their difference, and above `_LEAST_NATS`.
    Returns None for fewer than `_LEAST_ROLLOUTS` rollouts.
    """
    of_rollouts = metrics.sort("step").filter((pl.col("step") - 1) % steps_per_rollout == 0)
    values = of_rollouts["logp_difference_mean"].to_list()
    if len(values) < _LEAST_ROLLOUTS:
        return None
    size = fifth_of(len(values))
    first, last = values[:size], values[-size:]
    before, after = fmean(first), fmean(last)
    error = math.sqrt((variance(first) + variance(last)) / size)
    is_beyond = after > _LEAST_FACTOR * before and after - before > _LEAST_STANDARD_ERRORS * error
    return DistanceGrowth(
        num_rollouts=len(values),
        first_mean=before,
        last_mean=after,
        standard_error=error,
        has_grown=is_beyond and after > _LEAST_NATS,
    )


def growth_line(growth: DistanceGrowth) -> str:
    """Return the warning for the log of a run."""
    return (
        f"warning: the distance to the sampler has grown from {growth.first_mean:.2g} to {growth.last_mean:.2g} nats "
        f"per token (first and last fifth of {growth.num_rollouts} rollouts, standard error "
        f"{growth.standard_error:.2g})"
    )
