"""Classifies every operation of a noised layer, so that no matrix product can escape the noise unnoticed.

Noise is applied to torch functions by name and to modules. A layer may compute a product in another way: a new kernel
for experts, a convolution, an operator called through `torch.ops`, a product written as a sum. All of these pass
torch's dispatcher. In the first forwards of a phase, every operation that reaches the dispatcher is therefore
classified:

- It runs inside a noised call, or inside a call that is already counted as escaped.
- It is known not to be a product: views, element-wise operations, reductions, copies, indexing.
- Anything else is an escape. The receipt refuses it and names the operation and the module. This includes unknown
  operations, so a product that a future version of torch introduces is refused and not ignored.

Element-wise operations can also form a product, as in `(x * W).sum(-1)`. A matrix parameter of a noised layer may
therefore be used only in noised calls. Views, copies and selections of the parameter count as the parameter.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aqnpipe.noise.receipts.flops import operations_of

_NO_PRODUCTS = frozenset(
    {
        "_local_scalar_dense",
        "_log_softmax",
        "_softmax",
        "_to_copy",
        "_unsafe_view",
        "arange",
        "bernoulli",
        "bernoulli_",
        "argsort",
        "bincount",
        "cat",
        "clone",
        "constant_pad_nd",
        "copy_",
        "cummax",
        "cummin",
        "cumsum",
        "detach",
        "diff",
        "embedding",
        "exponential_",
        "empty",
        "empty_like",
        "empty_strided",
        "eye",
        "fill_",
        "flip",
        "floor_divide",
        "full",
        "full_like",
        "gather",
        "histc",
        "index",
        "index_add",
        "index_add_",
        "index_copy_",
        "index_put",
        "index_put_",
        "index_select",
        "item",
        "kthvalue",
        "lift_fresh",
        "lift_fresh_copy",
        "masked_fill",
        "masked_fill_",
        "masked_scatter",
        "masked_select",
        "median",
        "multinomial",
        "native_dropout",
        "native_group_norm",
        "native_layer_norm",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "nonzero",
        "normal_",
        "one_hot",
        "ones",
        "ones_like",
        "rand",
        "random_",
        "rand_like",
        "randint",
        "randn",
        "randn_like",
        "repeat",
        "repeat_interleave",
        "resize_",
        "roll",
        "rms_norm",
        "scalar_tensor",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "select_scatter",
        "slice_scatter",
        "sort",
        "split_with_sizes_copy",
        "stack",
        "topk",
        "uniform_",
        "tril",
        "tril_indices",
        "triu",
        "triu_indices",
        "unique_consecutive",
        "unique_dim",
        "zero_",
        "zeros",
        "zeros_like",
        "_fused_rms_norm",
        "_unique2",
    }
)
"""Operations of `torch.ops.aten` that multiply no matrices, besides views, element-wise operations and reductions."""

_KEEPS_THE_PARAMETER = frozenset(
    {
        "_to_copy",
        "_unsafe_view",
        "cat",
        "clone",
        "copy_",
        "detach",
        "index",
        "index_select",
        "stack",
        "repeat_interleave",
    }
)
"""Operations whose output contains the values of a parameter, besides views."""

_ADDITIONS = frozenset({"add", "add_", "sub", "sub_"})


class OperatorCensus(TorchDispatchMode):
    """Classifies the operations of noised layers while it is active, and counts floating-point operations.

    `escapes` maps "operation in module" to a number of calls. `total` is the number of floating-point operations of
    all matrix products and attentions, noised or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.num_classified = 0
        self.escapes: dict[str, int] = {}
        self._layer: tuple[nn.Module, str] | None = None
        self._accounted = 0
        self._parameters: dict[int, Tensor] = {}

    def enter_layer(self, layer: nn.Module, name: str) -> None:
        """Start classifying: the operations until `leave_layer` belong to the noised layer `name`."""
        self._layer = layer, name
        self._parameters = {_storage(parameter): parameter for parameter in layer.parameters() if parameter.ndim > 1}

    def leave_layer(self) -> None:
        """Stop classifying."""
        self._layer = None
        self._parameters = {}

    @contextmanager
    def accounted(self) -> Iterator[None]:
        """Do not classify the operations of the body: the caller applies noise to them or records them as escaped."""
        self._accounted += 1
        try:
            yield
        finally:
            self._accounted -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, add its floating-point operations to the total and classify it."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.total += operations_of(func, args, kwargs, output)
        if self._layer is not None and not self._accounted:
            self._classify(func, args, kwargs, output)
        return output

    def _classify(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.num_classified += 1
        name = func.overloadpacket.__name__
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        takes_matrix = any(_storage(value) in self._parameters for value in inputs)
        if func.is_view or (func.namespace == "aten" and name in _KEEPS_THE_PARAMETER):
            if takes_matrix:
                # Kept alive, so that no other tensor can get the same storage number while the layer computes.
                self._parameters |= {
                    _storage(value): value for value in tree_leaves(output) if isinstance(value, Tensor)
                }
            return
        known = func.namespace == "aten" and (
            name in _NO_PRODUCTS or torch.Tag.pointwise in func.tags or torch.Tag.reduction in func.tags
        )
        if not known or (takes_matrix and not self._is_harmless_on_a_parameter(name, inputs, output)):
            what = f"{func.namespace}.{name}" if not known else f"{func.namespace}.{name} on a weight matrix"
            place = f"{what} in {self._running_module()}"
            self.escapes[place] = self.escapes.get(place, 0) + 1

    def _is_harmless_on_a_parameter(self, name: str, inputs: list[Tensor], output: Any) -> bool:
        """Whether an operation on a matrix parameter is not part of a product: an embedding lookup, or a bias.

        If the sum has more elements than the other operand, that operand was broadcast against the matrix. Distances
        such as `((x - W)**2).sum(-1)`, which contain a product, begin in this way.
        """
        if name == "embedding":
            return True
        if name not in _ADDITIONS or not isinstance(output, Tensor):
            return False
        others = [value.numel() for value in inputs if _storage(value) not in self._parameters]
        return output.numel() <= max(others, default=output.numel())

    def _running_module(self) -> str:
        """Return the qualified name of the innermost module of the layer whose code is running."""
        if self._layer is None:
            return ""
        layer, name = self._layer
        names = {module: f"{name}.{path}".rstrip(".") for path, module in layer.named_modules()}
        frame = sys._getframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in names:
                return names[owner]
            frame = frame.f_back  # type: ignore[assignment]
        return name


def _storage(tensor: Tensor) -> int:
    """Return a number that identifies the memory of a dense tensor among all live ones; 0 for a sparse tensor."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
