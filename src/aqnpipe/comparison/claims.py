"""Statements about a tested comparison: its numbers, the conclusion, the sizes that would show more, and the answer.

In a study that adds seeds, each claim has the numbers of the look at which it ended."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aqnpipe.artifacts.base import Statement, statement
from aqnpipe.artifacts.comparisons import Claim, ClaimAtLook, ClaimVerdict, LookFile
from aqnpipe.comparison.contrasts import Checkpoint, Contrast, Contrasts, Scores
from aqnpipe.comparison.evaluations import LoadedEvaluation
from aqnpipe.comparison.identity import comparison_ids
from aqnpipe.comparison.judgement import EFFECTS, Evidence, Judgement
from aqnpipe.config.analysis import Comparison, StatisticsConfig
from aqnpipe.config.study import Study
from aqnpipe.statistics.clusters import neighbours_vary_together
from aqnpipe.statistics.crossed_effects import Estimate
from aqnpipe.statistics.sample_sizes import MAX_SEEDS_SEARCHED

_NOTABLE = 0.01
"""Differences below a point are not compared between scorers."""


def statements_of(evidence: Evidence, judgement: Judgement, settings: StatisticsConfig) -> tuple[Statement, ...]:
    """Return the statements of a tested comparison; the first has the numbers."""
    contrast, scores = evidence.contrast, evidence.contrast.scores
    if scores is None:
        raise ValueError(f"{contrast.comparison_id} was not tested")
    return (
        _numbers(evidence, scores, judgement),
        *_answer_format(evidence, scores),
        *_parts_of_degradation(evidence, scores),
        *_other_scorers(scores, evidence.estimate),
        *_conclusion(contrast, judgement),
        *_undeclared_clusters(scores),
        *_unchanged_responses(scores),
        *([statement("claim.other_tokens")] if contrast.has_other_tokens else []),
        *(_why_not_shown(evidence, judgement, settings) if judgement.verdict == "not_shown" else ()),
    )


def _sides(contrast: Contrast, scores: Scores) -> Statement:
    """Return the accuracies of both sides, or their changes in a degradation comparison."""
    treatment, control, level = contrast.treatment.arm, contrast.control.arm, contrast.treatment.noise_level
    first, second = scores.treatment_accuracy, scores.control_accuracy
    match contrast.comparison.kind:
        case "degradation":
            ours, theirs = float(scores.treatment.mean()), float(scores.control.mean())
            return statement(
                "claim.sides.degradation",
                treatment=treatment,
                control=control,
                level=level,
                treatment_change=ours,
                control_change=theirs,
            )
        case "levels":
            return statement("claim.sides.levels", treatment=treatment, level=level, first=first, second=second)
        case _ if level == 0:
            return statement("claim.sides.arms", treatment=treatment, control=control, first=first, second=second)
    return statement(
        "claim.sides.arms_under_noise", treatment=treatment, control=control, level=level, first=first, second=second
    )


def _numbers(evidence: Evidence, scores: Scores, judgement: Judgement) -> Statement:
    estimate, sides = evidence.estimate, _sides(evidence.contrast, scores)
    seeds, questions, clusters = estimate.num_seeds, estimate.num_questions, estimate.num_units
    sample = (
        statement("detail.sample", seeds=seeds, questions=questions)
        if scores.clusters is None
        else statement("detail.sample_in_clusters", seeds=seeds, questions=questions, clusters=clusters)
    )
    if estimate.method == "no_variance" and estimate.difference == 0:
        return statement("claim.identical", sides=sides, sample=sample)
    details: tuple[Statement, ...] = (sample,)
    low, high, margin = judgement.ci_low, judgement.ci_high, evidence.claim.margin
    p_value = judgement.p_value if judgement.p_looks is None else judgement.p_looks
    if low is not None and high is not None and p_value is not None:
        details = (
            statement("detail.interval.fractions", level=judgement.interval_level, low=low, high=high),
            *([] if margin is None else [statement("detail.margin", margin=margin)]),
            _p_values(evidence.claim, judgement, p_value),
            sample,
        )
    return statement("claim.difference", sides=sides, difference=estimate.difference, details=details)


def _p_values(claim: Comparison, judgement: Judgement, p_value: float) -> Statement:
    """Return the p-values behind the verdict; Holm's adjustment only where the claim shares its error rate."""
    if judgement.verdict == "equivalent" and judgement.other is not None:
        return statement("detail.p_equivalent", p=judgement.other.p_value, p_holm=judgement.other.p_holm)
    if claim.role != "secondary":
        return statement("detail.p", p=p_value)
    return statement("detail.p_and_holm", p=p_value, p_holm=judgement.claimed.p_holm)


def _undeclared_clusters(scores: Scores) -> Iterator[Statement]:
    """Yield what shows that answers vary together though the study does not declare it."""
    if scores.clusters is None and neighbours_vary_together(scores.differences.mean(axis=0)):
        yield statement("claim.clustered")
    # Questions of a cluster may be in one batch: only changes between noise draws tell both apart.
    if scores.batches is not None and (scores.clusters is None or len(scores.draws) > 1):
        correlation = scores.batches.notable_correlation(scores.draws)
        if correlation is not None:
            yield statement("claim.batches", correlation=correlation)


