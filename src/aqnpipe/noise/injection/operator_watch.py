"""Intercepts every operator of a noised layer at low cost.

A torch function mode intercepts every operator, but it is called for all torch functions of a layer: about 80, of which
9 are operators. In forward passes without gradients three measures avoid most of these calls:

- Noise on linear modules is applied in the patched `Linear.forward`, so the mode handles the other operators only.
- The positions of the other operators are surveyed. Measured forward passes run under the mode from end to end and note
  which operators follow which linear module. In other passes the mode is on only in these sections.
- Where `torch.matmul` is the only other operator, as in eager attention, attention runs as a copy of its own code with
  the noised product in place of `torch.matmul`, and needs no mode.

If a layer calls its linear modules in another order, or has another number of operators, it stays under the mode from
then on. An operator that a copy omitted, or that a later survey finds in a section where the mode was off, counts as
escaped. The receipt refuses escaped operators.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aqnpipe.config.noise import OperatorNoise
from aqnpipe.noise.injection.attention_copy import attention_with
from aqnpipe.noise.injection.operator_errors import OperatorErrors
from aqnpipe.noise.injection.operators import TorchFunction, escaping_functions, noised_functions
from aqnpipe.noise.injection.phase_state import PhaseState

_SURVEY_EVERY = 16


@dataclass
class _Survey:
    """The known operators of a layer: its linear modules in order, and the other operators by position between them.

    `others_after[n]` are the operators after n linear modules. Forward passes over different numbers of tokens have
    separate surveys, because their code paths may differ. Every 16th pass is surveyed again.
    """

    linears: tuple[nn.Module, ...] = ()
    calls: int = 0
    norms: int = 0
    others_after: dict[int, set[TorchFunction]] = field(default_factory=dict)
    surveys: int = 0
    passes: int = 0
    is_regular: bool = True
    was_relied_on: bool = False
    ran_copies: bool = False

    @property
    def is_reliable(self) -> bool:
        return self.is_regular and self.surveys > 0

    @property
    def allows_copies(self) -> bool:
        """Whether a copy of attention covers every operator besides the linear modules."""
        return all(functions == {torch.matmul} for functions in self.others_after.values())

    def compare(self, linears: tuple[nn.Module, ...], calls: int, norms: int) -> None:
        """Compare the linear modules and the numbers of operators and norms of one pass with the survey."""
        if self.surveys == 0:
            self.linears, self.calls, self.norms = linears, calls, norms
        elif (linears, calls, norms) != (self.linears, self.calls, self.norms):
            self.is_regular = False


class OperatorWatch:
    """Passes every operator of the noised layers to `errors` during one phase."""

    def __init__(self, state: PhaseState, noise: OperatorNoise, errors: OperatorErrors) -> None:
        self._state = state
        self._errors = errors
        handlers = {
            **{function: partial(errors.call, name) for function, name in noised_functions(noise).items()},
            **{function: partial(errors.escaping_call, name) for function, name in escaping_functions(noise).items()},
        }
        self._mode = _OperatorMode(handlers, self._note_operator)
        self._surveys: dict[int | None, list[_Survey]] = {}
        self._survey: _Survey | None = None
        self._thread = get_ident()
        self._linears: list[nn.Module] = []
        self._throughout = True
        self._deviates = False
        self._in_copy = False

    def install(self, stack: ExitStack) -> None:
        """Patch the forward of plain linear modules and attention; `stack` restores it."""
        stack.callback(self.stop)
        for module in {*self._state.layers.modules(), *self._state.head.modules()}:
            # Modules patched by others, and subclasses of Linear, keep their forward; the mode handles them.
            if "forward" in vars(module):
                continue
            if type(module) is nn.Linear:
                forward = partial(self._linear, module)
            elif copy := attention_with(self._matmul, module):
                forward = partial(self._attention, module.forward, copy)
            else:
                continue
            module.forward = forward
            stack.callback(delattr, module, "forward")

    def enter_layer(self, index: int) -> None:
        """Start intercepting the operators of layer `index`; the output projection has the index after the last."""
        self._survey = None if torch.is_grad_enabled() else self._survey_of(index)
        self._thread = get_ident()
        self._linears.clear()
        self._deviates = self._in_copy = False
        survey = self._survey
        self._throughout = survey is None or not survey.is_reliable or survey.passes % _SURVEY_EVERY == 0
        if self._throughout or (survey is not None and 0 in survey.others_after):
            self._mode.activate()
        if survey is not None and not self._throughout:
            survey.was_relied_on = True

    def _survey_of(self, index: int) -> _Survey:
        surveys = self._surveys.setdefault(self._state.num_tokens, [])
        if not surveys:
            surveys += [_Survey() for _ in [*self._state.layers, self._state.head]]
        return surveys[index]

    def leave_layer(self) -> None:
        """Stop, and update the survey of the layer."""
        self._mode.deactivate()
        survey, self._survey = self._survey, None
        if survey is not None:
            place = self._state.place
            calls, recorder = place.calls - place.norms, self._state.recorder
            # With other linear modules, as without an adapter, the numbers of operators are others too.
            is_as_surveyed = tuple(self._linears) == survey.linears
            if survey.ran_copies and calls < survey.calls and is_as_surveyed:
                recorder.count_escape(self._state.phase, "matmul")
            if survey.ran_copies and place.norms < survey.norms:
                recorder.count_escape(self._state.phase, "norms")
            survey.compare(tuple(self._linears), calls, place.norms)
            survey.surveys += self._throughout
            survey.passes += 1

    def stop(self) -> None:
        """Stop intercepting operators."""
        self._mode.deactivate()
        self._survey = None

    def _linear(self, module: nn.Linear, input: Tensor) -> Tensor:
        survey = self._survey
        if survey is None or get_ident() != self._thread:
            return F.linear(input, module.weight, module.bias)
        self._mode.deactivate()
        output: Tensor = self._errors.call("linear", F.linear, (input, module.weight, module.bias), {})
        position = len(self._linears)
        self._linears.append(module)
        if survey.surveys and survey.linears[position : position + 1] != (module,):
            self._throughout = self._deviates = True
        if self._throughout or (position + 1 in survey.others_after and not self._in_copy):
            self._mode.activate()
        return output

    def _attention(self, forward: Callable[..., Any], copy: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        survey = self._survey
        if survey is None or self._throughout or not survey.allows_copies or get_ident() != self._thread:
            return forward(*args, **kwargs)
        self._mode.deactivate()
        self._in_copy = survey.ran_copies = True
        output = copy(*args, **kwargs)
        self._in_copy = False
        if self._throughout or len(self._linears) in survey.others_after:
            self._mode.activate()
        return output

    def _matmul(self, *args: Any, **kwargs: Any) -> Any:
        self._mode.deactivate()
        output = self._errors.call("matmul", torch.matmul, args, kwargs)
        if self._throughout:
            self._mode.activate()
        return output

    def _note_operator(self, function: TorchFunction) -> None:
        survey, position = self._survey, len(self._linears)
        if survey is None or function in survey.others_after.get(position, ()):
            return
        mode_was_off = position not in survey.others_after or survey.ran_copies
        survey.others_after.setdefault(position, set()).add(function)
        # In a layer that deviates from its survey the mode is on, so nothing was missed.
        if survey.was_relied_on and mode_was_off and not self._deviates:
            self._state.recorder.count_escape(self._state.phase, getattr(function, "__name__", str(function)))


class _OperatorMode(TorchFunctionMode):
    """Intercepts every torch function of this thread while it is active, and passes operators to their handlers."""

    def __init__(
        self, handlers: Mapping[TorchFunction, Callable[..., Any]], note: Callable[[TorchFunction], None]
    ) -> None:
        super().__init__()
        self._handlers = handlers
        self._note = note
        self._active = False

    def activate(self) -> None:
        """Start intercepting torch functions; a second call does nothing."""
        if not self._active:
            self.__enter__()
            self._active = True

    def deactivate(self) -> None:
        """Stop; a second call does nothing."""
        if self._active:
            self._active = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func: TorchFunction, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        if handler is not None:
            self._note(func)
            return handler(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)
