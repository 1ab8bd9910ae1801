"""Judge a claim: p-value, interval and verdict of an estimate, by the test that the comparison declares."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from aqnpipe.artifacts.comparisons import ClaimVerdict
from aqnpipe.comparison.contrasts import Contrast
from aqnpipe.comparison.identity import error_families
from aqnpipe.config.analysis import Comparison, StatisticsConfig, TestedClaim
from aqnpipe.statistics.crossed_effects import Estimate
from aqnpipe.statistics.multiple_testing import adjusted_within_families, claim_p, distance_inside
from aqnpipe.statistics.sample_sizes import VarianceParts, expected_spread, questions_needed, seeds_needed

EFFECTS = (0.01, 0.02, 0.05)
"""True differences, as fractions, for which the number of seeds is given."""


@dataclass(frozen=True)
class Evidence:
    """A claim with its estimate and the p-values of its own and of its other test, before any adjustment."""

    contrast: Contrast
    estimate: Estimate
    p_value: float = 1.0
    p_other: float | None = None

    @property
    def claim(self) -> Comparison:
        """The comparison that states the claim."""
        return self.contrast.comparison

    @property
    def is_decidable(self) -> bool:
        """Return whether the data can support or refute the claim: a single run cannot where it is about arms.

        Other claims are about given weights.
        """
        is_of_arms = not self.contrast.of_weights and self.contrast.treatment.arm != self.contrast.control.arm
        return self.estimate.covers_seed_variance or not is_of_arms


@dataclass(frozen=True)
class Tested:
    """A hypothesis of a claim that was tested.

    `p_value`: of the test itself, in a study that adds seeds adjusted for its looks. `p_holm`: adjusted over the
    family. `tail`: the one-sided level at which Holm's method made the test; `p_holm` is below alpha if and only if the
    interval at confidence 1 - 2*tail says so.
    """

    p_value: float
    p_holm: float
    tail: float


@dataclass(frozen=True)
class Judgement:
    """The verdict on a tested comparison with its numbers, the last ones as in `artifacts.ComparisonTable`.

    `p_value`: of the claim's own test, unadjusted; it and the interval are None for a claim that the data cannot decide
    whatever they are, as of two arms with one run each. `claimed`: that test. `other`: the test of equivalence of a
    claim of a difference, or of a difference beyond the margin. `seeds_for`: seeds that find each of EFFECTS; None
    where no number would; empty where more seeds are no answer, or not needed.
    """

    p_value: float | None
    claimed: Tested
    other: Tested | None
    interval_level: float
    ci_low: float | None
    ci_high: float | None
    verdict: ClaimVerdict
    minimum_detectable_difference: float | None
    seeds_needed: int | None
    questions_needed: int | None
    p_looks: float | None = None
    seeds_for: tuple[int | None, ...] = ()


def evidence_of(contrast: Contrast, estimate: Estimate) -> Evidence:
    """Return a claim with its estimate and p-values; those of a claim that the data cannot decide are 1."""
    found, claim = Evidence(contrast, estimate), contrast.comparison
    other = _other_p_value(claim, estimate)
    if not found.is_decidable:
        return replace(found, p_other=None if other is None else 1.0)
    p = claim_p((claim.test, claim.margin), estimate.two_sided_p, estimate.upper_p, estimate.lower_p)
    return replace(found, p_value=p, p_other=other)


def _other_p_value(claim: TestedClaim, estimate: Estimate) -> float | None:
    """Return the p-value of a claim's other test: of a difference within `equivalent_within`, or beyond the margin.

    The former is two one-sided tests. The latter is one-sided for non_inferiority, below -margin, and two-sided for
    equivalence. None for a claim without either bound.
    """
    within, margin = claim.equivalent_within, claim.margin
    if within is not None:
        return min(1.0, 2 * max(estimate.upper_p(-within), estimate.lower_p(within)))
    if margin is None:
        return None
    below = estimate.lower_p(-margin)
    return below if claim.test == "non_inferiority" else min(1.0, 2 * min(below, estimate.upper_p(margin)))


def adjusted_tests(
    claims: Mapping[str, Comparison], p_values: Mapping[str, float], others: Mapping[str, float], alpha: float
) -> tuple[dict[str, Tested], dict[str, Tested]]:
    """Return the claims' own tests and their other tests, each adjusted by Holm's method over the claims' families.

    The two kinds of test are adjusted separately: a claim that was found equivalent says nothing on whether other
    claims of a difference are true, so it must not relax their level.
    """
    families = error_families(claims)
    found = []
    for values, is_one_sided in ((p_values, _is_one_sided), (others, _is_other_one_sided)):
        adjusted = adjusted_within_families([families[name] for name in values], list(values.values()), alpha)
        named = zip(values.items(), adjusted, strict=True)
        found.append(
            {
                name: Tested(p, p_holm, level if is_one_sided(claims[name]) else level / 2)
                for (name, p), (p_holm, level) in named
            }
        )
    return found[0], found[1]


def _is_one_sided(claim: TestedClaim) -> bool:
    return claim.margin is not None


def _is_other_one_sided(claim: TestedClaim) -> bool:
    return claim.test == "non_inferiority"


def judge(
    evidence: Evidence,
    parts: VarianceParts,
    tests: tuple[Tested, Tested | None],
    family_size: int,
    settings: StatisticsConfig,
) -> Judgement:
    """Return the verdict and the numbers behind it; the family's strictest level is alpha / family_size."""
    claim, estimate, can_be_decided = evidence.claim, evidence.estimate, evidence.is_decidable
    strictest = settings.alpha / family_size
    verdict, tail = verdict_of(evidence, *tests, settings.alpha)
    interval = estimate.columns(1 - 2 * tail, evidence.contrast.bound) if can_be_decided else {}
    distance, is_one_sided = _distance(claim, estimate.difference)
    deciding = (strictest if is_one_sided else strictest / 2, settings.power)
    sizes = (strictest if _is_one_sided(claim) else strictest / 2, settings.power)
    can_extrapolate = estimate.spread is not None and can_be_decided
    more_seeds = can_extrapolate and estimate.num_seeds > 1
    return Judgement(
        p_value=evidence.p_value if can_be_decided else None,
        claimed=tests[0],
        other=tests[1],
        interval_level=1 - 2 * tail,
        ci_low=interval.get("ci_low"),
        ci_high=interval.get("ci_high"),
        verdict=verdict,
        minimum_detectable_difference=_minimum_detectable(parts, estimate, *sizes) if can_be_decided else None,
        seeds_needed=seeds_needed(parts, estimate.num_units, distance, *deciding) if more_seeds else None,
        questions_needed=estimate.questions_of(questions_needed(parts, estimate.num_seeds, distance, *deciding))
        if can_extrapolate
        else None,
        seeds_for=tuple(seeds_needed(parts, estimate.num_units, effect, *sizes) for effect in EFFECTS)
        if more_seeds and claim.margin is None and verdict == "not_shown"
        else (),
    )


