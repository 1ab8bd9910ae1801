"""Error rates, power and runs of the studies that add seeds, by simulation of seed means.

    python benchmarks/sequential.py            # the grid: type-I error over all looks
    python benchmarks/sequential.py --power    # power and expected number of runs, beside the fixed design
    python benchmarks/sequential.py --spending # other spending functions, for the choice in docs/decisions
    python benchmarks/sequential.py --equivalence # claims that may end as equivalent, by the way of adjusting them

Several arms are compared with the first one, in one family: seeds 2, 4, ..., 16, the moderated variance of
`statistics.seed_blocks`, Holm's adjustment, the levels of `statistics.group_sequential`, and futility. A run's accuracy
is the arm's, plus what the seed does to all arms, plus the interaction of arm and seed, plus the sampling of answers;
the questions add an error that no seed reduces. All in percentage points, normal.
"""

# ruff: noqa: T201 - it prints its tables

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special, stats
from smallest import parse

from aqnpipe.statistics import group_sequential
from aqnpipe.statistics.group_sequential import Looks, bounds, nominal_tails
from aqnpipe.statistics.seed_blocks import combined_variance, guard_ratio, prior_freedom

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

ALPHA, FUTILITY = 0.05, 0.05
LOOKS = Looks(start=2, step=2, planned=16, reserve=0.1)
ANSWERS = 0.15
"""Variance of one answer about the difficulty of its question: p * (1 - p) less the variance between questions."""
ARM_BY_QUESTION = 0.02
"""Variance between questions of an arm's true difference: which questions an arm solves better, whatever the seed."""


@dataclass(frozen=True)
class Cell:
    """A simulated study. `sd`: of a run in points; `shared`: share of that variance common to all arms of a seed."""

    arms: int
    questions: int
    sd: float
    shared: float
    scatter: float = 1.0
    """How many times as much the second arm scatters as the others."""
    effect: float = 0.0
    """True difference of the second arm in points; of the others 0."""


@dataclass(frozen=True)
class Outcome:
    """Shares of the simulated studies, and mean numbers of runs."""

    any_error: float
    worst_error: float
    power: float
    runs: float
    fixed_runs: int


def simulate(cell: Cell, looks: Looks, studies: int, seed: int, levels: FloatArray, futility: float) -> Outcome:
    """Return the error rates of many studies. levels[undecided - 1, look - 1]: nominal two-sided levels."""
    random = np.random.default_rng([seed, cell.arms, cell.questions, int(10 * cell.sd), int(100 * cell.shared)])
    claims = cell.arms - 1
    means = _run_means(cell, looks.planned, studies, random)
    at_questions = random.normal(size=(studies, cell.arms)) * 100 * np.sqrt(ARM_BY_QUESTION / 2 / cell.questions)
    p_values, states = np.ones((studies, claims)), np.zeros((studies, claims), dtype=np.int64)
    last_look = np.zeros((studies, claims), dtype=np.int64)
    positive = np.zeros((studies, claims), dtype=bool)
    for look in range(1, looks.num_planned + 1):
        number = looks.seeds_at(look)
        difference, p, z = _tests(means[:, :, :number], at_questions, cell.questions)
        active = states == OPEN
        p_values, last_look = np.where(active, p, p_values), np.where(active, look, last_look)
        positive = np.where(active, difference > 0, positive)
        states = _holm(p_values, last_look, states, levels)
        if look < looks.num_planned:
            chance = _chance(z, number / looks.planned, _undecided_level(states, levels))
            states = np.where((states == OPEN) & (chance < futility), FUTILE, states)
    rejected = states == DECIDED
    null = np.arange(claims) > 0 if cell.effect else np.ones(claims, dtype=bool)
    seeds = np.array([0, *(looks.seeds_at(look) for look in range(1, looks.num_planned + 1))])[last_look]
    return Outcome(
        any_error=float(rejected[:, null].any(axis=1).mean()) if null.any() else 0.0,
        worst_error=float(rejected[:, 0].mean()),
        power=float((rejected & positive)[:, 0].mean()),
        runs=float((seeds.sum(axis=1) + seeds.max(axis=1)).mean()),
        fixed_runs=cell.arms * looks.planned,
    )


