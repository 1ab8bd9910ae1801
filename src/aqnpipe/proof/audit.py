"""The audit of a noisy machine: a dispatch mode above the kernels, in drawn passes.

It sees the operands and the result of every operator as the program gets them, recomputes sampled elements in float64
(`recompute`), derives the requested error from keys of its own, and compares. Products are counted as the dispatcher
sees them; an operator that is neither a product known here nor known to be none is refused by name. The audit follows
the place by hooks of its own, by the definition in `machine/places.py`, and shares no code with the machine.

Audited are the first pass of each kind (several tokens or one per row, with gradients or without) as a whole, then
single parts in passes drawn with decreasing probability; and the backward pass of passes that were audited as a whole.
The machine cannot know which.
"""

import binascii
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aqnpipe.config.noise import AbsoluteGaussian, RelativeGaussian, TensorError
from aqnpipe.models.calls import num_tokens
from aqnpipe.models.parts import PlaceHook
from aqnpipe.noise.audit.classification import MatrixParameters, escape, is_known
from aqnpipe.noise.audit.expected_values import deviations, expected_values
from aqnpipe.noise.audit.random_numbers import Draws, derived_key
from aqnpipe.proof.receipt import Cell, MachineReceipt, Seen
from aqnpipe.proof.recompute import RECOMPUTED, UNPROVEN, Sampled, numbered_in_order, sample_of

_EXPECTED_AUDITS = 4
_LEAST_SHARE = 1 / 64
_LEAST_WHOLE_SHARE = 1 / 512
_SAMPLES = 16
_VISIT = 2**20
_OTHER_NODES = 2**16
_EVERY_OUTSIDE = 64
_PASSES_FOR_BACKWARD = 8
OUTSIDE = "no layer"
_TINY = 1e-300
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

NO_PRODUCTS_OF_BACKWARD = frozenset(
    {
        *("_efficientzerotensor", "_has_same_storage_numel", "_is_any_true", "_safe_softmax", "as_strided_"),
        *("is_same_size", "softplus_backward", "squeeze_", "t_", "transpose_", "unsafe_split", "unsqueeze_"),
        *("_amp_foreach_non_finite_check_and_unscale_", "_chunk_cat", "_fused_rms_norm_backward"),
        *("_log_softmax_backward_data", "_softmax_backward_data", "_weight_norm_interface_backward"),
        *("binary_cross_entropy_with_logits", "cumsum_backward", "embedding_dense_backward"),
        *("empty_permuted", "gelu_backward", "index_put", "isfinite", "log_sigmoid_backward"),
        *("log_sigmoid_forward", "logsumexp", "masked_fill", "max_pool2d_with_indices"),
        *("native_dropout_backward", "native_group_norm_backward", "native_layer_norm_backward"),
        *("new_empty_strided", "new_zeros", "nll_loss2d_backward", "nll_loss2d_forward"),
        *("nll_loss_backward", "nll_loss_forward", "select_backward", "set_", "silu_backward"),
        *("slice_backward", "value_selecting_reduction_backward"),
    }
)
"""Operations of losses and backward passes that multiply no matrices."""

_NO_PRODUCTS_BY_PREFIX = (
    *("_adaptive_avg_pool", "_batch_norm", "_native_batch_norm"),
    *("_pack_padded", "adaptive_max_pool", "avg_pool", "binary_cross_entropy", "col2im"),
    *("grid_sampler", "huber_loss", "im2col", "max_pool", "mse_loss", "native_batch_norm"),
    *("reflection_pad", "replication_pad", "smooth_l1_loss", "unfold_backward", "upsample_"),
)
"""Beginnings of the names of such operations: pooling, padding, resizing, other norms and losses."""


_PLAIN = (Tensor, nn.Parameter)

_ON_A_MATRIX = " on a weight matrix"
_MULTIPLIES = ("mul", "addcmul", "div")
"""Operators of which a product with a weight could be written as a sum."""

