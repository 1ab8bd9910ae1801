"""Noise of a study's phase with the arguments of `aqnpipe.noisy`, for tests of what studies use."""

from contextlib import contextmanager

from pydantic import ValidationError

from aqnpipe.artifacts.measured_errors import with_figures
from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.errors import ConfigError
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import decoder_layers, noised_attention, num_rms_norms
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder


class PhaseReceipt:
    """The receipt of a phase, which later phases of the same noise continue."""

    def __init__(self, model, spec, phases, seed):
        self.spec, self.next_step = spec, 0
        self.recorder = ReceiptRecorder(
            spec,
            expected_phases=phases,
            num_layers=len(decoder_layers(model)),
            num_norms=num_rms_norms(model),
            seed=seed,
        )

    @property
    def content(self):
        """The receipt as a study stores it."""
        return self.recorder.receipt()

    @property
    def recomputed_numbers(self):
        """Number of elements whose noise was recomputed."""
        return sum(phase.recomputed for phase in self.content.phases)

    def problems(self):
        """Return what differs from the request."""
        return self.content.problems()

    def check(self):
        """Return self, or raise ReceiptError."""
        self.content.check()
        return self


@contextmanager
def on_modules(
    model,
    scale=None,
    *,
    error=None,
    seed=0,
    step=None,
    operators="matmul",
    layers=None,
    include_lm_head=True,
    backward=False,
    receipt=None,
):
    """Put noise on a decoder of transformers, as a phase of a study has it."""
    if (scale is None) == (error is None):
        raise ConfigError("expected exactly one of the two")
    phases = ("actor_forward", "backward") if backward else ("evaluation",)
    if isinstance(error, MeasuredError):
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        attention = model.config._attn_implementation
        error = with_figures(error, dtype=dtype, attention=attention, config=model.config.to_dict())
    try:
        noise = OperatorNoise(
            error=(error.planned() if isinstance(error, CustomError) else error) or RelativeGaussian(scale=scale),
            operators=operators,
            phases=phases,
            layers=layers,
            include_lm_head=include_lm_head,
            attention=noised_attention(model),
        )
    except ValidationError as problem:
        raise ConfigError(describe_validation_error(problem)) from problem
    spec = NoiseSpec(operator_noise=noise)
    receipt = receipt or PhaseReceipt(model, spec, phases, seed)
    step = receipt.next_step if step is None else step
    receipt.next_step = step + 1
    key = NoiseKey(seed=seed, step=step)
    with phase_noise(model, spec, phases[0], key, receipt.recorder, backward=backward):
        yield receipt
    if backward:
        receipt.recorder.count_backward(step)
