"""Repeats drawn micro-batches of a run and compares loss and gradients bit for bit, before the optimiser uses them.

A device that errs now and then spoils a training without a trace. In a verified step one micro-batch, drawn by seed and
step, is therefore computed twice: first as a rehearsal, whose gradients are dropped, then for the training. Both start
from the same random state, buffers and noise keys, so on a sound device every bit agrees, and the training continues as
if there had been no rehearsal.

A dispatch mode digests the result of every operator in both. It names the first operator that differs, and keeps its
operands. That operator erred, or what it read changed in memory: those before it gave the same bits. Where the two runs
call different operators, or give one other shapes or numbers, no operator can be blamed: the message shows both calls.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from aqnpipe.config.run import TrainingSpec
from aqnpipe.device import determinism_requested
from aqnpipe.errors import VerificationError
from aqnpipe.machine.places import Places
from aqnpipe.models.parts import parts_of
from aqnpipe.models.sharding import gathered_weights, local
from aqnpipe.reference.decoder import unobserved
from aqnpipe.seeding import derive_seed
from aqnpipe.training.ranks import gathered, rank_and_size

LOSS = "the loss"

_CHUNK = 1 << 20
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number, as a signed one of 64 bits."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")
"""Operators whose results contain those of other workers, or memory that is not filled yet."""
_AGAIN = 8
"""Calls of the operator that differs on its own operands, which show whether it repeats."""


def digest(tensor: Tensor) -> Tensor:
    """Return a digest of the bits of a tensor, int64 without dimensions, on its device.

    The sum of all elements as integers, each times an odd number of its place, modulo 2^64: a change of one element
    always changes it, one of several with all but a probability of about 2^-64.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    factors = (2 * torch.arange(min(_CHUNK, len(bits)), device=bits.device) + 1) * _FACTOR
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = total * _FACTOR + (chunk * factors[: len(chunk)]).sum()
    return total


class Differing(NamedTuple):
    """The first operator with other results than in the rehearsal: its arguments, and its results in the training."""

    place: str
    function: Any
    arguments: tuple[Any, Mapping[str, Any]]
    results: list[Tensor]

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, operand.shape)) or "scalar" for operand in _tensors_in(self.arguments))
        name, dtype = str(self.function).removesuffix(".default"), str(self.results[0].dtype).removeprefix("torch.")
        return f"{name} of {shapes} ({dtype}) in {self.place}"

    def repetitions(self) -> list[list[Tensor]]:
        """Return the results of more calls without noise; none if the operator changes its operands or draws."""
        if self.function._schema.is_mutable or torch.Tag.nondeterministic_seeded in self.function.tags:
            return []
        args, kwargs = self.arguments
        with unobserved():
            return [_tensors_in(self.function(*args, **kwargs)) for _ in range(_AGAIN)]


class DigestedRun(TorchDispatchMode):
    """One run of a micro-batch on `policy`: `found` has the digests of loss, gradients and buffers by name.

    As a mode it digests the results of operators, and compares with those of the run `earlier`. Views have no results
    of their own, and memory that was only allocated has none yet.
    """

    def __init__(self, policy: nn.Module, earlier: "DigestedRun | None" = None) -> None:
        super().__init__()
        self.found: dict[str, int] = {}
        self.differing: Differing | None = None
        self.departure: str | None = None
        self._results: list[tuple[str, int, int]] = []
        self._expected = earlier._results if earlier else None
        roots, modules = parts_of(policy)
        self._names = dict(enumerate(modules))
        self._places = Places(len(modules), lambda *_: 0)
        self.handles = self._places.hooks(roots, dict(enumerate(modules.values())))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and digest its results."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        node = torch._C._current_autograd_node()
        # What is added up depends on the gradients of earlier micro-batches, and on those of other workers.
        is_sum = node is not None and node.name().endswith("AccumulateGrad")
        if isinstance(func, torch._ops.OpOverload) and not _is_without_result(func) and not is_sum:
            values = _tensors_in(result)
            # What attention returns besides its output has memory that is not filled.
            self._note(func, (args, kwargs), values[:1] if "attention" in str(func) else values, node)
        return result

    def _note(self, func: Any, arguments: tuple[Any, Mapping[str, Any]], values: list[Tensor], node: Any) -> None:
        if not values or self.differing is not None:
            return
        here, part = self._places.here(), self._places.here().part
        if node is not None and not here.is_again and (segment := self._places.segment_of(node._sequence_nr())):
            part = segment.part
        entry = (_call(func, arguments), part, int(digest(torch.stack([digest(value).cpu() for value in values]))))
        index = len(self._results)
        self._results.append(entry)
        if self._expected is None:
            return
        expected = self._expected[index] if index < len(self._expected) else ("no call", part, 0)
        place = f"{self._names.get(part, 'no layer')}, the {'forward' if node is None else 'backward'} pass"
        if expected[:2] != entry[:2]:
            # Behind another order of operators nothing compares.
            self._expected, self.departure = None, f"{entry[0]} in {place}, in the rehearsal {expected[0]}"
        elif expected != entry:
            copies = tree_map_only(Tensor, _copy, arguments)
            self.differing = Differing(place, func, copies, list(map(_copy, values)))


