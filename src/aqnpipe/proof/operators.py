"""The operators of observed passes: their results are recomputed and compared with what was requested.

An operator that is neither a product known here nor known to be none is refused by name. Results are recomputed in
float64 from their operands (`recompute`); the requested error comes from keys of the audit's own.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.measured_noise import LayerErrors
from aqnpipe.config.noise import AppliedError, FakeQuantization, MeasuredError, RelativeGaussian, is_fixed
from aqnpipe.noise.receipts.table import Place
from aqnpipe.proof.comparison import best_explained, compare, compare_exact
from aqnpipe.proof.elementwise import ELEMENTWISE
from aqnpipe.proof.observation import VISIT, AuditThread, Mode, Observation
from aqnpipe.proof.operations import (
    ATTENTION_OF_VLLM,
    COLLECTIVES,
    arguments_of,
    escape,
    is_composite,
    is_harmless,
    machine_name,
    num_terms,
    operations_of,
)
from aqnpipe.proof.quantized import with_rounded_factors
from aqnpipe.proof.random_numbers import Draws, derived_key
from aqnpipe.proof.receipt import MachineReceipt, cell_of
from aqnpipe.proof.recompute import (
    RECOMPUTED,
    UNPROVEN,
    WHOLE_SUMS,
    Arguments,
    Draw,
    Sampled,
    in_whole,
    numbered_in_order,
    unchanged,
)
from aqnpipe.proof.request import AuditRequest
from aqnpipe.proof.watches import PLAIN, operator_name, values_of

NORM, NORM_GRADIENT, ATTENTION, SUM, MODULE_ERROR = "norm", "norm_gradient", "attention", "sum", "module_error"
"""Operators of the package `aqnpipe`, which put errors on what is no result of an operator of torch."""

MODULE_STREAM = 8
"""Stream of the random numbers of all errors on modules."""

OUTSIDE = "no layer"
_RESULTS = (NORM, ATTENTION, SUM)
_SAMPLES_OF_OWN = 128
_OTHER_NODES = 2**16
_EVERY_OUTSIDE = 64


class _Kind(NamedTuple):
    """What an operator is to the audit. `operator`: its name without the mark of working in place."""

    name: str
    operator: str
    is_product: bool
    is_composite: bool
    is_module_error: bool
    is_harmless: bool
    is_into: bool

    @property
    def is_in_place(self) -> bool:
        """Return whether the operator overwrites its first operand."""
        return self.name != self.operator


class OperatorAudit:
    """Compares what each operator of a thread's current observation gave. `outside`: the place outside all parts.

    `exactly`: the machine computes exactly in its body, for functions of a user's own that are called once more here.
    `on_compared` gets the elements of every compared result. `checks_exact`: products of which no error was requested
    are compared with the exact ones.
    """

    exactly: Callable[[], AbstractContextManager[None]] = nullcontext
    on_compared: Callable[[Place, Sampled, Any, torch.dtype], None] | None = None
    checks_exact = False

    def __init__(self, request: AuditRequest, receipt: MachineReceipt, outside: int) -> None:
        self.request = request
        self.receipt = receipt
        self._names: dict[int, str] = {outside: OUTSIDE}
        self._outside = outside
        self._num_outside = 0
        self._local = AuditThread()
        self._keys: dict[tuple[str, int, int], int] = {}
        self._kinds: dict[Any, _Kind] = {}
        # The backward pass of quantized operands has them too, without being asked for.
        self._is_quantized = isinstance(request.error, FakeQuantization)
        self._is_measured = isinstance(request.error, MeasuredError)
        # What a user announced of a size is checked beside single values, and takes more of them.
        samples = _SAMPLES_OF_OWN if isinstance(request.error, CustomError) else request.num_samples
        self._draw = Draw(receipt.draws, samples)
        self._recomputed = {**RECOMPUTED, **(ELEMENTWISE if request.elementwise else {})}
        if request.results:
            self._recomputed |= dict.fromkeys((ATTENTION, SUM), ELEMENTWISE[NORM])
        if self._is_measured:
            self._recomputed |= {**WHOLE_SUMS, NORM: ELEMENTWISE[NORM]}

    def observe(self, mode: Mode, function: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an operator and compare its result."""
        observation = self._local.current
        if not isinstance(function, torch._ops.OpOverload) or not PLAIN.issuperset(types):
            # Subclasses of tensors and operators of higher order compute with operators that are not seen from here.
            if observation is not None:
                observation.stack[-1].is_lost = True
            return function(*args, **kwargs)
        kind = self._kinds.get(function) or self._kind_of(function)
        if kind.is_composite:
            with mode:
                found = function.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if observation is None:
            return function(*args, **kwargs)
        if kind.is_product and not observation.inside_results:
            return self._observed_product(observation, kind, function, args, kwargs)
        is_exact = kind.is_product and not kind.is_into
        arguments = arguments_of(function, args, kwargs, copies_first=False) if is_exact else {}
        result = function(*args, **kwargs)
        if kind.is_module_error:
            self._module(observation, args, result)
        elif not observation.inside_results:
            self._classify(observation, function, kind, args, kwargs, result)
            if self._is_quantized:
                observation.weights.note(function, _tensors((*args, *kwargs.values())), _tensors((result,)))
        elif is_exact and isinstance(result, Tensor) and result.is_floating_point():
            # Of a module whose result alone has an error.
            where = self._names[observation.stack[-1].part]
            cell = cell_of(self.request.stream, where, kind.operator, result.dtype)
            self._exact_product(cell, kind.operator, arguments, result)
        return result

    def _observed_product(
        self, observation: Observation, kind: _Kind, function: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        operator = kind.operator
        observation.norm_gradients += operator == NORM_GRADIENT
        arguments = arguments_of(function, args, kwargs, copies_first=kind.is_in_place)
        result = function(*args, **kwargs)
        if operator in _RESULTS:
            observation.results, observation.latest_result = observation.results + 1, (args[0], result)
        if kind.is_into:
            arguments.pop("out", None)
        operations = 0
        counts = self.request.counts_operations and not self.receipt.forward.flops
        if counts and not torch._C._current_autograd_node():
            operations = operations_of(function, args, kwargs, result)
            observation.operations += operations
        if self._product(observation, operator, arguments, result, is_into=kind.is_into):
            observation.noised_operations += operations
        if isinstance(result, Tensor):
            observation.latest = result
            observation.latest_values = values_of(result) if result.is_inference() and result.dim() else None
        return result

    def _kind_of(self, function: Any) -> _Kind:
        """Return what an operator is; known anew for each audit, because kernels may be registered meanwhile."""
        name, namespace = function.overloadpacket.__name__, function.namespace
        operator = name.removesuffix("_") if name.removesuffix("_") in self._recomputed else name
        own = "aqnpipe" if operator in (*_RESULTS, NORM_GRADIENT) else "aten"
        is_product = namespace == own and (operator in self._recomputed or operator in UNPROVEN)
        found = self._kinds[function] = _Kind(
            name,
            operator,
            is_product,
            is_composite=not is_product and is_composite(function),
            is_module_error=namespace == "aqnpipe" and name == MODULE_ERROR,
            # What rounds operands rounds those of products with a weight.
            is_harmless=is_harmless(function) or (self._is_quantized and f"{namespace}.{name}" == ATTENTION_OF_VLLM),
            is_into=operator != name or function._overloadname.endswith("out"),
        )
        return found

    def _module(self, observation: Observation, args: Any, result: Tensor) -> None:
        """Compare the error on the input or output of a module."""
        exact, place = args
        if observation.at_output is not None:
            observation.at_output.errors.append((place, exact, result))
        requested = self.request.modules.get(place)
        if requested is None:
            self.receipt.note("a module had an error that was not requested")
            return
        passed, call = observation.module_call(place)
        observation.module_results[place] = result
        observation.with_module_error = exact
        if passed is not None:
            draws = Draws.of(self._key(requested.stream, passed, place), call, MODULE_STREAM)
            found = unchanged(exact, result, self._draw.places(result), requested.shards)
            cell = cell_of(self.request.stream, requested.where, requested.operator, result.dtype)
            self._compare(cell, found, requested.error, result.dtype, (draws,))

    def _compare(self, cell: Place, found: Sampled, error: Any, dtype: torch.dtype, draws: Iterable[Draws]) -> None:
        """Compare elements of a result of `dtype` with the requested ones, of several random numbers the best ones."""
        with self.exactly():
            seen = best_explained(compare(found, error, each, dtype) for each in draws)
        self.receipt.add(cell, **seen)
        if self.on_compared is not None:
            self.on_compared(cell, found, error, dtype)

    def _classify(
        self, observation: Observation, function: Any, kind: _Kind, args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note an operation that may be a product without an error."""
        here = observation.stack[-1].part
        if self.request.error_at(here) is None or function.namespace in COLLECTIVES:
            return
        if torch._C._current_autograd_node() is not None or here == self._outside:
            found = None if kind.is_harmless else f"{function.namespace}.{kind.name}"
        else:
            inputs = _tensors((*args, *kwargs.values()))
            # Sharded weights are other tensors in every pass, so they are known by their kind.
            observation.mode.parameters.start(value for value in inputs if isinstance(value, nn.Parameter))
            found = escape(function, inputs, result, observation.mode.parameters, is_harmless=kind.is_harmless)
            if self.request.elementwise and kind.name == "_fused_rms_norm" and not observation.around_results:
                found = f"aten.{kind.name}"
        if found is not None:
            # It may compute with operators that are noised and not seen from here.
            observation.stack[-1].is_lost = True
            self.receipt.note_escape(f"{found} in {self._names[here]}")

    def _product(
        self, observation: Observation, operator: str, arguments: Arguments, result: Any, *, is_into: bool
    ) -> bool:
        """Compare a product with what was requested of it; return whether it was to have an error."""
        results = [value for value in (result if isinstance(result, tuple) else (result,)) if isinstance(value, Tensor)]
        operands = [value for value in arguments.values() if isinstance(value, Tensor)]
        node, here = torch._C._current_autograd_node(), observation.stack[-1]
        if not all(value.layout == torch.strided and not value.is_meta for value in (*results, *operands)):
            if self.request.error_at(here.part) is not None:
                # Their kernels are not replaced.
                where = f"of tensors that are not dense in {self._names[here.part]}"
                self.receipt.note_escape(f"aten.{operator} {where}")
            return False
        if not results or not results[0].is_floating_point():
            return False
        is_gradient = node is not None and not here.is_again and not torch.is_grad_enabled()
        passed, part, call, stream, called = here.passed, here.part, 0, 0, None
        if is_gradient:
            number = node._sequence_nr()
            start, called = observation.start_of(number), observation.calls.get(number)
            if start is None:
                return False
            passed, part, call = called or (start.passed, start.part, start.visit * VISIT + number - start.node)
        phase = "backward" if is_gradient else self.request.stream
        cell = cell_of(phase, self._names[part], operator, results[0].dtype)
        if self._is_quantized:
            return self._quantized_product(observation, cell, part, arguments, results[0], is_gradient)
        error: Any = self.request.error_at(part)
        if error is None or (is_gradient and not self.request.backward):
            self._exact_product(cell, operator, arguments, result)
            return False
        is_noised = self._is_noised(operator, arguments, part, is_gradient)
        # Of a product behind the pass, which was not observed, the call is not known.
        is_known = is_noised and not (is_gradient and called is None and part == self._outside)
        if is_known and type(error) is LayerErrors:
            name, error = operator_name(operator, error, observation, here, part == self._outside)
            cell = cell._replace(operator=f"{machine_name(operator)}.{name}")
        if is_known and is_gradient:
            observation.nth = observation.nth + 1 if observation.node == number else 0
            observation.node, stream = number, (_OTHER_NODES if called is None else 1) + observation.nth
        elif is_known:
            here.calls += 1
            call = here.calls
            if torch.is_grad_enabled() and not here.is_lost:
                # The node of an operator is made just before it runs; one without a node finds that of another.
                observation.calls.setdefault(torch.autograd._get_sequence_nr() - 1, (passed, part, call))
            # A checkpointed function outside the parts is computed again; its place is not known.
            is_known = not here.is_lost and (node is None or here.is_again)
        self.receipt.add(cell, products=1)
        if is_known:
            sampled = self._sample_of(operator, arguments, result)
            if operator == "_softmax_backward_data" and sampled == [None]:
                where = f"a softmax's gradient, of whose result a copy was kept, in {self._names[part]}"
                self.receipt.note_escape(where)
            key = self._key(phase, passed, part)
            for nth, found in enumerate(sampled):
                if found is not None:
                    found = numbered_in_order(found, results[nth]) if is_into else found
                    if observation.shards:
                        found = in_whole(found, results[nth], observation.shards[-1])
                    self._compare(cell, found, error, results[nth].dtype, (Draws.of(key, call, stream + nth),))
            observation.nth += len(sampled) - 1 if is_gradient else 0
        return is_noised

    def _exact_product(self, cell: Place, operator: str, arguments: Arguments, result: Any) -> None:
        """Compare a product of which no error was requested with the exact one."""
        self.receipt.add(cell, products=1)
        for found in self._sample_of(operator, arguments, result) if self.checks_exact else ():
            if found is not None:
                self.receipt.add(cell, **compare_exact(found))

    def _quantized_product(
        self, observation: Observation, cell: Place, part: int, arguments: Arguments, result: Tensor, is_gradient: bool
    ) -> bool:
        """Compare a product with that of its quantized operands; return whether it has any."""
        error, operator = self.request.error_at(part), machine_name(cell.operator)
        if not isinstance(error, FakeQuantization):
            if not is_gradient:
                self._exact_product(cell, cell.operator, arguments, result)
            return False
        self.receipt.add(cell, products=1)
        operands = _tensors(arguments.values())[operator != cell.operator :][:2]
        observation.weights.note(None, operands, ())
        factors = observation.weights.factors(error, operands, is_gradient)
        if factors is None:
            return False
        copies = [operand for operand in operands if observation.weights.is_copy(operand)]
        if copies or operator not in ("mm", "bmm", "mv", "_grouped_mm"):
            what = f"aten.{cell.operator} with {'a copy of a weight' if copies else 'a weight'} in {cell.path}"
            self.receipt.note_escape(what)
            return False
        (sampled,) = self._sample_of(cell.operator, arguments, result)
        offsets = arguments.get("offs")
        is_of_rows = offsets is None or [operand.dim() for operand in operands] == [2, 3]
        if sampled is not None and result.dim() > 1 and is_of_rows:
            found = with_rounded_factors(sampled, factors, error, is_gradient, offsets)
            self._compare(cell, found, error, result.dtype, (Draws.of(0, 0, 0),))
        return True

    def _is_noised(self, operator: str, arguments: Arguments, part: int, is_gradient: bool) -> bool:
        if self.request.operators is not None and machine_name(operator) not in self.request.operators:
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
        error = self.request.error_at(self._outside)
        if (number & (number - 1) and number % _EVERY_OUTSIDE) or not isinstance(error, AppliedError):
            return
        cell = cell_of(phase, OUTSIDE, operator, result.dtype)
        for found in self._sample_of(operator, dict(enumerate(factors)), result):
            self.receipt.add(cell, products=1)
            if found is not None:
                draws = Draws.of(self._key(phase, 0, self._outside), 0, 0) if is_fixed(error) else Draws.of(*source)
                self._compare(cell, found, error, result.dtype, (draws,))

    def _sample_of(self, operator: str, arguments: Arguments, result: Any) -> list[Sampled | None]:
        """Return recomputed samples of an operator's noised results, in the order in which it noised them."""
        recompute = self._recomputed.get(operator)
        return [None] if recompute is None else recompute(arguments, result, self._draw)

    def _fault_key(self, stream: str, passed: int, number: int, application: int) -> int:
        return derived_key(self.request.seed, stream, *self.request.position, passed, number, application)

    def _key(self, stream: str, passed: int, part: int) -> int:
        # Errors on modules, such as AQN's on hidden states, have streams of their own.
        error = self.request.error_at(part) if stream in (self.request.stream, "backward") else None
        if isinstance(error, RelativeGaussian) and error.is_fixed:
            return derived_key(*error.key_of_machine(self.request.seed, self.request.machine))
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
