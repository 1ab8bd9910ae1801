"""The torch functions that compute the products which operator noise reaches."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aqnpipe.config.noise import OperatorNoise

TorchFunction = Callable[..., Any]

_PRODUCTS: dict[TorchFunction, str] = {
    F.linear: "linear",
    torch.matmul: "matmul",
    Tensor.matmul: "matmul",
    Tensor.__matmul__: "matmul",
    Tensor.__rmatmul__: "matmul",
    torch.mm: "matmul",
    Tensor.mm: "matmul",
    torch.einsum: "matmul",
    torch.bmm: "bmm",
    Tensor.bmm: "bmm",
    torch.addmm: "addmm",
    Tensor.addmm: "addmm",
    torch.baddbmm: "baddbmm",
    Tensor.baddbmm: "baddbmm",
    F.grouped_mm: "grouped_mm",
    torch._grouped_mm: "grouped_mm",
}
_ATTENTION: dict[TorchFunction, str] = {F.scaled_dot_product_attention: "scaled_dot_product_attention"}
PRODUCT_OF_SUM: dict[str, TorchFunction] = {"addmm": torch.mm, "baddbmm": torch.bmm}
"""The product inside operators that add a tensor to it. The noise belongs to the product alone."""


def noised_functions(noise: OperatorNoise) -> dict[TorchFunction, str]:
    """Return the torch functions whose results have noise, and a name for each."""
    return {**_PRODUCTS, **(_ATTENTION if noise.attention == "fused" else {})}


def escaping_functions(noise: OperatorNoise) -> dict[TorchFunction, str]:
    """Return fused functions with a matrix product inside, where `noise` cannot be put on the product alone."""
    return {} if noise.attention == "fused" else _ATTENTION
