"""How checkpoints are evaluated."""

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from aqnpipe.config.base import EACH_ONCE, FrozenModel, Identifier, Seed, Threads, describe_validation_error, replaced
from aqnpipe.config.dataset import AnswerFormat
from aqnpipe.config.evaluation_noise import NamedNoise, level_noise, numbered_levels, repeated_noise, settings_of
from aqnpipe.config.generation import is_without_vllm
from aqnpipe.config.noise import ModuleNoise, OperatorNoise, OperatorSet, RelativeGaussian
from aqnpipe.config.own_code import OwnFunction, planned_digest
from aqnpipe.config.own_noise import OwnError
from aqnpipe.errors import ConfigError

Scorer = Literal[
    "strict", "last_number", "harness_strict", "harness_flexible", "verl_strict", "boxed", "letter", "text"
]
"""strict: the number after the first `####`. last_number: the last number anywhere. Both compare numbers.

boxed: the content of the last \\boxed{}, compared as a number, or as a formula without spaces. letter: the letter of a
choice. text: the whole response, in which runs of spaces count as one.

harness_strict, harness_flexible: the filters strict-match and flexible-extract of lm-evaluation-harness's task gsm8k
with its exact_match, which compares strings.

verl_strict: verl's reward for GSM8K (reward_score/gsm8k.py, strict), which compares strings too: what follows the last
`#### ` in the last 300 characters.
"""

OWN_SCORER = "own"
"""Name of a scorer of a user's own in columns of tables."""


def scorer_column(scorer: str) -> str:
    """Return the name of a scorer in columns: its own, or `own` for a function."""
    return OWN_SCORER if ":" in scorer else scorer


class _Option(FrozenModel):
    scorer: Scorer | OwnFunction


def refuse_unknown_scorer(name: str) -> None:
    """Raise ConfigError if the value of `--scorer` is neither a scorer nor a function."""
    try:
        _Option(scorer=name)
    except ValidationError as error:
        raise ConfigError(f"--{describe_validation_error(error, {'scorer': name}, _Option)}") from error


def expected_scorer(scorer: str, answers: AnswerFormat | Literal["task"]) -> str | None:
    """Return what is expected of a scorer that never finds answers of a format right; None if it can, or a function."""
    if scorer == answers == "task":
        return None
    if answers == "task":
        return "no primary_scorer: a task of lm-evaluation-harness grades its answers itself"
    if scorer == "task":
        return "a scorer of answers: task grades those of dataset.source lm_eval alone"
    fitting: dict[str, tuple[Scorer, ...]] = {"text": ("text", "boxed"), "choice": ("letter",)}
    is_fitting = scorer in fitting[answers] if answers in fitting else scorer != "letter"
    if ":" in scorer or is_fitting:
        return None
    return f"{' or '.join(fitting.get(answers, ('a scorer of numbers',)))} for answers of format {answers}"


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


class EvaluationSampling(FrozenModel):
    """Several sampled responses per question; accuracy is then pass@1, estimated from all of them."""

    temperature: float = Field(gt=0, le=10)
    num_samples: int = Field(ge=1, description="responses per question, noise level and noise seed")
    seed: Seed = Field(default=0, description="seed of the sampling; all checkpoints share it")


