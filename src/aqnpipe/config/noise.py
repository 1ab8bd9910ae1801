"""What noise an arm asks for: operator noise, adaptive weight noise (AQN) with its schedule, and machine faults."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.diagnosis import SigmaStrategy

Phase = Literal["rollout", "reference", "actor_forward", "backward", "validation", "evaluation"]
"""Where in a study a model computes. Each phase has exactly the noise that was requested it."""

TRAINING_PHASES: tuple[Phase, ...] = ("rollout", "reference", "actor_forward", "backward", "validation")

OperatorSet = Literal["matmul", "all"]
"""matmul: matmul, bmm, `@`, linear. all: these plus softmax, silu, gelu, layer_norm and RMSNorm."""

ModuleScope = Literal["minimal", "mlp", "linear", "all"]
"""minimal: every RMSNorm. mlp: these and down_proj. linear: every linear module. all: RMSNorms and linear modules."""

LayerIndex = Annotated[int, Field(ge=0)]


class RelativeGaussian(FrozenModel):
    """`y' = y + s*|y|*z`, z ~ N(0, 1) fresh for every element of every call."""

    kind: Literal["relative_gaussian"] = "relative_gaussian"
    scale: float = Field(ge=0, lt=1, description="s, the relative standard deviation; 0.05 is '5 %'")


class AbsoluteGaussian(FrozenModel):
    """`y' = y + s*z`, z ~ N(0, 1): the error of a fixed-point format."""

    kind: Literal["absolute_gaussian"] = "absolute_gaussian"
    scale: float = Field(ge=0, description="s, the standard deviation in the units of the tensor")


class SystematicBias(FrozenModel):
    """`y' = y + s*sign(y)`: a rounding bias away from zero."""

    kind: Literal["systematic_bias"] = "systematic_bias"
    scale: float = Field(ge=0, description="s, in the units of the tensor")


class MantissaTruncation(FrozenModel):
    """Rounding toward zero to a few explicit mantissa bits."""

    kind: Literal["mantissa_truncation"] = "mantissa_truncation"
    mantissa_bits: int = Field(ge=0, le=22, description="explicit mantissa bits that are kept; bfloat16 has 7")


class FakeQuantization(FrozenModel):
    """Operands of linear layers rounded to a 4-bit block format; gradients pass straight through the rounding."""

    kind: Literal["fake_quantization"] = "fake_quantization"
    format: Literal["mxfp4", "nvfp4"]
    weights: bool = True
    activations: bool = False

    @model_validator(mode="after")
    def _something_is_quantized(self) -> Self:
        if not (self.weights or self.activations):
            raise ValueError("weights and activations are both false, expected one of them to be quantized")
        return self


ErrorKind = Literal[
    "relative_gaussian", "absolute_gaussian", "systematic_bias", "mantissa_truncation", "fake_quantization"
]

ScaledError = RelativeGaussian | AbsoluteGaussian | SystematicBias
"""Errors with a scale, where 0 means none."""

OutputErrorModel = ScaledError | MantissaTruncation
"""Errors that are put on a tensor after it was computed."""

ErrorModel = OutputErrorModel | FakeQuantization

Quantity = Literal["relative", "absolute", "outward"]
"""What a measured error is a mean square of: (y' - y)/y, y' - y, or (y' - y)*sign(y), which a bias makes positive."""


def is_active(error: ErrorModel) -> bool:
    """Tell whether `error` changes anything: a scale of 0 does not."""
    return not isinstance(error, ScaledError) or error.scale > 0


def quantity_of(error: ErrorModel) -> Quantity:
    """Return what the size of `error` is measured as."""
    match error:
        case AbsoluteGaussian():
            return "absolute"
        case SystematicBias():
            return "outward"
        case _:
            return "relative"


def requested_size(error: ErrorModel) -> float:
    """Return the root mean square that `error` should measure as; an upper bound for roundings of a number format.

    Truncation to b bits changes a number by less than 2^-b of itself, rounding to a 4-bit format by all of it at most.
    """
    match error:
        case RelativeGaussian() | AbsoluteGaussian() | SystematicBias():
            return error.scale
        case MantissaTruncation():
            return 2.0**-error.mantissa_bits
        case FakeQuantization():
            return 1.0


def _check_unique(phases: tuple[Phase, ...]) -> None:
    if len(set(phases)) != len(phases):
        raise ValueError("phases must not repeat")


class OperatorNoise(FrozenModel):
    """Error on matmul-like operators, wherever the model calls them.

    In the backward phase the exact gradients of both operands get the same kind of error.
    """

    operators: OperatorSet = "matmul"
    error: ErrorModel = Field(discriminator="kind")
    phases: tuple[Phase, ...] = Field(
        default=("rollout", "reference", "actor_forward", "backward"),
        min_length=1,
        description="training phases that compute with this error; evaluation levels are set by the study",
    )
    include_lm_head: bool = Field(default=True, description="whether the output projection is noised too")
    layers: tuple[LayerIndex, ...] | None = Field(
        default=None, description="decoder layers that are noised; null means all"
    )
    layer_scales: dict[LayerIndex, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, description="scale of single layers, in place of error.scale"
    )
    attention: Literal["decomposed", "fused"] = Field(
        default="decomposed",
        description="decomposed: both products of attention (models need eager attention). fused: attention is one "
        "operator, noised on its output (models need sdpa attention)",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _check_unique(self.phases)
        if "backward" in self.phases and "actor_forward" not in self.phases:
            raise ValueError("backward noise needs actor_forward among the phases: it is recorded in the forward graph")
        if self.layer_scales and not isinstance(self.error, ScaledError):
            raise ValueError(f"layer_scales: {self.error.kind} has no scale")
        if isinstance(self.error, RelativeGaussian) and any(scale >= 1 for scale in self.layer_scales.values()):
            raise ValueError("layer_scales: a relative scale must be below 1")
        unknown = set(self.layer_scales) - set(self.layers) if self.layers is not None else set()
        if unknown:
            raise ValueError(f"layer_scales: layers {sorted(unknown)} are not among the noised layers")
        if isinstance(self.error, FakeQuantization):
            if self.operators != "matmul":
                raise ValueError("fake_quantization works on linear layers only, expected operators: matmul")
            if "backward" in self.phases:
                raise ValueError(
                    "fake_quantization has no backward error of its own (its backward products use the quantized "
                    "operands whenever actor_forward does), expected phases without backward"
                )
        return self

    def error_in(self, layer: int | None) -> ErrorModel | None:
        """Return the error that decoder layer `layer` (None: the output projection) gets, or None if it gets none."""
        wanted = self.include_lm_head if layer is None else self.layers is None or layer in self.layers
        error = self.error
        if layer in self.layer_scales:
            error = error.model_copy(update={"scale": self.layer_scales[layer]})
        return error if wanted and is_active(error) else None

    @property
    def is_active(self) -> bool:
        """Whether any layer gets an error."""
        return is_active(self.error) or any(scale > 0 for scale in self.layer_scales.values())


class ModuleNoise(FrozenModel):
    """Error on the input or output of chosen modules, by forward hooks (the series E2 to E4)."""

    modules: ModuleScope | tuple[str, ...] = Field(
        description="a scope, or patterns of module names such as `*.down_proj`; each pattern must match a module"
    )
    point: Literal["input", "output"] = "input"
    error: OutputErrorModel = Field(discriminator="kind")
    phases: tuple[Phase, ...] = Field(default=("rollout",), min_length=1, description="any but backward")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _check_unique(self.phases)
        if "backward" in self.phases:
            raise ValueError("hooks on modules have no backward phase")
        if self.modules == ():
            raise ValueError("modules is empty, expected a scope or at least one pattern")
        return self

    @property
    def is_active(self) -> bool:
        """Whether the error changes anything."""
        return is_active(self.error)


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


class ConstantSigma(FrozenModel):
    """The same sigma at every step."""

    kind: Literal["constant"] = "constant"
    sigma: float = Field(ge=0)


class CosineDecay(FrozenModel):
    """`sigma_end + (sigma_start - sigma_end) * (1 + cos(pi*t/T)) / 2`."""

    kind: Literal["cosine"] = "cosine"
    sigma_start: float = Field(ge=0)
    sigma_end: float = Field(ge=0)


Schedule = Annotated[
    GlobalDecay | LinearDecay | EpochAwareRanges | EpochAwareGeometric | ConstantSigma | CosineDecay,
    Field(discriminator="kind"),
]


AqnTargets = Literal["auto", "all_norms", "post_attention", "hidden_states"]


class AdaptiveNoise(FrozenModel):
    """AQN: Gaussian noise on the policy that rolls out, redrawn at each weight sync, its sigma set by a schedule.

    On norm weights it is absolute, `w + sigma*z` (QeRL); on hidden states relative, `h + sigma*|h|*z` on the output of
    every decoder layer (the seeds' layer-guided form).
    """

    schedule: Schedule
    targets: AqnTargets = Field(
        default="auto",
        description="auto: every RMSNorm of a dense model, post-attention norms of a mixture of experts; all_norms; "
        "post_attention; hidden_states",
    )
    layer_sigmas_from: str | None = Field(
        default=None,
        description="name of a machine of the study whose diagnosis sets sigma per layer; null means uniform",
    )
    layer_sigmas_strategy: SigmaStrategy = Field(
        default="published", description="how that diagnosis becomes sigmas; the other strategies test or control it"
    )

    @model_validator(mode="after")
    def _strategy_has_a_machine(self) -> Self:
        if self.layer_sigmas_from is None and self.layer_sigmas_strategy != "published":
            raise ValueError(f"layer_sigmas_strategy {self.layer_sigmas_strategy} needs layer_sigmas_from, a machine")
        return self


FaultType = Literal["dead_zone", "saturation", "noise", "bias", "spike"]

FaultSite = Literal[
    "layer_output",
    "attention_output",
    "mlp_output",
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "q_norm",
    "k_norm",
]
"""Where in a decoder layer a fault sits: three outputs, or a linear or norm by its name. A model has some of them."""


FaultOrder = Literal["after_noise", "before_noise", "around_noise"]


class Fault(FrozenModel):
    """A simulated hardware fault on what one site of one decoder layer puts out."""

    type: FaultType
    layer: int = Field(ge=0)
    magnitude: float = Field(gt=0, le=1, description="m of the formulas in noise/faults.py")
    sparsity: float = Field(default=1.0, gt=0, le=1, description="share of the site's channels that are faulty, fixed")
    site: FaultSite = "layer_output"
    threshold: Literal["dynamic", "cached"] = Field(
        default="dynamic",
        description="whether the reference max|h|, mean|h| or std(h) is of each call or is kept from the first call",
    )
    seed: int = Field(default=0, ge=0, description="draws the faulty channels and the fault's own random numbers")
    order: FaultOrder = Field(
        default="after_noise",
        description="when the fault strikes where AQN puts noise on the same layer's hidden states: after it (noise "
        "may lift a value over a dead zone), before it (relative noise cannot revive an exact zero), or before and "
        "after",
    )

    @model_validator(mode="after")
    def _order_is_of_hidden_states(self) -> Self:
        if self.order != "after_noise" and self.site != "layer_output":
            raise ValueError(f"order {self.order} is about noise on hidden states, expected site layer_output")
        return self


class Machine(FrozenModel):
    """What a model runs on: the real device as it is, or the device plus simulated faults."""

    description: str = ""
    faults: tuple[Fault, ...] = Field(default=(), description="struck in this order where several share a site")


class NoiseSpec(FrozenModel):
    """What a run or pass computes under: noise on operators, on modules and by AQN, and the faults of its machine."""

    operator_noise: OperatorNoise | None = None
    module_noise: ModuleNoise | None = None
    aqn: AdaptiveNoise | None = None
    faults: tuple[Fault, ...] = ()

    def operator_noise_in(self, phase: Phase) -> OperatorNoise | None:
        """Return the noise on operators in `phase`; None if there is none."""
        noise = self.operator_noise
        return noise if noise is not None and noise.is_active and phase in noise.phases else None

    def module_noise_in(self, phase: Phase) -> ModuleNoise | None:
        """Return the noise on modules in `phase`; None if there is none."""
        noise = self.module_noise
        return noise if noise is not None and noise.is_active and phase in noise.phases else None
