"""The claims of a study on one scale, each with its verdict, how sure the verdicts are, and the looks."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import polars as pl

from aqnpipe.artifacts.comparisons import Claim, ClaimsFile
from aqnpipe.config.study import Study
from aqnpipe.report import numbers
from aqnpipe.report.inputs import ReportData
from aqnpipe.report.tables import MAX_ROWS_ON_PAGE, Row, Table, analysis_text, table
from aqnpipe.report.words import Words

VERDICT_SYMBOLS = {"supported": "✓", "refuted": "✕", "equivalent": "≈", "not_shown": "?", "invalid": "!"}
"""In the order in which verdicts are counted."""


def counted_verdicts(verdicts: Iterable[str], words: Words) -> str:
    """Return how many claims have each verdict: `1 supported, 3 not shown`."""
    counts = Counter(verdicts)
    parts = [
        words("summary.part", count=counts[verdict], verdict=words(f"verdict.{verdict}"))
        for verdict in VERDICT_SYMBOLS
        if counts[verdict]
    ]
    return words("summary.separator").join(parts)


def summary_line(verdicts: Iterable[str], words: Words) -> str:
    """Return the number of claims and of each verdict in one sentence."""
    listed = list(verdicts)
    if not listed:
        return words("summary.none")
    return words("summary.line", count=len(listed), parts=counted_verdicts(listed, words))


_STRETCH = 2.5
"""Upper limit of the common scale in multiples of the largest difference; wider intervals are cut, with an arrow."""
_SMALLEST_REACH = 0.02
MAX_CLAIMS_ON_PAGE = 600
MAX_SEEDS_ON_PAGE = 3000
"""Rows of paired outcomes over all claims; with more, a claim shows its first seeds. claims.json has all."""
_NOT_IN_ANCHORS = re.compile(r"[^A-Za-z0-9_.]+")
_TICK_STEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class ClaimRow:
    """One claim with its verdict, in the language of the study."""

    comparison_id: str
    claim: str
    untranslated: bool
    verdict: str
    sentence: str
    difference: str
    interval: str
    strip: Mapping[str, Any] | None
    paired: Table | None
    family: str
    role: str
    anchor: str

    @property
    def is_open(self) -> bool:
        """Return whether the data do not decide the claim."""
        return self.verdict == "not_shown" and self.role != "primary"

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """Sort key: the primary claim, then those that the data decide, then the invalid ones, then the open ones."""
        return self.role != "primary", self.is_open, self.verdict == "invalid"


@dataclass(frozen=True)
class ClaimGroup:
    """Claims of one family, or the controls, in the order of the page, which folds the open ones.

    `left_out`: verdicts of claims that are not shown.
    """

    heading: str
    line: str
    rows: tuple[ClaimRow, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClaimsOverview:
    """The first screen of the page: the claims on one scale, and `limits`, what the study cannot show.

    `rows` are all claims in the study's order, `groups` the same claims by family, with the controls at the end.
    """

    rows: tuple[ClaimRow, ...]
    groups: tuple[ClaimGroup, ...]
    ticks: tuple[tuple[float, str], ...]
    limits: tuple[str, ...]

    @property
    def has_margins(self) -> bool:
        """Return whether any strip shows a margin."""
        return any(row.strip and row.strip["margins"] for row in self.rows)


def claims_overview(study: Study, data: ReportData, words: Words) -> ClaimsOverview:
    """Return the claims in the study's order, each with its interval on a common scale."""
    claims, comparisons = data.claims, data.comparisons
    by_id = {row["comparison_id"]: row for row in comparisons.iter_rows(named=True)}
    reach, anchors = _reach(comparisons), _anchors([claim.comparison_id for claim in claims.claims])
    rows = tuple(
        _claim_row(claim, by_id.get(claim.comparison_id, {}), reach, claims, words, anchors[claim.comparison_id])
        for claim in claims.claims
    )
    return ClaimsOverview(
        rows=rows,
        groups=shown_groups(tuple(_groups(rows, words))),
        ticks=_ticks(reach) if comparisons["difference"].count() else (),
        limits=tuple(limits(study, claims, comparisons, words)),
    )


