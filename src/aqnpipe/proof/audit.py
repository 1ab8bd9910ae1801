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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aqnpipe.config.measured_noise import LayerErrors
from aqnpipe.config.noise import AppliedError, FakeQuantization, MeasuredError, PlacedError
from aqnpipe.config.own_noise import OwnError
from aqnpipe.errors import ModelError
from aqnpipe.models.calls import num_tokens
from aqnpipe.models.layout import is_norm, is_rms_norm
from aqnpipe.models.parts import PlaceHook
from aqnpipe.noise.audit.classification import escape, is_known
from aqnpipe.noise.audit.operation_counts import operations_of
from aqnpipe.noise.audit.random_numbers import Draws, derived_key
from aqnpipe.proof.comparison import compare, compare_exact
from aqnpipe.proof.elementwise import ELEMENTWISE
from aqnpipe.proof.linear import factors_of, linears_of, product_node, watch_linears, watch_unobserved
from aqnpipe.proof.modules import MODULE_ERROR, RequestedModule, compare_module, watch_modules
from aqnpipe.proof.names import operator_name, watch_names
from aqnpipe.proof.norms import NORM, NORM_GRADIENT, watch_norms
from aqnpipe.proof.observation import Mode, Observation, Visit, watch_backward
from aqnpipe.proof.operations import (
    COLLECTIVES,
    arguments_of,
    is_composite,
    is_no_product,
    machine_name,
    num_terms,
)
from aqnpipe.proof.outputs import RequestedOutput, watch_outputs
from aqnpipe.proof.quantized import with_rounded_factors
from aqnpipe.proof.receipt import Cell, MachineReceipt, Seen
from aqnpipe.proof.recompute import RECOMPUTED, UNPROVEN, WHOLE_SUMS, Arguments, Sampled, numbered_in_order

_EXPECTED_AUDITS = 4
_LEAST_SHARE = 1 / 64
_LEAST_WHOLE_SHARE = 1 / 512
_SAMPLES = 16
_SAMPLES_OF_OWN = 128
_VISIT = 2**20
_OTHER_NODES = 2**16
_EVERY_OUTSIDE = 64
_PASSES_FOR_BACKWARD = 8
_MOST_CALLS = 256
OUTSIDE = "no layer"
ONE_TOKEN, SEVERAL_TOKENS, WITH_GRADIENTS = "one token", "several tokens", " with gradients"
"""Kinds of passes."""

SINGLE_LAYERS = "single layers"
"""Passes of which a part was observed."""

_PLAIN = (Tensor, nn.Parameter)


class AuditRequest(NamedTuple):
    """Request to the machine, in the places `selected` by number and for the `operators`; None for all.

    `elementwise`: softmax, activations and norms in layers too. `errors`: the error of each place that has one, in
    place of `selected`. `modules`: errors on modules, by the number of their place. `outputs` are computed again.
    `counts_operations`: floating-point operations are counted in passes that are observed as a whole. `changed_behind`:
    parts in which something comes behind the errors of norms, such as simulated faults; None where it may come
    anywhere.
    """

    error: AppliedError | MeasuredError | None
    seed: int
    position: tuple[int, int, int]
    stream: str
    selected: Set[int] | None
    backward: bool
    operators: Set[str] | None = None
    elementwise: bool = False
    errors: Mapping[int, PlacedError] | None = None
    modules: Mapping[int, RequestedModule] = {}
    outputs: Sequence[RequestedOutput] = ()
    counts_operations: bool = False
    changed_behind: Set[int] | None = None

    def error_at(self, part: int) -> PlacedError | None:
        """Return the error that was requested of a part; None if none was."""
        if self.errors is not None:
            return self.errors.get(part)
        return self.error if self.selected is None or part in self.selected else None  # type: ignore[return-value]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.passes = -1
        self.current: Observation | None = None
        self.pending: Observation | None = None
        self.unobserved: list[Any] = []

    def forget_unobserved(self) -> None:
        """Remove the hook on a module of a pass that is not observed."""
        while self.unobserved:
            self.unobserved.pop().remove()


