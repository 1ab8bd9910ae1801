"""Classifies every operation of a noised layer, so that no matrix product can escape the noise unnoticed.

A layer may compute a product in many ways: a new kernel for experts, a convolution, an operator called through
`torch.ops`, a product written as a sum. All of these pass torch's dispatcher. In passes that are audited, every
operation that reaches the dispatcher is therefore classified:

- It is a product whose error is recomputed.
- It is known not to be a product: views, element-wise operations, reductions, copies, indexing.
- Anything else is an escape. The receipt refuses it and names the operation and the module. This includes unknown
  operations, so a product that a future version of torch introduces is refused and not ignored.

Element-wise operations can also form a product, as in `(x * W).sum(-1)`. A matrix parameter of a noised layer may
therefore be used only in noised calls. Views, copies and selections of the parameter count as the parameter, and so
does what is computed from such parameters alone. Out of reach are products outside torch, and element-wise ones with a
buffer or another tensor that is no parameter: rotary embeddings and masks are of this kind.

Floating-point operations are counted from the same calls.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from aqnpipe.device import dispatch_keys

_NO_PRODUCTS = frozenset((
    "_fused_rms_norm", "_local_scalar_dense", "_log_softmax", "_softmax", "_to_copy", "_unique2", "_unsafe_view",
    "arange", "argsort", "bernoulli", "bernoulli_", "bincount", "cat", "clone", "constant_pad_nd", "copy_", "cummax",
    "cummin", "cumsum", "detach", "detach_", "diff", "embedding", "empty", "empty_like", "empty_strided",
    "exponential_", "eye", "fill_", "flip", "floor_divide", "full", "full_like", "gather", "histc", "index",
    "index_add", "index_add_", "index_copy_", "index_put", "index_put_", "index_select", "item", "kthvalue",
    "lift_fresh", "lift_fresh_copy", "masked_fill", "masked_fill_", "masked_scatter", "masked_select", "median",
    "multinomial", "native_dropout", "native_group_norm", "native_layer_norm", "new_empty", "new_full", "new_ones",
    "new_zeros", "nonzero", "normal_", "one_hot", "ones", "ones_like", "polar", "rand", "rand_like", "randint", "randn",
    "randn_like", "random_", "repeat", "repeat_interleave", "resize_", "rms_norm", "roll", "scalar_tensor", "scatter",
    "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "select_scatter", "slice_scatter", "sort",
    "split_with_sizes_copy", "stack", "topk", "tril", "tril_indices", "triu", "triu_indices", "uniform_",
    "unique_consecutive", "unique_dim", "zero_", "zeros", "zeros_like",
))  # fmt: skip
"""Operations of `torch.ops.aten` that multiply no matrices, besides views, element-wise operations and reductions."""

_OF_LOSSES = frozenset((
    "_amp_foreach_non_finite_check_and_unscale_", "_chunk_cat", "_efficientzerotensor", "_fused_rms_norm_backward",
    "_has_same_storage_numel", "_is_any_true", "_log_softmax_backward_data", "_safe_softmax", "_softmax_backward_data",
    "_weight_norm_interface_backward", "as_strided_", "binary_cross_entropy_with_logits", "cumsum_backward",
    "embedding_dense_backward", "empty_permuted", "gelu_backward", "is_same_size", "isfinite", "log_sigmoid_backward",
    "log_sigmoid_forward", "logsumexp", "max_pool2d_with_indices", "mish_backward", "native_channel_shuffle",
    "native_dropout_backward", "native_group_norm_backward", "native_layer_norm_backward", "new_empty_strided",
    "nll_loss2d_backward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss_forward", "select_backward", "set_",
    "silu_backward", "slice_backward", "softplus_backward", "squeeze_", "t_", "transpose_", "unsafe_split",
    "unsqueeze_", "value_selecting_reduction_backward",
))  # fmt: skip
"""Operations of losses and backward passes that multiply no matrices."""

_OF_LOSSES_BY_PREFIX = (
    *("_adaptive_avg_pool", "_batch_norm", "_native_batch_norm"),
    *("_pack_padded", "adaptive_max_pool", "avg_pool", "binary_cross_entropy", "col2im"),
    *("grid_sampler", "huber_loss", "im2col", "max_pool", "mse_loss", "native_batch_norm"),
    *("reflection_pad", "replication_pad", "smooth_l1_loss", "unfold_backward", "upsample_"),
)
"""Beginnings of the names of such operations: pooling, padding, resizing, other norms and losses."""

NO_PRODUCTS_OF_VLLM = frozenset(
    {
        *("_C.fused_add_rms_norm", "_C.gelu_and_mul", "_C.gelu_fast", "_C.gelu_new", "_C.gelu_quick"),
        *("_C.gelu_tanh", "_C.gelu_tanh_and_mul", "_C.relu_squared", "_C.rms_norm", "_C.rotary_embedding"),
        *("_C.shm_all_gather", "_C.shm_allreduce", "_C.silu_and_mul", "c10d._allgather_base_"),
        *("vllm.all_gather", "vllm.all_reduce"),
        *("vllm.flashinfer_rotary_embedding", "vllm.unified_kv_cache_update"),
        *("vllm_ir.fused_add_rms_norm", "vllm_ir.rms_norm"),
    }
)
"""Operators of vLLM that multiply no matrices: norms, activations, rotary embeddings, and exchanges between workers.