def _unchanged_responses(scores: Scores) -> Iterator[Statement]:
    """Yield what says that noise changed no response; that there was noise is shown by the receipts."""
    if scores.unchanged:
        yield statement("claim.unchanged_responses", run=scores.unchanged[0], runs=len(scores.unchanged))


def _conclusion(contrast: Contrast, judgement: Judgement) -> Iterator[Statement]:
    claim, treatment, control = contrast.comparison, contrast.treatment.arm, contrast.control.arm
    if judgement.verdict == "refuted":
        yield statement("claim.opposite" if claim.margin is None else "claim.beyond_margin")
    elif judgement.verdict != "supported" or claim.margin is None:
        return
    elif claim.test == "equivalence":
        yield statement("claim.equivalent", margin=claim.margin)
    elif claim.kind == "levels":
        yield statement("claim.noise_costs_less", treatment=treatment, margin=claim.margin)
    else:
        yield statement("claim.no_worse", treatment=treatment, control=control, margin=claim.margin)


def _seeds_for(effect: float, seeds: int | None) -> Statement:
    if seeds is None:
        return statement("detail.no_seeds_for", effect=effect, seeds=MAX_SEEDS_SEARCHED)
    return statement("detail.seeds_for", effect=effect, seeds=seeds)


def _parts_of_degradation(evidence: Evidence, scores: Scores) -> Iterator[Statement]:
    """Yield what a degradation is made of, because a model that is worse without noise has less to lose."""
    if evidence.claim.kind == "degradation":
        level, at_level = evidence.contrast.treatment.noise_level, scores.treatment_accuracy - scores.control_accuracy
        clean = at_level - evidence.estimate.difference
        yield statement("claim.parts_of_degradation", level=level, at_level=at_level, clean=clean)


def _other_scorers(scores: Scores, estimate: Estimate) -> Iterator[Statement]:
    """Yield the differences by other scorers where they have the other sign, or less than half of the size.

    An effect that one scorer hardly sees is on the format of answers, not on whether they are right.
    """
    for scorer, difference in scores.by_scorer.items():
        if _is_other(difference, estimate.difference):
            yield statement("claim.other_scorer", scorer=scorer, difference=difference)


def _is_other(difference: float, own: float) -> bool:
    is_opposite_or_small = difference * own < 0 or abs(difference) < abs(own) / 2
    return is_opposite_or_small and max(abs(difference), abs(own)) >= _NOTABLE


def _answer_format(evidence: Evidence, scores: Scores) -> Iterator[Statement]:
    """Yield how much of a control's difference is answer format: what goes if the last number of a response counts.

    Nothing where that scorer is the study's own, or finds another effect, which `_other_scorers` states.
    """
    own, by_number = evidence.estimate.difference, scores.by_scorer.get("last_number", 0.0)
    if evidence.claim.role == "control" and own * by_number > 0 and not _is_other(by_number, own):
        yield statement("claim.answer_format", part=own - by_number, difference=by_number)


def _why_not_shown(evidence: Evidence, judgement: Judgement, settings: StatisticsConfig) -> Iterator[Statement]:
    if not evidence.is_decidable:
        yield statement("claim.one_run")
        return
    limit, has_margin = judgement.minimum_detectable_difference, evidence.claim.margin is not None
    if limit is not None and limit < 1:
        key = "inside_margin" if has_margin else "difference"
        yield statement(f"claim.detectable.{key}", limit=limit, power=settings.power)
    if has_margin or evidence.estimate.difference == 0:
        return
    if judgement.seeds_for:
        effects = tuple(_seeds_for(*pair) for pair in zip(EFFECTS, judgement.seeds_for, strict=True))
        yield statement("claim.seeds_for", power=settings.power, effects=effects)
    elif judgement.questions_needed is not None:
        yield statement("claim.questions_needed", questions=judgement.questions_needed)


def answer_of(
    claims: Sequence[Claim],
    rows: Sequence[Mapping[str, Any]],
    looks: Mapping[str, ClaimAtLook],
    comparisons: Mapping[str, Comparison],
    power: float,
    *,
    has_usual_pairs: bool = False,
) -> Statement | None:
    """Return the sentence that answers the primary claim; None if the study declares none.

    has_usual_pairs: the comparisons are the usual ones of given checkpoints, of which one answers (see `_most_shown`).
    rows: the comparison table. looks: the claims of a study that adds seeds at their last looks, by id. comparisons:
    the declared ones, by id. power: probability with which the further seeds that the sentence names decide the claim.
    """
    name = _most_shown(rows) if has_usual_pairs else None
    primary = next((claim for claim in claims if claim.role == "primary" or claim.comparison_id == name), None)
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
        finding=_finding(row, comparisons[primary.comparison_id]),
        interval=_interval(row),
        sample=statement("detail.sample", seeds=row["num_seeds"], questions=row["num_questions"]),
        outlook=(_outlook(primary, row, looks.get(primary.comparison_id), power),) if is_open else (),
    )


