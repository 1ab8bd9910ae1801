"""Modules of an observed pass, seen by hooks of the audit's own, beside the operators that it recomputes.

A machine passes what is no result of an operator of torch through operators of its own: results of norms, of modules
that compute one operator as a whole (attention of an inference engine, products that tensor-parallel workers add up),
and inputs or outputs with an error on the module. That the values are right is seen there like any other. That a module
which was called had its error at all, and that the program goes on with it, is seen here.

The output of a linear module must be the result of the product that was observed in it: code in the place of
`torch.nn.functional.linear` may compute anything besides, of operators that are no products. An observed pass can be
told from others, because a dispatch mode is active. So in drawn passes that are not observed, one linear module has a
hook, and its output is recomputed like any other result. The number of its product among the operators of its part is
not known there, and may be any.
"""

import sys
import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from aqnpipe.config.measured_noise import ATTENTION, LM_HEAD, SCORES, LayerErrors, MeasuredError, OperatorError
from aqnpipe.config.noise import FakeQuantization
from aqnpipe.device import is_being_captured
from aqnpipe.models.layout import is_norm, is_rms_norm, norms_outside_layers, output_projection
from aqnpipe.models.parts import hooks_around
from aqnpipe.proof.observation import Observation, ResultCall, Visit, first_of, is_same
from aqnpipe.proof.request import AuditRequest, RequestedModule

PLAIN = frozenset((Tensor, nn.Parameter))
"""Kinds of tensors whose operators are seen; subclasses compute with others."""

_KEPT_ROWS = 4

_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


