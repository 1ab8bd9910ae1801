"""What others published, beside what this study measured: the check's figures and claims as tables and a picture."""

from collections.abc import Mapping

import polars as pl

from aqnpipe.artifacts.published import CheckedAccuracy, CheckedClaim, PublishedCheck
from aqnpipe.report import numbers
from aqnpipe.report.tables import Row, Table
from aqnpipe.report.words import Words

Means = Mapping[tuple[str, float], float]
"""(arm, noise level) -> mean accuracy over the seeds after the last step."""


def means_of(last: pl.DataFrame) -> Means:
    """Mean accuracy over the seeds by arm and noise level."""
    means = last.group_by("arm", "noise_level").agg(pl.col("accuracy").mean())
    return {(row["arm"], row["noise_level"]): row["accuracy"] for row in means.iter_rows(named=True)}


def published_accuracies(check: PublishedCheck, means: Means, words: Words) -> Table:
    """Every published accuracy, whether it is possible at all, and what this study measured for the same arm."""
    rows = tuple(
        Row(
            (
                one.label,
                one.printed,
                numbers.count(one.num_questions),
                numbers.span(one.ci_low, one.ci_high, words, numbers.percent),
                numbers.percent(_measured(one, means)),
                words("published.possible") if one.possible else _why_impossible(one, words),
            ),
            alert=not one.possible,
        )
        for one in check.accuracies
    )
    names = ("figure", "published", "questions", "interval", "measured_here", "possible")
    headers = tuple(words(f"column.{name}") for name in names)
    return Table("published-accuracies", words("published.accuracies"), headers, rows)


def published_claims(check: PublishedCheck, words: Words) -> Table:
    """Every published claim, re-tested from the printed figures alone."""
    rows = tuple(
        Row(
            (
                _claim(one, words),
                words(f"verdict.{one.verdict}"),
                _amount(one, one.difference),
                numbers.MISSING
                if one.ci_low is None or one.ci_high is None
                else words("span", low=_amount(one, one.ci_low), high=_amount(one, one.ci_high)),
                numbers.p_value(one.p_value),
                numbers.p_value(one.p_holm),
                numbers.p_value(one.p_run_to_run),
            ),
            alert=one.verdict == "invalid",
        )
        for one in check.claims
    )
    names = ("claim", "verdict", "difference_in_unit", "interval", "p", "p_holm", "p_run_to_run")
    headers = tuple(words(f"column.{name}") for name in names)
    return Table("published-claims", words("published.claims"), headers, rows, 2)


def published_sentences(check: PublishedCheck, words: Words) -> Table:
    """What the printed figures say about every published claim, in words."""
    rows = tuple(
        Row((_claim(one, words), one.sentence_zh if words.language == "zh" else one.sentence)) for one in check.claims
    )
    headers = (words("column.claim"), words("column.in_words"))
    return Table("published-sentences", words("published.sentences"), headers, rows, 2)


def published_series(check: PublishedCheck, words: Words) -> Table:
    """Published accuracies of one checkpoint over noise levels; equal ones at every level are a red flag."""
    rows = tuple(
        Row(
            (
                one.label,
                " / ".join(one.printed),
                words("published.identical" if one.identical else "published.not_identical"),
                numbers.p_value(one.p_value),
            ),
            alert=one.identical,
        )
        for one in check.series
    )
    headers = tuple(words(f"column.{name}") for name in ("figure", "published", "identical", "same_p"))
    return Table("published-series", words("published.series"), headers, rows)


def published_losses(check: PublishedCheck, words: Words) -> Table:
    """Published losses against uniform guessing."""
    rows = tuple(
        Row(
            (
                one.label,
                f"{one.mean:.4f}",
                f"{one.std:.4f}",
                str(one.num_runs),
                numbers.MISSING if one.uniform is None else f"{one.uniform:.2f}",
                words("published.worse" if one.above_uniform else "published.better"),
            ),
            alert=one.above_uniform,
        )
        for one in check.losses
    )
    names = ("figure", "loss", "loss_std", "runs", "uniform", "against_uniform")
    headers = tuple(words(f"column.{name}") for name in names)
    return Table("published-losses", words("published.losses"), headers, rows)


def side_by_side(check: PublishedCheck, last: pl.DataFrame) -> pl.DataFrame:
    """Accuracies of arms that have both a published figure without noise and a measured one, in percent.

    Columns: arm, kind (published or measured), seed (-1: published), accuracy, ci_low, ci_high.
    """
    measured = last.filter(pl.col("noise_level") == 0).select(
        "arm", pl.lit("measured").alias("kind"), "seed", *(pl.col(c) * 100 for c in ("accuracy", "ci_low", "ci_high"))
    )
    published = pl.DataFrame(
        [
            {
                "arm": arm,
                "kind": "published",
                "seed": -1,
                "accuracy": float(one.printed),
                "ci_low": 100 * one.ci_low,
                "ci_high": 100 * one.ci_high,
            }
            for arm, one in _final(check).items()
        ],
        schema=measured.schema,
    )
    both = set(measured["arm"]) & set(published["arm"])
    return pl.concat([published, measured]).filter(pl.col("arm").is_in(sorted(both)))


def _final(check: PublishedCheck) -> dict[str, CheckedAccuracy]:
    """The published accuracy of every arm after its last step; a robustness table counts where there is no other."""
    final: dict[str, CheckedAccuracy] = {}
    for one in check.accuracies:
        if one.arm is None or one.noise_level:
            continue
        rank = (one.step or 0, one.noise_level is None)
        known = final.get(one.arm)
        if known is None or rank > (known.step or 0, known.noise_level is None):
            final[one.arm] = one
    return final


def _measured(one: CheckedAccuracy, means: Means) -> float | None:
    return None if one.arm is None else means.get((one.arm, one.noise_level or 0.0))


def _why_impossible(one: CheckedAccuracy, words: Words) -> str:
    nearest = ", ".join(f"{value:g}" for value in one.nearest)
    sizes = ", ".join(numbers.count(size) for size in one.possible_sizes)
    return words("published.impossible", questions=numbers.count(one.num_questions), nearest=nearest, sizes=sizes)


def _claim(one: CheckedClaim, words: Words) -> str:
    return (words.language == "zh" and one.claim_zh) or one.claim


def _amount(one: CheckedClaim, value: float) -> str:
    digits = 2 if one.unit == "points" else 4
    text = f"{value:.{digits}f}" if one.unit == "ratio" else f"{value:+.{digits}f}"
    return text.replace("-", "−")
