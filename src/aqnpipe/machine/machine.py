"""A simulated machine: an error on the result of every product operator, wherever it is called.

`Machine` decides for each result which error it gets and with which random numbers, and counts. What it counts is no
proof (the audit in `aqnpipe.proof` looks from above and computes again); it says how many products there were.
"""

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn, set_checkpoint_early_stop

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.measured_noise import LayerErrors
from aqnpipe.config.noise import (
    MACHINE,
    AppliedError,
    FakeQuantization,
    MeasuredError,
    PlacedError,
    RelativeGaussian,
    is_fixed,
)
from aqnpipe.device import is_being_captured
from aqnpipe.errors import ModelError
from aqnpipe.machine.norms import NORM, NORM_GRADIENT, NormKernels
from aqnpipe.machine.operators import ELEMENTWISE, SOFTMAX, Registration
from aqnpipe.machine.places import (
    CALLS_PER_VISIT,
    OTHER_NODES,
    Operator,
    Place,
    Places,
    Segment,
    measured_name,
    named_modules,
)
from aqnpipe.machine.quantized import QuantizedOperands, mark_weights
from aqnpipe.models.layout import is_norm, is_rms_norm
from aqnpipe.models.parts import PlaceHook
from aqnpipe.noise.kernels.error_models import apply_error_, root_mean_squares
from aqnpipe.noise.kernels.fixed import add_fixed_gaussian_
from aqnpipe.noise.kernels.gaussian import NoiseStream
from aqnpipe.noise.kernels.shards import Shard, apply_error_to_shards_
from aqnpipe.seeding import derive_seed


class NoiseKey(NamedTuple):
    """Key of all random numbers: equal keys give equal noise. Data-parallel workers and processes differ in `rank`."""

    seed: int
    step: int = 0
    micro_step: int = 0
    rank: int = 0

    def derived(self, stream: str, *counters: int) -> int:
        """Return the key of random numbers of `stream`."""
        return derive_seed(self.seed, stream, self.step, self.micro_step, self.rank, *counters)


class Request(NamedTuple):
    """Request to the machine: `error` on results of the forward pass (`stream` names its random numbers), in all places
    or those of `parts` and `operators`, and with `backward` on gradients too.

    `num_parts`: number of parts of the model; the place outside has that number. `elementwise`: softmax, activations
    and norms within the parts have the error too. `errors`: the error of each part that has one, in place of `parts`.
    Without an `error` nothing is replaced. `results`: modules that compute one operator as a whole, with its name, such
    as attention in an inference engine. `shards` returns which columns of the whole this tensor-parallel worker has of
    the result that gets an error now; None if it has all. `machine`: stream of the key of a fixed machine.
    """

    error: AppliedError | MeasuredError | None
    key: NoiseKey
    num_parts: int
    stream: str = "evaluation"
    parts: Container[int] | None = None
    backward: bool = False
    operators: Container[str] | None = None
    elementwise: bool = False
    errors: Mapping[int, PlacedError] | None = None
    results: Mapping[nn.Module, str] = {}
    shards: Callable[[], Sequence[Shard] | None] | None = None
    machine: str = MACHINE

    def error_at(self, part: int) -> PlacedError | None:
        """Return the error of a part; None if it has none."""
        if self.errors is not None:
            return self.errors.get(part)
        return self.error if self.parts is None or part in self.parts else None  # type: ignore[return-value]


CHANGED = "changed elements"
IN_USE = threading.Lock()
"""Held while this process simulates a machine."""

_IN_LAYERS = ELEMENTWISE | {NORM, NORM_GRADIENT}
"""Operators with an error in layers alone: a softmax outside draws tokens, or is a loss."""


Observe = Callable[[str, str, Tensor, tuple[Tensor, ...], NoiseStream], None]
"""Called with phase, operator, noised result, factors and random numbers of a product outside all parts."""


