"""How checkpoints are evaluated, and the named noises of an evaluation: every error model that arms know.

The levels of an evaluation are scales of one error model, relative Gaussian noise on operators. Other errors have no
scale in common (a 4-bit format has none at all), so each has a name. In tables, comparisons and receipts the level of
the n-th named noise is the number n; scales of noise are below 1, so the two cannot be confused.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Discriminator, Field, RootModel, Tag, ValidationError, model_validator

from aqnpipe.config.base import EACH_ONCE, FrozenModel, Identifier, Seed, Threads, describe_validation_error
from aqnpipe.config.custom_code import CustomError, CustomFunction, NamesCode
from aqnpipe.config.dataset import AnswerFormat
from aqnpipe.config.generation import is_without_vllm
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.model import noised_attention
from aqnpipe.config.noise import (
    AbsoluteGaussian,
    CacheFormat,
    CacheNoise,
    ErrorModel,
    FakeQuantization,
    ModuleNoise,
    NoiseSpec,
    OperatorNoise,
    OperatorSet,
    Phase,
    RelativeGaussian,
    is_active,
    is_fixed,
)
from aqnpipe.config.validation_messages import did_you_mean
from aqnpipe.errors import ConfigError

Preset = Literal["w4a16_mxfp4", "w4a16_nvfp4", "w4a4_mxfp4", "w4a4_nvfp4", "fp8", "fp8_block", "kv8_fp8", "kv8_int8"]
"""Bits of weights and activations, and their format, in all linear modules but the output projection; kv: of the cache.

fp8, fp8_block: eight of both, as engines call it.
"""

PRESETS: tuple[Preset, ...] = get_args(Preset)


class _OperatorNoise(OperatorNoise):
    """Operator noise as in an arm, whose phase is `evaluation`, and whose attention is that of each model."""

    phases: tuple[Phase, ...] = ("evaluation",)
    attention: Literal["decomposed", "fused"] | None = None  # type: ignore[assignment]
    """null: follows the model, both products with eager attention (decomposed), one operator else (fused); another
    value than the model's is an error"""


class _ModuleNoise(ModuleNoise):
    """Module noise as in an arm, whose phase is `evaluation`."""

    phases: tuple[Phase, ...] = ("evaluation",)


class EvaluationNoise(FrozenModel):
    """The noise of an evaluation: on operators, on modules, on the cache, or several. Its phase is `evaluation`."""

    operator_noise: _OperatorNoise | None = None
    """as in an arm; attention follows the model"""
    module_noise: _ModuleNoise | None = None
    """as in an arm"""
    kv_cache: CacheFormat | None = Field(default=None, exclude_if=lambda noise: noise is None)
    """the format of an arm's kv_cache"""

    def _problems(self) -> Iterator[str]:
        given = {"operator_noise": self.operator_noise, "module_noise": self.module_noise}
        if not any([*given.values(), self.kv_cache]):
            yield "expected operator_noise, module_noise, kv_cache, or several of them"
        for name, noise in given.items():
            if noise is not None and noise.phases != ("evaluation",):
                yield f"{name}.phases: a noise of an evaluation has only this phase, remove phases"
            if noise is not None and not noise.is_active:
                yield f"{name}: its error has scale 0, expected one that changes something"

    def spec_for(self, attention: str) -> NoiseSpec:
        """Return the noise of a pass on a model with that attention. Raises ConfigError if the two do not agree."""
        operators, modules, stored = self.operator_noise, self.module_noise, self.kv_cache
        computed = noised_attention(attention)
        if operators is not None and is_fixed(operators.error) and computed != "decomposed":
            raise ConfigError(
                f"operator_noise.error.redraw: found never, the model computes attention {attention} as one operator, "
                "expected attention eager, whose products have separate operands"
            )
        if operators is not None and operators.attention not in (None, computed):
            raise ConfigError(
                f"operator_noise.attention: found {operators.attention}, the model computes attention {attention}, "
                f"whose noise is {computed}: leave attention out"
            )
        settings = {"attention": computed}
        return NoiseSpec(
            operator_noise=operators and OperatorNoise.model_validate(operators.model_dump() | settings),
            module_noise=modules and ModuleNoise.model_validate(modules.model_dump()),
            kv_cache=stored and CacheNoise(format=stored, phases=("evaluation",)),
        )

    @property
    def errors(self) -> list[ErrorModel]:
        """The errors on operators and modules."""
        return [noise.error for noise in (self.operator_noise, self.module_noise) if noise is not None]

    @property
    def is_random(self) -> bool:
        """Return whether another noise seed gives other numbers; roundings and biases are the same every time."""
        random = RelativeGaussian | AbsoluteGaussian | MeasuredError
        return any(
            error.draws > 0 if isinstance(error, CustomError) else isinstance(error, random) and is_active(error)
            for error in self.errors
            if not isinstance(error, RelativeGaussian) or error.machine is None
        )


