"""Artifact of the check of published figures."""

from typing import Literal

from aqnpipe.artifacts.base import Artifact, Statement
from aqnpipe.artifacts.comparisons import ClaimVerdict


class CheckedAccuracy(Artifact):
    """A reported accuracy: is it possible at all, and how precise is it? Fractions; `printed` is percent as printed.

    `arm`, `noise_level` and `step` tie it to a study's arm (null where it has none). `correct`: numbers of
    correct answers that print as reported (empty: impossible). `nearest`: the possible percentages next to it.
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


class CheckedLoss(Artifact):
    """A reported loss in nats per token; `uniform` is ln|V|, the loss of uniform guessing (null: |V| unknown)."""

    id: str
    label: str
    arm: str | None
    mean: float
    std: float
    ddof: int
    num_runs: int
    uniform: float | None
    above_uniform: bool


class CheckedClaim(Artifact):
    """A claim of the paper. Differences in `unit`: points (percent), nats, or ratio.

    `p_run_to_run`: t-test of the difference against the standard deviation between identical runs (null if the file
    states none, or if the claim is not about arms). `p_run_to_run_holm`: the larger of it and `p_value`, adjusted over
    the family: a claim about arms has to pass that too. `largest_discordance`: the
    share of questions with different outcomes below which a paired test would have been significant (null if the
    outcomes were not paired, or if it would not have been at any share). `p_paired_low`/`p_paired_high`: the range of a
    paired t-test over all correlations between the sides, for losses. `statements`: the first has the numbers,
    the others the conclusion and its reasons. `notes`: remarks on the figures. `deviations`: where the paper or an
    earlier re-analysis states other numbers.
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
    p_run_to_run: float | None
    p_run_to_run_holm: float | None = None
    largest_discordance: float | None
    p_paired_low: float | None
    p_paired_high: float | None
    questions_needed: int | None
    method: Statement
    verdict: ClaimVerdict
    statements: tuple[Statement, ...]
    notes: tuple[Statement, ...]
    deviations: tuple[Statement, ...]


class CheckedSeries(Artifact):
    """Reported accuracies of one checkpoint over noise levels; equal values at every level are a red flag.

    `p_value`: chi-squared test of equal accuracies, as if every level had its own questions.
    """

    id: str
    label: str
    printed: tuple[str, ...]
    identical: bool
    p_value: float | None


class CheckedDetectable(Artifact):
    """The smallest true paired difference (fraction) that McNemar's test finds at `num_questions`."""

    num_questions: int
    discordant_fraction: float
    asymptotic: float
    deviations: tuple[Statement, ...]


class PublishedCheck(Artifact):
    """results/published.json: which claims a paper's printed figures support, see `aqnpipe check-published`."""

    title: str
    source: str
    alpha: float
    power: float
    family_size: int
    run_sd_points: float | None
    run_sd_runs: int | None
    accuracies: tuple[CheckedAccuracy, ...]
    losses: tuple[CheckedLoss, ...]
    claims: tuple[CheckedClaim, ...]
    series: tuple[CheckedSeries, ...]
    detectable: tuple[CheckedDetectable, ...]
