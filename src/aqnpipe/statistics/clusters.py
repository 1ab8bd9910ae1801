"""Questions in clusters, such as templates or documents, whose answers vary together: the cluster is the unit.

Scores of the questions of a cluster are collapsed to one value, so that the mean over clusters is the mean over
questions and the variance between clusters is that of a cluster-robust standard error (Miller 2024, arXiv 2411.00640).
Two corrections are for few clusters, or clusters of unlike size: the variance is unbiased where a cluster's questions
vary together, and its degrees of freedom are those of the effective number of clusters (Carter, Schnepel & Steigerwald
2017, Rev. Econ. Stat. 99:698).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import special

from aqnpipe.statistics.arrays import FloatArray

NOTABLE_TAIL_Z = 3.3
"""Score of a correlation that chance exceeds once in 2,000 comparisons."""

NOTABLE_TAIL = float(special.ndtr(-NOTABLE_TAIL_Z))


@dataclass(frozen=True, eq=False)
class Clusters:
    """Clusters of questions; codes[question]: 0, 1, ... in the order of the questions of the scores."""

    codes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> "Clusters":
        """Return the clusters of questions from the name of each one's cluster."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(np.array([numbers[name] for name in names], dtype=np.int64))

    @cached_property
    def shares(self) -> FloatArray:
        """Share of the questions in each cluster."""
        return np.bincount(self.codes) / len(self.codes)

    @property
    def number(self) -> int:
        """Number of clusters."""
        return len(self.shares)

    @property
    def effective_number(self) -> float:
        """Number of clusters of equal size that vary as much as these."""
        return 1 / float(np.sum(self.shares**2))

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the variance between clusters."""
        return self.effective_number - 1

    @property
    def evenness(self) -> float:
        """Effective number of clusters by their number: 1 if all have the same size."""
        return self.effective_number / self.number

    def collapsed(self, scores: FloatArray) -> FloatArray:
        """Return values [..., cluster] of scores [..., question] with the same mean and the variance of clusters."""
        mean = scores.mean(axis=-1, keepdims=True)
        member = np.zeros((len(self.codes), self.number))
        member[np.arange(len(self.codes)), self.codes] = 1 / len(self.codes)
        squares = float(np.sum(self.shares**2))
        expected = float(np.sum(self.shares**2 * (1 - 2 * self.shares + squares)))
        scale = np.sqrt(squares / expected * self.number * (self.number - 1))
        return np.asarray(mean + scale * ((scores - mean) @ member))


def neighbours_vary_together(differences: FloatArray) -> bool:
    """Return whether differences[question] of neighbours correlate, as those of one document or template do."""
    centred = differences - differences.mean()
    variance = float(centred @ centred)
    if variance == 0:
        return False
    return float(centred[1:] @ centred[:-1]) / variance * np.sqrt(len(differences)) > NOTABLE_TAIL_Z


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches in which questions were decoded, whose answers may share noise; numbers[question], by prompt length."""

    numbers: npt.NDArray[np.int64]

    @cached_property
    def _found(self) -> tuple[npt.NDArray[np.int64], FloatArray, FloatArray]:
        """Batch of each question as 0, 1, ..., roots of the sizes, and a basis [batch, 3] of parabolas over batches."""
        values, codes, sizes = np.unique(self.numbers, return_inverse=True, return_counts=True)
        roots = np.sqrt(sizes)
        return codes, roots, np.linalg.qr(roots[:, None] * np.vander(values - values.mean(), 3, increasing=True))[0]

    def notable_correlation(self, differences: FloatArray) -> float | None:
        """Return the correlation of differences[noise draw, question] within batches; None if chance may explain it.

        It is the intraclass correlation of a one-way analysis of variance. Of several draws, which have different noise
        in every batch, the changes between draws are analysed: what a question is like cancels. Of a single draw a
        parabola over the batches is no noise, because batches hold prompts of similar length and an arm may be better
        at long ones.
        """
        codes, roots, trend = self._found
        num_draws, num_batches = len(differences), len(roots)
        changes = differences - differences.mean(axis=0) if num_draws > 1 else differences
        trend = trend[:, : 1 if num_draws > 1 else 3]
        scale = max(num_draws - 1, 1)
        freedom = (num_batches - trend.shape[1]) * scale, (len(codes) - num_batches) * scale
        if min(freedom) <= 0:
            return None
        sums = np.stack([np.bincount(codes, one, num_batches) for one in changes]) / roots
        between, within = (
            float(np.sum(sums**2) - np.sum((sums @ trend) ** 2)),
            float(np.sum(changes**2) - np.sum(sums**2)),
        )
        between, within = between / freedom[0], max(within, 0.0) / freedom[1]
        if between <= within or special.fdtrc(*freedom, between / within if within else np.inf) > NOTABLE_TAIL:
            return None
        size = (len(codes) - float(np.sum(roots**4)) / len(codes)) / (num_batches - 1)
        return (between - within) / (between + (size - 1) * within)