def _minimum_detectable(parts: VarianceParts, estimate: Estimate, tail: float, power: float) -> float | None:
    """Return the smallest true distance that is found with `power`, by the variances that a typical study estimates."""
    spread = expected_spread(parts, estimate.num_seeds, estimate.num_units, tail, power)
    return None if spread is None or estimate.spread is None else spread.minimum_detectable(tail, power)


def verdict_of(evidence: Evidence, claimed: Tested, other: Tested | None, alpha: float) -> tuple[ClaimVerdict, float]:
    """Return the verdict and the one-sided level of the interval that says the same.

    The interval of a verdict is that of the test behind it; where nothing is shown, the wider one of both tests.
    """
    claim = evidence.claim
    widest = claimed.tail if other is None else min(claimed.tail, other.tail)
    if not evidence.is_decidable:
        return "not_shown", widest
    if other is not None and other.p_holm < min(alpha, claimed.p_holm):
        return ("refuted" if claim.equivalent_within is None else "equivalent"), other.tail
    if claimed.p_holm >= alpha:
        return "not_shown", widest
    found = "higher" if evidence.estimate.difference > 0 else "lower"
    is_as_claimed = claim.margin is not None or claim.direction in (found, "different")
    return ("supported" if is_as_claimed else "refuted"), claimed.tail


def _distance(claim: TestedClaim, difference: float) -> tuple[float, bool]:
    """Return how far the observed difference is from the bound of the test that it may pass, and if that is one-sided.

    On either side of the bound the claim is decided: it is supported, or refuted.
    """
    inside = distance_inside((claim.test, claim.margin), difference)
    return abs(inside), claim.margin is not None and (inside > 0 or _is_other_one_sided(claim))
