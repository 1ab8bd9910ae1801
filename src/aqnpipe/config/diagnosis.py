"""Settings of the diagnosis (exact probes and statistical SRDD scans), and of the rule that derives layer sigmas."""

from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import Field

from aqnpipe.config.base import FrozenModel, Seed, Threads

DiagnosisMethod = Literal["exact", "all"]
"""Exact probes, which decide, or with them the published statistical scans."""


class DiagnosisConfig(FrozenModel):
    """Settings of exact probes, which decide, and of scans, which only report; default thresholds are as published."""

    num_prompts: int = Field(default=5, ge=1)
    """number of training questions used as prompts"""
    num_diagnoses: int = Field(default=1, ge=1, exclude_if=lambda number: number == 1)
    """how often the scans run, with other random numbers each time; a layer has the mean of its results"""
    num_repeats: int = Field(default=4, ge=2)
    """repeated runs of each layer in the ambient scan"""
    gain_noise_scale: float = Field(default=0.1, gt=0)
    """input noise of the gain scan, relative to the std of the input"""
    gain_trials: int = Field(default=3, ge=1)
    ambient_jump_z: float = Field(default=2.0, gt=0)
    gain_drop_z: float = Field(default=2.0, gt=0)
    kurtosis_drop_z: float = Field(default=2.0, gt=0)
    first_kurtosis_layer: int = Field(default=2, ge=1)
    """first layer in which the kurtosis scan looks for drops"""
    exact_repeats: int = Field(default=5, ge=2)
    """runs of each layer on one input, to detect intermittent faults"""
    intermittent_rate: float = Field(default=0.003, gt=0, lt=1)
    """probability per element of the rarest intermittent fault that must be detected"""
    miss_probability: float = Field(default=0.001, gt=0, lt=1)
    """allowed probability of missing such a fault on a single channel"""
    sensitivity_texts: int = Field(default=64, ge=1)
    """training questions with solutions on which sensitivity is measured, at most"""
    seed: Seed = 0
    threads: Threads = 1


SigmaStrategy = Literal["published", "robust_first", "damage_first", "shuffled_layers"]
"""Strategies that derive sigmas from a diagnosis, described in diagnosis/sigmas.py and config/README.md."""

NEED_SENSITIVITY: tuple[SigmaStrategy, ...] = tuple(name for name in get_args(SigmaStrategy) if name != "published")
"""The strategies that need the measured sensitivity of every layer."""

NEEDS_PARITY: SigmaStrategy = "damage_first"
"""The strategy that also needs the measured error of every layer."""


class SigmaRule(FrozenModel):
    """Settings of the strategies that derive layer sigmas from a diagnosis; the defaults are the published rule."""

    base_sigma: float = Field(default=0.05, gt=0)
    low_gain_ratio: float = Field(default=0.8, gt=0)
    """a layer with a gain below this share of the median gets a higher sigma"""
    high_kurtosis_ratio: float = Field(default=1.2, gt=0)
    """a layer with a kurtosis above this multiple of the median gets a higher sigma"""
    raise_factor: float = Field(default=1.5, ge=1)
    instability_threshold: float = Field(default=0.1, gt=0)
    """a layer with an instability above this gets a lower sigma"""
    lower_factor: float = Field(default=0.5, gt=0, le=1)
    sigma_min: float = Field(default=0.01, gt=0)
    sigma_max: float = Field(default=0.15, gt=0)
    high_priority_ratio: float = Field(default=1.2, gt=0)
    seed: Seed = 0
    """seed of shuffled_layers"""

    def _problems(self) -> Iterator[str]:
        if self.sigma_min > self.sigma_max:
            yield f"sigma_min {self.sigma_min} must not exceed sigma_max {self.sigma_max}"
