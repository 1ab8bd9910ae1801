"""Splits the distance between sampler and policy into differences of neighbouring passes; tensors in, figures out."""

from collections.abc import Mapping

from torch import Tensor

from aqnpipe.artifacts.sampler_distance import Cause, DistancePart


def parts_of(sampled: Tensor, chain: Mapping[Cause, Tensor]) -> tuple[DistancePart, ...]:
    """Return what every cause adds on the way from the sampler to the policy.

    `sampled`: log-probabilities of the drawn tokens under the sampler, float64 [tokens]. `chain`: for every cause the
    log-probabilities of the pass that is free of it and of all causes before it; the last one is the policy's.
    """
    *_, policy = chain.values()
    distance, before, found = policy - sampled, sampled, []
    for cause, after in chain.items():
        found.append(_part(cause, after - before, distance))
        before = after
    return tuple(found)


def rms(values: Tensor) -> float:
    """Return the root mean square."""
    return float(values.square().mean().sqrt())


def share_of(part: Tensor, whole: Tensor) -> float | None:
    """Return sum(part * whole) / sum(whole * whole), which is additive in `part`; None if `whole` is 0."""
    square = float(whole.square().sum())
    return float((part * whole).sum()) / square if square else None


def _part(cause: Cause, difference: Tensor, distance: Tensor) -> DistancePart:
    return DistancePart(
        cause=cause, mean=float(difference.mean()), rms=rms(difference), share=share_of(difference, distance)
    )