def _groups(rows: Sequence[ClaimRow], words: Words) -> Iterator[ClaimGroup]:
    """Yield the primary claim, a group per family of secondary claims in the study's order, and the controls."""
    families = list(dict.fromkeys(row.family for row in rows if row.role == "secondary"))
    is_divided = len(families) > 1 or any(row.role != "secondary" for row in rows)
    headings: dict[tuple[str, str | None], str] = {("primary", None): words("claims.primary")}
    headings |= {("secondary", one): words("claims.family", family=one) if is_divided else "" for one in families}
    headings |= {("control", None): words("claims.controls")}
    for (role, family), heading in headings.items():
        own = [row for row in rows if row.role == role and family in (None, row.family)]
        if own:
            line = counted_verdicts((row.verdict for row in own), words)
            yield ClaimGroup(heading, line, tuple(sorted(own, key=lambda row: row.rank)))


def left_out_claims(verdicts: Sequence[str], words: Words) -> str:
    """Return the sentence on claims that are not shown, by verdict; empty if all are."""
    if not verdicts:
        return ""
    return words("claims.left_out", count=len(verdicts), parts=counted_verdicts(verdicts, words))


def shown_groups(groups: Sequence[ClaimGroup], most: int = MAX_CLAIMS_ON_PAGE) -> tuple[ClaimGroup, ...]:
    """Return the groups with at most `most` claims in all: the first by rank, of decided claims the refuted ones."""
    rows = sorted((row for group in groups for row in group.rows), key=lambda row: (row.rank, row.verdict != "refuted"))
    shown = {row.comparison_id for row in rows[:most]}
    return tuple(
        replace(
            group,
            rows=tuple(row for row in group.rows if row.comparison_id in shown),
            left_out=tuple(row.verdict for row in group.rows if row.comparison_id not in shown),
        )
        for group in groups
    )


def _anchors(identifiers: Sequence[str]) -> dict[str, str]:
    """Return the anchor of every comparison: its id with other characters than letters, digits, `_`, `.` as dashes."""
    anchors: dict[str, str] = {}
    taken: set[str] = set()
    for identifier in identifiers:
        name = f"claim-{_NOT_IN_ANCHORS.sub('-', identifier).strip('-')}"
        anchors[identifier] = f"{name}-{len(anchors)}" if name in taken else name
        taken.add(anchors[identifier])
    return anchors


def answer_text(claims: ClaimsFile, words: Words) -> str | None:
    """Return the sentence that answers the study's question; None if no claim does."""
    if claims.answer is None:
        return None
    # The statement holds the claim in English, as the study begins it.
    answering = next(claim for claim in claims.claims if claim.claim == claims.answer.values["claim"])
    text = words.own(answering.claim, answering.claim_zh)
    shown = f"{text.text} {words('untranslated')}" if text.untranslated else _within_a_sentence(text.text)
    return words.of(claims.answer.model_copy(update={"values": claims.answer.values | {"claim": shown}}))


def _within_a_sentence(claim: str) -> str:
    """Return a claim with a small first letter, unless its first word is a name such as E5, AQN or Qwen2.5."""
    rest_of_word = claim[1:].split(" ", 1)[0].replace("-", "")
    is_a_word = not rest_of_word or (rest_of_word.isalpha() and rest_of_word.islower())
    return claim[:1].lower() + claim[1:] if is_a_word else claim


def claim_text(claim: Claim, words: Words) -> str:
    """Return the claim in the language of the study if the study gives it in that language."""
    return words.own(claim.claim, claim.claim_zh).text


def sentence_text(claim: Claim, words: Words) -> str:
    """Return what the comparison found, or why there was none."""
    if claim.invalid_kind is not None:
        return words(f"refused.{claim.invalid_kind}", reason=claim.invalid_reason)
    return words.all_of(claim.statements)


def seeds_per_arm(study: Study, words: Words) -> str:
    """Return how many seeds an arm has, as a range where a study added seeds to some arms only."""
    return _seeds_range([len(study.seeds_of(arm)) for arm in study.arms], words)


