"""Generation under noise as the evaluate stage sees it: passes over prompts, each with a receipt of what was done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import ConfigDict, Field

from aqnpipe.config.noise import NoiseSpec, Phase
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.models.layout import decoder_layers, norms_sha256, rms_norms
from aqnpipe.noise.injection.faults import ActiveFaults, ActiveFaultState
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.injection.phase_state import NoiseKey
from aqnpipe.noise.receipts.merge import WorkerMeasurements, merge_states, merged_receipt
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.recorder_state import RecorderState


class PassNoise(NoiseSpec):
    """What one pass computes under. Plain data, so that it can be sent to the processes of an engine."""

    phase: Phase = "evaluation"

    @property
    def is_clean(self) -> bool:
        """Whether nothing changes what is computed."""
        noised = self.operator_noise_in(self.phase) or self.module_noise_in(self.phase) or self.aqn
        return noised is None and not self.faults

    def recorder(self, num_layers: int, num_norms: int) -> ReceiptRecorder:
        """Return a recorder that expects exactly this on a model with so many decoder layers and RMSNorms."""
        return ReceiptRecorder(self, expected_phases=(self.phase,), num_layers=num_layers, num_norms=num_norms)

    def active_faults(self) -> ActiveFaults:
        """Return the faults before their first call in this pass."""
        return ActiveFaults.of(self.faults)


class RolloutNoise(PassNoise):
    """What the policy of a training run rolls out under: a pass of one batch, on weights that the trainer has sent.

    `factors` maps the names of AQN's targets to factors on `sigma`. `clean_norms` is the SHA-256 of the trainer's own
    norm weights; `fault_states` continue what the run's faults have cached before.
    """

    phase: Phase = "rollout"
    sigma: float = 0.0
    factors: dict[str, float] = Field(default_factory=dict)
    clean_norms: str
    fault_states: tuple[ActiveFaultState, ...]

    def recorder(self, num_layers: int, num_norms: int) -> ReceiptRecorder:
        """Return a recorder for one rollout."""
        recorder = ReceiptRecorder(
            self, expected_phases=(self.phase,), num_layers=num_layers, num_norms=num_norms, watch_norms=True
        )
        recorder.expect_clean_norms(self.clean_norms)
        return recorder

    def active_faults(self) -> ActiveFaults:
        """Return the faults as the run left them."""
        return ActiveFaults.of(self.faults, self.fault_states)


@dataclass(frozen=True)
class PassMeasurements:
    """What was recorded in a pass, or in a part of one, by each of the backend's own workers; not yet checked."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    num_layers: int
    num_norms: int
    states: tuple[RecorderState, ...]


def pass_receipt(noise: PassNoise, parts: Sequence[PassMeasurements]) -> Receipt:
    """Return the receipt of a pass under `noise` from the accounts of its parts, in their order; not yet checked.

    Workers of one backend are checked against each other: ReceiptError where they do not fit.
    """
    first = parts[0]
    recorder = noise.recorder(first.num_layers, first.num_norms)
    states = [merge_states(ranks, per_worker_draws=False) for ranks in zip(*(p.states for p in parts), strict=True)]
    if len(states) > 1:
        return merged_receipt(recorder, [WorkerMeasurements(rank, len(states), one) for rank, one in enumerate(states)])
    recorder.restore(states[0])
    return recorder.receipt()


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

    def end_pass(self) -> PassMeasurements:
        """Return the account of the pass; the model is clean again."""
        ...

    def close(self) -> None:
        """Give back what the model holds."""
        ...


class TransformersPasses:
    """Passes on a transformers model in this process.

    `verify` raises if the model's weights are not those that were requested; it is called at the end of the first pass,
    and the norm weights must be the same after every other.
    """

    def __init__(self, model: Any, tokenizer: Any, verify: Callable[[], None] | None = None) -> None:
        self._model = model
        self._verify = verify
        self._norms: str | None = None
        self._backend = TransformersBackend(model, tokenizer)
        self._noise: PassNoise | None = None
        self._faults = ActiveFaults()
        self._recorder: ReceiptRecorder | None = None

    @property
    def description(self) -> dict[str, str | int | bool]:
        """What run.json says of the backend."""
        return {"backend": "transformers"}

    def begin_pass(self, noise: PassNoise) -> None:
        """Start a pass under `noise`."""
        self._noise = noise
        self._faults = noise.active_faults()
        self._recorder = noise.recorder(len(decoder_layers(self._model)), len(rms_norms(self._model)))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: NoiseKey) -> list[Completion]:
        """Return one completion per prompt, in order."""
        if self._noise is None or self._recorder is None:
            raise RuntimeError("no pass has begun; this is a bug")
        with phase_noise(self._model, self._noise, self._noise.phase, key, self._recorder, faults=self._faults):
            # Under noise each row has its own, so that answers are independent of each other.
            return self._backend.generate(prompts, sampling, reads_beginning_once=self._noise.is_clean)

    def end_pass(self) -> PassMeasurements:
        """Return the account of the pass."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise RuntimeError("no pass has begun; this is a bug")
        norms = norms_sha256(self._model)
        if self._norms is None and self._verify is not None:
            self._verify()
        if self._norms not in (None, norms):
            raise ReceiptError("receipt refused: the norm weights changed between two passes over the questions")
        self._norms = norms
        return PassMeasurements(len(decoder_layers(self._model)), len(rms_norms(self._model)), (recorder.state(),))

    def close(self) -> None:
        """Nothing is held but the model itself."""
