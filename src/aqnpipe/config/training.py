"""GRPO settings, shared by all arms of a study."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from aqnpipe.config.base import FrozenModel, Threads
from aqnpipe.config.custom_code import CustomFunction, NamesCode
from aqnpipe.config.evaluation import Scorer
from aqnpipe.config.validation_messages import SHARE_PATTERN

ReportTo = Literal["tensorboard", "wandb"]

Keep = Literal["last", "best", "all"]
"""Which checkpoints of a run keep their weights once all are evaluated; `best`: most accurate at the lowest level."""

DEFAULT_LOSS_SCALE = 1024
"""Of models in float16: a gradient may then be between 6e-11 and 64."""

RESUME_BYTES_PER_SECOND = 1e9
"""Assumed rate at which a worker writes and hashes its part of a resume point, until a run has measured it."""


class LoraConfig(FrozenModel):
    """Low-rank adapters, trained instead of all weights; the reference of the KL term is the model without them.

    Checkpoints hold the adapters, and evaluations apply them to the model.
    """

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    """the adapter's output is scaled by alpha / rank"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """last parts of the names of the linear modules in the decoder layers that get an adapter"""

    def _problems(self) -> Iterator[str]:
        outside = sorted({"lm_head", "embed_tokens"} & set(self.target_modules))
        if outside:
            yield f"target_modules: {', '.join(outside)} cannot be adapted, expected modules of the decoder layers"


class Reward(NamesCode):
    """One reward of a response: 1 where a scorer finds it right, or what a custom function returns.

    `source_sha256`: digest of the function's source, set when a run is planned.
    """

    scorer: Scorer | None = None
    """1 if this scorer finds the response right, else 0"""
    function: CustomFunction | None = None
    """package.module:function of (response, gold_answer), which returns a number; run with your rights"""
    weight: float = 1.0
    """factor of this reward in the sum of all"""
    source_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """set by the workflow"""

    def _problems(self) -> Iterator[str]:
        if (self.scorer is None) == (self.function is None):
            yield "expected either scorer or function"
        if self.weight == 0:
            yield "weight: found 0, expected a factor that has an effect"


class VerifyConfig(FrozenModel):
    """Repetition of a random micro-batch of some steps, to find a device that errs before it spoils the weights."""

    every: int = Field(ge=1)
    """optimiser steps between verified steps; the last step always is one"""


