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
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from aqnpipe.config.noise import AppliedError, FakeQuantization
from aqnpipe.config.own_noise import OwnError
from aqnpipe.models.calls import num_tokens
from aqnpipe.models.parts import PlaceHook
from aqnpipe.noise.audit.classification import escape, is_known
from aqnpipe.noise.audit.random_numbers import Draws, derived_key
from aqnpipe.proof.comparison import compare
from aqnpipe.proof.elementwise import ELEMENTWISE
from aqnpipe.proof.norms import watch_norms
from aqnpipe.proof.observation import Mode, Observation, Visit, watch_backward
from aqnpipe.proof.operations import (
    COLLECTIVES,
    MULTIPLIES,
    ON_A_MATRIX,
    arguments_of,
    is_no_product,
    machine_name,
    num_terms,
)
from aqnpipe.proof.quantized import with_rounded_factors
from aqnpipe.proof.receipt import Cell, MachineReceipt, Seen
from aqnpipe.proof.recompute import RECOMPUTED, UNPROVEN, Arguments, Sampled, numbered_in_order

_EXPECTED_AUDITS = 4
_LEAST_SHARE = 1 / 64
_LEAST_WHOLE_SHARE = 1 / 512
_SAMPLES = 16
_SAMPLES_OF_OWN = 128
_VISIT = 2**20
_OTHER_NODES = 2**16
_EVERY_OUTSIDE = 64
_PASSES_FOR_BACKWARD = 8
OUTSIDE = "no layer"
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

_PLAIN = (Tensor, nn.Parameter)


class AuditRequest(NamedTuple):
    """What the machine was asked to do, in the places `selected` by number and for the `operators`; None for all.

    `elementwise`: softmax, activations and norms in layers too.
    """

    error: AppliedError
    seed: int
    position: tuple[int, int, int]
    stream: str
    selected: Set[int] | None
    backward: bool
    operators: Set[str] | None = None
    elementwise: bool = False


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.passes = -1
        self.current: Observation | None = None
        self.pending: Observation | None = None


