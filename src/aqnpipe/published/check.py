"""The audit of published figures: is each possible, how sure is it, and which claims do they support?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from statsmodels.stats.proportion import proportion_confint, proportions_chisquare

from aqnpipe.artifacts.comparisons import ClaimVerdict
from aqnpipe.artifacts.files import read_users_yaml
from aqnpipe.artifacts.published import (
    CheckedAccuracy,
    CheckedClaim,
    CheckedDetectable,
    CheckedLoss,
    CheckedSeries,
    PublishedCheck,
)
from aqnpipe.comparison.judgement import holm, interval_level_of
from aqnpipe.config.analysis import TestedClaim
from aqnpipe.config.published import (
    AccuracyClaim,
    Detectable,
    DifferencesClaim,
    LossClaim,
    Pair,
    PublishedAccuracy,
    PublishedClaim,
    PublishedFile,
    PublishedLoss,
    PublishedSeries,
    RatioClaim,
    ReportedNumbers,
)
from aqnpipe.published import wording as words
from aqnpipe.published.tests import (
    Proportion,
    Result,
    accuracies_result,
    differences_result,
    largest_discordance,
    losses_result,
    questions_per_side,
    ratio_result,
    run_to_run_p,
)
from aqnpipe.report.wording import Text, joined
from aqnpipe.statistics.continuous import Summary
from aqnpipe.statistics.grim import agrees, nearest_percentages, possible_counts, possible_sizes
from aqnpipe.statistics.paired import exact_minimum_detectable_difference, minimum_detectable_difference

_ROUNDING_UNITS = 1.0
"""Reported differences and intervals may be off by a unit of their last digit: they come from rounded figures."""


@dataclass(frozen=True)
class _Tested:
    """A claim with its result, why it must not be tested, and what else speaks about it."""

    claim: PublishedClaim
    result: Result
    invalid: tuple[Text, ...]
    notes: tuple[str, ...]
    p_run_to_run: float | None


def check_published_file(path: Path) -> PublishedCheck:
    """Read a file of published figures and audit it; DataError in one line where the file is broken."""
    return check_published_figures(read_users_yaml(path, PublishedFile))


def check_published_figures(published: PublishedFile) -> PublishedCheck:
    """Audit printed figures; Holm adjusts within each family over the claims that may be tested."""
    accuracies = {one.id: _accuracy(one, published.alpha) for one in published.accuracies}
    losses = {one.id: _loss(one) for one in published.losses}
    tested = [_tested(claim, published, accuracies, losses) for claim in published.claims]
    adjusted = _adjusted(tested)
    return PublishedCheck(
        title=published.title,
        source=published.source,
        alpha=published.alpha,
        power=published.power,
        family_size=len(adjusted),
        run_sd_points=published.run_scatter.points if published.run_scatter else None,
        run_sd_runs=published.run_scatter.num_runs if published.run_scatter else None,
        accuracies=tuple(accuracies.values()),
        losses=tuple(losses.values()),
        claims=tuple(_claim(one, adjusted.get(one.claim.id), published) for one in tested),
        series=tuple(_series(one, published.accuracies) for one in published.series),
        detectable=tuple(_detectable(one, published) for one in published.detectable),
    )


def _accuracy(one: PublishedAccuracy, alpha: float) -> CheckedAccuracy:
    counts = possible_counts(one.percent, one.num_questions)
    proportion = _proportion(one)
    low, high = proportion_confint(
        proportion.fraction * one.num_questions, one.num_questions, alpha=alpha, method="wilson"
    )
    return CheckedAccuracy(
        id=one.id,
        label=one.label,
        arm=one.arm,
        noise_level=one.noise_level,
        step=one.step,
        printed=one.percent,
        num_questions=one.num_questions,
        possible=bool(counts),
        correct=counts,
        nearest=nearest_percentages(one.percent, one.num_questions) if not counts else (),
        possible_sizes=possible_sizes(one.percent) if not counts else (),
        ci_low=float(low),
        ci_high=float(high),
    )


def _proportion(one: PublishedAccuracy) -> Proportion:
    """The fraction behind a printed percentage: k/n where one k alone prints so, else as printed."""
    counts = possible_counts(one.percent, one.num_questions)
    fraction = counts[0] / one.num_questions if len(counts) == 1 else float(one.percent) / 100
    return Proportion(fraction, one.num_questions)


def _loss(one: PublishedLoss) -> CheckedLoss:
    uniform = float(np.log(one.vocabulary_size)) if one.vocabulary_size else None
    return CheckedLoss(
        id=one.id,
        label=one.label,
        arm=one.arm,
        mean=one.mean,
        std=one.std,
        ddof=one.ddof,
        num_runs=one.num_runs,
        uniform=uniform,
        above_uniform=uniform is not None and one.mean > uniform,
    )


def _tested(
    claim: PublishedClaim,
    published: PublishedFile,
    accuracies: Mapping[str, CheckedAccuracy],
    losses: Mapping[str, CheckedLoss],
) -> _Tested:
    invalid = [words.differs_in(claim.differs_in)] if claim.differs_in else []
    notes: list[str] = []
    p_run_to_run = None
    if isinstance(claim, LossClaim):
        sides = {one.id: Summary(one.mean, one.std, one.num_runs, one.ddof) for one in published.losses}
        runs = {one.id: np.array(one.values) for one in published.losses}
        treated, untreated = runs[claim.treatment], runs[claim.control]
        values = (treated, untreated) if len(treated) == len(untreated) > 0 else None
        result = losses_result(claim, sides[claim.treatment], sides[claim.control], published.alpha, values)
        invalid += [
            words.above_uniform(name, losses[name].mean, uniform)
            for name in (claim.treatment, claim.control)
            if losses[name].above_uniform and (uniform := losses[name].uniform) is not None
        ]
        notes += words.loss_notes(claim, sides[claim.treatment], sides[claim.control])
    else:
        proportions = {one.id: _proportion(one) for one in published.accuracies}
        result = _accuracy_result(claim, proportions, published.alpha)
        names = _names(claim)
        invalid += [words.impossible(accuracies[name]) for name in names if not accuracies[name].possible]
        notes += [words.count_note(accuracies[name]) for name in names if len(accuracies[name].correct) > 1]
        if published.run_scatter and isinstance(claim, AccuracyClaim) and claim.between_runs:
            p_run_to_run = run_to_run_p(claim, result.difference, published.run_scatter)
    return _Tested(claim, result, tuple(invalid), tuple(notes), p_run_to_run)


def _names(claim: AccuracyClaim | DifferencesClaim | RatioClaim) -> list[str]:
    pairs: Sequence[Pair | AccuracyClaim] = [claim] if isinstance(claim, AccuracyClaim) else [claim.first, claim.second]
    return list(dict.fromkeys(name for pair in pairs for name in (pair.treatment, pair.control)))


def _accuracy_result(
    claim: AccuracyClaim | DifferencesClaim | RatioClaim, proportions: Mapping[str, Proportion], alpha: float
) -> Result:
    if isinstance(claim, AccuracyClaim):
        return accuracies_result(claim, proportions[claim.treatment], proportions[claim.control], alpha)
    if isinstance(claim, DifferencesClaim):
        return differences_result(claim, proportions, alpha)
    return ratio_result(claim, proportions, alpha)


def _adjusted(tested: Sequence[_Tested]) -> dict[str, float]:
    valid = [one for one in tested if not one.invalid and one.result.p_value is not None]
    adjusted: dict[str, float] = {}
    for family in dict.fromkeys(one.claim.family for one in valid):
        members = [one for one in valid if one.claim.family == family]
        values = holm([float(one.result.p_value or 0.0) for one in members])
        adjusted |= {one.claim.id: p for one, p in zip(members, values, strict=True)}
    return adjusted


def _claim(tested: _Tested, p_holm: float | None, published: PublishedFile) -> CheckedClaim:
    claim, result = tested.claim, tested.result
    verdict = _verdict(tested, p_holm, published.alpha)
    sentence = joined([words.numbers(result, p_holm), *_reasons(tested, p_holm, verdict, published)])
    paired = isinstance(claim, AccuracyClaim) and claim.paired and claim.test == "superiority"
    return CheckedClaim(
        id=claim.id,
        claim=claim.claim,
        claim_zh=claim.claim_zh,
        kind=claim.kind,
        test=claim.test,
        treatment=result.treatment,
        control=result.control,
        unit=result.unit,
        margin=claim.margin,
        difference=result.difference,
        ci_low=result.ci_low,
        ci_high=result.ci_high,
        interval_level=interval_level_of(claim, published.alpha),
        p_value=result.p_value,
        p_holm=p_holm,
        p_run_to_run=tested.p_run_to_run,
        largest_discordance=largest_discordance(result, published.alpha) if paired else None,
        p_paired_low=result.p_paired_low,
        p_paired_high=result.p_paired_high,
        questions_needed=questions_per_side(claim, result, published.alpha, published.power),
        method=result.method,
        verdict=verdict,
        sentence=sentence.en,
        sentence_zh=sentence.zh,
        notes=tested.notes,
        differs=tuple(text for reported in claim.reported for text in _differs(reported, result)),
    )


def _verdict(tested: _Tested, p_holm: float | None, alpha: float) -> ClaimVerdict:
    claim, result = tested.claim, tested.result
    if tested.invalid:
        return "invalid"
    if p_holm is None or p_holm >= alpha:
        return "refuted" if _beyond_margin(claim, result) else "not_shown"
    if tested.p_run_to_run is not None and tested.p_run_to_run >= alpha:
        return "not_shown"
    if claim.margin is not None:
        return "supported"
    hypothesis = 1.0 if claim.kind == "ratio" else 0.0
    return "supported" if ("higher" if result.difference > hypothesis else "lower") == claim.expected else "refuted"


def _beyond_margin(claim: TestedClaim, result: Result) -> bool:
    """Whether the whole interval lies beyond the margin of a claim that has one."""
    if claim.margin is None or result.ci_low is None or result.ci_high is None:
        return False
    bound = claim.margin * result.scale
    return result.ci_high < -bound or (claim.test == "equivalence" and result.ci_low > bound)


def _reasons(tested: _Tested, p_holm: float | None, verdict: ClaimVerdict, published: PublishedFile) -> list[Text]:
    if tested.invalid:
        return [words.invalid(tested.invalid)]
    reasons = [words.CONCLUSIONS[verdict]]
    scatter = published.run_scatter
    if scatter is not None and tested.p_run_to_run is not None:
        reasons.append(words.run_to_run(scatter, tested.p_run_to_run))
    needed = questions_per_side(tested.claim, tested.result, published.alpha, published.power)
    if verdict == "not_shown" and needed is not None and p_holm is not None and p_holm >= published.alpha:
        reasons.append(words.questions_needed(needed, published.power))
    return reasons


def _differs(reported: ReportedNumbers, result: Result) -> list[str]:
    """Where an earlier report states other numbers than the ones found here."""
    checks = (
        ("difference", reported.difference, result.difference, _ROUNDING_UNITS),
        ("lower bound", reported.ci_low, result.ci_low, _ROUNDING_UNITS),
        ("upper bound", reported.ci_high, result.ci_high, _ROUNDING_UNITS),
        ("p", reported.p_value, result.p_value, 0.5),
    )
    return [
        f"{name}: {reported.by} states {printed}, here {words.plain(value)}"
        for name, printed, value, units in checks
        if printed is not None and (value is None or not agrees(value, printed, units))
    ]


def _series(one: PublishedSeries, accuracies: Sequence[PublishedAccuracy]) -> CheckedSeries:
    by_id = {accuracy.id: accuracy for accuracy in accuracies}
    members = [by_id[name] for name in one.accuracies]
    proportions = [_proportion(member) for member in members]
    counts = np.array([proportion.fraction * proportion.num_questions for proportion in proportions])
    numbers = np.array([proportion.num_questions for proportion in proportions])
    identical = len({proportion.fraction for proportion in proportions}) == 1
    constant = counts.sum() in (0, numbers.sum())
    return CheckedSeries(
        id=one.id,
        label=one.label,
        printed=tuple(member.percent for member in members),
        identical=identical,
        p_value=None if constant else float(proportions_chisquare(counts, numbers)[1]),
    )


def _detectable(one: Detectable, published: PublishedFile) -> CheckedDetectable:
    sizes = (one.num_questions, one.discordant_fraction, published.alpha, published.power)
    asymptotic, exact = minimum_detectable_difference(*sizes), exact_minimum_detectable_difference(*sizes)
    differs: tuple[str, ...] = ()
    if one.reported is not None and not agrees(100 * asymptotic, one.reported):
        differs = (
            f"reported {one.reported} points, here {100 * asymptotic:.2f} by the asymptotic formula "
            f"and {100 * exact:.2f} for the exact test",
        )
    return CheckedDetectable(
        num_questions=one.num_questions,
        discordant_fraction=one.discordant_fraction,
        asymptotic=asymptotic,
        exact=exact,
        differs=differs,
    )
