"""Tries the error models and schedules of a user's own before anything runs: one line per mistake in them."""

from collections.abc import Iterator, Mapping

from aqnpipe.config.arm import Arm
from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.config.evaluation_noise import EvaluationNoise, settings_of
from aqnpipe.config.own_noise import OwnError, OwnSchedule
from aqnpipe.config.study import Study, StudyConfig
from aqnpipe.errors import ConfigError


def own_noise_problems(study: Study, source: str) -> Iterator[str]:
    """Yield the error models and schedules of a study (read from `source`) that break their contract."""
    config = study.config
    if isinstance(config, StudyConfig):
        for name, arm in study.arms.items():
            where = f"{config.arms_file}: arms.{name}"
            yield from unusable_errors({where: arm})
            schedule = arm.aqn.schedule if arm.aqn is not None else None
            problem = _unusable_schedule(schedule, config) if isinstance(schedule, OwnSchedule) else None
            if problem is not None:
                yield f"{where}.aqn.schedule{problem}"
    yield from unusable_noises(config.evaluation, f"{source}: evaluation.noises.")


def unusable_noises(evaluation: EvaluationConfig, where: str) -> Iterator[str]:
    """Yield the named noises of an evaluation whose error model breaks its contract; `where` begins each line."""
    yield from unusable_errors({f"{where}{name}": settings_of(noise) for name, noise in evaluation.noises.items()})


def unusable_errors(parts: Mapping[str, Arm | EvaluationNoise]) -> Iterator[str]:
    """Yield the error models of arms or noises that break their contract, each with its key."""
    for where, part in parts.items():
        for key, noise in (("operator_noise", part.operator_noise), ("module_noise", part.module_noise)):
            if noise is None or not isinstance(noise.error, OwnError):
                continue
            from aqnpipe.noise.kernels.own import refuse_unusable

            try:
                refuse_unusable(noise.error)
            except ConfigError as problem:
                yield f"{where}.{key}.error: {problem}"


def _unusable_schedule(schedule: OwnSchedule, config: StudyConfig) -> str | None:
    """Return the end of a message that begins with the schedule's key, or None if the schedule can be used."""
    from aqnpipe.noise.schedule import own_sigmas

    if schedule.sigmas is not None:
        return ".sigmas: found sigmas, expected none: a job computes them with the function"
    try:
        own_sigmas(schedule, config.num_steps, config.training.epochs, config.training.steps_per_rollout)
    except ConfigError as problem:
        return f": {problem}"
    return None