class EvaluationConfig(FrozenModel):
    """Robustness evaluation: every question at every noise level and noise, random ones once per noise seed."""

    noise_levels: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], EACH_ONCE] = Field(
        default=(0.0, 0.05, 0.10), min_length=1, description="relative scales s of operator noise in evaluation"
    )
    noise_seeds: Annotated[tuple[Seed, ...], EACH_ONCE] = Field(default=(0,), min_length=1)
    noises: dict[Identifier, NamedNoise] = Field(
        default={},
        description="further noises by name, each evaluated once, or once per noise seed if it is random: settings of "
        "operator_noise or module_noise as in an arm, or a preset (w4a16_mxfp4, w4a16_nvfp4, w4a4_mxfp4, w4a4_nvfp4, "
        "w8a8_fp8, w8a8_fp8_block)",
    )
    operators: OperatorSet = "matmul"
    include_lm_head: bool = True
    num_questions: int | None = Field(
        default=None, ge=1, description="number of questions, from the start of the test split; null: all"
    )
    max_response_tokens: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    pretrained_machine: str | None = Field(
        default=None,
        description="machine of the study on which the model before training is evaluated; null: the device without "
        "simulated faults. Checkpoints are evaluated on the machine of their arm",
    )
    primary_scorer: Scorer | Literal["task"] | OwnFunction = Field(
        default="strict",
        description="decides which responses are right: a scorer, or package.module:function of (response, "
        "gold_answer), run with your rights, which returns True or False, or a pair of the answer found and that",
    )
    scorer_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", description="set by the workflow")
    sampling: EvaluationSampling | None = Field(
        default=None, description="null: greedy decoding, one response per question"
    )
    threads: Threads = Field(default=1, description="torch threads per worker; results on a CPU depend on it")

    @model_validator(mode="after")
    def _names_are_no_levels(self) -> Self:
        for name in self.noises:
            if _is_number(name):
                raise ValueError(
                    f"noises.{name}: found a number as name, which reads as a noise level, expected a word"
                )
        return self

    @model_validator(mode="after")
    def _only_functions_have_a_source(self) -> Self:
        if self.scorer_sha256 is not None and ":" not in self.primary_scorer:
            raise ValueError(f"scorer_sha256: {self.primary_scorer} has no source of yours, remove scorer_sha256")
        return self

    def planned(self) -> "EvaluationConfig":
        """Return these settings with the digests of the user's own scorer and error models.

        Raises ConfigError if one has no source, or another than its digest says.
        """
        found = replaced(self, OwnError, OwnError.planned)
        if ":" not in self.primary_scorer:
            return found
        digest = planned_digest(self.primary_scorer, self.scorer_sha256, "scorer_sha256")
        return found.model_copy(update={"scorer_sha256": digest})

    @property
    def num_samples(self) -> int:
        """Responses per question and pass."""
        return 1 if self.sampling is None else self.sampling.num_samples

    def passes(self) -> list[tuple[float, int]]:
        """Return (noise level, noise seed) of every pass; levels that are not random use only the first noise seed."""
        seeds = self.noise_seeds
        return [(level, seed) for level in self.all_levels() for seed in seeds[: None if self.is_random(level) else 1]]

    def is_random(self, level: float) -> bool:
        """Return whether the noise of a level is drawn anew with every noise seed."""
        name = self.noise_names().get(level)
        return level > 0 if name is None else settings_of(self.noises[name]).is_random

    @property
    def fits_vllm(self) -> bool:
        """Return whether vLLM can compute every noise."""
        return not any(is_without_vllm(error) for noise in self.noises.values() for error in settings_of(noise).errors)

    def all_levels(self) -> tuple[float, ...]:
        """Return the noise levels and, behind them, the levels of the named noises."""
        return (*self.noise_levels, *self.noise_names())

    def noise_names(self) -> dict[float, str]:
        """Return the names of the named noises by level."""
        return {level: name for name, level in numbered_levels(self.noises).items()}

    def noise_at(self, level: float, attention: str) -> tuple[OperatorNoise | None, ModuleNoise | None]:
        """Return the noise on operators and on modules at a level, for a model with that attention."""
        if level >= 1:
            noise = settings_of(self.noises[self.noise_names()[level]])
            return noise.operators_for(attention), noise.modules()
        operator_noise = OperatorNoise(
            operators=self.operators,
            error=RelativeGaussian(scale=level),
            phases=("evaluation",),
            include_lm_head=self.include_lm_head,
            attention="decomposed" if attention == "eager" else "fused",
        )
        return (operator_noise if level else None), None


class StudyEvaluationConfig(EvaluationConfig):
    """Content of `evaluation` in a study file: how checkpoints are evaluated, and on which further machines.

    A separate class, because the settings of a job do not depend on the other machines.
    """

    machines: Annotated[tuple[Identifier, ...], EACH_ONCE] = Field(
        default=(),
        description="machines on which every checkpoint is evaluated too, with their device, simulated faults, and the "
        "dtype, threads and batch_size of their `counterpart`; the report has the differences",
    )

    @model_validator(mode="after")
    def _no_noise_twice(self) -> Self:
        if problem := repeated_noise(self.noises):
            raise ValueError(f"noises.{problem}")
        levels = {level: level_noise(level, self.operators, self.include_lm_head) for level in self.noise_levels}
        for name, noise in self.noises.items():
            same = next((level for level, other in levels.items() if settings_of(noise) == other), None)
            if same is not None:
                raise ValueError(f"noises.{name}: found the noise of noise_levels {same:g} again, remove one of them")
        return self
