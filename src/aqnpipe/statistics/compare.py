"""`aqnpipe.compare`: the paired comparison of a study, on graded answers from anywhere."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from aqnpipe.errors import DataError
from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.crossed_effects import FloatArray, Method, estimate_difference


@dataclass(frozen=True)
class PairedDifference:
    """The mean of a minus b, as a fraction, with its interval at `level` and two-sided p-value.

    `about`: "these runs" with one seed, "other seeds and questions" with several. Methods: see `estimate_difference`.
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

    `a_correct[i]` and `b_correct[i]`: whether a and b answered question `question_ids[i]` right with seed `seeds[i]` (1
    or 0, or the share of right samples). Every seed has every question once. `clusters[i]` is the cluster of the
    question, such as its template or document, where questions vary together: clusters are then the unit. `level`: of
    the interval. Raises DataError otherwise.
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
