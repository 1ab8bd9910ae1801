"""The noises of a study in units of a measured machine: how many times that machine's error each one is, per operator.

Both are relative: the root mean square of an error over that of the operator's results. Relative Gaussian noise of
scale s has exactly s. What the machine does is in a parity, measured on the same inputs operator by operator.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from aqnpipe.artifacts.parities import OperatorParity, ParityFile
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import AbsoluteGaussian, ErrorModel, OperatorNoise, RelativeGaussian, SystematicBias
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import Study


@dataclass(frozen=True)
class StudyNoise:
    """A noise of the study on operators: of an evaluation (its `level`) or of the training of `arms`."""

    noise: OperatorNoise
    level: float | None
    arms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spread:
    """Median and range over operators."""

    middle: float
    lowest: float
    highest: float
    count: int


def spread_of(values: list[float]) -> Spread | None:
    """Return median and range; None without values."""
    return Spread(median(values), min(values), max(values), len(values)) if values else None


def noises_of(study: Study, model: str, attention: str) -> list[StudyNoise]:
    """Return the noises on operators that a model meets: those of evaluations, then others that arms are trained with.

    Noise on modules is not among them.
    """
    plan, evaluation = StudyPlan(study), study.config.evaluation
    levels = [(level, evaluation.noise_at(level, attention)[0]) for level in evaluation.all_levels()]
    found = [StudyNoise(_resolved(plan, noise, model), level) for level, noise in levels if noise is not None]
    for name, arm in study.arms.items():
        noise = arm.operator_noise
        if noise is None or not noise.is_active or arm.model != model:
            continue
        trained = _resolved(plan, noise, model)
        same = next((one for one in found if one.noise == trained), None)
        if same is None:
            found.append(StudyNoise(trained, None, (name,)))
        elif same.level is None:
            found[found.index(same)] = StudyNoise(trained, None, (*same.arms, name))
    return found


def _resolved(plan: StudyPlan, noise: OperatorNoise, model: str) -> OperatorNoise:
    """Return the noise with the file of its measured error, and without the phases, which are no part of its size."""
    error = plan.measured_error(noise.error, model) if isinstance(noise.error, MeasuredError) else noise.error
    return noise.model_copy(update={"error": error, "phases": ("evaluation",)})


def times_by_operator(
    noise: OperatorNoise, parity: ParityFile, parities: Mapping[str, ParityFile]
) -> Iterator[tuple[OperatorParity, float]]:
    """Yield each operator that `noise` is put on, and the noise as a multiple of the error in `parity`.

    `parities` by path, for noise that is itself measured. The multiple is infinite where the machine has no error.
    Nothing is yielded for noise without a fixed size, such as rounding to a number format.
    """
    own = _measured_sizes(noise.error, parities)
    for operator in parity.operators:
        size = _relative_size(noise, operator, own) if _is_put_on(noise, operator) else None
        if size is not None:
            yield operator, size / operator.relative_rms if operator.relative_rms else math.inf


def _is_put_on(noise: OperatorNoise, operator: OperatorParity) -> bool:
    """Return whether a noise is put on an operator: on products, and on norms if it is measured.

    With operators: all, it is put on norms within layers. Softmax and activations, which that has too, are parts of
    other operators in a parity.
    """
    if operator.is_norm:
        in_layers = noise.operators == "all" and operator.layer is not None
        return in_layers or isinstance(noise.error, MeasuredError)
    return operator.is_product


def _measured_sizes(error: ErrorModel, parities: Mapping[str, ParityFile]) -> dict[str, float]:
    """Return the relative size of measured noise by operator; empty for other noise and without its parity."""
    if not isinstance(error, MeasuredError) or error.source not in parities:
        return {}
    own = parities[error.source].operators
    return {one.name: error.multiple * one.figures_rms for one in own if one.figures_rms is not None}


def _relative_size(noise: OperatorNoise, operator: OperatorParity, own: Mapping[str, float]) -> float | None:
    if isinstance(noise.error, MeasuredError):
        return own.get(operator.name) if noise.is_in(operator.layer) else None
    match noise.error_in(operator.layer):
        case RelativeGaussian(scale=scale):
            return scale
        case AbsoluteGaussian(scale=scale) | SystematicBias(scale=scale):
            return scale / operator.result_rms if operator.result_rms else None
        case _:
            return None