def level_noise(level: float, operators: OperatorSet, include_lm_head: bool) -> EvaluationNoise | None:
    """Return the noise of a noise level as a named noise would be written; None for level 0."""
    if level == 0:
        return None
    error = RelativeGaussian(scale=level)
    return EvaluationNoise(
        operator_noise=_OperatorNoise(operators=operators, error=error, include_lm_head=include_lm_head)
    )


def preset(name: Preset) -> EvaluationNoise:
    """Return the noise that a preset stands for."""
    bits, _, number_format = ("w8a8", "", name) if name.startswith("fp8") else name.partition("_")
    if bits == "kv8":
        return EvaluationNoise.model_validate({"kv_cache": number_format})
    activations = not bits.endswith("a16")
    error: ErrorModel = FakeQuantization.model_validate({"format": number_format, "activations": activations})
    return EvaluationNoise(operator_noise=_OperatorNoise(error=error, include_lm_head=False))


NamedNoise = Annotated[
    Annotated[EvaluationNoise, Tag("settings")] | Annotated[Preset, Tag("preset")],
    Discriminator(lambda value: "preset" if isinstance(value, str) else "settings"),
]
"""Settings of a noise, or the name of a preset."""


def numbered_levels(names: Iterable[str]) -> dict[str, float]:
    """Return the level that stands for each named noise: 1 for the first, 2 for the second."""
    return {name: float(number) for number, name in enumerate(names, start=1)}


def settings_of(noise: NamedNoise) -> EvaluationNoise:
    """Return the settings of a noise."""
    return preset(noise) if isinstance(noise, str) else noise


def repeated_noise(noises: Mapping[str, NamedNoise]) -> str | None:
    """Return the problem of a noise that has the settings of an earlier one; None if all differ.

    It would be evaluated, compared and counted in the corrections for several claims twice.
    """
    first: dict[str, str] = {}
    for name, noise in noises.items():
        if (earlier := first.setdefault(settings_of(noise).model_dump_json(), name)) != name:
            return f"{name}: found the noise of {earlier} again, expected another noise"
    return None


class NoisesFile(RootModel[dict[Identifier, NamedNoise]]):
    """Content of a file of noises by name, as `evaluation.noises` of a study."""

    @model_validator(mode="after")
    def _no_noise_twice(self) -> Self:
        if problem := repeated_noise(self.root):
            raise ValueError(problem)
        return self


