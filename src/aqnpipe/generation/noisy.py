"""Generation under noise as the evaluate stage sees it: passes over prompts, each with a receipt of what was done."""

from collections.abc import Sequence
from typing import Any, Protocol

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.noise import Fault, ModuleNoise, OperatorNoise, Phase
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.noise.injection import phase_noise
from aqnpipe.noise.layout import decoder_layers, rms_norms
from aqnpipe.noise.phase_state import NoiseKey
from aqnpipe.noise.receipt import Receipt
from aqnpipe.noise.recorder import ReceiptRecorder


class PassNoise(FrozenModel):
    """What one pass computes under. Plain data, so that it can be sent to the processes of an engine."""

    phase: Phase = "evaluation"
    operator_noise: OperatorNoise | None = None
    module_noise: ModuleNoise | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def operators_at_work(self) -> OperatorNoise | None:
        """The noise on operators that this phase gets."""
        noise = self.operator_noise
        return noise if noise is not None and noise.is_active and self.phase in noise.phases else None

    @property
    def modules_at_work(self) -> ModuleNoise | None:
        """The noise on modules that this phase gets."""
        noise = self.module_noise
        return noise if noise is not None and noise.is_active and self.phase in noise.phases else None

    def recorder(self, num_layers: int, num_norms: int) -> ReceiptRecorder:
        """Return a recorder that expects exactly this on a model with so many decoder layers and RMSNorms."""
        return ReceiptRecorder(
            operator_noise=self.operator_noise,
            module_noise=self.module_noise,
            faults=self.faults,
            expected_phases=(self.phase,),
            num_layers=num_layers,
            num_norms=num_norms,
        )


class NoisyGenerator(Protocol):
    """A loaded model that generates in passes, one at a time."""

    @property
    def description(self) -> dict[str, str | int | bool]:
        """What run.json says of the backend: its name, version and how it executes."""
        ...

    def begin_pass(self, noise: PassNoise) -> None:
        """Start a pass under `noise`. Raises ModelError if this backend cannot compute it."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: NoiseKey) -> list[Completion]:
        """Return one completion per prompt, in order; the noise of this batch is named by `key`."""
        ...

    def end_pass(self) -> Receipt:
        """Return the account of the pass, not yet checked; the model is clean again."""
        ...

    def close(self) -> None:
        """Give back what the model holds."""
        ...


class TransformersPasses:
    """Passes on a transformers model in this process."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._backend = TransformersBackend(model, tokenizer)
        self._noise: PassNoise | None = None
        self._recorder: ReceiptRecorder | None = None

    @property
    def description(self) -> dict[str, str | int | bool]:
        """What run.json says of the backend."""
        return {"backend": "transformers"}

    def begin_pass(self, noise: PassNoise) -> None:
        """Start a pass under `noise`."""
        self._noise = noise
        self._recorder = noise.recorder(len(decoder_layers(self._model)), len(rms_norms(self._model)))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: NoiseKey) -> list[Completion]:
        """Return one completion per prompt, in order."""
        if self._noise is None or self._recorder is None:
            raise RuntimeError("no pass has begun; this is a bug")
        with phase_noise(self._model, self._recorder, self._noise.phase, key):
            return self._backend.generate(prompts, sampling)

    def end_pass(self) -> Receipt:
        """Return the account of the pass."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise RuntimeError("no pass has begun; this is a bug")
        return recorder.receipt()

    def close(self) -> None:
        """Nothing is held but the model itself."""
