"""Every response of a study, read from its evaluations on demand: by question, by claim, and by a search.

The files are read as they lie; the stages have verified them. Only the rows of one question or claim are in memory.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_args

import polars as pl
from markupsafe import Markup, escape

from aqnpipe.artifacts.comparisons import Claim, ClaimsFile, ComparisonTable
from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.evaluation import OWN_SCORER, Scorer, scorer_column
from aqnpipe.config.evaluation_noise import numbered_levels
from aqnpipe.errors import DataError, first_line
from aqnpipe.report.text import visible

_PLACE = re.compile(r"eval/([^/]+)/([^/]+)/seed(\d+)/step(\d+)\.parquet$")
_DIGITS = 9
_WORDS = re.compile(r"\s+|[^\s]+")

Frame = TypeVar("Frame", pl.DataFrame, pl.LazyFrame)


_SCORERS = (*get_args(Scorer), OWN_SCORER, "task")
"""All names of scorers in columns; `task` is a task of lm-evaluation-harness."""


@dataclass(frozen=True)
class Checkpoint:
    """The last evaluated checkpoint of one run."""

    model: str
    arm: str
    seed: int
    step: int
    path: Path


@dataclass(frozen=True)
class Changed:
    """A question on which the quantity of a claim favours a side, in so many of its seeds."""

    question_id: str
    question: str
    treatment_better: int
    control_better: int


class Responses:
    """The responses below the results folder of a study. Raises DataError if there are none."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.checkpoints = tuple(_last_checkpoints(results))
        if not self.checkpoints:
            raise DataError(f"{results}: found no evaluations in eval/, expected the results folder of a study")

    @cached_property
    def questions(self) -> pl.DataFrame:
        """The test questions with their answers: question_id, question, gold_answer; empty if the file is missing."""
        path = self.results / "data" / "test.parquet"
        if not path.exists():
            return pl.DataFrame(schema=dict.fromkeys(("question_id", "question", "gold_answer"), pl.String))
        return read_table(path, ProblemTable).select("question_id", "question", "gold_answer")

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """The claims of the study; none if nothing was compared yet."""
        path = self.results / "claims.json"
        return read_json(path, ClaimsFile).claims if path.exists() else ()

    @cached_property
    def comparisons(self) -> dict[str, dict[str, Any]]:
        """The comparisons by id."""
        path = self.results / "comparisons.parquet"
        if not path.exists():
            return {}
        return {row["comparison_id"]: row for row in read_table(path, ComparisonTable).iter_rows(named=True)}

    @property
    def primary_scorer(self) -> str:
        """The scorer of the study, from the record of an evaluation, as columns name it; `strict` if there is none."""
        named = scorer_column(str(self._settings.get("primary_scorer", "strict")))
        return named if named in _SCORERS else "strict"

    def name_of(self, scorer: str) -> str:
        """Return a scorer's name: that of the function if it is the study's own."""
        return str(self._settings.get("primary_scorer", scorer)) if scorer == OWN_SCORER else scorer

    @cached_property
    def scorers(self) -> tuple[str, ...]:
        """The scorers whose answers and verdicts the evaluations have."""
        columns = _collect(pl.scan_parquet(self.checkpoints[0].path).head(0)).columns
        return tuple(scorer for scorer in _SCORERS if f"correct_{scorer}" in columns)

    def noise_names(self) -> dict[float, str]:
        """Return the names of the named noises by level, from the record of an evaluation."""
        names = self._settings.get("noises")
        return {level: name for name, level in numbered_levels(names).items()} if isinstance(names, dict) else {}

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        """The settings of the evaluations, from the record of one; empty without a record."""
        record = self.checkpoints[0].path.with_suffix(".run.json")
        settings = read_json(record, RunRecord).config.get("evaluation") if record.exists() else None
        return settings if isinstance(settings, dict) else {}

    @property
    def arms(self) -> list[str]:
        """The evaluated arms, the pretrained model first."""
        found = list(dict.fromkeys(checkpoint.arm for checkpoint in self.checkpoints))
        return sorted(found, key=lambda arm: arm != PRETRAINED)

    def levels(self) -> list[float]:
        """The noise levels of the evaluations."""
        return sorted(_collect(self._rows().select(pl.col("noise_level").unique()))["noise_level"].to_list())

    def of_question(self, question_id: str, arms: Sequence[str] = ()) -> pl.DataFrame:
        """Return every response to a question, by arm, seed, level, noise seed and sample; DataError if there is none.

        Columns: those of the evaluations, and model, arm, seed, step.
        """
        rows = self._rows(arms).filter(pl.col("question_id") == question_id)
        order = {arm: number for number, arm in enumerate(self.arms)}
        found = _collect(rows).sort(
            "model",
            pl.col("arm").replace_strict(order, default=len(order), return_dtype=pl.Int64),
            *("seed", "noise_level", "noise_seed", "sample"),
        )
        if found.is_empty():
            raise DataError(f"no response to a question {question_id!r} is in {self.results / 'eval'}")
        return found

    def changed_by(self, comparison_id: str, scorer: str) -> list[Changed]:
        """Return the questions on which a claim's quantity differs between its sides, most seeds first.

        As in the tables of the claim: over all noise seeds and samples, in a degradation less the same without noise.
        """
        row = self.comparisons.get(comparison_id)
        if row is None:
            raise DataError(f"found no comparison {comparison_id!r} in {self.results / 'comparisons.parquet'}")
        is_change = row["kind"] == "degradation"
        treatment = self._outcomes(row["model"], row["treatment"], row["treatment_level"], scorer, is_change=is_change)
        control = self._outcomes(row["model"], row["control"], row["control_level"], scorer, is_change=is_change)
        keys = ["question_id"] if PRETRAINED in (row["treatment"], row["control"]) else ["question_id", "seed"]
        difference = (pl.col("score") - pl.col("score_control")).round(_DIGITS)
        sides = (
            treatment.join(control, on=keys, suffix="_control")
            .group_by("question_id")
            .agg(
                (difference > 0).sum().cast(pl.Int64).alias("treatment"),
                (difference < 0).sum().cast(pl.Int64).alias("control"),
            )
        )
        named = sides.filter(pl.col("treatment") + pl.col("control") > 0).join(
            self.questions, on="question_id", how="left"
        )
        net = (pl.col("treatment") - pl.col("control")).abs()
        return [
            Changed(found["question_id"], found["question"] or "", found["treatment"], found["control"])
            for found in named.sort(net, "question_id", descending=[True, False]).iter_rows(named=True)
        ]

    def search(self, text: str) -> list[tuple[str, str, int]]:
        """Return questions that contain `text` in any case, in question or responses: (id, question, responses)."""
        wanted = text.lower()
        in_question = self.questions.filter(
            pl.col("question").str.to_lowercase().str.contains(wanted, literal=True)
            | (pl.col("question_id").str.to_lowercase() == wanted)
        )
        hits = _collect(
            self._rows()
            .filter(pl.col("response").str.to_lowercase().str.contains(wanted, literal=True))
            .group_by("question_id")
            .agg(pl.len().cast(pl.Int64).alias("responses"))
        )
        counts = dict(hits.iter_rows())
        texts = dict(self.questions.select("question_id", "question").iter_rows())
        both = sorted({*in_question["question_id"], *counts})
        return [(name, texts.get(name, ""), counts.get(name, 0)) for name in both]

    def _outcomes(self, model: str, arm: str, level: float, scorer: str, *, is_change: bool) -> pl.DataFrame:
        """Return the mean score of every seed and question at a level, less that without noise for a change."""
        rows = pl.concat(self._scans([arm])).filter(pl.col("model") == model)
        correct, at_level = pl.col(f"correct_{scorer}"), pl.col("noise_level") == level
        score = correct.filter(at_level).mean()
        if is_change:
            score -= correct.filter(pl.col("noise_level") == 0).mean()
        return _collect(rows.group_by("question_id", "seed").agg(score.alias("score")))

    def _rows(self, arms: Sequence[str] = ()) -> pl.LazyFrame:
        return pl.concat(self._scans(arms))

    def _scans(self, arms: Sequence[str] = ()) -> list[pl.LazyFrame]:
        chosen = [checkpoint for checkpoint in self.checkpoints if not arms or checkpoint.arm in arms]
        if not chosen:
            raise DataError(f"found no evaluation of {', '.join(arms)}, expected {', '.join(self.arms)}")
        return [
            pl.scan_parquet(one.path).with_columns(
                model=pl.lit(one.model), arm=pl.lit(one.arm), seed=pl.lit(one.seed), step=pl.lit(one.step)
            )
            for one in chosen
        ]


