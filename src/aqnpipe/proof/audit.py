"""The audit of a noisy machine: a dispatch mode above the kernels, in drawn passes.

It sees the operands and the result of every operator as the program gets them, and compares (`operators`). It follows
the place by hooks of its own, by the definition in `machine/places.py`, and shares no code with the machine.

Audited are the first pass of each kind (several tokens or one per row, with gradients or without) as a whole, then
single parts in passes drawn with decreasing probability; and the backward pass of passes that were audited as a whole.
The machine cannot know which.
"""

import binascii
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.errors import ModelError
from aqnpipe.models.parts import PlaceHook, hooks_around, num_tokens
from aqnpipe.proof.comparison import compare_exact
from aqnpipe.proof.observation import VISIT, AuditThread, Observation, Visit, watch_backward
from aqnpipe.proof.operations import machine_name
from aqnpipe.proof.operators import OperatorAudit
from aqnpipe.proof.outputs import OutputWatch
from aqnpipe.proof.random_numbers import Draws
from aqnpipe.proof.receipt import MachineReceipt, cell_of
from aqnpipe.proof.recompute import Arguments, Shards, in_whole
from aqnpipe.proof.request import AuditRequest
from aqnpipe.proof.watches import PLAIN, Watches, factors_of, linears_of, product_node, watch_unobserved

_EXPECTED_AUDITS = 4
_LEAST_SHARE = 1 / 64
_LEAST_WHOLE_SHARE = 1 / 512
_PASSES_FOR_BACKWARD = 8
_MOST_CALLS = 256
ONE_TOKEN, SEVERAL_TOKENS, WITH_GRADIENTS = "one token", "several tokens", " with gradients"
"""Kinds of passes."""

SINGLE_LAYERS = "single layers"
"""Passes of which a part was observed."""


