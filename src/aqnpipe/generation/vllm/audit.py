"""The audit of one batch on one worker's model: which passes are observed, and whether all noise is where it should be.

The first forward over prompts and the first over single tokens are observed as a whole, once per pass over prompts.
After that single layers are observed, and what is around the layers, each in forwards drawn at random with decreasing
frequency. The injection does not know the draw, and observed forwards run the same code as all others.

The audit shares no code with the injection: neither kernels nor keys.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from aqnpipe.config.noise import Phase
from aqnpipe.generation.vllm.claim import HIDDEN_STATES
from aqnpipe.generation.vllm.judgement import Judge
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.generation.vllm.observer import EngineObserver, Part
from aqnpipe.models.layout import layer_of
from aqnpipe.noise.audit.comparison import Comparison
from aqnpipe.noise.audit.random_numbers import Position, key_at
from aqnpipe.noise.audit.weight_check import compare_norms
from aqnpipe.noise.injection.hooks import keep
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.rows import ReferenceSums

FORWARD_KINDS = ("several tokens", "one token")
"""The kinds of forward passes of a batch, in their order."""

_EXPECTED_AUDITS = 4
_LEAST_SHARE = 1 / 64
"""The n-th forward of a phase in a run is observed with probability _EXPECTED_AUDITS/n, but at least this."""


class EngineAudit:
    """The audit of one batch: which tensors have noise is reported by the injection, everything else is found here.

    `position` is where the run is. `recorder` contains the request and receives the result. `hidden_sigmas`: AQN on
    hidden states, by layer. `norm_sigmas`: AQN on norm weights, by name.
    """

    def __init__(
        self,
        engine: EngineModel,
        phase: Phase,
        position: Position,
        recorder: ReceiptRecorder,
        hidden_sigmas: Mapping[int, float],
        norm_sigmas: Mapping[str, float],
    ) -> None:
        self._engine = engine
        self._phase: Phase = phase
        self._recorder = recorder
        self._hidden_sigmas = hidden_sigmas
        self._norm_sigmas = norm_sigmas
        self._position = position._replace(forward=-1)
        self._modules = recorder.requested.module_noise_in(phase)
        *self._parts, self._outside = _parts(engine, recorder, phase)
        # What is observed must not depend on how many numbers earlier observations drew.
        self._choices, self._rng, self._choices_around = (
            np.random.default_rng([key_at(position._replace(forward=0), f"audit.{phase}"), part]) for part in range(3)
        )
        self._comparison = Comparison()
        self._judge = Judge(self._comparison, recorder, phase, self._modules, self._outside.place, self._hidden_sigma)
        # The first forward has an observer of its own.
        self._observer = EngineObserver(np.random.default_rng(0))
        self._entered: set[int] = set()
        # Of the present forward, with what is called after it; and of the part that computes.
        self._handles, self._inside = ExitStack(), ExitStack()

    @property
    def observer(self) -> EngineObserver | None:
        """The observer of an audited pass, else None.

        The injection wraps each noised call in its `noised_call`, and reports noised tensors to its `claim`.
        """
        return self._observer if self._observer.is_on else None

    def install(self, stack: ExitStack) -> None:
        """Register the hooks, after all others; `stack` removes them."""
        stack.callback(self._close)
        keep(stack, self._engine.model.register_forward_pre_hook(self._enter_model, prepend=True))
        keep(stack, self._engine.model.register_forward_hook(self._leave_model, always_call=True))

    # -- forwards ------------------------------------------------------------------------------------------------------

    @property
    def _kind(self) -> str:
        # Rows of a vLLM batch can have different numbers of tokens. All prompts are read first, mostly in one forward.
        return FORWARD_KINDS[min(self._position.forward, 1)]

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        self._handles.close()
        self._entered.clear()
        self._position = self._position._replace(forward=self._position.forward + 1)
        number = self._recorder.num_forwards(self._phase) + 1
        is_whole = self._recorder.lacks_whole_audit(self._phase, self._kind)
        # So what begins with forward k of n is missed with probability (k - 1) / n.
        is_around = is_whole or self._choices_around.random() < 1 / number
        is_inside = is_whole or self._choices.random() < max(_LEAST_SHARE, _EXPECTED_AUDITS / number)
        if not (is_around or is_inside):
            return
        compare_norms(
            self._engine.model,
            self._phase,
            self._position,
            self._recorder,
            self._comparison,
            self._rng,
            lambda name: self._norm_sigmas.get(name, 0.0),
        )
        self._observer = EngineObserver(self._rng)
        if is_around:
            self._observer.enter(self._outside)
        chosen = self._parts if is_whole else []
        if is_inside and not is_whole:
            chosen = [self._parts[int(self._choices.integers(len(self._parts)))]]
        for part in self._parts:
            if part in chosen:
                enter, leave = partial(self._enter_part, part), partial(self._leave_part, part)
                keep(self._handles, part.module.register_forward_pre_hook(enter, prepend=True))
                keep(self._handles, part.module.register_forward_hook(leave, always_call=True))
            elif is_around and not part.runs_after_model:
                keep(self._handles, part.module.register_forward_pre_hook(self._pass_over, prepend=True))
                keep(self._handles, part.module.register_forward_hook(self._go_on, always_call=True))

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._observer.is_on:
            self._leave(output, has_ended=output is not None)
            if output is not None:
                # What is around the layers is observed in a whole forward, or after the first one of its kind. One that
                # an exception ended is no audit of the whole: the next forward of its kind is.
                self._recorder.note_whole_audit(self._phase, self._kind)

    def _pass_over(self, module: nn.Module, args: Any) -> None:
        self._observer.pause()

    def _go_on(self, module: nn.Module, args: Any, output: Any) -> None:
        self._observer.go_on()

    def _enter_part(self, part: Part, module: nn.Module, args: Any) -> None:
        if part.error is not None and part.place in self._entered and not part.runs_after_model:
            self._comparison.note(
                f"{part.name} ran again in the same forward pass; expected one call of each layer and of the output "
                "projection"
            )
        self._entered.add(part.place)
        self._observer.enter(part)
        self._expect_modules(part)

    def _leave_part(self, part: Part, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.close()
        # Logits are None on workers that do not sample.
        has_ended = output is not None or part.runs_after_model
        if has_ended:
            self._expect_hidden(part, output)
            self._recorder.count_audit(self._phase, self._kind)
        self._leave(output, has_ended=has_ended)

    def _leave(self, output: Any, *, has_ended: bool) -> None:
        """End the pass of a part; if none is around it, judge what was seen."""
        observer = self._observer
        observer.leave(output, has_ended=has_ended)
        if observer.is_on:
            return
        for what, calls in observer.escapes.items():
            self._recorder.count_escape(self._phase, what, calls)
        self._recorder.count_classified(self._phase, observer.classified)
        self._judge.judge(observer, self._position)
        observer.forget()

    def _close(self) -> None:
        """End the batch, also after an exception in the middle of an observed forward."""
        self._handles.close()
        self._inside.close()
        self._observer.close()
        found = self._comparison
        sums = found.numbers, found.largest_deviation, found.contradictions
        self._recorder.add_audit(self._phase, *sums, ReferenceSums())

    # -- module noise, and AQN on hidden states ------------------------------------------------------------------------

    def _expect_modules(self, part: Part) -> None:
        """Check that every module of a part that was selected for module noise has it when its hooks have run."""
        if self._modules is None:
            return
        projections, modules = self._engine.projections(), dict(self._engine.model.named_modules())
        for name in self._engine.select(self._modules.modules, self._modules.exclude):
            kind = name.rpartition(".")[2]
            if not name.startswith(f"{part.name}.") and (part.layer is not None or kind != "lm_head"):
                continue
            expect = partial(self._expect_noise, f"module.{kind}", layer_of(name))
            if self._modules.point == "input":
                tap = projections[name].input if name in projections else self._engine.norm_inputs[name]
                expect = partial(expect, f"module {name}: its input has no noise", "")
                keep(self._inside, tap.register_forward_pre_hook(partial(_with_input, expect)))
            else:
                tap = projections[name].output if name in projections else modules[name]
                expect = partial(expect, f"module {name}: its output has no noise", kind)
                keep(self._inside, tap.register_forward_hook(partial(_with_output, expect)))

    def _expect_hidden(self, part: Part, output: Any) -> None:
        """Check that what a decoder layer returns is the tensor that AQN's noise was put on."""
        if part.layer is not None and self._hidden_sigma(part.layer):
            line = f"AQN: the hidden states of layer {part.layer} have no noise"
            expect = partial(self._expect_noise, HIDDEN_STATES, part.layer, line, "layer_output")
            _with_output(expect, part.module, (), output)

    def _expect_noise(self, operator: str, layer: int | None, line: str, site: str, tensor: Tensor) -> None:
        """Note `line` if `tensor` is not the one that noise of `operator` was put on."""
        claimed = any((claim.operator, claim.layer) == (operator, layer) for claim in self._observer.claims)
        # A fault at its site comes after the noise and makes a tensor of its own.
        is_faulty = any((fault.layer, fault.site) == (layer, site) for fault in self._recorder.requested.faults)
        if not claimed or not (is_faulty or self._observer.is_noised(tensor)):
            self._comparison.note(line)

    def _hidden_sigma(self, layer: int) -> float:
        return self._hidden_sigmas.get(layer, 0.0)


