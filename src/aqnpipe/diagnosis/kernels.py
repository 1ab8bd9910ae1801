"""The kernels of a device, observed while a model runs: every operator of forward, backward, prefill and decoding.

A chip has no layers. What it has is kernels, and torch's dispatcher passes every one of them with its operands. So a
dispatch mode recomputes each result on the host from the operands that the operator had (`kernel_answers`), and runs
the operator once more: no list of modules, no code for a family, and a fault is judged where it arises, because what
follows it has the operands that the fault left. A verdict is of a kernel: an operator with its shapes, strides and
format. The layers in which it was seen are evidence.

No kernel is wrong where Python changes what a module reads or returns: a hook, or another `forward` on the module. So
what a module's own code was given and what it made are compared with what the program goes on with, bit for bit; a
`forward` that was put on a module is compared with that of its class.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from aqnpipe.artifacts.diagnoses import KernelVerdict
from aqnpipe.diagnosis.activations import MODULE_SITE, activation_of
from aqnpipe.diagnosis.checks import KERNEL, OUTSIDE_LAYERS, RETURNED, Check, mismatch_of
from aqnpipe.diagnosis.ends import outer_norms
from aqnpipe.diagnosis.experts import ROUTER_SITE, router_of
from aqnpipe.diagnosis.kernel_answers import ANSWERS, Answer, answers_of_whole
from aqnpipe.diagnosis.reference import on_host
from aqnpipe.diagnosis.rotary import TABLE_SITE
from aqnpipe.models.layout import output_projection
from aqnpipe.models.sites import LayerSites
from aqnpipe.proof.operations import arguments_of, is_composite
from aqnpipe.seeding import derive_seed, keyed_generator

_KEPT_CHECKS = 64
"""Wrong results of a place whose values are kept; all are counted."""

_OTHER_FORWARD = 64.0
"""Roundings by which a `forward` put on a module may differ from that of its class, as fused kernels do."""


_WITHOUT_VALUES = frozenset({"_local_scalar_dense", "is_same_size", "lift_fresh", "resize_", "set_"})


class Place(NamedTuple):
    """A decoder layer, or OUTSIDE_LAYERS, and the site in it."""

    layer: int
    site: str


class _Sites(NamedTuple):
    """Where faults of a module are reported: those of its own operators, of its output, and of what it reads."""

    operators: Place
    output: Place
    input: Place


class _Batch(NamedTuple):
    """Sequences of random tokens: a prefill, then `decoded` single tokens with the cache."""

    sequences: int
    tokens: int
    decoded: int = 0
    gradients: bool = False
    padding: bool = False


_BATCHES = (
    # Five sequences: kernels may be chosen by the number of sequences, too.
    _Batch(5, 33, gradients=True),
    # Few sequences with masked tokens before them: a prefill of 64 to 127 rows, then single tokens of each.
    _Batch(4, 31, decoded=1, padding=True),
    # More than 1,024 rows, and more keys than any tile; then a row alone, at the end of a tile of 64 keys.
    _Batch(1, 1087, decoded=1),
)
"""Batches in which all operators of all layers are observed."""

_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass
class _Record:
    """Calls of one kernel, their layers, and the wrong ones with their places."""

    calls: int = 0
    wrong_calls: int = 0
    layers: set[int] = field(default_factory=set)
    wrong_places: dict[Place, None] = field(default_factory=dict)
    wrong_values: int = 0
    compared_values: int = 0
    is_reordered: bool = False
    is_unchecked: bool = False
    channels: set[int] = field(default_factory=set)


@dataclass
class Observed:
    """What was observed: checks of places, a verdict for every kernel, and operators without an answer by name.

    `reordered`: sites whose operators repeat only within the error bound of their sums.
    """

    checks: list[Check]
    kernels: tuple[KernelVerdict, ...]
    unchecked: tuple[str, ...]
    reordered: tuple[str, ...]


def observe_kernels(
    model: nn.Module,
    layers: Sequence[LayerSites],
    seed: int,
    show_progress: Callable[[str], None] = lambda line: None,
) -> Observed:
    """Run the batches through the model and judge every operator; weights and gradients of the model stay as they are.

    Sequences are shorter where the model takes fewer positions.
    """
    observer = _Observer(_sites_of(model, layers), derive_seed(seed, "diagnosis.kernels"))
    for number, batch in enumerate(_fitting(longest_sequence(model))):
        show_progress(f"kernels: {batch.sequences} x {batch.tokens} tokens{', gradients' if batch.gradients else ''}")
        ids = _ids(model, batch, seed, number)
        with observer.watching(is_masked=batch.padding):
            if batch.gradients:
                _differentiate(model, ids, observer)
            else:
                _generate(model, ids, batch)
    return observer.observed()


def longest_sequence(model: nn.Module) -> int:
    """Return the number of tokens of the longest sequence, with the decoded ones: fewer if the model takes fewer."""
    config = getattr(model, "config", None)
    positions = next((int(value) for name in _POSITIONS if (value := getattr(config, name, None))), None)
    longest = max(batch.tokens + batch.decoded for batch in _BATCHES)
    return longest if positions is None else min(longest, positions - 2)  # OPT numbers its positions from two


def _fitting(longest: int) -> Iterator[_Batch]:
    """Yield the batches with sequences of at most `longest` tokens, and as many rows as without that limit."""
    for batch in _BATCHES:
        tokens = batch.tokens + batch.decoded
        sequences = -(-batch.sequences * tokens // min(tokens, longest))
        if sequences > batch.sequences:
            yield batch._replace(sequences=sequences, tokens=longest, decoded=0)
        if sequences == batch.sequences or batch.decoded:
            yield batch._replace(tokens=min(tokens, longest) - batch.decoded)


def _ids(model: nn.Module, batch: _Batch, seed: int, number: int) -> Tensor:
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    shape = (batch.sequences, batch.tokens + batch.decoded)
    generator = keyed_generator("cpu", seed, "diagnosis.kernels.tokens", number)
    return torch.randint(embedding.num_embeddings, shape, generator=generator).to(embedding.weight.device)


def _generate(model: nn.Module, ids: Tensor, batch: _Batch) -> None:
    mask = torch.ones_like(ids)
    if batch.padding:
        for sequence in range(len(ids)):
            mask[sequence, : min(3 * sequence, ids.shape[1] // 2)] = 0
    own = {"attention_mask": mask} if batch.padding else {}
    if not batch.decoded:
        model(input_ids=ids, use_cache=False, **own)
        return
    start = ids.shape[1] - batch.decoded
    own = {name: value[:, :start] for name, value in own.items()}
    output = model(input_ids=ids[:, :start], use_cache=True, **own)
    for end in range(start + 1, ids.shape[1] + 1):
        own = {"attention_mask": mask[:, :end]} if batch.padding else {}
        step = ids[:, end - 1 : end]
        output = model(input_ids=step, past_key_values=output.past_key_values, use_cache=True, **own)


def _differentiate(model: nn.Module, ids: Tensor, observer: "_Observer") -> None:
    """Compute the gradients of all weights of a loss, and drop them."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    frozen = [p for p in parameters if not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            logits = model(input_ids=ids, use_cache=False).logits.float()
            shares = logits[:, :-1].log_softmax(-1)
            loss = -shares.gather(2, ids[:, 1:, None]).mean()
            torch.autograd.grad(loss, parameters, allow_unused=True)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        observer.forget_graph()


