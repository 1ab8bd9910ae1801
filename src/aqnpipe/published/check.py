"""Check published figures: is each possible, how precise is it, and which claims do they support?

Findings are statements for the report's catalogue of words.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from statsmodels.stats.proportion import proportion_confint, proportions_chisquare

from aqnpipe.artifacts.base import Artifact, Statement, statement
from aqnpipe.artifacts.comparisons import ClaimVerdict
from aqnpipe.artifacts.published import (
    CheckedAccuracy,
    CheckedClaim,
    CheckedDetectable,
    CheckedLoss,
    CheckedSeries,
    PublishedCheck,
)
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
from aqnpipe.config.yaml_file import load_yaml
from aqnpipe.published.summary_tests import (
    Proportion,
    Result,
    accuracies_result,
    confidence_of,
    differences_result,
    largest_discordance,
    losses_result,
    questions_per_side,
    run_to_run_p,
)
from aqnpipe.statistics.continuous import Summary, implied_correlation
from aqnpipe.statistics.grim import agrees, nearest_percentages, possible_counts, possible_sizes
from aqnpipe.statistics.multiple_testing import holm_within_families
from aqnpipe.statistics.paired import minimum_detectable_difference

_ROUNDING_UNITS = 1.0
"""Reported differences and intervals may be off by a unit of their last digit: they come from rounded figures."""


@dataclass(frozen=True)
class _Tested:
    """A claim with its result, the reasons why the comparison is not valid, and notes on its figures."""

    claim: PublishedClaim
    result: Result
    invalid: tuple[Statement, ...]
    notes: tuple[Statement, ...]
    p_run_to_run: float | None

    @property
    def p_values(self) -> tuple[float, float]:
        """p over questions, and the larger one over questions and runs: a claim about arms has to hold for both."""
        over_questions = float(self.result.p_value or 0.0)
        return over_questions, max(over_questions, self.p_run_to_run or 0.0)


@dataclass(frozen=True)
class _Adjusted:
    """p-values of a claim over its family, both kinds; and whether the difference lies beyond the claim's margin."""

    p_holm: float | None
    p_run_to_run_holm: float | None
    beyond_margin: bool


def check_published_file(path: Path) -> PublishedCheck:
    """Read a file of published figures and check it; ConfigError in one line if the file is broken."""
    return check_published_figures(load_yaml(path, PublishedFile))


def check_published_figures(published: PublishedFile) -> PublishedCheck:
    """Check printed figures; Holm adjusts within each family over the valid claims."""
    accuracies = {accuracy.id: _accuracy(accuracy, published.alpha) for accuracy in published.accuracies}
    losses = {loss.id: _loss(loss) for loss in published.losses}
    tested = [_tested(claim, published, accuracies, losses) for claim in published.claims]
    valid = [test for test in tested if not test.invalid and test.result.p_value is not None]
    families = [test.claim.family for test in valid]
    sizes = Counter(families)
    kinds = (holm_within_families(families, [test.p_values[kind] for test in valid]) for kind in (0, 1))
    adjusted = {test.claim.id: p_values for test, *p_values in zip(valid, *kinds, strict=True)}
    claims = []
    for test in tested:
        p_holm, p_runs = adjusted.get(test.claim.id, (None, None))
        beyond = _beyond_margin(test.claim, published, max(sizes[test.claim.family], 1))
        found = _Adjusted(p_holm, None if test.p_run_to_run is None else p_runs, beyond)
        claims.append(_claim(test, found, published))
    return PublishedCheck(
        **{name: getattr(published, name) for name in ("title", "source", "alpha", "power")},
        family_size=len(valid),
        run_sd_points=published.run_scatter.points if published.run_scatter else None,
        run_sd_runs=published.run_scatter.num_runs if published.run_scatter else None,
        accuracies=tuple(accuracies.values()),
        losses=tuple(losses.values()),
        claims=tuple(claims),
        series=tuple(_series(series, published.accuracies) for series in published.series),
        detectable=tuple(_detectable(size, published) for size in published.detectable),
    )


def _accuracy(accuracy: PublishedAccuracy, alpha: float) -> CheckedAccuracy:
    counts = possible_counts(accuracy.percent, accuracy.num_questions)
    proportion = _proportion(accuracy)
    low, high = proportion_confint(
        proportion.fraction * accuracy.num_questions, accuracy.num_questions, alpha=alpha, method="wilson"
    )
    return CheckedAccuracy(
        **_shared(CheckedAccuracy, accuracy),
        printed=accuracy.percent,
        possible=bool(counts),
        correct=counts,
        nearest=nearest_percentages(accuracy.percent, accuracy.num_questions) if not counts else (),
        possible_sizes=possible_sizes(accuracy.percent) if not counts else (),
        ci_low=float(low),
        ci_high=float(high),
    )


