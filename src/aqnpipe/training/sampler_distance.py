"""How far the policy that rolled out was from the one that learns: by the log-probabilities of the drawn tokens."""

from torch import Tensor

from aqnpipe.training.ranks import gathered


class SamplerDistance:
    """Sums over the tokens of one batch of rollouts, on all workers.

    With d = log p(actor) - log p(sampler) of a drawn token: the mean and the largest |d|, and the mean of
    exp(d) - 1 - d, an estimate of KL(sampler || actor) that is never negative (Schulman 2020, "k3").
    """

    def __init__(self) -> None:
        self._batches: list[tuple[int, float, float, float]] = []

    def add(self, sampler: Tensor, actor: Tensor, mask: Tensor) -> None:
        """Add the tokens where `mask` is not 0; log-probabilities and mask have the shape [batch, tokens]."""
        # In double precision: exp(d) - 1 - d is of the order of d squared.
        difference = (actor.double() - sampler.double())[mask.bool()]
        if difference.numel():
            size = difference.abs()
            divergence = (difference.expm1() - difference).sum()
            self._batches.append((difference.numel(), size.sum().item(), size.max().item(), divergence.item()))

    def settle(self) -> dict[str, float]:
        """Return the figures of all workers by their names in the log, and start anew. All workers call it alike."""
        batches = [batch for of_one in gathered(self._batches) for batch in of_one]
        self._batches = []
        tokens, absolute, largest, divergence = zip(*batches, strict=True)
        return {
            "sampler/logp_difference_mean": sum(absolute) / sum(tokens),
            "sampler/logp_difference_max": max(largest),
            "sampler/kl": sum(divergence) / sum(tokens),
        }