def _most_shown(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the comparison of checkpoints that answers: of the pair that differs most surely in what noise costs.

    At the highest level, by p-values that are adjusted over all pairs. With one checkpoint: of that with itself.
    """
    kind = "degradation" if any(row["kind"] == "degradation" for row in rows) else "levels"
    found = [row for row in rows if row["kind"] == kind]
    levels = {row["treatment_level"] for row in found}
    highest = max((level for level in levels if level < 1), default=max(levels, default=0.0))
    asked = [row for row in found if row["treatment_level"] == highest]
    answering = min(asked, key=lambda row: 2.0 if row.get("p_holm") is None else row["p_holm"], default=None)
    return None if answering is None else str(answering["comparison_id"])


def _verdict(claim: Claim, comparison: Comparison) -> Statement:
    if claim.verdict == "equivalent":
        return statement("answer.equivalent", margin=comparison.equivalent_within or 0.0)
    return statement(f"answer.verdict.{claim.verdict}")


def _finding(row: Mapping[str, Any], comparison: Comparison) -> Statement:
    """Return the difference, without its sign."""
    sign, difference = "more" if row["difference"] > 0 else "less", abs(row["difference"])
    level = row["treatment_level"]
    if row["kind"] == "degradation" and comparison.expected == "different":
        # Such a claim says of none of the two that it loses less.
        return statement(f"answer.degradation_of.{sign}", level=level, difference=difference, arm=row["treatment"])
    if row["kind"] == "degradation":
        return statement(f"answer.degradation.{sign}", level=level, difference=difference)
    return statement(f"answer.accuracy.{sign}", difference=difference)


def _interval(row: Mapping[str, Any]) -> Statement:
    """Return the interval in the direction in which the difference is stated, with the margin if there is one."""
    level, low, high = row["interval_level"], row["ci_low"], row["ci_high"]
    if low is None:
        return statement("answer.no_interval")
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


def last_looks(study: Study, looks: Sequence[LookFile]) -> dict[str, ClaimAtLook]:
    """Return the claims of a study that adds seeds at their last looks, by id; empty if the seeds are fixed.

    Before the first look all claims are open and have not been tested.
    """
    if study.adaptive_seeds is None:
        return {}
    known = {claim.comparison_id: claim for claim in looks[-1].claims} if looks else {}
    return {
        name: known.get(name) or ClaimAtLook(comparison_id=name, state="open", look=0, seeds=study.adaptive_seeds.start)
        for name in comparison_ids(study.comparisons())
    }


def contrasts_at_looks(
    study: Study, loaded: Mapping[Checkpoint, LoadedEvaluation], looks: Sequence[LookFile]
) -> list[Contrast]:
    """Return every comparison on the seeds of the last look at it; none if the seeds are fixed."""
    claims = last_looks(study, looks)
    named = comparison_ids(study.comparisons())
    of_seeds = {
        number: Contrasts(study.with_seeds(number), loaded)
        for number in sorted({claim.seeds for claim in claims.values()})
    }
    return [of_seeds[claim.seeds].of(named[name], name) for name, claim in claims.items()]


def judgement_at_look(judgement: Judgement, claim: ClaimAtLook) -> Judgement:
    """Return the judgement with verdict, interval and p-values of the last look, which are adjusted for all looks."""
    names = ("p_value", "p_looks", "ci_low", "ci_high", "interval_level")
    numbers = {name: getattr(claim, name) for name in names}
    if claim.p_looks is None or claim.p_holm is None or None in numbers.values():
        return replace(judgement, verdict="not_shown", seeds_needed=None)
    claimed, other = replace(judgement.claimed, p_value=claim.p_looks, p_holm=claim.p_holm), judgement.other
    if other is not None and claim.p_other is not None and claim.p_other_holm is not None:
        other = replace(other, p_value=claim.p_other, p_holm=claim.p_other_holm)
    verdict: ClaimVerdict = "not_shown" if claim.state == "open" or claim.state == "futile" else claim.state
    return replace(judgement, verdict=verdict, claimed=claimed, other=other, **numbers)


def look_statement(claim: ClaimAtLook, comparison: Comparison) -> Statement:
    """Return how far the looks at a claim came, and how it ended."""
    if claim.look == 0:
        return statement("look.none")
    look, seeds = claim.look, claim.seeds
    if claim.state == "equivalent":
        return statement("look.equivalent", look=look, seeds=seeds, margin=comparison.equivalent_within or 0.0)
    if claim.state == "futile":
        return statement("look.futile", look=look, seeds=seeds, chance=claim.chance or 0.0)
    return statement("look.open" if claim.state == "open" else "look.decided", look=look, seeds=seeds)
