"""Memory of one device during training, from the configuration of a study and the shape of its model; of jobs on a CPU.

Three moments have different needs: rollouts and validations (all weights and the cache of keys and values), and the
forward and backward passes (logits, activations). All have what is always there: weights, gradients, moments and the
reference. The formulas and what they leave out: docs/cost-estimate.md.
"""

from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path

from pydantic import Field

from aqnpipe.cli.cost_estimate import BYTES, USUAL_PROMPT_TOKENS, uses_vllm_for_rollouts
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.model import ModelConfig
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.training import TrainingConfig
from aqnpipe.errors import ConfigError, DataError
from aqnpipe.models.shapes import ModelShape, shape_of
from aqnpipe.runtime.device_allocation import computes_on_cpu

DEVICE_GIGABYTES = {"cuda": 80.0, "npu": 64.0}
"""Memory of the devices of the published studies: A100-SXM4-80GB and Ascend 910C."""

_FLOAT32 = BYTES["float32"]
# Gradients and both moments of Adam have the format of the trained weights.
_COPIES_OF_A_TRAINED_WEIGHT = 4
# Data parallelism keeps the gradients a second time, in its buckets.
_BUCKETS = 1
# Of the logits: in float32 as they are, divided by the temperature, and the gradient of both; in the computed format
# the result of the product and its gradient.
_FLOAT32_LOGITS = 4
_COMPUTED_LOGITS = 2
# Values per token and channel of one layer that its backward pass needs: of the MLP gate, up, activation and product;
# of the rest inputs and outputs of norms, projections and residuals.
_MLP_VALUES = 4
_HIDDEN_VALUES = 10
# The context of torch and its libraries, and fragmentation.
_RUNTIME = 2.5e9
_LARGEST_SHARE = 0.95
"""Of a device that vLLM can have; the rest is the context of torch."""
_SHARED = "training.parallelism: fsdp with more training.num_workers, or training.lora"
_LESSENED_BY = {
    "trained": ("trained weights, gradients, moments", _SHARED),
    "reference": ("reference", "the same"),
    "passes": (
        "forward and backward",
        "training.gradient_checkpointing, fewer training.micro_batch_size or tokens_per_micro_batch",
    ),
    "generating": ("rollouts", "more training.num_workers"),
    "validating": ("validation", "fewer training.validation_questions"),
    "engine": ("vLLM", "a smaller generation.rollout_gpu_memory_utilization, or rollout_backend: transformers"),
}
"""Name of each part of an estimate, and the settings by which it is smaller."""

_MARGIN = 1.25
"""Of a job's declared memory over its expected peak: samples every 5 s miss short peaks, and batches differ."""


class MemoryEstimate(FrozenModel):
    """Bytes on one device; `total` is the largest of passes, rollouts and validations, with what is always there."""

    role: str
    trained: float = Field(description="weights, gradients, moments, and the buckets of data parallelism")
    reference: float
    passes: float = Field(description="logits, activations and gathered weights of a forward and backward pass")
    generating: float = Field(
        description="gathered weights and cache of rollouts by transformers, or the largest weight on its way to vLLM"
    )
    validating: float = Field(description="gathered weights and cache of validations, which are always by transformers")
    engine: float = Field(description="vLLM's share of the device")
    engine_needs: float = Field(description="what vLLM must hold at least: all weights, and the cache of one sequence")

    @property
    def total(self) -> float:
        """Bytes at the worst moment."""
        return (
            self.trained + self.reference + max(self.passes, self.generating, self.validating) + self.engine + _RUNTIME
        )


def memory_per_device(plan: StudyPlan, role: str, device_bytes: float, prompt_tokens: float) -> MemoryEstimate | None:
    """Return the memory that training the model of `role` takes on each device; None if its shape is not known."""
    config = plan.study.config
    training, model = config.training, config.models[role]
    shape = shape_of(model)
    if shape is None or training is None:
        return None
    shares = training.num_workers if training.parallelism == "fsdp" else 1
    computed = BYTES[model.dtype]
    arms = [arm for arm in plan.study.arms.values() if arm.model == role]
    vllm = any(uses_vllm_for_rollouts(plan, arm) for arm in arms)
    lora = training.lora
    adapters = 0 if lora is None else shape.adapter_parameters(lora.rank, lora.target_modules)
    trained, reference = _weights(training, model, shape.num_parameters, adapters)
    base = BYTES[training.weights_dtype] if lora is None else computed
    tokens = prompt_tokens + training.max_response_tokens
    sequences = training.sequences_per_step * training.steps_per_rollout / training.num_workers
    gathered = shape.num_parameters * base * (1 - 1 / shares)
    validated = ceil(training.validation_questions / training.num_workers)
    cache = tokens * _cache_of_a_token(shape, computed)
    # The largest weight on its way to an engine, in its format; shares are also gathered.
    sent = shape.head_matmul_parameters * computed * (4 if shares > 1 else 2)
    return MemoryEstimate(
        role=role,
        trained=trained,
        reference=reference,
        passes=_passes(training, model, shape, tokens, base),
        generating=sent if vllm else gathered + sequences * cache,
        validating=gathered + validated * cache,
        engine=config.generation.rollout_gpu_memory_utilization * device_bytes if vllm else 0.0,
        engine_needs=shape.num_parameters * computed + cache if vllm else 0.0,
    )


