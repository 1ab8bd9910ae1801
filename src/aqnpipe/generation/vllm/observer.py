"""Follows every tensor of an audited pass from the operation that makes it to the first operation that reads it.

The observer runs in torch's dispatcher, below all hooks, so it sees what is computed and not what the injection
reports. It samples a tensor when an operation has made it, and again before the first operation reads it. The noise is
put on in between, unobserved. The injection only *claims* a tensor: it names the error and the draw. For each tensor
that is read:

- The result of a matrix product must be claimed where noise was requested, and unchanged where none was.
- A claimed tensor must hold the values that the claimed error gives (`expected_values`), with the key that the audit
  derives itself, and with a draw that no other tensor of the pass has.
- A claimed tensor must be read: noise on a copy that nothing uses is none.

Operations outside noised calls are classified: each is known to multiply no matrices, or refused in noised layers.
vLLM's differ from torch's:

- It has operators of its own. Those that are known to multiply no matrices are listed here. All others are refused in
  noised layers: fused experts, quantised products, operators of future versions.
- They write into a tensor that they are given. Attention is a product whose result is that tensor.
- On a GPU it launches some Triton kernels without an operator. Such a launch is refused too.

Samples stay on their device until the pass has ended; `judgement.Judge` compares them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aqnpipe.config.noise import PlacedError, TensorError
from aqnpipe.generation.vllm.claim import Claim
from aqnpipe.noise.audit.classification import (
    MatrixParameters,
    escape,
    is_known,
    keeps_the_parameter,
    running_module,
    storage_of,
)
from aqnpipe.noise.audit.operation_counts import operations_of
from aqnpipe.noise.audit.random_numbers import IntArray

ATTENTION = frozenset({"vllm.unified_attention", "vllm.unified_attention_with_output"})
"""vLLM's operators for attention: products, known only within a noised call."""

_NO_PRODUCTS = frozenset(
    {
        "_C.fused_add_rms_norm",
        "_C.gelu_and_mul",
        "_C.gelu_fast",
        "_C.gelu_new",
        "_C.gelu_quick",
        "_C.gelu_tanh",
        "_C.gelu_tanh_and_mul",
        "_C.relu_squared",
        "_C.rms_norm",
        "_C.rotary_embedding",
        "_C.shm_all_gather",
        "_C.silu_and_mul",
        "c10d._allgather_base_",
        "vllm.all_gather",
        "vllm.flashinfer_rotary_embedding",
        "vllm_ir.fused_add_rms_norm",
        "vllm_ir.rms_norm",
    }
)
"""vLLM's operators that multiply no matrices: norms, activations, rotary embeddings, and copies between workers.

Sums over workers are none of them: a sum of products is a product, so it must be part of a noised call.
"""

_SAMPLED_ELEMENTS = 64
_SAME_VALUES = frozenset({"_unsafe_view", "clone", "_to_copy"})
"""Operations whose output has the values of their input: a product stays a product."""

_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@dataclass(frozen=True)
class Part:
    """A part of the model: a decoder layer, the output projection, or all that is around them (both `layer` None).

    `place` is what the keys of its noise must depend on: places number the layers, then follow the output projection
    and the rest. `error` is what operators here were requested to have, None for none; with `elementwise` softmax,
    activations and norms must have it too. `refuses_products`: no product, and nothing unknown with a weight, may be
    computed here. `num_logits`: in an output projection whose vocabulary is padded, the number of logits before the
    padding. `runs_after_model`: the part is called when the forward of the model has returned.
    """

    place: int
    layer: int | None
    module: nn.Module
    name: str
    error: PlacedError | None = None
    elementwise: bool = False
    refuses_products: bool = False
    num_logits: int | None = None
    runs_after_model: bool = False


@dataclass(eq=False)
class Frame:
    """One pass of a part, and the tensors in it that hold matrix parameters."""

    part: Part
    parameters: MatrixParameters = field(default_factory=MatrixParameters)


@dataclass(eq=False)
class Followed:
    """A tensor between the operation that made it and the first one that reads it.

    `clean` are its sampled values as made. `is_product`: it must have the noise of a product. `call` is the noised call
    that made it, 0 for none; `read_inside`: only this call read it so far.
    """

    tensor: Tensor
    addresses: IntArray
    clean: Tensor
    made_by: str
    is_product: bool
    frame: Frame
    call: int
    claims: list[Claim] = field(default_factory=list)
    read_inside: bool = False


