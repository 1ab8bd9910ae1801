"""How checkpoints are evaluated."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.noise import OperatorSet


class EvaluationConfig(FrozenModel):
    """Greedy robustness evaluation: every question at every noise level, noisy levels once per noise seed."""

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
    primary_scorer: Literal["strict", "last_number"] = "strict"
    threads: int = Field(default=1, ge=1, description="torch threads per job; results on CPU depend on it")

    @model_validator(mode="after")
    def _no_repeats(self) -> Self:
        for name in ("noise_levels", "noise_seeds"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} must not repeat a value")
        return self

    def passes(self) -> list[tuple[float, int]]:
        """(noise level, noise seed) of every pass over the questions; the clean level needs only the first seed."""
        return [
            (level, seed)
            for level in self.noise_levels
            for seed in (self.noise_seeds if level > 0 else self.noise_seeds[:1])
        ]