All others are refused in noised layers: fused experts, quantised products, operators of future versions; and attention
outside of the module that has the error.
"""

ATTENTION_OF_VLLM = "vllm.unified_attention_with_output"
"""vLLM's attention, which multiplies no weights."""

COLLECTIVES = frozenset({"_c10d_functional", "c10d", "fsdp"})
"""Namespaces of operations that move tensors between processes."""

_KEEPS_THE_PARAMETER = frozenset((
    "_to_copy", "_unsafe_view", "cat", "clone", "copy_", "detach", "detach_", "index", "index_select", "stack",
    "repeat_interleave",
))  # fmt: skip
"""Operations whose output contains the values of a parameter, besides views."""

_OF_WEIGHTS = frozenset({"_weight_norm_interface"})
"""Operations that compute a weight from parameters alone. With other tensors they are products."""

_ADDITIONS = frozenset({"add", "add_", "sub", "sub_"})


def is_of_losses(name: str) -> bool:
    """Return whether an operation of `torch.ops.aten` is listed as one of losses, backward passes, pooling or norms."""
    return name in _OF_LOSSES or name.startswith(_OF_LOSSES_BY_PREFIX)


def is_harmless(func: Any) -> bool:
    """Return whether an operation is known to be no product of matrices, unless it is element-wise with a matrix."""
    name, namespace = func.overloadpacket.__name__, func.namespace
    is_simple = name in _NO_PRODUCTS or torch.Tag.pointwise in func.tags or torch.Tag.reduction in func.tags
    is_of_aten = namespace == "aten" and (is_simple or is_of_losses(name))
    is_listed = is_of_aten or f"{namespace}.{name}" in NO_PRODUCTS_OF_VLLM
    return func.is_view or namespace == "profiler" or is_listed


