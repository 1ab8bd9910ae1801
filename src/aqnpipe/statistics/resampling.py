"""Resampling: bootstrap over questions and seeds, and signs of seeds flipped. Random numbers are keyed."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aqnpipe.seeding import derive_seed

FloatArray = npt.NDArray[np.float64]

MAX_SEEDS_ENUMERATED = 14
"""Up to this many seeds every pattern of signs is tried."""

NUM_PATTERNS_DRAWN = 20_000


@dataclass
class Resampler:
    """Draws bootstrap intervals; equal sizes share their draws, so that comparisons see the same resamples.

    The pigeonhole bootstrap (Owen 2007, Ann. Appl. Stat. 1:386): seeds and questions are resampled independently, as
    they are crossed. Resampling questions inside each resampled seed would treat them as nested and miss that all
    seeds answer the same questions. With few seeds the resampled seeds scatter too little (by (k-1)/k), so these
    intervals stand beside the primary analysis and decide nothing.
    """

    seed: int
    num_samples: int
    _weights: dict[tuple[str, int], FloatArray] = field(default_factory=dict, repr=False)

    def interval(self, differences: FloatArray, level: float) -> tuple[float, float]:
        """Percentile interval at confidence `level` of the mean of differences[seed, question]."""
        return _percentiles(np.einsum("kb,kb->b", self._seed_weights(differences), self._by_seed(differences)), level)

    def interval_per_seed(self, differences: FloatArray, level: float) -> list[tuple[float, float]]:
        """Percentile interval of every row's mean, its questions resampled."""
        return [_percentiles(row, level) for row in self._by_seed(differences)]

    def _by_seed(self, differences: FloatArray) -> FloatArray:
        """Means of resampled questions [seed, sample]."""
        weights = self._draws("questions", differences.shape[1])
        return np.asarray(differences @ weights, dtype=np.float64)

    def _seed_weights(self, differences: FloatArray) -> FloatArray:
        return self._draws("seeds", differences.shape[0])

    def _draws(self, what: str, number: int) -> FloatArray:
        """Shares [item, sample] of the items in every resample."""
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
    """Two-sided permutation p of the mean of seed_means[seed]: were both sides one, any sign would be as likely.

    Exact for up to 14 seeds; k seeds cannot give less than 2/2^k (0.5 with 2, 0.0625 with 5). The questions are taken
    as given.
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