def _weights(
    training: TrainingConfig, model: ModelConfig, num_parameters: float, num_adapters: float = 0.0
) -> tuple[float, float]:
    """Return the bytes on each device of trained weights with gradients and moments, and of the reference."""
    shares = training.num_workers if training.parallelism == "fsdp" else 1
    stored = BYTES[training.weights_dtype]
    if training.lora is not None:
        adapters = num_adapters * stored * _COPIES_OF_A_TRAINED_WEIGHT
        return (num_parameters * BYTES[model.dtype] + adapters) / shares, 0.0
    copies = _COPIES_OF_A_TRAINED_WEIGHT + (_BUCKETS if shares == 1 and training.num_workers > 1 else 0)
    share = num_parameters * stored / shares
    return share * copies, share if training.kl_coefficient else 0.0


def _passes(training: TrainingConfig, model: ModelConfig, shape: ModelShape, tokens: float, base: int) -> float:
    """Return the bytes of a forward and backward pass; `base`: bytes of a weight that is gathered."""
    computed = BYTES[model.dtype]
    rows = training.micro_batch_size or max(1.0, (training.tokens_per_micro_batch or 0) / tokens)
    logits = rows * (training.max_response_tokens + 1) * shape.vocab_size
    logit_bytes = logits * (_FLOAT32_LOGITS * _FLOAT32 + _COMPUTED_LOGITS * computed)
    layer = rows * tokens * (_MLP_VALUES * shape.intermediate_size + _HIDDEN_VALUES * shape.hidden_size) * computed
    if model.attention == "eager":
        # Scores in the computed format, and their softmax in float32 and in the computed format.
        layer += rows * shape.num_heads * tokens**2 * (2 * computed + _FLOAT32)
    # The residual stream is kept at each layer in the format of the weights.
    kept = shape.num_layers * rows * tokens * shape.hidden_size * base
    activations = kept + layer if training.gradient_checkpointing else shape.num_layers * layer
    if training.parallelism == "data":
        return logit_bytes + activations
    body = shape.body_matmul_parameters / shape.num_layers
    ends = shape.head_matmul_parameters * (1 if shape.tied_embeddings else 2)
    # Two layers are gathered at once, the next one while one computes; gradients are whole until they are divided.
    return logit_bytes + activations + base * (2 * body + ends) + (base * (body + ends) if training.lora is None else 0)


def training_memory(
    plan: StudyPlan, device: str, gigabytes: float, prompt_tokens: float, parameters: Mapping[str, float] | None = None
) -> list[str]:
    """Return the memory of each trained model in words; raises ConfigError if one cannot fit on a device.

    parameters: sizes of models of unknown shape. What such a model needs at least is compared with the memory.
    """
    lines: list[str] = []
    training = plan.study.config.training
    if training is None:
        return []
    for role in plan.study.model_roles():
        found = memory_per_device(plan, role, gigabytes * 1e9, prompt_tokens)
        if found is None:
            # Whatever the shape of a model of this size; 0 if that is unknown too.
            least = sum(_weights(training, plan.study.config.models[role], (parameters or {}).get(role, 0.0)))
            if least > gigabytes * 1e9:
                raise ConfigError(
                    f"models.{role}: training needs more than {ceil(least / 1e9)} GB on each device for weights, "
                    f"gradients and moments alone, {device} has {gigabytes:g} GB; expected less ({_SHARED}) or "
                    "--memory for larger devices"
                )
            shown = f", more than {ceil(least / 1e9)} GB of {gigabytes:g}" if least else ""
            lines.append(f"training {role} not estimated, its shape is unknown{shown}")
            continue
        lines.append(f"training {role} {ceil(found.total / 1e9)} GB of {gigabytes:g}")
        if found.total > gigabytes * 1e9:
            parts = ((getattr(found, name) / 1e9, *words) for name, words in _LESSENED_BY.items())
            shown = "; ".join(f"{name} {size:.3g} GB, less with {ways}" for size, name, ways in parts if size)
            raise ConfigError(
                f"models.{role}: training needs about {ceil(found.total / 1e9)} GB on each device, {device} has "
                f"{gigabytes:g} GB; expected less or --memory for larger devices ({shown})"
            )
        if found.engine_needs > found.engine:
            raise ConfigError(
                f"generation.rollout_gpu_memory_utilization: vLLM gets {found.engine / 1e9:.3g} GB of {gigabytes:g}, "
                f"the weights of models.{role} and the cache of one sequence take {found.engine_needs / 1e9:.3g} GB; "
                f"expected at least {ceil(found.engine_needs / gigabytes / 1e7) / 100:g}"
            )
    return lines