class MatrixParameters:
    """The matrix parameters of a layer, with every tensor that holds their values, by storage."""

    def __init__(self) -> None:
        # Kept alive, so that no other tensor can get the same storage number while the layer computes.
        self._tensors: dict[int, Tensor] = {}
        self._scales: dict[int, Tensor] = {}
        self._looked_up: set[int] = set()

    def start(self, parameters: Iterable[Tensor]) -> None:
        """Add the parameters of a layer: its matrices, and beside them those with one scale per channel."""
        for parameter in parameters:
            (self._tensors if is_matrix(parameter) else self._scales)[storage_of(parameter)] = parameter

    def holds_all(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether all of `tensors` are matrix parameters, or scales of one, as in `weight * gain`."""
        return all(tensor in self or storage_of(tensor) in self._scales for tensor in tensors)

    def update(self, tensors: Iterable[Tensor], *, looked_up: bool = False) -> None:
        """Add tensors that hold values of matrix parameters; `looked_up`: rows of them."""
        found = {storage_of(tensor): tensor for tensor in tensors}
        self._tensors |= found
        self._looked_up |= found.keys() if looked_up else set()

    def are_looked_up(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether those of `tensors` that are matrices are rows that were looked up, such as position biases."""
        return all(storage_of(tensor) in self._looked_up for tensor in tensors if tensor in self)

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._tensors


def is_matrix(parameter: Tensor) -> bool:
    """Return whether a parameter can be a factor of a matrix product; a scale per channel has one dimension above 1."""
    return sum(size > 1 for size in parameter.shape) > 1


def keeps_the_parameter(func: Any) -> bool:
    """Return whether the output of an operation contains the values of its input."""
    return func.is_view or (func.namespace == "aten" and func.overloadpacket.__name__ in _KEEPS_THE_PARAMETER)


def escape(
    func: Any,
    inputs: Sequence[Tensor],
    output: Any,
    parameters: MatrixParameters,
    *,
    is_harmless: bool,
) -> str | None:
    """Return the name of an operation that may be a product without noise; None if it is known to be none.

    `inputs` are the tensors among its arguments. Adds views and copies of matrix parameters to `parameters`.
    `is_harmless`: whether an operation that takes no matrix is known to be no product.
    """
    name = func.overloadpacket.__name__
    takes_matrix = any(value in parameters for value in inputs)
    if keeps_the_parameter(func):
        if takes_matrix:
            found = (value for value in tree_leaves(output) if isinstance(value, Tensor))
            parameters.update(found, looked_up=parameters.are_looked_up(inputs))
        return None
    is_of_weights = name in _OF_WEIGHTS and func.namespace == "aten" and parameters.holds_all(inputs)
    if not is_harmless and not is_of_weights:
        return f"{func.namespace}.{name}"
    if not takes_matrix:
        return None
    if name == "embedding" or parameters.holds_all(inputs):
        # Rows of a matrix, or something computed from matrices alone: still no product with the hidden states.
        found = (value for value in tree_leaves(output) if isinstance(value, Tensor))
        parameters.update(found, looked_up=name == "embedding" or parameters.are_looked_up(inputs))
        return None
    return None if _is_a_bias(name, inputs, output, parameters) else f"{func.namespace}.{name} on a weight matrix"


def _is_a_bias(name: str, inputs: Sequence[Tensor], output: Any, parameters: MatrixParameters) -> bool:
    """Return whether an operation adds a matrix parameter to a tensor of its size, which is no part of a product.

    If the sum has more elements than the other operand, that operand was broadcast against the matrix. Distances such
    as `((x - W)**2).sum(-1)`, which contain a product, begin in this way. Masks are added to looked-up position biases
    in this way too.
    """
    if name not in _ADDITIONS or not isinstance(output, Tensor):
        return False
    if name.startswith("add") and parameters.are_looked_up(inputs):
        return True
    others = [value.numel() for value in inputs if value not in parameters]
    return output.numel() <= max(others, default=output.numel())


def storage_of(tensor: Tensor) -> int:
    """Return a number that identifies the memory of a dense tensor among all live ones; 0 for a sparse tensor."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


def arguments_of(function: Any, args: Any, kwargs: Mapping[str, Any], *, copies_first: bool) -> dict[str, Any]:
    """Return the arguments of a call by name; the first one as it was before a call that overwrites it."""
    schema = function._schema.arguments
    found = {argument.name: argument.default_value for argument in schema}
    found |= dict(zip((argument.name for argument in schema), args, strict=False)) | dict(kwargs)
    if copies_first:
        found[schema[0].name] = found[schema[0].name].clone()
    return found


def is_composite(function: Any) -> bool:
    """Return whether an operator computes with others; one that has a kernel of a backend as well does not."""
    has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, function.name())
    return has_kernel("CompositeImplicitAutograd") and not any(map(has_kernel, dispatch_keys()))


def machine_name(operator: str) -> str:
    """Return the operator that has the error: a sum with a product is the product, then the sum.

    A sum over tensor-parallel workers is the product of one.
    """
    return {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv", "sum": "mm"}.get(operator, operator)


def num_terms(operator: str, arguments: Mapping[str, Any]) -> int:
    """Return the number of terms of each sum of a product; 2 or more for attention and convolution."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if operator.startswith(("_scaled_dot", "_flash", "_efficient")):
        return max(int(tensors[1].shape[-2]), 2)
    if operator.startswith("convolution"):
        return int(tensors[1][0].numel()) if not operator.endswith("_backward") else 2
    first = tensors[1] if operator.startswith("add") or operator.startswith("badd") else tensors[0]
    return int(first.shape[-1])


# -- floating-point operations, from the shapes of what is computed ----------------------------------------------------

_KERNELS = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{suffix}"): suffix == "_backward"
    for kernel in _KERNELS
    for suffix in ("", "_backward")
}
"""Attention by one operator; whether it is a backward pass."""

_MATRIX_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)


def operations_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> int:
    """Return the operations of one call of an operator: of matrix products, convolutions and attentions; else 0.

    Uses the formulas of torch, and our own where torch has none (grouped products, attention on a CPU) or where they
    depend on its version (attention in which several heads share keys).
    """
    packet = func.overloadpacket
    if isinstance(output, Tensor) and not output.dtype.is_floating_point and not output.dtype.is_complex:
        # Products of integers have no floating-point operations, and no noise.
        return 0
    if packet in _ATTENTION:
        return _of_attention(args, is_backward=_ATTENTION[packet])
    if packet in _MATRIX_PRODUCTS and args[-1].shape[-2] == 1:
        # Nothing is summed: the rotary embedding multiplies frequencies and positions in this way.
        return 0
    if packet is torch.ops.aten._grouped_mm:
        return _of_grouped_product(args[0], args[1])
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=output)) if formula is not None else 0


def _of_attention(args: tuple[Any, ...], *, is_backward: bool) -> int:
    """Return the operations of attention without regard to its mask: two products, or five in a backward pass.

    `args` begin with the query [B, H, L, E], key [B, H', S, E] and value [B, H', S, V], in a backward pass after the
    gradient of the output. A backward pass computes the scores again, and two gradients per product.
    """
    query, key, value = args[1:4] if is_backward else args[:3]
    per_element = 3 * query.shape[-1] + 2 * value.shape[-1] if is_backward else query.shape[-1] + value.shape[-1]
    return int(2 * query.shape[:-1].numel() * key.shape[-2] * per_element)


def _of_grouped_product(left: Tensor, right: Tensor) -> int:
    """Return the operations of `_grouped_mm`: each row of `left` [S, K] meets one of `right` [G, K, N].

    Two matrices [M, S] and [S, N] are products of groups of S (the gradient of weights); [G, M, K] and [G, K, N] a
    batch.
    """
    rows = left.shape[0] * left.shape[1] if left.ndim == 3 else left.shape[0]
    return 2 * rows * left.shape[-1] * right.shape[-1]
