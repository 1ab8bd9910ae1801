"""From an estimate to p-value, interval and verdict, by the test that the comparison declares."""

from collections.abc import Sequence
from dataclasses import dataclass

from statsmodels.stats.multitest import multipletests

from aqnpipe.artifacts.comparisons import ClaimVerdict
from aqnpipe.comparison.contrasts import Contrast
from aqnpipe.config.analysis import StatisticsConfig, TestedClaim
from aqnpipe.statistics.crossed_effects import Estimate, Method, VarianceParts, questions_needed, seeds_needed

METHODS: dict[Method, str] = {
    "two_way": "paired differences, seeds and questions as crossed random effects, "
    "the seed_variance of training pooled over arms, Cochran and Cox's t",
    "mcnemar": "one run: exact McNemar (Tango's score test against a margin), Newcombe's interval; "
    "the seed_variance of training is not covered",
    "questions": "one run: t over questions, noise seeds averaged; the seed_variance of training is not covered",
    "no_variance": "no difference varies: exact McNemar and Newcombe's interval over the questions",
}


@dataclass(frozen=True)
class Judgement:
    """A tested comparison; the last three as in `artifacts.ComparisonTable`."""

    p_value: float
    p_holm: float
    interval_level: float
    ci_low: float
    ci_high: float
    verdict: ClaimVerdict
    minimum_detectable: float | None
    seeds_needed: int | None
    questions_needed: int | None


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm-adjusted p-values in the given order."""
    if not p_values:
        return []
    return [float(p) for p in multipletests(p_values, method="holm")[1]]


def p_value_of(claim: TestedClaim, estimate: Estimate) -> float:
    """Return the p-value of the test that the claim declares; small p speaks for a finding.

    superiority: two-sided against 0. non_inferiority: one-sided against -margin. equivalence: two one-sided tests
    (Schuirmann 1987), the larger p.
    """
    margin = claim.margin
    if margin is None:
        return estimate.two_sided_p()
    if claim.test == "non_inferiority":
        return estimate.upper_p(-margin)
    return max(estimate.upper_p(-margin), estimate.lower_p(margin))


def interval_level_of(claim: TestedClaim, alpha: float) -> float:
    """Return the confidence of the interval that decides like the test at `alpha`."""
    return 1 - alpha if claim.test == "superiority" else 1 - 2 * alpha


def needs_several_seeds(contrast: Contrast) -> bool:
    """Whether the claim is about arms, which a single run cannot carry; a level claim is about given weights."""
    return contrast.treatment.arm != contrast.control.arm


def can_carry(contrast: Contrast, estimate: Estimate) -> bool:
    """Whether the data can carry the claim at all."""
    return estimate.covers_seed_variance or not needs_several_seeds(contrast)


def judge(
    contrast: Contrast,
    estimate: Estimate,
    parts: VarianceParts,
    p_holm: float,
    family_size: int,
    settings: StatisticsConfig,
) -> Judgement:
    """Return the verdict with what it rests on; the family's strictest level is alpha / family_size."""
    claim = contrast.comparison
    strictest = settings.alpha / family_size
    tail = strictest / 2 if claim.test == "superiority" else strictest
    level = interval_level_of(claim, settings.alpha)
    low, high = estimate.interval(level)
    bound = 2.0 if claim.kind == "degradation" else 1.0
    distance = _distance(claim, estimate.difference)
    sizes = (tail, settings.power)
    several = estimate.num_seeds > 1
    counted = estimate.spread is not None and can_carry(contrast, estimate)
    return Judgement(
        p_value=p_value_of(claim, estimate),
        p_holm=p_holm,
        interval_level=level,
        ci_low=max(low, -bound),
        ci_high=min(high, bound),
        verdict=verdict_of(contrast, estimate, p_holm, settings.alpha, strictest),
        minimum_detectable=estimate.spread.minimum_detectable(*sizes) if estimate.spread else None,
        seeds_needed=seeds_needed(parts, estimate.num_questions, distance, *sizes) if counted and several else None,
        questions_needed=questions_needed(parts, estimate.num_seeds, distance, *sizes) if counted else None,
    )


def verdict_of(contrast: Contrast, estimate: Estimate, p_holm: float, alpha: float, strictest: float) -> ClaimVerdict:
    """Return supported or refuted where the adjusted p is below alpha and the data can carry the claim.

    A claim with a margin is refuted where the difference lies beyond the margin at the family's `strictest` level.
    """
    claim = contrast.comparison
    if not can_carry(contrast, estimate):
        return "not_shown"
    if claim.margin is None:
        if p_holm >= alpha:
            return "not_shown"
        return "supported" if ("higher" if estimate.difference > 0 else "lower") == claim.direction else "refuted"
    if p_holm < alpha:
        return "supported"
    beyond = estimate.lower_p(-claim.margin)
    if claim.test == "equivalence":
        beyond = min(1.0, 2 * min(beyond, estimate.upper_p(claim.margin)))
    return "refuted" if beyond < strictest else "not_shown"


def _distance(claim: TestedClaim, difference: float) -> float:
    """How far the observed difference lies from the hypothesis, on the claim's side of it."""
    if claim.margin is None:
        return abs(difference)
    return difference + claim.margin if claim.test == "non_inferiority" else claim.margin - abs(difference)