def _sites_of(model: nn.Module, layers: Sequence[LayerSites]) -> dict[nn.Module, _Sites]:
    """Return where faults of each module are reported."""
    found: dict[nn.Module, _Sites] = {}
    for path, module in model.named_modules():
        # What the model itself computes are its logits: a cap, a factor.
        found[module] = _same(Place(OUTSIDE_LAYERS, path.rsplit(".", 1)[-1] or "lm_head"))
        if "rotaryembedding" in type(module).__name__.lower():
            found[module] = _same(Place(OUTSIDE_LAYERS, TABLE_SITE))
    found[model.get_input_embeddings()] = _same(Place(OUTSIDE_LAYERS, "embedding"))  # type: ignore[operator]
    for site, module in {**outer_norms(model), "lm_head": output_projection(model)}.items():
        own = Place(OUTSIDE_LAYERS, site)
        found[module] = _Sites(own, own, Place(OUTSIDE_LAYERS, f"{site}_input"))
    for index, sites in enumerate(layers):
        for path, module in sites.layer.named_modules():
            found[module] = _same(Place(index, path.rsplit(".", 1)[-1]))
        for site, module in sites.modules.items():
            found[module] = _same(Place(index, site))
        for special, site in ((activation_of(sites.layer), MODULE_SITE), (router_of(sites.layer), ROUTER_SITE)):
            if special is not None:
                found[special] = _same(Place(index, site))
        for name, module, end in (("attention", sites.attention, "o_proj"), ("mlp", sites.mlp, "down_proj")):
            if not isinstance(module, nn.Linear):
                core, output = Place(index, f"{name}_core"), Place(index, f"{name}_output")
                found[module] = _Sites(core, output, Place(index, f"{name}_input"))
                if end in sites.linears:
                    found[sites.linears[end]] = found[sites.linears[end]]._replace(input=core)
        before = Place(index - 1, "layer_output") if index else Place(OUTSIDE_LAYERS, "first_layer_input")
        own = Place(index, "layer_output")
        found[sites.layer] = _Sites(own, own, before)
    return found


