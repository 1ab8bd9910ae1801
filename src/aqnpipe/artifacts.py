"""What the stages hand each other: table schemas, JSON models, and writes that never leave half a file."""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import pandera.polars as pa
import polars as pl
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aqnpipe.config.base import describe_validation_error
from aqnpipe.errors import DataError
from aqnpipe.seal import UNSEALED, read_sealed, sealed
from aqnpipe.study_lock import FOLDERS

_JSON_END = "\n}"
_JSON_SEAL = ',\n  "seal": "'

Model = TypeVar("Model", bound=BaseModel)

STAGED = ".staged"
"""End of the names of hidden folders in which artifacts are written; a killed job leaves its own behind."""


class Artifact(BaseModel):
    """Base of JSON artifacts: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ProblemTable(pa.DataFrameModel):
    """results/data/<split>.parquet: one question per row."""

    question_id: str = pa.Field(unique=True)
    question: str
    answer: str
    gold_answer: str

    class Config:
        """Columns as declared, in this order, nothing else."""

        strict = True


class LayerTable(pa.DataFrameModel):
    """results/srdd/<model>/<machine>/layers.parquet: one decoder layer per row, each layer run alone.

    instability: mean over prompts of std(out_i - out_0), absolute. gain: std(output change)/std(input noise).
    kurtosis: Fisher kurtosis of the flattened output. z columns are robust z-scores (null where undefined).
    changed_share: share of values that differ between repeats, among channels where any does (0 if none).
    zero_share: share of values that are exactly 0. values_at_maximum: values per call that are exactly as large as the
    largest (1 is healthy). pile_up: -log10 of the chance that so many values inside the range are exactly equal, after
    correction for looking everywhere. role: source is a layer proven to clamp, sat_prop a layer downstream with lowered
    kurtosis.
    """

    layer: int = pa.Field(ge=0, unique=True)
    instability: float = pa.Field(ge=0)
    instability_jump_z: float = pa.Field(nullable=True)
    gain: float = pa.Field(ge=0)
    gain_z: float
    kurtosis: float
    log_kurtosis_drop_z: float = pa.Field(nullable=True)
    changed_share: float = pa.Field(ge=0, le=1)
    zero_share: float = pa.Field(ge=0, le=1)
    values_at_maximum: float = pa.Field(ge=1)
    pile_up: float = pa.Field(ge=0)
    role: str = pa.Field(isin=["healthy", "source", "sat_prop"])

    class Config:
        """Columns as declared, nothing else."""

        strict = True


class Finding(Artifact):
    """One statistical scan's opinion: which layer, and how far beyond its threshold.

    ambient, gain and kurtosis are the published scans, kurtosis_rise the other direction of the last; repeat, zeros,
    clamp and pile_up count traces that healthy layers next to never leave.
    """

    scan: Literal["ambient", "gain", "kurtosis", "kurtosis_rise", "repeat", "zeros", "clamp", "pile_up"]
    layer: int
    type: Literal["noise_or_spike", "noise", "spike", "dead_zone", "saturation", "bias_or_spike"]
    z: float


class LocatedFault(Artifact):
    """One fault that was found: where, what, on which lanes, how strong, and which probes saw it."""

    layer: int = Field(ge=0)
    site: str = Field(description="site of config.noise.FaultSite, attention_core or mlp_core; layer if not resolved")
    type: Literal["dead_zone", "saturation", "noise", "bias", "spike", "gain", "stuck", "other"]
    lanes: int | None = Field(ge=1, description="number of faulty output channels; null where the method cannot tell")
    lane_indices: tuple[int, ...]
    num_channels: int | None
    magnitude: float | None = Field(description="m as in noise/faults.py, relative to the reference of its type")
    magnitude_low: float | None = Field(description="the magnitude lies between low and high")
    magnitude_high: float | None
    threshold: Literal["dynamic", "cached"] | None = Field(description="whether the reference follows each call")
    probes: tuple[str, ...]
    evidence: str


class DiagnosisOrigin(Artifact):
    """What a verdict is of: names in the study, digests of the model's weights and of the layers.parquet beside it."""

    model: str
    machine: str
    weights_sha256: str
    layers_sha256: str


