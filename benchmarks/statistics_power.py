"""Error rates and power of the comparisons by simulation.

`OMP_NUM_THREADS=1 python benchmarks/statistics_power.py` appends a row per design and test to statistics_power.csv and
prints each design. The tables of statistics_power.md are means and maxima of these rows.

A simulated study has several arms and seeds. The probability of a correct answer depends on the
question (the same for all arms), on the interaction of arm and question, and on the run, which shifts the accuracy of
all its answers; a share of the variance between runs belongs to the seed and is the same in all arms. Arms that are not
compared enter by their means, drawn from the normal distribution that the means of their answers have.
"""

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import optimize, special
from smallest import parse

from aqnpipe.statistics.crossed_effects import two_way_spread
from aqnpipe.statistics.sample_sizes import expected_spread, variance_parts
from aqnpipe.statistics.seed_blocks import SeedBlocks, SeedVariance
from aqnpipe.statistics.spread import Spread, VariancePart

FloatArray = npt.NDArray[np.float64]

INTERCEPT, DIFFICULTY = 1.2, 2.0
"""Logistic model: intercept (about 67 % correct), and standard deviation of the questions' difficulty."""

ALPHAS = (0.05, 0.005)
RESULTS = Path(__file__).with_suffix(".csv")


@dataclass(frozen=True)
class Design:
    """Sizes of a simulated study. `run_sd`: run-to-run standard deviation of the accuracy, in points.

    `shared`: the seeds' share of that variance, the same in all arms. `scatter`: factor of the first arm's own standard
    deviation. `effect`: true difference of the first two arms, as a fraction. `taste`: standard deviation of the
    interaction of arm and question, in logits.
    """

    num_seeds: int
    num_questions: int
    run_sd: float
    shared: float = 0.0
    num_arms: int = 4
    scatter: float = 1.0
    effect: float = 0.0
    taste: float = 1.0


@dataclass(frozen=True)
class SimulatedStudy:
    """Answers [arm, seed, question] of the two compared arms, those of a given model, and the means of all arms."""

    answers: FloatArray
    given: FloatArray
    means: FloatArray


