"""Named noises of an evaluation: every error model that arms know, on operators, layers or modules.

The levels of an evaluation are scales of one error model, relative Gaussian noise on operators. Other errors have no
scale in common (a 4-bit format has none at all), so each has a name. In tables, comparisons and receipts the level of
the n-th named noise is the number n; scales of noise are below 1, so the two cannot be confused.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Discriminator, Field, RootModel, Tag, model_validator

from aqnpipe.config.base import FrozenModel, Identifier
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.model import noised_attention
from aqnpipe.config.noise import (
    AbsoluteGaussian,
    ErrorModel,
    FakeQuantization,
    ModuleNoise,
    OperatorNoise,
    OperatorSet,
    Phase,
    RelativeGaussian,
    is_active,
)
from aqnpipe.config.own_noise import OwnError
from aqnpipe.config.validation_messages import did_you_mean
from aqnpipe.errors import ConfigError

Preset = Literal["w4a16_mxfp4", "w4a16_nvfp4", "w4a4_mxfp4", "w4a4_nvfp4", "w8a8_fp8", "w8a8_fp8_block"]
"""Bits of weights and activations, and their format, in all linear modules but the output projection."""

PRESETS: tuple[Preset, ...] = get_args(Preset)


class _OperatorNoise(OperatorNoise):
    """Operator noise as in an arm, whose phase is `evaluation`, and whose attention is that of each model."""

    phases: tuple[Phase, ...] = ("evaluation",)
    attention: Literal["decomposed", "fused"] | None = Field(  # type: ignore[assignment]
        default=None,
        description="null: follows the model, both products with eager attention (decomposed), one operator else "
        "(fused); another value than the model's is an error",
    )


class _ModuleNoise(ModuleNoise):
    """Module noise as in an arm, whose phase is `evaluation`."""

    phases: tuple[Phase, ...] = ("evaluation",)


class EvaluationNoise(FrozenModel):
    """The noise of an evaluation: an error on operators, on modules, or both. Its phase is `evaluation`."""

    operator_noise: _OperatorNoise | None = Field(
        default=None,
        description="as in an arm; attention follows the model",
    )
    module_noise: _ModuleNoise | None = Field(default=None, description="as in an arm")

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        given = {"operator_noise": self.operator_noise, "module_noise": self.module_noise}
        if not any(given.values()):
            raise ValueError("expected operator_noise, module_noise, or both")
        for name, noise in given.items():
            if noise is not None and noise.phases != ("evaluation",):
                raise ValueError(f"{name}.phases: a noise of an evaluation has only this phase, remove phases")
            if noise is not None and not noise.is_active:
                raise ValueError(f"{name}: its error has scale 0, expected one that changes something")
        return self

    def operators_for(self, attention: str) -> OperatorNoise | None:
        """Return the noise on operators for a model with that implementation of attention; None if there is none."""
        if self.operator_noise is None:
            return None
        problem = self.attention_problem(attention)
        if problem is not None:
            raise ConfigError(problem)
        settings = {"attention": noised_attention(attention)}
        return OperatorNoise.model_validate(self.operator_noise.model_dump() | settings)

    def attention_problem(self, attention: str) -> str | None:
        """Return why the noise on operators cannot be had with an implementation of attention; None if it can."""
        given = None if self.operator_noise is None else self.operator_noise.attention
        if given in (None, noised_attention(attention)):
            return None
        return (
            f"operator_noise.attention: found {given}, the model computes attention {attention}, whose noise is "
            f"{noised_attention(attention)}: leave attention out"
        )

    def modules(self) -> ModuleNoise | None:
        """Return the noise on modules; None if there is none."""
        return None if self.module_noise is None else ModuleNoise.model_validate(self.module_noise.model_dump())

    @property
    def errors(self) -> list[ErrorModel]:
        """The errors on operators and modules."""
        return [noise.error for noise in (self.operator_noise, self.module_noise) if noise is not None]

    @property
    def is_random(self) -> bool:
        """Return whether another noise seed gives other numbers; roundings and biases are the same every time."""
        random = RelativeGaussian | AbsoluteGaussian | MeasuredError
        return any(
            error.draws > 0 if isinstance(error, OwnError) else isinstance(error, random) and is_active(error)
            for error in self.errors
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
    bits, _, number_format = name.partition("_")
    activations = not bits.endswith("a16")
    error: ErrorModel = FakeQuantization.model_validate({"format": number_format, "activations": activations})
    return EvaluationNoise(operator_noise=_OperatorNoise(error=error, include_lm_head=False))


def _kind_of(value: Any) -> str:
    return "preset" if isinstance(value, str) else "settings"


NamedNoise = Annotated[
    Annotated[EvaluationNoise, Tag("settings")] | Annotated[Preset, Tag("preset")], Discriminator(_kind_of)
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
    seen: list[tuple[str, EvaluationNoise]] = []
    for name, noise in noises.items():
        settings = settings_of(noise)
        for earlier, other in seen:
            if settings == other:
                return f"{name}: found the noise of {earlier} again, expected another noise"
        seen.append((name, settings))
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