_COLLECTIVES = frozenset({"_c10d_functional", "c10d", "fsdp"})
"""Namespaces of operations that move tensors between processes."""


class AuditRequest(NamedTuple):
    """What the machine was asked to do, in the places `selected` by number and for the `operators`; None for all."""

    error: TensorError
    seed: int
    position: tuple[int, int, int]
    stream: str
    selected: Set[int] | None
    backward: bool
    operators: Set[str] | None = None


class _Start(NamedTuple):
    node: int
    passed: int | None
    part: int
    visit: int


class _Visit:
    __slots__ = ("calls", "is_again", "is_lost", "part", "passed")

    def __init__(self, passed: int, part: int, calls: int, is_again: bool) -> None:
        self.passed, self.part, self.calls, self.is_again = passed, part, calls, is_again
        self.is_lost = False


class _Observation:
    """What is observed of one pass, and of the backward pass through its graph.

    `kind` is that of a pass observed as a whole, None if single parts are observed.
    """

    def __init__(self, audit: "Audit", kind: tuple[int, bool, bool] | None, passed: int, outside: int) -> None:
        self.mode = _Mode(audit)
        self.kind = kind
        self.passed = passed
        self.is_on = False
        self.stack = [_Visit(passed, outside, 0, False)]
        self.visits: dict[int, int] = {}
        self.starts: list[_Start] = []
        self.calls: dict[int, tuple[int, int, int]] = {}
        self.handles: list[Any] = []
        self.node = -1
        self.nth = 0

    def start_of(self, node: int) -> _Start | None:
        """Return where the forward pass was when it made a node; None for nodes of other passes."""
        index = bisect_right([start.node for start in self.starts], node) - 1
        found = self.starts[index] if index >= 0 else None
        return None if found is None or found.passed is None else found

    def note_start(self, passed: int | None, part: int, visit: int) -> None:
        """Note that the next nodes of the backward graph belong to a part."""
        if torch.is_grad_enabled():
            self.starts.append(_Start(torch.autograd._get_sequence_nr(), passed, part, visit))

    def next_visit(self, part: int) -> int:
        """Return the number of this visit of a part."""
        self.visits[part] = self.visits.get(part, -1) + 1
        return self.visits[part]

    def switch_on(self) -> None:
        """Observe this thread from now on."""
        self.mode.__enter__()
        self.is_on = True

    def switch_off(self) -> None:
        """Observe no longer."""
        if self.is_on:
            self.is_on = False
            self.mode.__exit__(None, None, None)

    def close(self) -> None:
        """Remove the hooks."""
        self.switch_off()
        for handle in self.handles:
            handle.remove()
        self.handles = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.passes = -1
        self.current: _Observation | None = None
        self.pending: _Observation | None = None


