"""Error rates of the comparisons by simulation: the share of studies without an effect that appear to show one.

`OMP_NUM_THREADS=1 python benchmarks/calibration.py [--studies 2000]` prints the table of benchmarks/README.md. A
simulated study has several arms and seeds. The probability of a correct answer depends on the question (the same for
all arms), on the interaction of arm and question, and on the run, which shifts the accuracy of all its answers.
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
"""Logistic model: intercept (about 67 % correct), and standard deviations of question and of arm x question effects."""


@dataclass(frozen=True)
class Design:
    """Sizes of a simulated study. `run_sd`: run-to-run standard deviation of the accuracy, in points.

    `other_run_sd`: that of the arms that are not compared (None: the same). `effect`: true difference of the first two
    arms, as a fraction.
    """

    num_seeds: int
    num_questions: int
    run_sd: float
    num_arms: int = 4
    other_run_sd: float | None = None
    effect: float = 0.0


def population_accuracy(shift: float, spread: float = 0.0) -> float:
    """Return the expected accuracy over questions, arms and runs, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    logits = INTERCEPT + shift + nodes * np.sqrt(DIFFICULTY**2 + TASTE**2 + spread**2)
    return float(np.sum(weights / (1 + np.exp(-logits))) / weights.sum())


def run_sd_in_logits(points: float) -> float:
    """Return the shift of the logit that changes the accuracy by `points`, to first order."""
    slope = (population_accuracy(0.01) - population_accuracy(-0.01)) / 0.02
    return points / 100 / slope


def shift_for(effect: float, spread: float) -> float:
    """Return the shift of the logit that changes the expected accuracy by `effect`."""
    if effect == 0:
        return 0.0
    base = population_accuracy(0.0, spread)
    return float(optimize.brentq(lambda shift: population_accuracy(shift, spread) - base - effect, -5, 5))


def studies(design: Design, number: int, seed: int) -> Iterator[FloatArray]:
    """Yield outcomes[arm, seed, question] of `number` simulated studies."""
    draws = np.random.default_rng(seed)
    sizes = (design.num_arms, design.num_seeds, 1)
    run_sd = np.full((design.num_arms, 1, 1), run_sd_in_logits(design.run_sd))
    if design.other_run_sd is not None:
        run_sd[2:] = run_sd_in_logits(design.other_run_sd)
    shift = np.zeros((design.num_arms, 1, 1))
    shift[0] = shift_for(design.effect, float(run_sd[0, 0, 0]))
    for _ in range(number):
        difficulty = draws.normal(0, DIFFICULTY, design.num_questions)
        taste = draws.normal(0, TASTE, (design.num_arms, 1, design.num_questions))
        logits = INTERCEPT + shift + difficulty + taste + run_sd * draws.standard_normal(sizes)
        yield (draws.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float64)


def pooled_spread(outcomes: FloatArray) -> Spread | None:
    """Return the spread of arm 0 minus arm 1 as the compare stage estimates it, with pooled seed variance."""
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
    same = [Design(k, n, run_sd) for n in (200, 1319) for k in (2, 3, 5, 10) for run_sd in (0.0, 1.0, 3.0)]
    unequal = [Design(k, 1319, 3.0, other_run_sd=1.0) for k in (2, 5)]
    return [*same, *unequal]


def main() -> None:
    """Print the table of error rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=2000, help="simulated studies per row")
    parser.add_argument("--alpha", type=float, default=0.05, help="nominal error rate")
    arguments = parser.parse_args()
    header = None
    for design in _designs():
        found = misses(design, arguments.studies, seed=5, alpha=arguments.alpha)
        if header is None:
            header = ["seeds", "questions", "run SD", *found]
            print("| " + " | ".join(header) + " |")  # noqa: T201
            print("|" + "---|" * len(header))  # noqa: T201
        run_sd = f"{design.run_sd:g}" + (f", others {design.other_run_sd:g}" if design.other_run_sd is not None else "")
        cells = [
            str(design.num_seeds),
            str(design.num_questions),
            run_sd,
            *(f"{100 * v:.1f}" for v in found.values()),
        ]
        print("| " + " | ".join(cells) + " |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