class TrainingConfig(NamesCode):
    """Hyper-parameters of GRPO with a token-mean loss and no entropy bonus."""

    epochs: int = Field(ge=1)
    prompts_per_step: int = Field(ge=1)
    """prompts per optimiser step"""
    rollouts_per_prompt: int = Field(ge=2)
    """completions per prompt, which form one group of GRPO (n)"""
    steps_per_rollout: int = Field(default=1, ge=1)
    """optimiser steps that learn from one batch of rollouts (mini-batches); the batch has
    prompts_per_step*steps_per_rollout prompts"""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """sequences per forward and backward pass, padded to the longest of the rollout"""
    tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """in place of micro_batch_size: most tokens per forward and backward pass of a worker; sequences of similar length
    are computed together, with less padding"""
    learning_rate: float = Field(gt=0)
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """after warm-up: constant (as published), or linear decay to 0 at the last step"""
    warmup_steps: int = Field(default=0, ge=0)
    """optimiser steps over which the learning rate rises from 0"""
    rewards: tuple[Reward, ...] = ()
    """rewards of a response, added up; empty: 1 if the scorer strict finds it right, else 0"""
    kl_coefficient: float = Field(default=0.001, ge=0)
    """beta, the weight of the KL from the initial policy"""
    clip_ratio: float = Field(default=0.2, gt=0, lt=1)
    clip_ratio_c: float | None = Field(default=None, gt=1, exclude_if=lambda limit: limit is None)
    """dual clip (verl: 3.0): where the advantage is negative, ratios count at most this; null: no limit"""
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """gradients are scaled down to this norm"""
    stop_loss: float = Field(default=1e4, gt=0)
    """the run ends if the absolute loss exceeds this"""
    stop_grad_norm: float = Field(default=1e5, gt=0)
    """the run ends if the gradient norm exceeds this"""
    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """number format of the stored and updated weights; forward passes compute in the model's dtype, adapters in this
    one"""
    loss_scale: int | None = Field(default=None, ge=1, exclude_if=lambda scale: scale is None)
    """models in float16: a power of two by which the loss is multiplied, so that small gradients do not vanish, and
    gradients are divided before they are used; null: 1024; the same in all steps"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass instead of storing them"""
    verify: VerifyConfig | None = Field(default=None, exclude_if=lambda verify: verify is None)
    """compute one micro-batch of some steps, chosen at random, twice, and stop the run before the optimiser uses it if
    a bit of its loss or gradients differs; changes no result; null: never"""
    lora: LoraConfig | None = None
    """train low-rank adapters; null trains all weights"""
    temperature: float = Field(default=1.0, gt=0)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """a longer prompt is an error before training starts; null: no limit"""
    max_response_tokens: int = Field(ge=1)
    checkpoint_every: int | None = Field(default=None, ge=1)
    """optimiser steps between checkpoints; the last step always writes one"""
    resume_every: Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=SHARE_PATTERN)] = "3%"
    """share of a run's time in which resume points may be written, as `3%`: the run measures how long one takes; a
    number instead is that of optimiser steps between them"""
    validate_every: int | None = Field(default=None, ge=1)
    """optimiser steps between greedy validations; the last step always has one"""
    validation_questions: int = Field(default=100, ge=1)
    threads: Threads = 1
    """torch threads per worker; results on CPU depend on it"""
    num_workers: int = Field(default=1, ge=1)
    """processes that train one run together, one per device; Ray launches them if there are several"""
    parallelism: Literal["data", "fsdp"] = "data"
    """data: every worker holds the whole model; fsdp: each holds a share of its weights, gradients and optimiser state,
    and gathers a decoder layer while it computes it"""
    report_to: tuple[ReportTo, ...] = ()
    """trackers that also log every step, to <run folder>.logs; W&B is offline unless WANDB_MODE is set"""

    def _problems(self) -> Iterator[str]:
        if self.parallelism == "fsdp" and self.num_workers == 1:
            yield "parallelism is fsdp with num_workers 1, expected several workers to share the weights"
        if self.loss_scale is not None and self.loss_scale.bit_count() != 1:
            yield f"loss_scale {self.loss_scale}: expected a power of two, which rounds nothing"
        if self.clip_ratio_c is not None and self.clip_ratio_c <= 1 + self.clip_ratio:
            yield f"clip_ratio_c {self.clip_ratio_c:g}: expected more than 1 + clip_ratio"
        if self.prompts_per_step % self.num_workers:
            yield (
                f"num_workers {self.num_workers} must divide prompts_per_step {self.prompts_per_step}: the rollouts of "
                "a prompt stay together on one worker"
            )
        if self.validation_questions < self.num_workers:
            yield (
                f"validation_questions {self.validation_questions} must be at least num_workers {self.num_workers}: "
                "every worker answers at least one"
            )
        if (self.micro_batch_size is None) == (self.tokens_per_micro_batch is None):
            yield "expected either micro_batch_size or tokens_per_micro_batch"
        sequences = self.sequences_per_step // self.num_workers
        if sequences % self.sequences_per_call:
            share = f"/num_workers {self.num_workers}" if self.num_workers > 1 else ""
            yield (
                f"micro_batch_size {self.micro_batch_size} must divide "
                f"prompts_per_step*rollouts_per_prompt{share} = {sequences}"
            )

    @property
    def sequences_per_step(self) -> int:
        """Completions per optimiser step."""
        return self.prompts_per_step * self.rollouts_per_prompt

    @property
    def sequences_per_call(self) -> int:
        """Sequences of a worker in one call of the trainer: a micro-batch, or a step that is divided by its tokens."""
        return self.micro_batch_size or self.sequences_per_step // self.num_workers

    @property
    def accumulation_steps(self) -> int:
        """Calls of the trainer per optimiser step on each worker."""
        return self.sequences_per_step // (self.sequences_per_call * self.num_workers)

    @property
    def resume_share(self) -> float | None:
        """Share of a run's time in which resume points may be written; None if they are written by steps."""
        return float(self.resume_every[:-1]) / 100 if isinstance(self.resume_every, str) else None

    @property
    def resume_interval(self) -> int:
        """Optimiser steps between resume points, or possible ones: whole batches of rollouts, which are used up then.

        A resume point contains no rollouts.
        """
        steps = self.resume_every if isinstance(self.resume_every, int) else 1
        return math.ceil(steps / self.steps_per_rollout) * self.steps_per_rollout

    def num_steps(self, num_prompts: int) -> int:
        """Return the optimiser steps of a run over `num_prompts` questions; incomplete batches are dropped."""
        rollouts_per_epoch = num_prompts // (self.prompts_per_step * self.steps_per_rollout)
        return self.epochs * rollouts_per_epoch * self.steps_per_rollout

    def checkpoint_steps(self, num_steps: int) -> list[int]:
        """Return the steps after which weights are saved and evaluated: every `checkpoint_every`-th and the last."""
        return _every(self.checkpoint_every, num_steps)

    def validation_steps(self, num_steps: int) -> list[int]:
        """Return the steps after which the policy is validated: every `validate_every`-th and the last."""
        return _every(self.validate_every, num_steps)

    def verified_steps(self, num_steps: int) -> list[int]:
        """Return the steps of which a micro-batch is computed twice: every `verify.every`-th and the last, or none."""
        return _every(self.verify.every, num_steps) if self.verify else []


def _every(interval: int | None, num_steps: int) -> list[int]:
    regular = range(interval, num_steps, interval) if interval else ()
    return [*regular, num_steps]