def first_pass(evaluation: Frame, noise_level: float) -> Frame:
    """Return the rows at a level of the first sample and the first noise seed."""
    rows = evaluation.filter(pl.col("noise_level") == noise_level)
    return rows.filter(pl.col("noise_seed") == pl.col("noise_seed").min(), pl.col("sample") == 0)


def differing(text: str, reference: str) -> Markup:
    """Return `text` as HTML, its words that `reference` does not have in the same place marked; all text escaped."""
    shown, other = _WORDS.findall(visible(text)), _WORDS.findall(visible(reference))
    parts = []
    for kind, start, end, _, _ in difflib.SequenceMatcher(None, shown, other, autojunk=False).get_opcodes():
        part = escape("".join(shown[start:end]))
        parts.append(part if kind == "equal" or not part.strip() else Markup("<mark>{}</mark>").format(part))
    return Markup("").join(parts)


def _last_checkpoints(results: Path) -> Iterator[Checkpoint]:
    latest: dict[tuple[str, str, int], Checkpoint] = {}
    for path in sorted((results / "eval").glob("*/*/seed*/step*.parquet")):
        place = _PLACE.search(path.as_posix())
        if place is None:
            continue
        found = Checkpoint(place[1], place[2], int(place[3]), int(place[4]), path)
        key = (found.model, found.arm, found.seed)
        if key not in latest or latest[key].step < found.step:
            latest[key] = found
    yield from latest.values()


def _collect(rows: pl.LazyFrame) -> pl.DataFrame:
    try:
        return rows.collect()
    except pl.exceptions.PolarsError as error:
        raise DataError(f"an evaluation cannot be read ({first_line(error)}); make it again") from error
