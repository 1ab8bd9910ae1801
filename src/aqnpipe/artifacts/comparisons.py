"""Artifacts of the compare stage: accuracies, comparisons, robustness over noise, and claims with their verdicts.

Of a study that adds seeds until its claims are decided, also its design and a record of every look; of one that
evaluates on several machines, the differences between them.
"""

from typing import Literal, Optional

import pandera.polars as pa
from pydantic import Field

from aqnpipe.artifacts.base import Artifact, Statement
from aqnpipe.artifacts.files import Table
from aqnpipe.config.analysis import ClaimRole

ClaimState = Literal["open", "supported", "refuted", "equivalent", "futile", "invalid"]
"""State of a claim after a look: `open` and `futile` are not decided; only `open` gets more seeds.

futile: unlikely to be decided by the planned maximum. invalid: the comparison cannot be made.
"""


class AccuracyTable(Table, unique=("model", "arm", "seed", "step", "noise_level")):
    """results/accuracy.parquet: one checkpoint at one noise level per row; fractions, over noise seeds and samples.

    `noise_level`: a relative scale below 1, or the number of a named noise, whose name is in `noise` (a column that
    only studies with named noises have). `accuracy`: of the study's primary scorer. `ci_low` and `ci_high`: its Wilson
    interval over the questions, for as many as have the same error with one answer each; without run-to-run variance.
    `truncated_fraction`: responses that were cut off at the token limit.
    `parse_failure_fraction`: those in which the primary scorer found no answer; `parse_failure_<scorer>`: the same for
    each scorer.
    """

    model: str
    arm: str
    seed: int = pa.Field(ge=0)
    step: int = pa.Field(ge=0)
    noise_level: float = pa.Field(ge=0)
    noise: Optional[str] = pa.Field(nullable=True)  # noqa: UP045 - pandera's form of a column that may be absent
    num_questions: int = pa.Field(ge=1)
    num_noise_seeds: int = pa.Field(ge=1)
    num_samples: int = pa.Field(ge=1)
    accuracy: float = pa.Field(ge=0, le=1)
    accuracy_strict: float = pa.Field(ge=0, le=1)
    accuracy_last_number: float = pa.Field(ge=0, le=1)
    accuracy_harness_strict: float = pa.Field(ge=0, le=1)
    accuracy_harness_flexible: float = pa.Field(ge=0, le=1)
    ci_low: float = pa.Field(ge=0, le=1)
    ci_high: float = pa.Field(ge=0, le=1)
    truncated_fraction: float = pa.Field(ge=0, le=1)
    parse_failure_fraction: float = pa.Field(ge=0, le=1)
    parse_failure_strict: float = pa.Field(ge=0, le=1)
    parse_failure_last_number: float = pa.Field(ge=0, le=1)
    parse_failure_harness_strict: float = pa.Field(ge=0, le=1)
    parse_failure_harness_flexible: float = pa.Field(ge=0, le=1)


