"""The audit of one phase on one model: which passes are observed, and whether what was observed is what was requested.

The first forward over prompts and the first over single tokens are observed as a whole, once per run or evaluation
pass. After that single layers are observed, and what is around the layers, each in forwards drawn at random with
decreasing frequency. The injection does not know the draw, and observed forwards run the same code as all others.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from aqnpipe.config.noise import FakeQuantization, Phase
from aqnpipe.models.calls import ForwardPasses, num_tokens
from aqnpipe.models.layout import select_modules
from aqnpipe.noise.audit.comparison import Comparison
from aqnpipe.noise.audit.judgement import HIDDEN_STATES, Judge, Origin, forward_origin
from aqnpipe.noise.audit.linear_check import LinearCheck
from aqnpipe.noise.audit.observer import Followed, Frame, Observer
from aqnpipe.noise.audit.parts import AuditedPart, norms_of, with_norms_outside
from aqnpipe.noise.audit.random_numbers import Position, key_at
from aqnpipe.noise.audit.weight_check import compare_norms
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

_EXPECTED_AUDITS = 4
_LEAST_SHARE = 1 / 64
"""The n-th forward of a phase in a run is observed with probability _EXPECTED_AUDITS/n, but at least this."""

_HIDDEN_NOISE_PHASES = ("rollout", "evaluation")
_SEVERAL = "several tokens"
_SINGLE = "one token"


class PhaseAudit:
    """The audit of one phase: which tensors have noise is reported by the injection, everything else is found here.

    `parts` are the layers and output projections in the order of their places. `position` is where the run is.
    `recorder` contains the request and receives the result. `observer` is active during an audited pass, otherwise
    None: the injection wraps each noised call in `observer.noised_call` and reports noised tensors to `observer.claim`.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[AuditedPart],
        phase: Phase,
        position: Position,
        recorder: ReceiptRecorder,
    ) -> None:
        self._model = model
        self._outside = parts[-1].place + 1
        self._phase: Phase = phase
        self._recorder = recorder
        self._noise = recorder.requested.operator_noise_in(phase)
        self._measures_norms = self._noise is not None and self._noise.has_measured_norms
        self._parts = with_norms_outside(model, parts) if self._measures_norms else parts
        self._quantizes = self._noise is not None and isinstance(self._noise.error, FakeQuantization)
        self._modules = recorder.requested.module_noise_in(phase)
        self.position = position._replace(forward=-1)
        # What is observed must not depend on how many numbers earlier observations drew.
        self._choices, self._rng, self._choices_around = (
            np.random.default_rng([key_at(position._replace(forward=0), f"audit.{phase}"), part]) for part in range(3)
        )
        self._names: dict[nn.Module, str] = {}
        self._handles: list[Callable[[], None]] = []
        self._later_handles: list[Callable[[], None]] = []
        self._around: Observer | None = None
        self._is_whole = False
        self._due_parts: dict[int, AuditedPart] = {}
        self._entered: set[int] = set()
        self._kind = _SEVERAL
        self._ranges: list[tuple[int, int, Frame]] = []
        self._range_starts: dict[int, int] = {}
        self._comparison = Comparison()
        self._linears = LinearCheck(self._rng)
        self.observer: Observer | None = None

    def install(self, stack: ExitStack, *, expects_backward: bool = False) -> None:
        """Register the hooks; `expects_backward`: the graph of this phase will be used by a backward pass."""
        stack.callback(self._close)
        self._register(
            stack.callback,
            *ForwardPasses(self._model, self._enter_model, self._leave_model).hooks(prepend=True),
        )
        if expects_backward:
            for part in self._parts:
                note = partial(self._note_gradient, part)
                self._register(stack.callback, part.module.register_forward_pre_hook(note, with_kwargs=True))
        if expects_backward and self._recorder.wants_backward_audit(float(self._choices.random())):
            for part in self._parts:
                self._register(
                    stack.callback,
                    part.module.register_forward_pre_hook(partial(self._open_range, part)),
                    part.module.register_forward_hook(partial(self._close_range, part), always_call=True),
                )
            self._recorder.pending_audits.append(self)

    def compare_linear(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, is_noised: bool
    ) -> None:
        """Compare the output of a linear module of an engine with plain torch: its size of noise, or exactly."""
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self._linears.compare_engine(inputs, weight, bias, output, is_noised)

    # -- forwards ------------------------------------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        _call_all(self._later_handles)
        self._entered.clear()
        self.position = self.position._replace(forward=self.position.forward + 1)
        self._kind = self._kind_of(args, kwargs)
        number = self._recorder.num_forwards(self._phase) + 1
        self._is_whole = self._recorder.lacks_whole_audit(self._phase, self._kind)
        # So what begins with forward k of n is missed with probability (k - 1) / n.
        is_around = self._is_whole or self._choices_around.random() < 1 / number
        is_inside = self._is_whole or self._choices.random() < max(_LEAST_SHARE, _EXPECTED_AUDITS / number)
        if not (is_around or is_inside):
            return
        compare_norms(
            self._model, self._phase, self.position, self._recorder, self._comparison, self._rng, self._norm_sigma
        )
        observer = self._new_observer()
        if is_around:
            self._around = observer
            self._start(observer, self._frame(self._outside, None, self._model))
        chosen = self._chosen_parts(is_inside)
        self._due_parts = {
            part.place: part for part in chosen if part.norm is not None and self._noise and self._noise.is_in(None)
        }
        for part in chosen:
            self._register(
                (self._later_handles if part.runs_after_model else self._handles).append,
                part.module.register_forward_pre_hook(partial(self._enter_part, observer, part), prepend=True),
                part.module.register_forward_hook(partial(self._leave_part, observer, part), always_call=True),
            )
        if is_around:
            self._pass_over(observer, [part for part in self._parts if part not in chosen])

    def _chosen_parts(self, is_inside: bool) -> Sequence[AuditedPart]:
        if self._is_whole:
            return self._parts
        return [self._parts[int(self._choices.integers(len(self._parts)))]] if is_inside else []

    def _pass_over(self, observer: Observer, parts: Sequence[AuditedPart]) -> None:
        """Do not observe `parts` in this forward, in which `observer` observes what is around them."""
        # Parts may lie within each other: a norm in an output projection.
        running: list[nn.Module] = []

        def stop(module: nn.Module, args: Any) -> None:
            if not running:
                observer.pause()
                self.observer = None
            running.append(module)

        def go_on(module: nn.Module, args: Any, output: Any) -> None:
            running.remove(module)
            if not running:
                observer.go_on()
                self.observer = observer

        for part in parts:
            if not part.runs_after_model:
                self._register(
                    self._handles.append,
                    part.module.register_forward_pre_hook(stop, prepend=True),
                    part.module.register_forward_hook(go_on, always_call=True),
                )

    def _new_observer(self) -> Observer:
        return Observer(self._rng)

    def _kind_of(self, args: Any, kwargs: Mapping[str, Any]) -> str:
        return _SINGLE if num_tokens(args, kwargs) == 1 else _SEVERAL

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        _call_all(self._handles)
        has_ended = output is not None
        for part in self._due_parts.values() if has_ended else ():
            self._comparison.note(f"norm {self._name(part.module)}: it was never called")
        self._due_parts = {}
        if self._around is not None:
            observer, self._around = self._around, None
            self._stop(observer, output, has_ended=has_ended)
            if has_ended and self._is_whole:
                # One that an exception ended is no audit of the whole: the next forward of its kind is.
                self._recorder.note_whole_audit(self._phase, self._kind)
                self._recorder.count_flops(self._phase, observer.total, observer.noised)

    def _enter_part(self, observer: Observer, part: AuditedPart, module: nn.Module, args: Any) -> None:
        self._due_parts.pop(part.place, None)
        frame = self._frame(part.place, part.layer, module)
        if frame.error is not None and part.place in self._entered and part.norm is None and not part.runs_after_model:
            self._comparison.note(
                f"{frame.name} ran again in the same forward pass, with the random numbers of its first call; expected "
                "one call of each layer and of the output projection"
            )
        self._entered.add(part.place)
        if self._around is None:
            self._start(observer, frame)
        else:
            observer.enter(frame)
        self._linears.install(observer, module, frame.name, frame.error)
        self._expect_norms(observer, frame, part, self._handles.append)
        self._expect_modules(observer, frame)

    def _leave_part(self, observer: Observer, part: AuditedPart, module: nn.Module, args: Any, output: Any) -> None:
        self._linears.remove()
        # vLLM's logits are None on workers that do not sample.
        if output is None and not part.runs_after_model:
            if self._around is None:
                self._stop(observer, output, has_ended=False)
            else:
                observer.abandon()
            return
        if observer.frame is not None:
            for name in observer.frame.due_norms.values():
                self._comparison.note(f"norm {name} of {observer.frame.name}: it was never called")
        self._expect_hidden(observer, part, output)
        self._recorder.count_audit(self._phase, self._kind)
        if self._around is None:
            self._stop(observer, output)
        else:
            observer.leave(output)

    def _start(self, observer: Observer, frame: Frame) -> None:
        observer.enter(frame)
        observer.__enter__()
        self.observer = observer

    def _stop(self, observer: Observer, output: Any, *, has_ended: bool = True) -> None:
        if has_ended:
            observer.leave(output)
        else:
            observer.abandon()
        observer.__exit__(None, None, None)
        self.observer = None
        for what, calls in observer.escapes.items():
            self._recorder.count_escape(self._phase, what, calls)
        self._recorder.count_classified(self._phase, observer.classified)
        self._judge(forward_origin).judge(observer)
        observer.forget()

    def _frame(self, place: int, layer: int | None, module: nn.Module) -> Frame:
        is_outside = place == self._outside
        error = self._noise.error_in(layer) if self._noise is not None and not is_outside else None
        wants_all = self._noise is not None and self._noise.layers is None
        return Frame(
            self._phase,
            self.position,
            place,
            layer,
            error,
            module,
            self._name(module),
            refuses_weights=is_outside and wants_all,
            # A quantization changes the operands of products with a weight, and no other product.
            refuses_products=is_outside and wants_all and not self._quantizes,
            noises_elementwise=self._noise is not None and self._noise.operators == "all",
        )

    def _judge(self, origin_of: Callable[[Followed], Origin | None]) -> Judge:
        return Judge(self._comparison, self._recorder, self._modules, self._outside, origin_of, self._hidden_sigma)

    def _name(self, module: nn.Module) -> str:
        if not self._names:
            self._names = {other: name for name, other in self._model.named_modules()}
        return self._names.get(module, type(module).__name__)

    def _register(self, keep: Callable[[Callable[[], None]], Any], *handles: Any) -> None:
        for handle in handles:
            keep(handle.remove)

    def _close(self) -> None:
        """End the phase, also after an exception in the middle of an observed forward."""
        _call_all(self._handles)
        _call_all(self._later_handles)
        self._linears.remove()
        if self.observer is not None:
            self.observer.__exit__(None, None, None)
            self.observer = None
        self._report(self._phase)

    def _report(self, phase: Phase) -> None:
        found, in_linears = self._comparison, self._linears.comparison
        self._recorder.add_audit(
            phase,
            found.numbers + in_linears.numbers,
            found.largest_deviation,
            # Wrong noise shows in the outputs of linear modules too, but that is the same problem.
            found.contradictions or in_linears.contradictions,
            self._linears.sums,
        )
        found.clear()
        self._linears.clear()

    # -- module noise, and AQN on hidden states ------------------------------------------------------------------------

    def _expect_modules(self, observer: Observer, frame: Frame) -> None:
        """Check that every module selected for module noise has it when its hooks have run."""
        if self._modules is None or frame.place == self._outside:
            return
        for name, module in select_modules(self._model, self._modules.modules, self._modules.exclude).items():
            if name != frame.name and name.startswith(f"{frame.name}."):
                self._expect_noise_at(module, observer, name)

    def _expect_norms(
        self, observer: Observer, frame: Frame, part: AuditedPart, keep: Callable[[Callable[[], None]], Any]
    ) -> None:
        """Follow the results of the norms of a part that was requested to have measured errors, before its hooks."""
        if not self._measures_norms or frame.error is None:
            return
        frame.due_norms = {norm: name for name, norm in norms_of(part)}
        for norm, name in frame.due_norms.items():
            expect = partial(self._expect_norm, observer, frame, name)
            self._register(keep, norm.register_forward_hook(expect, prepend=True))

    def _expect_norm(
        self, observer: Observer, frame: Frame, name: str, module: nn.Module, args: Any, output: Any
    ) -> None:
        if observer.frame is not frame:
            # Layers may share a norm: this call belongs to another one, whose own hook follows it.
            return
        frame.due_norms.pop(module, None)
        if not observer.expect_norm(output, name):
            self._comparison.note(f"norm {name}: its result is no tensor that was made where it runs")

    def _expect_noise_at(self, module: nn.Module, observer: Observer, name: str) -> None:
        """Check the input or output of `module`, where module noise on the module called `name` is applied."""
        check = partial(self._expect_noise, observer, f"module {name}")
        if self._modules is not None and self._modules.point == "input":
            handle = module.register_forward_pre_hook(lambda _, args: check(args[0]))
        else:
            handle = module.register_forward_hook(
                lambda _, args, output: check(output[0] if isinstance(output, tuple) else output)
            )
        self._handles.append(handle.remove)

    def _expect_noise(self, observer: Observer, what: str, tensor: Tensor) -> None:
        if not observer.is_noised(tensor):
            self._comparison.note(f"{what}: its {self._modules.point if self._modules else 'value'} has no noise")

    def _expect_hidden(self, observer: Observer, part: AuditedPart, output: Any) -> None:
        """Check that what a decoder layer returns is the tensor that AQN's noise was put on."""
        layer = part.layer
        if layer is None or not self._hidden_sigma(layer):
            return
        states = output[0] if isinstance(output, tuple) else output
        claimed = any(claim.operator == HIDDEN_STATES and claim.layer == layer for claim in observer.claims)
        # A fault of the layer's output comes after the noise and makes a tensor of its own.
        faults = self._recorder.requested.faults
        is_faulty = any((fault.layer, fault.site) == (layer, "layer_output") for fault in faults)
        if not claimed or not (is_faulty or observer.is_noised(states)):
            self._comparison.note(f"AQN: the hidden states of layer {layer} have no noise")

    def _norm_sigma(self, name: str) -> float:
        """Return the sigma that AQN's noise on the norm called `name` should have in this rollout."""
        return self._recorder.requested_sigma(self.position.step, name)

    def _hidden_sigma(self, layer: int) -> float:
        """Return the sigma that AQN's noise on the hidden states of `layer` should have in this phase."""
        aqn = self._recorder.requested.aqn
        phases = (*_HIDDEN_NOISE_PHASES, "actor_forward") if aqn and aqn.actor_forward else _HIDDEN_NOISE_PHASES
        if aqn is None or aqn.targets != "hidden_states" or self._phase not in phases:
            return 0.0
        return self._recorder.requested_sigma(self.position.step, layer)

    # -- backward passes -----------------------------------------------------------------------------------------------

    def _note_gradient(self, part: AuditedPart, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        needed = any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves((args, dict(kwargs))))
        self._recorder.note_gradient(self._phase, part.place, needed)

    def _open_range(self, part: AuditedPart, module: nn.Module, args: Any) -> None:
        self._range_starts[part.place] = torch.autograd._get_sequence_nr()

    def _close_range(self, part: AuditedPart, module: nn.Module, args: Any, output: Any) -> None:
        start = self._range_starts.pop(part.place, None)
        if start is not None:
            frame = self._frame(part.place, part.layer, module)
            self._ranges.append((start, torch.autograd._get_sequence_nr(), frame))

    def origin_of_node(self, node: int | None) -> Origin | None:
        """Return where the autograd node with this number was made; None if not in an audited part of this phase."""
        index = bisect_right(self._ranges, node, key=lambda entry: entry[0]) - 1 if node is not None else -1
        if node is None or index < 0 or node >= self._ranges[index][1]:
            return None
        frame = self._ranges[index][2]
        noise = self._recorder.requested.operator_noise_in("backward")
        error = noise.error_in(frame.layer) if noise is not None else None
        return Origin(
            "backward",
            frame.phase,
            frame.position,
            frame.place,
            frame.layer,
            error,
            needs_noise=error is not None,
            name=frame.name,
        )

    def recompute(self, part_number: int, forward: int, stack: ExitStack) -> None:
        """Observe a checkpointed layer that a backward pass computes again, if that pass is observed."""
        observer, part = self.observer, self._parts[part_number]
        if observer is None:
            return
        frame = self._frame(part.place, part.layer, part.module)
        frame.position, frame.is_recomputed = self.position._replace(forward=forward), True
        started: list[int] = []

        def enter(module: nn.Module, args: Any) -> None:
            started.append(torch.autograd._get_sequence_nr())
            observer.enter(frame)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            observer.leave(output)
            # Reentrant checkpoints run a backward pass of their own through this graph.
            self._ranges.append((started.pop(), torch.autograd._get_sequence_nr(), frame))

        self._expect_norms(observer, frame, part, stack.callback)
        self._register(
            stack.callback,
            part.module.register_forward_pre_hook(enter, prepend=True),
            part.module.register_forward_hook(leave, always_call=True),
        )


