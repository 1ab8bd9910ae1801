"""Floating-point operations from the shapes of what is really computed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

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