class ComparisonTable(Table, unique=("comparison_id",)):
    """results/comparisons.parquet: one comparison per row; accuracies, differences and margins as fractions.

    kind: `arms` (treatment minus control at one level), `levels` (an arm at a level minus itself without noise) or
    `degradation` (what the level costs the treatment minus what it costs the control: above 0 the treatment loses less;
    `treatment_change` and `control_change` are the two costs). `test` decides what `p_value` is about: superiority is
    two-sided, non_inferiority and equivalence (TOST) are one-sided against `margin`. `p_looks`: the same, adjusted for
    the looks of a study that adds seeds; null with fixed seeds. `p_holm`: that one, adjusted over the valid secondary
    claims of the row's `family`; the primary claim and each control are tested by themselves, have no family, and
    `p_holm` is not larger. `p_equivalence`: of the test that the difference is smaller than `equivalent_within`.
    `p_beyond`: of the test that it lies beyond the margin. Both are adjusted for looks, and `p_equivalence_holm` and
    `p_beyond_holm` over the same tests of the family. `ci_low` and `ci_high` are the interval by which the verdict is
    decided: at confidence `interval_level` it excludes 0, or a margin, if and only if the verdict says so.
    `degrees_of_freedom` are those of the standard error, all its parts together (Satterthwaite). The minimum detectable
    difference (from 0, or from the margin) is at the study's power and the strictest level of the family (alpha divided
    by its size). `seeds_needed` and `questions_needed`: how many would decide the claim with the study's power if the
    true difference were the observed one; null where that does not apply or no number would be enough.
    `method`: the keys of what was computed, see `statistics.crossed_effects.Estimate.analysis`; the report's catalogue
    has the text of each.
    """

    comparison_id: str
    kind: str = pa.Field(isin=["arms", "levels", "degradation"])
    test: str = pa.Field(isin=["superiority", "non_inferiority", "equivalence"])
    role: str = pa.Field(isin=["primary", "secondary", "control"])
    family: str = pa.Field(nullable=True)
    margin: float = pa.Field(nullable=True)
    model: str
    treatment: str
    control: str
    treatment_level: float
    control_level: float
    num_seeds: int = pa.Field(ge=0)
    num_questions: int = pa.Field(ge=0)
    treatment_accuracy: float = pa.Field(nullable=True)
    control_accuracy: float = pa.Field(nullable=True)
    treatment_change: float = pa.Field(nullable=True)
    control_change: float = pa.Field(nullable=True)
    difference: float = pa.Field(nullable=True)
    interval_level: float = pa.Field(gt=0, lt=1)
    ci_low: float = pa.Field(nullable=True)
    ci_high: float = pa.Field(nullable=True)
    standard_error: float = pa.Field(nullable=True)
    degrees_of_freedom: float = pa.Field(nullable=True)
    p_value: float = pa.Field(nullable=True)
    p_looks: float = pa.Field(nullable=True)
    p_holm: float = pa.Field(nullable=True)
    p_equivalence: float = pa.Field(nullable=True)
    p_equivalence_holm: float = pa.Field(nullable=True)
    p_beyond: float = pa.Field(nullable=True)
    p_beyond_holm: float = pa.Field(nullable=True)
    minimum_detectable_difference: float = pa.Field(nullable=True)
    seeds_needed: int = pa.Field(nullable=True)
    questions_needed: int = pa.Field(nullable=True)
    method: str = pa.Field(str_matches="^(two_way .*|mcnemar|(questions|no_variance)( clusters)?|not_compared)$")
    verdict: str = pa.Field(isin=["supported", "refuted", "equivalent", "not_shown", "invalid"])


class RobustnessTable(Table, unique=("model", "arm")):
    """results/robustness.parquet: an arm over all noise levels after its last step, one row each; fractions.

    Descriptive: no part of a family, p-values unadjusted. `slope` is the change of accuracy per 0.1 of relative noise
    scale (a least-squares line through the levels), with an interval at 1 - alpha, over seeds and questions where there
    are several seeds. `problem`: why nothing was computed; null if something was.
    """

    model: str
    arm: str
    num_seeds: int = pa.Field(ge=0)
    num_questions: int = pa.Field(ge=0)
    num_levels: int = pa.Field(ge=0)
    highest_level: float = pa.Field(nullable=True)
    accuracy_lowest_level: float = pa.Field(nullable=True)
    accuracy_highest_level: float = pa.Field(nullable=True)
    slope: float = pa.Field(nullable=True)
    slope_ci_low: float = pa.Field(nullable=True)
    slope_ci_high: float = pa.Field(nullable=True)
    slope_p: float = pa.Field(nullable=True)
    problem: str = pa.Field(nullable=True)


class DifferenceTable(Table, unique=("model", "arm", "noise_level")):
    """results/differences.parquet: an arm minus the reference arm of its model at one noise level, after the last step.

    The reference is the first arm without noise, AQN or simulated machine, else the pretrained model. Descriptive: no
    part of a family. The interval is at 1 - alpha, by the analysis of the comparisons, which covers run-to-run variance
    where there are several seeds. `problem`: why nothing was computed; null if something was.
    """

    model: str
    arm: str
    reference: str
    noise_level: float = pa.Field(ge=0)
    num_seeds: int = pa.Field(ge=0)
    num_questions: int = pa.Field(ge=0)
    difference: float = pa.Field(nullable=True)
    ci_low: float = pa.Field(nullable=True)
    ci_high: float = pa.Field(nullable=True)
    problem: str = pa.Field(nullable=True)