class Verdict(Artifact):
    """results/srdd/<model>/<machine>/verdict.json: what the diagnosis found.

    `layer`, `type`, `site` and `lanes` are those of the first of `faults`. Exact probes decide where they ran. A fault
    that strikes by chance with `intermittent_rate` per element escapes with `miss_probability`; permanent ones do not.
    `false_alarm_bound` is the upper 95 % bound of the share of healthy machines called faulty, from the benchmark.
    """

    verdict: Literal["healthy", "fault", "abstain"]
    reason: str
    layer: int | None
    type: str | None
    site: str | None = None
    lanes: int | None = None
    faults: tuple[LocatedFault, ...] = ()
    findings: tuple[Finding, ...]
    method: Literal["exact", "statistical", "all"] = "statistical"
    tolerance: dict[str, float] = Field(
        default={}, description="bound on relative deviation per probe and site; those not named are held to bits"
    )
    uncovered_sites: tuple[str, ...] = Field(default=(), description="places that no exact probe could be built for")
    elements_per_lane: int | None = Field(default=None, description="values seen on every lane of every probed site")
    intermittent_rate: float | None = None
    miss_probability: float | None = None
    false_alarm_bound: float | None = None
    forward_equivalents: float = Field(ge=0, description="cost in whole-model forwards")
    exact_forward_equivalents: float = 0.0
    statistical_forward_equivalents: float = 0.0
    num_layers: int
    simulated_faults: tuple[dict[str, object], ...] = Field(
        default=(), description="the faults of the machine with their measured reach, for judging the verdict"
    )
    origin: DiagnosisOrigin | None = Field(default=None, description="null outside a study")


class LayerMetrics(Artifact):
    """What was measured on one layer: counts of the exact probes, and a row of LayerTable where the scans ran."""

    layer: int = Field(ge=0)
    sites_probed: int = Field(default=0, ge=0)
    values_probed: int = Field(default=0, ge=0)
    values_per_lane: int = Field(default=0, ge=0)
    faulty_sites: tuple[str, ...] = ()
    largest_deviation: float | None = None
    scans: dict[str, float | str | None] | None = None


class DiagnosisFile(Verdict):
    """What `aqnpipe diagnose --json` writes: a verdict, what it is of, and the metrics of every layer."""

    model: str
    device: str
    dtype: str
    seconds: float = Field(ge=0)
    layers: tuple[LayerMetrics, ...]


class AqnSection(Artifact):
    """The `aqn` part of sigmas.yaml (keys as published)."""

    enabled: bool
    layer_specific: bool
    base_sigma: float = Field(gt=0)
    layer_sigmas: dict[int, float]
    schedule: str
    high_priority_layers: list[int]


class SigmaFile(Artifact):
    """results/srdd/<model>/<machine>/sigmas.yaml: per-layer sigma, why, and from which diagnosis."""

    aqn: AqnSection
    reasons: dict[int, str]
    srdd_metadata: dict[str, int | float | str]


class TrainingMetrics(pa.DataFrameModel):
    """metrics.parquet of a run: one optimiser step per row. No wall times: the table is reproducible byte for byte.

    `logp_difference_*`, `sampler_kl`: between the policy that rolled out and the one that learns, of drawn tokens, in
    the first step after the rollout; `importance_ratio_mean` only for arms with importance sampling.
    """

    step: int = pa.Field(ge=1, unique=True)
    epoch: float
    reward_mean: float = pa.Field(ge=0, le=1)
    reward_std: float
    kl: float = pa.Field(nullable=True)
    entropy: float
    loss: float
    grad_norm: float
    clip_fraction: float
    response_tokens_mean: float
    truncated_fraction: float = pa.Field(ge=0, le=1)
    logp_difference_mean: float = pa.Field(ge=0)
    logp_difference_max: float = pa.Field(ge=0)
    sampler_kl: float = pa.Field(ge=0)
    importance_ratio_mean: float = pa.Field(ge=0, nullable=True)
    sigma_asked: float = pa.Field(ge=0)
    sigma_measured: float = pa.Field(ge=0)
    validation_accuracy: float = pa.Field(nullable=True)

    class Config:
        """Columns as declared, nothing else."""

        strict = True


