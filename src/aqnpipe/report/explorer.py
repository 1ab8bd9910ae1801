"""The questions on which two arms disagree, with the responses of both."""

from collections.abc import Iterator, Mapping, Sequence
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
    sides = {"treatment": pair.treatment, "control": pair.control}
    answers = {side: list(_answers(pair, study, data, [arm])) for side, arm in sides.items()}
    if not all(answers.values()):
        return nothing
    treatment, control = (
        pl.concat(parts).drop("arm").rename({name: f"{side}_{name}" for name in ("correct", "response")})
        for side, parts in answers.items()
    )
    # The pretrained model, which has no seed, is compared with every seed.
    keys = ["question_id", "noise_seed", *([] if PRETRAINED in sides.values() else ["seed"])]
    joined = treatment.join(control, on=keys)
    questions = data.test_problems.select("question_id", "question", "gold_answer")
    flipped = joined.filter(pl.col("treatment_correct") != pl.col("control_correct"))
    named = flipped.join(questions, on="question_id", how="left").with_columns(
        noise_level=pl.lit(pair.noise_level), **{side: pl.lit(arm) for side, arm in sides.items()}
    )
    compared = joined["seed"].value_counts()["count"]
    return named.select(*FLIP_COLUMNS).sort("seed", "question_id"), max(compared, default=0), len(compared)


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

    Responses as in `flips`, of all arms of the same model. None if an arm has none, or there are
    more arms than a table can show.
    """
    arms = list(dict.fromkeys(evaluated.source.arm for evaluated in _of_model(pair, study, data)))
    if not 0 < len(arms) <= MAX_OUTCOME_COLUMNS:
        return None
    answers = pl.concat(part.select("arm", "question_id", "correct") for part in _answers(pair, study, data, arms))
    if set(answers["arm"]) != set(arms):
        return None
    correct = pl.col("correct")
    text = pl.format("{}/{}", correct.sum(), pl.len()).alias("text")
    counted = answers.group_by("question_id", "arm").agg(correct.mean().alias("share"), text)
    # One column per arm of each: share_E5, text_E5.
    table = counted.pivot("arm", index="question_id", values=["share", "text"]).drop_nulls()
    shares = [pl.col(f"share_{arm}") for arm in arms]
    spread = pl.max_horizontal(shares) - pl.min_horizontal(shares)
    named = data.test_problems.select("question_id", "question").join(table, on="question_id")
    differing = named.filter(spread > 0).sort(spread, "question_id", descending=[True, False])
    if differing.is_empty():
        return None
    texts = differing.select("question_id", "question", *(f"text_{arm}" for arm in arms))
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


def _answers(pair: ArmPair, study: Study, data: ReportData, arms: Sequence[str]) -> Iterator[pl.DataFrame]:
    """Yield a table per run of `arms`: its answers after the last step, at the level of the pair.

    Of the first sample and the first noise seed. Columns: arm, seed (not of the pretrained model), question_id,
    noise_seed, correct, response.
    """
    last: dict[tuple[str, int], Evaluated] = {}
    for one in _of_model(pair, study, data):
        run = one.source.arm, one.source.seed
        if one.source.arm in arms and (run not in last or last[run].source.step < one.source.step):
            last[run] = one
    correct = pl.col(f"correct_{scorer_column(study.config.evaluation.primary_scorer)}").alias("correct")
    for (arm, seed), evaluated in last.items():
        rows = evaluated.responses().filter(pl.col("noise_level") == pair.noise_level, pl.col("sample") == 0)
        names = {"arm": pl.lit(arm)} | ({} if arm == PRETRAINED else {"seed": pl.lit(seed, pl.Int64)})
        first = rows.filter(pl.col("noise_seed") == pl.col("noise_seed").min())
        yield first.select("question_id", "noise_seed", correct, "response", **names)