@dataclass(frozen=True)
class Watches:
    """The hooks of an observation on the modules of `parts`, all that are observed; `names`: the paths of all parts.

    `note` gets a line for every contradiction, `escaped` the name of every result without its error.
    """

    request: AuditRequest
    observation: Observation
    parts: Mapping[int, nn.Module]
    names: Mapping[int, str]
    note: Callable[[str], None]
    escaped: Callable[[str], None]

    def install(self, model: nn.Module, outside: int) -> None:
        """Register the hooks; `model` has the parts, and `outside` is the number of the place outside of them."""
        request, observation = self.request, self.observation
        is_measured = isinstance(request.error, MeasuredError)
        if request.elementwise or (isinstance(request.error, MeasuredError) and request.error.has_norms):
            self._watch_norms(model if is_measured and observation.kind is not None else None, outside)
        self._watch_results()
        if is_measured and any(request.error_at(part) is not None for part in self.parts):
            self._watch_names(model)
        for linear, (_, name) in linears_of(request, self.parts, self.names).items():
            own, last = (partial(self._leave_linear, name, is_first) for is_first in (True, False))
            # Behind hooks that an earlier run may have left, too.
            observation.watch(linear, None, own, last)
        for place, one in request.modules.items():
            if observation.kind is not None or one.part in self.parts:
                calls: list[int] = []
                enter, leave = partial(self._enter_module, place, calls), partial(self._leave_module, place, calls, one)
                observation.watch(one.module, enter, None, leave)

    # -- linear modules, and the names of measured operators -----------------------------------------------------------

    def _leave_linear(self, name: str, is_first: bool, module: nn.Module, args: Any, output: Any) -> None:
        if self.observation.is_on and threading.get_ident() == self.observation.thread:
            problem = output_problem(self.observation, module, first_of(output), is_first)
            if problem is not None:
                self.note(f"the output of {name} {problem}")

    def _watch_names(self, model: nn.Module) -> None:
        """Note which linear module or norm of a decoder computes."""
        outside, head = {norm: name for name, norm in norms_outside_layers(model).items()}, output_projection(model)
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) or is_norm(module):
                name = LM_HEAD if module is head else outside.get(module, path.rpartition(".")[2])
                self._keep_while_running(module, self.observation.names, name)

    def _keep_while_running(self, module: nn.Module, stack: list[Any], value: Any) -> None:
        def enter(*_: Any) -> None:
            stack.append(value)

        def leave(*_: Any) -> None:
            if stack:
                stack.pop()

        self.observation.watch(module, enter, None, leave)

    # -- modules with an error on their input or output ----------------------------------------------------------------

    def _enter_module(self, place: int, before: list[int], *_: Any) -> None:
        before.append(self.observation.calls_of(place))

    def _leave_module(
        self, place: int, before: list[int], one: RequestedModule, module: nn.Module, args: Any, output: Any
    ) -> None:
        if not before or output is None:
            return
        calls, result = self.observation.calls_of(place) - before.pop(), self.observation.module_results.get(place)
        if not self.observation.is_on:
            return
        if calls != 1:
            self.note(f"{one.where}: {one.operator} has {'no noise' if not calls else f'noise {calls} times'}")
        elif one.is_last and result is not None and not any(is_same(each, result) for each in tree_leaves(output)):
            self.note(f"{one.where}: {one.operator} has noise, and the program goes on with other values")

    # -- modules whose result has an error -----------------------------------------------------------------------------

    def _watch_norms(self, measured: nn.Module | None, outside: int) -> None:
        """Watch RMSNorms of layers that have errors, or of a measured error all norms, also of the rest of a model."""
        request = self.request
        chosen = is_norm if isinstance(request.error, MeasuredError) else is_rms_norm
        found = {norm: part for part, module in self.parts.items() for norm in module.modules() if chosen(norm)}
        if measured is not None:
            found |= {norm: outside for norm in measured.modules() if chosen(norm) and norm not in found}
        found = {norm: part for norm, part in found.items() if request.error_at(part) is not None}
        behind = request.changed_behind
        followed = {norm for norm, part in found.items() if behind is not None and part not in behind}
        named = {norm: f"a norm in {self.names[part]}" for norm, part in found.items()}
        self._watch_calls(named, followed, request.backward, is_whole=False)
        if measured is not None:
            self.observation.uncalled_norms = {norm: named[norm] for norm in followed}

    def _watch_results(self) -> None:
        """Watch the modules of parts that compute one operator as a whole, and those with columns of a whole."""
        request = self.request
        for module, (part, shards) in request.shards.items():
            if part in self.parts:
                self._keep_while_running(module, self.observation.shards, shards)
        named = {module: name for module, (part, name) in request.results.items() if part in self.parts}
        changed = request.changed_behind or ()
        followed = {module for module in named if request.results[module][0] not in changed}
        self._watch_calls(named, followed, False, is_whole=True)
        if request.watches_launches:
            self.observation.handles += watch_launches(self._launched)

    def _launched(self, kernel: str) -> None:
        observation = self.observation
        here = observation.stack[-1].part
        if observation.is_on and not observation.inside_results and self.request.error_at(here) is not None:
            self.escaped(f"triton.{kernel} in {self.names[here]}")

    def _watch_calls(
        self, named: Mapping[nn.Module, str], followed: Container[nn.Module], backward: bool, *, is_whole: bool
    ) -> None:
        """Watch modules, with each in words.

        `followed`: those of which the operator must get what they compute, and its result be what they return.
        `is_whole`: what they compute inside has no error of its own.
        """
        for module, where in named.items():
            enter, own = partial(self._enter_call, backward, is_whole), partial(self._computed, is_whole)
            leave = partial(self._leave_call, where, module in followed)
            self.observation.watch(module, enter, own, leave, is_first=False)

    def _enter_call(
        self, backward: bool, is_whole: bool, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        observation = self.observation
        if not observation.is_on:
            return
        observation.inside_results += is_whole
        observation.around_results.append(ResultCall(observation.results))
        observation.uncalled_norms.pop(module, None)
        if backward and torch.is_grad_enabled():
            inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
            for value in inputs[:1]:
                value.register_hook(self._expect_gradient)

    def _expect_gradient(self, gradient: Tensor) -> None:
        self.observation.expected_gradients += self.observation.is_on

    def _computed(self, is_whole: bool, module: nn.Module, args: Any, output: Any) -> None:
        if self.observation.around_results:
            self.observation.inside_results -= is_whole
            self.observation.around_results[-1].own = first_of(output)

    def _leave_call(self, where: str, is_followed: bool, module: nn.Module, args: Any, output: Any) -> None:
        observation = self.observation
        if not observation.around_results:
            return
        call = observation.around_results.pop()
        if output is None:
            return
        calls, latest = observation.results - call.before, observation.latest_result
        if observation.around_results:
            observation.around_results[-1].before += calls
        if not calls:
            self.escaped(where)
        elif calls != 1:
            self.note(f"{where} has its error {calls} times")
        elif is_followed and latest is not None:
            exact, result = latest
            # Noise on a module comes behind, and gets the result.
            is_used = is_same(result, first_of(output)) or is_same(result, observation.with_module_error)
            if not is_same(exact, call.own) or not is_used:
                self.note(f"{where} has an error that is not on its result, or that the program does not use")


def operator_name(
    operator: str, errors: LayerErrors, observation: Observation, here: Visit, is_outside: bool
) -> tuple[str, OperatorError]:
    """Return the name of the operator that computes, and its error; one without a parity has an error of zero."""
    if observation.names:
        name = observation.names[-1]
    elif is_outside or "attention" in operator:
        name = ATTENTION
    else:
        name = SCORES if here.others == 0 else ATTENTION
        here.others += 1
    return name, errors.operators[name]


# -- linear modules --------------------------------------------------------------------------------------------------


def linears_of(
    request: AuditRequest, modules: Mapping[int, nn.Module], names: Mapping[int, str]
) -> dict[nn.Module, tuple[int, str]]:
    """Return the linear modules of parts with their part and path; those of adapters and quantised ones are others."""
    if isinstance(request.error, MeasuredError | FakeQuantization):
        # Measured errors depend on the name of the operator, and those of operands on both factors.
        return {}
    if request.linears is not None:
        return {linear: place for linear, place in request.linears.items() if place[0] in modules}
    return {
        linear: (part, f"{names[part]}.{path}" if path else names[part])
        for part, module in modules.items()
        for path, linear in module.named_modules()
        if type(linear) is nn.Linear and type(linear.weight) in PLAIN
    }


def output_problem(observation: Observation, module: nn.Module, output: Any, is_first: bool) -> str | None:
    """Return what is wrong with the output of a linear module, ahead of its hooks if `is_first`, else behind them."""
    if type(output) not in PLAIN or not output.numel() or observation.stack[-1].is_lost:
        return None
    latest = observation.latest
    if is_same(latest, output):
        is_changed = bool(output._version) if not output.is_inference() else _has_changed(observation)
        return "was changed in place behind its product" if is_changed else None
    if is_first and not _is_sum(latest, getattr(module, "bias", None), output):
        return "is not the result of its product, so other code computes in its place"
    return None


def values_of(product: Tensor) -> Tensor:
    """Return a copy of some values of a product."""
    return product.detach()[:: max(len(product) // _KEPT_ROWS, 1)].clone()


def _has_changed(observation: Observation) -> bool:
    latest, before = observation.latest, observation.latest_values
    if latest is None or before is None:
        return False
    with _disable_current_modes():
        return not torch.equal(values_of(latest).nan_to_num(), before.nan_to_num())


def _is_sum(product: Tensor | None, bias: Any, output: Tensor) -> bool:
    """Return whether an output is a product and a bias: torch adds it apart where the input is not contiguous."""
    if product is None or not isinstance(bias, Tensor) or product.numel() != output.numel():
        return False
    with _disable_current_modes(), torch.no_grad():
        return torch.equal(product.reshape(output.shape) + bias.to(product.dtype), output)


def watch_unobserved(linear: nn.Module, part: nn.Module, compare: Callable[..., None]) -> list[Any]:
    """Register hooks for a call of a linear module within the next call of its part, and return their handles."""
    thread = threading.get_ident()
    inside: list[Any] = []

    def enter(*_: Any) -> None:
        if threading.get_ident() == thread and torch._C._current_autograd_node() is None:
            inside.extend(hooks_around(linear, own=leave_linear))

    def leave_linear(*call: Any) -> None:
        if threading.get_ident() == thread and inside:
            leave()
            compare(*call)

    def leave(*_: Any) -> None:
        if threading.get_ident() == thread:
            for handle in (*inside, *handles):
                handle.remove()
            inside.clear()

    handles = hooks_around(part, enter, None, leave, is_first=False)
    return handles


def product_node(output: Tensor) -> Any:
    """Return the node of the product that made the output of a linear module; None where there is none.

    Its hooks get the gradients of both factors, whatever else the program does with them.
    """
    node: Any = output.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node if node is not None and node.name() in ("MmBackward0", "AddmmBackward0") else None


def factors_of(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[str, dict[str, Tensor], Tensor] | None:
    """Return the operator of a linear module, its arguments and its result as matrices.

    None if the product may have had other ones: of another number format, of one row, or weights that are elsewhere by
    now. None also for a result that a CUDA graph captures, which has no values yet.
    """
    weight: Any = getattr(module, "weight", None)
    bias: Any = None if getattr(module, "skip_bias_add", False) else getattr(module, "bias", None)
    inputs, output = args[0] if args else None, first_of(output)
    if (
        not isinstance(inputs, Tensor)
        or not isinstance(weight, Tensor)
        or not isinstance(output, Tensor)
        or inputs.dim() < 2
        or not inputs.dtype == weight.dtype == output.dtype
    ):
        return None
    if type(weight) not in PLAIN or weight.device != output.device or is_being_captured(output):
        return None
    with torch.no_grad():
        matrix = inputs.detach().reshape(-1, inputs.shape[-1])
        result = output.detach().reshape(-1, output.shape[-1])
        factors = {"first": matrix, "second": weight.detach().t()}
        return ("mm", factors, result) if bias is None else ("addmm", {"self": bias.detach(), **factors}, result)


# -- kernels without an operator of torch ----------------------------------------------------------------------------


class _Watched:
    """A handle: `remove` ends it."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


def watch_launches(note: Callable[[str], None]) -> list[Any]:
    """Call `note` with the name of every Triton kernel that others launch in this process; return the handles.

    No dispatch mode sees them. aqnpipe's own kernels compute noise.
    """
    # Before Triton is imported, no kernel of it can have been defined.
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return []
    function: Any = jit.JITFunction
    run = function.run

    @wraps(run)
    def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not kernel.__module__.startswith(f"{__package__.partition('.')[0]}."):
            note(kernel.__name__)
        return run(kernel, *args, **kwargs)

    function.run = noted
    return [_Watched(lambda: setattr(function, "run", run))]