class EvaluationTable(pa.DataFrameModel):
    """results/eval/.../step<N>.parquet: a row per question, noise level, noise seed and sample.

    `sample`: number of the response among those drawn for the question, 0 in greedy evaluations. `answer_<scorer>`:
    what the scorer of `aqnpipe.scoring` found, null if it found no answer.
    """

    question_id: str
    noise_level: float = pa.Field(ge=0, lt=1)
    noise_seed: int = pa.Field(ge=0)
    sample: int = pa.Field(ge=0)
    response: str
    answer_strict: str = pa.Field(nullable=True)
    answer_last_number: str = pa.Field(nullable=True)
    answer_harness_strict: str = pa.Field(nullable=True)
    answer_harness_flexible: str = pa.Field(nullable=True)
    correct_strict: bool
    correct_last_number: bool
    correct_harness_strict: bool
    correct_harness_flexible: bool
    response_tokens: int = pa.Field(ge=0)
    finish_reason: str = pa.Field(isin=["stop", "length"])

    class Config:
        """Columns as declared, one row per question, pass and sample."""

        strict = True
        unique = ["question_id", "noise_level", "noise_seed", "sample"]  # noqa: RUF012 - pandera's own form


class FaultLossTable(pa.DataFrameModel):
    """results/fault_loss/<model>/<name>.parquet: the loss of one text in one pass per row, in nats per token.

    `loss`: mean cross entropy of the gold solution's tokens given the question; `text_loss`: of all tokens but the
    first. `magnitude`: of the machine's faults, 0 without. `order`: null unless a faulty layer has noise.
    `survival_rate`: share of the elements at the faulty sites that pass the faults unchanged.
    """

    question_id: str
    condition: str
    magnitude: float = pa.Field(ge=0, le=1)
    order: str = pa.Field(nullable=True, isin=["after_noise", "before_noise", "around_noise"])
    noise_seed: int = pa.Field(ge=0)
    loss: float = pa.Field(ge=0)
    text_loss: float = pa.Field(ge=0)
    scored_tokens: int = pa.Field(ge=1)
    text_tokens: int = pa.Field(ge=1)
    survival_rate: float = pa.Field(ge=0, le=1)

    class Config:
        """Columns as declared, one row per text and pass."""

        strict = True
        unique = ["question_id", "condition", "magnitude", "order", "noise_seed"]  # noqa: RUF012 - pandera's own form


class AccuracyTable(pa.DataFrameModel):
    """results/accuracy.parquet: one checkpoint at one noise level per row; fractions, over noise seeds and samples.

    `accuracy`: of the study's primary scorer. `ci_low` and `ci_high`: its Wilson interval over the questions, without
    the luck of training. `truncated_fraction`: responses that were cut off at the limit of tokens.
    `parse_failure_fraction`: those in which the primary scorer found no answer; `parse_failure_<scorer>`: each scorer.
    """

    model: str
    arm: str
    seed: int = pa.Field(ge=0)
    step: int = pa.Field(ge=0)
    noise_level: float = pa.Field(ge=0, lt=1)
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

    class Config:
        """Columns as declared, one row per checkpoint and level."""

        strict = True
        unique = ["model", "arm", "seed", "step", "noise_level"]  # noqa: RUF012 - pandera's own form


