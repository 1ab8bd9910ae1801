"""AQN schedules: sigma as a pure function of the number of completed optimiser steps."""

import math

from aqnpipe.config.noise import (
    ConstantSigma,
    CosineDecay,
    EpochAwareGeometric,
    EpochAwareRanges,
    GlobalDecay,
    LinearDecay,
    Schedule,
)
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
        case EpochAwareRanges():
            return _epoch_ranges(schedule, step, num_steps, num_epochs)
        case EpochAwareGeometric():
            return _geometric(schedule.sigma_start, schedule.sigma_end, step / num_steps)


def max_sigma(schedule: Schedule) -> float:
    """Return the largest sigma of `schedule`."""
    match schedule:
        case ConstantSigma():
            return schedule.sigma
        case EpochAwareRanges():
            return max(max(epoch.sigma_start, epoch.sigma_end) for epoch in schedule.ranges)
        case _:
            return max(schedule.sigma_start, schedule.sigma_end)


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
