"""Statements about a tested comparison: its numbers, the conclusion, and the sizes that would show more."""

from aqnpipe.artifacts.statements import Statement, statement
from aqnpipe.comparison.contrasts import Contrast, Scores
from aqnpipe.comparison.judgement import EFFECTS, Judgement, is_decidable
from aqnpipe.config.analysis import StatisticsConfig
from aqnpipe.statistics.clusters import neighbours_vary_together
from aqnpipe.statistics.crossed_effects import Estimate
from aqnpipe.statistics.sample_sizes import MAX_SEEDS_SEARCHED

_NOTABLE = 0.01
"""Differences below a point are not compared between scorers."""


def statements_of(
    contrast: Contrast, scores: Scores, estimate: Estimate, judgement: Judgement, settings: StatisticsConfig
) -> tuple[Statement, ...]:
    """Return the statements of a tested comparison; the first has the numbers."""
    found = [
        _numbers(contrast, scores, estimate, judgement),
        *_parts_of_degradation(contrast, scores, estimate),
        *_other_scorers(scores, estimate),
        *_conclusion(contrast, judgement),
        *_undeclared_clusters(scores),
    ]
    if judgement.verdict == "not_shown":
        found += _why_not_shown(contrast, estimate, judgement, settings)
    return tuple(found)


def _sides(contrast: Contrast, scores: Scores) -> Statement:
    """Return the accuracies of both sides, or their changes in a degradation comparison."""
    treatment, control, level = contrast.treatment.arm, contrast.control.arm, contrast.treatment.noise_level
    first, second = scores.treatment_accuracy, scores.control_accuracy
    match contrast.comparison.kind:
        case "degradation":
            return statement(
                "claim.sides.degradation",
                treatment=treatment,
                control=control,
                level=level,
                treatment_change=float(scores.treatment.mean()),
                control_change=float(scores.control.mean()),
            )
        case "levels":
            return statement("claim.sides.levels", treatment=treatment, level=level, first=first, second=second)
        case _ if level == 0:
            return statement("claim.sides.arms", treatment=treatment, control=control, first=first, second=second)
        case _:
            return statement(
                "claim.sides.arms_under_noise",
                treatment=treatment,
                control=control,
                level=level,
                first=first,
                second=second,
            )


def _numbers(contrast: Contrast, scores: Scores, estimate: Estimate, judgement: Judgement) -> Statement:
    sides = _sides(contrast, scores)
    sample = statement("detail.sample", seeds=estimate.num_seeds, questions=estimate.num_questions)
    if estimate.method == "no_variance" and estimate.difference == 0:
        return statement("claim.identical", sides=sides, sample=sample)
    margin = contrast.comparison.margin
    details = (
        statement(
            "detail.interval.fractions", level=judgement.interval_level, low=judgement.ci_low, high=judgement.ci_high
        ),
        *([] if margin is None else [statement("detail.margin", margin=margin)]),
        *_p_values(contrast, judgement),
        sample,
    )
    return statement("claim.difference", sides=sides, difference=estimate.difference, details=details)


def _p_values(contrast: Contrast, judgement: Judgement) -> list[Statement]:
    """Return the p-values behind the verdict; Holm's adjustment only where the claim shares its error rate."""
    if judgement.verdict == "equivalent" and judgement.other is not None:
        return [statement("detail.p_equivalent", p=judgement.other.p_value, p_holm=judgement.other.p_holm)]
    p_value = judgement.p_value if judgement.p_looks is None else judgement.p_looks
    if contrast.comparison.role != "secondary":
        return [statement("detail.p", p=p_value)]
    return [statement("detail.p_and_holm", p=p_value, p_holm=judgement.claimed.p_holm)]


def _undeclared_clusters(scores: Scores) -> list[Statement]:
    is_clustered = scores.clusters is None and neighbours_vary_together(scores.differences.mean(axis=0))
    return [statement("claim.clustered")] if is_clustered else []


def _conclusion(contrast: Contrast, judgement: Judgement) -> list[Statement]:
    claim = contrast.comparison
    if judgement.verdict == "refuted":
        return [statement("claim.opposite" if claim.margin is None else "claim.beyond_margin")]
    if judgement.verdict != "supported" or claim.margin is None:
        return []
    if claim.test == "equivalence":
        return [statement("claim.equivalent", margin=claim.margin)]
    treatment, control = contrast.treatment.arm, contrast.control.arm
    if claim.kind == "levels":
        return [statement("claim.noise_costs_less", treatment=treatment, margin=claim.margin)]
    return [statement("claim.no_worse", treatment=treatment, control=control, margin=claim.margin)]


def _seeds_for(effect: float, seeds: int | None) -> Statement:
    if seeds is None:
        return statement("detail.no_seeds_for", effect=effect, seeds=MAX_SEEDS_SEARCHED)
    return statement("detail.seeds_for", effect=effect, seeds=seeds)


def _parts_of_degradation(contrast: Contrast, scores: Scores, estimate: Estimate) -> list[Statement]:
    """Return what a degradation is made of, because a model that is worse without noise has less to lose."""
    if contrast.comparison.kind != "degradation":
        return []
    at_level = scores.treatment_accuracy - scores.control_accuracy
    return [
        statement(
            "claim.parts_of_degradation",
            level=contrast.treatment.noise_level,
            at_level=at_level,
            clean=at_level - estimate.difference,
        )
    ]


def _other_scorers(scores: Scores, estimate: Estimate) -> list[Statement]:
    """Return the differences by other scorers where they have the other sign, or less than half of the size.

    An effect that one scorer hardly sees is on the format of answers, not on whether they are right.
    """
    return [
        statement("claim.other_scorer", scorer=scorer, difference=difference)
        for scorer, difference in scores.by_scorer.items()
        if max(abs(difference), abs(estimate.difference)) >= _NOTABLE
        and (difference * estimate.difference < 0 or abs(difference) < abs(estimate.difference) / 2)
    ]


def _why_not_shown(
    contrast: Contrast, estimate: Estimate, judgement: Judgement, settings: StatisticsConfig
) -> list[Statement]:
    if not is_decidable(contrast, estimate):
        return [statement("claim.one_run")]
    found = []
    limit, has_margin = judgement.minimum_detectable, contrast.comparison.margin is not None
    if limit is not None and limit < 1:
        key = "inside_margin" if has_margin else "difference"
        found.append(statement(f"claim.detectable.{key}", limit=limit, power=settings.power))
    if has_margin or estimate.difference == 0:
        return found
    if judgement.seeds_for:
        effects = tuple(_seeds_for(*pair) for pair in zip(EFFECTS, judgement.seeds_for, strict=True))
        found.append(statement("claim.seeds_for", power=settings.power, effects=effects))
    elif judgement.questions_needed is not None:
        found.append(statement("claim.questions_needed", questions=judgement.questions_needed))
    return found