class ComparisonTable(pa.DataFrameModel):
    """results/comparisons.parquet: one comparison per row; accuracies, differences and margins as fractions.

    kind: `arms` (treatment minus control at one level), `levels` (an arm at a level minus itself without noise) or
    `degradation` (what the level costs the treatment minus what it costs the control: above 0 the treatment loses less;
    `treatment_change` and `control_change` are the two costs). `test` decides what `p_value` is about: superiority is
    two-sided, non_inferiority and equivalence (TOST) are one-sided against `margin`. `interval_level` is the confidence
    of all intervals of the row: 1 - alpha for superiority, 1 - 2*alpha for the one-sided tests, so that before Holm the
    interval and the p-value decide alike. `p_holm` is adjusted over the valid comparisons of the row's `family`.
    `degrees_of_freedom` are those of the luck of training, pooled over arms (of the questions for a single run).
    Beside the primary analysis: `bootstrap_low`/`bootstrap_high` (seeds and questions resampled), `p_seed_t` (paired t
    over seed means) and `p_permutation` (signs of seeds flipped), the last two always two-sided against 0 and null with
    a single seed. The minimum detectable difference (from 0, or from the margin) is at the study's power and the
    strictest level of the family (alpha divided by its size). `seeds_needed` and `questions_needed`: how many would
    show a difference as large as the observed one; null where that does not apply or no number would do.
    """

    comparison_id: str = pa.Field(unique=True)
    kind: str = pa.Field(isin=["arms", "levels", "degradation"])
    test: str = pa.Field(isin=["superiority", "non_inferiority", "equivalence"])
    family: str
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
    bootstrap_low: float = pa.Field(nullable=True)
    bootstrap_high: float = pa.Field(nullable=True)
    standard_error: float = pa.Field(nullable=True)
    degrees_of_freedom: float = pa.Field(nullable=True)
    p_value: float = pa.Field(nullable=True)
    p_holm: float = pa.Field(nullable=True)
    p_seed_t: float = pa.Field(nullable=True)
    p_permutation: float = pa.Field(nullable=True)
    minimum_detectable_difference: float = pa.Field(nullable=True)
    seeds_needed: int = pa.Field(nullable=True)
    questions_needed: int = pa.Field(nullable=True)
    method: str
    verdict: str = pa.Field(isin=["supported", "refuted", "not_shown", "invalid"])

    class Config:
        """Columns as declared, nothing else."""

        strict = True


