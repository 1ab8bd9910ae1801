"""Noise by changed modules, for what `aqnpipe.noisy` cannot put on operators alone, with a receipt."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

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


class ModuleNoiseReceipt:
    """What was requested and measured, over all contexts that share this receipt."""

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

    def is_of(self, model: nn.Module, spec: NoiseSpec, seed: int) -> bool:
        """Return whether this receipt can continue with a context of this model and noise."""
        return self._model is model and self.spec == spec and self.seed == seed

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

    def check(self) -> "ModuleNoiseReceipt":
        """Return self, or raise ReceiptError with every difference between requested and measured noise."""
        self.content.check()
        return self


@contextmanager
def noisy_modules(
    model: nn.Module,
    scale: float | None,
    error: ErrorModel | None,
    seed: int,
    step: int | None,
    operators: OperatorSet,
    layers: tuple[int, ...] | None,
    include_lm_head: bool,
    backward: bool,
    receipt: Any,
) -> Iterator[ModuleNoiseReceipt]:
    """Put noise on the operators of a decoder in the body; arguments as of `aqnpipe.noisy`."""
    spec, phases = _requested(model, scale, error, operators, layers, include_lm_head, backward)
    if receipt is None:
        receipt = ModuleNoiseReceipt(model, spec, phases, seed)
    elif not isinstance(receipt, ModuleNoiseReceipt) or not receipt.is_of(model, spec, seed):
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
    layers: tuple[int, ...] | None,
    include_lm_head: bool,
    backward: bool,
) -> tuple[NoiseSpec, tuple[Phase, ...]]:
    if any(layer >= len(decoder_layers(model)) for layer in layers or ()):
        raise ConfigError(f"noisy: layers is {layers!r}, expected numbers from 0 to {len(decoder_layers(model)) - 1}")
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
                "layers": layers,
                "include_lm_head": include_lm_head,
                "attention": noised_attention(model),
            }
        )
    except ValidationError as problem:
        raise ConfigError(f"noisy: {describe_validation_error(problem)}") from problem
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