@contextmanager
def audited_backward(model: nn.Module, recorder: ReceiptRecorder) -> Iterator[None]:
    """Observe the backward pass in the body, if the audits of its forwards decided so.

    Contradictions are recorded for the receipt; nothing is raised here.
    """
    recorder.is_in_backward = True
    try:
        with _observed_backward(model, recorder):
            yield
    finally:
        recorder.is_in_backward = False


@contextmanager
def _observed_backward(model: nn.Module, recorder: ReceiptRecorder) -> Iterator[None]:
    audits: list[PhaseAudit] = list(recorder.pending_audits)
    recorder.pending_audits.clear()
    if not audits:
        yield
        return
    first = audits[0]
    observer = Observer(first._rng)
    frame = Frame("backward", first.position, -1, None, None, model, "", is_backward=True)

    def origin_of(followed: Followed) -> Origin | None:
        if not followed.frame.is_backward:
            return forward_origin(followed)
        origins = (audit.origin_of_node(followed.node) for audit in audits)
        return next((origin for origin in origins if origin is not None), None)

    observer.enter(frame)
    for audit in audits:
        audit._report(audit._phase)
        audit.observer = observer
    try:
        with observer:
            yield
    finally:
        for audit in audits:
            audit.observer = None
    observer.leave(None)
    recorder.count_audit("backward", "backward")
    first._judge(origin_of).judge(observer)
    first._report("backward")


def _call_all(functions: list[Callable[[], None]]) -> None:
    """Call and forget all functions."""
    while functions:
        functions.pop()()
