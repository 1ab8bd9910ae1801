"""Settings of the diagnosis, exact probes and statistical scans (SRDD), and of the rule from it to per-layer sigmas."""

from typing import Literal, Self

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel

DiagnosisMethod = Literal["exact", "statistical", "all"]
"""What runs: exact probes, statistical scans, or both."""


class DiagnosisConfig(FrozenModel):
    """Exact probes decide; the scans report beside them, with the published thresholds by default."""

    num_prompts: int = Field(default=5, ge=1, description="training questions that the model is fed")
    num_repeats: int = Field(default=4, ge=2, description="repeated runs of the ambient scan")
    gain_noise_scale: float = Field(default=0.1, gt=0, description="input noise of the gain scan, in stds of the input")
    gain_trials: int = Field(default=3, ge=1)
    ambient_jump_z: float = Field(default=2.0, gt=0)
    gain_drop_z: float = Field(default=2.0, gt=0)
    kurtosis_drop_z: float = Field(default=2.0, gt=0)
    first_kurtosis_layer: int = Field(default=2, ge=1, description="drops of log-kurtosis are looked for from here on")
    exact_repeats: int = Field(default=5, ge=2, description="runs of each layer on one input, for faults by chance")
    intermittent_rate: float = Field(
        default=0.003, gt=0, lt=1, description="probability per element of the rarest chance fault that must be seen"
    )
    miss_probability: float = Field(
        default=0.001, gt=0, lt=1, description="probability at which such a fault on a single channel may be missed"
    )
    seed: int = Field(default=0, ge=0)
    threads: int = Field(default=1, ge=1)


SigmaStrategy = Literal["published", "targeted", "variable", "healthy_layers", "random_layers", "wrong_layers"]
"""How a diagnosis becomes sigmas; described in diagnosis/sigmas.py and config/README.md."""


class SigmaRule(FrozenModel):
    """Settings of the strategies that turn a diagnosis into per-layer sigmas; the defaults are the published rule's."""

    base_sigma: float = Field(default=0.05, gt=0)
    low_gain_ratio: float = Field(default=0.8, gt=0, description="below this share of the median gain: raised")
    high_kurtosis_ratio: float = Field(default=1.2, gt=0, description="above this multiple of the median: raised")
    raise_factor: float = Field(default=1.5, ge=1)
    instability_threshold: float = Field(default=0.1, gt=0, description="above this instability: lowered")
    lower_factor: float = Field(default=0.5, gt=0, le=1)
    sigma_min: float = Field(default=0.01, gt=0)
    sigma_max: float = Field(default=0.15, gt=0)
    high_priority_ratio: float = Field(default=1.2, gt=0)
    targeted_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="without a fault, this share of the layers, the most sensitive, is targeted",
    )
    seed: int = Field(default=0, ge=0, description="draws the layers of random_layers")

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.sigma_min > self.sigma_max:
            raise ValueError(f"sigma_min {self.sigma_min} must not exceed sigma_max {self.sigma_max}")
        return self