def _same(place: Place) -> _Sites:
    return _Sites(place, place, place)


class _Observer(TorchDispatchMode):
    """Judges every operator of this thread, and what modules read and return."""

    supports_higher_order_operators = True

    def __init__(self, sites: Mapping[nn.Module, _Sites], seed: int) -> None:
        super().__init__()
        self._sites = sites
        self._rng = np.random.default_rng(seed)
        self._outside = Place(OUTSIDE_LAYERS, "loss")
        self._stack = [self._outside]
        self._starts: list[tuple[int, Place]] = []
        self._records: dict[tuple[str, str], _Record] = {}
        self._wrong: Counter[tuple[str, Place]] = Counter()
        self._calls: Counter[tuple[str, Place]] = Counter()
        self._checks: list[Check] = []
        self._unchecked: dict[str, None] = {}
        self._reordered: set[str] = set()
        self._own: list[tuple[nn.Module, list[Tensor], list[Tensor]]] = []
        self._given: list[tuple[nn.Module, list[Tensor], list[Tensor]]] = []
        self._is_paused = self._is_masked = self._has_nan = False
        self._kinds: dict[Any, _Kind] = {}

    # -- modules -------------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, *, is_masked: bool) -> Iterator[None]:
        """Observe the body: operators, and the modules of the model. `is_masked`: some tokens are padding."""
        handles: list[Any] = []
        self._is_masked = is_masked
        try:
            handles.append(torch_module.register_module_forward_pre_hook(self._enter))
            torch_module._global_forward_pre_hooks.move_to_end(handles[-1].id, last=False)
            handles.append(torch_module.register_module_forward_hook(self._computed, with_kwargs=True))
            torch_module._global_forward_hooks.move_to_end(handles[-1].id, last=False)
            for module in self._sites:
                handles.append(module.register_forward_pre_hook(self._named, with_kwargs=True, prepend=True))
                handles.append(module.register_forward_pre_hook(self._entered, with_kwargs=True))
                handles.append(module.register_forward_hook(self._left))
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack = [self._outside]
            self._own.clear()
            self._given.clear()

    def forget_graph(self) -> None:
        """Forget which place made which node of the last backward pass."""
        self._starts.clear()

    def _move(self, place: Place | None) -> None:
        if place is None:
            self._stack.pop()
        else:
            self._stack.append(place)
        if torch.is_grad_enabled():
            self._starts.append((torch.autograd._get_sequence_nr(), self._stack[-1]))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module not in self._sites or self._is_paused:
            return
        # Hooks may change arguments in place, so there have to be copies if there are any hooks.
        self._given.append((module, *self._kept_values(args, self._has_hooks(module, before=True))))

    def _named(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Add the arguments with names: hooks of all modules do not get them."""
        if not self._is_paused and self._given and self._given[-1][0] is module:
            own, copies = self._kept_values(kwargs, self._has_hooks(module, before=True))
            self._given[-1][1].extend(own)
            self._given[-1][2].extend(copies)

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_paused:
            return
        if self._given and self._given[-1][0] is module:
            self._compare_values(self._sites[module].input, *self._given.pop()[1:], _tensors_in((args, kwargs)))
        self._move(self._sites[module].operators)

    def _computed(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if module not in self._sites or self._is_paused:
            return
        self._own.append((module, *self._kept_values(output, self._has_hooks(module, before=False))))
        if "forward" in vars(module):
            self._compare_forward(module, args, kwargs, output)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_paused:
            return
        self._move(None)
        if self._own and self._own[-1][0] is module:
            self._compare_values(self._sites[module].output, *self._own.pop()[1:], _tensors_in(output))
        self._look_for_nan(self._sites[module].output, _tensors_in(output))

    def _look_for_nan(self, place: Place, tensors: list[Tensor]) -> None:
        """Keep the first output that is not finite, unless it is one of a kernel or a hook that was found wrong.

        In float16 healthy layers of some models overflow, and rows that attend to masked tokens alone may be undefined.
        """
        if self._is_masked or self._has_nan or torch.is_grad_enabled():
            return
        with _apart():
            for tensor in tensors:
                if tensor.dtype not in (torch.float32, torch.bfloat16) or bool(tensor.isfinite().all()):
                    continue
                self._has_nan = True
                if not self._wrong:
                    found = _matrix(tensor.double())
                    exact = np.where(np.isfinite(found), found, 0.0)
                    self._keep(RETURNED, place, Answer(exact, np.zeros_like(exact), found, tensor.dtype))
                return

    def _has_hooks(self, module: nn.Module, *, before: bool) -> bool:
        """Return whether other hooks than those of this observer run with the module."""
        own = module._forward_pre_hooks if before else module._forward_hooks
        everywhere = torch_module._global_forward_pre_hooks if before else torch_module._global_forward_hooks
        return len(own) > 1 + before or len(everywhere) > 1

    def _kept_values(self, values: Any, with_copies: bool) -> tuple[list[Tensor], list[Tensor]]:
        tensors = _tensors_in(values)
        if not with_copies:
            return tensors, []
        with _apart():
            return tensors, [tensor.detach().clone() for tensor in tensors]

    def _compare_values(self, place: Place, own: list[Tensor], copies: list[Tensor], seen: list[Tensor]) -> None:
        """Compare tensors with what they were, bit for bit."""
        self._calls[RETURNED, place] += 1
        if len(own) != len(seen) or (not copies and all(a is b for a, b in zip(own, seen, strict=True))):
            return
        with _apart():
            for before, after in zip(copies or own, seen, strict=True):
                if before.shape != after.shape or before.dtype != after.dtype or _are_equal(before, after):
                    continue
                exact = _matrix(before.detach().double())
                answer = Answer(exact, np.zeros_like(exact), _matrix(after.detach().double()), after.dtype)
                self._keep(RETURNED, place, answer)

    def _compare_forward(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Compare the output of a `forward` that was put on a module with that of its class."""
        own = type(module).forward
        if own is nn.Module.forward or kwargs.get("past_key_values") is not None:
            return  # a second call would add to the cache
        place = self._sites[module].output
        self._is_paused = True
        try:
            with _disable_current_modes(), torch.no_grad():
                expected = own(module, *args, **kwargs)
        except TypeError:
            self._unchecked[f"the forward that was put on {place.site}"] = None
            return
        finally:
            self._is_paused = False
        with _apart():
            for wanted, seen in zip(_tensors_in(expected), _tensors_in(output), strict=False):
                if wanted.shape != seen.shape or not seen.is_floating_point() or _are_equal(wanted, seen):
                    continue
                exact = _matrix(wanted.double())
                top = np.abs(exact).max(-1, keepdims=True)
                slack = np.broadcast_to(_OTHER_FORWARD * torch.finfo(seen.dtype).eps * top, exact.shape)
                answer = Answer(exact, slack, _matrix(seen.double()), seen.dtype)
                self._keep(RETURNED, place, answer)

    # -- operators -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, judge its result, and run it once more."""
        kwargs = kwargs or {}
        if self._is_paused or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind.is_composite:
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if kind.makes_nothing:
            return func(*args, **kwargs)
        if kind.writes:
            with _apart():
                arguments = arguments_of(func, args, kwargs, copies_first=not func._schema.arguments[0].is_out)
        else:
            arguments = arguments_of(func, args, kwargs, copies_first=False)
        if arguments.get("dropout_p"):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        again = None if kind.writes else func(*args, **kwargs)
        with _apart():
            self._judge(func, arguments, result, again)
        return result

    def _place(self) -> tuple[Place, bool]:
        """Return where the program is, and whether it is in a backward pass."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._stack[-1], False
        number = node._sequence_nr()
        index = bisect_right(self._starts, number, key=lambda start: start[0]) - 1
        is_known = 0 <= index < len(self._starts) and number < 1 << 62
        return self._starts[index][1] if is_known else self._outside, True

    def _judge(self, func: Any, arguments: Mapping[str, Any], result: Any, again: Any) -> None:
        tensors = _tensors_in(result)
        if not tensors or not any(tensor.numel() for tensor in tensors):
            return
        place, is_gradient = self._place()
        operator = func.overloadpacket.__name__
        if is_gradient:
            place = Place(place.layer, f"{place.site}.{operator.strip('_')}_gradient")
        record = self._record(operator, arguments)
        record.calls += 1
        record.layers.add(place.layer)
        self._calls[KERNEL, place] += 1
        written = {argument.name for argument in func._schema.arguments if argument.is_out}
        given = {name: value for name, value in arguments.items() if name not in written}
        answers = self._answers(func, operator, given, result)
        record.is_unchecked |= answers is None
        wrong = [answer for answer in answers or () if self._keep(KERNEL, place, answer)]
        if again is not None and not all(map(_are_equal, tensors, _tensors_in(again))):
            wrong += self._judge_again(place, record, answers, tensors, _tensors_in(again))
        record.compared_values += sum(answer.exact.size for answer in answers or ())
        if wrong:
            record.wrong_calls += 1
            record.wrong_places[place] = None
            for answer in wrong:
                places = answer.wrong()
                record.wrong_values += int(places.sum())
                record.channels |= set(places.any(0).nonzero()[0].tolist())

    def _answers(self, func: Any, operator: str, arguments: Mapping[str, Any], result: Any) -> list[Answer] | None:
        known = ANSWERS.get(operator if operator in ANSWERS else operator.removesuffix("_"))
        found = None
        if known is not None and func.namespace == "aten":
            found = known(arguments, result, self._rng)
        if found is None:
            try:
                found = answers_of_whole(func, arguments, result)
            except (RuntimeError, NotImplementedError):  # torch has no such operator in float64 on the host
                found = None
        if found is None:
            self._unchecked[f"{func.namespace}::{operator}"] = None
        return found

    def _judge_again(
        self, place: Place, record: _Record, answers: list[Answer] | None, first: list[Tensor], second: list[Tensor]
    ) -> list[Answer]:
        """Judge a second result that differs from the first: by twice the slack of the sum it may have been added in
        another order, without any slack an operator has to repeat.
        """
        slack = max((float(answer.slack.max(initial=0.0)) for answer in answers or ()), default=0.0)
        wrong = []
        for own, again in zip(first, second, strict=True):
            if not _are_equal(own, again) and own.is_floating_point():
                exact = _matrix(own.double())
                bound = np.full_like(exact, 2 * slack)
                answer = Answer(exact, bound, _matrix(again.double()), own.dtype)
                if self._keep(KERNEL, place, answer):
                    wrong.append(answer)
        if not wrong:
            record.is_reordered = True
            self._reordered.add(place.site)
        return wrong

    def _record(self, operator: str, arguments: Mapping[str, Any]) -> _Record:
        operands = "; ".join(
            f"{name} {text}" for name, value in arguments.items() if (text := _operand(value)) is not None
        )
        return self._records.setdefault((operator, operands), _Record())

    def _keep(self, probe: str, place: Place, answer: Answer) -> bool:
        """Keep a wrong answer as evidence; return whether it is wrong."""
        wrong = answer.wrong()
        if not wrong.any():
            return False
        self._wrong[probe, place] += 1
        if self._wrong[probe, place] <= _KEPT_CHECKS:
            dtype = answer.dtype if answer.dtype.is_floating_point else torch.float32
            expected, observed = (torch.from_numpy(part.copy()).to(dtype) for part in (answer.exact, answer.found))
            mismatch = mismatch_of(expected, observed, torch.from_numpy(wrong), 1)
            self._checks.append(Check(probe, *place, answer.exact.shape[1], 0, mismatch, 1))
        return True

    def observed(self) -> Observed:
        """Return what was observed."""
        checks = list(self._checks)
        for (probe, place), calls in self._calls.items():
            # Of wrong results some are kept, and as large a share of the right ones is counted.
            wrong = self._wrong[probe, place]
            right = max(calls - wrong, 0) * min(wrong, _KEPT_CHECKS) // max(wrong, 1) if wrong else calls
            checks.append(Check(probe, *place, 1, 0, None, right))
        kernels = tuple(_verdict(operator, operands, record) for (operator, operands), record in self._records.items())
        return Observed(checks, kernels, tuple(self._unchecked), tuple(sorted(self._reordered)))


def _verdict(operator: str, operands: str, record: _Record) -> KernelVerdict:
    return KernelVerdict(
        operator=operator,
        operands=operands,
        verdict="fault" if record.wrong_calls else "unchecked" if record.is_unchecked else "healthy",
        calls=record.calls,
        wrong_calls=record.wrong_calls,
        compared_values=record.compared_values,
        wrong_values=record.wrong_values,
        wrong_channels=tuple(sorted(record.channels)),
        is_reordered=record.is_reordered,
        layers=tuple(sorted(layer for layer in record.layers if layer != OUTSIDE_LAYERS)),
        wrong_places=tuple(
            place.site if place.layer == OUTSIDE_LAYERS else f"layer {place.layer}: {place.site}"
            for place in record.wrong_places
        ),
    )


@contextmanager
def _apart() -> Iterator[None]:
    """Compute on the side: no operator of the body is observed, or changed by a mode."""
    with on_host(), _disable_current_modes(), torch.no_grad():
        yield


class _Kind(NamedTuple):
    """What an operator is to the observer. `makes_nothing`: a view, memory without values, or random numbers."""

    is_composite: bool
    makes_nothing: bool
    writes: bool


def _kind_of(func: Any) -> _Kind:
    name, schema = func.overloadpacket.__name__, func._schema
    writes = any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments)
    is_view = not writes and any(one.alias_info is not None for one in schema.returns)
    # Attention draws random numbers for dropout alone.
    is_random = torch.Tag.nondeterministic_seeded in func.tags and name not in ANSWERS
    has_no_values = name.startswith(("empty", "new_empty")) or name in _WITHOUT_VALUES
    return _Kind(is_composite(func), is_view or is_random or has_no_values, writes)


def _operand(value: Any) -> str | None:
    """Return the format, shape and, where it is not contiguous, the strides of an operand; None for other values."""
    if isinstance(value, Tensor):
        shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return shape if value.layout != torch.strided or value.is_contiguous() else f"{shape} strides {value.stride()}"
    if isinstance(value, list | tuple) and value and all(isinstance(item, Tensor) for item in value):
        return " ".join(filter(None, map(_operand, value)))
    return None


def _tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.layout == torch.strided]


def _matrix(tensor: Tensor) -> Any:
    host = tensor.detach().cpu()
    return host.reshape(-1, host.shape[-1] if host.dim() else 1).numpy().copy()


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values; NaN equals NaN."""
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() or one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