class RobustnessTable(pa.DataFrameModel):
    """results/robustness.parquet: an arm over all noise levels after its last step, one row each; fractions.

    Descriptive: no part of a family, p-values unadjusted. Seeds and noise seeds are averaged within questions and
    questions are the clusters. `joint_p` asks whether accuracy is the same at all levels (`joint_method` names the
    test: Hotelling's T2 over the differences from the lowest level, F with `joint_df1` and `joint_df2`). `slope` is the
    change of accuracy per 0.1 of relative noise scale (a least-squares line through the levels), with interval at
    1 - alpha, over seeds and questions where there are several seeds. `cochran_q_p`: Cochran's Q, where one pass per
    level makes outcomes yes or no; else null. `problem`: why nothing was computed; null where all is well.
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
    joint_method: str
    joint_f: float = pa.Field(nullable=True)
    joint_df1: float = pa.Field(nullable=True)
    joint_df2: float = pa.Field(nullable=True)
    joint_p: float = pa.Field(nullable=True)
    cochran_q_p: float = pa.Field(nullable=True)
    problem: str = pa.Field(nullable=True)

    class Config:
        """Columns as declared, one row per arm."""

        strict = True
        unique = ["model", "arm"]  # noqa: RUF012 - pandera's own form


ClaimVerdict = Literal["supported", "refuted", "not_shown", "invalid"]
"""not_shown: the data do not decide. invalid: the comparison must not be made, or cannot."""

RefusalKind = Literal[
    "missing", "model", "level", "noise_seeds", "questions", "receipt", "record", "setting", "identical_outputs"
]
"""Why a comparison is invalid."""


class SeedComparison(Artifact):
    """The paired 2x2 table of one seed: question counts by (treatment correct, control correct).

    Of the first sample and at noisy levels of the first noise seed alone, so that each question counts once.
    `ci_low`/`ci_high`: Newcombe's method 10; `bootstrap_low`/`bootstrap_high`: percentile interval, questions
    resampled; both at 1 - alpha.
    """

    seed: int
    noise_seed: int
    both_correct: int
    only_treatment: int
    only_control: int
    neither: int
    difference: float
    ci_low: float
    ci_high: float
    bootstrap_low: float
    bootstrap_high: float
    mcnemar_p: float


class Claim(Artifact):
    """One claim with its verdict; the sentences are generated from the numbers, never typed.

    `declared`: whether the study declares the comparison (else it is a default for its arms). `claim_zh` is null where
    the study gives the claim in one language only. `sentence` is English, `sentence_zh` says the same in Chinese.
    """

    comparison_id: str
    claim: str
    claim_zh: str | None = None
    declared: bool = True
    verdict: ClaimVerdict
    sentence: str
    sentence_zh: str
    seeds: tuple[SeedComparison, ...]
    invalid_kind: RefusalKind | None = None
    invalid_reason: str | None = None


class Family(Artifact):
    """A family of comparisons that share an error rate: `size` counts those that were tested."""

    name: str
    size: int


class ShamRate(Artifact):
    """How often A/A comparisons (a sham arm against the arm that it imitates) came out significant at `alpha`.

    `across_seeds`: the primary analysis, one test per sham arm and noise level. `single_runs`: exact McNemar of single
    pairs of runs, which does not cover the luck of training. `identical`: tests whose two sides answered every
    question alike, which no test can reject. Intervals: Clopper-Pearson at 1 - alpha. The tests share questions and
    runs, so the intervals are approximate.
    """

    kind: Literal["across_seeds", "single_runs"]
    alpha: float
    tests: int
    rejected: int
    identical: int
    ci_low: float
    ci_high: float


class ClaimsFile(Artifact):
    """results/claims.json. `family_size`: tested comparisons in all families together.

    `missing`: evaluations that the study asks for and that were not there, as `model/arm seed S step N`.
    `tables_sha256`: the tables written with it, by file name.
    """

    alpha: float
    power: float
    family_size: int
    families: tuple[Family, ...]
    claims: tuple[Claim, ...]
    sham_rates: tuple[ShamRate, ...] = ()
    missing: tuple[str, ...] = ()
    tables_sha256: dict[str, str] = {}


class FaultLossCondition(Artifact):
    """One condition of a loss study at one magnitude and order; losses in nats per token, means over texts and seeds.

    `mean_loss`: over the tokens of gold solutions, `mean_text_loss`: over all tokens but the first. `seed_sd`: standard
    deviation of the mean between noise seeds. The shares of the gradient are those that the faulty sites set to zero,
    of its elements and of its norm (null: no fault, or not followed).
    """

    condition: str
    magnitude: float
    order: str | None
    noised_layers: tuple[int, ...]
    mean_loss: float
    seed_sd: float | None
    mean_text_loss: float
    survival_rate: float | None
    gradient_zeroed_share: float | None
    gradient_zeroed_norm_share: float | None
    above_uniform: bool


class FaultLossComparison(Artifact):
    """Two conditions of a loss study, texts and noise seeds paired; differences in nats, treatment minus control.

    The claim of families `noise` and `place` is a lower loss, that of `harm` a higher one. `p_value` and the interval
    at 1 - alpha treat texts and noise seeds as crossed random effects; `p_holm` is adjusted over the family (null: not
    tested, because a side is worse than guessing). `p_seed_t`: paired t-test over the means of noise seeds alone, which
    holds for these very texts only.
    """

    comparison_id: str
    family: Literal["harm", "noise", "place"]
    magnitude: float
    order: str | None
    treatment: str
    control: str
    num_seeds: int
    num_texts: int
    difference: float
    ci_low: float
    ci_high: float
    p_value: float
    p_holm: float | None
    p_seed_t: float | None
    claim: str
    claim_zh: str
    verdict: ClaimVerdict
    sentence: str
    sentence_zh: str


class FaultLossFile(Artifact):
    """results/fault_loss/<model>/<name>.claims.json: what a loss study shows. `uniform` is ln|V|."""

    name: str
    model: str
    gamma: float
    num_layers: int
    faulty_layers: tuple[int, ...]
    num_texts: int
    uniform: float
    alpha: float
    families: tuple[Family, ...]
    conditions: tuple[FaultLossCondition, ...]
    comparisons: tuple[FaultLossComparison, ...]


class AuditedAccuracy(Artifact):
    """A reported accuracy: is it possible at all, and how sure is it? Fractions; `printed` is percent as printed.

    `arm`, `noise_level` and `step` tie it to a study's arm (null where it has none). `correct`: numbers of right
    answers that print as reported (empty: impossible). `nearest`: the percentages next to it that are possible.
    `possible_sizes`: numbers of questions that would make an impossible accuracy possible, the smallest one and those
    in common use. Interval: Wilson at 1 - alpha.
    """

    id: str
    label: str
    arm: str | None
    noise_level: float | None
    step: int | None
    printed: str
    num_questions: int
    possible: bool
    correct: tuple[int, ...]
    nearest: tuple[float, ...]
    possible_sizes: tuple[int, ...]
    ci_low: float
    ci_high: float


class AuditedLoss(Artifact):
    """A reported loss in nats per token; `uniform` is ln|V|, the loss of guessing uniformly (null: |V| unknown)."""

    id: str
    label: str
    arm: str | None
    mean: float
    std: float
    ddof: int
    num_runs: int
    uniform: float | None
    above_uniform: bool


class AuditedClaim(Artifact):
    """A claim of the audited paper. Differences in `unit`: points (percent), nats, or ratio.

    `p_run_luck`: t-test of the difference against the standard deviation between identical runs (null where the file
    states none, or the claim is not about arms); a claim about arms has to pass it too. `largest_discordance`: the
    share of questions with different outcomes below which a paired test would have been significant (null where the
    outcomes were not paired or it would not have been at any share). `p_paired_low`/`p_paired_high`: the range of a
    paired t-test over all correlations between the sides, for losses. `differs`: where an earlier re-analysis or the
    paper states other numbers.
    """

    id: str
    claim: str
    claim_zh: str | None
    kind: Literal["accuracies", "losses", "differences", "ratio"]
    test: Literal["superiority", "non_inferiority", "equivalence"]
    treatment: str
    control: str
    unit: Literal["points", "nats", "ratio"]
    margin: float | None
    difference: float
    ci_low: float | None
    ci_high: float | None
    interval_level: float
    p_value: float | None
    p_holm: float | None
    p_run_luck: float | None
    largest_discordance: float | None
    p_paired_low: float | None
    p_paired_high: float | None
    questions_needed: int | None
    method: str
    verdict: ClaimVerdict
    sentence: str
    sentence_zh: str
    notes: tuple[str, ...]
    differs: tuple[str, ...]


class AuditedSeries(Artifact):
    """Reported accuracies of one checkpoint over noise levels; equal ones at every level are a red flag.

    `p_value`: chi-squared test of equal accuracies, as if every level had its own questions.
    """

    id: str
    label: str
    printed: tuple[str, ...]
    identical: bool
    p_value: float | None


class AuditedDetectable(Artifact):
    """Smallest true paired difference (fraction) that McNemar's test finds at `num_questions`."""

    num_questions: int
    discordant_fraction: float
    asymptotic: float
    exact: float | None
    differs: tuple[str, ...]


