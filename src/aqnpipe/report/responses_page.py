"""Pages of `aqnpipe view`: claims with the questions that differ, and all responses to one question side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import polars as pl

from aqnpipe.errors import DataError
from aqnpipe.report import numbers
from aqnpipe.report.claims_view import claim_text
from aqnpipe.report.html import inline, page_template
from aqnpipe.report.responses import Responses, differing
from aqnpipe.report.verdicts import VERDICT_SYMBOLS
from aqnpipe.report.words import Words

QUESTIONS_PER_PAGE = 200
ARMS_AT_FIRST = 12
"""Arms whose responses a question shows until others are chosen."""

Query = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Listed:
    """A list of questions; `more` is the address of the next part, empty if there is none."""

    heading: str
    headers: tuple[str, ...]
    rows: list[dict[str, Any]]
    more: str = ""


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
            return self._claim(rest)
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
        listed = Listed(heading, (words("column.id"), words("column.question")), rows, more)
        return self._render(words("view.title"), listed=listed, claims=self._claims() if start == 0 else [])

    def _claims(self) -> list[dict[str, str]]:
        return [
            {
                "verdict": claim.verdict,
                "text": claim_text(claim, self._words),
                "link": f"/claim/{quote(claim.comparison_id, safe='')}" if claim.seeds else "",
            }
            for claim in self._responses.claims
        ]

    def _found(self, text: str, start: int) -> str:
        words = self._words
        found = self._responses.search(text) if text.strip() else []
        part = found[start : start + QUESTIONS_PER_PAGE]
        headers = (words("column.id"), words("column.question"), words("column.responses"))
        rows = [self._row(name, question, [numbers.count(count)]) for name, question, count in part]
        heading = words("view.found", count=len(found), text=text)
        more = _more("/search", start, len(found), q=text)
        return self._render(heading, query=text, listed=Listed(heading, headers, rows, more))

    def _claim(self, comparison_id: str) -> str:
        words, row = self._words, self._responses.comparisons.get(comparison_id)
        changed = self._responses.changed_by(comparison_id, self._scorer)
        claims = {claim.comparison_id: claim for claim in self._responses.claims}
        claim = claims.get(comparison_id)
        title = claim_text(claim, words) if claim else comparison_id
        sides = [row["treatment"], row["control"]] if row else []
        headers = (
            words("column.id"),
            words("column.question"),
            words("view.better", side=self._side(row, "treatment")),
            words("view.better", side=self._side(row, "control")),
        )
        rows = [
            self._row(one.question_id, one.question, [str(one.treatment_better), str(one.control_better)], sides)
            for one in changed
        ]
        return self._render(title, listed=Listed(words("view.changed", count=len(changed)), headers, rows))

    def _question(self, question_id: str, query: Query) -> str:
        words, arms = self._words, self._responses.arms
        chosen = [arm for arm in query.get("arm", ()) if arm]
        # Hundreds of arms are not read side by side, and their page would take long.
        left_out = 0 if chosen else max(len(arms) - ARMS_AT_FIRST, 0)
        chosen = arms[:ARMS_AT_FIRST] if left_out else chosen
        table = self._responses.of_question(question_id, chosen)
        text = self._responses.questions.filter(pl.col("question_id") == question_id).to_dicts()
        first = table.row(0, named=True)
        asked = {
            "id": question_id,
            "question": text[0]["question"] if text else "",
            "gold": text[0]["gold_answer"] if text else numbers.MISSING,
            "arms": [{"name": arm, "shown": not chosen or arm in chosen} for arm in arms],
            "limited": words("view.first_arms", shown=ARMS_AT_FIRST, all=len(arms)) if left_out else "",
            "reference": words("run.name", arm=first["arm"], seed=first["seed"]),
            "levels": [
                self._level(level, table.filter(pl.col("noise_level") == level))
                for level in sorted(table["noise_level"].unique().to_list())
            ],
        }
        return self._render(words("view.question", question=question_id), asked=asked)

    def _level(self, level: float, rows: pl.DataFrame) -> dict[str, Any]:
        words, found = self._words, rows.to_dicts()
        several = rows["noise_seed"].n_unique() > 1 or rows["sample"].n_unique() > 1
        return {
            "heading": words("noise.at", level=level) if level else words("noise.without"),
            "responses": [self._response(row, found[0]["response"], several) for row in found],
        }

    def _response(self, row: dict[str, Any], reference: str, several: bool) -> dict[str, Any]:
        words = self._words
        name = words("run.name", arm=row["arm"], seed=row["seed"])
        return {
            "name": name
            if not several
            else words("view.pass", run=name, noise_seed=row["noise_seed"], sample=row["sample"]),
            "correct": row[f"correct_{self._scorer}"],
            "cut": row["finish_reason"] == "length",
            "text": differing(row["response"], reference),
            "answers": [
                {
                    "scorer": self._responses.name_of(scorer),
                    "text": row[f"answer_{scorer}"] or numbers.MISSING,
                    "correct": row[f"correct_{scorer}"],
                }
                for scorer in self._responses.scorers
            ],
        }

    def _row(self, name: str, question: str, cells: list[str], arms: Sequence[str] = ()) -> dict[str, Any]:
        query = f"?{urlencode([('arm', arm) for arm in dict.fromkeys(arms)])}" if arms else ""
        return {"link": f"/question/{quote(name, safe='')}{query}", "name": name, "question": question, "cells": cells}

    def _side(self, row: Mapping[str, Any] | None, side: str) -> str:
        return f"{row[side]} {self._words.level(row[f'{side}_level'])}" if row else side

    def _render(self, title: str, **content: Any) -> str:
        empty: dict[str, Any] = {"message": "", "query": "", "claims": [], "listed": None, "asked": None}
        return self._template.render(
            **empty | content,
            w=self._words,
            css=self._css.code,
            title=title,
            folder=str(self._responses.results),
            symbols=VERDICT_SYMBOLS,
            has_report=(self._responses.results / "report.html").is_file(),
        )


def _more(address: str, start: int, total: int, **query: str) -> str:
    """Return the address of the part of a list behind the one that begins at `start`; empty if there is none."""
    following = start + QUESTIONS_PER_PAGE
    return f"{address}?{urlencode({**query, 'from': following})}" if following < total else ""


def _first(query: Query, name: str) -> str:
    return next(iter(query.get(name, ())), "")


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
