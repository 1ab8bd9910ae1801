"""The questions on which two arms disagree, with the responses of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from aqnpipe.config.analysis import PRETRAINED, ArmPair
from aqnpipe.config.evaluation import scorer_column
from aqnpipe.config.study import Study
from aqnpipe.report.inputs import Evaluated, ReportData
from aqnpipe.report.tables import Row, Table
from aqnpipe.report.words import Words, at_noise, clipped

MAX_QUESTIONS_PER_GROUP = 15
MAX_QUESTION_CHARACTERS = 700
MAX_RESPONSE_CHARACTERS = 700
MAX_OUTCOMES = 2000
"""Questions of the table of outcomes."""
MAX_OUTCOME_COLUMNS = 24
MAX_OUTCOME_CHARACTERS = 120

FLIP_COLUMNS = {
    "treatment": pl.String,
    "control": pl.String,
    "noise_level": pl.Float64,
    "noise_seed": pl.Int64,
    "seed": pl.Int64,
    "question_id": pl.String,
    "question": pl.String,
    "gold_answer": pl.String,
    "treatment_correct": pl.Boolean,
    "control_correct": pl.Boolean,
    "treatment_response": pl.String,
    "control_response": pl.String,
}
TEXT_COLUMNS = ("question", "gold_answer", "treatment_response", "control_response")
"""Columns with text of a model or data set, left out of the CSV: a spreadsheet could run them as formulas."""


@dataclass(frozen=True)
class Explorer:
    """A pair of arms at a noise level: the number of flipped questions, and some of them in full.

    noise_seed: that of the noise of all responses; None without a flip.
    groups: per arm that alone answers a question correctly in most seeds with a flip: its name as `winner`,
    `num_questions`, and those that are `shown`, each with the first of its seeds and what both arms responded there.
    """

    pair: ArmPair
    noise_seed: int | None
    num_seeds: int
    num_questions: int
    num_flipped: int
    groups: tuple[Mapping[str, Any], ...]

    @property
    def num_both_ways(self) -> int:
        """The number of questions that flip equally often in both directions, which are in no group."""
        return self.num_flipped - sum(group["num_questions"] for group in self.groups)


def explored_pair(study: Study, comparisons: pl.DataFrame) -> ArmPair | None:
    """Return the pair that the study names, else of its primary claim, else of its first valid one of arms, if any."""
    if study.config.report.explore is not None:
        return study.config.report.explore
    between = comparisons.filter((pl.col("kind") != "levels") & (pl.col("verdict") != "invalid"))
    if between.is_empty():
        return None
    first = between.sort(pl.col("role") != "primary", maintain_order=True).row(0, named=True)
    return ArmPair(treatment=first["treatment"], control=first["control"], noise_level=first["treatment_level"])


def flips(pair: ArmPair | None, study: Study, data: ReportData) -> tuple[pl.DataFrame, int, int]:
    """Return (a row per seed and question that only one arm answers correctly, questions compared, seeds compared).

    After the last step; of the first sample and, at noisy levels, the first noise seed. A pretrained model is compared
    with every seed. Empty if nothing can be compared.
    """
    nothing = pl.DataFrame(schema=FLIP_COLUMNS), 0, 0
    if pair is None:
        return nothing
    evaluations = _of_model(pair, study, data)
    treatment, control = _last_by_seed(evaluations, pair.treatment), _last_by_seed(evaluations, pair.control)
    scorer = scorer_column(study.config.evaluation.primary_scorer)
    parts, num_questions = [], 0
    for seed in sorted(seed for seed in {*treatment, *control} if seed is not None):
        first, second = treatment.get(seed, treatment.get(None)), control.get(seed, control.get(None))
        if first is None or second is None:
            continue
        joined = _responses(first, pair.noise_level, scorer, "treatment").join(
            _responses(second, pair.noise_level, scorer, "control"), on=["question_id", "noise_seed"], how="inner"
        )
        num_questions = max(num_questions, len(joined))
        parts.append(joined.with_columns(seed=pl.lit(seed, pl.Int64)))
    if not parts:
        return nothing
    flipped = pl.concat(parts).filter(pl.col("treatment_correct") != pl.col("control_correct"))
    questions = data.test_problems.select("question_id", "question", "gold_answer")
    named = flipped.join(questions, on="question_id", how="left").with_columns(
        treatment=pl.lit(pair.treatment), control=pl.lit(pair.control), noise_level=pl.lit(pair.noise_level)
    )
    return named.select(*FLIP_COLUMNS).sort("seed", "question_id"), num_questions, len(parts)


def explorer(pair: ArmPair, flipped: pl.DataFrame, num_questions: int, num_seeds: int) -> Explorer:
    """Group the flipped questions by the arm that answers them correctly, those that flip in most seeds first."""
    by_question = (
        flipped.with_columns(sign=pl.when(pl.col("treatment_correct")).then(1).otherwise(-1))
        .group_by("question_id")
        .agg(pl.col("sign").sum().alias("net"))
    )
    groups = []
    for side, wanted in (("treatment", pl.col("net") > 0), ("control", pl.col("net") < 0)):
        won = by_question.filter(wanted).sort(pl.col("net").abs(), "question_id", descending=[True, False])
        shown = [_question(flipped, name, side) for name in won["question_id"].head(MAX_QUESTIONS_PER_GROUP)]
        groups.append({"winner": getattr(pair, side), "num_questions": len(won), "shown": shown, "slug": side})
    noise_seed = next(iter(flipped["noise_seed"]), None)
    return Explorer(pair, noise_seed, num_seeds, num_questions, by_question.height, tuple(groups))


def outcomes(pair: ArmPair, study: Study, data: ReportData, words: Words) -> Table | None:
    """Return in how many seeds each arm answers each question correctly, without questions that all answer alike.

    Responses as in `flips`, of all arms of the same model. None if there are none, or more arms than a table can show.
    """
    evaluations, scorer = _of_model(pair, study, data), scorer_column(study.config.evaluation.primary_scorer)
    arms = list(dict.fromkeys(evaluated.source.arm for evaluated in evaluations))
    if len(arms) > MAX_OUTCOME_COLUMNS:
        return None
    table = data.test_problems.select("question_id", "question")
    for number, arm in enumerate(arms):
        last = _last_by_seed(evaluations, arm).values()
        found = pl.concat(_responses(each, pair.noise_level, scorer, "arm") for each in last)
        correct = pl.col("arm_correct")
        text = pl.format("{}/{}", correct.sum(), pl.len()).alias(f"text{number}")
        counted = found.group_by("question_id").agg(correct.mean().alias(f"share{number}"), text)
        table = table.join(counted, on="question_id")
    shares = [pl.col(f"share{number}") for number in range(len(arms))]
    spread = pl.max_horizontal(shares) - pl.min_horizontal(shares)
    differing = table.filter(spread > 0).sort(spread, "question_id", descending=[True, False])
    if differing.is_empty():
        return None
    texts = differing.select("question_id", "question", *(f"text{number}" for number in range(len(arms))))
    rows = (
        Row((name, clipped(question, MAX_OUTCOME_CHARACTERS)[0], *cells))
        for name, question, *cells in texts.iter_rows()
    )
    headers = (words("column.id"), words("column.question"), *arms)
    caption = words("explorer.outcomes", where=at_noise(pair.noise_level, words))
    return Table("outcomes", caption, headers, tuple(rows), num_text_columns=2, max_rows=MAX_OUTCOMES)


def _of_model(pair: ArmPair, study: Study, data: ReportData) -> list[Evaluated]:
    model = next(study.arms[arm].model for arm in (pair.treatment, pair.control) if arm in study.arms)
    return [evaluated for evaluated in data.evaluations if evaluated.source.model == model]


def _question(flipped: pl.DataFrame, question_id: str, winner: str) -> dict[str, Any]:
    """Return a question with the responses of both arms in the first seed in which `winner` alone is right."""
    rows = flipped.filter((pl.col("question_id") == question_id) & pl.col(f"{winner}_correct"))
    row = rows.sort("seed").row(0, named=True)
    responses = []
    for side in ("treatment", "control"):
        text, left_out = clipped(row[f"{side}_response"], MAX_RESPONSE_CHARACTERS)
        responses.append({"arm": row[side], "correct": row[f"{side}_correct"], "text": text, "left_out": left_out})
    question = clipped(row["question"] or "", MAX_QUESTION_CHARACTERS)[0]
    gold = row["gold_answer"] or ""
    return row | {"question": question, "gold_answer": gold, "num_flips": len(rows), "responses": responses}


def _last_by_seed(evaluations: Sequence[Evaluated], arm: str) -> dict[int | None, Evaluated]:
    """Return the evaluation of the last step by seed; that of the pretrained model, which has no seed, under None."""
    latest: dict[int | None, Evaluated] = {}
    for evaluated in evaluations:
        if evaluated.source.arm != arm:
            continue
        seed = None if arm == PRETRAINED else evaluated.source.seed
        if seed not in latest or latest[seed].source.step < evaluated.source.step:
            latest[seed] = evaluated
    return latest


def _responses(evaluated: Evaluated, noise_level: float, scorer: str, side: str) -> pl.DataFrame:
    """Return the responses at a level of the first sample and the first noise seed."""
    rows = evaluated.responses().filter(pl.col("noise_level") == noise_level)
    first_pass = rows.filter(pl.col("noise_seed") == pl.col("noise_seed").min(), pl.col("sample") == 0)
    return first_pass.select(
        "question_id",
        "noise_seed",
        pl.col(f"correct_{scorer}").alias(f"{side}_correct"),
        pl.col("response").alias(f"{side}_response"),
    )
