"""One look of a study that adds seeds: test the open claims on the seeds so far, and decide which of them end.

The p-value of a claim is adjusted for all looks (`statistics.group_sequential`), then by Holm's method over all claims
of its family, decided or not; the primary claim and each control are tested by themselves, with all of their error rate
spent over the looks. A claim with `equivalent_within` has two tests, of a difference and of equivalence. The two are
adjusted separately: a claim that ended as equivalent is still counted among the claims of a difference, because
it may be true that there is none, and the other way round.
"""

from collections.abc import Callable, Mapping, Sequence

from scipy import stats

from aqnpipe.artifacts.comparisons import ClaimAtLook, ClaimState, LookDesign, LookFile
from aqnpipe.artifacts.files import write_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.comparison.contrasts import Checkpoint, Contrasts
from aqnpipe.comparison.evaluations import EvaluationInput, LoadedEvaluation, load_evaluations
from aqnpipe.comparison.identity import comparison_ids
from aqnpipe.comparison.judgement import (
    Evidence,
    Tested,
    adjusted_tests,
    evidence_of,
    verdict_of,
)
from aqnpipe.comparison.look_states import look_file, planned_looks, seeds_after
from aqnpipe.config.analysis import Comparison
from aqnpipe.config.study import Study
from aqnpipe.statistics.group_sequential import Looks, look_adjusted_p, nominal_tails


def take_look(
    study: Study, design: LookDesign, earlier: Sequence[LookFile], evaluations: Sequence[EvaluationInput]
) -> LookFile:
    """Write and return the record of the look that follows the earlier ones.

    Raises DataError if a file is malformed.
    """
    alpha, scorer = study.config.statistics.alpha, study.config.evaluation.primary_scorer
    loaded = load_evaluations(evaluations, scorer, alpha, study.config.statistics.unit)
    number = len(earlier) + 1
    before = look_file(study.config.results_dir, number - 1)
    record = LookFile(
        look=number,
        seeds=planned_looks(design).seeds_at(number),
        seeds_per_arm=seeds_after(study, earlier),
        design=design,
        previous_sha256=sha256_of_file(before) if earlier else None,
        claims=claims_at(study, design, earlier, loaded),
    )
    write_json(look_file(study.config.results_dir, number), record)
    return record


def claims_at(
    study: Study,
    design: LookDesign,
    earlier: Sequence[LookFile],
    loaded: Mapping[Checkpoint, LoadedEvaluation],
) -> tuple[ClaimAtLook, ...]:
    """Return the claims after the look that follows the earlier ones, tested on the evaluations so far."""
    known = {claim.comparison_id: claim for claim in earlier[-1].claims} if earlier else {}
    looks, number = planned_looks(design), len(earlier) + 1
    seeds = looks.seeds_at(number)
    contrasts = Contrasts(study.with_seeds(seeds), loaded)
    claims: dict[str, ClaimAtLook] = {}
    found: dict[str, Evidence] = {}
    named = comparison_ids(study.comparisons())
    for name, comparison in named.items():
        if name in known and known[name].state != "open":
            claims[name] = known[name]
            continue
        contrast = contrasts.of(comparison, name)
        start = ClaimAtLook(comparison_id=name, state="open", look=number, seeds=seeds)
        if contrast.scores is None:
            reason = contrast.refusal.reason if contrast.refusal else None
            claims[name] = start.model_copy(update={"state": "invalid", "reason": reason})
            continue
        found[name] = evidence = evidence_of(contrast, contrast.scores.estimate())
        claims[name] = start.model_copy(update=_numbers(evidence, looks, number))
    return tuple(_with_states(claims, found, named, design, number).values())


def _numbers(evidence: Evidence, looks: Looks, number: int) -> dict[str, object]:
    claim = evidence.claim

    def adjusted(p_value: float, *, one_sided: bool) -> float:
        return look_adjusted_p(looks, number, p_value, one_sided=one_sided)

    other = evidence.p_other
    return {
        "difference": evidence.estimate.difference,
        "p_value": evidence.p_value,
        "p_looks": adjusted(evidence.p_value, one_sided=claim.margin is not None),
        "p_other": None if other is None else adjusted(other, one_sided=claim.test == "non_inferiority"),
    }


