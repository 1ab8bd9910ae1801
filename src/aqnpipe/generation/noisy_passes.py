"""Generation under noise in passes over prompts; each pass ends with measurements, which become its receipt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import ConfigDict, Field

from aqnpipe.config.noise import NoiseSpec, Phase
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import decoder_layers, norms_sha256, num_rms_norms
from aqnpipe.noise.injection.faults import ActiveFaults, ActiveFaultState
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.receipt import Receipt, RecorderState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder, merge_states


class PassNoise(NoiseSpec):
    """The noise and faults of one pass. Plain data, so that it can be sent to the processes of an engine.

    `noise_seed` is the seed that its random numbers must have; None accepts any. The others are of a rollout: `factors`
    maps the names of AQN's targets to factors on `sigma`, `clean_norms` is the SHA-256 of the trainer's norm weights,
    and `fault_states` are the states of the faults after earlier phases of the run.
    """

    phase: Phase = "evaluation"
    noise_seed: int | None = None
    sigma: float = 0.0
    factors: dict[str, float] = Field(default_factory=dict)
    clean_norms: str | None = None
    fault_states: tuple[ActiveFaultState, ...] | None = None

    @property
    def is_clean(self) -> bool:
        """Return whether the pass has neither noise nor faults."""
        return self.is_clean_in(self.phase)

    @property
    def norm_sigmas(self) -> dict[str, float]:
        """Sigma of AQN on every norm that has it, by name."""
        on_norms = self.aqn is not None and self.aqn.targets != "hidden_states"
        return {name: self.sigma * factor for name, factor in self.factors.items()} if on_norms else {}

    def recorder(self, num_layers: int, num_norms: int) -> ReceiptRecorder:
        """Return a recorder that expects exactly this noise, for a model with these numbers of layers and RMSNorms."""
        recorder = ReceiptRecorder(
            self,
            expected_phases=(self.phase,),
            num_layers=num_layers,
            num_norms=num_norms,
            norms_watched=self.clean_norms is not None,
            seed=self.noise_seed,
        )
        if self.clean_norms is not None:
            recorder.expect_clean_norms(self.clean_norms)
        return recorder

    def active_faults(self) -> ActiveFaults:
        """Return the faults before their first call in the pass, of a rollout as the run left them."""
        return ActiveFaults.of(self.faults, self.fault_states)


@dataclass(frozen=True)
class PassMeasurements:
    """Records of a pass, or of one shard of it, not yet checked; and the faults of a rollout as it left them."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    num_layers: int
    num_norms: int
    state: RecorderState
    fault_states: tuple[ActiveFaultState, ...] = ()


def pass_receipt(noise: PassNoise, measurements: Sequence[PassMeasurements]) -> Receipt:
    """Return the receipt of a pass under `noise` from the measurements of its shards, in order; not yet checked."""
    first = measurements[0]
    recorder = noise.recorder(first.num_layers, first.num_norms)
    recorder.restore(merge_states([shard.state for shard in measurements]))
    return recorder.receipt()


class NoisyGenerator(Protocol):
    """A loaded model that generates in passes, one at a time."""

    @property
    def description(self) -> dict[str, str | int | bool]:
        """The backend for run.json: its name, version and how it executes."""
        ...

    def begin_pass(self, noise: PassNoise) -> None:
        """Start a pass under `noise`. Raises ModelError if this backend cannot compute it."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: NoiseKey) -> list[Completion]:
        """Return one completion per prompt, in order; `key` keys the noise of this batch."""
        ...

    def end_pass(self) -> PassMeasurements:
        """End the pass and return its measurements; the model is clean afterwards."""
        ...

    def close(self) -> None:
        """Free the resources of the model."""
        ...


class TransformersPasses:
    """Passes on a transformers model in this process.

    `verify` raises if the model's weights are not the requested ones. It is called at the end of the first pass; after
    every later pass the norm weights must be the same as after the first.
    """

    def __init__(self, model: Any, tokenizer: Any, verify: Callable[[], None] | None = None) -> None:
        self._model = model
        self._verify = verify
        self._norms: str | None = None
        self._backend = TransformersBackend(model, tokenizer)
        self._special_tokens = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
        self._noise: PassNoise | None = None
        self._faults = ActiveFaults()
        self._recorder: ReceiptRecorder | None = None

    @property
    def description(self) -> dict[str, str | int | bool]:
        """The backend for run.json."""
        return {"backend": "transformers"}

    @property
    def model(self) -> Any:
        """The model, for an audit that observes it."""
        return self._model

    @property
    def special_tokens(self) -> tuple[int, int]:
        """The end token and the padding token."""
        return self._special_tokens

    def begin_pass(self, noise: PassNoise) -> None:
        """Start a pass under `noise`."""
        self._noise = noise
        self._faults = noise.active_faults()
        self._recorder = noise.recorder(len(decoder_layers(self._model)), num_rms_norms(self._model))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: NoiseKey) -> list[Completion]:
        """Return one completion per prompt, in order."""
        if self._noise is None or self._recorder is None:
            raise RuntimeError("no forward pass has begun; this is a bug")
        with phase_noise(self._model, self._noise, self._noise.phase, key, self._recorder, faults=self._faults):
            # Each row needs its own noise, so that responses are independent: under noise no prefix is shared.
            return self._backend.generate(prompts, sampling, share_prefix=self._noise.is_clean)

    def decode_without_noise(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """Return completions without noise and faults, outside of any phase: they are no part of a pass."""
        return self._backend.generate(prompts, sampling, share_prefix=True)

    def end_pass(self) -> PassMeasurements:
        """End the pass and return its measurements."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise RuntimeError("no forward pass has begun; this is a bug")
        norms = norms_sha256(self._model)
        if self._norms is None and self._verify is not None:
            self._verify()
        if self._norms not in (None, norms):
            raise ReceiptError("receipt invalid: the norm weights changed between two evaluations of the questions")
        self._norms = norms
        return PassMeasurements(len(decoder_layers(self._model)), num_rms_norms(self._model), recorder.state())

    def close(self) -> None:
        """Do nothing: the model is the only resource."""
