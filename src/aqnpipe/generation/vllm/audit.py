"""The audit on vLLM: which of its modules are parts with noise, and how its operators differ from torch's.

- It has operators of its own. Those that are known to multiply no matrices are listed here. All others are refused in
  noised layers: fused experts, quantised products, operators of future versions.
- Its operators write into a tensor that they are given. Attention is a product whose result is that tensor.
- On a GPU it launches some Triton kernels without an operator. Such a launch is refused too.
- The output projection is called when the forward of the model has returned, and projections are merged.
"""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
from torch import Tensor, nn

from aqnpipe.config.noise import Phase
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.noise.audit.classification import running_module, storage_of
from aqnpipe.noise.audit.observer import Frame, Observer
from aqnpipe.noise.audit.parts import AuditedPart
from aqnpipe.noise.audit.phase_audit import PhaseAudit
from aqnpipe.noise.audit.random_numbers import Position
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

FORWARD_KINDS = ("several tokens", "one token")
"""The kinds of forward passes of a batch, in their order."""

ATTENTION = frozenset({"vllm.unified_attention", "vllm.unified_attention_with_output"})
"""vLLM's operators for attention: products, known only within a noised call."""

_NO_PRODUCTS = frozenset(
    {
        "_C.fused_add_rms_norm",
        "_C.gelu_and_mul",
        "_C.gelu_fast",
        "_C.gelu_new",
        "_C.gelu_quick",
        "_C.gelu_tanh",
        "_C.gelu_tanh_and_mul",
        "_C.relu_squared",
        "_C.rms_norm",
        "_C.rotary_embedding",
        "_C.shm_all_gather",
        "_C.silu_and_mul",
        "c10d._allgather_base_",
        "vllm.all_gather",
        "vllm.flashinfer_rotary_embedding",
        "vllm_ir.fused_add_rms_norm",
        "vllm_ir.rms_norm",
    }
)
"""vLLM's operators that multiply no matrices: norms, activations, rotary embeddings, and copies between workers.

Sums over workers are none of them: a sum of products is a product, so it must be part of a noised call.
"""


def audited_parts(engine: EngineModel) -> list[AuditedPart]:
    """Return the decoder layers and the output projection, which is called after the model's forward."""
    parts = [AuditedPart(index, index, layer.module) for index, layer in enumerate(engine.layers)]
    return parts + [AuditedPart(len(parts), None, logits, runs_after_model=True) for logits in engine.logits]


class EngineAudit(PhaseAudit):
    """The audit of one batch on one worker's model.

    `hidden_sigmas`: AQN on hidden states, by layer. `norm_sigmas`: AQN on norm weights, by name.
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
        super().__init__(engine.model, audited_parts(engine), phase, position, recorder)
        self._engine = engine
        self._hidden_sigmas = hidden_sigmas
        self._norm_sigmas = norm_sigmas

    def _new_observer(self) -> Observer:
        return EngineObserver(self._rng)

    def _kind_of(self, args: Any, kwargs: Mapping[str, Any]) -> str:
        # Rows of a vLLM batch can have different numbers of tokens. All prompts are read first, mostly in one forward.
        return FORWARD_KINDS[min(self.position.forward, 1)]

    def _frame(self, place: int, layer: int | None, module: nn.Module) -> Frame:
        frame = super()._frame(place, layer, module)
        if layer is None and place != self._outside:
            frame.num_logits = self._engine.head.projections[0].width
        return frame

    def _leave_model(self, module: Any, args: Any, output: Any) -> None:
        if self._around is not None:
            # The operations of attention are not known from its arguments, so there is no share to record.
            self._around.total = self._around.noised = 0
        super()._leave_model(module, args, output)

    def _norm_sigma(self, name: str) -> float:
        return self._norm_sigmas.get(name, 0.0)

    def _hidden_sigma(self, layer: int) -> float:
        return self._hidden_sigmas.get(layer, 0.0)

    def _expect_modules(self, observer: Observer, frame: Frame) -> None:
        """Check that every module selected for module noise has it when its hooks have run."""
        if self._modules is None or frame.place == self._outside:
            return
        projections, modules = self._engine.projections(), dict(self._engine.model.named_modules())
        prefix = f"{frame.name}." if frame.layer is not None else "lm_head"
        for name in self._engine.select(self._modules.modules, self._modules.exclude):
            if not name.startswith(prefix):
                continue
            if self._modules.point == "input":
                module = projections[name].input if name in projections else self._engine.norm_inputs[name]
            else:
                module = projections[name].output if name in projections else modules[name]
            self._expect_noise_at(module, observer, name)


class EngineObserver(Observer):
    """Observes the operations of vLLM's layers."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self._entered = 0
        self._unwatch: Callable[[], None] = lambda: None

    def __enter__(self) -> Any:
        """Start observing operations and launches of Triton kernels; it is entered again for parts of a composite."""
        self._entered += 1
        if self._entered == 1:
            self._unwatch = _watch_triton(self._note_launch)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> Any:
        """Undo the last `__enter__`."""
        self._entered -= 1
        if not self._entered:
            self._unwatch()
        return super().__exit__(*exception)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_paused or not self._frames:
            return super()._dispatch(func, args, kwargs)
        output = super()._dispatch(func, args, kwargs)
        if func.namespace != "aten":
            self._follow_written(func, args, kwargs)
        return output

    def _follow_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Follow the tensors that an operator of vLLM wrote into its arguments, as if it had returned them."""
        written = [
            value
            for argument, value in _with_values(func._schema.arguments, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
        ]
        for value in written:
            self._followed.pop(storage_of(value), None)
        self._follow(func, args, [], written, int(_name(func) in ATTENTION), [])

    def _classify(self, func: Any, inputs: list[Tensor], output: Any, *, is_product: bool) -> None:
        frame = self._frames[-1]
        if _name(func) in _NO_PRODUCTS and not any(value in frame.parameters for value in inputs):
            self.classified += 1
        else:
            super()._classify(func, inputs, output, is_product=is_product)

    def _note_launch(self, kernel: str) -> None:
        frame = self.frame
        if frame is not None and frame.error is not None and not self._depth and not self._is_paused:
            place = f"triton.{kernel} in {running_module(frame.module, frame.name)}"
            self.escapes[place] = self.escapes.get(place, 0) + 1


def _name(func: Any) -> str:
    return f"{func.namespace}.{func.overloadpacket.__name__}"


def _with_values(arguments: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Return the arguments of an operator's schema with the values of a call."""
    positional = dict(zip((argument.name for argument in arguments), args, strict=False))
    given = {**positional, **kwargs}
    return [(argument, given[argument.name]) for argument in arguments if argument.name in given]


def _watch_triton(note: Callable[[str], None]) -> Callable[[], None]:
    """Call `note` with the name of every Triton kernel that others launch in this process; return what ends it.

    aqnpipe's own kernels compute noise.
    """
    # Before Triton is imported, no kernel of it can have been defined.
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return lambda: None
    function: Any = jit.JITFunction
    run = function.run

    @wraps(run)
    def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not kernel.__module__.startswith(f"{__package__.partition('.')[0]}."):
            note(kernel.__name__)
        return run(kernel, *args, **kwargs)

    function.run = noted

    def restore() -> None:
        function.run = run

    return restore
