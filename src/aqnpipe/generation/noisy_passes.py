"""Generation under noise as the evaluate stage sees it: passes over prompts, each with a receipt of what was done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import ConfigDict, Field

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.noise import AdaptiveNoise, Fault, ModuleNoise, OperatorNoise, Phase
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.models.layout import decoder_layers, norms_sha256, rms_norms
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.injection.phase_state import NoiseKey
from aqnpipe.noise.receipts.merge import WorkerAccount, merge_states, merged_receipt
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.recorder_state import ActiveFaultState, RecorderState


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

    @property
    def is_clean(self) -> bool:
        """Whether nothing changes what is computed."""
        return self.operators_at_work is None and self.modules_at_work is None and not self.faults

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


class RolloutNoise(PassNoise):
    """What the policy of a training run rolls out under: a pass of one batch, on weights that the trainer has sent.

    `factors` maps the names of AQN's targets to factors on `sigma`. `clean_norms` is the SHA-256 of the trainer's own
    norm weights; `fault_states` go on from what the run's faults have done before.
    """

    phase: Phase = "rollout"
    aqn: AdaptiveNoise | None = None
    sigma: float = 0.0
    factors: dict[str, float] = Field(default_factory=dict)
    clean_norms: str
    fault_states: tuple[ActiveFaultState, ...]

    @property
    def is_clean(self) -> bool:
        """Whether nothing changes what is computed."""
        return self.aqn is None and super().is_clean

    def recorder(self, num_layers: int, num_norms: int) -> ReceiptRecorder:
        """Return a recorder for one rollout, as far along as that of the run."""
        recorder = ReceiptRecorder(
            operator_noise=self.operator_noise,
            module_noise=self.module_noise,
            aqn=self.aqn,
            faults=self.faults,
            expected_phases=(self.phase,),
            num_layers=num_layers,
            num_norms=num_norms,
            watch_norms=True,
        )
        recorder.expect_clean_norms(self.clean_norms)
        for active, state in zip(recorder.active_faults, self.fault_states, strict=True):
            active.restore(state)
        return recorder


@dataclass(frozen=True)
class PassAccount:
    """What was recorded in a pass, or in a part of one, by each of the backend's own workers; not yet checked."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    num_layers: int
    num_norms: int
    states: tuple[RecorderState, ...]


def pass_receipt(noise: PassNoise, parts: Sequence[PassAccount]) -> Receipt:
    """Return the receipt of a pass under `noise` from the accounts of its parts, in their order; not yet checked.

    Workers of one backend are checked against each other: ReceiptError where they do not fit.
    """
    first = parts[0]
    recorder = noise.recorder(first.num_layers, first.num_norms)
    states = [merge_states(ranks, per_worker_draws=False) for ranks in zip(*(p.states for p in parts), strict=True)]
    if len(states) > 1:
        return merged_receipt(recorder, [WorkerAccount(rank, len(states), one) for rank, one in enumerate(states)])
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

    def end_pass(self) -> PassAccount:
        """Return the account of the pass; the model is clean again."""
        ...

    def close(self) -> None:
        """Give back what the model holds."""
        ...


class TransformersPasses:
    """Passes on a transformers model in this process.

    `verify` raises if the model's weights are not those that were asked for; it is called at the end of the first pass,
    and the norm weights must be the same after every other.
    """

    def __init__(self, model: Any, tokenizer: Any, verify: Callable[[], None] | None = None) -> None:
        self._model = model
        self._verify = verify
        self._norms: str | None = None
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
            # Under noise each row has its own, so that answers are independent of each other.
            return self._backend.generate(prompts, sampling, reads_beginning_once=self._noise.is_clean)

    def end_pass(self) -> PassAccount:
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
        return PassAccount(len(decoder_layers(self._model)), len(rms_norms(self._model)), (recorder.state(),))

    def close(self) -> None:
        """Nothing is held but the model itself."""
