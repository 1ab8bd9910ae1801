"""Noise of an arm: operator noise, module noise, adaptive noise (AQN) with its schedule, and faults of a machine."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from aqnpipe.config.base import EACH_ONCE, FrozenModel, Seed, Threads
from aqnpipe.config.custom_code import CustomError, CustomSchedule
from aqnpipe.config.diagnosis import SigmaStrategy
from aqnpipe.config.measured_noise import LayerErrors, MeasuredError, OperatorError
from aqnpipe.config.model import Attention, Dtype
from aqnpipe.device import DeviceKind

Phase = Literal["rollout", "reference", "actor_forward", "backward", "validation", "evaluation"]
"""The parts of a study in which a model computes. Each phase has exactly the noise that was requested for it."""

ForwardPhase = Literal["rollout", "reference", "actor_forward", "validation", "evaluation"]

TRAINING_PHASES: tuple[Phase, ...] = ("rollout", "reference", "actor_forward", "backward", "validation")

OperatorSet = Literal["matmul", "all"]
"""matmul: matmul, bmm, `@`, linear. all: these plus softmax, silu, gelu, layer_norm and RMSNorm."""

ModuleScope = Literal["minimal", "mlp", "linear", "all"]
"""minimal: all RMSNorms. mlp: these and down_proj. linear: all linear modules. all: RMSNorms and linear modules."""

LayerIndex = Annotated[int, Field(ge=0)]


class RelativeGaussian(FrozenModel):
    """`y' = y + s*|y|*z`, with a new z ~ N(0, 1) for every element of every call, or of every product of operands."""

    kind: Literal["relative_gaussian"] = "relative_gaussian"
    scale: float = Field(ge=0, lt=1)
    """s, the relative standard deviation; 0.05 is 5 %"""
    redraw: Literal["always", "never"] = Field(default="always", exclude_if=lambda redraw: redraw == "always")
    """always: new noise in every call. never: a fixed machine, which makes the same error whenever it multiplies the
    same row with the same column"""
    machine: Seed | None = Field(default=None, exclude_if=lambda machine: machine is None)
    """number of the fixed machine, which is the same in all runs and evaluations; null: another one for each seed of a
    training and each noise seed of an evaluation"""

    def _problems(self) -> Iterator[str]:
        if self.machine is not None and not self.is_fixed:
            yield f"machine: found {self.machine}, which needs redraw: never"

    @property
    def is_fixed(self) -> bool:
        """Return whether the same operands have the same error."""
        return self.redraw == "never"

    def key_of_machine(self, seed: int, stream: str) -> tuple[int, str]:
        """Return seed and stream of the key of a fixed machine, from those of a run or an evaluation pass."""
        return (seed, stream) if self.machine is None else (self.machine, MACHINE)


class AbsoluteGaussian(FrozenModel):
    """`y' = y + s*z`, z ~ N(0, 1): the error of a fixed-point format."""

    kind: Literal["absolute_gaussian"] = "absolute_gaussian"
    scale: float = Field(ge=0)
    """s, the standard deviation, in the units of the tensor"""


class SystematicBias(FrozenModel):
    """`y' = y + s*sign(y)`: a rounding bias away from zero."""

    kind: Literal["systematic_bias"] = "systematic_bias"
    scale: float = Field(ge=0)
    """s, in the units of the tensor"""


class MantissaTruncation(FrozenModel):
    """Truncation toward zero to a few explicit mantissa bits."""

    kind: Literal["mantissa_truncation"] = "mantissa_truncation"
    mantissa_bits: int = Field(ge=0, le=22)
    """number of explicit mantissa bits to keep; bfloat16 has 7"""


NumberFormat = Literal["mxfp4", "nvfp4", "fp8", "fp8_block"]
"""Formats that operands of products can be rounded to."""


class FakeQuantization(FrozenModel):
    """Operands of products with a weight rounded to a 4-bit or 8-bit format; straight-through gradients."""

    kind: Literal["fake_quantization"] = "fake_quantization"
    format: NumberFormat
    """mxfp4: blocks of 32 with a power of two as scale; nvfp4: blocks of 16 with an E4M3 scale; fp8: E4M3 with a scale
    for the whole tensor; fp8_block: E4M3 with one for 128 x 128 weights and for 128 activations of a token"""
    weights: bool = True
    """round the weights"""
    activations: bool = False
    """round the activations"""

    def _problems(self) -> Iterator[str]:
        if not (self.weights or self.activations):
            yield "weights and activations are both false, expected at least one true"


ScaledError = RelativeGaussian | AbsoluteGaussian | SystematicBias
"""Errors with a scale; scale 0 means no error."""

OutputErrorModel = ScaledError | MantissaTruncation | CustomError
"""Errors that are put on a computed tensor."""

ErrorModel = OutputErrorModel | FakeQuantization | MeasuredError
"""Errors that can be requested of operators."""

PlacedError = OutputErrorModel | FakeQuantization | LayerErrors
"""Errors of the operators of one layer."""

TensorError = OutputErrorModel | OperatorError
"""Errors that are put on the result of one operator."""

AppliedError = TensorError | FakeQuantization
"""Errors of one operator in one layer."""

Quantity = Literal["relative", "absolute", "outward", "measured"]
"""Quantity whose mean square measures an error: (y' - y)/y, y' - y, or (y' - y)*sign(y), positive for a bias.

measured: y' - y over the root mean square that the measured machine's error has at y.
"""


def is_active(error: ErrorModel) -> bool:
    """Return whether `error` changes anything; a scale of 0 does not."""
    return not isinstance(error, ScaledError) or error.scale > 0


def is_fixed(error: ErrorModel | PlacedError | AppliedError | None) -> bool:
    """Return whether `error` is that of a fixed machine: the same for the same operands of a product."""
    return isinstance(error, RelativeGaussian) and error.is_fixed


MACHINE = "machine"
"""Stream of the key of a fixed machine that has a number, or that no study uses."""


def machine_stream(phase: Phase) -> str:
    """Return the stream of the key of the fixed machine of a phase: training and evaluations are on different ones."""
    return f"{MACHINE}.{'evaluation' if phase == 'evaluation' else 'training'}"


def quantity_of(error: AppliedError) -> Quantity:
    """Return the quantity that measures the size of `error`."""
    match error:
        case OperatorError():
            return "measured"
        case AbsoluteGaussian():
            return "absolute"
        case SystematicBias():
            return "outward"
        case CustomError():
            return error.quantity
        case _:
            return "relative"


def requested_size(error: AppliedError | MeasuredError) -> float:
    """Return the expected root mean square of `error`; for roundings of a number format, an upper bound.

    The relative error is below 2^-b for truncation to b bits, and at most 1 for rounding to a format. The size
    of a measured error is its multiple, that of a user's own the upper limit that was announced.
    """
    match error:
        case CustomError():
            return error.sizes[1]
        case OperatorError():
            return error.size
        case MeasuredError():
            return error.multiple
        case RelativeGaussian() | AbsoluteGaussian() | SystematicBias():
            return error.scale
        case MantissaTruncation():
            return 2.0**-error.mantissa_bits
        case FakeQuantization():
            return 1.0


class OperatorNoise(FrozenModel):
    """Error on the outputs of matrix products and similar operators, wherever the model calls them.

    In the backward phase, the exact gradients of both operands get the same kind of error.
    """

    operators: OperatorSet = "matmul"
    error: ErrorModel = Field(discriminator="kind")
    phases: Annotated[tuple[Phase, ...], EACH_ONCE] = Field(
        default=("rollout", "reference", "actor_forward", "backward"), min_length=1
    )
    """training phases with this error; the study sets the noise levels of evaluations"""
    include_lm_head: bool = True
    """whether the output projection has the error too, and of measured errors norms outside the layers"""
    layers: tuple[LayerIndex, ...] | None = None
    """decoder layers with the error; null means all"""
    layer_scales: dict[LayerIndex, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """scale of individual layers, in place of error.scale"""
    attention: Literal["decomposed", "fused"] = "decomposed"
    """decomposed: error on both products of attention (the model needs eager attention). fused: error on the output of
    attention as one operator (the model needs sdpa attention)"""

    def _problems(self) -> Iterator[str]:
        if "backward" in self.phases and "actor_forward" not in self.phases:
            yield "phases has backward without actor_forward, whose graph the backward noise belongs to"
        if self.layer_scales and not isinstance(self.error, ScaledError):
            yield f"layer_scales: {self.error.kind} has no scale"
        if isinstance(self.error, RelativeGaussian) and any(scale >= 1 for scale in self.layer_scales.values()):
            yield "layer_scales: expected relative scales below 1"
        if is_fixed(self.error) and (self.operators != "matmul" or self.attention == "fused"):
            found = "operators all" if self.operators == "all" else "attention fused"
            yield f"error.redraw is never, which needs operators matmul and eager attention: found {found}"
        unknown = set(self.layer_scales) - set(self.layers) if self.layers is not None else set()
        if unknown:
            yield f"layer_scales: layers {sorted(unknown)} are not among the noised layers"
        is_in_layers = self.layers is None or any(self.layer_scales.get(layer, 1) > 0 for layer in self.layers)
        if is_active(self.error) and not (self.include_lm_head or is_in_layers):
            yield (
                "layers: no decoder layer has the error, and include_lm_head is false: expected layers, "
                "include_lm_head: true, or for an arm without noise error.scale 0"
            )
        if isinstance(self.error, MeasuredError):
            if self.operators != "matmul":
                yield "measured errors are put on linear modules, attention and norms, expected operators: matmul"
            if "backward" in self.phases:
                yield "phases has backward, but a parity measures forward passes only, expected phases without backward"
        if isinstance(self.error, FakeQuantization):
            if self.operators != "matmul":
                yield "fake_quantization applies to products with a weight only, expected operators: matmul"
            if "backward" in self.phases:
                yield (
                    "fake_quantization has no separate backward error (its backward products use the quantized "
                    "operands whenever actor_forward does), expected phases without backward"
                )

    def is_in(self, layer: int | None) -> bool:
        """Return whether decoder layer `layer` (None: the output projection) is among those with the error."""
        return self.include_lm_head if layer is None else self.layers is None or layer in self.layers

    def error_in(self, layer: int | None) -> PlacedError | None:
        """Return the error in decoder layer `layer` (None: the output projection), or None if it has none."""
        wanted, error = self.is_in(layer), self.error
        if isinstance(error, MeasuredError):
            return error.in_layer(layer) if wanted else None
        if layer in self.layer_scales:
            error = error.model_copy(update={"scale": self.layer_scales[layer]})
        return error if wanted and is_active(error) else None

    def errors_by_part(self, num_layers: int) -> dict[int, PlacedError]:
        """Return the error of every part of a model that has one: layers, output projection, and what is around them.

        What is around has the error of the output projection where no layers are named, and its measured norms.
        """
        head, has_norms = self.error_in(None), isinstance(self.error, MeasuredError) and self.error.has_norms
        found = {layer: self.error_in(layer) for layer in range(num_layers)}
        found |= {num_layers: head, num_layers + 1: head if self.layers is None or has_norms else None}
        return {part: error for part, error in found.items() if error is not None}

    @property
    def is_active(self) -> bool:
        """Return whether any layer has an error."""
        return is_active(self.error) or any(scale > 0 for scale in self.layer_scales.values())


class ModuleNoise(FrozenModel):
    """Error on the input or output of selected modules, by forward hooks (the series E2 to E4)."""

    modules: ModuleScope | tuple[str, ...]
    """a scope, or patterns of module names such as `*.down_proj`; each pattern must match a module"""
    exclude: tuple[str, ...] = Field(default=(), exclude_if=lambda patterns: not patterns)
    """patterns of names of these modules that have no error; each must match one of them"""
    point: Literal["input", "output"] = "input"
    error: OutputErrorModel = Field(discriminator="kind")
    phases: Annotated[tuple[Phase, ...], EACH_ONCE] = Field(default=("rollout",), min_length=1)
    """any phases except backward"""

    def _problems(self) -> Iterator[str]:
        if "backward" in self.phases:
            yield "phases has backward, which module noise does not support"
        if is_fixed(self.error):
            yield "error.redraw is never, but a module has no operands of a product, expected always"
        if self.modules == ():
            yield "modules is empty, expected a scope or at least one pattern"

    @property
    def is_active(self) -> bool:
        """Return whether the error changes anything."""
        return is_active(self.error)


CacheFormat = Literal["fp8", "int8"]
"""Formats that keys and values can be rounded to."""


class CacheNoise(FrozenModel):
    """Keys and values rounded to the format in which a cache stores them, before attention reads them.

    A pass without a cache reads the same values. Gradients are straight-through.
    """

    format: CacheFormat
    """fp8: E4M3 with scale 1, vLLM's kv_cache_dtype fp8 without calibrated scales. int8: a scale for each token and
    head, max|x| / 127, vLLM's int8_per_token_head"""
    phases: Annotated[tuple[ForwardPhase, ...], EACH_ONCE] = Field(default=("rollout",), min_length=1)


class GlobalDecay(FrozenModel):
    """QeRL's staged exponential decay: `num_stages` equal intervals, the first one without noise (warm-up)."""

    kind: Literal["global"] = "global"
    sigma_start: float = Field(gt=0)
    """sigma at the first step with noise"""
    sigma_end: float = Field(gt=0)
    """above 0, because a geometric decay never reaches 0"""
    num_stages: int = Field(ge=3)
    """at least 3: stage 0 is clean, and a decay needs two stages"""


class LinearDecay(FrozenModel):
    """`sigma_start + (sigma_end - sigma_start) * t / T`."""

    kind: Literal["linear"] = "linear"
    sigma_start: float = Field(ge=0)
    """sigma at step 0"""
    sigma_end: float = Field(ge=0)
    """sigma after the last step"""


class EpochRange(FrozenModel):
    """Sigma at the first step of an epoch, and the sigma that it decays towards within the epoch."""

    sigma_start: float = Field(gt=0)
    """sigma at the first step with noise"""
    sigma_end: float = Field(gt=0)
    """sigma at the end; above 0, because a geometric decay never reaches 0"""


class EpochAwareRanges(FrozenModel):
    """Geometric decay within a range per epoch; there is no clean warm-up."""

    kind: Literal["epoch_ranges"] = "epoch_ranges"
    ranges: tuple[EpochRange, ...] = Field(min_length=1)
    """one range per epoch of the training"""


class EpochAwareGeometric(FrozenModel):
    """Geometric decay over all epochs: epoch e of E starts at `sigma_start*(sigma_end/sigma_start)^(e/E)`."""

    kind: Literal["epoch_geometric"] = "epoch_geometric"
    sigma_start: float = Field(gt=0)
    """sigma at the first step with noise"""
    sigma_end: float = Field(gt=0)
    """sigma at the end; above 0, because a geometric decay never reaches 0"""


class ConstantSigma(FrozenModel):
    """The same sigma at every step."""

    kind: Literal["constant"] = "constant"
    sigma: float = Field(ge=0)
    """standard deviation of the noise"""


class CosineDecay(FrozenModel):
    """`sigma_end + (sigma_start - sigma_end) * (1 + cos(pi*t/T)) / 2`."""

    kind: Literal["cosine"] = "cosine"
    sigma_start: float = Field(ge=0)
    """sigma at step 0"""
    sigma_end: float = Field(ge=0)
    """sigma after the last step"""


Schedule = Annotated[
    GlobalDecay | LinearDecay | EpochAwareRanges | EpochAwareGeometric | ConstantSigma | CosineDecay | CustomSchedule,
    Field(discriminator="kind"),
]


class LayerSigmas(FrozenModel):
    """A sigma per layer that somebody wrote down; the other keys are those of the published files of sigmas.

    A layer without a sigma of its own has `base_sigma`. The schedule is that of the arm, not the one named here.
    """

    enabled: Literal[True] = True
    layer_specific: Literal[True] = True
    base_sigma: float = Field(gt=0)
    """the sigma that a factor of 1 on the schedule's sigma stands for"""
    layer_sigmas: dict[LayerIndex, Annotated[float, Field(ge=0)]] = Field(min_length=1)
    schedule: str | None = None
    high_priority_layers: tuple[LayerIndex, ...] = ()


AqnTargets = Literal["auto", "all_norms", "post_attention", "hidden_states"]


class AdaptiveNoise(FrozenModel):
    """AQN: Gaussian noise on the rollout policy, redrawn at each weight sync, with a schedule for its sigma.

    On norm weights the noise is absolute, `w + sigma*z` (QeRL). On hidden states it is relative, `h + sigma*|h|*z` on
    the output of every decoder layer (the layer-guided form of the original experiments).
    """

    schedule: Schedule
    targets: AqnTargets = "auto"
    """auto: all RMSNorms of a dense model, the post-attention norms of a mixture of experts. all_norms: all RMSNorms.
    post_attention: the post-attention norms. hidden_states: the outputs of all decoder layers"""
    layer_sigmas_from: str | None = None
    """machine whose diagnosis sets sigma per layer; null means the same sigma in all layers"""
    layer_sigmas_strategy: SigmaStrategy = "published"
    """rule that derives sigmas from the diagnosis; published, or by what noise in a layer costs"""
    sigmas: LayerSigmas | None = Field(default=None, exclude_if=lambda sigmas: sigmas is None)
    """sigma per layer by hand: base_sigma and layer_sigmas, or a YAML file with them under the key aqn, relative to the
    arms file"""
    target_layers: tuple[LayerIndex, ...] | None = Field(
        default=None, min_length=1, exclude_if=lambda layers: layers is None
    )
    """decoder layers with this noise, and no norm outside them; null means all"""
    actor_forward: bool = Field(default=False, exclude_if=lambda wanted: not wanted)
    """whether the noise is in the policy's forward passes of training too, not in rollouts alone; needs targets:
    hidden_states. Gradients are straight-through"""
    exclude: tuple[str, ...] = Field(default=(), exclude_if=lambda patterns: not patterns)
    """patterns of names of norms that have no noise, such as `*.input_layernorm`; each must match one"""

    @property
    def is_uniform(self) -> bool:
        """Return whether all decoder layers have the same sigma."""
        return self.layer_sigmas_from is None and self.sigmas is None and self.target_layers is None

    def factor(self, layer: int | None, diagnosed: Mapping[int, float] | None, norm: str = "") -> float:
        """Return the factor on the schedule's sigma in a decoder layer (None: outside them), or on a norm by its name.

        `diagnosed`: the factors of a diagnosis, by layer.
        """
        is_target = self.target_layers is None or layer in self.target_layers
        if not is_target or any(fnmatchcase(norm, pattern) for pattern in self.exclude):
            return 0.0
        if layer is None:
            return 1.0
        if self.sigmas is not None:
            return self.sigmas.layer_sigmas.get(layer, self.sigmas.base_sigma) / self.sigmas.base_sigma
        return 1.0 if diagnosed is None else diagnosed.get(layer, 0.0)

    def _problems(self) -> Iterator[str]:
        if self.sigmas is not None and self.layer_sigmas_from is not None:
            yield "sigmas and layer_sigmas_from both set sigma per layer, expected one of them"
        if self.exclude and self.targets == "hidden_states":
            yield "exclude names norms, but targets is hidden_states, expected target_layers"
        if self.actor_forward and self.targets != "hidden_states":
            yield f"actor_forward: found targets {self.targets}, expected hidden_states"
        if self.layer_sigmas_from is None and self.layer_sigmas_strategy != "published":
            yield f"layer_sigmas_strategy is {self.layer_sigmas_strategy}, expected a machine in layer_sigmas_from"


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
"""Site of a fault in a decoder layer: one of three outputs, or a linear or norm by name. A model has some of them."""


FaultOrder = Literal["after_noise", "before_noise", "around_noise"]


class Fault(FrozenModel):
    """A simulated hardware fault on the output of one site of one decoder layer."""

    type: FaultType
    layer: int = Field(ge=0)
    magnitude: float = Field(gt=0, le=1)
    """m of the formulas in noise/injection/faults.py"""
    sparsity: float = Field(default=1.0, gt=0, le=1)
    """share of faulty channels; they are the same in every call"""
    site: FaultSite = "layer_output"
    threshold: Literal["dynamic", "cached"] = "dynamic"
    """dynamic: the reference max|h|, mean|h| or std(h) is computed in each call. cached: it is kept from the first
    call"""
    seed: Seed = 0
    """seed of the faulty channels and of the fault's random numbers"""
    order: FaultOrder = "after_noise"
    """order of the fault and AQN's noise on hidden states of the same layer: fault after noise (noise may lift a value
    over a dead zone), before noise (relative noise cannot revive an exact zero), or both"""

    def _problems(self) -> Iterator[str]:
        if self.order != "after_noise" and self.site != "layer_output":
            yield f"order is {self.order}, which needs site layer_output, found {self.site}"


class Counterpart(FrozenModel):
    """Configuration in which the device stands in for another machine; omitted settings stay as in the study."""

    dtype: Dtype | None = None
    attention: Attention | None = None
    batch_size: int | None = Field(default=None, ge=1)
    """sequences per batch; null: 8"""
    threads: Threads | None = None
    """CPU threads; null: 1"""

    def _problems(self) -> Iterator[str]:
        if not any((self.dtype, self.attention, self.batch_size, self.threads)):
            yield "expected dtype, attention, batch_size or threads: it would be the machine itself"


class Machine(FrozenModel):
    """The machine that a model runs on: the real device, with or without simulated faults."""

    description: str = ""
    device: DeviceKind | None = None
    """device of this machine: cpu, cuda or npu; null: that of the study. Its diagnosis, the measurement of its
    `counterpart` and evaluations on it (evaluation.machines) run there; training never does"""
    counterpart: Counterpart | None = None
    """the device in another configuration, such as {dtype: bfloat16}. The workflow measures how its operators differ
    from those of the study, and `from` of a measured error can name this machine"""
    measured_in: str | None = Field(default=None, pattern=r"\.json$")
    """file that `aqnpipe parity --json` wrote of this machine, in place of a `counterpart` that is measured here,
    relative to the working directory; {model} in it is the model's name"""
    faults: tuple[Fault, ...] = ()
    """simulated faults, applied in this order on a shared site"""
    diagnosed_in: str | None = Field(default=None, min_length=1)
    """folder with layers.parquet and verdict.json of a diagnosis of the same weights on another machine, relative to
    the working directory; {model} in it is the model's name. It is read, and nothing is diagnosed here"""

    @property
    def has_parity(self) -> bool:
        """Return whether its error is known: measured as that of its counterpart, or in a file."""
        return self.counterpart is not None or self.measured_in is not None

    def _problems(self) -> Iterator[str]:
        if self.counterpart is not None and self.faults:
            yield "counterpart: a parity is measured without simulated faults, remove faults"
        if self.measured_in is not None and (self.counterpart is not None or self.faults):
            yield "measured_in: a machine measured elsewhere has no `counterpart` or faults, remove them"
        if self.diagnosed_in is not None and self.faults:
            yield "diagnosed_in: a machine diagnosed elsewhere has no simulated faults, remove faults"


SomeNoise = TypeVar("SomeNoise", OperatorNoise, ModuleNoise, CacheNoise)


class NoiseSpec(FrozenModel):
    """The noise of a run or pass (on operators, modules, the cache, and by AQN) and its machine's simulated faults."""

    operator_noise: OperatorNoise | None = None
    module_noise: ModuleNoise | None = None
    kv_cache: CacheNoise | None = Field(default=None, exclude_if=lambda noise: noise is None)
    aqn: AdaptiveNoise | None = None
    faults: tuple[Fault, ...] = ()

    def is_clean_in(self, phase: Phase) -> bool:
        """Return whether there is neither noise nor a fault in `phase`."""
        noised = self.operator_noise_in(phase) or self.module_noise_in(phase) or self.cache_noise_in(phase) or self.aqn
        return noised is None and not self.faults

    def operator_noise_in(self, phase: Phase) -> OperatorNoise | None:
        """Return the operator noise in `phase`, or None."""
        return _active_in(phase, self.operator_noise)

    def module_noise_in(self, phase: Phase) -> ModuleNoise | None:
        """Return the module noise in `phase`, or None."""
        return _active_in(phase, self.module_noise)

    def cache_noise_in(self, phase: Phase) -> CacheNoise | None:
        """Return the rounding of keys and values in `phase`, or None."""
        return _active_in(phase, self.kv_cache)


def _active_in(phase: Phase, noise: SomeNoise | None) -> SomeNoise | None:
    is_active = noise is not None and phase in noise.phases and (isinstance(noise, CacheNoise) or noise.is_active)
    return noise if is_active else None
