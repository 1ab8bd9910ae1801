"""Repeats drawn micro-batches of a run and compares loss and gradients bit for bit, before the optimiser uses them.

A device that errs now and then spoils a training without a trace. In a verified step one micro-batch, drawn by seed and
step, is therefore computed twice: first as a rehearsal, whose gradients are dropped, then for the training. Both start
from the same random state, buffers and noise keys, so on a sound device every bit agrees, and the training continues as
if there had been no rehearsal.

A dispatch mode digests the result of every operator in both. It names the first operator that differs, and keeps its
operands. That operator erred: those before it gave the same bits, so its operands were the same.
"""

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import VerificationError
from aqnpipe.machine.places import Places
from aqnpipe.models.parts import parts_of
from aqnpipe.models.shares import local
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


class _Result(NamedTuple):
    """The digest of an operator's results, and where it ran: part of the model, and direction of the pass."""

    operator: str
    part: int
    direction: str
    digest: Tensor


class Differing(NamedTuple):
    """The first operator whose results differ between two runs: its operands, and its results in the second run."""

    operator: str
    place: str
    function: Any
    arguments: tuple[Any, Mapping[str, Any]]
    results: list[Tensor]

    @property
    def operands(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return _tensors_in(self.arguments)

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, operand.shape)) or "scalar" for operand in self.operands)
        dtype = str(self.results[0].dtype).removeprefix("torch.")
        return f"{self.operator} of {shapes} ({dtype}) in {self.place}"


class OperatorStream(TorchDispatchMode):
    """Digests the results of all operators of this thread. `differing`: the first one unlike its result in `expected`.

    Views have no results of their own, and memory that was only allocated has none yet. `names` of the parts.
    """

    def __init__(self, places: Places, names: Mapping[int, str], expected: list[_Result] | None = None) -> None:
        super().__init__()
        self.results: list[_Result] = []
        self.differing: Differing | None = None
        self._places, self._names, self._expected = places, names, expected

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and digest its results."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and not _is_without_result(func) and self.differing is None:
            self._note(func, (args, kwargs), result)
        return result

    def _note(self, func: Any, arguments: tuple[Any, Mapping[str, Any]], result: Any) -> None:
        node, here = torch._C._current_autograd_node(), self._places.here()
        if node is not None and node.name().endswith("AccumulateGrad"):
            # What comes here depends on the gradients of earlier micro-batches, and on those of other workers.
            return
        part, direction = here.part, "the forward pass"
        if node is not None:
            segment = self._places.segment_of(node._sequence_nr())
            is_again = here.is_again
            part = here.part if is_again or segment is None else segment.part
            direction = "a layer that is computed again" if is_again else "the backward pass"
        values = _tensors_in(result)[:1] if "attention" in str(func) else _tensors_in(result)
        if not values:
            return
        digests = [digest(value).cpu() for value in values]
        entry = _Result(str(func).removesuffix(".default"), part, direction, digest(torch.stack(digests)))
        self.results.append(entry)
        if self._expected is not None:
            self._compare(entry, len(self.results) - 1, func, arguments, values)

    def _compare(
        self, entry: _Result, index: int, func: Any, arguments: tuple[Any, Mapping[str, Any]], values: list[Tensor]
    ) -> None:
        """Keep the operands of the first operator that differs; behind another order of operators nothing compares."""
        expected = self._expected[index] if self._expected and index < len(self._expected) else None
        if expected is None or expected[:3] != entry[:3]:
            self._expected = None
        elif not torch.equal(expected.digest, entry.digest):
            kept = torch.utils._pytree.tree_map_only(Tensor, _copy, arguments)
            place = f"{self._names.get(entry.part, 'no layer')}, {entry.direction}"
            self.differing = Differing(entry.operator, place, func, kept, list(map(_copy, values)))