class Audit:
    """Audits one machine. `outside` is the number of the place outside all parts."""

    def __init__(self, request: AuditRequest, receipt: MachineReceipt, outside: int) -> None:
        self.request = request
        self.receipt = receipt
        self._models: dict[nn.Module, Mapping[int, nn.Module]] = {}
        self._names: dict[int, str] = {outside: OUTSIDE}
        self._outside = outside
        self._num_outside = 0
        self._is_random = isinstance(request.error, RelativeGaussian | AbsoluteGaussian)
        self._draws = receipt.draws
        self._local = _Thread()
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._keys: dict[tuple[str, int, int], int] = {}

    def add_model(
        self, roots: Sequence[nn.Module], modules: Mapping[int, nn.Module], names: Mapping[int, str]
    ) -> list[Any]:
        """Audit a model: an outermost call of one of `roots` is a pass, `modules` are its parts by number."""
        handles: list[Any] = []
        self._names |= names
        for root in roots:
            self._models[root] = modules
            enter = PlaceHook(self.enter)
            handles.append(root.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            handles.append(root.register_forward_hook(PlaceHook(self._leave), always_call=True))
        return handles

    @contextmanager
    def running(self) -> Iterator[None]:
        """Audit backward passes too, in the body."""
        end = watch_backward(self.backward)
        try:
            yield
        finally:
            end()
            local = self._local
            for observation in (local.current, local.pending):
                if observation is not None:
                    observation.close()
            local.current = local.pending = None

    # -- passes --------------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Begin a pass, unless this call is a part of one."""
        local = self._local
        if os.getpid() != self._process:
            return
        if module in local.running:
            local.running.clear()
        local.running.append(module)
        if len(local.running) > 1 or torch._C._current_autograd_node() is not None:
            return
        if local.current is not None:
            local.current.close()
            local.current = None
        with self._lock:
            self.receipt.passes += 1
            number = self.receipt.passes
        local.passes += 1
        if local.pending is not None:
            # The nodes that follow are of another pass.
            local.pending.note_start(None, self._outside, 0)
        # Each root of its own: a loss that is a module has no products, and says nothing about the model.
        kind = (list(self._models).index(module), num_tokens(args, kwargs) == 1, torch.is_grad_enabled())
        chance = float(self._draws.random())
        self.receipt.gradient_passes += kind[2]
        lacks_backward = kind[2] and self.request.backward and not self._has_backward()
        if kind not in self.receipt.audited_kinds or lacks_backward or chance < max(_LEAST_WHOLE_SHARE, 1 / number):
            self._observe(local, self._models[module], kind)
        elif self._models[module] and chance < max(_LEAST_SHARE, _EXPECTED_AUDITS / number):
            part = int(self._draws.choice(list(self._models[module])))
            self._observe(local, {part: self._models[module][part]}, None)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        local = self._local
        if not local.running or local.running[-1] is not module:
            return
        local.running.pop()
        current = local.current
        if local.running or current is None or torch._C._current_autograd_node() is not None:
            return
        local.current = None
        # Between passes nothing is observed: a mode that stayed on could end up in the middle of the program's own.
        current.switch_off()
        if current.kind is not None and output is not None:
            self.receipt.audited_kinds.add(current.kind)
            self.receipt.audited_passes += 1
            if self.request.backward and current.kind[2]:
                if local.pending is not None:
                    local.pending.close()
                local.pending = current
                return
        current.close()

    def _observe(self, local: _Thread, modules: Mapping[int, nn.Module], kind: tuple[int, bool, bool] | None) -> None:
        """Observe this pass: all of it if it has a kind, otherwise the given part alone."""
        earlier = local.pending if kind is not None and kind[2] else None
        observation = local.current = _Observation(
            self, kind, local.passes + (self._number_of_thread() << 32), self._outside
        )
        if earlier is not None:
            # A backward pass may be through both graphs, or through the earlier one.
            local.pending = None
            earlier.close()
            observation.starts, observation.calls = earlier.starts, earlier.calls
        for part, module in modules.items():
            enter, leave = partial(self._enter_part, observation, part), partial(self._leave_part, observation)
            observation.handles.append(module.register_forward_pre_hook(PlaceHook(enter), prepend=True))
            observation.handles.append(module.register_forward_hook(PlaceHook(leave), always_call=True, prepend=True))
        if kind is not None:
            observation.note_start(observation.passed, self._outside, observation.next_visit(self._outside))
            observation.switch_on()

    def _has_backward(self) -> bool:
        """Return whether a backward pass was compared, or so many were not that it would cost too much to go on."""
        return self.receipt.gradient_passes > _PASSES_FOR_BACKWARD or any(
            seen.recomputed for cell, seen in list(self.receipt.cells.items()) if cell.phase == "backward"
        )

    def _number_of_thread(self) -> int:
        name = threading.current_thread().name.encode("utf-8")
        return 0 if threading.get_ident() == self._thread else binascii.crc32(name) // 4

    def _enter_part(self, observation: _Observation, part: int, *_: Any) -> None:
        if observation is not self._local.current:
            return
        node = torch._C._current_autograd_node()
        if node is None:
            passed, visit = observation.passed, observation.next_visit(part)
        else:
            start = observation.start_of(node._sequence_nr())
            passed = observation.passed if start is None or start.passed is None else start.passed
            visit = start.visit if start is not None and start.part == part else 0
        observation.stack.append(_Visit(passed, part, visit * _VISIT, node is not None))
        observation.note_start(passed, part, visit)
        if observation.kind is None and node is None and not observation.is_on:
            observation.switch_on()

    def _leave_part(self, observation: _Observation, *_: Any) -> None:
        if observation is not self._local.current or len(observation.stack) < 2:
            return
        left, here = observation.stack.pop(), observation.stack[-1]
        if observation.kind is None:
            if len(observation.stack) == 1 and not left.is_again:
                observation.switch_off()
        elif here.part == self._outside:
            observation.note_start(left.passed, self._outside, observation.next_visit(self._outside))
        else:
            observation.note_start(here.passed, here.part, here.calls // _VISIT)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Observe a backward pass if a forward pass of its graph was observed as a whole."""
        local = self._local
        is_outermost = torch._C._current_autograd_node() is None
        self.receipt.backward_passes += is_outermost
        pending = local.pending
        if not is_outermost or pending is None or local.current is not None:
            yield
            return
        local.current, local.pending = pending, None
        pending.switch_on()
        try:
            yield
        finally:
            pending.close()
            local.current = None

    # -- operators -----------------------------------------------------------------------------------------------------

    def observe(self, mode: "_Mode", function: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an operator and compare its result."""
        if not isinstance(function, torch._ops.OpOverload) or any(kind not in _PLAIN for kind in types):
            # Subclasses of tensors and operators of higher order compute with operators that are not seen from here.
            if self._local.current is not None:
                self._local.current.stack[-1].is_lost = True
            return function(*args, **kwargs)
        name = function.overloadpacket.__name__
        operator = name.removesuffix("_") if name.removesuffix("_") in RECOMPUTED else name
        is_product = function.namespace == "aten" and (operator in RECOMPUTED or operator in UNPROVEN)
        if not is_product and torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), _COMPOSITE):
            with mode:
                found = function.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        observation = self._local.current
        if observation is None:
            return function(*args, **kwargs)
        if not is_product:
            result = function(*args, **kwargs)
            self._classify(observation, function, name, args, kwargs, result)
            return result
        is_in_place = operator != name
        arguments = _arguments(function, args, kwargs, copies_first=is_in_place)
        result = function(*args, **kwargs)
        is_into = is_in_place or function._overloadname.endswith("out")
        if is_into:
            arguments.pop("out", None)
        self._product(observation, operator, arguments, result, is_into=is_into)
        return result

    def _classify(
        self, observation: _Observation, function: Any, name: str, args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note an operation that may be a product without an error."""
        here, selected = observation.stack[-1].part, self.request.selected
        if (
            (selected is not None and here not in selected)
            or (function.namespace == "aten" and _is_no_product(name))
            or function.namespace in _COLLECTIVES
        ):
            return
        if torch._C._current_autograd_node() is not None or here == self._outside:
            found = None if is_known(function) else f"{function.namespace}.{name}"
        else:
            inputs = [value for value in tree_leaves((args, dict(kwargs))) if isinstance(value, Tensor)]
            # Sharded weights are other tensors in every pass, so they are known by their kind.
            observation.mode.parameters.start(value for value in inputs if isinstance(value, nn.Parameter))
            found = escape(function, inputs, result, observation.mode.parameters, elementwise=False)
            if found is not None and found.endswith(_ON_A_MATRIX) and not name.startswith(_MULTIPLIES):
                found = None
        if found is not None:
            # It may compute with operators that are noised and not seen from here.
            observation.stack[-1].is_lost = True
            self.receipt.note(self.receipt.escapes, f"{found} in {self._names[here]}")

    def _product(
        self, observation: _Observation, operator: str, arguments: Mapping[str, Any], result: Any, *, is_into: bool
    ) -> None:
        results = [value for value in (result if isinstance(result, tuple) else (result,)) if isinstance(value, Tensor)]
        operands = [value for value in arguments.values() if isinstance(value, Tensor)]
        plain = all(value.layout == torch.strided and not value.is_meta for value in (*results, *operands))
        if not results or not plain or not results[0].is_floating_point():
            return
        node, here = torch._C._current_autograd_node(), observation.stack[-1]
        is_gradient = node is not None and not here.is_again and not torch.is_grad_enabled()
        passed, part, call, stream = here.passed, here.part, 0, 0
        if is_gradient:
            number = node._sequence_nr()
            start, called = observation.start_of(number), observation.calls.get(number)
            if start is None or start.passed is None:
                return
            passed, part, call = called or (start.passed, start.part, start.visit * _VISIT + number - start.node)
        phase = "backward" if is_gradient else self.request.stream
        cell = Cell(phase, self._names[part], operator, str(results[0].dtype).removeprefix("torch."))
        if is_gradient and called is None and part == self._outside:
            # Of a product behind the pass, which was not observed; its call is not known.
            self.receipt.add(cell, Seen(products=1))
            return
        if not self._is_noised(operator, arguments, part, is_gradient):
            self.receipt.add(cell, Seen(products=1))
            return
        if is_gradient:
            observation.nth = observation.nth + 1 if observation.node == number else 0
            observation.node, stream = number, (_OTHER_NODES if called is None else 1) + observation.nth
        else:
            here.calls += 1
            call = here.calls
            if here.is_lost:
                self.receipt.add(cell, Seen(products=1))
                return
            if torch.is_grad_enabled():
                # The node of an operator is made just before it runs; one without a node finds that of another.
                observation.calls.setdefault(torch.autograd._get_sequence_nr() - 1, (passed, part, call))
            if node is not None and not here.is_again:
                # A checkpointed function outside the parts is computed again; its place is not known.
                self.receipt.add(cell, Seen(products=1))
                return
        key = self._key(phase, passed, part)
        sampled = sample_of(operator, arguments, result, self._draws, _SAMPLES)
        for nth, found in enumerate(sampled):
            self.receipt.add(cell, Seen(products=int(nth == 0)))
            if found is not None:
                numbered = numbered_in_order(found, results[nth]) if is_into else found
                draws = Draws.of(key, call, stream + nth)
                self.receipt.add(cell, self._compare(numbered, draws, results[nth].dtype))
        observation.nth += len(sampled) - 1 if is_gradient else 0

    def _is_noised(self, operator: str, arguments: Mapping[str, Any], part: int, is_gradient: bool) -> bool:
        request = self.request
        if (is_gradient and not request.backward) or (request.selected is not None and part not in request.selected):
            return False
        if request.operators is not None and _machine_name(operator) not in request.operators:
            return False
        return is_gradient or part != self._outside or _num_terms(operator, arguments) != 1

    def observe_outside(
        self, phase: str, operator: str, result: Tensor, factors: tuple[Tensor, ...], source: tuple[int, int, int]
    ) -> None:
        """Compare a product outside all parts, which the machine reports with its random numbers.

        The first ones, then every 64th. Within an observed pass they are seen from above.
        """
        if self._local.current is not None:
            return
        self._num_outside += 1
        number = self._num_outside
        if number & (number - 1) and number % _EVERY_OUTSIDE:
            return
        sampled = sample_of(operator, dict(enumerate(factors)), result, self._draws, _SAMPLES)
        cell = Cell(phase, OUTSIDE, operator, str(result.dtype).removeprefix("torch."))
        for found in sampled:
            seen = Seen() if found is None else self._compare(found, Draws.of(*source), result.dtype)
            seen.products = 1
            self.receipt.add(cell, seen)

    def _compare(self, sampled: Sampled, draws: Draws, dtype: torch.dtype) -> Seen:
        exact, slack, found = sampled.exact, sampled.slack, sampled.found
        usable = np.isfinite(exact) & np.isfinite(found)
        low, middle, high = (
            expected_values(exact + change, self.request.error, dtype, draws, sampled.numbers)
            for change in (-slack, 0.0, slack)
        )
        expected, allowed = middle
        spread = np.maximum(np.abs(low[0] - expected), np.abs(high[0] - expected))
        deviation = deviations(exact, found, expected, allowed + spread + sampled.after, dtype)[usable]
        # Elements with much rounding say little; without this one large element would outweigh all others.
        scale = self.request.error.scale if isinstance(self.request.error, RelativeGaussian) else None
        unit = (np.abs(exact) + (slack + sampled.after) / scale + _TINY)[usable] if scale else 1.0
        error, seen = (expected - exact)[usable] / unit, (found - exact)[usable] / unit
        return Seen(
            recomputed=int(usable.sum()),
            wrong=int((deviation > 1).sum()),
            largest_deviation=float(deviation.max(initial=0.0)),
            # Of an error without random numbers, rounding hides the size; its values are bounded above.
            found_expected=float((seen * error).sum()) if self._is_random else 0.0,
            expected_squared=float((error * error).sum()) if self._is_random else 0.0,
            found_squared=float((seen * seen).sum()),
        )

    def _key(self, stream: str, passed: int, part: int) -> int:
        found = self._keys.get((stream, passed, part))
        if found is None:
            found = derived_key(self.request.seed, stream, *self.request.position, passed, part)
            self._keys = {**(self._keys if len(self._keys) < 256 else {}), (stream, passed, part): found}
        return found


def _arguments(function: Any, args: Any, kwargs: Mapping[str, Any], *, copies_first: bool) -> dict[str, Any]:
    """Return the arguments of a call by name; the first one as it was before a call that overwrites it."""
    schema = function._schema.arguments
    found = {argument.name: argument.default_value for argument in schema}
    found |= dict(zip((argument.name for argument in schema), args, strict=False)) | dict(kwargs)
    if copies_first:
        found[schema[0].name] = found[schema[0].name].clone()
    return found


def _machine_name(operator: str) -> str:
    """Return the operator that has the error: a sum with a product is the product, then the sum."""
    return {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv"}.get(operator, operator)


def _is_no_product(name: str) -> bool:
    return name in NO_PRODUCTS_OF_BACKWARD or name.startswith(_NO_PRODUCTS_BY_PREFIX)


def _num_terms(operator: str, arguments: Mapping[str, Any]) -> int:
    """Return the number of terms of each sum of a product; 2 or more for attention and convolution."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if operator.startswith(("_scaled_dot", "_flash", "_efficient")):
        return max(int(tensors[1].shape[-2]), 2)
    if operator.startswith("convolution"):
        return int(tensors[1][0].numel()) if not operator.endswith("_backward") else 2
    first = tensors[1] if operator.startswith("add") or operator.startswith("badd") else tensors[0]
    return int(first.shape[-1])


class _Mode(TorchDispatchMode):
    """Passes every operator of this thread to the audit."""

    supports_higher_order_operators = True

    def __init__(self, audit: Audit) -> None:
        super().__init__()
        self._audit = audit
        self.parameters = MatrixParameters()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._audit.observe(self, func, types, args, kwargs or {})


def watch_backward(watched: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Run every backward pass of this process within `watched()`; return a function that ends it.

    torch runs all of them (`backward`, `autograd.grad`, those of reentrant checkpoints) through one Python function.
    """
    run = torch.autograd._engine_run_backward

    def run_watched(*args: Any, **kwargs: Any) -> Any:
        with watched():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_watched

    def end() -> None:
        torch.autograd._engine_run_backward = run

    return end
