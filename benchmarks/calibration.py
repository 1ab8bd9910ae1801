"""Error rates of the comparisons by simulation: what share of studies without an effect shows one?

`OMP_NUM_THREADS=1 python benchmarks/calibration.py [--studies 2000]` prints the table of benchmarks/README.md. A
made-up study has several arms and seeds; an answer is right with a probability that depends on the question (shared by
all arms), on how the arm takes the question, and on the seed_variance of the run, which shifts all of a run's accuracy.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from aqnpipe.statistics.cochran_cox import Spread
from aqnpipe.statistics.crossed_effects import pooled_seed_variance, seed_t_p, two_way_spread
from aqnpipe.statistics.resampling import Resampler, sign_flip_p

FloatArray = npt.NDArray[np.float64]

INTERCEPT, DIFFICULTY, TASTE = 1.2, 2.0, 1.0
"""Of the logistic model: about 67 % right; standard deviations of questions and of arms' own views of questions."""


@dataclass(frozen=True)
class Design:
    """Sizes of a made-up study; seed_variance is the standard deviation of a run's accuracy in points.

    `other_luck`: of the arms that are not compared (null: the same). `effect`: true difference of the first two arms.
    """

    num_seeds: int
    num_questions: int
    seed_variance: float
    num_arms: int = 4
    other_luck: float | None = None
    effect: float = 0.0


def population_accuracy(shift: float, spread: float = 0.0) -> float:
    """Expected accuracy over questions, arms' views and seed_variance, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    logits = INTERCEPT + shift + nodes * np.sqrt(DIFFICULTY**2 + TASTE**2 + spread**2)
    return float(np.sum(weights / (1 + np.exp(-logits))) / weights.sum())


def luck_in_logits(points: float) -> float:
    """Shift of the logit that moves the accuracy by `points`, to first order."""
    slope = (population_accuracy(0.01) - population_accuracy(-0.01)) / 0.02
    return points / 100 / slope


def shift_for(effect: float, spread: float) -> float:
    """Shift of the logit that changes the expected accuracy by `effect`."""
    if effect == 0:
        return 0.0
    base = population_accuracy(0.0, spread)
    return float(optimize.brentq(lambda shift: population_accuracy(shift, spread) - base - effect, -5, 5))


def studies(design: Design, number: int, seed: int) -> Iterator[FloatArray]:
    """Yield outcomes[arm, seed, question] of `number` made-up studies."""
    draws = np.random.default_rng(seed)
    sizes = (design.num_arms, design.num_seeds, 1)
    seed_variance = np.full((design.num_arms, 1, 1), luck_in_logits(design.seed_variance))
    if design.other_luck is not None:
        seed_variance[2:] = luck_in_logits(design.other_luck)
    shift = np.zeros((design.num_arms, 1, 1))
    shift[0] = shift_for(design.effect, float(seed_variance[0, 0, 0]))
    for _ in range(number):
        difficulty = draws.normal(0, DIFFICULTY, design.num_questions)
        taste = draws.normal(0, TASTE, (design.num_arms, 1, design.num_questions))
        logits = INTERCEPT + shift + difficulty + taste + seed_variance * draws.standard_normal(sizes)
        yield (draws.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float64)


def pooled_spread(outcomes: FloatArray) -> Spread | None:
    """Spread of arm 0 minus arm 1 as the compare stage estimates it, seed_variance pooled over all arms."""
    num_seeds = outcomes.shape[1]
    seed_variance = pooled_seed_variance(list(outcomes.mean(axis=2)), [num_seeds, num_seeds]) if num_seeds > 1 else None
    return two_way_spread(outcomes[0] - outcomes[1], seed_variance)


def misses(design: Design, number: int, seed: int, alpha: float = 0.05) -> dict[str, float]:
    """Return the share of studies in which each method's interval misses the true difference, or its test rejects."""
    resampler = Resampler(seed, 500)
    counts = dict.fromkeys(("pooled", "own", "satterthwaite", "seed t", "sign flips", "bootstrap"), 0)
    for outcomes in studies(design, number, seed):
        differences = outcomes[0] - outcomes[1]
        error = abs(float(differences.mean()) - design.effect)
        pooled, own = pooled_spread(outcomes), two_way_spread(differences)
        means = differences.mean(axis=1) - design.effect
        low, high = resampler.interval(differences, 1 - alpha)
        if own is None or pooled is None:
            continue
        total = sum(own.variances)
        freedom = total**2 / sum(v**2 / df for v, df in zip(own.variances, own.degrees_of_freedom, strict=True))
        counts["pooled"] += error > pooled.half_width(1 - alpha)
        counts["own"] += error > own.half_width(1 - alpha)
        counts["satterthwaite"] += error > stats.t.ppf(1 - alpha / 2, freedom) * math.sqrt(total)
        counts["seed t"] += (seed_t_p(means) or 1.0) < alpha
        counts["sign flips"] += sign_flip_p(means, seed) < alpha
        counts["bootstrap"] += not low <= design.effect <= high
    return {name: count / number for name, count in counts.items()}


def _designs() -> list[Design]:
    same = [
        Design(k, n, seed_variance) for n in (200, 1319) for k in (2, 3, 5, 10) for seed_variance in (0.0, 1.0, 3.0)
    ]
    unequal = [Design(k, 1319, 3.0, other_luck=1.0) for k in (2, 5)]
    return [*same, *unequal]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--alpha", type=float, default=0.05)
    arguments = parser.parse_args()
    header = None
    for design in _designs():
        found = misses(design, arguments.studies, seed=5, alpha=arguments.alpha)
        if header is None:
            header = ["seeds", "questions", "seed_variance", *found]
            print("| " + " | ".join(header) + " |")  # noqa: T201
            print("|" + "---|" * len(header))  # noqa: T201
        seed_variance = f"{design.seed_variance:g}" + (
            f", others {design.other_luck:g}" if design.other_luck is not None else ""
        )
        cells = [
            str(design.num_seeds),
            str(design.num_questions),
            seed_variance,
            *(f"{100 * v:.1f}" for v in found.values()),
        ]
        print("| " + " | ".join(cells) + " |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
