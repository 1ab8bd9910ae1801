"""Where sabotages take hold of the product: functions replaced for the duration of a job, and proof that they ran."""

import multiprocessing
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor, nn

from aqnpipe.models.parts import num_tokens

KERNEL = "aqnpipe.noise.kernels.error_models.add_relative_gaussian_"
ON_RESULT = "aqnpipe.machine.machine.Machine._on_result"
DERIVED = "aqnpipe.machine.machine.NoiseKey.derived"
OPERATOR_STREAM = "aqnpipe.machine.machine.NoiseStream"
INSTALL = "aqnpipe.noise.injection.phase._RunningPhase.install"
ENTER_MODEL = "aqnpipe.noise.injection.phase._RunningPhase._enter_model"
TRAINER_KEY = "aqnpipe.training.trainer.NoisyGRPOTrainer._key"
EVALUATION_KEY = "aqnpipe.evaluation.shards.NoiseKey"

Make = Callable[[Any], Any]
Apply = Callable[[Any], AbstractContextManager[Any]]

# Shared with forked processes.
_effects = multiprocessing.get_context("fork").Value("q", 0)


def took_effect() -> None:
    """Note that a sabotage changed something."""
    with _effects.get_lock():
        _effects.value += 1


def effects() -> int:
    """Return how often a sabotage took effect so far."""
    return int(_effects.value)


def replaced(*changes: tuple[str, Make]) -> Apply:
    """A sabotage that replaces each target, by its dotted name, by what `make(original)` returns.

    AttributeError if a target does not exist. State of a sabotage belongs into `make`, which is called for each try.
    """

    @contextmanager
    def apply(_: Any) -> Any:
        with ExitStack() as stack:
            for target, make in changes:
                stack.enter_context(mock.patch(target, make(pkgutil.resolve_name(target))))
            yield

    return apply


def together(*parts: Apply) -> Apply:
    """Several sabotages at once."""

    @contextmanager
    def apply(study: Any) -> Any:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part(study))
            yield

    return apply


def with_result(target: str, change: Callable[[Any], Any]) -> Apply:
    """A sabotage that changes the result of a function."""

    def make(original: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> Any:
            took_effect()
            return change(original(*args, **kwargs))

        return changed

    return replaced((target, make))


@dataclass
class State:
    """The phase that runs, and its present pass."""

    phase: Any
    reads_one_token: bool = False
    is_first_of_kind: bool = False
    kinds: set[bool] = field(default_factory=set)

    @property
    def model(self) -> nn.Module:
        """The model of the phase."""
        return self.phase.model  # type: ignore[no-any-return]

    @property
    def machine(self) -> Any:
        """The machine of the phase."""
        return self.phase._machine

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.phase._layers)

    @property
    def key(self) -> Any:
        """The key of the phase."""
        return self.phase.key

    @property
    def forward_index(self) -> int:
        """Number of the present pass."""
        return int(self.phase.forward_index)

    @property
    def names(self) -> dict[nn.Module, str]:
        """The names of the modules of the model."""
        return {module: name for name, module in self.model.named_modules()}

    def begin(self, args: Any, kwargs: Any) -> None:
        """Note the tokens of a pass."""
        self.reads_one_token = num_tokens(args, kwargs) == 1
        self.is_first_of_kind = self.reads_one_token not in self.kinds
        self.kinds.add(self.reads_one_token)


_states: list[State] = []
"""The state of the phase that runs last; it stays until another phase begins."""


def state() -> State:
    """Return the phase that runs."""
    return _states[-1]


def _note_phase(original: Any) -> Any:
    def install(self: Any, *args: Any) -> None:
        _states[:] = [State(self)]
        original(self, *args)

    return install


def _note_pass(original: Any) -> Any:
    def enter_model(self: Any, module: Any, args: Any, kwargs: Any) -> None:
        original(self, module, args, kwargs)
        state().begin(args, kwargs)

    return enter_model


def watching(*changes: tuple[str, Make]) -> Apply:
    """`replaced`, with what keeps `state()` up to date."""
    return replaced((INSTALL, _note_phase), (ENTER_MODEL, _note_pass), *changes)


@dataclass(frozen=True)
class Call:
    """One result that gets an error. `layer` is None in the output projection and outside the layers.

    `part`: the number of the part, that of the output projection is the number of layers. `factors`: of a plain
    product. `is_again`: a layer that a backward pass computes again.
    """

    state: State
    phase: str
    operator: str
    layer: int | None
    part: int
    tensor: Tensor
    factors: tuple[Tensor, ...]
    is_again: bool
    number: int


Act = Callable[[Call, Callable[[], Tensor], Callable[[], Tensor]], Tensor]


