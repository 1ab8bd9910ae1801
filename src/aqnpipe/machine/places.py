"""Where a program computes: the pass, the part of the model, and the number of the operator there.

Noise is keyed by place, so that a layer that a checkpoint computes again gets the same noise, and threads do not
disturb each other. Light hooks on the parts of a model (its layers, its output projection) keep the place of each
thread up to date. A *pass* is a call of a whole model. What no part computes, such as the loss, is *outside*.

The place of a gradient is that of its operator in the forward pass. torch numbers the nodes of the backward graph as it
makes them, and makes that of an operator just before its kernel runs. So each result notes the number of its node, and
the forward pass notes with which number each part begins (`Segment`). During a backward pass the number of the node
that runs leads to the operator; for a node that is no operator's, such as a function with a backward pass of its own,
to the part. The same lookup tells to which pass a layer belongs that is computed again.

Definition of the keys, which the audit derives a second time:
- a result in a forward pass: seed of (stream, step, micro_step, rank, pass, part), call `visit * 2^20 + n` for the n-th
  operator of this visit of the part, from 1, stream 0;
- a gradient: seed of ("backward", step, micro_step, rank, pass, part), the call of its operator, stream 1 + n for the
  n-th result of the node, from 0. For a node that is no operator's: pass and part of its segment, call
  `visit * 2^20 + d` for the number d from the start of the segment, streams from 2^16 on.
A visit is a call of a part within one pass, from 0; outside it is the number of the segment within the pass for
gradients, and 0 for results. A pass has its number in its thread, and the number of the thread in the upper 32 bits:
0 for the thread that began the machine, else a checksum (CRC-32, 30 bits) of its name. Python's names are numbered by
creation. What a thread computes before its first pass has the pass -1 - number.
"""

import os
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from aqnpipe.config.measured_noise import ATTENTION, LM_HEAD, SCORES, LayerErrors, OperatorError
from aqnpipe.errors import ModelError
from aqnpipe.machine.norms import NORM
from aqnpipe.machine.operators import ATTENTION as FUSED_ATTENTION
from aqnpipe.models.layout import is_norm, norms_outside_layers, output_projection
from aqnpipe.models.parts import hooks_around

CALLS_PER_VISIT = 1 << 20
OTHER_NODES = 1 << 16
_KEPT_SEGMENTS = 1 << 14
_PRODUCTS_OF_ATTENTION = (SCORES, ATTENTION)


class Segment(NamedTuple):
    """A stretch of the backward graph: the number of its first node, and where the forward pass was."""

    start: int
    passed: int
    part: int
    visit: int


class Operator(NamedTuple):
    """The place of an operator: its pass, its part, and the number of its call."""

    passed: int
    part: int
    call: int


@dataclass(slots=True)
class Place:
    """A visit of a part, or what is outside; `calls` counts its operators, `others` products of no linear module."""

    passed: int
    part: int
    calls: int
    key: int
    is_again: bool
    others: int = 0


class ThreadPlaces(threading.local):
    """The place of one thread, and the segments of the graphs that it made."""

    def __init__(self) -> None:
        self.passes = -1
        self.passed = -1
        self.roots: list[nn.Module] = []
        self.here: Place | None = None
        self.stack: list[Place | None] = []
        self.visits: dict[int, int] = {}
        self.segments: list[Segment] = []
        self.starts: list[int] = []
        self.operators: dict[int, Operator] = {}
        self.node = -1
        self.nth = 0
        self.names: list[str] = []


class _Graph(NamedTuple):
    segments: list[Segment]
    starts: list[int]
    operators: dict[int, Operator]


