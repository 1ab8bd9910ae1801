"""The sampler of the rollouts beside the policy being trained: distance of log-probabilities, and experts of a mixture.

Noise, other kernels or other shapes of the same products change scores, and with them the experts of some tokens:
sampler and policy are then different networks. With routing replay (R3, arXiv:2510.11370) every pass of the policy over
sampled tokens uses the sampler's experts, with its own scores. The reference of the KL term is another policy, so its
routers choose as they always do.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, variance

import polars as pl
import torch
from torch import Tensor, nn

from aqnpipe.artifacts.training_facts import DistanceGrowth, fifth_of
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.backend import Completion, RoutedCompletion
from aqnpipe.models.routers import Routers
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


class RoutedRollouts:
    """The experts of the rollouts of this worker, by row; none for a dense model, or if the sampler noted none."""

    def __init__(self, network: nn.Module, *, replays: bool) -> None:
        self._routers = Routers(network)
        self._replays = replays
        self._rows: list[Tensor] = []
        self._counts: list[tuple[int, int, int, int]] = []
        if replays:
            self._routers.examine()

    def uncounted(self) -> "RoutedRollouts":
        """Return these rollouts with counts of their own, for a pass that is not the training."""
        other = copy.copy(self)
        other._counts = []
        return other

    def begin(self, completions: Sequence[Completion]) -> None:
        """Keep the experts of new rollouts."""
        self._rows = [completion.experts for completion in completions if isinstance(completion, RoutedCompletion)]
        if self._replays and len(self._rows) != len(completions):
            raise ReceiptError("receipt invalid: routing_replay: the sampler noted no experts")

    @contextmanager
    def replayed(self, rows: Sequence[int], mask: Tensor) -> Iterator[None]:
        """Compute passes over `rows` in the body with the sampler's experts, if the arm asks for it.

        mask [rows, places]: 1 where a row has a token. A backward pass belongs into the same body.
        """
        if not self._replays:
            yield
            return
        with self._routers.replayed(self._aligned(rows, mask)):
            yield

    @contextmanager
    def compared(self, rows: Sequence[int], mask: Tensor) -> Iterator[None]:
        """Compare the experts of the forward in the body with the sampler's."""
        if not self._rows:
            yield
            return
        with self._routers.observed():
            yield
            found = self._routers.take(len(rows))
        if found is not None:
            self._count(self._aligned(rows, mask), found)

    def _count(self, wanted: Tensor, found: Tensor) -> None:
        """Count choices, those that are the same set, tokens, and those with the same sets in all layers."""
        pairs = zip(*map(self._routers.by_layer, (wanted, found)), strict=True)
        equal = [(one.sort(-1).values == other.sort(-1).values).all(-1) for one, other in pairs]
        same = torch.stack(equal, -1)[wanted[..., 0] >= 0]
        self._counts.append((same.numel(), int(same.sum()), len(same), int(same.all(-1).sum())))

    def _aligned(self, rows: Sequence[int], mask: Tensor) -> Tensor:
        """Return the sampler's experts at the places of `mask`, [rows, places, slots]; -1 where it read no token."""
        wanted = torch.full((*mask.shape, self._rows[0].shape[-1]), -1, dtype=torch.int16)
        for place, (row, shown) in enumerate(zip(rows, mask.cpu(), strict=True)):
            # The last token of a response was drawn, but not read.
            wanted[place, shown.nonzero()[:-1, 0]] = self._rows[row]
        return wanted

    def settle(self) -> dict[str, float]:
        """Return the shares over all workers by their log names, and reset them; nothing without comparisons."""
        if not self._routers:
            return {}
        counts = [count for of_worker in gathered(self._counts) for count in of_worker]
        self._counts = []
        if not counts:
            return {}
        choices, same, tokens, same_tokens = (sum(part) for part in zip(*counts, strict=True))
        return {"routers/agreement": same / choices, "routers/tokens_differing": 1 - same_tokens / tokens}
