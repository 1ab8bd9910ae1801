"""The verdicts of a study that adds seeds: each claim with the numbers of the look at which it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from aqnpipe.artifacts.comparisons import ClaimVerdict
from aqnpipe.artifacts.looks import ClaimAtLook, ClaimState, LookFile
from aqnpipe.artifacts.statements import Statement, statement
from aqnpipe.comparison.contrasts import Checkpoint, Contrast, Contrasts
from aqnpipe.comparison.evaluations import LoadedEvaluation
from aqnpipe.comparison.identity import comparison_ids
from aqnpipe.comparison.judgement import Judgement
from aqnpipe.config.analysis import Comparison
from aqnpipe.config.study import Study

_VERDICTS: Mapping[ClaimState, ClaimVerdict] = {
    "open": "not_shown",
    "futile": "not_shown",
    "supported": "supported",
    "refuted": "refuted",
    "equivalent": "equivalent",
    "invalid": "invalid",
}


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
    of_seeds = {
        number: Contrasts(study.with_seeds(number), loaded)
        for number in sorted({claim.seeds for claim in claims.values()})
    }
    named = comparison_ids(study.comparisons())
    return [of_seeds[claim.seeds].of(named[name], name) for name, claim in claims.items()]


def judgement_at_look(judgement: Judgement, claim: ClaimAtLook) -> Judgement:
    """Return the judgement with verdict, interval and p-values of the last look, which are adjusted for all looks."""
    numbers = (claim.p_value, claim.p_looks, claim.p_holm, claim.ci_low, claim.ci_high, claim.interval_level)
    if any(number is None for number in numbers):
        return replace(judgement, verdict="not_shown", seeds_needed=None)
    p_value, p_looks, p_holm, low, high, level = (float(number or 0.0) for number in numbers)
    claimed = replace(judgement.claimed, p_value=p_looks, p_holm=p_holm)
    other = judgement.other
    if other is not None and claim.p_other is not None and claim.p_other_holm is not None:
        other = replace(other, p_value=claim.p_other, p_holm=claim.p_other_holm)
    return replace(
        judgement,
        verdict=_VERDICTS[claim.state],
        p_value=p_value,
        p_looks=p_looks,
        claimed=claimed,
        other=other,
        interval_level=level,
        ci_low=low,
        ci_high=high,
    )


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
