"""Judge a claim: p-value, interval and verdict of an estimate, by the test that the comparison declares."""

from dataclasses import dataclass

from aqnpipe.artifacts.comparisons import ClaimVerdict
from aqnpipe.comparison.contrasts import Contrast
from aqnpipe.config.analysis import Comparison, StatisticsConfig, TestedClaim
from aqnpipe.statistics.crossed_effects import Estimate, VarianceParts, questions_needed, seeds_needed
from aqnpipe.statistics.multiple_testing import interval_level
from aqnpipe.statistics.spread import Spread

EFFECTS = (0.01, 0.02, 0.05)
"""True differences, as fractions, for which the number of seeds is given."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on a tested comparison with its numbers, the last ones as in `artifacts.ComparisonTable`.

    `seeds_for`: seeds that find each of EFFECTS; None where no number would; empty where more seeds are no answer.
    """

    p_value: float
    p_holm: float
    interval_level: float
    ci_low: float
    ci_high: float
    verdict: ClaimVerdict
    minimum_detectable: float | None
    seeds_needed: int | None
    questions_needed: int | None
    seeds_for: tuple[int | None, ...] = ()


def p_value_of(claim: TestedClaim, estimate: Estimate) -> float:
    """Return the p-value of the test that the claim declares; a small p is evidence for the claim or its opposite.

    superiority: two-sided against 0. non_inferiority: one-sided against -margin. equivalence: two one-sided tests
    (Schuirmann 1987), the larger p.
    """
    margin = claim.margin
    if margin is None:
        return estimate.two_sided_p()
    if claim.test == "non_inferiority":
        return estimate.upper_p(-margin)
    return max(estimate.upper_p(-margin), estimate.lower_p(margin))


def beyond_margin_p(claim: TestedClaim, estimate: Estimate) -> float | None:
    """Return the p-value of the test that the difference lies beyond the margin; None for a claim without one.

    non_inferiority: one-sided, below -margin. equivalence: two-sided, on either side.
    """
    if claim.margin is None:
        return None
    below = estimate.lower_p(-claim.margin)
    return below if claim.test == "non_inferiority" else min(1.0, 2 * min(below, estimate.upper_p(claim.margin)))


def possible_interval(claim: Comparison, estimate: Estimate, level: float) -> tuple[float, float]:
    """Return the interval of an estimate at confidence `level`, within the values that a difference can have."""
    low, high = estimate.interval(level)
    bound = 2.0 if claim.kind == "degradation" else 1.0
    return max(low, -bound), min(high, bound)


def needs_several_seeds(contrast: Contrast) -> bool:
    """Whether the claim is about arms, which a single run cannot support. Others are about given weights."""
    return not contrast.of_weights and contrast.treatment.arm != contrast.control.arm


def is_decidable(contrast: Contrast, estimate: Estimate) -> bool:
    """Whether the data can support or refute the claim at all."""
    return estimate.covers_seed_variance or not needs_several_seeds(contrast)


def judge(
    contrast: Contrast,
    estimate: Estimate,
    parts: VarianceParts,
    p_holm: float,
    family_size: int,
    settings: StatisticsConfig,
) -> Judgement:
    """Return the verdict and the numbers behind it; the family's strictest level is alpha / family_size."""
    claim = contrast.comparison
    strictest = settings.alpha / family_size
    tail = strictest / 2 if claim.test == "superiority" else strictest
    level = interval_level(settings.alpha, one_sided=claim.margin is not None)
    low, high = possible_interval(claim, estimate, level)
    distance = _distance(claim, estimate.difference)
    sizes = (tail, settings.power)
    can_extrapolate = estimate.spread is not None and is_decidable(contrast, estimate)
    more_seeds = can_extrapolate and estimate.num_seeds > 1
    return Judgement(
        p_value=p_value_of(claim, estimate),
        p_holm=p_holm,
        interval_level=level,
        ci_low=low,
        ci_high=high,
        verdict=verdict_of(contrast, estimate, p_holm, settings.alpha, strictest),
        minimum_detectable=_minimum_detectable(estimate.spread, *sizes),
        seeds_needed=seeds_needed(parts, estimate.num_questions, distance, *sizes) if more_seeds else None,
        questions_needed=questions_needed(parts, estimate.num_seeds, distance, *sizes) if can_extrapolate else None,
        seeds_for=tuple(seeds_needed(parts, estimate.num_questions, effect, *sizes) for effect in EFFECTS)
        if more_seeds and claim.margin is None
        else (),
    )


def _minimum_detectable(spread: Spread | None, tail: float, power: float) -> float | None:
    """Return the smallest true distance that is found with `power`; `spread` is an estimate from this data."""
    return None if spread is None else spread.minimum_detectable(tail, power) / spread.standard_error_bias


def verdict_of(contrast: Contrast, estimate: Estimate, p_holm: float, alpha: float, strictest: float) -> ClaimVerdict:
    """Return supported or refuted where the adjusted p is below alpha and the data can decide the claim.

    A claim with a margin is refuted where the difference lies beyond the margin at the family's `strictest` level.
    """
    claim = contrast.comparison
    if not is_decidable(contrast, estimate):
        return "not_shown"
    beyond = beyond_margin_p(claim, estimate)
    if beyond is None:
        if p_holm >= alpha:
            return "not_shown"
        found = "higher" if estimate.difference > 0 else "lower"
        return "supported" if claim.direction in (found, "different") else "refuted"
    if p_holm < alpha:
        return "supported"
    return "refuted" if beyond < strictest else "not_shown"


def _distance(claim: TestedClaim, difference: float) -> float:
    """Distance of the observed difference from the hypothesis, positive on the claim's side."""
    if claim.margin is None:
        return {"higher": difference, "lower": -difference}.get(str(claim.direction), abs(difference))
    return difference + claim.margin if claim.test == "non_inferiority" else claim.margin - abs(difference)
