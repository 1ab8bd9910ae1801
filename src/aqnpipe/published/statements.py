"""Findings of the check of published figures, as statements for the report's catalogue of words."""

from aqnpipe.artifacts.base import Statement, statement
from aqnpipe.artifacts.published import CheckedAccuracy
from aqnpipe.config.published import AccuracyClaim, LossClaim, PublishedClaim, ReportedNumbers
from aqnpipe.published.summary_tests import Result
from aqnpipe.statistics.continuous import Summary, implied_correlation
from aqnpipe.statistics.grim import agrees

_ROUNDING_UNITS = 1.0
"""Reported differences and intervals may be off by a unit of their last digit: they come from rounded figures."""


def numbers(result: Result, level: float, p_holm: float | None) -> Statement:
    """Return the difference in the unit of the claim, its interval at confidence `level`, and its p-values."""
    return statement(
        f"result.{result.unit}",
        treatment=result.treatment,
        control=result.control,
        difference=result.difference,
        details=(_interval(result, level), *_p_values(result.p_value, p_holm)),
    )


def _interval(result: Result, level: float) -> Statement:
    if result.ci_low is not None and result.ci_high is not None:
        return statement(f"detail.interval.{result.unit}", level=level, low=result.ci_low, high=result.ci_high)
    return statement("detail.no_interval.unbounded" if result.unit == "ratio" else "detail.no_interval.no_variance")


def _p_values(p_value: float | None, p_holm: float | None) -> list[Statement]:
    if p_value is None:
        return []
    return [
        statement("detail.p", p=p_value) if p_holm is None else statement("detail.p_and_holm", p=p_value, p_holm=p_holm)
    ]


def impossible(accuracy: CheckedAccuracy) -> Statement:
    """Return the statement that no count of correct answers gives an accuracy, with the nearest possible ones."""
    below, above = accuracy.nearest
    return statement(
        "reason.impossible",
        name=accuracy.id,
        printed=accuracy.printed,
        questions=accuracy.num_questions,
        below=below,
        above=above,
    )


def assumes_equal_runs(claim: PublishedClaim) -> bool:
    """Return whether a claim about training runs is tested over questions only, as if identical runs did not differ."""
    return claim.between_runs if isinstance(claim, AccuracyClaim) else not isinstance(claim, LossClaim)


def loss_notes(claim: LossClaim, treatment: Summary, control: Summary) -> list[Statement]:
    """Return what each reported p-value implies about a paired t-test."""
    notes = []
    for reported in claim.reported:
        if reported.p_value is None or treatment.num != control.num:
            continue
        correlation = implied_correlation(treatment, control, float(reported.p_value))
        if correlation is None:
            notes.append(statement("note.no_paired_test", p=reported.p_value))
        else:
            notes.append(statement("note.paired_test", p=reported.p_value, source=reported.by, correlation=correlation))
    return notes


def deviations(reported: ReportedNumbers, result: Result) -> list[Statement]:
    """Return the statements on figures in `reported` that differ from the result by more than rounding."""
    checks = (
        ("difference", reported.difference, result.difference, _ROUNDING_UNITS),
        ("ci_low", reported.ci_low, result.ci_low, _ROUNDING_UNITS),
        ("ci_high", reported.ci_high, result.ci_high, _ROUNDING_UNITS),
        ("p_value", reported.p_value, result.p_value, 0.5),
    )
    return [
        _deviation(name, reported.by, printed, value)
        for name, printed, value, units in checks
        if printed is not None and (value is None or not agrees(value, printed, units))
    ]


def _deviation(name: str, source: str, printed: str, value: float | None) -> Statement:
    quantity = statement(f"quantity.{name}")
    if value is None:
        return statement("deviation.not_computable", quantity=quantity, source=source, printed=printed)
    return statement("deviation.number", quantity=quantity, source=source, printed=printed, value=value)