ClaimVerdict = Literal["supported", "refuted", "equivalent", "not_shown", "invalid"]
"""equivalent: a claim of a difference ended with one that is smaller than its `equivalent_within`. not_shown: the data
do not decide. invalid: the comparison is not meaningful, or cannot be made.
"""


RefusalKind = Literal["missing", "model", "level", "noise_seeds", "questions", "receipt", "record", "setting"]
"""Why a comparison is invalid."""


class SeedComparison(Artifact):
    """The quantity of a claim in one seed: questions by the side that it favours, and its mean difference.

    Each question counts once, with its mean over noise seeds and samples; in a degradation it favours the side that
    lost less. `ci_low`/`ci_high` at 1 - alpha and `p_value` are of this pair of runs alone, over questions (McNemar's
    and Tango's score test for yes or no, else t).
    """

    seed: int
    treatment_better: int
    control_better: int
    equal: int
    difference: float
    ci_low: float
    ci_high: float
    p_value: float


class Claim(Artifact):
    """One claim with its verdict.

    `declared`: whether the study declares the comparison (else it is a default for its arms). `role`: `primary` answers
    the study's question, `control` is expected to hold in any working study. `claim_zh` is null where the study gives
    the claim in one language only. `statements`: what the comparison found, empty where it was refused;
    then `invalid_kind` and `invalid_reason`, which names files and keys, are set instead.
    """

    comparison_id: str
    claim: str
    claim_zh: str | None = None
    declared: bool = True
    role: ClaimRole = "secondary"
    verdict: ClaimVerdict
    statements: tuple[Statement, ...] = ()
    seeds: tuple[SeedComparison, ...]
    invalid_kind: RefusalKind | None = None
    invalid_reason: str | None = None


class Family(Artifact):
    """A family of secondary claims that share an error rate: `size` counts those that were tested."""

    name: str
    size: int


class AAControlRate(Artifact):
    """How often A/A comparisons (an A/A control against the arm that it repeats) were significant at `alpha`.

    `across_seeds`: the primary analysis, one test per A/A control and noise level. `single_runs`: McNemar's test of
    single pairs of runs, which does not cover run-to-run variance. `identical`: tests whose two sides have equal
    outcomes on every question, which no test can reject. Intervals: Clopper-Pearson at 1 - alpha. The tests share
    questions and runs, so the intervals are approximate.
    """

    kind: Literal["across_seeds", "single_runs"]
    alpha: float
    tests: int
    rejected: int
    identical: int
    ci_low: float
    ci_high: float


SegmentBy = Literal["kind", "steps"]


class SegmentEffect(Artifact):
    """The difference of a claim, in fractions, on the questions of one segment. Descriptive, no part of a family.

    `by`: `kind`, the cluster of the questions, such as the kind of problem; `steps`, the lines of the worked answer
    before `####`. The interval is over the segment's clusters, or over its questions where `num_clusters` is null, and
    over seeds where there are several, by the variance of the compared arms alone.
    """

    comparison_id: str
    by: SegmentBy
    segment: str
    num_questions: int
    num_clusters: int | None
    difference: float
    ci_low: float
    ci_high: float


class LookDesign(Artifact):
    """results/looks/design.json: what is fixed before the first look, because a change would void the error rates.

    `planned`: the maximum number of seeds when the study began; `start`, `step`, `futility` and `reserve` as in the
    study. `claims`: each claim as it is tested, by comparison id. `settings`: digests of what decides the outcomes, by
    name (`data`, and the arms with claims).
    """

    start: int
    step: int
    planned: int
    futility: float
    reserve: float
    alpha: float
    scorer: str
    claims: dict[str, str]
    settings: dict[str, str]