class Audit:
    """Audits one machine. `outside` is the number of the place outside all parts.

    `exactly`: the machine computes exactly in its body, for functions of a user's own that are called once more here.
    """

    exactly: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, request: AuditRequest, receipt: MachineReceipt, outside: int) -> None:
        self.request = request
        self.receipt = receipt
        self._models: dict[nn.Module, Mapping[int, nn.Module]] = {}
        self._names: dict[int, str] = {outside: OUTSIDE}
        self._outside = outside
        self._num_outside = 0
        self._draws = receipt.draws
        self._local = _Thread()
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._keys: dict[tuple[str, int, int], int] = {}
        # The backward pass of quantized operands has them too, without being asked for.
        self._is_quantized = isinstance(request.error, FakeQuantization)
        self._observes_gradients = request.backward or self._is_quantized
        # What a user announced of a size is checked beside single values, and takes more of them.
        self._samples = _SAMPLES_OF_OWN if isinstance(request.error, OwnError) else _SAMPLES
        self._recomputed = {**RECOMPUTED, **(ELEMENTWISE if request.elementwise else {})}

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
            if self._observes_gradients and current.kind[2]:
                if local.pending is not None:
                    local.pending.close()
                local.pending = current
                return
        current.close()

    def _observe(self, local: _Thread, modules: Mapping[int, nn.Module], kind: tuple[int, bool, bool] | None) -> None:
        """Observe this pass: all of it if it has a kind, otherwise the given part alone."""
        earlier = local.pending if kind is not None and kind[2] else None
        observation = local.current = Observation(
            self.observe, kind, local.passes + (self._number_of_thread() << 32), self._outside
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
        if self.request.elementwise:
            observation.handles += watch_norms(observation, modules, self.request.backward, self._missed_norm)
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

    def _enter_part(self, observation: Observation, part: int, *_: Any) -> None:
        if observation is not self._local.current:
            return
        node = torch._C._current_autograd_node()
        if node is None:
            passed, visit = observation.passed, observation.next_visit(part)
        else:
            start = observation.start_of(node._sequence_nr())
            passed = observation.passed if start is None or start.passed is None else start.passed
            visit = start.visit if start is not None and start.part == part else 0
        observation.stack.append(Visit(passed, part, visit * _VISIT, node is not None))
        observation.note_start(passed, part, visit)
        if observation.kind is None and node is None and not observation.is_on:
            observation.switch_on()

    def _leave_part(self, observation: Observation, *_: Any) -> None:
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
            if (missing := pending.expected_gradients - pending.norm_gradients) > 0:
                self.receipt.note(self.receipt.escapes, "the gradient of a norm's input", missing)

    def _missed_norm(self, part: int) -> None:
        self.receipt.note(self.receipt.escapes, f"a norm in {self._names[part]}")

    # -- operators -----------------------------------------------------------------------------------------------------

    def observe(self, mode: Mode, function: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an operator and compare its result."""
        if not isinstance(function, torch._ops.OpOverload) or any(kind not in _PLAIN for kind in types):
            # Subclasses of tensors and operators of higher order compute with operators that are not seen from here.
            if self._local.current is not None:
                self._local.current.stack[-1].is_lost = True
            return function(*args, **kwargs)
        name = function.overloadpacket.__name__
        operator = name.removesuffix("_") if name.removesuffix("_") in self._recomputed else name
        is_product = function.namespace in ("aten", "aqnpipe") and (
            operator in self._recomputed or operator in UNPROVEN
        )
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
            if self._is_quantized:
                observation.weights.note(function, _tensors((args, dict(kwargs))), _tensors(result))
            return result
        observation.norms += operator == "norm"
        observation.norm_gradients += operator == "norm_gradient"
        is_in_place = operator != name
        arguments = arguments_of(function, args, kwargs, copies_first=is_in_place)
        result = function(*args, **kwargs)
        is_into = is_in_place or function._overloadname.endswith("out")
        if is_into:
            arguments.pop("out", None)
        self._product(observation, operator, arguments, result, is_into=is_into)
        return result

    def _classify(
        self, observation: Observation, function: Any, name: str, args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note an operation that may be a product without an error."""
        here, selected = observation.stack[-1].part, self.request.selected
        if (
            (selected is not None and here not in selected)
            or (function.namespace == "aten" and is_no_product(name))
            or function.namespace in COLLECTIVES
        ):
            return
        if torch._C._current_autograd_node() is not None or here == self._outside:
            found = None if is_known(function) else f"{function.namespace}.{name}"
        else:
            inputs = _tensors((args, dict(kwargs)))
            # Sharded weights are other tensors in every pass, so they are known by their kind.
            observation.mode.parameters.start(value for value in inputs if isinstance(value, nn.Parameter))
            found = escape(function, inputs, result, observation.mode.parameters, elementwise=False)
            if self.request.elementwise and name == "_fused_rms_norm" and not observation.around_norms:
                found = f"aten.{name}"
            if found is not None and found.endswith(ON_A_MATRIX) and not name.startswith(MULTIPLIES):
                found = None
        if found is not None:
            # It may compute with operators that are noised and not seen from here.
            observation.stack[-1].is_lost = True
            self.receipt.note(self.receipt.escapes, f"{found} in {self._names[here]}")

    def _product(
        self, observation: Observation, operator: str, arguments: Mapping[str, Any], result: Any, *, is_into: bool
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
        if self._is_quantized:
            self._quantized_product(observation, cell, part, arguments, results[0], is_gradient)
            return
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
        sampled = self._sample_of(operator, arguments, result)
        if operator == "_softmax_backward_data" and sampled == [None]:
            self.receipt.note(
                self.receipt.escapes, f"a softmax's gradient, of whose result a copy was kept, in {self._names[part]}"
            )
        for nth, found in enumerate(sampled):
            self.receipt.add(cell, Seen(products=int(nth == 0)))
            if found is not None:
                numbered = numbered_in_order(found, results[nth]) if is_into else found
                draws = Draws.of(key, call, stream + nth)
                with self.exactly():
                    seen = compare(numbered, self.request.error, draws, results[nth].dtype)
                self.receipt.add(cell, seen)
        observation.nth += len(sampled) - 1 if is_gradient else 0

    def _quantized_product(
        self,
        observation: Observation,
        cell: Cell,
        part: int,
        arguments: Mapping[str, Any],
        result: Tensor,
        is_gradient: bool,
    ) -> None:
        """Compare a product with that of its quantized operands."""
        error, selected = self.request.error, self.request.selected
        operands = [value for value in arguments.values() if isinstance(value, Tensor)]
        operands = operands[machine_name(cell.operator) != cell.operator :][:2]
        self.receipt.add(cell, Seen(products=1))
        if not isinstance(error, FakeQuantization) or (selected is not None and part not in selected):
            return
        observation.weights.note(None, operands, ())
        factors = observation.weights.factors(error, operands, is_gradient)
        if factors is None:
            return
        copies = [operand for operand in operands if observation.weights.is_copy(operand)]
        if copies or machine_name(cell.operator) not in ("mm", "bmm", "mv", "_grouped_mm"):
            what = f"aten.{cell.operator} with {'a copy of a weight' if copies else 'a weight'} in {cell.place}"
            self.receipt.note(self.receipt.escapes, what)
            return
        (sampled,) = self._sample_of(cell.operator, arguments, result)
        offsets = arguments.get("offs")
        is_of_rows = offsets is None or [operand.dim() for operand in operands] == [2, 3]
        if sampled is not None and result.dim() > 1 and is_of_rows:
            found = with_rounded_factors(sampled, result, factors, error, is_gradient, offsets)
            self.receipt.add(cell, compare(found, error, Draws.of(0, 0, 0), result.dtype))

    def _is_noised(self, operator: str, arguments: Mapping[str, Any], part: int, is_gradient: bool) -> bool:
        request = self.request
        if (is_gradient and not request.backward) or (request.selected is not None and part not in request.selected):
            return False
        if request.operators is not None and machine_name(operator) not in request.operators:
            return False
        if operator in ELEMENTWISE:
            return part != self._outside
        return is_gradient or part != self._outside or num_terms(operator, arguments) != 1

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
        sampled, error = self._sample_of(operator, dict(enumerate(factors)), result), self.request.error
        cell = Cell(phase, OUTSIDE, operator, str(result.dtype).removeprefix("torch."))
        for found in sampled:
            with self.exactly():
                seen = Seen() if found is None else compare(found, error, Draws.of(*source), result.dtype)
            seen.products = 1
            self.receipt.add(cell, seen)

    def _sample_of(self, operator: str, arguments: Arguments, result: Any) -> list[Sampled | None]:
        """Return recomputed samples of an operator's noised results, in the order in which it noised them."""
        recompute = self._recomputed.get(operator)
        return [None] if recompute is None else recompute(arguments, result, self._draws, self._samples)

    def _key(self, stream: str, passed: int, part: int) -> int:
        found = self._keys.get((stream, passed, part))
        if found is None:
            found = derived_key(self.request.seed, stream, *self.request.position, passed, part)
            self._keys = {**(self._keys if len(self._keys) < 256 else {}), (stream, passed, part): found}
        return found


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
