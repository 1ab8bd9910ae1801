"""A/A comparisons: how often the tests reject between a sham arm and the arm that it imitates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from statsmodels.stats.proportion import proportion_confint

from aqnpipe.artifacts.comparisons import AAControlRate
from aqnpipe.comparison.contrasts import Contrast, Contrasts
from aqnpipe.config.analysis import ArmComparison
from aqnpipe.config.study import Study
from aqnpipe.statistics.crossed_effects import estimate_difference


@dataclass(frozen=True)
class _Outcome:
    """One A/A test: its p-value, and whether both sides answered every question alike."""

    p_value: float
    identical: bool


_IDENTICAL = _Outcome(1.0, identical=True)


def aa_control_rates(study: Study, contrasts: Contrasts) -> tuple[AAControlRate, ...]:
    """Compare every sham arm of the study with its model at every noise level; empty where there is none.

    Equal weights on both sides, which other comparisons refuse, count as identical. Other refusals are left out.
    """
    found = [one for one in _sham_contrasts(study, contrasts) if one.refusal is None or one.refusal.kind == "model"]
    alpha = study.config.statistics.alpha
    across, single = [], []
    for one in found:
        if one.scores is None:
            across.append(_IDENTICAL)
            single += [_IDENTICAL] * len(study.config.seeds)
            continue
        if len(one.scores.seed_tables) > 1:
            estimate = estimate_difference(one.scores.treatment, one.scores.control, one.scores.seed_variance)
            across.append(_Outcome(estimate.two_sided_p(), estimate.spread is None and estimate.difference == 0))
        single += [
            _Outcome(table.mcnemar_p, table.only_treatment + table.only_control == 0)
            for table in one.scores.seed_tables
        ]
    rates = (_rate("across_seeds", across, alpha), _rate("single_runs", single, alpha))
    return tuple(rate for rate in rates if rate.tests)


def _sham_contrasts(study: Study, contrasts: Contrasts) -> list[Contrast]:
    pairs = [(name, arm.aa_control_of) for name, arm in study.arms.items() if arm.aa_control_of in study.arms]
    return [
        contrasts.of(
            ArmComparison(treatment=sham, control=str(real), noise_level=level, expected="higher", claim="A/A"), "A/A"
        )
        for sham, real in pairs
        for level in study.config.evaluation.noise_levels
    ]


def _rate(kind: Literal["across_seeds", "single_runs"], outcomes: Sequence[_Outcome], alpha: float) -> AAControlRate:
    rejected = sum(one.p_value < alpha for one in outcomes)
    low, high = proportion_confint(rejected, max(len(outcomes), 1), alpha=alpha, method="beta")
    return AAControlRate(
        kind=kind,
        alpha=alpha,
        tests=len(outcomes),
        rejected=rejected,
        identical=sum(one.identical for one in outcomes),
        ci_low=float(low),
        ci_high=float(high),
    )