class Audit:
    """Audits one machine. `outside` is the number of the place outside all parts.

    `exactly`: the machine computes exactly in its body, for functions of a user's own that are called once more here.
    `before_observed` is called before an observed pass, `on_compared` with the elements of every compared result.
    `checks_exact`: products of which no error was requested are compared with the exact ones.
    """

    exactly: Callable[[], AbstractContextManager[None]] = nullcontext
    before_observed: Callable[[], None] = staticmethod(lambda: None)
    on_compared: Callable[[Cell, Sampled, Any, torch.dtype], None] | None = None
    checks_exact = False

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
        self._composites: dict[Any, bool] = {}
        # The backward pass of quantized operands has them too, without being asked for.
        self._is_quantized = isinstance(request.error, FakeQuantization)
        self._is_measured = isinstance(request.error, MeasuredError)
        self._observes_gradients = request.backward or self._is_quantized
        # What a user announced of a size is checked beside single values, and takes more of them.
        self._samples = _SAMPLES_OF_OWN if isinstance(request.error, OwnError) else _SAMPLES
        self._recomputed = {**RECOMPUTED, **(ELEMENTWISE if request.elementwise else {})}
        if self._is_measured:
            self._recomputed |= {**WHOLE_SUMS, "norm": ELEMENTWISE["norm"]}

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
            local.forget_unobserved()

    # -- passes --------------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Begin a pass, unless this call is a part of one. Raises ModelError for a replica of the model."""
        local = self._local
        if os.getpid() != self._process:
            return
        if module not in self._models:
            raise ModelError(
                f"a replica of {type(module).__name__} (DataParallel) is called on a simulated machine, expected the "
                "model itself, on one device"
            )
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
        local.forget_unobserved()
        if local.pending is not None:
            # The nodes that follow are of another pass.
            local.pending.note_start(None, self._outside, 0)
        # Each root of its own: a loss that is a module has no products, and says nothing about the model.
        root, has_gradients = list(self._models).index(module), torch.is_grad_enabled()
        kind = ONE_TOKEN if num_tokens(args, kwargs) == 1 else SEVERAL_TOKENS
        kind += ("" if root == 0 else f" of model {root}") + (WITH_GRADIENTS if has_gradients else "")
        chance = float(self._draws.random())
        self.receipt.gradient_passes += has_gradients
        lacks_backward = has_gradients and self.request.backward and not self._has_backward()
        if kind not in self.receipt.audited_kinds or lacks_backward or chance < max(_LEAST_WHOLE_SHARE, 1 / number):
            self._observe(local, self._models[module], kind)
        elif self._models[module] and chance < max(_LEAST_SHARE, _EXPECTED_AUDITS / number):
            part = int(self._draws.choice(list(self._models[module])))
            self._observe(local, {part: self._models[module][part]}, None)
            self._check_unobserved(local, {one: each for one, each in self._models[module].items() if one != part})
        elif float(self._draws.random()) < max(_LEAST_SHARE, _EXPECTED_AUDITS / number):
            self._check_unobserved(local, self._models[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        local = self._local
        if not local.running or local.running[-1] is not module:
            return
        local.running.pop()
        if not local.running:
            local.forget_unobserved()
        current = local.current
        if local.running or current is None or torch._C._current_autograd_node() is not None:
            return
        local.current = None
        # Between passes nothing is observed: a mode that stayed on could end up in the middle of the program's own.
        current.switch_off()
        if current.kind is not None and output is not None:
            self.receipt.audited_kinds.add(current.kind)
            self.receipt.audited_passes += 1
            for part in current.uncalled_norms.values():
                self._wrong_norm(part, "was never called")
            for one in self.request.outputs:
                if one.faults and one.module not in current.compared_outputs:
                    self._note(f"{one.where} was not computed again, and its fault not proven")
            if self.receipt.operations is None and self.request.counts_operations:
                self.receipt.operations = current.operations, current.noised_operations
            if (self._observes_gradients or self.checks_exact) and current.kind.endswith(WITH_GRADIENTS):
                if local.pending is not None:
                    local.pending.close()
                local.pending = current
                return
        current.close()

    def _observe(self, local: _Thread, modules: Mapping[int, nn.Module], kind: str | None) -> None:
        """Observe this pass: all of it if it has a kind, otherwise the given part alone."""
        self.before_observed()
        self.receipt.observed[SINGLE_LAYERS if kind is None else kind] += 1
        earlier = local.pending if kind is not None and kind.endswith(WITH_GRADIENTS) else None
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
        if self.request.elementwise or self._watches_norms:
            norms = self._norms_of(modules, is_whole=kind is not None)
            behind = self.request.changed_behind
            followed = {norm for norm, part in norms.items() if behind is not None and part not in behind}
            observation.handles += watch_norms(observation, norms, self.request.backward, self._wrong_norm, followed)
            if self._is_measured and kind is not None:
                observation.uncalled_norms = {norm: norms[norm] for norm in followed}
        if self._is_measured:
            observation.handles += watch_names(observation, self._whole(modules))
        observation.handles += watch_linears(observation, self._linears_of(modules), self._note)
        observation.handles += watch_modules(observation, self.request.modules, modules, kind is None, self._note)
        observation.handles += watch_outputs(
            observation, self.request.outputs, modules, kind is None, self._fault_key, self._note
        )
        if kind is None:
            for module in modules.values():
                # Behind all other hooks of the part: errors on its output belong to it.
                end = PlaceHook(partial(self._end_part, observation))
                observation.handles.append(module.register_forward_hook(end, always_call=True))
        else:
            observation.note_start(observation.passed, self._outside, observation.next_visit(self._outside))
            observation.switch_on()

    def _has_backward(self) -> bool:
        """Return whether a backward pass was compared, or so many were not that it would cost too much to go on."""
        return (
            self.receipt.has_backward
            or self.receipt.gradient_passes > _PASSES_FOR_BACKWARD
            or any(seen.recomputed for cell, seen in list(self.receipt.cells.items()) if cell.phase == "backward")
        )

    def _linears_of(self, modules: Mapping[int, nn.Module]) -> dict[nn.Module, tuple[int, str]]:
        # Measured errors depend on the name of the operator, and those of operands on both factors.
        return {} if self._is_measured or self._is_quantized else linears_of(modules, self._names)

    def _check_unobserved(self, local: _Thread, modules: Mapping[int, nn.Module]) -> None:
        """Compare the output of one linear module in a pass that is not observed."""
        linears = list(self._linears_of(modules).items())
        if linears:
            linear, (part, _) = linears[int(self._draws.integers(len(linears)))]
            passed = local.passes + (self._number_of_thread() << 32)
            local.unobserved += watch_unobserved(linear, modules[part], partial(self._compare_unobserved, part, passed))

    def _compare_unobserved(self, part: int, passed: int, module: nn.Module, args: Any, output: Tensor) -> None:
        factors = factors_of(module, args, output)
        operators = self.request.operators
        if factors is None or (operators is not None and machine_name(factors[0]) not in operators):
            return
        operator, arguments, result = factors
        self._compare_without_mode(self.request.stream, passed, part, operator, arguments, result, (0,))
        node = product_node(output) if output.requires_grad else None
        if node is not None:
            first, second = list(arguments.values())[-2:]
            node.register_hook(PlaceHook(partial(self._compare_gradients, passed, part, first, second, count(1))))

    def _compare_gradients(
        self, passed: int, part: int, first: Tensor, second: Tensor, runs: Iterator[int], gradients: Any, arrived: Any
    ) -> None:
        """Compare the gradients of both factors of a product in a pass that is not observed."""
        # Two products each time; of a second backward pass they may be numbered from the first ones on.
        streams = range(1, 2 * next(runs) + 1)
        # With `create_graph` gradients have the random numbers of results. An observed backward pass sees them too.
        if torch.is_grad_enabled() or self._local.current is not None or arrived[0] is None:
            return
        outer = arrived[0].detach()
        for gradient, (left, right) in zip(gradients[-2:], ((outer, second.t()), (first.t(), outer)), strict=True):
            if type(gradient) in _PLAIN and gradient.layout == torch.strided and gradient.dtype == left.dtype:
                arguments = {"first": left, "second": right}
                self._compare_without_mode("backward", passed, part, "mm", arguments, gradient.detach(), streams)

    def _compare_without_mode(
        self,
        phase: str,
        passed: int,
        part: int,
        operator: str,
        arguments: Arguments,
        result: Tensor,
        streams: Sequence[int],
    ) -> None:
        """Compare a result of a pass that is not observed; the number of its call is not known there."""
        is_noised = phase != "backward" or self.request.backward
        error: Any = self.request.error_at(part) if is_noised else None
        cell = Cell(phase, self._names[part], operator, str(result.dtype).removeprefix("torch."))
        (found,) = self._sample_of(operator, arguments, result)
        if found is None:
            return
        if error is None:
            if self.checks_exact:
                self.receipt.add(cell, compare_exact(found))
            return
        key = self._key(phase, passed, part)
        numbers = ((call, stream) for call in range(1, _MOST_CALLS) for stream in streams)
        with self.exactly():
            tried = (compare(found, error, Draws.of(key, *number), result.dtype) for number in numbers)
            seen = next(tried)
            if seen.wrong:
                seen = next((other for other in tried if not other.wrong), seen)
        self.receipt.add(cell, seen)
        if self.on_compared is not None:
            self.on_compared(cell, found, error, result.dtype)

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
        # A layer of a pass that was not observed is computed again.
        is_lost = node is not None and start is None
        observation.stack.append(Visit(passed, part, visit * _VISIT, node is not None))
        observation.stack[-1].is_lost = is_lost
        observation.note_start(None if is_lost else passed, part, visit)
        if observation.kind is None and node is None and not observation.is_on:
            observation.switch_on()

    def _leave_part(self, observation: Observation, *_: Any) -> None:
        if observation is not self._local.current or len(observation.stack) < 2:
            return
        left, here = observation.stack.pop(), observation.stack[-1]
        if observation.kind is None:
            return
        if here.part == self._outside:
            observation.note_start(left.passed, self._outside, observation.next_visit(self._outside))
        else:
            observation.note_start(here.passed, here.part, here.calls // _VISIT)

    def _end_part(self, observation: Observation, *_: Any) -> None:
        is_again = torch._C._current_autograd_node() is not None
        if observation is self._local.current and len(observation.stack) == 1 and not is_again:
            observation.switch_off()

    def _whole(self, modules: Mapping[int, nn.Module]) -> nn.Module:
        """Return the outermost model that has these parts."""
        return next(root for root, parts in self._models.items() if modules.items() <= parts.items())

    def _norms_of(self, modules: Mapping[int, nn.Module], *, is_whole: bool) -> dict[nn.Module, int]:
        """Return the norms that have errors, with their parts: RMSNorms of layers, or all norms if measured."""
        chosen = is_norm if self._is_measured else is_rms_norm
        found = {norm: part for part, module in modules.items() for norm in module.modules() if chosen(norm)}
        if self._is_measured and is_whole:
            outside = (norm for norm in self._whole(modules).modules() if chosen(norm) and norm not in found)
            found |= dict.fromkeys(outside, self._outside)
        return {norm: part for norm, part in found.items() if self.request.error_at(part) is not None}

    @property
    def _watches_norms(self) -> bool:
        return isinstance(self.request.error, MeasuredError) and self.request.error.has_norms

    def _note(self, what: str) -> None:
        self.receipt.note(self.receipt.notes, what)

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
        self.receipt.observed["backward"] += 1
        pending.switch_on()
        try:
            yield
        finally:
            pending.close()
            local.current = None
            if (missing := pending.expected_gradients - pending.norm_gradients) > 0:
                self.receipt.note(self.receipt.escapes, "the gradient of a norm's input", missing)

    def _wrong_norm(self, part: int, what: str | None) -> None:
        where = f"a norm in {self._names[part]}"
        if what is None:
            self.receipt.note(self.receipt.escapes, where)
        else:
            self._note(f"{where} {what}")

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
        namespace = "aqnpipe" if operator in (NORM, NORM_GRADIENT) else "aten"
        is_product = function.namespace == namespace and (operator in self._recomputed or operator in UNPROVEN)
        if not is_product and self._is_composite(function):
            with mode:
                found = function.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        observation = self._local.current
        if observation is None:
            return function(*args, **kwargs)
        if function.namespace == "aqnpipe" and name == MODULE_ERROR:
            result = function(*args, **kwargs)
            self._module(observation, args, result)
            return result
        if not is_product:
            result = function(*args, **kwargs)
            self._classify(observation, function, name, args, kwargs, result)
            if self._is_quantized:
                observation.weights.note(function, _tensors((*args, *kwargs.values())), _tensors((result,)))
            return result
        observation.norm_gradients += operator == NORM_GRADIENT
        is_in_place = operator != name
        arguments = arguments_of(function, args, kwargs, copies_first=is_in_place)
        result = function(*args, **kwargs)
        if operator == NORM:
            observation.norms, observation.latest_norm = observation.norms + 1, (args[0], result)
        is_into = is_in_place or function._overloadname.endswith("out")
        if is_into:
            arguments.pop("out", None)
        operations = 0
        if self.request.counts_operations and not torch._C._current_autograd_node():
            operations = operations_of(function, args, kwargs, result)
            observation.operations += operations
        if self._product(observation, operator, arguments, result, is_into=is_into):
            observation.noised_operations += operations
        if isinstance(result, Tensor):
            observation.latest = result
        return result

    def _is_composite(self, function: Any) -> bool:
        # Known anew for each audit: kernels may be registered meanwhile.
        if function not in self._composites:
            self._composites[function] = is_composite(function)
        return self._composites[function]

    def _module(self, observation: Observation, args: Any, result: Tensor) -> None:
        """Compare the error on the input or output of a module."""
        exact, place = args
        if observation.at_output is not None:
            observation.at_output.errors.append((place, exact, result))
        requested = self.request.modules.get(place)
        if requested is None:
            self._note("a module had an error that was not requested")
            return
        passed, call = observation.module_call(place)
        observation.module_results[place] = result
        observation.with_module_error = exact
        if passed is None:
            return
        key = self._key(requested.stream, passed, place)
        with self.exactly():
            found, seen = compare_module(requested, exact, result, Draws.of(key, call, 8), self._draws, self._samples)
        cell = Cell(self.request.stream, requested.where, requested.operator, str(result.dtype).removeprefix("torch."))
        self.receipt.add(cell, seen)
        if self.on_compared is not None:
            self.on_compared(cell, found, requested.error, result.dtype)

    def _classify(
        self, observation: Observation, function: Any, name: str, args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note an operation that may be a product without an error."""
        here = observation.stack[-1].part
        if self.request.error_at(here) is None or function.namespace in COLLECTIVES:
            return
        is_harmless = is_known(function) or (function.namespace == "aten" and is_no_product(name))
        if torch._C._current_autograd_node() is not None or here == self._outside:
            found = None if is_harmless else f"{function.namespace}.{name}"
        else:
            inputs = _tensors((*args, *kwargs.values()))
            # Sharded weights are other tensors in every pass, so they are known by their kind.
            observation.mode.parameters.start(value for value in inputs if isinstance(value, nn.Parameter))
            found = escape(
                function, inputs, result, observation.mode.parameters, elementwise=False, is_harmless=is_harmless
            )
            if self.request.elementwise and name == "_fused_rms_norm" and not observation.around_norms:
                found = f"aten.{name}"
        if found is not None:
            # It may compute with operators that are noised and not seen from here.
            observation.stack[-1].is_lost = True
            self.receipt.note(self.receipt.escapes, f"{found} in {self._names[here]}")

    def _product(
        self, observation: Observation, operator: str, arguments: Mapping[str, Any], result: Any, *, is_into: bool
    ) -> bool:
        """Compare a product with what was requested of it; return whether it was to have an error."""
        results = [value for value in (result if isinstance(result, tuple) else (result,)) if isinstance(value, Tensor)]
        operands = [value for value in arguments.values() if isinstance(value, Tensor)]
        plain = all(value.layout == torch.strided and not value.is_meta for value in (*results, *operands))
        if not plain and self.request.error_at(observation.stack[-1].part) is not None:
            # Their kernels are not replaced.
            where = self._names[observation.stack[-1].part]
            self.receipt.note(self.receipt.escapes, f"aten.{operator} of tensors that are not dense in {where}")
        if not results or not plain or not results[0].is_floating_point():
            return False
        node, here = torch._C._current_autograd_node(), observation.stack[-1]
        is_gradient = node is not None and not here.is_again and not torch.is_grad_enabled()
        passed, part, call, stream = here.passed, here.part, 0, 0
        if is_gradient:
            number = node._sequence_nr()
            start, called = observation.start_of(number), observation.calls.get(number)
            if start is None or start.passed is None:
                return False
            passed, part, call = called or (start.passed, start.part, start.visit * _VISIT + number - start.node)
        phase = "backward" if is_gradient else self.request.stream
        cell = Cell(phase, self._names[part], operator, str(results[0].dtype).removeprefix("torch."))
        if self._is_quantized:
            return self._quantized_product(observation, cell, part, arguments, results[0], is_gradient)
        error: Any = self.request.error_at(part)
        if error is None or (is_gradient and not self.request.backward):
            self._exact_product(cell, operator, arguments, result)
            return False
        is_noised = self._is_noised(operator, arguments, part, is_gradient)
        if not is_noised or (is_gradient and called is None and part == self._outside):
            # The latter is of a product behind the pass, which was not observed; its call is not known.
            self.receipt.add(cell, Seen(products=1))
            return is_noised
        if type(error) is LayerErrors:
            name, error = operator_name(operator, error, observation, here, part == self._outside)
            cell = cell._replace(operator=f"{machine_name(operator)}.{name}")
        if is_gradient:
            observation.nth = observation.nth + 1 if observation.node == number else 0
            observation.node, stream = number, (_OTHER_NODES if called is None else 1) + observation.nth
        else:
            here.calls += 1
            call = here.calls
            if here.is_lost:
                self.receipt.add(cell, Seen(products=1))
                return True
            if torch.is_grad_enabled():
                # The node of an operator is made just before it runs; one without a node finds that of another.
                observation.calls.setdefault(torch.autograd._get_sequence_nr() - 1, (passed, part, call))
            if node is not None and not here.is_again:
                # A checkpointed function outside the parts is computed again; its place is not known.
                self.receipt.add(cell, Seen(products=1))
                return True
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
                    seen = compare(numbered, error, draws, results[nth].dtype)
                self.receipt.add(cell, seen)
                if self.on_compared is not None:
                    self.on_compared(cell, found, error, results[nth].dtype)
        observation.nth += len(sampled) - 1 if is_gradient else 0
        return True

    def _exact_product(self, cell: Cell, operator: str, arguments: Mapping[str, Any], result: Any) -> None:
        """Compare a product of which no error was requested with the exact one."""
        self.receipt.add(cell, Seen(products=1))
        for found in self._sample_of(operator, arguments, result) if self.checks_exact else ():
            if found is not None:
                self.receipt.add(cell, compare_exact(found))

    def _quantized_product(
        self,
        observation: Observation,
        cell: Cell,
        part: int,
        arguments: Mapping[str, Any],
        result: Tensor,
        is_gradient: bool,
    ) -> bool:
        """Compare a product with that of its quantized operands; return whether it has any."""
        error = self.request.error_at(part)
        operands = [value for value in arguments.values() if isinstance(value, Tensor)]
        operands = operands[machine_name(cell.operator) != cell.operator :][:2]
        if not isinstance(error, FakeQuantization):
            if not is_gradient:
                self._exact_product(cell, cell.operator, arguments, result)
            return False
        self.receipt.add(cell, Seen(products=1))
        observation.weights.note(None, operands, ())
        factors = observation.weights.factors(error, operands, is_gradient)
        if factors is None:
            return False
        copies = [operand for operand in operands if observation.weights.is_copy(operand)]
        if copies or machine_name(cell.operator) not in ("mm", "bmm", "mv", "_grouped_mm"):
            what = f"aten.{cell.operator} with {'a copy of a weight' if copies else 'a weight'} in {cell.place}"
            self.receipt.note(self.receipt.escapes, what)
            return False
        (sampled,) = self._sample_of(cell.operator, arguments, result)
        offsets = arguments.get("offs")
        is_of_rows = offsets is None or [operand.dim() for operand in operands] == [2, 3]
        if sampled is not None and result.dim() > 1 and is_of_rows:
            found = with_rounded_factors(sampled, result, factors, error, is_gradient, offsets)
            self.receipt.add(cell, compare(found, error, Draws.of(0, 0, 0), result.dtype))
            if self.on_compared is not None:
                self.on_compared(cell, found, error, result.dtype)
        return True

    def _is_noised(self, operator: str, arguments: Mapping[str, Any], part: int, is_gradient: bool) -> bool:
        request = self.request
        if (is_gradient and not request.backward) or request.error_at(part) is None:
            return False
        if request.operators is not None and machine_name(operator) not in request.operators:
            return False
        if operator in ELEMENTWISE:
            return part != self._outside or self._is_measured
        return is_gradient or part != self._outside or num_terms(operator, arguments) != 1

    def observe_outside(
        self, phase: str, operator: str, result: Tensor, factors: tuple[Tensor, ...], source: tuple[int, int, int]
    ) -> None:
        """Compare a product outside all parts, which the machine reports with its random numbers.

        The first ones, then every 64th. Within an observed pass they are seen from above.
        """
        current = self._local.current
        if current is not None and current.is_on:
            return
        self._num_outside += 1
        number = self._num_outside
        if number & (number - 1) and number % _EVERY_OUTSIDE:
            return
        error = self.request.error_at(self._outside)
        if not isinstance(error, AppliedError):
            return
        sampled = self._sample_of(operator, dict(enumerate(factors)), result)
        cell = Cell(phase, OUTSIDE, operator, str(result.dtype).removeprefix("torch."))
        for found in sampled:
            with self.exactly():
                seen = Seen() if found is None else compare(found, error, Draws.of(*source), result.dtype)
            seen.products = 1
            self.receipt.add(cell, seen)
            if found is not None and self.on_compared is not None:
                self.on_compared(cell, found, error, result.dtype)

    def _sample_of(self, operator: str, arguments: Arguments, result: Any) -> list[Sampled | None]:
        """Return recomputed samples of an operator's noised results, in the order in which it noised them."""
        recompute = self._recomputed.get(operator)
        return [None] if recompute is None else recompute(arguments, result, self._draws, self._samples)

    def _fault_key(self, stream: str, passed: int, number: int, application: int) -> int:
        return derived_key(self.request.seed, stream, *self.request.position, passed, number, application)

    def _key(self, stream: str, passed: int, part: int) -> int:
        found = self._keys.get((stream, passed, part))
        if found is None:
            found = derived_key(self.request.seed, stream, *self.request.position, passed, part)
            self._keys = {**(self._keys if len(self._keys) < 256 else {}), (stream, passed, part): found}
        return found


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the arguments or results of an operator, which may be lists of them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
