"""Distance between the policy that sampled the rollouts and the policy being trained."""

from torch import Tensor

from aqnpipe.training.ranks import gathered


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
