"""Operators as the audit sees them: which multiply no matrices, and the arguments of a call by name."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aqnpipe.device import dispatch_keys

NO_PRODUCTS_OF_BACKWARD = frozenset(
    {
        *("_efficientzerotensor", "_has_same_storage_numel", "_is_any_true", "_safe_softmax", "as_strided_"),
        *("is_same_size", "softplus_backward", "squeeze_", "t_", "transpose_", "unsafe_split", "unsqueeze_"),
        *("_amp_foreach_non_finite_check_and_unscale_", "_chunk_cat", "_fused_rms_norm_backward"),
        *("_log_softmax_backward_data", "_softmax_backward_data", "_weight_norm_interface_backward"),
        *("binary_cross_entropy_with_logits", "cumsum_backward", "embedding_dense_backward"),
        *("mish_backward", "native_channel_shuffle"),
        *("empty_permuted", "gelu_backward", "index_put", "isfinite", "log_sigmoid_backward"),
        *("log_sigmoid_forward", "logsumexp", "masked_fill", "max_pool2d_with_indices"),
        *("native_dropout_backward", "native_group_norm_backward", "native_layer_norm_backward"),
        *("new_empty_strided", "new_zeros", "nll_loss2d_backward", "nll_loss2d_forward"),
        *("nll_loss_backward", "nll_loss_forward", "select_backward", "set_", "silu_backward"),
        *("slice_backward", "value_selecting_reduction_backward"),
    }
)
"""Operations of losses and backward passes that multiply no matrices."""

NO_PRODUCTS_BY_PREFIX = (
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


def is_no_product(name: str) -> bool:
    """Return whether an operator of losses and backward passes multiplies no matrices."""
    return name in NO_PRODUCTS_OF_BACKWARD or name.startswith(NO_PRODUCTS_BY_PREFIX)


def num_terms(operator: str, arguments: Mapping[str, Any]) -> int:
    """Return the number of terms of each sum of a product; 2 or more for attention and convolution."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if operator.startswith(("_scaled_dot", "_flash", "_efficient")):
        return max(int(tensors[1].shape[-2]), 2)
    if operator.startswith("convolution"):
        return int(tensors[1][0].numel()) if not operator.endswith("_backward") else 2
    first = tensors[1] if operator.startswith("add") or operator.startswith("badd") else tensors[0]
    return int(first.shape[-1])
