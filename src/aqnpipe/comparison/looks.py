"""One look of a study that adds seeds: test the open claims on the seeds so far, and decide which of them end.

The p-value of a claim is adjusted for all looks (`statistics.group_sequential`), then by Holm's method over all claims
of its family, decided or not. A claim with `equivalent_within` has two tests, of a difference and of equivalence; only
one of the two hypotheses can be true, and each is tested so that its error stays below the claim's level, so they share
the level without a correction.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from aqnpipe.artifacts.files import write_json
from aqnpipe.artifacts.looks import ClaimAtLook, ClaimState, LookDesign, LookFile
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.comparison.contrasts import Checkpoint, Contrast, Contrasts
from aqnpipe.comparison.evaluations import EvaluationInput, LoadedEvaluation, load_evaluations
from aqnpipe.comparison.identity import comparison_ids
from aqnpipe.comparison.judgement import beyond_margin_p, is_decidable, p_value_of, possible_interval
from aqnpipe.comparison.look_states import look_file, planned_looks, seeds_after
from aqnpipe.config.study import Study
from aqnpipe.statistics.crossed_effects import Estimate
from aqnpipe.statistics.group_sequential import Looks, look_adjusted_p, nominal_tails
from aqnpipe.statistics.multiple_testing import holm_within_families
from aqnpipe.statistics.resampling import Resampler

_DECIDED = ("supported", "refuted", "equivalent")


@dataclass(frozen=True)
class _Evidence:
    """An open claim at a look: its contrast, its estimate and its p-values adjusted for all looks."""

    contrast: Contrast
    estimate: Estimate
    p_looks: float
    p_equivalence: float | None
    p_beyond: float | None


def take_look(
    study: Study, design: LookDesign, earlier: Sequence[LookFile], evaluations: Sequence[EvaluationInput]
) -> LookFile:
    """Write and return the record of the look that follows the earlier ones.

    Raises DataError if a file is malformed.
    """
    alpha, scorer = study.config.statistics.alpha, study.config.evaluation.primary_scorer
    loaded = load_evaluations(evaluations, scorer, alpha)
    number = len(earlier) + 1
    path = look_file(study.config.results_dir, number)
    before = look_file(study.config.results_dir, number - 1)
    looks = planned_looks(design)
    record = LookFile(
        look=number,
        seeds=looks.seeds_at(number),
        seeds_per_arm=seeds_after(study, earlier),
        design=design,
        previous_sha256=sha256_of_file(before) if earlier else None,
        claims=_claims_at(study, design, earlier, loaded, looks, number),
    )
    write_json(path, record)
    return record


def _claims_at(
    study: Study,
    design: LookDesign,
    earlier: Sequence[LookFile],
    loaded: Mapping[Checkpoint, LoadedEvaluation],
    looks: Looks,
    number: int,
) -> tuple[ClaimAtLook, ...]:
    named = comparison_ids(study.comparisons())
    known = {claim.comparison_id: claim for claim in earlier[-1].claims} if earlier else {}
    seeds = looks.seeds_at(number)
    # No bootstrap here, so one resample is enough.
    contrasts = Contrasts(study.with_seeds(seeds), loaded, Resampler(study.config.statistics.seed, 1))
    claims: dict[str, ClaimAtLook] = {}
    found: dict[str, _Evidence] = {}
    for name, comparison in named.items():
        if name in known and known[name].state != "open":
            claims[name] = known[name]
            continue
        contrast = contrasts.of(comparison, name)
        start = ClaimAtLook(comparison_id=name, family=comparison.family, state="open", look=number, seeds=seeds)
        if contrast.scores is None:
            reason = contrast.refusal.reason if contrast.refusal else None
            claims[name] = start.model_copy(update={"state": "invalid", "reason": reason})
            continue
        found[name] = _evidence(contrast, contrast.scores.estimate(study.config.statistics.seed), looks, number)
        claims[name] = start.model_copy(update=_numbers(found[name], looks, number, design.alpha))
    return tuple(_with_states(claims, found, study, design, looks, number).values())


def _evidence(contrast: Contrast, estimate: Estimate, looks: Looks, number: int) -> _Evidence:
    claim = contrast.comparison

    def adjusted(p_value: float, *, one_sided: bool) -> float:
        return look_adjusted_p(looks, number, p_value, one_sided=one_sided)

    within = claim.equivalent_within
    inside = 2 * max(estimate.upper_p(-within), estimate.lower_p(within)) if within is not None else None
    beyond = beyond_margin_p(claim, estimate)
    return _Evidence(
        contrast=contrast,
        estimate=estimate,
        p_looks=adjusted(p_value_of(claim, estimate), one_sided=claim.margin is not None),
        p_equivalence=None if inside is None else adjusted(min(inside, 1.0), one_sided=False),
        p_beyond=None if beyond is None else adjusted(beyond, one_sided=claim.test != "equivalence"),
    )


def _numbers(evidence: _Evidence, looks: Looks, number: int, alpha: float) -> dict[str, object]:
    claim, estimate = evidence.contrast.comparison, evidence.estimate
    one_sided = claim.margin is not None
    tail = nominal_tails(looks, _tail(alpha, one_sided), number)[-1]
    low, high = possible_interval(claim, estimate, 1 - 2 * tail)
    return {
        "difference": estimate.difference,
        "ci_low": low,
        "ci_high": high,
        "p_value": p_value_of(claim, estimate),
        "level": tail if one_sided else 2 * tail,
        "p_looks": evidence.p_looks,
        "p_equivalence": evidence.p_equivalence,
    }


def _with_states(
    claims: Mapping[str, ClaimAtLook],
    found: Mapping[str, _Evidence],
    study: Study,
    design: LookDesign,
    looks: Looks,
    number: int,
) -> dict[str, ClaimAtLook]:
    """Return the claims with p-values adjusted over their families, and with their states after this look."""
    named = comparison_ids(study.comparisons())
    sizes = Counter(claim.family for claim in claims.values())
    adjusted = holm_within_families(
        [claim.family for claim in claims.values()], [_p(claim) for claim in claims.values()]
    )
    after: dict[str, ClaimAtLook] = {}
    for (name, claim), p_holm in zip(claims.items(), adjusted, strict=True):
        state = claim.state
        # A claim that stopped for futility may still be decided, when a decision on another claim raises its level.
        if state in ("open", "futile") and p_holm < design.alpha:
            state = _decided(claim, named[name].direction)
        evidence = found.get(name)
        if state == "open" and evidence is not None and evidence.p_beyond is not None:
            state = "refuted" if evidence.p_beyond < design.alpha / sizes[claim.family] else "open"
        kept = claim if claim.state in (*_DECIDED, "invalid") else claim.model_copy(update={"p_holm": p_holm})
        after[name] = kept.model_copy(update={"state": state})
    for name, evidence in found.items():
        if after[name].state == "open" and number < looks.num_planned:
            undecided = sum(
                claim.family == after[name].family and claim.state not in _DECIDED for claim in after.values()
            )
            chance = _chance(evidence, looks, number, design.alpha / undecided)
            if chance is not None:
                state = "futile" if chance < design.futility else "open"
                after[name] = after[name].model_copy(update={"chance": chance, "state": state})
    return after


def _p(claim: ClaimAtLook) -> float:
    """Return the p-value of a claim, adjusted for looks; 1 for one that cannot be tested, which keeps its place."""
    if claim.p_looks is None:
        return 1.0
    return claim.p_looks if claim.p_equivalence is None else min(claim.p_looks, claim.p_equivalence)


def _decided(claim: ClaimAtLook, direction: str | None) -> ClaimState:
    if claim.p_equivalence is not None and claim.p_looks is not None and claim.p_equivalence < claim.p_looks:
        return "equivalent"
    if direction is None:
        return "supported"
    found = "higher" if (claim.difference or 0.0) > 0 else "lower"
    return "supported" if direction in (found, "different") else "refuted"


def _chance(evidence: _Evidence, looks: Looks, number: int, level: float) -> float | None:
    """Return the predicted probability that the claim is decided at the planned maximum; None if nothing varies.

    The estimate at the maximum is normal about the present one with variance se^2 * (1 - t) at a share t of the seeds,
    if nothing was known about the difference before (predictive power: Spiegelhalter, Freedman & Blackburn 1986).
    """
    estimate, claim = evidence.estimate, evidence.contrast.comparison
    if estimate.spread is None or not is_decidable(evidence.contrast, estimate):
        return None
    low, high = estimate.interval(2 * stats.norm.cdf(1.0) - 1)
    error, share = (high - low) / 2, looks.seeds_at(number) / looks.planned
    last_error, scale = error * share**0.5, error * (1 - share) ** 0.5

    def between(below: float, above: float) -> float:
        within = stats.norm.cdf((above - estimate.difference) / scale) - stats.norm.cdf(
            (below - estimate.difference) / scale
        )
        return max(float(within), 0.0)

    def critical(one_sided: bool) -> float:
        return last_error * float(stats.norm.isf(nominal_tails(looks, _tail(level, one_sided), looks.num_planned)[-1]))

    return min(probability_of_decision(claim.test, claim.margin, claim.equivalent_within, critical, between), 1.0)


def _tail(level: float, one_sided: bool) -> float:
    return level if one_sided else level / 2


def probability_of_decision(
    test: str,
    margin: float | None,
    equivalent_within: float | None,
    critical: Callable[[bool], float],
    between: Callable[[float, float], float],
) -> float:
    """Return the probability of all final estimates that decide a claim, given that of an estimate between two values.

    critical: the distance from a bound at which a one-sided or a two-sided test rejects.
    """
    infinity = float("inf")
    if margin is None:
        distance = critical(False)
        found = between(-infinity, -distance) + between(distance, infinity)
        if equivalent_within is not None and equivalent_within > distance:
            edge = equivalent_within - distance
            # Estimates that are both significant and inside count once.
            found += between(max(-edge, -distance), min(edge, distance))
        return found
    distance = critical(True)
    found = between(-infinity, -margin - distance)
    if test == "non_inferiority":
        return found + between(-margin + distance, infinity)
    inside = between(-margin + distance, margin - distance) if distance < margin else 0.0
    return found + between(margin + distance, infinity) + inside