class AuditFile(Artifact):
    """results/audit.json: what a paper's printed figures support, see `aqnpipe audit`."""

    title: str
    source: str
    alpha: float
    power: float
    family_size: int
    run_sd_points: float | None
    run_sd_runs: int | None
    accuracies: tuple[AuditedAccuracy, ...]
    losses: tuple[AuditedLoss, ...]
    claims: tuple[AuditedClaim, ...]
    series: tuple[AuditedSeries, ...]
    detectable: tuple[AuditedDetectable, ...]


class RunRecord(Artifact):
    """run.json: what produced a training run or evaluation."""

    stage: str
    identity: dict[str, str | int]
    config: dict[str, object]
    code_digest: str
    inputs_sha256: dict[str, str]
    versions: dict[str, str]
    device: str
    outputs_sha256: dict[str, str] = Field(
        default_factory=dict, description="SHA-256 of what was written beside this record, by name"
    )
    generation: dict[str, str | int | bool] = Field(
        default_factory=dict,
        description="backend of an evaluation, or of rollouts: its name, version and how it executes",
    )


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; rename it there on success, remove it on any exception.

    The body may create a file or a folder at the yielded path. An existing target is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=STAGED, dir=target.parent))
    temporary = staging / target.name
    try:
        yield temporary
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove_staged(results: Path) -> None:
    """Remove the folders in `results` in which killed jobs were writing; for when no job of the study runs."""
    name = f".*{STAGED}"
    deeper = (path for folder in FOLDERS for path in (results / folder).rglob(name))
    for path in [*results.glob(name), *deeper]:
        shutil.rmtree(path)


