"""State shared by the parts of one phase's injection: the layer that computes, and the key of its random numbers."""

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from aqnpipe.config.noise import Phase, PlacedError, TensorError
from aqnpipe.config.own_noise import OwnError
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers, output_projection
from aqnpipe.noise.audit.parts import AuditedPart
from aqnpipe.noise.audit.phase_audit import PhaseAudit
from aqnpipe.noise.audit.random_numbers import Position
from aqnpipe.noise.kernels.error_models import apply_error_
from aqnpipe.noise.kernels.shards import Shard, apply_error_to_shard_
from aqnpipe.noise.kernels.stream import NoiseStream
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.seeding import derive_seed


@dataclass(frozen=True)
class NoiseKey:
    """Key of the random numbers of one phase: equal keys give equal noise. Data-parallel workers differ in `rank`."""

    seed: int
    step: int
    micro_step: int = 0
    rank: int = 0


@dataclass
class Place:
    """The part of the model that computes, and the key of its random numbers.

    `layer` is None outside the decoder layers and in the output projection. `error` is the error of operators here.
    `calls` counts the draws of the current pass, `norms` those of norms among them, and `other_products` the products
    that no linear module computes. `is_noised`: an operator here had its error in this pass.
    """

    layer: int | None = None
    key: int = 0
    error: PlacedError | None = None
    calls: int = 0
    norms: int = 0
    other_products: int = 0
    is_noised: bool = False
    module_calls: Counter[int] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """Name of the place in messages."""
        return "lm_head" if self.layer is None else f"layer {self.layer}"


