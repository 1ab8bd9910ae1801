"""What noise an arm asks for: operator noise, adaptive weight noise (AQN) with its schedule, and machine faults."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel

Phase = Literal["rollout", "reference", "actor_forward", "backward", "validation", "evaluation"]
"""Where in a study a model computes. Each phase has exactly the noise that was asked for it."""

TRAINING_PHASES: tuple[Phase, ...] = ("rollout", "reference", "actor_forward", "backward", "validation")

OperatorSet = Literal["matmul", "all"]
"""matmul: matmul, bmm, `@`, linear. all: these plus softmax, silu, gelu, layer_norm and RMSNorm."""


class OperatorNoise(FrozenModel):
    """Relative Gaussian error `y' = y + s*|y|*z` on matmul-like operators, z ~ N(0, 1) fresh for every call.

    In the backward phase the exact gradients of both operands get the same relative error.
    """

    operators: OperatorSet = "matmul"
    relative_scale: float = Field(ge=0, lt=1, description="s, the relative standard deviation; 0.05 is '5 %'")
    phases: tuple[Phase, ...] = Field(
        default=("rollout", "reference", "actor_forward", "backward"),
        min_length=1,
        description="training phases that compute with this error; evaluation levels are set by the study",
    )
    include_lm_head: bool = Field(default=True, description="whether the output projection is noised too")
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, description="decoder layers that are noised; null means all"
    )

    @model_validator(mode="after")
    def _phases_make_sense(self) -> Self:
        if len(set(self.phases)) != len(self.phases):
            raise ValueError("phases must not repeat")
        if "backward" in self.phases and "actor_forward" not in self.phases:
            raise ValueError("backward noise needs actor_forward among the phases: it is recorded in the forward graph")
        return self


class GlobalDecay(FrozenModel):
    """QeRL's staged exponential decay: num_stages equal intervals, the first without noise (a warm-up)."""

    kind: Literal["global"] = "global"
    sigma_start: float = Field(gt=0)
    sigma_end: float = Field(gt=0, description="must be above 0: a geometric decay never reaches 0")
    num_stages: int = Field(ge=3, description="at least 3: stage 0 is clean and two stages define the decay")


class LinearDecay(FrozenModel):
    """`sigma_start + (sigma_end - sigma_start) * t / T`."""

    kind: Literal["linear"] = "linear"
    sigma_start: float = Field(ge=0)
    sigma_end: float = Field(ge=0)


class EpochRange(FrozenModel):
    """Sigma at the first step of an epoch and the value that it decays towards within that epoch."""

    sigma_start: float = Field(gt=0)
    sigma_end: float = Field(gt=0)


class EpochAwareRanges(FrozenModel):
    """Each epoch decays geometrically inside its own explicit range; there is no clean warm-up."""

    kind: Literal["epoch_ranges"] = "epoch_ranges"
    ranges: tuple[EpochRange, ...] = Field(min_length=1, description="one range per epoch of the training")


class EpochAwareGeometric(FrozenModel):
    """Epoch e of E decays between the boundaries `sigma_start*(sigma_end/sigma_start)^(e/E)` and the next one."""

    kind: Literal["epoch_geometric"] = "epoch_geometric"
    sigma_start: float = Field(gt=0)
    sigma_end: float = Field(gt=0)


Schedule = Annotated[
    GlobalDecay | LinearDecay | EpochAwareRanges | EpochAwareGeometric,
    Field(discriminator="kind"),
]


class WeightNoise(FrozenModel):
    """AQN (QeRL): absolute Gaussian noise on the RMSNorm weights of the rollout copy, redrawn at each weight sync."""

    schedule: Schedule
    targets: Literal["auto", "all_norms", "post_attention"] = Field(
        default="auto", description="auto: every RMSNorm of a dense model, post-attention norms of a mixture of experts"
    )
    layer_sigmas_from: str | None = Field(
        default=None,
        description="name of a machine of the study whose diagnosis sets sigma per layer; null means uniform",
    )


FaultType = Literal["dead_zone", "saturation", "noise", "bias", "spike"]


class Fault(FrozenModel):
    """A simulated hardware fault on the output of one decoder layer."""

    type: FaultType
    layer: int = Field(ge=0)
    magnitude: float = Field(gt=0, le=1, description="m of the formulas in noise/faults.py")
    sparsity: float = Field(default=1.0, gt=0, le=1, description="share of hidden channels that are faulty, fixed")
    site: Literal["layer_output"] = "layer_output"
    seed: int = Field(default=0, ge=0, description="draws the faulty channels and the fault's own random numbers")


class Machine(FrozenModel):
    """What a model runs on: the real device as it is, or the device plus a simulated fault."""

    description: str = ""
    fault: Fault | None = None
