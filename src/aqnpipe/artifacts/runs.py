"""What a training run leaves beside its checkpoints and receipt, and the record of any job."""

import pandera.polars as pa
from pydantic import Field

from aqnpipe.artifacts.base import Artifact


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
    sigma_requested: float = pa.Field(ge=0)
    sigma_measured: float = pa.Field(ge=0)
    validation_accuracy: float = pa.Field(nullable=True)

    class Config:
        """Columns as declared, nothing else."""

        strict = True


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