def _calls(act: Act) -> Make:
    """Replacement of `_on_result` by `act(call, put, leave)` for every result that gets an error.

    `put` does what the original does. `leave` returns the result as it is, uncounted; its random numbers are used up,
    so that all other results have theirs.
    """

    def make(original: Any) -> Any:
        count = 0

        def on_result(self: Any, operator: str, result: Tensor, num_terms: int, factors: Any) -> Tensor:
            nonlocal count
            here, is_gradient, part, number, place = self._where()
            plan = self._plan(operator, part, is_gradient)
            is_exempt = plan.why is not None or (num_terms == 1 and plan.may_be_outer)
            if not _states or is_exempt or not result.is_floating_point():
                return original(self, operator, result, num_terms, factors)  # type: ignore[no-any-return]
            count += 1
            phase = "backward" if is_gradient else self.request.stream
            layer = part if part < state().num_layers else None
            call = Call(state(), phase, operator, layer, part, result, factors, here.is_again, count)

            def leave() -> Tensor:
                self._gradient_source(number, place) if is_gradient else self._source(here)
                return result

            return act(call, lambda: original(self, operator, result, num_terms, factors), leave)

        return on_result

    return make


def acting(act: Act) -> Apply:
    """Every result that gets an error is `act(call, put, leave)`."""
    return watching((ON_RESULT, _calls(act)))


def not_put(when: Callable[[Call], bool]) -> Apply:
    """Results `when` true get no error at all: they are neither noised nor counted."""

    def act(call: Call, put: Callable[[], Tensor], leave: Callable[[], Tensor]) -> Tensor:
        if not when(call):
            return put()
        took_effect()
        return leave()

    return acting(act)


def undone(when: Callable[[Call], bool]) -> Apply:
    """Results `when` true are noised and counted, and then get their clean values back."""

    def act(call: Call, put: Callable[[], Tensor], leave: Callable[[], Tensor]) -> Tensor:
        if not when(call):
            return put()
        took_effect()
        clean = call.tensor.detach().clone()
        found = put()
        found.detach().copy_(clean)
        return found

    return acting(act)


def put_twice(when: Callable[[Call], bool]) -> Apply:
    """Results `when` true are noised twice, with the same random numbers."""

    def change(tensor: Tensor, scale: float, source: Any, original: Any) -> None:
        original(tensor, scale, source)
        original(tensor, scale, source)

    return kernel(change, when)


def kernel(change: Callable[..., None], when: Callable[[Call], bool] = lambda call: True) -> Apply:
    """The kernel of relative noise does `change(tensor, scale, source, original)` in the calls `when` true."""
    current: list[Call] = []

    def act(call: Call, put: Callable[[], Tensor], leave: Callable[[], Tensor]) -> Tensor:
        current[:] = [call]
        return put()

    def make(original: Any) -> Any:
        def noised(tensor: Tensor, scale: float, source: Any) -> Tensor:
            if not current or when(current[0]):
                took_effect()
                with state().machine.exactly():
                    change(tensor.detach(), scale, source, original)
            else:
                original(tensor, scale, source)
            return tensor

        return noised

    return watching((ON_RESULT, _calls(act)), (KERNEL, make))


def skipped(when: Callable[[Call], bool] = lambda call: True) -> Apply:
    """The kernel does nothing in the calls `when` true, which are counted as if it did."""
    return kernel(lambda tensor, scale, source, original: None, when)


def clean_modules(when: Callable[[str, State], bool], kind: str = "torch.nn.Linear") -> Apply:
    """Modules of a kind, `when(name, state)` true, compute past the noise; all others have their own random numbers."""
    clean: list[None] = []

    def act(call: Call, put: Callable[[], Tensor], leave: Callable[[], Tensor]) -> Tensor:
        return leave() if clean else put()

    def make(original: Any) -> Any:
        names: dict[int, dict[nn.Module, str]] = {}

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _states:
                return original(self, *args, **kwargs)
            known = names.setdefault(id(state().model), state().names)
            if not when(known.get(self, ""), state()):
                return original(self, *args, **kwargs)
            took_effect()
            clean.append(None)
            try:
                return original(self, *args, **kwargs)
            finally:
                clean.pop()

        return forward

    return watching((ON_RESULT, _calls(act)), (f"{kind}.forward", make))


def seeds(change: Callable[..., int]) -> Apply:
    """Keys of places are `change(original, key, stream, *counters)`; the first counter is the pass."""

    def make(original: Any) -> Any:
        def derived(self: Any, stream: str, *counters: int) -> int:
            took_effect()
            return change(lambda *args: original(self, *args), self, stream, *counters)

        return derived

    return watching((DERIVED, make))


def streams(change: Callable[[int, int, int], tuple[int, int, int]]) -> Apply:
    """Operators draw from the stream `change(key, call, stream)`."""

    def make(original: Any) -> Any:
        def stream(key: int, call: int = 0, stream: int = 0) -> Any:
            took_effect()
            return original(*change(key, call, stream))

        return stream

    return replaced((OPERATOR_STREAM, make))