class Verifier:
    """Verifies the steps of one worker. `label` names the run in messages, files of operands go to `folder`."""

    def __init__(self, spec: TrainingSpec, label: str, folder: Path) -> None:
        self._steps = frozenset(spec.training.verified_steps(spec.num_steps))
        self._label, self._seed, self._folder = label, spec.random_seed, folder
        self._run: DigestedRun | None = None

    def attach(self, policy: nn.Module) -> None:
        """Observe the gradients of the trained weights; those of a sharded model arrive at the gathered ones."""
        if not self._steps:
            return
        with gathered_weights(policy):
            for name, weight in policy.named_parameters():
                if weight.requires_grad:
                    weight.register_hook(partial(self.note, f"the gradient of {name}"))

    def is_drawn(self, step: int, micro_batch: int, num_micro_batches: int) -> bool:
        """Return whether this micro-batch of optimiser step `step`, counted from 1, is computed twice."""
        drawn = derive_seed(self._seed, "verified micro-batch", step) % num_micro_batches
        return step in self._steps and micro_batch == drawn

    def note(self, what: str, tensor: Tensor) -> None:
        """Digest a tensor of the run in progress, if that is one of the two that are compared."""
        if self._run is not None:
            with unobserved():
                self._run.found[what] = int(digest(local(tensor)))

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context that digests the operators of the body, if this is one of the two runs."""
        return self._run or nullcontext()

    @contextmanager
    def verified(
        self, policy: nn.Module, step: int, micro_batch: int, rehearse: Callable[[], object]
    ) -> Iterator[None]:
        """Compute a micro-batch by `rehearse`, then in the body; VerificationError if the two differ on any worker."""
        # Kernels of other devices may add in another order in every call; those of a CPU do not.
        is_steady = next(policy.parameters()).device.type == "cpu"
        with nullcontext() if is_steady else determinism_requested():
            with _restored(policy), self._digesting(policy) as first:
                rehearse()
            with self._digesting(policy, first) as second:
                yield
        wrong = [what for what in {**first.found, **second.found} if first.found.get(what) != second.found.get(what)]
        found = self._difference(wrong, second, step) if wrong else None
        if any(lines := gathered(found)):
            worker = (f"worker {rank}: " if len(lines) > 1 else "" for rank in range(len(lines)))
            shown = [f"{name}{line}" for name, line in zip(worker, lines, strict=True) if line]
            raise VerificationError(
                f"{self._label}: step {step}, micro-batch {micro_batch}, computed twice: {'; '.join(shown)}; stopped "
                "before the optimiser used it"
            )

    @contextmanager
    def _digesting(self, policy: nn.Module, earlier: DigestedRun | None = None) -> Iterator[DigestedRun]:
        run = self._run = DigestedRun(policy, earlier)
        try:
            yield run
            for name, buffer in policy.named_buffers():
                self.note(f"the buffer {name}", buffer)
        finally:
            self._run = None
            for handle in run.handles:
                handle.remove()

    def _difference(self, wrong: list[str], run: DigestedRun, step: int) -> str:
        """Return what differs, in the order of the computation; the operator's operands and results go to a file."""
        what = f"{wrong[0]} and {len(wrong) - 1} more differ" if len(wrong) > 1 else f"{wrong[0]} differs"
        if (differing := run.differing) is None:
            called = f"; the two runs called different operators, first {run.departure}" if run.departure else ""
            return f"{what}, in no operator that could be named{called}"
        again = differing.repetitions()
        kept = {
            "operand": _tensors_in(differing.arguments),
            "result": differing.results,
            "again": again[0] if again else [],
        }
        tensors = {f"{name}{n}": _copy(value).cpu() for name, values in kept.items() for n, value in enumerate(values)}
        path = self._folder / f"verification-step{step}-worker{rank_and_size()[0]}.safetensors"
        about = {"operator": str(differing.function), "place": differing.place, "run": self._label}
        save_file({name: value.contiguous() for name, value in tensors.items()}, path, about)
        digests = [[int(digest(value)) for value in values] for values in again]
        others = sum(found != digests[0] for found in digests[1:])
        unsteady = f" (on the same operands, {others} of {len(again) - 1} more calls give other bits)" if others else ""
        return f"{what}, first in {differing}{unsteady}, operands in {path}"


@contextmanager
def _restored(policy: nn.Module) -> Iterator[None]:
    """Restore random state, buffers and gradients behind the body; it has the memory of one gradient at a time."""
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    gradients, buffers = [weight.grad for weight in trained], [buffer.clone() for buffer in policy.buffers()]
    states, device = (random.getstate(), np.random.get_state()), next(policy.parameters()).device
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([] if device.type == "cpu" else [device]))
        for weight in trained:
            weight.grad = None
            stack.callback(weight.register_post_accumulate_grad_hook(_drop_gradient).remove)
        yield
    for weight, gradient in zip(trained, gradients, strict=True):
        weight.grad = gradient
    with torch.no_grad():
        for buffer, before in zip(policy.buffers(), buffers, strict=True):
            buffer.copy_(before)
    random.setstate(states[0])
    np.random.set_state(states[1])


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None


def _is_without_result(function: Any) -> bool:
    name = function.overloadpacket.__name__
    return function.is_view or "empty" in name or function.namespace in _COLLECTIVES


def _call(function: Any, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> str:
    """Return a call in words, with the shapes of tensors and the values of numbers; equal calls have equal words."""
    args, kwargs = tree_map(_in_words, arguments)
    return f"{function}({', '.join(map(str, [*args, *kwargs.values()]))})"


def _in_words(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "x".join(map(str, local(value).shape)) or "scalar"
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in the arguments or results of an operator; of a sharded one this worker's share."""
    tensors = [local(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.layout == torch.strided and not tensor.is_meta]


def _copy(tensor: Tensor) -> Tensor:
    return local(tensor).detach().clone()
