"""The sentences that say verdicts: generated from the numbers, in both languages."""

from aqnpipe.comparison.contrasts import Contrast, Refusal, Scores
from aqnpipe.comparison.judgement import Judgement, can_carry
from aqnpipe.config.analysis import StatisticsConfig
from aqnpipe.report import wording
from aqnpipe.report.wording import NBSP, Text, joined, level_text, p_text, percent, points, say
from aqnpipe.statistics.crossed_effects import MAX_SEEDS_SEARCHED, Estimate


def sentence_of(
    contrast: Contrast, scores: Scores, estimate: Estimate, judgement: Judgement, settings: StatisticsConfig
) -> Text:
    """Put a tested comparison into words."""
    parts = [_numbers(contrast, scores, estimate, judgement)]
    parts += _conclusion(contrast, judgement)
    if judgement.verdict == "not_shown":
        parts += _why_not_shown(contrast, estimate, judgement, settings)
    return joined(parts)


def refusal_sentence(refusal: Refusal) -> Text:
    """Put a refused comparison into words."""
    return say(wording.NOT_COMPARED, reason=refusal.reason, kind=wording.REFUSALS[refusal.kind])


def _who(contrast: Contrast, scores: Scores) -> Text:
    treatment, control = contrast.treatment, contrast.control
    kind = contrast.comparison.kind
    if kind == "degradation":
        changes = (float(side.mean()) for side in (scores.treatment, scores.control))
        first, second = (points(change, sign=True) for change in changes)
        template = wording.DEGRADATION
    else:
        first, second = percent(scores.treatment_accuracy), percent(scores.control_accuracy)
        template = wording.LEVELS if kind == "levels" else wording.ARMS
    level = level_text(treatment.noise_level)
    where = say(wording.AT_LEVEL, level=level) if treatment.noise_level else wording.NOWHERE
    names = {"treatment": treatment.arm, "control": control.arm, "first": first, "second": second}
    return say(template, **names, level=level, where=where)


def _numbers(contrast: Contrast, scores: Scores, estimate: Estimate, judgement: Judgement) -> Text:
    who = _who(contrast, scores)
    sample = wording.sample_text(estimate.num_seeds, estimate.num_questions)
    if estimate.method == "no_variance" and estimate.difference == 0:
        return say(wording.IDENTICAL, who=who, sample=sample)
    margin = contrast.comparison.margin
    return say(
        wording.NUMBERS,
        who=who,
        difference=points(estimate.difference, sign=True),
        confidence=percent(judgement.interval_level, 0),
        low=points(judgement.ci_low, sign=True),
        high=points(judgement.ci_high, sign=True),
        margin=say(wording.MARGIN, margin=points(margin)) if margin is not None else Text("", ""),
        nbsp=NBSP,
        p=p_text(judgement.p_value),
        p_holm=p_text(judgement.p_holm),
        sample=sample,
    )


def _conclusion(contrast: Contrast, judgement: Judgement) -> list[Text]:
    claim = contrast.comparison
    if judgement.verdict == "refuted":
        return [wording.AGAINST if claim.margin is None else wording.BEYOND_MARGIN]
    if judgement.verdict != "supported" or claim.margin is None:
        return []
    if claim.test == "equivalence":
        return [say(wording.EQUIVALENT, margin=points(claim.margin))]
    names = (contrast.treatment.arm, contrast.control.arm)
    if claim.kind == "levels":
        return [say(wording.NOISE_COSTS_LESS, treatment=names[0], margin=points(claim.margin))]
    return [say(wording.NO_WORSE, treatment=names[0], control=names[1], margin=points(claim.margin))]


def _why_not_shown(
    contrast: Contrast, estimate: Estimate, judgement: Judgement, settings: StatisticsConfig
) -> list[Text]:
    if not can_carry(contrast, estimate):
        return [wording.ONE_RUN]
    parts = []
    limit = judgement.minimum_detectable
    if limit is not None and limit < 1:
        template = wording.DETECTABLE if contrast.comparison.margin is None else wording.DETECTABLE_MARGIN
        parts.append(say(template, limit=points(limit), power=percent(settings.power, 0)))
    if contrast.comparison.margin is not None or estimate.difference == 0:
        return parts
    if judgement.seeds_needed is not None:
        parts.append(say(wording.SEEDS_NEEDED, number=f"{judgement.seeds_needed:,}"))
    elif estimate.num_seeds > 1 and estimate.spread is not None:
        parts.append(say(wording.SEEDS_DO_NOT_HELP, number=f"{MAX_SEEDS_SEARCHED:,}"))
    elif judgement.questions_needed is not None:
        parts.append(say(wording.QUESTIONS_NEEDED, number=f"{judgement.questions_needed:,}"))
    return parts