def _proportion(accuracy: PublishedAccuracy) -> Proportion:
    """Return the fraction behind a printed percentage: k/n if a single k prints so, else as printed."""
    counts = possible_counts(accuracy.percent, accuracy.num_questions)
    fraction = counts[0] / accuracy.num_questions if len(counts) == 1 else float(accuracy.percent) / 100
    return Proportion(fraction, accuracy.num_questions)


def _loss(loss: PublishedLoss) -> CheckedLoss:
    uniform = float(np.log(loss.vocabulary_size)) if loss.vocabulary_size else None
    above = uniform is not None and loss.mean > uniform
    return CheckedLoss(**_shared(CheckedLoss, loss), uniform=uniform, above_uniform=above)


def _tested(
    claim: PublishedClaim,
    published: PublishedFile,
    accuracies: Mapping[str, CheckedAccuracy],
    losses: Mapping[str, CheckedLoss],
) -> _Tested:
    other = [statement("reason.other_difference", what="; ".join(claim.differs_in))] if claim.differs_in else []
    result, scatter, p_run_to_run = _result(claim, published, published.alpha), published.run_scatter, None
    if isinstance(claim, LossClaim):
        sides = [(name, losses[name]) for name in (claim.treatment, claim.control)]
        reasons = [
            statement("reason.above_uniform", name=name, loss=loss.mean, uniform=loss.uniform)
            for name, loss in sides
            if loss.above_uniform and loss.uniform is not None
        ]
        return _Tested(
            claim, result, (*other, *reasons), tuple(_loss_notes(claim, *_summaries(claim, published))), None
        )
    figures = [accuracies[name] for name in _names(claim)]
    if scatter and isinstance(claim, AccuracyClaim) and claim.between_runs:
        p_run_to_run = run_to_run_p(claim, result.difference, scatter)
    notes = tuple(
        statement("note.ambiguous_count", name=figure.id, first=figure.correct[0], last=figure.correct[-1])
        for figure in figures
        if len(figure.correct) > 1
    )
    impossible = [_impossible(figure) for figure in figures if not figure.possible]
    return _Tested(claim, result, (*other, *impossible), notes, p_run_to_run)


def _summaries(claim: LossClaim, published: PublishedFile) -> tuple[Summary, Summary]:
    summaries = {loss.id: Summary(loss.mean, loss.std, loss.num_runs, loss.ddof) for loss in published.losses}
    return summaries[claim.treatment], summaries[claim.control]


def _result(claim: PublishedClaim, published: PublishedFile, alpha: float) -> Result:
    if isinstance(claim, LossClaim):
        runs = {loss.id: np.array(loss.values) for loss in published.losses}
        treatment, control = runs[claim.treatment], runs[claim.control]
        values = (treatment, control) if len(treatment) == len(control) > 0 else None
        return losses_result(claim, *_summaries(claim, published), alpha, values)
    proportions = {accuracy.id: _proportion(accuracy) for accuracy in published.accuracies}
    if isinstance(claim, AccuracyClaim):
        return accuracies_result(claim, proportions[claim.treatment], proportions[claim.control], alpha)
    return differences_result(claim, proportions, alpha)


def _names(claim: AccuracyClaim | DifferencesClaim | RatioClaim) -> list[str]:
    pairs: Sequence[Pair | AccuracyClaim] = [claim] if isinstance(claim, AccuracyClaim) else [claim.first, claim.second]
    return list(dict.fromkeys(name for pair in pairs for name in (pair.treatment, pair.control)))


def _claim(tested: _Tested, adjusted: _Adjusted, published: PublishedFile) -> CheckedClaim:
    claim, result, alpha = tested.claim, tested.result, published.alpha
    verdict, confidence = _verdict(tested, adjusted, alpha), confidence_of(claim, alpha)
    paired = isinstance(claim, AccuracyClaim) and claim.paired and claim.test == "superiority"
    return CheckedClaim(
        **_shared(CheckedClaim, tested, adjusted, claim, result),
        interval_level=confidence,
        largest_discordance=largest_discordance(result, alpha) if paired else None,
        questions_needed=questions_per_side(claim, result, alpha, published.power),
        verdict=verdict,
        statements=(
            _numbers(result, confidence, adjusted.p_holm),
            *_conclusion(tested, adjusted, verdict, published),
        ),
        deviations=tuple(deviation for reported in claim.reported for deviation in _deviations(reported, result)),
    )


def _shared(model: type[Artifact], *sources: object) -> dict[str, Any]:
    """Return the fields of an artifact that are those of its sources, of the last one that has them."""
    return {name: vars(source)[name] for source in sources for name in model.model_fields if name in vars(source)}


def _verdict(tested: _Tested, adjusted: _Adjusted, alpha: float) -> ClaimVerdict:
    claim, result, p_runs = tested.claim, tested.result, adjusted.p_run_to_run_holm
    if tested.invalid:
        return "invalid"
    if adjusted.p_holm is None or adjusted.p_holm >= alpha:
        return "refuted" if adjusted.beyond_margin else "not_shown"
    if p_runs is not None and p_runs >= alpha:
        return "not_shown"
    hypothesis = 1.0 if claim.kind == "ratio" else 0.0
    found = "higher" if result.difference > hypothesis else "lower"
    return "supported" if claim.margin is not None or found == claim.expected else "refuted"