def _with_states(
    claims: Mapping[str, ClaimAtLook],
    found: Mapping[str, Evidence],
    named: Mapping[str, Comparison],
    design: LookDesign,
    number: int,
) -> dict[str, ClaimAtLook]:
    """Return the claims with p-values adjusted over their families, and with their states after this look.

    A claim that was decided keeps its p-values and its place in the families. One that cannot be tested keeps its place
    with a p-value of 1.
    """
    tests, others = adjusted_tests(
        named,
        {name: 1.0 if claim.p_looks is None else claim.p_looks for name, claim in claims.items()},
        {name: claim.p_other for name, claim in claims.items() if claim.p_other is not None},
        design.alpha,
    )
    return dict(claims) | {
        name: _after_look(claims[name], evidence, (tests[name], others.get(name)), design, number)
        for name, evidence in found.items()
    }


def _after_look(
    claim: ClaimAtLook,
    evidence: Evidence,
    tests: tuple[Tested, Tested | None],
    design: LookDesign,
    number: int,
) -> ClaimAtLook:
    looks = planned_looks(design)
    verdict, tail = verdict_of(evidence, *tests, design.alpha)
    at_look = nominal_tails(looks, tail, number)[-1]
    interval = evidence.estimate.columns(1 - 2 * at_look, evidence.contrast.bound)
    state: ClaimState = "open" if verdict == "not_shown" else verdict
    chance = _chance(evidence, tests, looks, number) if state == "open" and number < looks.num_planned else None
    return claim.model_copy(
        update={
            "state": "futile" if chance is not None and chance < design.futility else state,
            "chance": chance,
            "p_holm": tests[0].p_holm,
            "p_other_holm": None if tests[1] is None else tests[1].p_holm,
            "interval_level": 1 - 2 * tail,
            **interval,
        }
    )


def _chance(evidence: Evidence, tests: tuple[Tested, Tested | None], looks: Looks, number: int) -> float | None:
    """Return the predicted probability that the claim is decided at the planned maximum; None if nothing varies.

    The estimate at the maximum is normal about the present one with variance se^2 * (1 - t) at a share t of the seeds,
    if nothing was known about the difference before (predictive power: Spiegelhalter, Freedman & Blackburn 1986).
    """
    estimate, claim = evidence.estimate, evidence.claim
    if estimate.spread is None or not evidence.is_decidable:
        return None
    low, high = estimate.interval(2 * stats.norm.cdf(1.0) - 1)
    error, share = (high - low) / 2, looks.seeds_at(number) / looks.planned
    last_error, scale = error * share**0.5, error * (1 - share) ** 0.5

    def between(below: float, above: float) -> float:
        within = stats.norm.cdf((above - estimate.difference) / scale) - stats.norm.cdf(
            (below - estimate.difference) / scale
        )
        return max(float(within), 0.0)

    def critical(test: Tested) -> float:
        return last_error * float(stats.norm.isf(nominal_tails(looks, test.tail, looks.num_planned)[-1]))

    distances = critical(tests[0]), critical(tests[1] or tests[0])
    return min(probability_of_decision(claim.test, claim.margin, claim.equivalent_within, distances, between), 1.0)


def probability_of_decision(
    test: str,
    margin: float | None,
    equivalent_within: float | None,
    distances: tuple[float, float],
    between: Callable[[float, float], float],
) -> float:
    """Return the probability of all final estimates that decide a claim, given that of an estimate between two values.

    distances: those from a bound at which the claim's own test and its other test reject.
    """
    infinity = float("inf")
    distance, other = distances
    if margin is None:
        found = between(-infinity, -distance) + between(distance, infinity)
        if equivalent_within is not None and equivalent_within > other:
            edge = equivalent_within - other
            # Estimates that are both significant and inside count once.
            found += between(max(-edge, -distance), min(edge, distance))
        return found
    found = between(-infinity, -margin - other)
    if test == "non_inferiority":
        return found + between(-margin + distance, infinity)
    inside = between(-margin + distance, margin - distance) if distance < margin else 0.0
    return found + between(margin + other, infinity) + inside
