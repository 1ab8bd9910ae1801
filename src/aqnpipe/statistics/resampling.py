"""Resampling: bootstrap over questions and seeds, and sign-flip permutations of seeds. Random numbers are keyed."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aqnpipe.seeding import derive_seed

FloatArray = npt.NDArray[np.float64]

MAX_SEEDS_ENUMERATED = 14
"""Up to this number of seeds, all sign patterns are enumerated."""

NUM_PATTERNS_DRAWN = 20_000


@dataclass
class Resampler:
    """Bootstrap intervals. Comparisons with the same number of seeds and questions share their resamples.

    This is the pigeonhole bootstrap (Owen 2007, Ann. Appl. Stat. 1:386): seeds and questions are resampled
    independently, because they are crossed. Resampling questions within each resampled seed would treat them as nested
    and ignore that all seeds answer the same questions. With k seeds the variance of the resampled seeds is too small
    by (k-1)/k, so these intervals supplement the primary analysis and decide nothing.
    """

    seed: int
    num_samples: int
    _weights: dict[tuple[str, int], FloatArray] = field(default_factory=dict, repr=False)

    def interval(self, differences: FloatArray, level: float) -> tuple[float, float]:
        """Percentile interval, at confidence `level`, of the mean of differences[seed, question]."""
        return _percentiles(np.einsum("kb,kb->b", self._seed_weights(differences), self._by_seed(differences)), level)

    def interval_per_seed(self, differences: FloatArray, level: float) -> list[tuple[float, float]]:
        """Percentile interval of the mean of each row, with its questions resampled."""
        return [_percentiles(row, level) for row in self._by_seed(differences)]

    def _by_seed(self, differences: FloatArray) -> FloatArray:
        """Means over resampled questions: [seed, sample]."""
        weights = self._draws("questions", differences.shape[1])
        return np.asarray(differences @ weights, dtype=np.float64)

    def _seed_weights(self, differences: FloatArray) -> FloatArray:
        return self._draws("seeds", differences.shape[0])

    def _draws(self, what: str, number: int) -> FloatArray:
        """Share of each item in each resample: [item, sample]."""
        key = (what, number)
        if key not in self._weights:
            draws = np.random.default_rng(derive_seed(self.seed, f"bootstrap {what}", number))
            counts = draws.multinomial(number, np.full(number, 1 / number), size=self.num_samples)
            self._weights[key] = counts.T.astype(np.float64) / number
        return self._weights[key]


def _percentiles(values: FloatArray, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def sign_flip_p(seed_means: FloatArray, seed: int) -> float:
    """Two-sided permutation p-value of the mean of seed_means[seed]: with no difference, both signs are equally likely.

    It is exact for up to 14 seeds. The smallest possible value with k seeds is 2/2^k (0.5 with 2, 0.0625 with 5). The
    questions are treated as fixed.
    """
    num_seeds = len(seed_means)
    if num_seeds <= MAX_SEEDS_ENUMERATED:
        patterns = (np.arange(2**num_seeds)[:, None] >> np.arange(num_seeds)) & 1
        means = (1 - 2 * patterns) @ seed_means
        extreme = np.abs(means) >= abs(seed_means.sum()) - 1e-12
        return float(extreme.mean())
    draws = np.random.default_rng(derive_seed(seed, "sign flips", num_seeds))
    signs = draws.choice([-1.0, 1.0], size=(NUM_PATTERNS_DRAWN, num_seeds))
    extreme = np.abs(signs @ seed_means) >= abs(seed_means.sum()) - 1e-12
    return float((extreme.sum() + 1) / (NUM_PATTERNS_DRAWN + 1))
