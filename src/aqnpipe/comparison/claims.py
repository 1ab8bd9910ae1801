"""Statements about a tested comparison: its numbers, the conclusion, and the sizes that would show more."""

from aqnpipe.artifacts.statements import Statement, statement
from aqnpipe.comparison.contrasts import Contrast, Scores
from aqnpipe.comparison.judgement import Judgement, is_decidable
from aqnpipe.config.analysis import StatisticsConfig
from aqnpipe.statistics.crossed_effects import MAX_SEEDS_SEARCHED, Estimate


def statements_of(
    contrast: Contrast, scores: Scores, estimate: Estimate, judgement: Judgement, settings: StatisticsConfig
) -> tuple[Statement, ...]:
    """Return the statements of a tested comparison; the first has the numbers."""
    found = [_numbers(contrast, scores, estimate, judgement), *_conclusion(contrast, judgement)]
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
        statement("detail.p_and_holm", p=judgement.p_value, p_holm=judgement.p_holm),
        sample,
    )
    return statement("claim.difference", sides=sides, difference=estimate.difference, details=details)


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
    if judgement.seeds_needed is not None:
        found.append(statement("claim.seeds_needed", seeds=judgement.seeds_needed))
    elif estimate.num_seeds > 1 and estimate.spread is not None:
        found.append(statement("claim.more_seeds_do_not_help", seeds=MAX_SEEDS_SEARCHED))
    elif judgement.questions_needed is not None:
        found.append(statement("claim.questions_needed", questions=judgement.questions_needed))
    return found