OPEN, FUTILE, DECIDED = 0, 1, 2


def _run_means(cell: Cell, seeds: int, studies: int, random: np.random.Generator) -> FloatArray:
    """Return accuracies [study, arm, seed] in points, without the error of the questions."""
    scatter = np.ones((1, cell.arms, 1))
    scatter[0, 1] = cell.scatter
    common = random.normal(size=(studies, 1, seeds)) * cell.sd * np.sqrt(cell.shared)
    own = random.normal(size=(studies, cell.arms, seeds)) * cell.sd * np.sqrt(1 - cell.shared) * scatter
    answers = random.normal(size=(studies, cell.arms, seeds)) * 100 * np.sqrt(ANSWERS / cell.questions)
    means = common + own + answers
    means[:, 1] += cell.effect
    return means


def _tests(means: FloatArray, at_questions: FloatArray, questions: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return difference, two-sided p-value and normal score [study, claim] of every arm against the first."""
    _, arms, seeds = means.shape
    differences = means[:, 1:] - means[:, :1]
    own, freedom = differences.var(axis=2, ddof=1), float(seeds - 1)
    rest_freedom = (arms - 2) * freedom
    centred = means - means.mean(axis=2, keepdims=True) - means.mean(axis=1, keepdims=True)
    squares = ((centred + means.mean(axis=(1, 2), keepdims=True)) ** 2).sum(axis=(1, 2))
    variance, test_freedom = own, np.full_like(own, freedom)
    if rest_freedom > 0:
        pool = 2 * np.maximum(squares[:, None] - own * freedom / 2, 0) / rest_freedom
        guarded = own > guard_ratio(freedom, rest_freedom) * pool
        variance = np.where(guarded, own, combined_variance(own, freedom, pool, rest_freedom))
        test_freedom = np.where(guarded, freedom, freedom + prior_freedom(freedom, rest_freedom))
    # A variance that no other arms moderate is at least that of the answers, as in `statistics.crossed_effects`.
    by_answers = 2e4 * ANSWERS / questions
    by_seed = np.where(test_freedom == freedom, np.maximum(variance, by_answers), variance) / seeds
    by_question = 1e4 * ARM_BY_QUESTION / questions
    difference = differences.mean(axis=2) + at_questions[:, 1:] - at_questions[:, :1]
    tail = np.empty_like(by_seed)
    for value in np.unique(test_freedom):
        chosen = test_freedom == value
        tail[chosen] = _tail(np.abs(difference[chosen]), by_seed[chosen], by_question, float(value))
    p = np.minimum(2 * tail, 1.0)
    return difference, p, special.ndtri(1 - np.maximum(tail, 1e-15))


def _tail(distance: FloatArray, by_seed: FloatArray, by_question: float, freedom: float) -> FloatArray:
    """Return the tail of a sum of a t-distributed and a normal error: the spread of `statistics.spread`."""
    nodes, weights = np.polynomial.legendre.leggauss(48)
    roots = (nodes + 1) / 2
    shares = 2 * weights * roots**3
    ratios = freedom / stats.chi2.ppf(roots**4, freedom)
    scales = np.sqrt(by_seed[:, None] * ratios + by_question)
    return np.asarray(special.ndtr(-distance[:, None] / scales) @ (shares / shares.sum()))


def _holm(p_values: FloatArray, last_look: npt.NDArray[np.int64], states: npt.NDArray[np.int64], levels: FloatArray):
    while True:
        allowed = levels[_num_undecided(states)[:, None] - 1, last_look - 1]
        new = (states != DECIDED) & (p_values < allowed)
        if not new.any():
            return states
        states = np.where(new, DECIDED, states)


def _num_undecided(states: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.maximum((states != DECIDED).sum(axis=1), 1)


def _undecided_level(states: npt.NDArray[np.int64], levels: FloatArray) -> FloatArray:
    return levels[_num_undecided(states) - 1, -1][:, None]


def _chance(z: FloatArray, share: float, level: FloatArray) -> FloatArray:
    """Return the predictive probability of a decision at the planned maximum, as in `comparison.looks`."""
    critical, scale = special.ndtri(1 - level / 2) * np.sqrt(share), np.sqrt(1 - share)
    return np.asarray(special.ndtr((z - critical) / scale) + special.ndtr((-z - critical) / scale))


def level_table(looks: Looks, claims: int, spending: Callable[[float], float] | None = None) -> FloatArray:
    """Return the two-sided levels [undecided - 1, look - 1] by Holm's method; by another spending function if given."""
    rows = []
    for undecided in range(1, claims + 1):
        tail = ALPHA / undecided / 2
        if spending is None:
            tails = nominal_tails(looks, tail, looks.num_planned)
        else:
            seeds = [float(looks.seeds_at(look)) for look in range(1, looks.num_planned + 1)]
            shares = [(1 - looks.reserve) * spending(number / looks.planned) for number in seeds]
            found = bounds(seeds, (tail * np.diff([0.0, *shares])).tolist())
            tails = tuple(stats.norm.sf(found))
        rows.append([2 * tail for tail in tails])
    return np.array(rows)


def obrien_fleming(share: float) -> float:
    """Return the share spent by the spending function of O'Brien and Fleming's type at 2.5 %, one-sided."""
    return float(2 * stats.norm.sf(stats.norm.isf(0.0125) / np.sqrt(share)) / 0.025)


def pocock(share: float) -> float:
    """Return the share spent by the spending function of Pocock's type."""
    return float(np.log(1 + (np.e - 1) * share))


def grid(studies: int, all_arms: Sequence[int], all_questions: Sequence[int]) -> None:
    """Print the type-I error over all looks."""
    print("| arms | questions | run SD, points | shared | any claim | any claim, one arm x 3 | that claim |")
    print("|---|---|---|---|---|---|---|")
    worst = [0.0, 0.0]
    for arms in all_arms:
        levels = level_table(LOOKS, arms - 1)
        for questions in all_questions:
            for sd in (0.0, 1.0, 3.0):
                for shared in (0.0, 0.5, 0.9):
                    if sd == 0 and shared > 0:
                        continue
                    cell = Cell(arms, questions, sd, shared)
                    alike = simulate(cell, LOOKS, studies, 1, levels, 0.0)
                    unlike = simulate(Cell(arms, questions, sd, shared, scatter=3.0), LOOKS, studies, 2, levels, 0.0)
                    worst = [max(worst[0], alike.any_error), max(worst[1], unlike.any_error)]
                    print(
                        f"| {arms} | {questions} | {sd:g} | {shared:.0%} | {alike.any_error:.1%} | "
                        f"{unlike.any_error:.1%} | {unlike.worst_error:.1%} |"
                    )
    print(f"\nHighest: {worst[0]:.1%} where arms scatter alike, {worst[1]:.1%} where one scatters three times as much.")


def power(studies: int) -> None:
    """Print power for one effect and the expected number of runs, beside a fixed design of 16 seeds."""
    print("| arms | effect, points | power | power, fixed | expected runs | runs, fixed |")
    print("|---|---|---|---|---|---|")
    once = Looks(start=16, step=1, planned=16, reserve=0.0)
    for arms in (2, 4, 12):
        for effect in (0.0, 1.0, 2.0, 3.0, 5.8):
            cell = Cell(arms, 500, 1.2, 0.0, effect=effect)
            found = simulate(cell, LOOKS, studies, 3, level_table(LOOKS, arms - 1), FUTILITY)
            fixed = simulate(cell, once, studies, 3, level_table(once, arms - 1), 0.0)
            print(
                f"| {arms} | {effect:g} | {found.power:.1%} | {fixed.power:.1%} | {found.runs:.1f} | "
                f"{found.fixed_runs} |"
            )


def spending_functions(studies: int) -> None:
    """Print power and expected runs by spending function, 4 arms."""
    print("| spending | effect, points | any false claim | power | expected runs |")
    print("|---|---|---|---|---|")
    functions: dict[str, Callable[[float], float]] = {
        "O'Brien-Fleming type": obrien_fleming,
        "t^3": lambda share: share**3,
        f"t^{group_sequential.SPENDING_POWER} (used)": lambda share: share**group_sequential.SPENDING_POWER,
        "t": lambda share: share,
        "Pocock type": pocock,
    }
    for name, function in functions.items():
        levels = level_table(LOOKS, 3, function)
        for effect in (0.0, 2.0, 3.0, 5.8):
            found = simulate(Cell(4, 500, 1.2, 0.0, effect=effect), LOOKS, studies, 4, levels, FUTILITY)
            print(f"| {name} | {effect:g} | {found.any_error:.1%} | {found.power:.1%} | {found.runs:.1f} |")


FIVE_LOOKS = Looks(start=2, step=2, planned=10, reserve=0.1)


def equivalence_rates(
    claims: int, margin: float, at_margin: int, studies: int, *, is_separate: bool
) -> tuple[float, float, float]:
    """Return the shares of studies with a false difference, a false equivalence, and either, and no futility.

    Every claim has a normal statistic of known variance over `FIVE_LOOKS`; `margin`: in standard errors at the last
    look. The first `at_margin` claims differ by exactly the margin, the others not at all. `is_separate`: differences
    and equivalence are adjusted apart, else Holm's method takes the smaller p-value of a claim.
    """
    random = np.random.default_rng([7, claims, at_margin])
    levels, looks = level_table(FIVE_LOOKS, claims), FIVE_LOOKS
    # In standard errors of one seed; the margin is one in those of all seeds.
    bound = margin / np.sqrt(looks.planned)
    true = np.where(np.arange(claims) < at_margin, bound, 0.0)
    sums = random.standard_normal((studies, claims, looks.planned)).cumsum(axis=2)
    ended = np.zeros((2, studies, claims), dtype=bool)
    for look in range(1, looks.num_planned + 1):
        number = looks.seeds_at(look)
        estimate, root = true + sums[:, :, number - 1] / number, np.sqrt(number)
        p_values = 2 * stats.norm.sf(np.array([np.abs(estimate), bound - np.abs(estimate)]) * root)
        while True:
            open_claims = ~ended.any(axis=0)
            left = (~ended).sum(axis=2) if is_separate else np.stack([open_claims.sum(axis=1)] * 2)
            allowed = levels[np.maximum(left, 1) - 1, look - 1][:, :, None]
            new = open_claims & (p_values < allowed) & (p_values <= p_values.min(axis=0))
            if not new.any():
                break
            ended |= new
    differs, same = (ended[0] & (true == 0)).any(axis=1), (ended[1] & (true > 0)).any(axis=1)
    return float(differs.mean()), float(same.mean()), float((differs | same).mean())


def equivalence(studies: int) -> None:
    """Print false findings where claims may end as equivalent, by the way of adjusting them."""
    print("| claims | margin, SE | at the margin | adjusted | false difference | false equivalence | either |")
    print("|---|---|---|---|---|---|---|")
    for claims, margin in ((3, 4.0), (4, 4.5), (8, 4.5)):
        for at_margin in (0, claims // 2, claims):
            for is_separate in (False, True):
                found = equivalence_rates(claims, margin, at_margin, studies, is_separate=is_separate)
                name = "separately" if is_separate else "the smaller p"
                print(
                    f"| {claims} | {margin:g} | {at_margin} | {name} | {' | '.join(f'{rate:.1%}' for rate in found)} |"
                )


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=4000)
    parser.add_argument("--arms", type=int, nargs="+", default=[2, 4, 12, 34], help="of the grid")
    parser.add_argument("--questions", type=int, nargs="+", default=[200, 500, 1319], help="of the grid")
    parser.add_argument("--power", action="store_true")
    parser.add_argument("--spending", action="store_true")
    parser.add_argument("--equivalence", action="store_true")
    arguments = parse(parser, studies=4, arms=[2], questions=[200])
    if arguments.equivalence:
        equivalence(arguments.studies)
    elif arguments.power:
        power(arguments.studies)
    elif arguments.spending:
        spending_functions(arguments.studies)
    else:
        grid(arguments.studies, arguments.arms, arguments.questions)


if __name__ == "__main__":
    main()
