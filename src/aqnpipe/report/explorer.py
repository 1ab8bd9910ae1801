"""Question by question: where two arms disagree, with the responses of both."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from aqnpipe.config.analysis import PRETRAINED, ArmPair
from aqnpipe.config.study import Study
from aqnpipe.report.inputs import Evaluated, ReportData
from aqnpipe.report.text import clipped

MAX_QUESTIONS_PER_GROUP = 15
MAX_QUESTION_CHARACTERS = 700
MAX_RESPONSE_CHARACTERS = 700

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
"""Columns that hold text of a model or data set; they stay out of the CSV, where a spreadsheet could run them."""


@dataclass(frozen=True)
class Response:
    """What one arm answered; `left_out` characters are cut off at the end."""

    arm: str
    correct: bool
    text: str
    left_out: int


@dataclass(frozen=True)
class FlippedQuestion:
    """A question on which the two arms disagree in at least one seed; the responses are those of `seed`."""

    question_id: str
    question: str
    gold_answer: str
    num_flips: int
    seed: int
    responses: tuple[Response, Response]


@dataclass(frozen=True)
class FlipGroup:
    """Questions that go the same way: the arm named `winner` alone answers them (more often, over the seeds)."""

    winner: str
    num_questions: int
    shown: tuple[FlippedQuestion, ...]


@dataclass(frozen=True)
class Explorer:
    """A pair of arms at a noise level: how many questions flipped, and some of them in full."""

    pair: ArmPair
    num_seeds: int
    num_questions: int
    num_flipped: int
    groups: tuple[FlipGroup, ...]

    @property
    def num_both_ways(self) -> int:
        """Questions that flip one way as often as the other, which are in no group."""
        return self.num_flipped - sum(group.num_questions for group in self.groups)


def explored_pair(study: Study, comparisons: pl.DataFrame) -> ArmPair | None:
    """The pair that the study names, else its first comparison of arms that was made; None where there is none."""
    if study.config.report.explore is not None:
        return study.config.report.explore
    between = comparisons.filter((pl.col("kind") == "arms") & (pl.col("verdict") != "invalid"))
    if between.is_empty():
        return None
    first = between.row(0, named=True)
    return ArmPair(treatment=first["treatment"], control=first["control"], noise_level=first["treatment_level"])


def flips(pair: ArmPair, study: Study, data: ReportData) -> tuple[pl.DataFrame, int, int]:
    """Return (a row per seed and question that one arm alone answers, questions compared, seeds compared).

    After the last step; of the first sample and, at noisy levels, the first noise seed. A pretrained model stands
    against every seed.
    """
    model = next(study.arms[arm].model for arm in (pair.treatment, pair.control) if arm in study.arms)
    own = [one for one in data.evaluations if one.source.model == model]
    treatment, control = _last_by_seed(own, pair.treatment), _last_by_seed(own, pair.control)
    scorer = study.config.evaluation.primary_scorer
    parts, requested = [], 0
    for seed in sorted(seed for seed in {*treatment, *control} if seed is not None):
        first, second = treatment.get(seed, treatment.get(None)), control.get(seed, control.get(None))
        if first is None or second is None:
            continue
        joined = _answers(first, pair.noise_level, scorer, "treatment").join(
            _answers(second, pair.noise_level, scorer, "control"), on=["question_id", "noise_seed"], how="inner"
        )
        requested = max(requested, len(joined))
        parts.append(joined.with_columns(seed=pl.lit(seed, pl.Int64)))
    if not parts:
        return no_flips()
    flipped = pl.concat(parts).filter(pl.col("treatment_correct") != pl.col("control_correct"))
    questions = data.test_problems.select("question_id", "question", "gold_answer")
    named = flipped.join(questions, on="question_id", how="left").with_columns(
        treatment=pl.lit(pair.treatment), control=pl.lit(pair.control), noise_level=pl.lit(pair.noise_level)
    )
    return named.select(*FLIP_COLUMNS).sort("seed", "question_id"), requested, len(parts)


def no_flips() -> tuple[pl.DataFrame, int, int]:
    """What `flips` returns where nothing can be compared."""
    return pl.DataFrame(schema=FLIP_COLUMNS), 0, 0


def explorer(pair: ArmPair, flipped: pl.DataFrame, num_questions: int, num_seeds: int) -> Explorer:
    """Group the flipped questions by who wins them, those that flip in most seeds first."""
    by_question = (
        flipped.with_columns(sign=pl.when(pl.col("treatment_correct")).then(1).otherwise(-1))
        .group_by("question_id")
        .agg(pl.col("sign").sum().alias("net"))
    )
    groups = []
    for winner, column, wanted in (
        (pair.treatment, "treatment_correct", pl.col("net") > 0),
        (pair.control, "control_correct", pl.col("net") < 0),
    ):
        won = by_question.filter(wanted).sort(pl.col("net").abs(), "question_id", descending=[True, False])
        shown = won["question_id"].head(MAX_QUESTIONS_PER_GROUP).to_list()
        groups.append(FlipGroup(winner, len(won), tuple(_question(flipped, one, column) for one in shown)))
    return Explorer(pair, num_seeds, num_questions, by_question.height, tuple(groups))


def _question(flipped: pl.DataFrame, question_id: str, winner_column: str) -> FlippedQuestion:
    rows = flipped.filter((pl.col("question_id") == question_id) & pl.col(winner_column))
    row = rows.sort("seed").row(0, named=True)
    return FlippedQuestion(
        question_id=question_id,
        question=clipped(row["question"] or "", MAX_QUESTION_CHARACTERS)[0],
        gold_answer=row["gold_answer"] or "",
        num_flips=len(rows),
        seed=row["seed"],
        responses=(_response(row["treatment"], row, "treatment"), _response(row["control"], row, "control")),
    )


def _response(arm: str, row: dict[str, object], side: str) -> Response:
    text, left_out = clipped(str(row[f"{side}_response"]), MAX_RESPONSE_CHARACTERS)
    return Response(arm, bool(row[f"{side}_correct"]), text, left_out)


def _last_by_seed(evaluations: Sequence[Evaluated], arm: str) -> dict[int | None, Evaluated]:
    """The evaluation of the last step by seed; the pretrained model's under None, for it stands against every seed."""
    latest: dict[int | None, Evaluated] = {}
    for one in evaluations:
        if one.source.arm != arm:
            continue
        seed = None if arm == PRETRAINED else one.source.seed
        if seed not in latest or latest[seed].source.step < one.source.step:
            latest[seed] = one
    return latest


def _answers(one: Evaluated, noise_level: float, scorer: str, side: str) -> pl.DataFrame:
    rows = one.answers().filter(pl.col("noise_level") == noise_level)
    return rows.filter(pl.col("noise_seed") == pl.col("noise_seed").min(), pl.col("sample") == 0).select(
        "question_id",
        "noise_seed",
        pl.col(f"correct_{scorer}").alias(f"{side}_correct"),
        pl.col("response").alias(f"{side}_response"),
    )
