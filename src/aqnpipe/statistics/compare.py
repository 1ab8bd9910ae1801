"""`aqnpipe.compare`: the paired comparison of a study, on graded answers from anywhere."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from aqnpipe.errors import DataError
from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.crossed_effects import Method, estimate_difference


@dataclass(frozen=True)
class PairedDifference:
    """The mean of a minus b, with its interval and two-sided p-value; what `compare` returns.

    - difference: mean of a minus mean of b, as a fraction.
    - ci_low: lower end of the interval, as a fraction.
    - ci_high: upper end of the interval, as a fraction.
    - p_value: of the null hypothesis of no difference.
    - level: of the interval.
    - method: how the variance was estimated (`estimate_difference`).
    - num_questions: questions, or clusters of them.
    - num_seeds: seeds that both have.
    """

    difference: float
    ci_low: float
    ci_high: float
    p_value: float
    level: float
    method: Method
    num_questions: int
    num_seeds: int

    @property
    def about(self) -> str:
        """Return what the interval and the test make a statement about."""
        return "other seeds and questions" if self.num_seeds > 1 else "these runs on other questions"


def compare(
    a_correct: Sequence[float],
    b_correct: Sequence[float],
    question_ids: Sequence[Hashable],
    seeds: Sequence[Hashable] | None = None,
    *,
    level: float = 0.95,
    clusters: Sequence[Hashable] | None = None,
) -> PairedDifference:
    """Compare two ways of answering, paired over questions and, where there are several, over seeds.

    - a_correct: for each answer of a, 1 if it is right, 0 if not, or the share of right samples.
    - b_correct: the same for b, in the same order.
    - question_ids: the question of each answer. Every seed has every question once.
    - seeds: the seed of each answer; default: one seed.
    - level: of the confidence interval.
    - clusters: the cluster of each question, such as its template or document, where questions vary together; clusters
      are then the unit.

    Raises DataError for anything else.
    """
    if not 0 < level < 1:
        raise DataError(f"compare: level is {level}, expected a number above 0 and below 1")
    seeds = [0] * len(question_ids) if seeds is None else seeds
    lengths = {len(values) for values in (a_correct, b_correct, question_ids, seeds, clusters) if values is not None}
    if len(lengths) > 1:
        raise DataError(f"compare: found arguments of lengths {sorted(lengths)}, expected one length for all")
    first, second = (_table(values, question_ids, seeds, name) for values, name in ((a_correct, "a"), (b_correct, "b")))
    if first.shape[1] < 2:
        raise DataError(f"compare: found {first.shape[1]} questions, expected at least 2")
    units = None if clusters is None else _clusters(question_ids, clusters)
    estimate = estimate_difference(first, second, clusters=units)
    return PairedDifference(
        **estimate.columns(level),
        p_value=estimate.two_sided_p(),
        level=level,
        method=estimate.method,
        num_questions=estimate.num_questions,
        num_seeds=estimate.num_seeds,
    )


def _clusters(question_ids: Sequence[Hashable], clusters: Sequence[Hashable]) -> Clusters:
    """Return the clusters of the questions, in the order of their first appearance."""
    of_question: dict[Hashable, Hashable] = {}
    for question, cluster in zip(question_ids, clusters, strict=True):
        if of_question.setdefault(question, cluster) != cluster:
            raise DataError(f"compare: question {question!r} is in clusters {of_question[question]!r} and {cluster!r}")
    found = Clusters.of(list(of_question.values()))
    if found.number < 2:
        raise DataError(f"compare: found {found.number} cluster, expected at least 2")
    return found


def _table(
    values: Sequence[float], question_ids: Sequence[Hashable], seeds: Sequence[Hashable], name: str
) -> FloatArray:
    """Return the values as [seed, question], both in the order of their first appearance."""
    rows = {seed: row for row, seed in enumerate(dict.fromkeys(seeds))}
    columns = {question: column for column, question in enumerate(dict.fromkeys(question_ids))}
    table = np.full((len(rows), len(columns)), np.nan)
    for value, question, seed in zip(values, question_ids, seeds, strict=True):
        if not 0 <= float(value) <= 1:
            raise DataError(f"compare: {name}_correct has {value!r}, expected numbers from 0 to 1")
        if not np.isnan(table[rows[seed], columns[question]]):
            raise DataError(f"compare: question {question!r} appears twice with seed {seed!r}")
        table[rows[seed], columns[question]] = float(value)
    missing = np.argwhere(np.isnan(table))
    if len(missing):
        seed, question = list(rows)[missing[0][0]], list(columns)[missing[0][1]]
        raise DataError(f"compare: question {question!r} is missing with seed {seed!r}, and {len(missing) - 1} more")
    return table