def _beyond_margin(claim: PublishedClaim, published: PublishedFile, family_size: int) -> bool:
    """Return whether the interval at the family's strictest level lies beyond the margin of a claim that has one."""
    if claim.margin is None:
        return False
    result = _result(claim, published, published.alpha / family_size)
    if result.ci_low is None or result.ci_high is None:
        return False
    bound = claim.margin * result.scale
    return result.ci_high < -bound or (claim.test == "equivalence" and result.ci_low > bound)


def _conclusion(
    tested: _Tested, adjusted: _Adjusted, verdict: ClaimVerdict, published: PublishedFile
) -> Iterator[Statement]:
    if tested.invalid:
        yield statement("evidence.invalid", reasons=tested.invalid)
        return
    yield statement(f"conclusion.{verdict}")
    claim, scatter, p_runs = tested.claim, published.run_scatter, adjusted.p_run_to_run_holm
    if scatter is not None and tested.p_run_to_run is not None and p_runs is not None:
        # The second p decides: it is adjusted over the family, of the larger one over questions and over runs.
        p, runs = tested.p_run_to_run, scatter.num_runs
        yield statement("evidence.run_to_run", points=scatter.points, runs=runs, p=p, p_holm=p_runs)
    elif claim.between_runs if isinstance(claim, AccuracyClaim) else not isinstance(claim, LossClaim):
        # A claim about training runs, tested over questions only, as if identical runs did not differ.
        yield statement("evidence.equal_runs")
    needed = questions_per_side(claim, tested.result, published.alpha, published.power)
    is_open = adjusted.p_holm is not None and adjusted.p_holm >= published.alpha
    if verdict == "not_shown" and needed is not None and is_open:
        yield statement("evidence.questions_needed", questions=needed, power=published.power)


def _series(series: PublishedSeries, accuracies: Sequence[PublishedAccuracy]) -> CheckedSeries:
    by_id = {accuracy.id: accuracy for accuracy in accuracies}
    members = [by_id[name] for name in series.accuracies]
    proportions = [_proportion(member) for member in members]
    counts = np.array([proportion.fraction * proportion.num_questions for proportion in proportions])
    numbers = np.array([proportion.num_questions for proportion in proportions])
    identical = len({proportion.fraction for proportion in proportions}) == 1
    constant = counts.sum() in (0, numbers.sum())
    return CheckedSeries(
        id=series.id,
        label=series.label,
        printed=tuple(member.percent for member in members),
        identical=identical,
        p_value=None if constant else float(proportions_chisquare(counts, numbers)[1]),
    )


def _detectable(size: Detectable, published: PublishedFile) -> CheckedDetectable:
    sizes = (size.num_questions, size.discordant_fraction, published.alpha, published.power)
    asymptotic = minimum_detectable_difference(*sizes)
    deviations: tuple[Statement, ...] = ()
    if size.reported is not None and not agrees(100 * asymptotic, size.reported):
        deviations = (statement("deviation.detectable", printed=size.reported, asymptotic=asymptotic),)
    return CheckedDetectable(
        num_questions=size.num_questions,
        discordant_fraction=size.discordant_fraction,
        asymptotic=asymptotic,
        deviations=deviations,
    )


def _numbers(result: Result, level: float, p_holm: float | None) -> Statement:
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


def _impossible(accuracy: CheckedAccuracy) -> Statement:
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


def _loss_notes(claim: LossClaim, treatment: Summary, control: Summary) -> Iterator[Statement]:
    """Yield what each reported p-value implies about a paired t-test."""
    for reported in claim.reported if treatment.num == control.num else ():
        p, source = reported.p_value, reported.by
        if p is None:
            continue
        correlation = implied_correlation(treatment, control, float(p))
        yield (
            statement("note.no_paired_test", p=p)
            if correlation is None
            else statement("note.paired_test", p=p, source=source, correlation=correlation)
        )


def _deviations(reported: ReportedNumbers, result: Result) -> Iterator[Statement]:
    """Yield the statements on figures in `reported` that differ from the result by more than rounding."""
    source = reported.by
    for name in ("difference", "ci_low", "ci_high", "p_value"):
        printed, value = getattr(reported, name), getattr(result, name)
        quantity, units = statement(f"quantity.{name}"), 0.5 if name == "p_value" else _ROUNDING_UNITS
        if printed is None or (value is not None and agrees(value, printed, units)):
            continue
        yield (
            statement("deviation.not_computable", quantity=quantity, source=source, printed=printed)
            if value is None
            else statement("deviation.number", quantity=quantity, source=source, printed=printed, value=value)
        )
