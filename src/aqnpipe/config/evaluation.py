"""How checkpoints are evaluated."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.noise import OperatorSet
from aqnpipe.data.scoring import Scorer


class EvaluationSampling(FrozenModel):
    """Several responses per question, drawn at a temperature; accuracy is then pass@1, estimated from all of them."""

    temperature: float = Field(gt=0, le=10)
    num_samples: int = Field(ge=1, description="responses per question and pass")
    seed: int = Field(default=0, ge=0, description="keys the draws, which are the same for all checkpoints")


class EvaluationConfig(FrozenModel):
    """Robustness evaluation: every question at every noise level, noisy levels once per noise seed."""

    noise_levels: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(
        default=(0.0, 0.05, 0.10), min_length=1, description="relative scales s of operator noise at evaluation"
    )
    noise_seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1)
    operators: OperatorSet = "matmul"
    include_lm_head: bool = True
    num_questions: int | None = Field(default=None, ge=1, description="first questions of the test split; null: all")
    max_response_tokens: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    pretrained_machine: str | None = Field(
        default=None,
        description="machine of the study that the model before training is evaluated on; null: the device as it is. "
        "Checkpoints are evaluated on the machine of their arm",
    )
    primary_scorer: Scorer = "strict"
    sampling: EvaluationSampling | None = Field(
        default=None, description="null: greedy, one response per question and pass"
    )
    threads: int = Field(default=1, ge=1, description="torch threads per worker; results on CPU depend on it")

    @model_validator(mode="after")
    def _no_repeats(self) -> Self:
        for name in ("noise_levels", "noise_seeds"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} must not repeat a value")
        return self

    @property
    def num_samples(self) -> int:
        """Responses per question and pass."""
        return 1 if self.sampling is None else self.sampling.num_samples

    def passes(self) -> list[tuple[float, int]]:
        """(noise level, noise seed) of every pass over the questions; the clean level needs only the first seed."""
        return [
            (level, seed)
            for level in self.noise_levels
            for seed in (self.noise_seeds if level > 0 else self.noise_seeds[:1])
        ]