def _seeds_range(numbers: Sequence[int], words: Words) -> str:
    fewest, most = min(numbers), max(numbers)
    return words("span", low=str(fewest), high=str(most)) if fewest < most else str(most)


def limits(study: Study, claims: ClaimsFile, comparisons: pl.DataFrame, words: Words) -> Iterator[str]:
    """Yield what the study cannot show, from its sizes and verdicts."""
    verdicts, num_seeds = {claim.verdict for claim in claims.claims}, len(study.seeds)
    if num_seeds == 1:
        yield words("sure.one_seed" if study.has_training else "sure.given_weights")
    between = comparisons.filter((pl.col("kind") == "arms") & pl.col("minimum_detectable_difference").is_not_null())
    if num_seeds > 1 and not between.is_empty():
        found = between["minimum_detectable_difference"]
        detectable = _range(float(found.min()), float(found.max()), words)  # type: ignore[arg-type]
        seeds = _seeds_range(between["num_seeds"].to_list(), words)
        yield words("sure.detectable", seeds=seeds, range=detectable, power=study.config.statistics.power)
    if "not_shown" in verdicts:
        yield words("sure.not_shown")
    if "invalid" in verdicts:
        yield words("sure.invalid")
    yield from _error_rates(claims, comparisons, words)
    for rate in claims.aa_control_rates:
        low, high, kind = rate.ci_low, rate.ci_high, rate.kind
        yield words(f"sure.aa_control.{kind}", rejected=rate.rejected, tests=rate.tests, low=low, high=high)


def _error_rates(claims: ClaimsFile, comparisons: pl.DataFrame, words: Words) -> Iterator[str]:
    """Yield which claims share an error rate, and how the claims were tested; nothing if none was."""
    tested = comparisons.filter(pl.col("method") != "not_compared")
    if tested.is_empty():
        return
    roles = {claim.role for claim in claims.claims}
    yield words("sure.primary", alpha=claims.alpha) if "primary" in roles else words("sure.no_primary")
    if claims.family_size:
        families = ", ".join(f"{family.name} {family.size}" for family in claims.families)
        yield words("sure.family", alpha=claims.alpha, families=families)
    if "control" in roles:
        yield words("sure.controls", alpha=claims.alpha)
    primary = tested.filter(pl.col("role") == "primary")
    method = (tested if primary.is_empty() else primary)["method"][0]
    yield words("sure.method", method=analysis_text(method, words))
    yield words("sure.scope")


def paired_table(claim: Claim, level: float, words: Words, max_rows: int) -> Table:
    """Return what each seed shows of a claim, a row per seed; intervals have confidence `level`.

    Below several seeds are their means. Every seed answers the same questions: that of the differences is the claim's.
    """
    name = claim.comparison_id
    found = table("paired", claim.seeds, words, of=name, max_rows=max_rows, comparison=name, level=level)
    if len(claim.seeds) < 2:
        return found
    fields = ("treatment_better", "control_better", "equal", "difference")
    better, worse, equal, difference = (fmean(getattr(seed, field) for seed in claim.seeds) for field in fields)
    counts = (f"{mean:.1f}" for mean in (better, worse, equal))
    foot = Row((words("paired.mean"), *counts, numbers.points(difference), "", ""))
    is_counted = math.isclose((better - worse) / (better + worse + equal), difference, abs_tol=1e-9)
    notes = [words("paired.note", seeds=len(claim.seeds)), *([] if is_counted else [words("paired.averaged")])]
    return replace(found, foot=(foot,), note=words.paragraph(notes))


def _claim_row(
    claim: Claim, row: Mapping[str, Any], reach: float, claims: ClaimsFile, words: Words, anchor: str
) -> ClaimRow:
    compared = row.get("difference") is not None
    text, level = words.own(claim.claim, claim.claim_zh), 1 - claims.alpha
    return ClaimRow(
        comparison_id=claim.comparison_id,
        claim=text.text,
        untranslated=text.untranslated,
        verdict=claim.verdict,
        sentence=sentence_text(claim, words),
        difference=numbers.points(row["difference"]) if compared else numbers.MISSING,
        interval=words.span(row["ci_low"], row["ci_high"], numbers.points) if compared else "",
        strip=_strip(row, reach, words) if compared and row["ci_low"] is not None else None,
        paired=paired_table(claim, level, words, _seeds_per_claim(claims)) if claim.seeds else None,
        family=row.get("family") or "",
        role=claim.role,
        anchor=anchor,
    )