class Audit(OperatorAudit):
    """Audits one machine: chooses the passes to observe. `before_observed` is called before an observed pass.

    `reads_one_token` returns of the arguments of a pass whether it reads one token of each row.
    """

    before_observed: Callable[[], None] = staticmethod(lambda: None)
    reads_one_token: Callable[[Any, Any], bool] = staticmethod(lambda args, kwargs: num_tokens(args, kwargs) == 1)

    def __init__(self, request: AuditRequest, receipt: MachineReceipt, outside: int) -> None:
        super().__init__(request, receipt, outside)
        self._models: dict[nn.Module, Mapping[int, nn.Module]] = {}
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._observes_gradients = request.backward or self._is_quantized

    def add_model(
        self, roots: Sequence[nn.Module], modules: Mapping[int, nn.Module], names: Mapping[int, str]
    ) -> list[Any]:
        """Audit a model: an outermost call of one of `roots` is a pass, `modules` are its parts by number."""
        self._names |= names
        self._models |= dict.fromkeys(roots, modules)
        return [handle for root in roots for handle in hooks_around(root, self.enter, None, self._leave)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Audit backward passes too, in the body."""
        end = watch_backward(self.backward)
        try:
            yield
        finally:
            end()
            self._local.close("current", "pending")
            self._local.forget_unobserved()

    # -- passes --------------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Begin a pass, unless this call is a part of one. Raises ModelError for a replica of the model."""
        local = self._local
        if os.getpid() != self._process:
            return
        if module not in self._models:
            raise ModelError(
                f"a replica of {type(module).__name__} (DataParallel) is called on a simulated machine, expected the "
                "model itself, on one device"
            )
        if module in local.running:
            local.running.clear()
        local.running.append(module)
        if len(local.running) > 1 or torch._C._current_autograd_node() is not None:
            return
        local.close("current")
        with self._lock:
            self.receipt.forward.passes += 1
            number = self.receipt.forward.passes
        local.passes += 1
        local.forget_unobserved()
        if local.pending is not None:
            # The nodes that follow are of another pass.
            local.pending.note_start(None, self._outside, 0)
        # Each root of its own: a loss that is a module has no products, and says nothing about the model.
        root, has_gradients = list(self._models).index(module), torch.is_grad_enabled()
        kind = ONE_TOKEN if self.reads_one_token(args, kwargs) else SEVERAL_TOKENS
        kind += ("" if root == 0 else f" of model {root}") + (WITH_GRADIENTS if has_gradients else "")
        chance, share = float(self._draw.rng.random()), max(_LEAST_SHARE, _EXPECTED_AUDITS / number)
        self.receipt.forward.gradient_passes += has_gradients
        lacks_backward = has_gradients and self.request.backward and not self._has_backward()
        is_new = kind not in self.receipt.forward.audited_whole or lacks_backward
        parts = self._models[module]
        if is_new or chance < max(_LEAST_WHOLE_SHARE, 1 / number):
            self._observe(local, parts, kind)
        elif parts and chance < share:
            part = int(self._draw.rng.choice(list(parts)))
            self._observe(local, {part: parts[part]}, None)
            self._check_unobserved(local, {one: each for one, each in parts.items() if one != part})
        elif float(self._draw.rng.random()) < share:
            self._check_unobserved(local, parts)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        local = self._local
        if not local.running or local.running[-1] is not module:
            return
        local.running.pop()
        if not local.running:
            local.forget_unobserved()
        current = local.current
        if local.running or current is None or torch._C._current_autograd_node() is not None:
            return
        local.current = None
        # Between passes nothing is observed: a mode that stayed on could end up in the middle of the program's own.
        current.switch_off()
        if current.kind is not None and output is not None:
            self.receipt.forward.audited_whole.add(current.kind)
            for where in current.uncalled_norms.values():
                self.receipt.note(f"{where} was never called")
            for one in self.request.outputs:
                if one.faults and one.module not in current.compared_outputs:
                    self.receipt.note(f"{one.where} was not computed again, and its fault not proven")
            if not self.receipt.forward.flops and self.request.counts_operations:
                self.receipt.forward.add(flops=current.operations, noised_flops=current.noised_operations)
            if (self._observes_gradients or self.checks_exact) and current.kind.endswith(WITH_GRADIENTS):
                local.close("pending")
                local.pending = current
                return
        if self.request.late:
            # Until the next pass begins.
            local.current = current
        else:
            current.close()

    def _observe(self, local: AuditThread, modules: Mapping[int, nn.Module], kind: str | None) -> None:
        """Observe this pass: all of it if it has a kind, otherwise the given part alone."""
        request, receipt = self.request, self.receipt
        self.before_observed()
        receipt.forward.add(audited_passes={SINGLE_LAYERS if kind is None else kind: 1})
        earlier = local.pending if kind is not None and kind.endswith(WITH_GRADIENTS) else None
        observation = local.current = Observation(self.observe, kind, self._passed(local), self._outside)
        if earlier is not None:
            # A backward pass may be through both graphs, or through the earlier one.
            local.close("pending")
            observation.starts, observation.calls = earlier.starts, earlier.calls
        for part, module in modules.items():
            enter, leave = partial(self._enter_part, observation, part), partial(self._leave_part, observation)
            observation.watch(module, enter, leave)
        # The outermost model that has these parts.
        model = next(root for root, parts in self._models.items() if modules.items() <= parts.items())
        watches = Watches(request, observation, modules, self._names, receipt.note, receipt.note_escape)
        watches.install(model, self._outside)
        outputs = [one for one in request.outputs if kind is not None or one.part in modules]
        OutputWatch(observation, self._fault_key, receipt.note).install(outputs)
        for part, module in modules.items():
            if kind is None or part in request.late:
                # Behind all other hooks of the part: errors on its output belong to it.
                observation.watch(module, None, None, partial(self._end_part, observation))
        if kind is not None:
            observation.note_start(observation.passed, self._outside, observation.next_visit(self._outside))
            observation.switch_on()

    def _has_backward(self) -> bool:
        """Return whether a backward pass was compared, or so many were not that it would cost too much to go on."""
        return self.receipt.forward.gradient_passes > _PASSES_FOR_BACKWARD or any(
            row.recomputed for row in list(self.receipt.rows.values()) if row.phase == "backward"
        )

    def _check_unobserved(self, local: AuditThread, modules: Mapping[int, nn.Module]) -> None:
        """Compare the output of one linear module in a pass that is not observed."""
        linears = list(linears_of(self.request, modules, self._names).items())
        if linears:
            linear, (part, _) = linears[int(self._draw.rng.integers(len(linears)))]
            compared = partial(self._compare_unobserved, part, self._passed(local))
            local.unobserved += watch_unobserved(linear, modules[part], compared)

    def _compare_unobserved(self, part: int, passed: int, module: nn.Module, args: Any, output: Any) -> None:
        factors = factors_of(module, args, output)
        operators = self.request.operators
        if factors is None or (operators is not None and machine_name(factors[0]) not in operators):
            return
        operator, arguments, result = factors
        _, shards = self.request.shards.get(module, (part, None))
        self._compare_without_mode(self.request.stream, passed, part, operator, arguments, result, (0,), shards)
        node = product_node(output) if isinstance(output, Tensor) and output.requires_grad else None
        if node is not None:
            first, second = list(arguments.values())[-2:]
            node.register_hook(PlaceHook(partial(self._compare_gradients, passed, part, first, second, count(1))))

    def _compare_gradients(
        self, passed: int, part: int, first: Tensor, second: Tensor, runs: Iterator[int], gradients: Any, arrived: Any
    ) -> None:
        """Compare the gradients of both factors of a product in a pass that is not observed."""
        # Two products each time; of a second backward pass they may be numbered from the first ones on.
        streams = range(1, 2 * next(runs) + 1)
        # With `create_graph` gradients have the random numbers of results. An observed backward pass sees them too.
        if torch.is_grad_enabled() or self._local.current is not None or arrived[0] is None:
            return
        outer = arrived[0].detach()
        for gradient, (left, right) in zip(gradients[-2:], ((outer, second.t()), (first.t(), outer)), strict=True):
            if type(gradient) in PLAIN and gradient.layout == torch.strided and gradient.dtype == left.dtype:
                arguments = {"first": left, "second": right}
                self._compare_without_mode("backward", passed, part, "mm", arguments, gradient.detach(), streams)

    def _compare_without_mode(
        self,
        phase: str,
        passed: int,
        part: int,
        operator: str,
        arguments: Arguments,
        result: Tensor,
        streams: Sequence[int],
        shards: Shards | None = None,
    ) -> None:
        """Compare a result of a pass that is not observed; the number of its call is not known there."""
        is_noised = phase != "backward" or self.request.backward
        error: Any = self.request.error_at(part) if is_noised else None
        cell = cell_of(phase, self._names[part], operator, result.dtype)
        (found,) = self._sample_of(operator, arguments, result)
        if found is None:
            return
        if shards is not None:
            found = in_whole(found, result, shards)
        if error is None:
            if self.checks_exact:
                self.receipt.add(cell, **compare_exact(found))
            return
        key = self._key(phase, passed, part)
        numbers = ((call, stream) for call in range(1, _MOST_CALLS) for stream in streams)
        self._compare(cell, found, error, result.dtype, (Draws.of(key, *number) for number in numbers))

    def _passed(self, local: AuditThread) -> int:
        """Return the number of the present pass: that in its thread, and behind it that of the thread."""
        name = threading.current_thread().name.encode("utf-8")
        thread = 0 if threading.get_ident() == self._thread else binascii.crc32(name) // 4
        return local.passes + (thread << 32)

    def _enter_part(self, observation: Observation, part: int, *_: Any) -> None:
        if observation is not self._local.current:
            return
        node = torch._C._current_autograd_node()
        if node is None:
            passed, visit = observation.passed, observation.next_visit(part)
        else:
            start = observation.start_of(node._sequence_nr())
            passed = observation.passed if start is None else start.passed
            visit = start.visit if start is not None and start.part == part else 0
        # A layer of a pass that was not observed is computed again.
        is_lost = node is not None and start is None
        observation.stack.append(Visit(passed, part, visit * VISIT, node is not None, is_lost))
        observation.note_start(None if is_lost else passed, part, visit)
        if (observation.kind is None or part in self.request.late) and node is None and not observation.is_on:
            observation.switch_on()

    def _leave_part(self, observation: Observation, *_: Any) -> None:
        if observation is not self._local.current or len(observation.stack) < 2:
            return
        left, here = observation.stack.pop(), observation.stack[-1]
        if observation.kind is None:
            return
        if here.part == self._outside:
            observation.note_start(left.passed, self._outside, observation.next_visit(self._outside))
        else:
            observation.note_start(here.passed, here.part, here.calls // VISIT)

    def _end_part(self, observation: Observation, *_: Any) -> None:
        is_again = torch._C._current_autograd_node() is not None
        if observation is self._local.current and len(observation.stack) == 1 and not is_again:
            observation.switch_off()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Observe a backward pass if a forward pass of its graph was observed as a whole."""
        local = self._local
        is_outermost = torch._C._current_autograd_node() is None
        self.receipt.backward.passes += is_outermost
        pending = local.pending
        if not is_outermost or pending is None or local.current is not None:
            yield
            return
        local.current, local.pending = pending, None
        self.receipt.backward.add(audited_passes={"backward": 1})
        pending.switch_on()
        try:
            yield
        finally:
            pending.close()
            local.current = None
            if (missing := pending.expected_gradients - pending.norm_gradients) > 0:
                self.receipt.note_escape("the gradient of a norm's input", missing)