def write_text(target: Path, text: str) -> None:
    """Write `text` to `target` atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, model: BaseModel) -> None:
    """Write a pydantic model as indented, sealed JSON, atomically."""
    text = model.model_dump_json(indent=2)
    _write_sealed(target, f'{text.removesuffix(_JSON_END)}{_JSON_SEAL}{UNSEALED}"{_JSON_END}\n'.encode())


def read_json(path: Path, model: type[Model]) -> Model:
    """Read and validate a JSON artifact; DataError naming the file and the first problem."""
    content, seal, _ = read_sealed(path).decode().rpartition(_JSON_SEAL)
    if not seal:
        raise DataError(f"{path}: its seal is not where write_json puts it; make it again")
    return _valid(path, lambda: model.model_validate_json(content + _JSON_END))


def write_yaml(target: Path, model: BaseModel) -> None:
    """Write a pydantic model as YAML, atomically; the seal is its last line."""
    text = yaml.safe_dump(json.loads(model.model_dump_json()), sort_keys=False, allow_unicode=True)
    _write_sealed(target, f"{text}# {UNSEALED}\n".encode())


def read_yaml(path: Path, model: type[Model]) -> Model:
    """Read and validate a YAML artifact; DataError naming the file and the first problem."""
    return _valid(path, lambda: model.model_validate(yaml.safe_load(read_sealed(path).decode())))


def read_users_yaml(path: Path, model: type[Model]) -> Model:
    """Read and validate a YAML file that a person wrote, which has no seal; DataError as `read_yaml`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise DataError(f"{path}: {'no such file' if missing else f'cannot be read ({error})'}") from error
    return _valid(path, lambda: model.model_validate(yaml.safe_load(text)))


def write_table(target: Path, table: pl.DataFrame, schema: type[pa.DataFrameModel]) -> None:
    """Validate `table` against `schema` and write it as parquet with a seal in its metadata, atomically."""
    validated = _validated(target, table, schema)
    buffer = io.BytesIO()
    validated.write_parquet(buffer, compression="zstd", statistics=True, metadata={"seal": UNSEALED})
    _write_sealed(target, buffer.getvalue())


def write_csv(target: Path, table: pl.DataFrame) -> None:
    """Write `table` as CSV, atomically: the same rows as the parquet beside it, for other people's tools."""
    with atomic_path(target) as temporary:
        table.write_csv(temporary)


def read_table(path: Path, schema: type[pa.DataFrameModel]) -> pl.DataFrame:
    """Read a parquet artifact and validate it; DataError naming the file and the first problem."""
    return _validated(path, read_unchecked_table(path), schema)


def read_unchecked_table(path: Path) -> pl.DataFrame:
    """Read a parquet artifact whole, whatever its columns; DataError as `read_table`."""
    content = read_sealed(path)
    try:
        return pl.read_parquet(io.BytesIO(content))
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error


def _write_sealed(target: Path, content: bytes) -> None:
    with atomic_path(target) as temporary:
        temporary.write_bytes(sealed(content))


def _valid(path: Path, read: Callable[[], Model]) -> Model:
    try:
        return read()
    except yaml.YAMLError as error:
        raise DataError(f"{path}: not valid YAML ({str(error).splitlines()[0]})") from error
    except ValidationError as error:
        raise DataError(f"{path}: {describe_validation_error(error)}") from error


def _validated(path: Path, table: pl.DataFrame, schema: type[pa.DataFrameModel]) -> pl.DataFrame:
    try:
        return schema.validate(table)
    except pa.errors.SchemaError as error:
        raise DataError(f"{path}: {str(error).splitlines()[0]}") from error