def _seeds_per_claim(claims: ClaimsFile) -> int:
    if sum(len(claim.seeds) for claim in claims.claims) <= MAX_SEEDS_ON_PAGE:
        return MAX_ROWS_ON_PAGE
    return min(max(MAX_SEEDS_ON_PAGE // min(len(claims.claims), MAX_CLAIMS_ON_PAGE), 5), MAX_ROWS_ON_PAGE)


def _strip(row: Mapping[str, Any], reach: float, words: Words) -> dict[str, Any]:
    """Return an interval as a line: positions in percent of the width that all strips share, and which end is cut."""

    def position(value: float) -> float:
        return round(50 + 50 * min(max(value / reach, -1.0), 1.0), 1)

    margin = row["margin"]
    interval = words.span(row["ci_low"], row["ci_high"], numbers.points)
    return {
        "low": position(row["ci_low"]),
        "middle": position(row["difference"]),
        "high": position(row["ci_high"]),
        "cut_low": row["ci_low"] < -reach,
        "cut_high": row["ci_high"] > reach,
        "margins": () if margin is None else tuple(position(edge) for edge in (-margin, margin)),
        "text": words("strip", difference=row["difference"], level=row["interval_level"], interval=interval),
    }


def _reach(comparisons: pl.DataFrame) -> float:
    """Return half the width of the common scale: it covers all differences, and all intervals that are not too wide."""
    farthest = comparisons.select(pl.col("difference", "ci_low", "ci_high").abs().max().fill_null(0.0)).row(0)
    largest, end = farthest[0], max(farthest[1:])
    return 1.05 * max(min(end, _STRETCH * largest), largest, _SMALLEST_REACH)


def _ticks(reach: float) -> tuple[tuple[float, str], ...]:
    """Return the marks of the common scale: positions in percent of the width, and labels."""
    step = next((step for step in _TICK_STEPS if reach / step <= 3), _TICK_STEPS[-1])
    last = math.floor(reach / step)
    digits = 1 if step < 0.01 else 0
    return tuple(
        (round(50 + 50 * number * step / reach, 1), numbers.points(number * step, digits) if number else "0")
        for number in range(-last, last + 1)
    )


def _range(low: float, high: float, words: Words) -> str:
    first, second = (numbers.percent(value) if value < 1 else words("sure.over_100") for value in (low, high))
    return first if first == second else words("span", low=first, high=second)


MAX_CLAIMS_PER_LOOK = 20
"""Claims that are named where they ended; claims.json has all of them."""


def look_table(claims: ClaimsFile, words: Words) -> Table | None:
    """Return a row per look: its seeds, the claims that ended there, and how many stay open; None without looks."""
    texts = {claim.comparison_id: claim_text(claim, words) for claim in claims.claims}
    rows: list[dict[str, object]] = []
    states: dict[str, str] = {}
    for look in claims.looks:
        ended = [claim for claim in look.claims if claim.state not in ("open", states.get(claim.comparison_id))]
        states = {claim.comparison_id: claim.state for claim in look.claims}
        shown = [
            words(
                "looks.ended",
                claim=texts.get(claim.comparison_id, claim.comparison_id),
                state=words(f"looks.state.{claim.state}"),
            )
            for claim in ended[:MAX_CLAIMS_PER_LOOK]
        ]
        if others := ended[MAX_CLAIMS_PER_LOOK:]:
            counts = Counter(claim.state for claim in others)
            parts = [
                words("summary.part", count=count, verdict=words(f"looks.state.{state}"))
                for state, count in counts.items()
            ]
            shown.append(words("looks.more", count=len(others), parts=words("summary.separator").join(parts)))
        num_open = sum(state == "open" for state in states.values())
        ended_here = words("list.separator").join(shown) or words("looks.nothing")
        rows.append({"look": look.look, "seeds": look.seeds, "ended": ended_here, "num_open": num_open})
    return table("looks", rows, words) if rows else None
