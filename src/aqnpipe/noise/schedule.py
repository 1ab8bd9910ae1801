"""AQN schedules: sigma as a pure function of the number of completed optimiser steps.

A schedule of a user's own is a function. A job calls it once for every step, before it starts, and uses its numbers.
"""

import math

from aqnpipe.config.custom_code import CustomSchedule, as_config_error, is_usable_sigma, unchanged_function
from aqnpipe.config.noise import (
    ConstantSigma,
    CosineDecay,
    EpochAwareGeometric,
    EpochAwareRanges,
    GlobalDecay,
    LinearDecay,
    Schedule,
)
from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import ConfigError


def sigma_at(schedule: Schedule, step: int, num_steps: int, num_epochs: int) -> float:
    """Return sigma after `step` of `num_steps` optimiser steps (step = num_steps gives the final value).

    Sources: QeRL's staged decay (global), the linear and epoch-aware variants of the original experiments, and the
    usual constant and cosine. Raises ConfigError if the schedule does not fit the training, ValueError if `step` lies
    outside 0..num_steps.
    """
    if not 0 <= step <= num_steps:
        raise ValueError(f"step {step} lies outside 0..{num_steps}")
    match schedule:
        case GlobalDecay():
            return _global_decay(schedule, step, num_steps)
        case LinearDecay():
            return schedule.sigma_start + (schedule.sigma_end - schedule.sigma_start) * step / num_steps
        case ConstantSigma():
            return schedule.sigma
        case CosineDecay():
            share = (1 + math.cos(math.pi * step / num_steps)) / 2
            return schedule.sigma_end + (schedule.sigma_start - schedule.sigma_end) * share
        case CustomSchedule():
            return _custom(schedule, step, num_steps)
        case EpochAwareRanges():
            return _epoch_ranges(schedule, step, num_steps, num_epochs)
        case EpochAwareGeometric():
            return _geometric(schedule.sigma_start, schedule.sigma_end, step / num_steps)


def max_sigma(schedule: Schedule) -> float:
    """Return the largest sigma of `schedule`; of a user's own, the announced limit."""
    match schedule:
        case CustomSchedule():
            return schedule.sigma_max
        case ConstantSigma():
            return schedule.sigma
        case EpochAwareRanges():
            return max(max(epoch.sigma_start, epoch.sigma_end) for epoch in schedule.ranges)
        case _:
            return max(schedule.sigma_start, schedule.sigma_end)


def with_custom_sigmas(spec: TrainingSpec) -> TrainingSpec:
    """Return the settings of a training with the numbers of the arm's custom schedule, if any; see `custom_sigmas`."""
    aqn = spec.arm.aqn
    if aqn is None or not isinstance(aqn.schedule, CustomSchedule):
        return spec
    sigmas = custom_sigmas(aqn.schedule, spec.num_steps, spec.training.epochs, spec.training.steps_per_rollout)
    schedule = aqn.schedule.model_copy(update={"sigmas": sigmas})
    arm = spec.arm.model_copy(update={"aqn": aqn.model_copy(update={"schedule": schedule})})
    return spec.model_copy(update={"arm": arm})


def custom_sigmas(
    schedule: CustomSchedule, num_steps: int, num_epochs: int, steps_per_rollout: int = 1
) -> tuple[float, ...]:
    """Return what the function of `schedule` gives after 0 to `num_steps` steps.

    Raises ConfigError if it raises, returns anything but a finite number from 0 to `sigma_max`, has another number for
    the same step when it is asked again, or is 0 at every step that has a rollout; also if its source has changed.
    """
    call = unchanged_function(schedule.function, schedule.planned().source_sha256 or "")

    def sigma(step: int) -> float:
        with as_config_error(schedule.function, f"at step {step} of {num_steps}"):
            found = call(step, num_steps, num_epochs, **schedule.settings)
        if not is_usable_sigma(found, schedule.sigma_max):
            raise ConfigError(
                f"{schedule.function}: returned {str(found)[:40]!r} ({type(found).__name__}) at step {step} of "
                f"{num_steps}, expected a number from 0 to sigma_max {schedule.sigma_max:g}"
            )
        return float(found)

    found, again = ([sigma(step) for step in range(num_steps + 1)] for _ in range(2))
    for step, (first, second) in enumerate(zip(found, again, strict=True)):
        if first != second:
            raise ConfigError(
                f"{schedule.function}: returned {first:.6g} and then {second:.6g} at step {step}, expected the same "
                "number whenever it is asked"
            )
    if not any(found[:-1:steps_per_rollout]):
        raise ConfigError(
            f"{schedule.function}: returned 0 at every rollout of {num_steps} steps, expected more at some"
        )
    return tuple(found)


def _custom(schedule: CustomSchedule, step: int, num_steps: int) -> float:
    if schedule.sigmas is None or len(schedule.sigmas) != num_steps + 1:
        raise ValueError(f"the sigmas of {schedule.function} are not those of {num_steps} steps; this is a bug")
    return schedule.sigmas[step]


def _global_decay(schedule: GlobalDecay, step: int, num_steps: int) -> float:
    stage = min(step * schedule.num_stages // num_steps, schedule.num_stages - 1)
    if stage == 0:
        return 0.0
    return _geometric(schedule.sigma_start, schedule.sigma_end, (stage - 1) / (schedule.num_stages - 2))


def _epoch_ranges(schedule: EpochAwareRanges, step: int, num_steps: int, num_epochs: int) -> float:
    if len(schedule.ranges) != num_epochs:
        raise ConfigError(
            f"schedule.ranges: found {len(schedule.ranges)} ranges for {num_epochs} epochs, expected one per epoch"
        )
    epoch = min(step * num_epochs // num_steps, num_epochs - 1)
    fraction_of_epoch = step * num_epochs / num_steps - epoch
    sigmas = schedule.ranges[epoch]
    return _geometric(sigmas.sigma_start, sigmas.sigma_end, fraction_of_epoch)


def _geometric(start: float, end: float, fraction: float) -> float:
    return start * math.exp(fraction * math.log(end / start))
