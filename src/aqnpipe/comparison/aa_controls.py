"""A/A comparisons: how often the tests reject between an A/A control and the arm that it repeats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from statsmodels.stats.proportion import proportion_confint

from aqnpipe.artifacts.comparisons import AAControlRate
from aqnpipe.comparison.contrasts import Contrast, Contrasts
from aqnpipe.config.analysis import ArmComparison
from aqnpipe.config.study import Study


@dataclass(frozen=True)
class _Outcome:
    """An A/A test: its p-value, and whether both sides have equal outcomes on every question."""

    p_value: float
    identical: bool


_IDENTICAL = _Outcome(1.0, identical=True)


def aa_control_rates(study: Study, contrasts: Contrasts) -> tuple[AAControlRate, ...]:
    """Compare every A/A control of the study with its arm at every noise level; empty if there is none.

    Equal weights on both sides, which other comparisons refuse, count as identical. Other refusals are left out.
    """
    found = [
        contrast
        for contrast in _aa_contrasts(study, contrasts)
        if contrast.refusal is None or contrast.refusal.kind == "model"
    ]
    alpha = study.config.statistics.alpha
    across, single = [], []
    for contrast in found:
        scores = contrast.scores
        if scores is None:
            across.append(_IDENTICAL)
            single += [_IDENTICAL] * len(study.seeds_of(contrast.treatment.arm))
            continue
        if len(scores.seeds) > 1:
            estimate = scores.estimate()
            across.append(_Outcome(estimate.two_sided_p(), estimate.spread is None and estimate.difference == 0))
        single += [
            _Outcome(table.p_value, table.treatment_better + table.control_better == 0)
            for table in scores.by_seed(1 - alpha)
        ]
    rates = (_rate("across_seeds", across, alpha), _rate("single_runs", single, alpha))
    return tuple(rate for rate in rates if rate.tests)


def _aa_contrasts(study: Study, contrasts: Contrasts) -> list[Contrast]:
    pairs = [(name, arm.aa_control_of) for name, arm in study.arms.items() if arm.aa_control_of in study.arms]
    return [
        contrasts.of(
            ArmComparison(
                treatment=aa_control, control=str(repeated), noise_level=level, expected="higher", claim="A/A"
            ),
            "A/A",
        )
        for aa_control, repeated in pairs
        for level in study.config.evaluation.noise_levels
    ]


def _rate(kind: Literal["across_seeds", "single_runs"], outcomes: Sequence[_Outcome], alpha: float) -> AAControlRate:
    rejected = sum(outcome.p_value < alpha for outcome in outcomes)
    low, high = proportion_confint(rejected, max(len(outcomes), 1), alpha=alpha, method="beta")
    return AAControlRate(
        kind=kind,
        alpha=alpha,
        tests=len(outcomes),
        rejected=rejected,
        identical=sum(outcome.identical for outcome in outcomes),
        ci_low=float(low),
        ci_high=float(high),
    )
