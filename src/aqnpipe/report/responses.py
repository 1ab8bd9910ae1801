"""Every response of a study, read from its evaluations on demand: by question, by claim, and by a search.

The files are read as they lie; the stages have verified them. Only the rows of one question or claim are in memory.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote, urlencode

import polars as pl
from markupsafe import Markup, escape

from aqnpipe.artifacts.comparisons import Claim, ClaimsFile, ComparisonTable
from aqnpipe.artifacts.evaluations import last_evaluations
from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.base import refuse_pipe_or_device
from aqnpipe.config.evaluation import CUSTOM_SCORER, Scorer, numbered_levels, scorer_column
from aqnpipe.errors import DataError, first_line
from aqnpipe.report import numbers
from aqnpipe.report.claims import VERDICT_SYMBOLS, claim_text
from aqnpipe.report.markup import inline, page_template
from aqnpipe.report.words import Words, at_noise, visible

_DIGITS = 9
_WORDS = re.compile(r"\s+|[^\s]+")

_SCORERS = (*get_args(Scorer), CUSTOM_SCORER, "task")
"""All names of scorers in columns; `task` is a task of lm-evaluation-harness."""


class Responses:
    """The responses below the results folder of a study. Raises DataError if there are none."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.checkpoints = last_evaluations(results)
        for checkpoint in self.checkpoints:
            refuse_pipe_or_device(checkpoint.table, DataError)
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

    def comparison(self, comparison_id: str) -> dict[str, Any]:
        """Return a comparison; DataError if there is none of this id."""
        if comparison_id not in self.comparisons:
            raise DataError(f"found no comparison {comparison_id!r} in {self.results / 'comparisons.parquet'}")
        return self.comparisons[comparison_id]

    def pair(self, treatment: str, control: str, level: str) -> dict[str, Any]:
        """Return two arms at a level as a comparison; DataError unless both were evaluated, of one model and seed."""
        is_single, levels = PRETRAINED in (treatment, control), {str(each): each for each in self.levels}
        first, second = (
            {(one.model, is_single or one.seed) for one in self.checkpoints if one.arm == arm}
            for arm in (treatment, control)
        )
        if treatment == control or level not in levels or not first & second:
            raise DataError(
                f"treatment={treatment} control={control} level={level}: expected two of {', '.join(self.arms)}, with "
                f"runs of one model and seed, and a level of {', '.join(levels)}"
            )
        sides = {"treatment": treatment, "control": control}
        at_level = {f"{side}_level": levels[level] for side in sides}
        return {"kind": "arms", "model": min(first & second)[0], **sides, **at_level}

    @property
    def primary_scorer(self) -> str:
        """The scorer of the study, from the record of an evaluation, as columns name it; `strict` if there is none."""
        named = scorer_column(str(self._settings.get("primary_scorer", "strict")))
        return named if named in _SCORERS else "strict"

    def name_of(self, scorer: str) -> str:
        """Return a scorer's name: that of the function if it is the study's own."""
        return str(self._settings.get("primary_scorer", scorer)) if scorer == CUSTOM_SCORER else scorer

    @cached_property
    def scorers(self) -> tuple[str, ...]:
        """The scorers whose answers and verdicts the evaluations have."""
        columns = _collect(pl.scan_parquet(self.checkpoints[0].table).head(0)).columns
        return tuple(scorer for scorer in _SCORERS if f"correct_{scorer}" in columns)

    def noise_names(self) -> dict[float, str]:
        """Return the names of the named noises by level, from the record of an evaluation."""
        names = self._settings.get("noises")
        return {level: name for name, level in numbered_levels(names).items()} if isinstance(names, dict) else {}

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        """The settings of the evaluations, from the record of one; empty without a record."""
        record = self.checkpoints[0].record
        settings = read_json(record, RunRecord).config.get("evaluation") if record.exists() else None
        return settings if isinstance(settings, dict) else {}

    @property
    def arms(self) -> list[str]:
        """The evaluated arms, the pretrained model first."""
        found = list(dict.fromkeys(checkpoint.arm for checkpoint in self.checkpoints))
        return sorted(found, key=lambda arm: arm != PRETRAINED)

    @cached_property
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

    def changed_by(self, row: Mapping[str, Any], scorer: str) -> pl.DataFrame:
        """Return the questions on which the quantity of a comparison differs between its sides, most seeds first.

        Columns: question_id, question, gold_answer; treatment and control: in how many seeds each side is better.

        As in the tables of the claim: over all noise seeds and samples, in a degradation less the same without noise.
        """
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
        named = sides.filter(pl.col("treatment") + pl.col("control") > 0)
        net = (pl.col("treatment") - pl.col("control")).abs()
        return named.join(self.questions, on="question_id", how="left").sort(
            net, "question_id", descending=[True, False]
        )

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
        rows = self._rows([arm]).filter(pl.col("model") == model)
        correct, at_level = pl.col(f"correct_{scorer}"), pl.col("noise_level") == level
        score = correct.filter(at_level).mean()
        if is_change:
            score -= correct.filter(pl.col("noise_level") == 0).mean()
        return _collect(rows.group_by("question_id", "seed").agg(score.alias("score")))

    def _rows(self, arms: Sequence[str] = ()) -> pl.LazyFrame:
        chosen = [checkpoint for checkpoint in self.checkpoints if not arms or checkpoint.arm in arms]
        if not chosen:
            raise DataError(f"found no evaluation of {', '.join(arms)}, expected {', '.join(self.arms)}")
        return pl.concat(
            pl.scan_parquet(one.table).with_columns(
                model=pl.lit(one.model), arm=pl.lit(one.arm), seed=pl.lit(one.seed), step=pl.lit(one.step)
            )
            for one in chosen
        )