class Noised(NamedTuple):
    """A result, or a factor, that has got its error. `changed`: how many elements a user's own error changed.

    `shards`: the columns that `values` are of the whole; None if they are the whole.
    """

    phase: str
    operator: str
    part: int
    error: AppliedError
    values: Tensor
    is_again: bool
    changed: Tensor | None = None
    shards: Sequence[Shard] | None = None

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole result."""
        return self.values.numel() if self.shards is None else len(self.values) * self.shards[0].width


class _Plan(NamedTuple):
    """Treatment of results of an operator in a part. `noised`: the key that counts them."""

    phase: str
    error: Any
    why: str | None
    noised: tuple[str, str, str]
    may_be_outer: bool
    is_softmax: bool
    is_fixed: bool


class _Off(threading.local):
    """Reason for which this thread computes without errors."""

    why: str | None = None


class Machine:
    """The machine of a process. `counts`: products by (phase, operator, what happened to it).

    `observe_outside` gets the products outside all parts: no call of a module surrounds them, so an audit that looks
    from above has nothing to begin with. `note` gets everything that has an error.
    """

    def __init__(
        self,
        request: Request,
        observe_outside: Observe | None = None,
        note: Callable[[Noised], None] | None = None,
    ) -> None:
        self.request = request
        # Asked for every product; isinstance on a pydantic class is slow.
        self._is_quantized = isinstance(request.error, FakeQuantization)
        self._is_measured = isinstance(request.error, MeasuredError)
        self.observe_outside = observe_outside
        self._note = note
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.places = Places(request.num_parts, self._key)
        self._off = _Off()
        self._plans: dict[tuple[str, int, bool], _Plan] = {}
        self._gradient_keys: dict[tuple[int, int], int] = {}
        self._is_running = False
        self._registration: Registration | None = None
        self._norms: NormKernels | None = None
        self._quantized = QuantizedOperands()
        self._before_first: Callable[[], None] | None = None

    @contextmanager
    def running(self, roots: Sequence[nn.Module], parts: Mapping[int, nn.Module]) -> Iterator[None]:
        """Simulate the machine in the body. Raises ModelError if this process simulates one already."""
        if self.request.error is not None:
            _refuse_stored_products(roots[0])
        self.start()
        handles: list[Any] = []
        try:
            # Compiled code would not pass the kernels of operators.
            with torch.compiler.set_stance("force_eager"), self.whole_checkpoints():
                handles = self.add_model(roots, parts)
                yield
        finally:
            self.stop()
            for handle in handles:
                handle.remove()

    def whole_checkpoints(self) -> AbstractContextManager[None]:
        """Make layers that are computed again compute their last product too, where it marks its factors."""
        return set_checkpoint_early_stop(False) if self._rounds_activations else nullcontext()

    def add_model(self, roots: Sequence[nn.Module], parts: Mapping[int, nn.Module]) -> list[Any]:
        """Register the hooks on a model and return their handles: its `parts` by number, and all that contain them."""
        handles = self.places.hooks(roots, parts)
        has_errors = any(self.request.error_at(part) is not None for part in parts)
        if has_errors or not self._is_measured:
            handles += self._norm_hooks(roots if self._is_measured else parts.values())
        if self._norms is not None:
            handles += self._norms.result_hooks(self.request.results)
        if self._is_measured and has_errors:
            # Behind those of norms, whose errors are put on within their call.
            handles += self.places.name_hooks(named_modules(roots[0]))
        if self._is_quantized:
            mark = PlaceHook(lambda module, *_: mark_weights(module))
            for root in roots:
                # A call that has begun already does not run the hook.
                mark_weights(root)
            handles += [root.register_forward_pre_hook(mark) for root in roots]
        return handles

    def start(self, before_first: Callable[[], None] | None = None) -> None:
        """Replace the kernels of this process. `before_first` is called before the first result.

        Raises ModelError if this process simulates a machine already.
        """
        if not IN_USE.acquire(blocking=False):
            raise ModelError("a noisy machine is already simulated in this process; machines do not nest")
        self._before_first = before_first
        self._is_running = True
        if self.request.error is None:
            return
        self._registration = Registration(
            self._on_result,
            elementwise=self.request.elementwise,
            on_operands=self._on_operands if self._is_quantized else None,
            whole_sums=self._is_measured,
        )
        if self._has_norms or self.request.results:
            self._norms = NormKernels(lambda name, exact: self._on_result(name, exact, 2, ()))

    def _norm_hooks(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Register the hooks of all RMSNorms in `modules`, or for a measured error of all norms, if they have it."""
        if self._norms is None or not self._has_norms:
            return []
        chosen = is_norm if self._is_measured else is_rms_norm
        norms = dict.fromkeys(norm for module in modules for norm in module.modules() if chosen(norm))
        return self._norms.hooks(norms, backward=self.request.backward)

    @property
    def _has_norms(self) -> bool:
        error = self.request.error
        return self.request.elementwise or (isinstance(error, MeasuredError) and error.has_norms)

    def identify(self) -> None:
        """Call what is to be called before the first result."""
        call, self._before_first = self._before_first, None
        if call is not None:
            call()

    def set_rank(self, rank: int) -> None:
        """Give this process random numbers of its own."""
        self.request = self.request._replace(key=self.request.key._replace(rank=rank))

    def stop(self) -> None:
        """Restore the kernels."""
        if not self._is_running:
            return
        self._is_running = False
        if self._registration is not None:
            self._registration.close()
            self._registration = None
            self._quantized.close()
        if self._norms is not None:
            self._norms.close()
            self._norms = None
        IN_USE.release()

    @property
    def _rounds_activations(self) -> bool:
        error = self.request.error
        return isinstance(error, FakeQuantization) and error.activations

    def add_backends(self) -> None:
        """Replace kernels of backends that have been loaded since."""
        if self._registration is not None:
            self._registration.add_backends()

    def switch_off(self, why: str | None) -> None:
        """Compute without errors in this thread from now on, counted under `why`; None: with errors again."""
        self._off.why = why

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Compute the body without errors, uncounted: it is no part of the program."""
        with nullcontext() if self._registration is None else self._registration.exactly():
            yield

    def _key(self, passed: int, part: int) -> int:
        return self.request.key.derived(self.request.stream, passed, part)

    def _gradient_key(self, passed: int, part: int) -> int:
        found = self._gradient_keys.get((passed, part))
        if found is None:
            if len(self._gradient_keys) > 4096:
                self._gradient_keys.clear()
            found = self.request.key.derived("backward", passed, part)
            self._gradient_keys[passed, part] = found
        return found

    def _on_result(self, operator: str, result: Tensor, num_terms: int, factors: tuple[Tensor, ...]) -> Tensor:
        if self._before_first is not None:
            self.identify()
        here, is_gradient, part, node, place = self._where()
        plan = self._plans.get((operator, part, is_gradient)) or self._plan(operator, part, is_gradient)
        why = self._off.why or plan.why
        if why is None and not result.is_floating_point():
            may_be = part == self.places.outside and not result.is_complex()
            why = "outside, of integers" if may_be else "of integers"
        if why is None and num_terms == 1 and plan.may_be_outer:
            # Rotary angles are outer products; an error there moves positions. Nothing is summed.
            why = "outer products"
        if why is not None:
            self.counts[plan.phase, operator, why] += 1
            return result
        self.counts[plan.noised] += 1
        error, name, input_rms = plan.error, operator, None
        # Exact types: isinstance on a pydantic class is slow.
        if type(error) is LayerErrors:
            name, error = measured_name(operator, error, self.places, here)
            if error.figures.per_input and factors:
                input_rms = root_mean_squares(factors[0])
        source = self._gradient_source(node, place) if is_gradient else self._source(here)
        if result.is_cuda and is_being_captured(result):
            self.counts[plan.phase, operator, "captured"] += 1
        if plan.is_softmax:
            result = result.clone()
        values = result.detach() if result.requires_grad else result
        changed = None
        shards = None if self.request.shards is None else self.request.shards()
        if plan.is_fixed:
            self._apply_fixed(operator, values, error, factors)
        elif shards is not None:
            apply_error_to_shards_(values, shards, error, source)
        elif type(error) is CustomError:
            changed = self._apply_custom(plan.phase, operator, values, error, source)
        else:
            apply_error_(values, error, source, *(() if input_rms is None else (input_rms,)))
        if self._note is not None:
            self._note(Noised(plan.phase, name, part, error, values, here.is_again, changed, shards))
        if factors and part == self.places.outside and self.observe_outside is not None:
            self.observe_outside(plan.phase, operator, values, factors, source)
        return result

    def _plan(self, operator: str, part: int, is_gradient: bool) -> _Plan:
        """Return what is done with results of an operator in a part, and keep it: it is asked for every product."""
        phase = "backward" if is_gradient else self.request.stream
        error: Any = self.request.error_at(part)
        is_outside = part == self.places.outside
        found = self._plans[operator, part, is_gradient] = _Plan(
            phase,
            error,
            self._exemption(operator, error, is_gradient=is_gradient, is_outside=is_outside),
            (phase, operator, "noised"),
            is_outside and not is_gradient,
            operator in SOFTMAX,
            is_fixed(error),
        )
        return found

    def _apply_fixed(self, operator: str, values: Tensor, error: RelativeGaussian, factors: tuple[Tensor, ...]) -> None:
        """Put the error of a fixed machine on values. Raises ModelError for an operator that is no plain product."""
        if not factors:
            raise ModelError(
                f"redraw: never is of products of two matrices, and the program computes aten.{operator}; expected "
                "redraw: always (or eager attention, and experts that are computed one by one)"
            )
        key = derive_seed(*error.key_of_machine(self.request.key.seed, self.request.machine))
        add_fixed_gaussian_(values, error.scale, factors, key)

    def _apply_custom(
        self, phase: str, operator: str, values: Tensor, error: CustomError, source: NoiseStream
    ) -> Tensor:
        """Put a user's own error on values. Of all errors it alone may change none of them, so changes are counted."""
        before = values.clone()
        with self.exactly():
            apply_error_(values, error, source)
        changed = ((values != before) & (before == before)).sum()
        self.counts[phase, operator, CHANGED] += int(changed)
        return changed

    def _where(self) -> tuple[Place, bool, int, int, Operator | Segment | None]:
        """Return the place, whether a gradient is computed, and its part; of gradients also the node and its place."""
        places = self.places
        here = places.local.here or places.here()
        node = torch._C._current_autograd_node()
        # A layer that is computed again runs within a node, and so does a checkpointed function outside the parts.
        if node is None or here.is_again or torch.is_grad_enabled():
            return here, False, here.part, -1, None
        number = node._sequence_nr()
        place = places.operator_of(number) or places.segment_of(number)
        return here, True, places.outside if place is None else place.part, number, place

    def _on_operands(self, operator: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        if self._before_first is not None:
            self.identify()
        here, is_gradient, part, _, _ = self._where()
        phase = "backward" if is_gradient else self.request.stream
        error = self.request.error_at(part)
        why: str | None = self._off.why or ("not selected" if error is None else None)
        found = None
        if why is None and isinstance(error, FakeQuantization):
            found = self._quantized.of(error, first, second, is_gradient)
            if found is not None and not is_gradient and self._note is not None:
                for before, after in zip((first, second), found, strict=True):
                    if before is not after:
                        self._note(Noised(phase, operator, part, error, after, here.is_again))
        self.counts[phase, operator, why or ("without a weight" if found is None else "noised")] += 1
        return (first, second) if found is None else found

    def _exemption(self, operator: str, error: Any, *, is_gradient: bool, is_outside: bool) -> str | None:
        """Return why results of an operator in a part have no error; None if they get one."""
        request = self.request
        if self._is_quantized:
            # Products have their errors in their factors; these are attention and convolutions.
            return "without a weight"
        if is_gradient and not request.backward:
            return "gradients"
        if error is None or (request.operators is not None and operator not in request.operators):
            return "not selected"
        if is_outside and operator in _IN_LAYERS and not self._is_measured:
            return "outside the layers"
        return None

    def _source(self, here: Place) -> NoiseStream:
        here.calls += 1
        if torch.is_grad_enabled():
            self.places.note_operator(here)
        return NoiseStream(here.key, here.calls, 0)

    def _gradient_source(self, number: int, place: Operator | Segment | None) -> NoiseStream:
        local = self.places.local
        local.nth = local.nth + 1 if local.node == number else 0
        local.node = number
        if isinstance(place, Operator):
            return NoiseStream(self._gradient_key(place.passed, place.part), place.call, 1 + local.nth)
        if place is None:
            key, call = self._gradient_key(-1, self.places.outside), number % CALLS_PER_VISIT
        else:
            key = self._gradient_key(place.passed, place.part)
            call = place.visit * CALLS_PER_VISIT + number - place.start
        return NoiseStream(key, call, OTHER_NODES + local.nth)


def _refuse_stored_products(model: nn.Module) -> None:
    """Raise ModelError for a selective checkpoint: what it computes again would have the errors of other operators."""
    for name, module in model.named_modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(checkpoint, "keywords", {}).get("context_fn", noop_context_fn) is not noop_context_fn:
            raise ModelError(
                f"{name}: gradient_checkpointing_kwargs has a context_fn (selective checkpoint), so products that are "
                "computed again would get errors of other products; expected a checkpoint of the whole layer"
            )
