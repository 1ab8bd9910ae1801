"""Compares observed tensors with what the requested noise makes of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from aqnpipe.config.noise import TensorError
from aqnpipe.config.own_noise import OwnError
from aqnpipe.noise.audit.expected_values import deviations, expected_values
from aqnpipe.noise.audit.observer import Claim, Reading
from aqnpipe.noise.audit.random_numbers import Draws, FloatArray, IntArray


@dataclass
class Comparison:
    """Result of a comparison.

    `numbers` elements were recomputed. `largest_deviation` is the largest difference as a multiple of the difference
    that rounding explains: above 1 it contradicts the request. `contradictions` counts what was found, in words.
    """

    numbers: int = 0
    largest_deviation: float = 0.0
    contradictions: dict[str, int] = field(default_factory=dict)

    def note(self, contradiction: str) -> None:
        """Count one contradiction."""
        self.contradictions[contradiction] = self.contradictions.get(contradiction, 0) + 1

    def clear(self) -> None:
        """Start again, after the result has been recorded."""
        self.numbers, self.largest_deviation, self.contradictions = 0, 0.0, {}


@dataclass(frozen=True)
class Sample:
    """Sampled elements of one noised tensor: what it should be, and its values without and with the noise.

    `input_rms`: root mean square of the input row of each element; 0 where no error depends on it.
    """

    claim: Claim
    expected_error: TensorError
    expected_key: int
    dtype: torch.dtype
    elements: IntArray
    clean: FloatArray
    used: FloatArray
    input_rms: FloatArray


def values_of(readings: Sequence[Reading]) -> Iterator[tuple[Reading, FloatArray, FloatArray]]:
    """Yield readings with the values as made and as read; they are copied from their device in few steps."""
    tensors = [tensor for reading in readings for tensor in (reading.followed.clean, reading.used)]
    order = sorted(range(len(tensors)), key=lambda index: (str(tensors[index].dtype), str(tensors[index].device)))
    arrays: dict[int, FloatArray] = {}
    for _, group in groupby(order, key=lambda index: (tensors[index].dtype, tensors[index].device)):
        indices = list(group)
        joined = torch.cat([tensors[index] for index in indices]).double().cpu().numpy()
        ends = np.cumsum([tensors[index].numel() for index in indices])[:-1]
        arrays |= dict(zip(indices, np.split(joined, ends), strict=True))
    for number, reading in enumerate(readings):
        yield reading, arrays[2 * number], arrays[2 * number + 1]


def compare(samples: Sequence[Sample], comparison: Comparison, name: Callable[[Claim], str]) -> None:
    """Compare all elements of `samples` with their expected values; `name` names a claim in a contradiction."""
    order = sorted(samples, key=lambda sample: (repr(sample.expected_error), str(sample.dtype)))
    for _, group in groupby(order, key=lambda sample: (repr(sample.expected_error), str(sample.dtype))):
        found = list(group)
        counts = [len(sample.elements) for sample in found]
        draws = Draws(
            np.repeat(np.array([sample.expected_key for sample in found], np.uint64), counts),
            np.repeat(np.array([sample.claim.call for sample in found], np.uint64), counts),
            np.repeat(np.array([sample.claim.stream for sample in found], np.uint64), counts),
        )
        clean, used, elements, input_rms = (
            np.concatenate([getattr(sample, part) for sample in found])
            for part in ("clean", "used", "elements", "input_rms")
        )
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            expected, allowed = expected_values(
                clean, found[0].expected_error, found[0].dtype, draws, elements, input_rms
            )
        deviation = deviations(clean, used, expected, allowed, found[0].dtype)
        comparison.numbers += len(elements)
        comparison.largest_deviation = max(comparison.largest_deviation, float(deviation.max(initial=0.0)))
        for sample, own in zip(found, np.split(deviation, np.cumsum(counts)[:-1]), strict=True):
            if (own > 1).any():
                comparison.note(f"{name(sample.claim)}: {_difference(sample, own > 1)}")


def _difference(sample: Sample, wrong: npt.NDArray[np.bool_]) -> str:
    if (sample.used == sample.clean).all():
        return "the values used have no noise"
    error = sample.expected_error
    whose = (
        f"{error.function}, which must be elementwise, without a state" if isinstance(error, OwnError) else error.kind
    )
    return (
        f"{np.count_nonzero(wrong) / len(wrong):.0%} of the sampled values are not those of the requested noise "
        f"({whose})"
    )