def first_pass(evaluation: pl.DataFrame, noise_level: float) -> pl.DataFrame:
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


def _collect(rows: pl.LazyFrame) -> pl.DataFrame:
    try:
        return rows.collect()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"an evaluation cannot be read ({first_line(error)}); make it again") from error


QUESTIONS_PER_PAGE = 200
ARMS_AT_FIRST = 12
"""Arms whose responses a question shows until others are chosen."""

Query = Mapping[str, Sequence[str]]


class ResponsePages:
    """Renders the pages for the results of one study; `scorer` decides what is right."""

    def __init__(self, responses: Responses, words: Words, scorer: str) -> None:
        self._responses, self._words, self._scorer = responses, words, scorer
        self._template = page_template("responses.html.jinja")
        self._css = inline("report.css")

    @property
    def style_hash(self) -> str:
        """The hash by which a policy allows the style sheet of these pages."""
        return self._css.sha256

    def page(self, path: str, query: Query) -> str:
        """Return the page at an address, which is decoded and begins with `/`; DataError if there is none."""
        head, _, rest = path.lstrip("/").partition("/")
        if head == "" and not rest:
            return self._start(query)
        if head == "search" and not rest:
            return self._found(_first(query, "q"), _number(_first(query, "from")))
        if head == "claim" and rest:
            titles = {claim.comparison_id: claim_text(claim, self._words) for claim in self._responses.claims}
            return self._changed(self._responses.comparison(rest), titles.get(rest, rest))
        if head == "pair" and not rest:
            return self._pair(query)
        if head == "question" and rest:
            return self._question(rest, query)
        raise DataError(f"there is no page {path}")

    def message(self, text: str) -> str:
        """Return a page that shows one line, for an error."""
        return self._render(self._words("view.title"), message=text)

    def _start(self, query: Query) -> str:
        words, start = self._words, _number(_first(query, "from"))
        table = self._responses.questions
        part = table.slice(start, QUESTIONS_PER_PAGE)
        rows = [self._row(name, text, []) for name, text in part.select("question_id", "question").iter_rows()]
        more = _more("/", start, len(table))
        heading = words("view.questions", count=len(table))
        listed = _listed(heading, (words("column.id"), words("column.question")), rows, more)
        levels = {str(level): words.level(level) for level in self._responses.levels}
        claims = self._responses.claims if start == 0 else ()
        return self._render(words("view.title"), listed=listed, claims=claims, arms=self._responses.arms, levels=levels)

    def _found(self, text: str, start: int) -> str:
        words = self._words
        found = self._responses.search(text) if text.strip() else []
        part = found[start : start + QUESTIONS_PER_PAGE]
        headers = (words("column.id"), words("column.question"), words("column.responses"))
        rows = [self._row(name, question, [numbers.count(count)]) for name, question, count in part]
        heading = words("view.found", count=len(found), text=text)
        more = _more("/search", start, len(found), q=text)
        return self._render(heading, query=text, listed=_listed(heading, headers, rows, more))

    def _pair(self, query: Query) -> str:
        row = self._responses.pair(*(_first(query, name) for name in ("treatment", "control", "level")))
        words, where = self._words, at_noise(row["treatment_level"], self._words)
        return self._changed(row, words("view.pair", treatment=row["treatment"], control=row["control"], where=where))

    def _changed(self, row: Mapping[str, Any], title: str) -> str:
        words, sides = self._words, ("treatment", "control")
        names = (f"{row[side]} {words.level(row[f'{side}_level'])}" for side in sides)
        headers = (words("column.id"), words("column.question"), *(words("view.better", side=name) for name in names))
        changed = self._responses.changed_by(row, self._scorer)
        rows = [
            self._row(name, question or "", [str(treatment), str(control)], [row[side] for side in sides])
            for name, question, treatment, control in changed.select("question_id", "question", *sides).iter_rows()
        ]
        return self._render(title, listed=_listed(words("view.changed", count=len(changed)), headers, rows))

    def _question(self, question_id: str, query: Query) -> str:
        words, arms = self._words, self._responses.arms
        chosen = [arm for arm in query.get("arm", ()) if arm]
        # Hundreds of arms are not read side by side, and their page would take long.
        left_out = 0 if chosen else max(len(arms) - ARMS_AT_FIRST, 0)
        chosen = arms[:ARMS_AT_FIRST] if left_out else chosen
        table = self._responses.of_question(question_id, chosen)
        by_level = table.sort("noise_level", maintain_order=True).partition_by("noise_level", maintain_order=True)
        text = self._responses.questions.filter(pl.col("question_id") == question_id).to_dicts()
        asked = {
            "id": question_id,
            "question": text[0]["question"] if text else "",
            "gold": text[0]["gold_answer"] if text else numbers.MISSING,
            "arms": [{"name": arm, "shown": not chosen or arm in chosen} for arm in arms],
            "limited": words("view.first_arms", shown=ARMS_AT_FIRST, all=len(arms)) if left_out else "",
            "first": table.row(0, named=True),
            "levels": [_level(rows, words) for rows in by_level],
        }
        return self._render(words("view.question", question=question_id), asked=asked)

    def _row(self, name: str, question: str, cells: list[str], arms: Sequence[str] = ()) -> dict[str, Any]:
        query = f"?{urlencode([('arm', arm) for arm in dict.fromkeys(arms)])}" if arms else ""
        return {"link": _address("question", name) + query, "name": name, "question": question, "cells": cells}

    def _render(self, title: str, **content: Any) -> str:
        empty: dict[str, Any] = {"message": "", "query": "", "claims": [], "arms": [], "listed": None, "asked": None}
        return self._template.render(
            **empty | content,
            w=self._words,
            css=self._css.code,
            title=title,
            folder=str(self._responses.results),
            symbols=VERDICT_SYMBOLS,
            text_of=lambda claim: claim_text(claim, self._words),
            address=_address,
            differing=differing,
            scorer=self._scorer,
            scorers={scorer: self._responses.name_of(scorer) for scorer in self._responses.scorers},
            has_report=(self._responses.results / "report.html").is_file(),
        )


def _level(rows: pl.DataFrame, words: Words) -> dict[str, Any]:
    """Return the responses at one noise level, and whether an arm and seed has several."""
    several = rows["noise_seed"].n_unique() > 1 or rows["sample"].n_unique() > 1
    return {"heading": at_noise(rows["noise_level"][0], words), "responses": rows.to_dicts(), "several": several}


def _address(page: str, name: str) -> str:
    return f"/{page}/{quote(name, safe='')}"


def _listed(heading: str, headers: Sequence[str], rows: list[dict[str, Any]], more: str = "") -> dict[str, Any]:
    """Return a list of questions for the template; `more` is the address of the next part."""
    return {"heading": heading, "headers": headers, "rows": rows, "more": more}


def _more(address: str, start: int, total: int, **query: str) -> str:
    """Return the address of the part of a list behind the one that begins at `start`; empty if there is none."""
    following = start + QUESTIONS_PER_PAGE
    return f"{address}?{urlencode({**query, 'from': following})}" if following < total else ""


def _first(query: Query, name: str) -> str:
    return next(iter(query.get(name, ())), "")


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
