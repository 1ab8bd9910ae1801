"""`aqnpipe.noisy`: operator noise on a model in memory, in anyone's code, with a receipt.

with aqnpipe.noisy(model, scale=0.05, seed=0) as receipt:
    model.generate(**inputs)
receipt.check()
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral, Real
from typing import Any, get_args

from pydantic import ValidationError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aqnpipe.artifacts.measured_errors import with_figures
from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import ErrorModel, NoiseSpec, OperatorNoise, OperatorSet, Phase, RelativeGaussian
from aqnpipe.config.own_noise import OwnError
from aqnpipe.errors import ConfigError
from aqnpipe.models.layout import decoder_layers, noised_attention, num_rms_norms
from aqnpipe.models.sharding import gathered_first
from aqnpipe.noise.audit.phase_audit import audited_backward
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
from aqnpipe.noise.kernels.own import refuse_unusable
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

_REPLICATING = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_KEY_LIMIT = 2**63
"""Seeds and steps are packed into 64 bits with a sign."""


class NoiseReceipt:
    """What `noisy` requested and measured, over all contexts that share this receipt."""

    def __init__(self, model: nn.Module, spec: NoiseSpec, phases: tuple[Phase, ...], seed: int) -> None:
        self._model = model
        self.spec = spec
        self.seed = seed
        self.next_step = 0
        self.recorder = ReceiptRecorder(
            spec,
            expected_phases=phases,
            num_layers=len(decoder_layers(model)),
            num_norms=num_rms_norms(model),
            seed=seed,
        )

    @property
    def content(self) -> Receipt:
        """The receipt as a study stores it: phases, operators, layers, shares, recomputed numbers."""
        return self.recorder.receipt()

    @property
    def recomputed_numbers(self) -> int:
        """Number of elements whose noise was recomputed from independent keys."""
        return sum(phase.recomputed_numbers for phase in self.content.phases)

    def problems(self) -> list[str]:
        """Return one line per difference between the requested noise and what was measured."""
        return self.content.problems()

    def check(self) -> "NoiseReceipt":
        """Return self, or raise ReceiptError with every difference between requested and measured noise."""
        self.content.check()
        return self


@contextmanager
def noisy(
    model: nn.Module,
    scale: float | None = None,
    *,
    error: ErrorModel | None = None,
    seed: int = 0,
    step: int | None = None,
    operators: OperatorSet = "matmul",
    layers: Sequence[int] | None = None,
    include_lm_head: bool = True,
    backward: bool = False,
    receipt: NoiseReceipt | None = None,
) -> Iterator[NoiseReceipt]:
    """Put noise on every matrix product of `model` in the body; yields the receipt, to be checked after the body.

    model: a decoder of transformers, with eager or sdpa attention. scale: standard deviation relative to the value of
    each element; or `error`: any error model of `aqnpipe.config.noise`. The same `seed` and `step` give the same noise;
    `step` counts the contexts that share a receipt if it is not given. operators: `matmul`, or `all` with softmax,
    activations and norms. layers: decoder layers with noise (default: all). backward: gradients get noise too, and
    `loss.backward()` must be called in the body. receipt: continue an earlier one, of the same model and noise.

    Raises ConfigError for contradicting arguments, ModelError for a model whose products noise cannot reach.
    """
    _refuse_wrong_kinds(model, seed, step, include_lm_head, backward, receipt)
    spec, phases = _requested(model, scale, error, operators, layers, include_lm_head, backward)
    seed = int(seed)
    if receipt is None:
        receipt = NoiseReceipt(model, spec, phases, seed)
    elif receipt._model is not model or receipt.spec != spec or receipt.seed != seed:
        raise ConfigError("noisy: the receipt is of another model, noise or seed, expected the one that it began with")
    step = receipt.next_step if step is None else int(step)
    receipt.next_step = step + 1
    key = NoiseKey(seed=seed, step=step)
    with ExitStack() as stack:
        stack.enter_context(gathered_first(model))
        stack.enter_context(phase_noise(model, spec, phases[0], key, receipt.recorder, backward=backward))
        if backward:
            stack.enter_context(_BackwardPasses(model, receipt.recorder))
        yield receipt


def _requested(
    model: nn.Module,
    scale: float | None,
    error: ErrorModel | None,
    operators: OperatorSet,
    layers: Sequence[int] | None,
    include_lm_head: bool,
    backward: bool,
) -> tuple[NoiseSpec, tuple[Phase, ...]]:
    if (scale is None) == (error is None):
        raise ConfigError(f"noisy: found scale={scale!r} and error={error!r}, expected exactly one of the two")
    if scale is not None and not (isinstance(scale, Real) and 0 < scale < 1):
        raise ConfigError(f"noisy: scale is {scale!r}, expected a number above 0 and below 1")
    if error is not None and not isinstance(error, get_args(ErrorModel)):
        raise ConfigError(f"noisy: error is {error!r}, expected an error model of aqnpipe.config.noise")
    if operators not in get_args(OperatorSet):
        raise ConfigError(f"noisy: operators is {operators!r}, expected {' or '.join(get_args(OperatorSet))}")
    chosen = _chosen_layers(layers, len(decoder_layers(model)), include_lm_head)
    if isinstance(error, MeasuredError):
        if backward or operators != "matmul":
            raise ConfigError("noisy: a measured error is of matmul operators in forward passes, found other arguments")
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        config: Any = model.config
        attention = config._attn_implementation
        error = with_figures(error, dtype=dtype, attention=attention, config=config.to_dict())  # type: ignore[arg-type]
    if isinstance(error, OwnError):
        refuse_unusable(error)
        error = error.planned()
    phases: tuple[Phase, ...] = ("actor_forward", "backward") if backward else ("evaluation",)
    try:
        noise = OperatorNoise.model_validate(
            {
                "error": error if error is not None else RelativeGaussian(scale=scale or 0.0),
                "operators": operators,
                "phases": phases,
                "layers": chosen,
                "include_lm_head": include_lm_head,
                "attention": noised_attention(model),
            }
        )
    except ValidationError as problem:
        raise ConfigError(f"noisy: {describe_validation_error(problem)}") from problem
    return NoiseSpec(operator_noise=noise), phases


def _refuse_wrong_kinds(model: Any, seed: Any, step: Any, include_lm_head: Any, backward: Any, receipt: Any) -> None:
    """Raise ConfigError for an argument of another kind than expected."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"noisy: model is {model!r}, expected a model in memory (torch.nn.Module)")
    if isinstance(model, _REPLICATING):
        raise ConfigError(f"noisy: model is a {type(model).__name__}, expected the model inside it (model.module)")
    for name, value in (("seed", seed), ("step", 0 if step is None else step)):
        if not (_is_whole(value) and -_KEY_LIMIT <= value < _KEY_LIMIT):
            raise ConfigError(f"noisy: {name} is {value!r}, expected a whole number of at most 63 bits")
    for name, value in (("include_lm_head", include_lm_head), ("backward", backward)):
        if not isinstance(value, bool):
            raise ConfigError(f"noisy: {name} is {value!r}, expected True or False")
    if not isinstance(receipt, NoiseReceipt | None):
        raise ConfigError(f"noisy: receipt is {receipt!r}, expected what an earlier noisy context gave")


def _chosen_layers(layers: Any, num_layers: int, include_lm_head: bool) -> tuple[int, ...] | None:
    """Return `layers` as indices; ConfigError unless they are layers of the model, or leave nothing with noise."""
    if layers is None:
        return None
    found = tuple(layers) if isinstance(layers, Iterable) else (None,)
    if not all(_is_whole(layer) and 0 <= layer < num_layers for layer in found):
        raise ConfigError(f"noisy: layers is {layers!r}, expected a list of numbers from 0 to {num_layers - 1}")
    if not found and not include_lm_head:
        raise ConfigError("noisy: layers is empty and include_lm_head is False, expected a place for the noise")
    return tuple(int(layer) for layer in found)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


class _BackwardPasses(TorchFunctionMode):
    """Audits every `loss.backward()` in its body, also those that a trainer calls."""

    def __init__(self, model: nn.Module, recorder: ReceiptRecorder) -> None:
        super().__init__()
        self._model = model
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is not Tensor.backward:
            return func(*args, **(kwargs or {}))
        # The function modes stay on: layers under gradient checkpointing compute again in here, with their noise.
        with audited_backward(self._model, self._recorder):
            result = func(*args, **(kwargs or {}))
        self._recorder.count_forward("backward")
        return result