def _with_input(expect: Callable[[Tensor], None], module: nn.Module, args: Any) -> None:
    expect(args[0])


def _with_output(expect: Callable[[Tensor], None], module: nn.Module, args: Any, output: Any) -> None:
    expect(output[0] if isinstance(output, tuple) else output)


def _parts(engine: EngineModel, recorder: ReceiptRecorder, phase: Phase) -> list[Part]:
    """Return the decoder layers, the output projection, which is called after the model's forward, and what is around.

    An arm that names its layers accepts products around them.
    """
    noise = recorder.requested.operator_noise_in(phase)
    num_layers, names = len(engine.layers), {module: name for name, module in engine.model.named_modules()}

    def part(place: int, layer: int | None, module: nn.Module, **settings: Any) -> Part:
        error = noise.error_in(layer) if noise is not None else None
        is_elementwise = noise is not None and noise.operators == "all"
        return Part(place, layer, module, names[module], error, is_elementwise, **settings)

    layers = [part(index, index, layer.module) for index, layer in enumerate(engine.layers)]
    num_logits = engine.head.projections[0].width
    heads = [part(num_layers, None, logits, num_logits=num_logits, runs_after_model=True) for logits in engine.logits]
    refuses_products = noise is not None and noise.layers is None
    return [*layers, *heads, Part(num_layers + 1, None, engine.model, "", refuses_products=refuses_products)]
