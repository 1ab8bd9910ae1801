"""The answer of a study: one sentence on its primary claim, with numbers, as a statement."""

from collections.abc import Mapping, Sequence
from typing import Any

from aqnpipe.artifacts.comparisons import Claim
from aqnpipe.artifacts.looks import ClaimAtLook
from aqnpipe.artifacts.statements import Statement, statement


def answer_of(
    claims: Sequence[Claim], rows: Sequence[Mapping[str, Any]], looks: Mapping[str, ClaimAtLook]
) -> Statement | None:
    """Return the sentence that answers the primary claim; None if the study declares none.

    rows: the comparison table. looks: the claims of a study that adds seeds at their last looks, by id.
    """
    primary = next((claim for claim in claims if claim.role == "primary"), None)
    if primary is None:
        return None
    row = next(row for row in rows if row["comparison_id"] == primary.comparison_id)
    if primary.verdict == "invalid":
        return statement("answer.invalid", claim=primary.claim, reason=primary.invalid_reason or "")
    return statement(
        "answer.sentence",
        verdict=statement(f"answer.verdict.{_verdict(primary, looks)}"),
        finding=_finding(row),
        interval=_interval(row),
        sample=statement("detail.sample", seeds=row["num_seeds"], questions=row["num_questions"]),
    )


def _verdict(claim: Claim, looks: Mapping[str, ClaimAtLook]) -> str:
    found = looks.get(claim.comparison_id)
    if found is None or claim.verdict != "not_shown":
        return claim.verdict
    return found.state


def _finding(row: Mapping[str, Any]) -> Statement:
    """Return the accuracies of both sides and their difference, without its sign."""
    treatment, control, level = row["treatment"], row["control"], row["treatment_level"]
    sign, difference = "more" if row["difference"] > 0 else "less", abs(row["difference"])
    first, second = row["treatment_accuracy"], row["control_accuracy"]
    match row["kind"]:
        case "degradation":
            return statement(
                f"answer.degradation.{sign}",
                treatment=treatment,
                control=control,
                level=level,
                treatment_loss=-row["treatment_change"],
                control_loss=-row["control_change"],
                difference=difference,
            )
        case "levels":
            return statement(
                f"answer.levels.{sign}",
                treatment=treatment,
                level=level,
                first=first,
                second=second,
                difference=difference,
            )
        case _ if level == 0:
            return statement(
                f"answer.arms.{sign}",
                treatment=treatment,
                control=control,
                first=first,
                second=second,
                difference=difference,
            )
        case _:
            return statement(
                f"answer.arms_under_noise.{sign}",
                treatment=treatment,
                control=control,
                level=level,
                first=first,
                second=second,
                difference=difference,
            )


def _interval(row: Mapping[str, Any]) -> Statement:
    """Return the interval in the direction in which the difference is stated, with the margin if there is one."""
    level, low, high = row["interval_level"], row["ci_low"], row["ci_high"]
    if row["difference"] <= 0:
        low, high = -high, -low
    if row["margin"] is None:
        return statement("answer.interval", level=level, low=low, high=high)
    return statement("answer.interval_and_margin", level=level, low=low, high=high, margin=row["margin"])
