"""Classifies every operation of vLLM's noised layers, so that no product can escape the noise unnoticed.

`OperatorCensus` does this for transformers. Three things are different in vLLM:

- It computes in inference mode, where composite operations (`aten.linear`, `aten.to`) reach the dispatcher as a whole.
  They are run by their parts here, which are then classified.
- It has operators of its own. Those that are known to multiply no matrices are listed here. All others are refused:
  fused experts, quantised products, operators of future versions.
- On a GPU it launches some Triton kernels without an operator. Such a launch is refused too.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from aqnpipe.noise.injection.operator_census import OperatorCensus

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
        "_C.silu_and_mul",
        "vllm.flashinfer_rotary_embedding",
        "vllm_ir.fused_add_rms_norm",
        "vllm_ir.rms_norm",
    }
)
"""vLLM's operators that multiply no matrices: norms, activations and rotary embeddings.

Attention and its cache are not among them: `vllm.unified_attention_with_output` is known only within noised attention.
"""


class EngineCensus(OperatorCensus):
    """Classifies the operations of one place, a decoder layer or the output projection, between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self._launches = ExitStack()
        self._is_running = False

    def start(self, place: nn.Module, name: str) -> None:
        """Start classifying: the operations until `stop` belong to `place`, whose qualified name is `name`."""
        self.enter_layer(place, name)
        self.__enter__()
        self._launches.callback(_watch_triton(self._refuse_launch))
        self._is_running = True

    def stop(self) -> None:
        """Stop classifying; a second call does nothing."""
        if self._is_running:
            self._is_running = False
            self._launches.close()
            self.__exit__(None, None, None)
            self.leave_layer()

    def take(self) -> tuple[int, dict[str, int]]:
        """Return the number of classified operations and the escapes since the last call."""
        taken = self.num_classified, self.escapes
        self.num_classified, self.escapes = 0, {}
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, or its parts if it is a composite of others, and classify what ran."""
        if func._can_decompose() and not self._accounted:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _classify(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        if f"{func.namespace}.{func.overloadpacket.__name__}" not in _NO_PRODUCTS or self._takes_matrix(args, kwargs):
            super()._classify(func, args, kwargs, output)
        else:
            self.num_classified += 1

    def _takes_matrix(self, args: Any, kwargs: Any) -> bool:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        return any(value.untyped_storage()._cdata in self._parameters for value in tensors)

    def _refuse_launch(self, kernel: str) -> None:
        if not self._accounted:
            place = f"triton.{kernel} in {self._running_module()}"
            self.escapes[place] = self.escapes.get(place, 0) + 1


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
