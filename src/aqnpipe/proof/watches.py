"""Modules of an observed pass, seen by hooks of the audit's own, beside the operators that it recomputes.

A machine passes what is no result of an operator of torch through operators of its own: results of norms, of modules
that compute one operator as a whole (attention of an inference engine, products that tensor-parallel workers add up),
and inputs or outputs with an error on the module. That the values are right is seen there like any other. That a module
which was called had its error at all, and that the program goes on with it, is seen here.
"""

import sys
import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from aqnpipe.config.measured_noise import ATTENTION, LM_HEAD, SCORES, LayerErrors, MeasuredError, OperatorError
from aqnpipe.models.layout import is_norm, is_rms_norm, norms_outside_layers, output_projection
from aqnpipe.proof.linear import linears_of, output_problem
from aqnpipe.proof.observation import Observation, ResultCall, Visit, first_of, is_same
from aqnpipe.proof.request import AuditRequest, RequestedModule


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