class Places:
    """The places of a program. `key_of(pass, part)` gives the key of results there.

    `outside` is the number of the place outside all parts.
    """

    def __init__(self, outside: int, key_of: Callable[[int, int], int]) -> None:
        self.outside = outside
        self.local = ThreadPlaces()
        self._key_of = key_of
        self._latest: _Graph | None = None
        self._process = os.getpid()
        self._thread = threading.get_ident()

    def hooks(self, roots: Iterable[nn.Module], parts: Mapping[int, nn.Module]) -> list[Any]:
        """Register the hooks and return their handles; a call of one of `roots` that is in no other is a pass."""
        handles = [handle for root in roots for handle in hooks_around(root, self.enter_root, None, self.leave_root)]
        for part, module in parts.items():
            # The first of the hooks: what hooks of the program compute before a part is inside it, after it outside.
            handles += hooks_around(module, partial(self.enter_part, part), self.leave_part)
        return handles

    def name_hooks(self, names: Mapping[nn.Module, str]) -> list[Any]:
        """Register hooks that note which of these modules computes, and return their handles."""
        return [
            handle
            for module, name in names.items()
            for handle in hooks_around(
                module, partial(self._enter_named, name), None, self._leave_named, is_first=False
            )
        ]

    def _enter_named(self, name: str, *_: Any) -> None:
        self.local.names.append(name)

    def _leave_named(self, *_: Any) -> None:
        if self.local.names:
            self.local.names.pop()

    def enter_root(self, module: nn.Module, *_: Any) -> None:
        """Begin a pass, unless this call is a part of one. Raises ModelError in a forked process."""
        if os.getpid() != self._process:
            raise ModelError(
                f"{type(module).__name__} is called in a forked process on a simulated machine: it would repeat the "
                "errors of the other process, unseen by the receipt; expected the fork before the machine begins"
            )
        local = self.local
        if module in local.roots:
            # The call before ended in an exception that runs no hooks, such as KeyboardInterrupt.
            local.roots.clear()
        local.roots.append(module)
        if len(local.roots) == 1 and torch._C._current_autograd_node() is None:
            self._begin(local)

    def leave_root(self, module: nn.Module, *_: Any) -> None:
        """End a call of a root. What follows is outside, and still belongs to its pass."""
        roots = self.local.roots
        if roots and roots[-1] is module:
            roots.pop()

    def enter_part(self, part: int, *_: Any) -> None:
        """Begin a visit of a part, in this pass or, when a backward pass computes it again, in that of its node."""
        self.here()
        local = self.local
        node = torch._C._current_autograd_node()
        passed, visit = local.passed, 0
        if node is None:
            visit = local.visits.get(part, 0)
            local.visits[part] = visit + 1
        elif (segment := self.segment_of(node._sequence_nr())) is not None:
            passed, visit = segment.passed, segment.visit if segment.part == part else 0
        local.stack.append(local.here)
        key = self._key_of(passed, part)
        local.here = Place(passed, part, visit * CALLS_PER_VISIT, key, node is not None)
        if torch.is_grad_enabled():
            self._note(local, passed, part, visit)

    def leave_part(self, *_: Any) -> None:
        """End a visit."""
        local = self.local
        if not local.stack:
            return
        left, local.here = local.here, local.stack.pop()
        if torch.is_grad_enabled() and left is not None:
            here = local.here
            if here is not None and here.part != self.outside:
                # A part in a part goes on.
                self._note(local, here.passed, here.part, here.calls // CALLS_PER_VISIT)
            else:
                self._note_outside(local, left.passed)

    def here(self) -> Place:
        """Return the place of this thread."""
        local = self.local
        if local.here is None:
            self._begin(local, is_pass=False)
        return local.here  # type: ignore[return-value]

    def passed(self) -> int:
        """Return the pass that this thread computes, or that of the layer that a backward pass computes again."""
        node = torch._C._current_autograd_node()
        segment = None if node is None else self.segment_of(node._sequence_nr())
        return self.here().passed if segment is None else segment.passed

    def segment_of(self, number: int) -> Segment | None:
        """Return the segment of the node with this number: of this thread's graphs, or of the latest other thread's."""
        local = self._of_graph()
        index = bisect_right(local.starts, number) - 1
        return local.segments[index] if index >= 0 else None

    def operator_of(self, number: int) -> Operator | None:
        """Return the operator whose node has this number; None for other nodes."""
        return self._of_graph().operators.get(number)

    def note_operator(self, here: Place) -> None:
        """Note the node of the operator that has just been counted in `here`. Call it in its kernel."""
        # An operator without a node would take that of another, which was noted before.
        number = torch.autograd._get_sequence_nr() - 1
        self.local.operators.setdefault(number, Operator(here.passed, here.part, here.calls))

    def _of_graph(self) -> "_Graph | ThreadPlaces":
        """Return what this thread noted; on a GPU, where a thread of the device runs backward passes, the latest."""
        local = self.local
        return local if local.segments or self._latest is None else self._latest

    def _begin(self, local: ThreadPlaces, *, is_pass: bool = True) -> None:
        thread = threading.current_thread()
        number = 0 if thread.ident == self._thread else zlib.crc32(thread.name.encode()) >> 2
        local.passes += is_pass
        local.passed = local.passes + (number << 32) if is_pass else -1 - number
        local.stack.clear()
        local.names.clear()
        local.visits.clear()
        local.here = Place(local.passed, self.outside, 0, self._key_of(local.passed, self.outside), False)
        if torch.is_grad_enabled():
            self._note_outside(local, local.passed)

    def _note_outside(self, local: ThreadPlaces, passed: int) -> None:
        visit = local.visits.get(self.outside, 0)
        local.visits[self.outside] = visit + 1
        self._note(local, passed, self.outside, visit)

    def _note(self, local: ThreadPlaces, passed: int, part: int, visit: int) -> None:
        if len(local.segments) >= _KEPT_SEGMENTS:
            del local.segments[: _KEPT_SEGMENTS // 2], local.starts[: _KEPT_SEGMENTS // 2]
            local.operators = {node: at for node, at in local.operators.items() if node >= local.starts[0]}
        start = torch.autograd._get_sequence_nr()
        local.segments.append(Segment(start, passed, part, visit))
        local.starts.append(start)
        self._latest = _Graph(local.segments, local.starts, local.operators)


# -- the names of operators, as a parity names them: the error of each was measured separately -------------------------


def named_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear modules and norms of a decoder with the names of their operators: those of their modules."""
    found = {
        module: path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) or is_norm(module)
    }
    found |= {norm: name for name, norm in norms_outside_layers(model).items()}
    return found | {module: LM_HEAD for module in output_projection(model).modules() if isinstance(module, nn.Linear)}


def measured_name(operator: str, errors: LayerErrors, places: Places, here: Place) -> tuple[str, OperatorError]:
    """Return the name in receipts of the operator that computes, such as `mm.q_proj`, and its error.

    A product in a decoder layer that is of no linear module is one of attention: of queries and keys first, then of
    weights and values, or both in one operator. Raises ModelError for an operator that the parity does not measure.
    """
    place = {places.outside: "outside the layers", places.outside - 1: "lm_head"}.get(here.part, f"layer {here.part}")
    names = places.local.names
    if names:
        name = names[-1]
    elif here.part == places.outside or operator == NORM:
        raise ModelError(f"{place}: {operator} is no operator with a measured error")
    elif operator in FUSED_ATTENTION:
        name = ATTENTION
    elif here.others == len(_PRODUCTS_OF_ATTENTION):
        raise ModelError(
            f"{place} computes more than two products besides its linear modules, expected those of attention alone; a "
            "measured error cannot be put on them"
        )
    else:
        name = _PRODUCTS_OF_ATTENTION[here.others]
        here.others += 1
    error = errors.operators.get(name)
    if error is None:
        raise ModelError(
            f"{place}: the parity of the measured error has no operator {name}, found {', '.join(errors.operators)}"
        )
    return f"{operator}.{name}", error