class EngineObserver(TorchDispatchMode):
    """Observes the operations of audited passes, from the first `enter` to the last `leave`.

    `escapes` counts "operation in module": products without the requested noise, and unknown operations. `unused`
    counts noise that nothing read, and `classified` operations. `readings` are followed tensors with their sampled
    values as read, to be compared.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.claims: list[Claim] = []
        self.forget()
        # Drawn once: what is sampled must not depend on how many other tensors were followed before.
        self._stretch_places = rng.random(_SAMPLED_ELEMENTS)
        self._frames: list[Frame] = []
        self._followed: dict[int, Followed] = {}
        self._depth = self._call = 0
        self._is_paused = False
        self._unwatch: Callable[[], None] = lambda: None

    # -- what the audit calls ------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Return whether a pass is running and observed."""
        return bool(self._frames) and not self._is_paused

    def enter(self, part: Part) -> None:
        """Start a pass of `part`: the operations until `leave` belong to it."""
        if not self._frames:
            self._unwatch = _watch_triton(self._note_launch)
            self.__enter__()
        self._frames.append(Frame(part))
        self._frames[-1].parameters.start(part.module.parameters())

    def leave(self, output: Any, *, has_ended: bool = True) -> None:
        """End the pass; `output` is what it returned. What was claimed must have been read or be part of it.

        What a pass had not read that an exception ended (`has_ended` is false) is not judged.
        """
        frame = self._frames.pop()
        kept = {storage_of(value) for value in tree_leaves(output) if isinstance(value, Tensor)}
        for storage, followed in list(self._followed.items()):
            if followed.frame is frame:
                del self._followed[storage]
                if has_ended and storage in kept:
                    self._settle(followed)
                elif has_ended and followed.claims:
                    _count(self.unused, followed.made_by)
        if not self._frames:
            self.__exit__(None, None, None)
            self._unwatch()

    def close(self) -> None:
        """End all passes, also after an exception in the middle of them."""
        while self._frames:
            self.leave(None, has_ended=False)

    def forget(self) -> None:
        """Forget what was judged, so that it is not counted again if another pass is observed.

        Claims are kept: no draw may be used by two passes.
        """
        self.classified = 0
        self.escapes: dict[str, int] = {}
        self.unused: dict[str, int] = {}
        self.readings: list[tuple[Followed, Tensor]] = []

    def pause(self) -> None:
        """Observe nothing until `go_on`: a part runs within the present pass that is not to be observed.

        It reads tensors unseen, and may change them, so those of the pass count as read now.
        """
        for followed in self._followed.values():
            self._settle(followed)
        self._followed.clear()
        self._is_paused = True

    def go_on(self) -> None:
        """Observe again."""
        self._is_paused = False

    def is_noised(self, tensor: Tensor) -> bool:
        """Return whether `tensor` has noise that nothing has read yet."""
        followed = self._followed.get(storage_of(tensor))
        return followed is not None and bool(followed.claims)

    # -- what the injection calls --------------------------------------------------------------------------------------

    @contextmanager
    def noised_call(self) -> Iterator[None]:
        """Observe the body as one noised call: products that only the body itself reads are parts of its result."""
        self._depth += 1
        self._call += self._depth == 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                for storage, followed in list(self._followed.items()):
                    if followed.call == self._call and followed.read_inside and not followed.claims:
                        del self._followed[storage]

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Do not observe the body: it samples values, or puts an error on a tensor that is then claimed."""
        before, self._is_paused = self._is_paused, True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._is_paused = before

    def claim(
        self,
        tensor: Tensor,
        operator: str,
        layer: int | None,
        error: TensorError,
        draw: tuple[int, int, int],
        columns: tuple[int, int, int] | None = None,
    ) -> None:
        """Note that `error` was put on `tensor` with the random numbers of `draw`: key, call and stream.

        `columns`: the place of a share in the whole tensor, as in `Claim`.
        """
        geometry = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        claim = Claim(operator, layer, error, *draw, *geometry, columns)
        self.claims.append(claim)
        followed = self._followed.get(storage_of(tensor))
        if followed is not None:
            followed.claims.append(claim)
        elif tensor.numel():
            _count(self.unused, f"{operator} (noise on a tensor that no operation of the pass made)")

    # -- the dispatcher ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and follow what it reads and what it makes."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if not self.is_on:
                return func(*args, **kwargs)
            if _is_composite(func):
                with self:
                    return func._op_dk(_COMPOSITE, *args, **kwargs)
            return self._observe(func, args, kwargs)

    def _observe(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        inputs = _tensors((args, kwargs))
        storages = [storage_of(value) for value in inputs]
        carried = [] if func.is_view else self._read(func, storages)
        output = func(*args, **kwargs)
        is_product = operations_of(func, args, kwargs, output) > 0
        if not func.is_view:
            # What was changed in place is followed already.
            known = set() if carried else {storage for storage in storages if storage in self._followed}
            made = [value for value in _tensors(output) if storage_of(value) not in known]
            self._follow(func, made, carried[0].made_by if carried else "", is_product=is_product or bool(carried))
        if func.namespace != "aten":
            written = _written(func, args, kwargs)
            for value in written:
                self._followed.pop(storage_of(value), None)
            self._follow(func, written, "", is_product=_name(func) in ATTENTION)
        if not self._depth:
            self._classify(func, inputs, output, is_product=is_product)
        return output

    def _read(self, func: Any, storages: list[int]) -> list[Followed]:
        """Settle what `func` reads; return the products whose values it passes on."""
        name, carried = func.overloadpacket.__name__, []
        for storage in dict.fromkeys(storages):
            followed = self._followed.get(storage)
            if followed is None:
                continue
            if followed.is_product and not followed.claims and name in _SAME_VALUES:
                # The original stays a product too: if only a copy of it gets the noise, nothing may read the original.
                carried.append(followed)
            elif not followed.claims and self._depth and followed.call == self._call:
                followed.read_inside = True
            else:
                if followed.claims and name in _OVERWRITES and storage == storages[0]:
                    _count(self.unused, f"{followed.claims[-1].operator} (overwritten by aten.{name})")
                self._settle(followed)
                del self._followed[storage]
        return carried

    def _follow(self, func: Any, made: Sequence[Tensor], made_by: str, *, is_product: bool) -> None:
        """Follow what `func` made; `made_by`: the operation whose product it passes on, "" for none."""
        frame = self._frames[-1]
        if not made_by:
            made_by = f"{_name(func)} in {frame.part.name}" if is_product and frame.part.name else _name(func)
        for value in made:
            storage = storage_of(value)
            if storage and value.is_floating_point() and value.numel():
                addresses, call = self._addresses(value), self._call if self._depth else 0
                clean = self._sample(value, addresses)
                self._followed[storage] = Followed(value, addresses, clean, made_by, is_product, frame, call)

    def _classify(self, func: Any, inputs: Sequence[Tensor], output: Any, *, is_product: bool) -> None:
        frame, name = self._frames[-1], _name(func)
        part = frame.part
        self.classified += 1
        if name in _NO_PRODUCTS and not any(value in frame.parameters for value in inputs):
            return
        if part.refuses_products and _is_refused_outside(func, inputs, output, frame.parameters, is_product=is_product):
            place = running_module(part.module, part.name) or type(part.module).__name__
            _count(self.escapes, f"{name} in {place}, outside the decoder layers")
        elif part.error is not None:
            found = escape(func, inputs, output, frame.parameters, elementwise=part.elementwise)
            if found is not None:
                _count(self.escapes, f"{found} in {running_module(part.module, part.name)}")

    def _note_launch(self, kernel: str) -> None:
        if self.is_on and not self._depth and self._frames[-1].part.error is not None:
            part = self._frames[-1].part
            _count(self.escapes, f"triton.{kernel} in {running_module(part.module, part.name)}")

    def _settle(self, followed: Followed) -> None:
        """Take the values of a tensor that is about to be read."""
        if followed.claims or followed.is_product:
            self.readings.append((followed, self._sample(followed.tensor, followed.addresses)))

    def _addresses(self, tensor: Tensor) -> IntArray:
        """Return sampled places of a tensor, as offsets in its storage: one in each of equal stretches."""
        count = min(tensor.numel(), _SAMPLED_ELEMENTS)
        places = ((np.arange(count) + self._stretch_places[:count]) * (tensor.numel() / count)).astype(np.int64)
        if not tensor.is_contiguous():
            indices = np.unravel_index(places, tuple(tensor.shape))
            places = np.asarray(sum(index * stride for index, stride in zip(indices, tensor.stride(), strict=True)))
        return np.asarray(places + tensor.storage_offset())

    def _sample(self, tensor: Tensor, addresses: IntArray) -> Tensor:
        with self.unobserved():
            values = tensor.detach()
            size = values.untyped_storage().nbytes() // values.dtype.itemsize
            flat = values.as_strided((size,), (1,), 0)
            return flat.index_select(0, torch.from_numpy(addresses).to(values.device))


def _is_refused_outside(
    func: Any, inputs: Sequence[Tensor], output: Any, parameters: MatrixParameters, *, is_product: bool
) -> bool:
    """Return whether an operation around layers and output projection is a product, or may be one with a weight."""
    takes_weight = any(value in parameters for value in inputs)
    if takes_weight and keeps_the_parameter(func):
        parameters.update(_tensors(output))
        return False
    return is_product or (takes_weight and not is_known(func))


def _is_composite(func: Any) -> bool:
    """Return whether to observe `func` by its parts: in inference mode `aten.softmax` and others arrive as a whole."""
    return torch.is_inference_mode_enabled() and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator of vLLM wrote into its arguments."""
    arguments = func._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    names = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    return [given[name] for name in names if isinstance(given.get(name), Tensor)]


def _name(func: Any) -> str:
    return f"{func.namespace}.{func.overloadpacket.__name__}"


def _count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1


def _watch_triton(note: Callable[[str], None]) -> Callable[[], None]:
    """Call `note` with the name of every Triton kernel that others launch in this process; return what ends it.

    aqnpipe's own kernels compute noise.
    """
    # Before Triton is imported, no kernel of it can have been defined.
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return lambda: None
    function: Any = jit.JITFunction
    run = function.run

    @wraps(run)
    def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not kernel.__module__.startswith(f"{__package__.partition('.')[0]}."):
            note(kernel.__name__)
        return run(kernel, *args, **kwargs)

    function.run = noted

    def restore() -> None:
        function.run = run

    return restore