class PhaseState:
    """One phase on one model: the current place, which hooks keep up to date, and the function that puts errors there.

    `forward_index` counts the model's forward passes in this phase. `reads_one_token`: the current pass reads a single
    token per row. `is_first_of_kind`: it is the first pass of this phase that does, or the first that does not.
    `audit_at` makes the audit of the phase at a position; by default it observes the layers of transformers' model.
    `is_computing` is true during a forward pass; of a model in vLLM, from the first on.
    `recomputing` is true while a checkpointed layer is recomputed, so that nothing is counted or measured twice.
    `shards`: by operator, the shares of tensors that a tensor-parallel worker has put errors on.
    """

    def __init__(
        self,
        model: nn.Module,
        phase: Phase,
        key: NoiseKey,
        recorder: ReceiptRecorder,
        audit_at: Callable[[Position], PhaseAudit] | None = None,
    ) -> None:
        self.model = model
        recorder.note_key(phase, key.seed, key.step, key.micro_step, key.rank)
        self.phase: Phase = phase
        self.recorder = recorder
        self.key = key
        self.layers = decoder_layers(model)
        self.head = output_projection(model)
        self.forward_index = -1
        self.num_tokens: int | None = None
        self.reads_one_token = self.is_first_of_kind = False
        self._kinds: set[bool] = set()
        self.is_computing = self.recomputing = False
        self._ran_outside = False
        # Of the present and of the latest forward pass with gradients: a context may last as long as a training.
        self._gradient_sources: set[NoiseStream] = set()
        self._earlier_gradient_sources: set[NoiseStream] = set()
        self.shards: dict[str, set[Shard]] = defaultdict(set)
        self.outside = self.place = Place()
        seed, step = recorder.position(key.seed, key.step)
        position = Position(seed, step if phase != "validation" else key.step, key.micro_step, key.rank, 0)
        self.audit = self._audit_at(position) if audit_at is None else audit_at(position)

    def _audit_at(self, position: Position) -> PhaseAudit:
        parts = [AuditedPart(index, index, layer) for index, layer in enumerate(self.layers)]
        parts.append(AuditedPart(len(parts), None, self.head))
        return PhaseAudit(self.model, parts, self.phase, position, self.recorder)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copies and pickles of the model, whose hooks refer to this state: they would keep its noise."""
        raise ModelError(
            f"{type(self.model).__name__} or a part of it is copied or pickled (copy.deepcopy, torch.save) while noise "
            "is installed, and the copy would keep the noise; expected the copy before or after, or state_dict()"
        )

    def start_forward(self, num_tokens: int | None) -> None:
        """Note the start of a forward pass over `num_tokens` tokens per row; None if rows differ."""
        self.is_computing = True
        if self._gradient_sources:
            self._earlier_gradient_sources, self._gradient_sources = self._gradient_sources, set()
        self.forward_index += 1
        self.num_tokens = num_tokens
        self.reads_one_token = num_tokens == 1
        self.is_first_of_kind = self.reads_one_token not in self._kinds
        self._kinds.add(self.reads_one_token)

    def _refuse_repeated_gradients(self, source: NoiseStream) -> None:
        """Have the receipt refused for gradients whose noise nothing audits, or that was put on gradients before."""
        if not self.recorder.is_in_backward:
            self.recorder.note_mismatch(
                "backward: gradients got their noise outside an audited backward pass; expected loss.backward() within "
                "the context"
            )
        if source in self._gradient_sources or source in self._earlier_gradient_sources:
            self.recorder.note_mismatch(
                "backward: the same noise was put on gradients twice, by a second backward pass through one graph "
                "(retain_graph) or in a layer called twice; expected one backward pass of each forward pass"
            )
        self._gradient_sources.add(source)

    def refuse_outside_forward(self, what: str) -> None:
        """Have the receipt refused if `what` computes outside a forward pass of the model.

        Its noise would be that of the last pass, again in every call, and nothing would audit it.
        """
        if self.is_computing or self.recomputing or self._ran_outside:
            return
        self._ran_outside = True
        if torch._C._current_autograd_node() is not None:
            self.recorder.note_mismatch(
                f"{self.phase}: {what} was computed again by a backward pass, which has other noise; expected "
                "gradient_checkpointing_enable() of transformers in place of a checkpoint of one's own"
            )
            return
        self.recorder.note_mismatch(
            f"{self.phase}: {what} ran outside a call of {type(self.model).__name__}, with noise that is neither new "
            "nor audited; expected model(...) or model.generate(...)"
        )

    def seed(self, stream: str, *counters: int) -> int:
        """Return the seed of `stream` in this forward pass: it depends on the place alone, so it can be replayed."""
        key = self.key
        return derive_seed(key.seed, stream, key.step, key.micro_step, key.rank, self.forward_index, *counters)

    def put_error(
        self,
        phase: Phase,
        operator: str,
        layer: int | None,
        error: TensorError,
        source: NoiseStream,
        tensor: Tensor,
        *,
        repeats: bool,
        input_rms: Tensor | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Put `error` on `tensor` in place and count it; recomputations count once.

        `input_rms`: for a measured error, the root mean squares of the operator's input rows [..., 1]. `shard`: the
        columns of the whole tensor that a tensor-parallel worker has, None for all.

        Autograd records no operation, so gradients pass straight through. The tensor's version is increased, so the
        backward pass of an operator that needs its unchanged output fails instead of using the noised one.
        """
        if phase == "backward":
            self._refuse_repeated_gradients(source)
            self.recorder.note_noised_gradient(layer)
        else:
            self.place.is_noised = True
        values = tensor.detach() if tensor.requires_grad else tensor
        observer = self.audit.observer
        # Of all errors only one of a user's own may leave every value as it is, so its changes are counted.
        before = changed = None
        with observer.unobserved() if observer is not None else nullcontext():
            if type(error) is OwnError:
                before = values.clone()
            _apply(values, error, source, input_rms, shard)
            if before is not None:
                changed = ((values != before) & (before == before)).sum()
        if observer is not None:
            observer.claim(values, phase, operator, layer, error, source, shard)
        if shard is not None:
            self.shards[operator].add(shard)
        if not (repeats and self.recomputing):
            self.recorder.count_call(phase, operator, layer, error, values.numel())
            if changed is not None:
                self.recorder.count_changed(phase, operator, layer, changed)
        if torch.is_grad_enabled():
            increment_version(values)


def _apply(
    tensor: Tensor, error: TensorError, source: NoiseStream, input_rms: Tensor | None, shard: Shard | None
) -> None:
    if shard is None:
        apply_error_(tensor, error, source, input_rms)
    else:
        apply_error_to_shard_(tensor, shard, error, source)
