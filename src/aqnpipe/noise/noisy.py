"""`aqnpipe.noisy`: operator noise on a model in memory, in anyone's code, with a receipt.

with aqnpipe.noisy(model, scale=0.05, seed=0) as receipt:
    model.generate(**inputs)
receipt.check()
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aqnpipe.artifacts.measured_errors import with_figures
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
    spec, phases = _requested(model, scale, error, operators, layers, include_lm_head, backward)
    if receipt is None:
        receipt = NoiseReceipt(model, spec, phases, seed)
    elif receipt._model is not model or receipt.spec != spec or receipt.seed != seed:
        raise ConfigError("noisy: the receipt is of another model, noise or seed, expected the one that it began with")
    step = receipt.next_step if step is None else step
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
    if scale is not None and not 0 < scale < 1:
        raise ConfigError(f"noisy: scale is {scale!r}, expected a number above 0 and below 1")
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
    noise = OperatorNoise.model_validate(
        {
            "error": error if error is not None else RelativeGaussian(scale=scale or 0.0),
            "operators": operators,
            "phases": phases,
            "layers": None if layers is None else tuple(layers),
            "include_lm_head": include_lm_head,
            "attention": noised_attention(model),
        }
    )
    return NoiseSpec(operator_noise=noise), phases


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
