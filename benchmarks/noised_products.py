"""Counts products and the part of them that has noise, independently of aqnpipe: from shapes, and from values.

Every product that reaches torch's dispatcher is computed again, in float64, by multiplications of elements and sums,
which are no products to a noisy machine. Relative noise changed nearly all values by a few percent. Nothing is taken
from the code that puts the noise there, and no list of its functions is used.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Formula = Callable[..., int]


def _matrix(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _sum_and_matrix(added: Tensor, a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    return _matrix(a, b)


def _vector(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    return 2 * max(a.numel(), b.numel())


def _groups(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    rows = prod(a.shape[:-1])
    return 2 * rows * a.shape[-1] * b.shape[-1]


def _convolution(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> int:
    return 2 * x.shape[0] * prod(x.shape[2:]) * weight.numel()


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> int:
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> int:
    # Scores once more; then gradients of values, probabilities, queries and keys.
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm"), _matrix),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm"), _sum_and_matrix),
    **dict.fromkeys(("mv", "dot", "vdot"), _vector),
    "_grouped_mm": _groups,
    "convolution": _convolution,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""Floating-point operations by operator of `torch.ops.aten`: a multiplication and an addition count as two."""


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product a @ b [..., rows, columns] without a product operator."""
    return (a.double().unsqueeze(-1) * b.double().unsqueeze(-3)).sum(-2)


def _exact_groups(a: Tensor, b: Tensor, offsets: Tensor, *rest: Any, **named: Any) -> list[Tensor]:
    starts = [0, *offsets.tolist()]
    parts = [slice(*pair) for pair in pairwise(starts)]
    if a.dim() == b.dim() == 2:
        return [torch.stack([_dot(a[:, part], b[part]) for part in parts])]
    if a.dim() == 2:
        return [torch.cat([_dot(a[part], b[group]) for group, part in enumerate(parts)])]
    return [torch.cat([_dot(a[group], b[:, part]) for group, part in enumerate(parts)], dim=1)]


def _exact_convolution(x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, *rest: Any) -> list[Tensor]:
    """Return the result of a convolution along one dimension, without its bias."""
    windows = F.pad(x.double(), (padding[0], padding[0])).unfold(-1, weight.shape[-1], stride[0])
    groups = x.shape[1] // weight.shape[1]
    windows = windows.unflatten(1, (groups, -1)).unsqueeze(2)
    kernels = weight.double().unflatten(0, (groups, -1))[None, :, :, :, None]
    return [(windows * kernels).sum((3, 5)).flatten(1, 2)]


def _weights(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    scores = _dot(query, key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def _exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> list[Tensor]:
    sharing = query.shape[1] // key.shape[1]
    key, value = (shared.repeat_interleave(sharing, 1) for shared in (key, value))
    return [_dot(_weights(query, key, is_causal, attn_mask, scale), value)]


def _exact_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    dropout: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> list[Tensor]:
    """Return the gradients of queries, keys and values, of the exact attention."""
    sharing = query.shape[1] // key.shape[1]
    keys, values = (shared.repeat_interleave(sharing, 1).double() for shared in (key, value))
    weights = _weights(query, keys, is_causal, attn_mask, scale)
    towards = _dot(gradient, values.transpose(-1, -2))
    scores = weights * (towards - (weights * towards).sum(-1, keepdim=True))
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    shared = (_dot(scores.transpose(-1, -2), query), _dot(weights.transpose(-1, -2), gradient))
    return [_dot(scores, keys), *(each.unflatten(1, (-1, sharing)).sum(2) for each in shared)]


EXACT: dict[str, Callable[..., Sequence[Tensor]]] = {
    **dict.fromkeys(("mm", "bmm"), lambda a, b, *rest, **named: [_dot(a, b)]),
    **dict.fromkeys(("addmm", "baddbmm"), lambda added, a, b, *rest, alpha=1, **named: [alpha * _dot(a, b)]),
    "mv": lambda a, b: [(a.double() * b.double()).sum(-1)],
    "_grouped_mm": _exact_groups,
    "convolution": _exact_convolution,
    "_scaled_dot_product_flash_attention_for_cpu": _exact_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _exact_attention_backward,
}
"""The exact results of a product, by operator."""

_WITH_A_SUM = {"addmm": 0, "baddbmm": 0, "convolution": 2}
"""Position of what is added to the product."""


def _has_noise(found: Tensor, exact: Tensor) -> bool:
    """Return whether nearly all values differ by more than rounding, and by a few percent."""
    known = exact != 0
    if not bool(known.any()):
        return True  # an output of zeros has no relative error
    errors = (found.detach().double()[known] / exact[known] - 1).abs()
    return float(errors.quantile(0.1)) > 1e-5 and float(errors.median()) < 0.3


class ProductCount(TorchDispatchMode):
    """Counts products while it is active, into the section of that time.

    What has no exact result here counts as without noise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.section = "other"
        self._products: dict[str, list[tuple[int, bool]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; look at its result if it is a product."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name in FORMULAS:
            is_noised = False
            if name in EXACT:
                exact, results = EXACT[name](*args, **kwargs), output if isinstance(output, tuple) else (output,)
                added = args[_WITH_A_SUM[name]] if name in _WITH_A_SUM else None
                if added is not None and name == "convolution":
                    added = added[:, None]
                pairs = zip(results, exact, strict=False)
                beta = kwargs.get("beta", 1)
                is_noised = all(_has_noise(one if added is None else one - beta * added, other) for one, other in pairs)
            self._products[self.section].append((FORMULAS[name](*args, **kwargs), is_noised))
        return output

    def share(self, section: str) -> float:
        """Return the share of the operations of a section that belong to products with noise."""
        products = self._products[section]
        return sum(flops for flops, is_noised in products if is_noised) / sum(flops for flops, _ in products)