class Verifier:
    """Verifies the steps of one worker. `label` names the run in messages, files of operands go to `folder`."""

    def __init__(self, spec: TrainingSpec, label: str, folder: Path) -> None:
        self._steps = frozenset(spec.training.verified_steps(spec.num_steps))
        self._label, self._seed, self._folder = label, spec.random_seed, folder
        self._found: dict[str, Tensor] | None = None
        self._stream: OperatorStream | None = None

    def attach(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Observe the gradients of these weights; those of a sharded model must be gathered at present."""
        for name, weight in trained.items() if self._steps else ():
            weight.register_hook(partial(self.note, f"the gradient of {name}"))

    def is_drawn(self, step: int, micro_batch: int, num_micro_batches: int) -> bool:
        """Return whether this micro-batch of optimiser step `step`, counted from 1, is computed twice."""
        drawn = derive_seed(self._seed, "verified micro-batch", step) % num_micro_batches
        return step in self._steps and micro_batch == drawn

    def note(self, what: str, tensor: Tensor) -> None:
        """Digest a tensor of the run in progress, if that is one of the two that are compared."""
        if self._found is not None:
            with unobserved():
                self._found[what] = digest(local(tensor)).cpu()

    @contextmanager
    def comparing(self, policy: nn.Module, step: int, micro_batch: int) -> Iterator["Pair"]:
        """Yield the pair of runs of a micro-batch; raise VerificationError on every worker if any worker's differ."""
        pair = Pair(self, policy)
        with _deterministic(next(policy.parameters()).device):
            yield pair
        rank, workers = rank_and_size()
        found = pair.difference()
        if found and pair.differing:
            found += self._keep(pair.differing, step, rank)
        if any(lines := gathered(found)):
            shown = [f"worker {number}: {line}" if workers > 1 else line for number, line in enumerate(lines) if line]
            raise VerificationError(
                f"{self._label}: step {step}, micro-batch {micro_batch}, computed twice: {'; '.join(shown)}; stopped "
                "before the optimiser used it"
            )

    def watching(self) -> Any:
        """Return a context that digests the operators of the body, if this is a run of a pair."""
        return self._stream or nullcontext()

    def _keep(self, differing: Differing, step: int, rank: int) -> str:
        """Write operands and results of an operator to a file; return its name, and how the operator repeats."""
        again = _repetitions(differing)
        tensors = {f"operand{number}": value for number, value in enumerate(differing.operands)}
        tensors |= {f"result{number}": value for number, value in enumerate(differing.results)}
        tensors |= {f"again{number}": value for number, value in enumerate(again[0] if again else ())}
        path = self._folder / f"verification-step{step}-worker{rank}.safetensors"
        about = {"operator": str(differing.function), "place": differing.place, "label": self._label}
        save_file({name: _copy(value).cpu().contiguous() for name, value in tensors.items()}, path, about)
        others = sum(any(not _is_equal(*pair) for pair in zip(again[0], one, strict=True)) for one in again[1:])
        unsteady = f" (on the same operands, {others} of {len(again) - 1} more calls give other bits)" if others else ""
        return f"{unsteady}, operands in {path}"


class Pair:
    """Two runs of one micro-batch on the same state: the rehearsal, then the run of the training."""

    def __init__(self, verifier: Verifier, policy: nn.Module) -> None:
        self._verifier, self._policy = verifier, policy
        roots, modules = parts_of(policy)
        self._parts, self._names = dict(enumerate(modules.values())), dict(enumerate(modules))
        self._roots = roots
        self._found: list[dict[str, Tensor]] = []
        self._streams: list[OperatorStream] = []

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Compute the first run in the body: random state, buffers and gradients are as before behind it."""
        trained = [weight for weight in self._policy.parameters() if weight.requires_grad]
        gradients, buffers = [weight.grad for weight in trained], [b.clone() for b in self._policy.buffers()]
        states = random.getstate(), np.random.get_state()
        device = next(self._policy.parameters()).device
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([] if device.type == "cpu" else [device]))
            for weight in trained:
                weight.grad = None
                # The memory of one gradient at a time.
                stack.callback(weight.register_post_accumulate_grad_hook(_drop_gradient).remove)
            try:
                with self.run():
                    yield
            finally:
                for weight, gradient in zip(trained, gradients, strict=True):
                    weight.grad = gradient
                with torch.no_grad():
                    for buffer, before in zip(self._policy.buffers(), buffers, strict=True):
                        buffer.copy_(before)
        random.setstate(states[0])
        np.random.set_state(states[1])

    @contextmanager
    def run(self) -> Iterator[None]:
        """Digest what the body computes."""
        verifier, places = self._verifier, Places(len(self._parts), lambda *_: 0)
        handles = places.hooks(self._roots, self._parts)
        verifier._found, first = {}, self._streams[0].results if self._streams else None
        verifier._stream = OperatorStream(places, self._names, first)
        try:
            yield
            for name, buffer in self._policy.named_buffers():
                verifier.note(f"the buffer {name}", buffer)
        finally:
            self._found.append(verifier._found)
            self._streams.append(verifier._stream)
            verifier._found = verifier._stream = None
            for handle in handles:
                handle.remove()

    @property
    def differing(self) -> Differing | None:
        """The first operator that differs; None where the two runs had operators in another order."""
        return self._streams[-1].differing

    def difference(self) -> str | None:
        """Return what differs between the runs, in the order of the computation; None if every bit agrees."""
        first, second = self._found
        others = [what for what in {**first, **second} if not _is_equal(first.get(what), second.get(what))]
        if not others:
            return None
        more = f" and {len(others) - 1} more differ" if len(others) > 1 else " differs"
        operator = f"first in {self.differing}" if self.differing else "in no operator that could be named"
        return f"{others[0]}{more}, {operator}"


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Compute with torch's deterministic algorithms in the body; those of a CPU are deterministic anyway.

    Others of a GPU may add in another order in every call.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None


def _repetitions(differing: Differing) -> list[list[Tensor]]:
    """Return the results of more calls of an operator without noise; empty if it changes its operands or draws."""
    function, (args, kwargs) = differing.function, differing.arguments
    if function._schema.is_mutable or torch.Tag.nondeterministic_seeded in function.tags:
        return []
    with unobserved():
        return [_tensors_in(function(*args, **kwargs)) for _ in range(_AGAIN)]


def _is_without_result(function: Any) -> bool:
    name = function.overloadpacket.__name__
    return function.is_view or "empty" in name or function.namespace in _COLLECTIVES


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in the arguments or results of an operator; of a sharded one this worker's share."""
    tensors = [local(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.layout == torch.strided and not tensor.is_meta]


def _copy(tensor: Tensor) -> Tensor:
    return local(tensor).detach().clone()


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(digest(one), digest(other))