class ClaimAtLook(Artifact):
    """A claim at a look; fractions. Of a claim that ended at an earlier look, the values of that look.

    `look`, `seeds`: when the claim was tested. `p_value`: of that look alone. `p_looks`: adjusted for all looks;
    `p_holm`: that one adjusted by Holm's method over the family, the same for a claim that is tested by itself.
    `p_other`, `p_other_holm`: the same for the claim's other test, that the difference is smaller than
    `equivalent_within`, or beyond the margin. `ci_low`, `ci_high`: repeated confidence interval, which covers the true
    difference at all looks together with probability `interval_level` (Jennison & Turnbull 1989), that of the test that
    decides the state. `chance`: predicted probability that the claim is decided by the planned maximum.
    """

    comparison_id: str
    state: ClaimState
    look: int
    seeds: int
    difference: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    interval_level: float | None = None
    p_value: float | None = None
    p_looks: float | None = None
    p_holm: float | None = None
    p_other: float | None = None
    p_other_holm: float | None = None
    chance: float | None = None
    reason: str | None = None


class LookFile(Artifact):
    """results/looks/look<N>.json: the claims after a look. `seeds`: of the arms whose claims were open.

    `seeds_per_arm`: seeds of every arm at this look. `previous_sha256`: of the record of the look before; null for the
    first.
    """

    look: int
    seeds: int
    seeds_per_arm: dict[str, int]
    design: LookDesign
    previous_sha256: str | None
    claims: tuple[ClaimAtLook, ...]


class ClaimsFile(Artifact):
    """results/claims.json. `family_size`: tested secondary claims in all families together.

    `missing`: evaluations that the study requests and that do not exist, as `model/arm seed S step N`.
    `answer`: the sentence on the primary claim, or on one of the usual claims of checkpoints; null without one.
    `looks`: of a study that adds seeds, in order. `segments`: of the primary claim, else of the first.
    `tables_sha256`: digests of the tables written with this file, by file name.
    """

    alpha: float
    power: float
    family_size: int
    families: tuple[Family, ...]
    claims: tuple[Claim, ...]
    aa_control_rates: tuple[AAControlRate, ...] = ()
    missing: tuple[str, ...] = ()
    answer: Statement | None = None
    looks: tuple[LookFile, ...] = ()
    segments: tuple[SegmentEffect, ...] = ()
    tables_sha256: dict[str, str] = Field(default_factory=dict)


class MachineDifferenceTable(Table, unique=("machine", "model", "arm", "step", "noise_level")):
    """Accuracy on a machine of `evaluation.machines` minus that by the study itself, of the same weights.

    One row per machine, arm, step and noise level, over all training seeds. Descriptive: no part of a family.
    - accuracy_here, accuracy_there: by the study, and on the machine.
    - flipped: share of answers (question, training seed, noise seed) that are right on one of the two only, or, where
      several samples are drawn, whose share of right samples differs.
    - device_here, device_there, trained_on: as in the records of the jobs; trained_on is null without training.
    - differs_in: what else differs between the two evaluations: dtype, threads, batch size, faults, versions, engine.
    - problem: why nothing was computed; null if something was.
    """

    machine: str
    model: str
    arm: str
    step: int = pa.Field(ge=0)
    noise_level: float = pa.Field(ge=0)
    num_seeds: int = pa.Field(ge=0)
    num_questions: int = pa.Field(ge=0)
    accuracy_here: float = pa.Field(ge=0, le=1, nullable=True)
    accuracy_there: float = pa.Field(ge=0, le=1, nullable=True)
    difference: float = pa.Field(nullable=True)
    ci_low: float = pa.Field(nullable=True)
    ci_high: float = pa.Field(nullable=True)
    flipped: float = pa.Field(ge=0, le=1, nullable=True)
    method: str = pa.Field(nullable=True)
    device_here: str = pa.Field(nullable=True)
    device_there: str = pa.Field(nullable=True)
    trained_on: str = pa.Field(nullable=True)
    differs_in: str = pa.Field(nullable=True)
    problem: str = pa.Field(nullable=True)