def population_accuracy(shift: float, design: Design) -> float:
    """Return the expected accuracy over questions, arms and runs, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    logits = INTERCEPT + shift + nodes * math.hypot(DIFFICULTY, design.taste)
    return float(np.sum(weights * special.expit(logits)) / weights.sum())


def logits_per_point(design: Design) -> float:
    """Return the shift of the logit that changes the accuracy by a point, to first order."""
    return 0.01 * 0.02 / (population_accuracy(0.01, design) - population_accuracy(-0.01, design))


def shift_for(effect: float, design: Design) -> float:
    """Return the shift of the logit that changes the expected accuracy by `effect`."""
    base = population_accuracy(0.0, design)
    return float(optimize.brentq(lambda shift: population_accuracy(shift, design) - base - effect, -5, 5))


def studies(design: Design, number: int, seed: int) -> Iterator[SimulatedStudy]:
    """Yield `number` simulated studies."""
    draws = np.random.default_rng(seed)
    per_point = logits_per_point(design)
    own = np.full((design.num_arms, 1), design.run_sd * math.sqrt(1 - design.shared))
    own[0] *= design.scatter
    shift = np.zeros((2, 1, 1))
    shift[0] = shift_for(design.effect, design)
    for _ in range(number):
        common = design.run_sd * math.sqrt(design.shared) * draws.standard_normal(design.num_seeds)
        points = common + own * draws.standard_normal((design.num_arms, design.num_seeds))
        difficulty = INTERCEPT + draws.normal(0, DIFFICULTY, design.num_questions)
        taste = draws.normal(0, design.taste, (3, 1, design.num_questions))
        logits = difficulty + taste[:2] + shift + per_point * points[:2, :, None]
        answers = (draws.random(logits.shape) < special.expit(logits)).astype(np.float64)
        chances = special.expit(difficulty + taste[2])
        given = (draws.random(chances.shape) < chances).astype(np.float64)
        noise = math.sqrt(float(np.mean(chances * (1 - chances))) / design.num_questions)
        others = points[2:] / 100 + noise * draws.standard_normal((design.num_arms - 2, design.num_seeds))
        yield SimulatedStudy(answers, given, np.concatenate([answers.mean(axis=2), others]))


def spread_of_pair(study: SimulatedStudy) -> Spread | None:
    """Return the error of the first arm minus the second as the compare stage estimates it."""
    return two_way_spread(study.answers[0] - study.answers[1], SeedBlocks(study.means).of_pair(0, 1))


def spread_of_arm(study: SimulatedStudy) -> Spread | None:
    """Return the error of the first arm minus the given model, as of a level or a slope of one arm."""
    return two_way_spread(study.answers[0] - study.given, SeedBlocks(study.means).of_arm(0))


def pooled(study: SimulatedStudy) -> SeedVariance | None:
    """Return the interaction of arms and seeds, the same for every pair: not chosen."""
    means = study.means - study.means.mean(axis=0)
    freedom = float((study.means.shape[0] - 1) * (study.means.shape[1] - 1))
    squares = float(np.sum((means - means.mean(axis=1, keepdims=True)) ** 2))
    return SeedVariance(VariancePart(2 * squares / freedom, freedom), num_arms=len(means))


def empirical_bayes(study: SimulatedStudy) -> SeedVariance | None:
    """Return the variance with prior degrees of freedom estimated from the arms (Smyth 2004): not chosen."""
    arms, seeds = study.means.shape
    if arms < 3:
        return None
    left = study.means - study.means.mean(axis=0)
    freedom = seeds - 1.0
    logs = np.log(left.var(axis=1, ddof=1) + 1e-12)
    excess = float(logs.var(ddof=1)) - float(special.polygamma(1, freedom / 2))
    prior = math.inf if excess <= 0 else 2 * _inverse_trigamma(excess)
    pool = pooled(study)
    own = float((study.means[0] - study.means[1]).var(ddof=1))
    prior = min(prior, (arms - 1) * freedom)
    variance = (freedom * own + prior * pool.own.variance) / (freedom + prior)
    return SeedVariance(VariancePart(variance, freedom + prior), num_arms=arms)


def _inverse_trigamma(value: float) -> float:
    return float(optimize.brentq(lambda x: float(special.polygamma(1, x)) - value, 1e-6, 1e8))


def rates(design: Design, number: int, seed: int) -> dict[str, float]:
    """Return the share of studies in which each test rejects "no difference" at each level, and the mean MDE."""
    counts: dict[str, float] = defaultdict(float)
    for study in studies(design, number, seed):
        differences = study.answers[0] - study.answers[1]
        mean = abs(float(differences.mean()))
        single = abs(float((study.answers[0] - study.given).mean()))
        blocks = SeedBlocks(study.means)
        found = {
            "pair": (two_way_spread(differences, blocks.of_pair(0, 1)), mean),
            "pair, own variance": (two_way_spread(differences), mean),
            "pair, all arms pooled": (two_way_spread(differences, pooled(study)), mean),
            "pair, estimated prior": (two_way_spread(differences, empirical_bayes(study)), mean),
            "arm": (spread_of_arm(study), single),
        }
        for name, (spread, distance) in found.items():
            p_value = 1.0 if spread is None else 2 * spread.upper_tail(distance)
            for alpha in ALPHAS:
                counts[f"{name} {alpha:g}"] += p_value < alpha
    return {name: count / number for name, count in counts.items()}


def median_detectable(design: Design, number: int, seed: int) -> float:
    """Return the median minimum detectable difference of the first two arms, as the report prints it for one test."""
    found = []
    for study in studies(design, number, seed):
        parts = variance_parts(study.answers[0] - study.answers[1], SeedBlocks(study.means).of_pair(0, 1))
        spread = expected_spread(parts, design.num_seeds, design.num_questions, 0.025, 0.8)
        found.append(0.0 if spread is None else spread.minimum_detectable(0.025, 0.8))
    return float(np.median(found))


def grid(arms: tuple[int, ...], scatter: float) -> list[Design]:
    """Return the designs of the error rates."""
    seeds = (2, 3, 5, 10)
    return [
        Design(k, n, run_sd, shared, num_arms, scatter)
        for k in seeds
        for n in (200, 500, 1319)
        for run_sd in ((0.0, 1.0, 3.0) if scatter == 1 else (1.0, 3.0))
        for shared in ((0.0, 0.5, 0.9) if run_sd else (0.0,))
        for num_arms in arms
    ]


def power_designs() -> list[Design]:
    """Return the designs of the power table, without interaction of arms and questions and with it."""
    return [Design(k, 500, 3.0, 0.9, effect=0.058, taste=taste) for taste in (0.0, 0.5, 1.0) for k in (2, 3, 5, 10)]


def main() -> None:
    """Simulate, append every design to the CSV file as soon as it is done, and print each line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=500, help="simulated studies per design of the grid")
    parser.add_argument("--part", choices=("equal", "scatter", "power", "detectable"), action="append")
    parser.add_argument("--seeds", type=int, action="append", help="only designs with this number of seeds")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    arguments = parse(parser, studies=2, part=["equal"], seeds=[2])
    parts = arguments.part or ["power", "detectable", "scatter", "equal"]
    with arguments.csv.open("a", newline="") as stream:
        writer = csv.writer(stream)
        for part in parts:
            for design, found in _simulated(part, arguments.studies, arguments.seeds or [2, 3, 5, 10]):
                for name, value in found.items():
                    writer.writerow([part, *asdict(design).values(), name, f"{value:.4f}"])
                stream.flush()
                line = " ".join(f"{name} {100 * value:.1f}" for name, value in found.items())
                sys.stdout.write(f"{part} {design} {line}\n")
                sys.stdout.flush()


def _simulated(part: str, number: int, seeds: list[int]) -> Iterator[tuple[Design, dict[str, float]]]:
    if part == "power":
        for design in (design for design in power_designs() if design.num_seeds in seeds):
            yield design, rates(design, 2 * number, seed=7)
        return
    if part == "detectable":
        for k in seeds:
            for n in (200, 1319):
                design = Design(k, n, 2.0, 0.5)
                printed = median_detectable(design, number, seed=11)
                at_printed = Design(k, n, 2.0, 0.5, effect=printed)
                yield at_printed, {"printed": printed, "power": rates(at_printed, 2 * number, seed=12)["pair 0.05"]}
        return
    designs = grid((4, 12, 34), 3.0) if part == "scatter" else grid((2, 4, 12, 34), 1.0)
    for design in (design for design in designs if design.num_seeds in seeds):
        yield design, rates(design, number, seed=5)


if __name__ == "__main__":
    main()