def evaluation_memory(
    plan: StudyPlan, device: str, gigabytes: float, prompt_tokens: float, parameters: Mapping[str, float] | None = None
) -> list[str]:
    """Return the memory of each evaluated model in words; raises ConfigError if one cannot fit on its devices.

    On vLLM with the cache of one sequence, without which it does not start; that of a whole batch refuses nothing.
    """
    generation, evaluation = plan.study.config.generation, plan.study.config.evaluation
    lines: list[str] = []
    on_vllm = generation.backend == "vllm"
    room = gigabytes * (generation.gpu_memory_utilization if on_vllm else 1.0)
    has = f"vLLM gets {room:.3g} GB of {gigabytes:g}" if on_vllm else f"{device} has {gigabytes:g} GB"
    for role, model in plan.study.models().items():
        shape, computed = shape_of(model), BYTES[model.dtype] / generation.tensor_parallel / 1e9
        num_parameters = (parameters or {}).get(role) or (shape.num_parameters if shape else None)
        if num_parameters is None:
            continue
        weights = num_parameters * computed
        tokens = prompt_tokens + evaluation.max_response_tokens
        cache = tokens * _cache_of_a_token(shape, computed) if shape else 0.0
        needed = weights + (cache if on_vllm else _RUNTIME / 1e9)
        if needed > room:
            share, parallel = needed / gigabytes, "a larger generation.tensor_parallel"
            ways = [parallel if on_vllm else f"{parallel} on vLLM", "--memory for larger devices"]
            if on_vllm and share <= _LARGEST_SHARE:
                ways.insert(0, f"generation.gpu_memory_utilization: {ceil(100 * share) / 100:g}")
            raise ConfigError(
                f"evaluation of {role}: its weights {'and the cache of one sequence ' if on_vllm else ''}take "
                f"{needed:.3g} GB on each device, {has}; expected {' or '.join(ways)}"
            )
        lines.append(f"evaluating {role} {needed:.3g} GB of {room:.3g}")
    return lines


def declared_megabytes(plan: StudyPlan, rule: str) -> int:
    """Return the memory that each job of a rule declares: the peak of its earlier jobs, or an estimate, plus a quarter.

    Profiles of clusters ask for the memory of their devices instead.
    """
    from aqnpipe.artifacts.runs import read_cost  # imports polars, which is slow

    peak = 0.0
    for path in Path(plan.results, "benchmarks", rule).glob("*.tsv"):
        with suppress(DataError):  # of a job that was killed while it wrote the file
            cost = read_cost(path)
            peak = max(peak, cost.peak_mb if cost else 0.0)
    return ceil(_MARGIN * (peak or _estimated_bytes(plan, rule) / 1e6))


def _estimated_bytes(plan: StudyPlan, rule: str) -> float:
    """Return the bytes on the host of a job with the largest model whose shape is known, all its workers together."""
    config = plan.study.config
    on_cpu = config.device not in DEVICE_GIGABYTES and computes_on_cpu(config.device)
    if rule == "train" and config.training is not None and on_cpu:
        found = (memory_per_device(plan, role, 0.0, USUAL_PROMPT_TOKENS) for role in plan.study.model_roles())
        return config.training.num_workers * max((each.total for each in found if each), default=_RUNTIME)
    # Beside a device, a process reads whole models before they go there: in training the policy and the reference.
    workers, copies = (config.training.num_workers, 2) if rule == "train" and config.training else (1, 1)
    shapes = ((shape_of(model), BYTES[model.dtype]) for model in plan.study.models().values())
    weights = max((shape.num_parameters * size for shape, size in shapes if shape), default=0.0)
    return workers * (_RUNTIME + copies * weights)


def _cache_of_a_token(shape: ModelShape, computed: float) -> float:
    """Return the bytes of the keys and values of one token."""
    return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * computed
