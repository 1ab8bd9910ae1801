"""State shared by the parts of one batch's injection: the part of the model that computes, and its random numbers."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from aqnpipe.config.noise import Phase, PlacedError, RelativeGaussian, TensorError
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.vllm.audit import EngineAudit
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.audit.random_numbers import Position
from aqnpipe.noise.kernels.error_models import apply_error_
from aqnpipe.noise.kernels.shards import Shard, apply_error_to_shard_
from aqnpipe.noise.kernels.stream import NoiseStream
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.sampling import sample

_HIDDEN_STATES, _HIDDEN = "aqn.hidden", 8
"""AQN's noise on hidden states: its name as an operator and as a stream of keys, and its stream of random numbers."""


@dataclass
class Place:
    """The part of the model that computes, and the key of its random numbers.

    `layer` is None outside the decoder layers and in the output projection. `error` is the error of operators here.
    `calls` counts the draws of the current pass, `module_calls` those of modules by their number.
    """

    layer: int | None = None
    key: int = 0
    error: PlacedError | None = None
    calls: int = 0
    module_calls: Counter[int] = field(default_factory=Counter)


class EngineState:
    """One batch on one worker's model: the current place, which hooks keep up to date, and what puts errors there.

    `forward_index` counts the model's forward passes; the first reads the prompts. `shards`: by operator, the shares of
    tensors that a tensor-parallel worker has put errors on.
    """

    recomputing = False

    def __init__(
        self,
        engine: EngineModel,
        noise: PassNoise,
        key: NoiseKey,
        recorder: ReceiptRecorder,
        hidden_sigmas: Mapping[int, float],
    ) -> None:
        recorder.note_key(noise.phase, *key)
        self.model = engine.model
        self.phase: Phase = noise.phase
        self.recorder = recorder
        self.key = key
        self.forward_index = -1
        self.shards: dict[str, set[Shard]] = defaultdict(set)
        self.outside = self.place = Place()
        position = Position(*recorder.position(key.seed, key.step), key.micro_step, key.rank, 0)
        self.audit = EngineAudit(engine, noise.phase, position, recorder, hidden_sigmas, noise.norm_sigmas)

    def seed(self, stream: str, *counters: int) -> int:
        """Return the seed of `stream` in this forward pass: it depends on the place alone, so it can be replayed."""
        return self.key.derived(stream, self.forward_index, *counters)

    def put_error(
        self,
        operator: str,
        layer: int | None,
        error: TensorError,
        source: NoiseStream,
        tensor: Tensor,
        shard: Shard | None,
    ) -> None:
        """Put `error` on `tensor` in place and count it; `shard`: its columns of the whole tensor, None for all."""
        observer = self.audit.observer
        with observer.unobserved() if observer is not None else nullcontext():
            if shard is None:
                apply_error_(tensor, error, source)
            else:
                apply_error_to_shard_(tensor, shard, error, source)
                self.shards[operator].add(shard)
        if observer is not None:
            observer.claim(tensor, operator, layer, error, source, shard)
        self.recorder.count_call(self.phase, operator, layer, error, tensor.numel())

    def noised_hidden(self, layer: int, sigma: float, hidden: Tensor) -> Tensor:
        """Return a decoder layer's hidden states with AQN's relative noise."""
        noised, error = hidden.clone(), RelativeGaussian(scale=sigma)
        source = NoiseStream(self.seed(_HIDDEN_STATES, layer), 0, _HIDDEN)
        observer = self.audit.observer
        with observer.unobserved() if observer is not None else nullcontext():
            apply_error_(noised, error, source)
            self.recorder.measure_hidden(layer, sample(hidden), sample(noised))
        if observer is not None:
            observer.claim(noised, _HIDDEN_STATES, layer, error, source)
        return noised
