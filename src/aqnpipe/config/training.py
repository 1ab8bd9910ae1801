"""GRPO settings, shared by all arms of a study."""

from typing import Literal, Self

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel


class TrainingConfig(FrozenModel):
    """Hyper-parameters of GRPO; token-mean loss, no entropy bonus."""

    epochs: int = Field(ge=1)
    prompts_per_step: int = Field(ge=1, description="prompts per optimiser step")
    rollouts_per_prompt: int = Field(ge=2, description="n: completions per prompt, the group of GRPO")
    micro_batch_size: int = Field(ge=1, description="sequences per forward and backward pass")
    learning_rate: float = Field(gt=0)
    learning_rate_schedule: Literal["constant", "linear"] = Field(
        default="constant", description="after the warm-up: constant as published, or linear to 0 at the last step"
    )
    warmup_steps: int = Field(default=0, ge=0, description="optimiser steps over which the rate rises from 0")
    kl_coefficient: float = Field(default=0.001, ge=0, description="beta of the KL term against the start model")
    clip_ratio: float = Field(default=0.2, gt=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    temperature: float = Field(default=1.0, gt=0)
    max_response_tokens: int = Field(ge=1)
    checkpoint_every: int | None = Field(
        default=None, ge=1, description="optimiser steps between checkpoints; the last step is always one"
    )
    validate_every: int | None = Field(
        default=None, ge=1, description="optimiser steps between greedy validations; the last step always has one"
    )
    validation_questions: int = Field(default=100, ge=1)
    threads: int = Field(default=1, ge=1, description="torch threads per run; results on CPU depend on it")

    @model_validator(mode="after")
    def _micro_batches_divide_the_step(self) -> Self:
        sequences = self.prompts_per_step * self.rollouts_per_prompt
        if sequences % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} must divide "
                f"prompts_per_step*rollouts_per_prompt = {sequences}"
            )
        return self

    @property
    def sequences_per_step(self) -> int:
        """Completions that one optimiser step learns from."""
        return self.prompts_per_step * self.rollouts_per_prompt

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimiser step."""
        return self.sequences_per_step // self.micro_batch_size

    def num_steps(self, num_prompts: int) -> int:
        """Optimiser steps of the whole training over `num_prompts` questions (an incomplete batch is dropped)."""
        return self.epochs * (num_prompts // self.prompts_per_step)

    def checkpoint_steps(self, num_steps: int) -> list[int]:
        """Steps after which weights are kept and evaluated: every `checkpoint_every`-th and always the last."""
        return _every(self.checkpoint_every, num_steps)

    def validation_steps(self, num_steps: int) -> list[int]:
        """Steps after which the policy is validated: every `validate_every`-th and always the last."""
        return _every(self.validate_every, num_steps)


def _every(interval: int | None, num_steps: int) -> list[int]:
    regular = range(interval, num_steps, interval) if interval else ()
    return [*regular, num_steps]