def with_numbered_noises(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return a study's content, not validated, with the level of a noise wherever a comparison names it.

    Raises ConfigError if it names none of `evaluation.noises`, or if its level is a number that is no noise level.
    Content of another form than a study's is returned as it is, for validation to refuse.
    """
    evaluation = config.get("evaluation")
    noises = evaluation.get("noises") if isinstance(evaluation, Mapping) else None
    levels = numbered_levels(noises) if isinstance(noises, Mapping) else {}
    changed = dict(config)
    comparisons = config.get("comparisons")
    if isinstance(comparisons, list | tuple):
        changed["comparisons"] = [
            _numbered(content, levels, f"{source}: comparisons.{index}") for index, content in enumerate(comparisons)
        ]
    report = config.get("report")
    if isinstance(report, Mapping) and "explore" in report:
        changed["report"] = {**report, "explore": _numbered(report["explore"], levels, f"{source}: report.explore")}
    return changed


def _numbered(content: Any, levels: Mapping[str, float], where: str) -> Any:
    level = content.get("noise_level") if isinstance(content, Mapping) else None
    if isinstance(level, str) and level in levels:
        return {**content, "noise_level": levels[level]}
    if isinstance(level, str):
        near = did_you_mean(level, levels) or (f", or one of {', '.join(levels)}" if levels else "")
        raise ConfigError(f"{where}.noise_level: found {level!r}, expected a number{near}")
    if isinstance(level, int | float) and level >= 1:
        raise ConfigError(
            f"{where}.noise_level: found {level:g}, expected a number below 1 or the name of one of evaluation.noises"
        )
    return content


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

CUSTOM_SCORER = "own"
"""Name of a scorer of a user's own in columns of tables."""


def scorer_column(scorer: str) -> str:
    """Return the name of a scorer in columns: its own, or `own` for a function."""
    return CUSTOM_SCORER if ":" in scorer else scorer


class _Option(FrozenModel):
    scorer: Scorer | CustomFunction


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
    num_samples: int = Field(ge=1)
    """responses per question, noise level and noise seed"""
    seed: Seed = 0
    """seed of the sampling; all checkpoints share it"""


class EvaluationConfig(NamesCode):
    """Robustness evaluation: every question at every noise level and noise, random ones once per noise seed."""

    noise_levels: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], EACH_ONCE] = Field(
        default=(0.0, 0.05, 0.10), min_length=1
    )
    """relative scales s of operator noise in evaluation"""
    noise_seeds: Annotated[tuple[Seed, ...], EACH_ONCE] = Field(default=(0,), min_length=1)
    noises: dict[Identifier, NamedNoise] = Field(default={})
    """further noises by name, each evaluated once, or once per noise seed if it is random: settings of operator_noise,
    module_noise or kv_cache as in an arm, or a preset (w4a16_mxfp4, w4a16_nvfp4, w4a4_mxfp4, w4a4_nvfp4, fp8,
    fp8_block, kv8_fp8, kv8_int8)"""
    operators: OperatorSet = "matmul"
    include_lm_head: bool = True
    num_questions: int | None = Field(default=None, ge=1)
    """number of questions, from the start of the test split; null: all"""
    max_response_tokens: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    pretrained_machine: str | None = None
    """machine of the study on which the model before training is evaluated; null: the device without simulated faults.
    Checkpoints are evaluated on the machine of their arm"""
    primary_scorer: Scorer | Literal["task"] | CustomFunction = "strict"
    """decides which responses are right: a scorer, or package.module:function of (response, gold_answer), run with your
    rights, which returns True or False, or a pair of the answer found and that"""
    scorer_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """set by the workflow"""
    sampling: EvaluationSampling | None = None
    """null: greedy decoding, one response per question"""
    threads: Threads = 1
    """torch threads per worker; results on a CPU depend on it"""

    def _problems(self) -> Iterator[str]:
        for name in self.noises:
            if _is_number(name):
                yield f"noises.{name}: found a number as name, which reads as a noise level, expected a word"
        if self.scorer_sha256 is not None and ":" not in self.primary_scorer:
            yield f"scorer_sha256: {self.primary_scorer} has no source of yours, remove scorer_sha256"

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

    def noise_at(self, level: float, attention: str) -> NoiseSpec:
        """Return the noise at a level, for a model with that attention."""
        if level >= 1:
            return settings_of(self.noises[self.noise_names()[level]]).spec_for(attention)
        noise = level_noise(level, self.operators, self.include_lm_head)
        return NoiseSpec() if noise is None else noise.spec_for(attention)


class StudyEvaluationConfig(EvaluationConfig):
    """Content of `evaluation` in a study file: how checkpoints are evaluated, and on which further machines.

    A separate class, because the settings of a job do not depend on the other machines.
    """

    machines: Annotated[tuple[Identifier, ...], EACH_ONCE] = ()
    """machines on which every checkpoint is evaluated too, with their device, simulated faults, and the dtype, threads
    and batch_size of their `counterpart`; the report has the differences"""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if problem := repeated_noise(self.noises):
            yield f"noises.{problem}"
        levels = {level: level_noise(level, self.operators, self.include_lm_head) for level in self.noise_levels}
        for name, noise in self.noises.items():
            same = next((level for level, other in levels.items() if settings_of(noise) == other), None)
            if same is not None:
                yield f"noises.{name}: found the noise of noise_levels {same:g} again, remove one of them"
