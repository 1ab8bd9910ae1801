"""Published figures and claims, checked again, as tables; and published beside measured accuracies for a picture."""

from collections.abc import Mapping

import polars as pl

from aqnpipe.artifacts.published import CheckedAccuracy, CheckedClaim, PublishedCheck
from aqnpipe.report import numbers
from aqnpipe.report.tables import Table, table
from aqnpipe.report.words import Words

Means = Mapping[tuple[str, float], float]
"""(arm, noise level) -> mean accuracy over the seeds after the last step."""


def means_of(last: pl.DataFrame) -> Means:
    """Return the mean accuracy over the seeds by arm and noise level."""
    means = last.group_by("arm", "noise_level").agg(pl.col("accuracy").mean())
    return {(row["arm"], row["noise_level"]): row["accuracy"] for row in means.iter_rows(named=True)}


def published_tables(check: PublishedCheck, words: Words, means: Means) -> tuple[Table, ...]:
    """Return the published claims tested again, with sentences, then accuracies, series and losses.

    means: what a study measured for the same arms; none: the table of accuracies has no column for it.
    """
    claims = [
        vars(claim)
        | {
            "claim": words.own(claim.claim, claim.claim_zh).text,
            "difference": _amount(claim, claim.difference),
            "interval": _interval(claim, words),
            "in_words": words.paragraph(
                [words.all_of(claim.statements), words("published.method", method=claim.method)]
            ),
        }
        for claim in check.claims
    ]
    accuracies = (
        vars(one)
        | {
            "measured_here": _measured(check, one, means),
            "possible": possibility(one, words),
            "alert": not one.possible,
        }
        for one in check.accuracies
    )
    without = () if means else ("measured_here",)
    return (
        table("published-claims", (row | {"alert": row["verdict"] == "invalid"} for row in claims), words),
        table("published-sentences", claims, words),
        table("published-accuracies", accuracies, words, without=without),
        table("published-series", (vars(one) | {"alert": one.identical} for one in check.series), words),
        table("published-losses", (vars(one) | {"alert": one.above_uniform} for one in check.losses), words),
    )


def possibility(accuracy: CheckedAccuracy, words: Words) -> str:
    """Return whether an accuracy is possible; if not, the possible ones next to it and numbers of questions."""
    if accuracy.possible:
        return words("yes")
    below, above = accuracy.nearest
    sizes = ", ".join(numbers.count(size) for size in accuracy.possible_sizes)
    return words("published.impossible", below=below, above=above, sizes=sizes)


def published_detectable(check: PublishedCheck, words: Words) -> Table:
    """Return the smallest detectable differences at the given sample sizes, and where others stated different ones."""
    rows = (vars(size) | {"remark": words.all_of(size.deviations)} for size in check.detectable)
    return table("published-detectable", rows, words, power=check.power)


def side_by_side(check: PublishedCheck, last: pl.DataFrame) -> pl.DataFrame:
    """Return the accuracies of arms with a published figure and measured ones at its noise level, in percent.

    Columns: arm, kind (published or measured), seed (-1: published), accuracy, ci_low, ci_high.
    """
    keys, ends = ["arm", "noise_level"], ("ci_low", "ci_high")
    published = pl.DataFrame(
        [
            {"arm": arm, "noise_level": found.noise_level or 0.0, "kind": "published", "seed": -1}
            | {"accuracy": float(found.printed), **{end: 100 * getattr(found, end) for end in ends}}
            for arm, found in _final(check).items()
        ],
        schema={"arm": pl.String, "noise_level": pl.Float64, "kind": pl.String, "seed": pl.Int64}
        | dict.fromkeys(("accuracy", *ends), pl.Float64),
    )
    measured = last.join(published, on=keys, how="semi").select(
        *keys, pl.lit("measured").alias("kind"), "seed", *(pl.col(name) * 100 for name in ("accuracy", *ends))
    )
    both = set(measured["arm"]) & set(published["arm"])
    return pl.concat([published, measured]).filter(pl.col("arm").is_in(sorted(both))).drop("noise_level")


def _final(check: PublishedCheck) -> dict[str, CheckedAccuracy]:
    """Return the published accuracy of every arm after its last step: that of the most questions."""
    final: dict[str, CheckedAccuracy] = {}
    # Sorting keeps the order of figures of equal rank, of which the first counts.
    for one in sorted(check.accuracies, key=lambda one: (-(one.step or 0), -one.num_questions)):
        if one.arm is not None:
            final.setdefault(one.arm, one)
    return final


def _measured(check: PublishedCheck, accuracy: CheckedAccuracy, means: Means) -> float | None:
    """Return what the study measured after its last step at the same noise level; None for an earlier step."""
    steps = [other.step or 0 for other in check.accuracies if other.arm == accuracy.arm]
    if accuracy.arm is None or (accuracy.step is not None and accuracy.step < max(steps)):
        return None
    return means.get((accuracy.arm, accuracy.noise_level or 0.0))


def _interval(claim: CheckedClaim, words: Words) -> str:
    if claim.ci_low is None or claim.ci_high is None:
        return words("published.unbounded") if claim.unit == "ratio" else numbers.MISSING
    return words("span", low=_amount(claim, claim.ci_low), high=_amount(claim, claim.ci_high))


def _amount(claim: CheckedClaim, value: float) -> str:
    digits = 2 if claim.unit == "points" else 4
    return f"{value:.{digits}f}".replace("-", "−") if claim.unit == "ratio" else numbers.signed(value, digits)
