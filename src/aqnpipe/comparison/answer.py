"""The answer of a study: yes, no or not known to its primary claim, with the effect and why, as a statement."""

from collections.abc import Mapping, Sequence
from typing import Any

from aqnpipe.artifacts.comparisons import Claim
from aqnpipe.artifacts.looks import ClaimAtLook
from aqnpipe.artifacts.statements import Statement, statement
from aqnpipe.config.analysis import Comparison


def answer_of(
    claims: Sequence[Claim],
    rows: Sequence[Mapping[str, Any]],
    looks: Mapping[str, ClaimAtLook],
    comparisons: Mapping[str, Comparison],
    power: float,
) -> Statement | None:
    """Return the sentence that answers the primary claim; None if the study declares none.

    rows: the comparison table. looks: the claims of a study that adds seeds at their last looks, by id. comparisons:
    the declared ones, by id. power: probability with which the further seeds that the sentence names decide the claim.
    """
    primary = next((claim for claim in claims if claim.role == "primary"), None)
    if primary is None:
        return None
    if primary.verdict == "invalid":
        return statement("answer.invalid", claim=primary.claim, reason=primary.invalid_reason or "")
    row = next(row for row in rows if row["comparison_id"] == primary.comparison_id)
    is_open = primary.verdict == "not_shown"
    return statement(
        "answer.sentence",
        verdict=_verdict(primary, comparisons[primary.comparison_id]),
        claim=primary.claim,
        finding=_finding(row),
        interval=_interval(row),
        sample=statement("detail.sample", seeds=row["num_seeds"], questions=row["num_questions"]),
        outlook=(_outlook(primary, row, looks.get(primary.comparison_id), power),) if is_open else (),
    )


def _verdict(claim: Claim, comparison: Comparison) -> Statement:
    if claim.verdict == "equivalent":
        return statement("answer.equivalent", margin=comparison.equivalent_within or 0.0)
    return statement(f"answer.verdict.{claim.verdict}")


def _finding(row: Mapping[str, Any]) -> Statement:
    """Return the difference, without its sign."""
    sign, difference = "more" if row["difference"] > 0 else "less", abs(row["difference"])
    if row["kind"] == "degradation":
        return statement(f"answer.degradation.{sign}", level=row["treatment_level"], difference=difference)
    return statement(f"answer.accuracy.{sign}", difference=difference)


def _interval(row: Mapping[str, Any]) -> Statement:
    """Return the interval in the direction in which the difference is stated, with the margin if there is one."""
    level, low, high = row["interval_level"], row["ci_low"], row["ci_high"]
    if row["difference"] <= 0:
        low, high = -high, -low
    if row["margin"] is None:
        return statement("answer.interval", level=level, low=low, high=high)
    return statement("answer.interval_and_margin", level=level, low=low, high=high, margin=row["margin"])


def _outlook(claim: Claim, row: Mapping[str, Any], look: ClaimAtLook | None, power: float) -> Statement:
    """Return what would decide an open claim, if the true difference is the measured one."""
    if any(found.key == "claim.one_run" for found in claim.statements):
        return statement("answer.one_run")
    if look is not None and look.state == "futile":
        return statement("answer.futile", chance=look.chance or 0.0)
    if row["seeds_needed"] is not None:
        return statement("answer.more_seeds", seeds=max(row["seeds_needed"] - row["num_seeds"], 1), power=power)
    if row["num_seeds"] == 1 and row["questions_needed"] is not None:
        return statement("answer.more_questions", questions=row["questions_needed"], power=power)
    return statement("answer.no_number")
