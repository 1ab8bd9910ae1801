"""Follows every tensor of an audited pass from the operation that makes it to the first operation that reads it.

The observer runs in torch's dispatcher, below all hooks and torch functions, so it sees what is computed and not what
the injection reports. It samples a tensor when an operation has made it, and again before the first operation reads
it. The noise is put on in between, by code that the dispatcher does not see. The injection only *claims* a tensor: it
names the error and the draw. For each tensor that is read:

- The result of a matrix product must be claimed where noise was requested, and unchanged where none was.
- A claimed tensor must hold the values that the claimed error gives (`expected_values`), with the key that the audit
  derives itself, and with a draw that no other tensor of the pass has.
- A claimed tensor must be read: noise on a copy that nothing uses is none.

Samples stay on their device until the pass has ended; `judgement.Judge` compares them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aqnpipe.config.measured_noise import ATTENTION, LM_HEAD, SCORES, LayerErrors
from aqnpipe.config.noise import FakeQuantization, Phase, PlacedError, TensorError
from aqnpipe.noise.audit.classification import (
    MatrixParameters,
    escape,
    is_known,
    keeps_the_parameter,
    running_module,
    storage_of,
)
from aqnpipe.noise.audit.operation_counts import operations_of
from aqnpipe.noise.audit.random_numbers import IntArray, Position

_SAMPLED_ELEMENTS = 64
_SAME_VALUES = frozenset({"_unsafe_view", "clone", "_to_copy"})
"""Operations whose output has the values of their input: a product stays a product."""

_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

_ACCUMULATIONS = frozenset({"sum", "add", "add_"})
"""In a backward pass a product may be summed over broadcast dimensions before it is the gradient of an operand."""


@dataclass(frozen=True)
class Claim:
    """What the injection says that it did to a tensor: the error, its draw, and the part of the storage it covers.

    `columns`: of a tensor-parallel worker's share of a tensor, its first column, its width and that of the whole.
    """

    phase: Phase
    operator: str
    layer: int | None
    error: TensorError
    key: int
    call: int
    stream: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    columns: tuple[int, int, int] | None = None

    def elements_at(self, addresses: IntArray) -> tuple[IntArray, IntArray]:
        """Return which of `addresses` (offsets in the storage) the claimed tensor covers, and their element numbers.

        Elements are numbered as they lie in memory if the tensor has no gaps, otherwise in the order of its indices.
        Those of a share have the numbers that they have in the whole tensor.
        """
        relative, inside = addresses - self.offset, np.ones(addresses.shape, bool)
        dense = _numel(self.shape) == 1 + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )
        number, weight, rest = np.zeros_like(addresses), {}, relative.copy()
        factor = 1
        for dimension in reversed(range(len(self.shape))):
            weight[dimension] = factor
            factor *= self.shape[dimension]
        for dimension in sorted(range(len(self.shape)), key=lambda d: self.strides[d], reverse=True):
            if self.shape[dimension] == 1:
                continue
            index, rest = np.divmod(rest, self.strides[dimension])
            inside &= (index >= 0) & (index < self.shape[dimension])
            number = number + index * weight[dimension]
        inside &= rest == 0
        covered = np.flatnonzero(inside)
        return covered, self._in_whole((relative if dense else number)[covered])

    def _in_whole(self, numbers: IntArray) -> IntArray:
        if self.columns is None:
            return numbers
        start, size, width = self.columns
        rows, columns = np.divmod(numbers, size)
        return rows * width + start + columns


@dataclass
class Frame:
    """One pass of a decoder layer, of the output projection or of the model around them; or a backward pass.

    `position` and `place` are what the keys of its noise must depend on: places number the layers, then follow the
    output projection and the rest of the model. `error` is what operators here were requested to have, None for none.
    `is_recomputed`: a backward pass computes a checkpointed layer again, and stops when it has what it needs.
    `refuses_weights`: no product with a weight may be computed here, outside the parts that noise reaches.
    `refuses_products`: no product at all.
    `noises_elementwise`: softmax, activations and norms must have noise too. `other_products` counts the products so
    far that no linear module computes. `due_norms`: the names of norms that must still be called here.
    `num_logits`: in an output projection whose vocabulary is padded, the number of logits before the padding.
    """

    phase: Phase
    position: Position
    place: int
    layer: int | None
    error: PlacedError | None
    module: nn.Module
    name: str
    is_backward: bool = False
    is_recomputed: bool = False
    refuses_weights: bool = False
    refuses_products: bool = False
    noises_elementwise: bool = False
    parameters: MatrixParameters = field(default_factory=MatrixParameters)
    other_products: int = 0
    due_norms: dict[nn.Module, str] = field(default_factory=dict)
    num_logits: int | None = None

    @property
    def needs_noise(self) -> bool:
        """Whether every product here was requested to have noise. A quantization changes operands, not products."""
        return self.error is not None and not isinstance(self.error, FakeQuantization)


@dataclass(frozen=True)
class OperatorIdentity:
    """Which operator made a tensor, as a parity names it, and the root mean squares of its input rows, if it has any.

    Derived from the module whose code runs and from the operands, and not from what the injection claims.
    """

    operator: str
    input_rms: Tensor | None = None


def identify_product(func: Any, args: Any, frame: Frame) -> OperatorIdentity:
    """Return which operator of its layer a product is: of a linear module by its name, else one of attention."""
    path = running_module(frame.module, frame.name)
    module = frame.module.get_submodule(path.removeprefix(frame.name).strip("."))
    if isinstance(module, nn.Linear):
        # The operands are (input, weight), behind a bias if there is one.
        inputs = [value for value in args if isinstance(value, Tensor)][-2]
        name = LM_HEAD if frame.layer is None else path.rpartition(".")[2]
        return OperatorIdentity(name, inputs.detach().double().square().mean(-1).sqrt().reshape(-1))
    frame.other_products += 1
    is_first = frame.other_products == 1 and "attention" not in func.overloadpacket.__name__
    return OperatorIdentity(SCORES if is_first else ATTENTION)


@dataclass
class Followed:
    """A tensor between the operation that made it and the first one that reads it.

    `is_product`: what it holds must have the noise of a matrix product, or as `is_norm` that of a measured norm.
    `identity` is set where errors were measured per operator.
    """

    tensor: Tensor
    addresses: IntArray
    clean: Tensor
    made_by: str
    is_product: bool
    frame: Frame
    call: int
    node: int | None = None
    operations: int = 0
    claims: list[Claim] = field(default_factory=list)
    read_inside: bool = False
    is_passed_on: bool = False
    identity: OperatorIdentity | None = None
    is_norm: bool = False


@dataclass(frozen=True)
class Reading:
    """A followed tensor at its first reading: the values as made and as read."""

    followed: Followed
    used: Tensor


class Observer(TorchDispatchMode):
    """Observes the operations of audited passes while it is active.

    `escapes` counts "operation in module": products without the requested noise, and unknown operations. `readings`
    are to be compared. `total` and `noised` count floating-point operations.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.total = self.noised = self.classified = 0
        self.escapes: dict[str, int] = {}
        self.unused: dict[str, int] = {}
        self.readings: list[Reading] = []
        self.claims: list[Claim] = []
        # Drawn once: what is sampled must not depend on how many other tensors were followed before.
        self._stretch_places = rng.random(_SAMPLED_ELEMENTS)
        self._frames: list[Frame] = []
        self._followed: dict[int, Followed] = {}
        self._depth = 0
        self._call = 0
        self._call_operations = 0
        self._call_claims = 0
        self._is_paused = False

    # -- what the audit calls ------------------------------------------------------------------------------------------

    def enter(self, frame: Frame) -> None:
        """Start a pass: the operations until `leave` belong to it."""
        frame.parameters.start(frame.module.parameters())
        self._frames.append(frame)

    def leave(self, output: Any) -> None:
        """End the pass; `output` is what it returned. What was claimed must have been read or be part of it."""
        frame = self._frames.pop()
        kept = {storage_of(value) for value in tree_leaves(output) if isinstance(value, Tensor)}
        for storage, followed in list(self._followed.items()):
            if followed.frame is not frame:
                continue
            del self._followed[storage]
            # Fused attention is noised on a copy, so a recomputation leaves its own output unread and without a claim.
            stays_unread = (frame.is_recomputed and bool(followed.claims)) or (
                frame.is_backward and not followed.is_passed_on
            )
            if storage in kept or stays_unread:
                self._settle(followed)
            elif followed.claims:
                _count(self.unused, f"{followed.made_by}")

    def abandon(self) -> None:
        """End a pass that an exception ended: what it had not read yet is not judged."""
        frame = self._frames.pop()
        for storage in [storage for storage, followed in self._followed.items() if followed.frame is frame]:
            del self._followed[storage]

    def forget(self) -> None:
        """Forget what was judged, so that it is not counted again if another pass is observed.

        Claims are kept: no draw may be used by two passes.
        """
        self.classified = 0
        self.escapes, self.unused, self.readings = {}, {}, []

    def pause(self) -> None:
        """Observe nothing until `go_on`: a part runs within the present pass that is not to be observed.

        It reads tensors unseen, and may change them, so those of the pass count as read now.
        """
        frame = self._frames[-1]
        for storage in [storage for storage, followed in self._followed.items() if followed.frame is frame]:
            self._settle(self._followed.pop(storage))
        self._is_paused = True

    def go_on(self) -> None:
        """Observe again."""
        self._is_paused = False

    @property
    def frame(self) -> Frame | None:
        """The pass that is running."""
        return self._frames[-1] if self._frames else None

    def expect_norm(self, output: Tensor, name: str) -> bool:
        """Follow the `output` of a norm like a product, which must get its measured error; False if it is unknown."""
        with torch._C.DisableTorchFunction():
            followed = self._followed.get(storage_of(output))
        if followed is None or followed.frame is not self.frame:
            return False
        followed.is_product = followed.is_norm = True
        followed.identity = OperatorIdentity(name)
        frame = self._frames[-1]
        followed.made_by = f"norm {frame.name}" if frame.layer is None else f"norm {name} of {frame.name}"
        return True

    # -- what the injection calls --------------------------------------------------------------------------------------

    @contextmanager
    def noised_call(self, error: PlacedError | None) -> Iterator[None]:
        """Observe the body as one noised call: products that only the body itself reads are parts of its result."""
        self._depth += 1
        outer = (self._call_operations, self._call_claims)
        self._call_operations = self._call_claims = 0
        if self._depth == 1:
            self._call += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._call_claims:
                self.noised += self._call_operations
            inner_claims = self._call_claims
            self._call_operations, self._call_claims = outer[0], outer[1] + inner_claims
            if self._depth == 0:
                self._end_call(exempt=isinstance(error, FakeQuantization))

    def note_quantized(self) -> None:
        """Note that an operand of the present call was quantized."""
        self._call_claims += 1

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Do not observe the body: it samples values, or puts an error on a tensor that is then claimed."""
        before, self._is_paused = self._is_paused, True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._is_paused = before

    @contextmanager
    def known_escape(self) -> Iterator[None]:
        """Count the operations of the body, and nothing else: the call is already recorded as escaped."""
        self._depth += 1
        self._call += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._end_call(exempt=True)

    def claim(
        self,
        tensor: Tensor,
        phase: Phase,
        operator: str,
        layer: int | None,
        error: TensorError,
        draw: tuple[int, int, int],
        columns: tuple[int, int, int] | None = None,
    ) -> None:
        """Note that `error` was put on `tensor` with the random numbers of `draw`: key, call and stream.

        `columns`: the place of a share in the whole tensor, as in `Claim`.
        """
        self._call_claims += 1
        with torch._C.DisableTorchFunction():
            is_empty = not tensor.numel()
            followed = self._followed.get(storage_of(tensor))
            geometry = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        claim = Claim(phase, operator, layer, error, *draw, *geometry, columns)
        self.claims.append(claim)
        if is_empty:
            # An expert without tokens: there is nothing to compare.
            return
        if followed is None:
            _count(self.unused, f"{operator} (noise on a tensor that no operation of the pass made)")
            return
        followed.claims.append(claim)

    def is_noised(self, tensor: Tensor) -> bool:
        """Whether `tensor` has noise that nothing has read yet."""
        followed = self._followed.get(storage_of(tensor))
        return followed is not None and bool(followed.claims)

    # -- the dispatcher ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and follow what it reads and what it makes."""
        # The torch functions that the observer itself calls are none of the model's.
        with torch._C.DisableTorchFunction():
            if not self._is_paused and _is_composite(func):
                with self:
                    return func._op_dk(_COMPOSITE, *args, **(kwargs or {}))
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_paused or not self._frames:
            return self._counted(func, args, kwargs)[0]
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        storages = [storage_of(value) for value in inputs]
        carried = [] if func.is_view else self._read(func, storages)
        output, operations = self._counted(func, args, kwargs)
        if not func.is_view:
            self._follow(func, args, storages, output, operations, carried)
        if not self._depth:
            self._classify(func, inputs, output, is_product=operations > 0)
        elif operations:
            self._check_operands(func, inputs)
        return output

    def _counted(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
        output = func(*args, **kwargs)
        if self._is_paused:
            return output, 0
        operations = operations_of(func, args, kwargs, output)
        self.total += operations
        self._call_operations += operations if self._depth else 0
        return output, operations

    def _read(self, func: Any, storages: list[int]) -> list[Followed]:
        """Settle what `func` reads; return the products whose values it passes on."""
        name, carried = func.overloadpacket.__name__, []
        for storage in dict.fromkeys(storages):
            followed = self._followed.get(storage)
            if followed is None:
                continue
            passes_on = name in _SAME_VALUES or (followed.frame.is_backward and name in _ACCUMULATIONS)
            if followed.is_product and not followed.claims and passes_on:
                # The original stays a product too: if only a copy of it gets the noise, nothing may read the original.
                followed.is_passed_on = True
                carried.append(followed)
            elif not followed.claims and self._depth and followed.call == self._call:
                followed.read_inside = True
            else:
                if followed.claims and name in _OVERWRITES and storage == storages[0]:
                    _count(self.unused, f"{followed.claims[-1].operator} (overwritten by aten.{name})")
                self._settle(followed)
                del self._followed[storage]
        return carried

    def _follow(
        self, func: Any, args: Any, read: list[int], output: Any, operations: int, carried: list[Followed]
    ) -> None:
        frame = self._frames[-1]
        for value in tree_leaves(output):
            if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
                continue
            storage = storage_of(value)
            changed_in_place = storage in read and storage in self._followed and not carried
            if storage == 0 or changed_in_place:
                continue
            is_product = operations > 0 or bool(carried)
            made_by = carried[0].made_by if carried else f"{func.namespace}.{func.overloadpacket.__name__}"
            if is_product and not carried and frame.name:
                made_by = f"{made_by} in {frame.name}"
            addresses = self._addresses(value)
            self._followed[storage] = Followed(
                value,
                addresses,
                self._sample(value, addresses),
                made_by,
                is_product,
                frame,
                self._call if self._depth else 0,
                _running_node() if frame.is_backward else None,
                operations + sum(followed.operations for followed in carried),
                identity=carried[0].identity if carried else self._identity_of(func, args, operations),
                is_norm=any(followed.is_norm for followed in carried),
            )

    def _identity_of(self, func: Any, args: Any, operations: int) -> OperatorIdentity | None:
        frame = self._frames[-1]
        if not operations or frame.is_backward or not isinstance(frame.error, LayerErrors):
            return None
        with self.unobserved():
            return identify_product(func, args, frame)

    def _check_operands(self, func: Any, inputs: list[Tensor]) -> None:
        """Count a product that reads a weight as it is, where it was requested to be quantized, as escaped."""
        frame = self._frames[-1]
        if not isinstance(frame.error, FakeQuantization) or not any(value in frame.parameters for value in inputs):
            return
        if frame.error.weights or not self._call_claims:
            name = f"{func.namespace}.{func.overloadpacket.__name__}"
            _count(self.escapes, f"{name} with exact weights in {running_module(frame.module, frame.name)}")

    def _classify(self, func: Any, inputs: list[Tensor], output: Any, *, is_product: bool) -> None:
        frame = self._frames[-1]
        self.classified += 1
        if frame.refuses_weights and _is_refused_outside(func, inputs, output, frame, is_product=is_product):
            name = f"{func.namespace}.{func.overloadpacket.__name__}"
            place = running_module(frame.module, frame.name) or type(frame.module).__name__
            _count(self.escapes, f"{name} in {place}, outside the decoder layers")
        if frame.is_backward or frame.error is None:
            return
        found = escape(func, inputs, output, frame.parameters, elementwise=frame.noises_elementwise)
        if found is not None:
            _count(self.escapes, f"{found} in {running_module(frame.module, frame.name)}")

    def _end_call(self, *, exempt: bool) -> None:
        for storage, followed in list(self._followed.items()):
            if followed.call == self._call and not followed.claims and (followed.read_inside or exempt):
                del self._followed[storage]

    def _settle(self, followed: Followed) -> None:
        """Take the values of a tensor that is about to be read."""
        if followed.claims or followed.is_product:
            self.readings.append(Reading(followed, self._sample(followed.tensor, followed.addresses)))

    def _addresses(self, tensor: Tensor) -> IntArray:
        """Return sampled places of a tensor, as offsets in its storage: one in each of equal stretches."""
        numel = tensor.numel()
        count = min(numel, _SAMPLED_ELEMENTS)
        places = ((np.arange(count) + self._stretch_places[:count]) * (numel / count)).astype(np.int64)
        if not tensor.is_contiguous():
            indices = np.unravel_index(places, tuple(tensor.shape))
            places = sum(
                (index * stride for index, stride in zip(indices, tensor.stride(), strict=True)), np.zeros_like(places)
            )
        return np.asarray(places + tensor.storage_offset())

    def _sample(self, tensor: Tensor, addresses: IntArray) -> Tensor:
        with self.unobserved():
            values = tensor.detach()
            size = values.untyped_storage().nbytes() // values.dtype.itemsize
            flat = values.as_strided((size,), (1,), 0)
            return flat.index_select(0, torch.from_numpy(addresses).to(values.device))


def _is_refused_outside(func: Any, inputs: list[Tensor], output: Any, frame: Frame, *, is_product: bool) -> bool:
    """Whether an operation around the layers and the output projection is a product, or may be one with a weight."""
    takes_weight = any(value in frame.parameters for value in inputs)
    if takes_weight and keeps_the_parameter(func):
        frame.parameters.update(value for value in tree_leaves(output) if isinstance(value, Tensor))
        return False
    return (is_product and (takes_weight or frame.refuses_products)) or (takes_weight and not is_known(func))


def _is_composite(func: Any) -> bool:
    """Whether `func` is to be observed by its parts: in inference mode `aten.softmax` and others arrive as a whole."""
    return torch.is_inference_mode_enabled() and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


def _numel(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1


def _running_node() -> int | None:
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else None
