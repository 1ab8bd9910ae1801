"""Output of `aqnpipe robustness`: accuracies of given checkpoints over noise levels, and their comparisons."""

from typing import Literal

from pydantic import Field

from aqnpipe.artifacts.base import Artifact

ComparisonKind = Literal["noise", "accuracy", "degradation"]
"""noise: one checkpoint at a level against itself without noise. accuracy: two checkpoints at one level.

degradation: the change of the first from no noise to a level, minus that of the second; above 0, the first loses less.
"""


class CheckpointAccuracy(Artifact):
    """Accuracy of a checkpoint at one noise level, a fraction, with its Wilson interval over questions."""

    checkpoint: str
    noise_level: float = Field(description="a relative scale below 1, or the number of a named noise")
    noise: str | None = Field(default=None, description="the name of a named noise")
    num_questions: int
    num_noise_seeds: int
    accuracy: float
    ci_low: float
    ci_high: float
    truncated_fraction: float = Field(description="share of responses that were cut off at the token limit")
    parse_failure_fraction: float = Field(description="share of responses in which the scorer finds no answer")


class CheckpointComparison(Artifact):
    """One paired comparison over questions; numbers are null where `refusal` says why it cannot be made.

    `p_holm` is adjusted over all comparisons of the same kind. The interval at confidence `interval_level` excludes
    0 if and only if `p_holm` shows a difference.
    """

    kind: ComparisonKind
    first: str
    second: str
    noise_level: float
    noise: str | None = None
    difference: float | None = None
    interval_level: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    p_value: float | None = None
    p_holm: float | None = None
    method: str | None = None
    questions_needed: int | None = Field(default=None, description="that would decide an open comparison")
    refusal: str | None = None


class EvaluatedCheckpoint(Artifact):
    """A checkpoint: its name, where it came from, and the digest of its weights."""

    name: str
    source: str
    weights_sha256: str


class RobustnessReport(Artifact):
    """robustness.json: everything that `aqnpipe robustness` found."""

    data: str
    prompt: str
    scorer: str
    operators: str
    dtype: str
    alpha: float
    checkpoints: tuple[EvaluatedCheckpoint, ...]
    accuracies: tuple[CheckpointAccuracy, ...]
    comparisons: tuple[CheckpointComparison, ...]
    notes: tuple[str, ...]
