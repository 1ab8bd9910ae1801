"""Results of product operators, recomputed for sampled elements in float64 from the operands that the operator had.

Each function returns the exact values of some elements and how far a correct computation in the operator's number
format may be from them. Nothing here runs an operator that a noisy machine could change: sums are numpy's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aqnpipe.error_bounds import gamma
from aqnpipe.proof.random_numbers import FloatArray, IntArray, digests

Indices = tuple[IntArray, ...]
"""Indices of elements, one array per dimension."""

Shards = Sequence[tuple[int, int, int]]
"""Columns of a whole result, one after the other: first column, number of columns, and width of the whole."""


class Sampled(NamedTuple):
    """Elements of one result at `place` (indices by dimension): `exact` values, their `slack`, and values as `found`.

    `strides` number them for the noise. `after` is the slack of what an operator does with its product after the error,
    such as adding a bias. `row`: the elements are whole rows of that length, which became distributions after the
    error; 0 for single elements. `expected`: the values that are requested, where the error is of the operands. `rows`
    and `columns` [elements, terms]: factors whose products each element is the sum of; None of an operator that is no
    plain product. `constant`: what the operator adds to `alpha` times the elements.
    """

    place: Indices
    strides: tuple[int, ...]
    exact: FloatArray
    slack: FloatArray
    found: FloatArray
    after: FloatArray | float = 0.0
    row: int = 0
    expected: FloatArray | None = None
    rows: FloatArray | None = None
    columns: FloatArray | None = None
    constant: FloatArray | None = None
    alpha: float = 1.0

    @classmethod
    def of(cls, result: Tensor, place: Indices, exact: FloatArray, slack: FloatArray, **others: Any) -> "Sampled":
        """Return the elements of `result` at `place`, numbered as they lie in memory."""
        return cls(place, _strides(result), exact, slack, at(result, place), **others)

    @property
    def numbers(self) -> IntArray:
        """Numbers of the elements."""
        numbers = np.zeros(len(self.exact), np.int64)
        for axis, step in zip(self.place, self.strides, strict=True):
            numbers += np.asarray(axis, np.int64) * step
        return numbers

    def plain(self, dtype: torch.dtype) -> FloatArray:
        """Return the elements as an operator without an error gives them in `dtype`."""
        exact = rounded(self.exact, dtype)
        if self.constant is None:
            return exact
        return (rounded(rounded(self.alpha * exact, dtype) + self.constant, dtype) - self.constant) / self.alpha

    @property
    def input_rms(self) -> FloatArray | None:
        """Root mean square of the row of the first factor that each element is of."""
        return None if self.rows is None else np.sqrt((self.rows**2).mean(-1))

    def digests(self, dtype: torch.dtype) -> tuple[IntArray, IntArray] | None:
        """Return the digests of the rows and columns of factors of `dtype`; None of an operator that has none."""
        if self.rows is None or self.columns is None:
            return None
        width, fraction_bits = dtype.itemsize, round(-np.log2(torch.finfo(dtype).eps))
        return digests(self.rows, width, fraction_bits), digests(self.columns, width, fraction_bits)


class Draw(NamedTuple):
    """The choice of elements: `num_elements` of each result, by the numbers of `rng`."""

    rng: np.random.Generator
    num_elements: int

    def places(self, result: Tensor) -> Indices:
        """Return where random elements of a result are, or all at most."""
        index = self.rng.integers(0, max(result.numel(), 1), min(self.num_elements, result.numel()))
        return np.unravel_index(index, tuple(result.shape)) if result.dim() else ()


Arguments = Mapping[Any, Any]
Recompute = Callable[[Arguments, Any, Draw], list[Sampled | None]]
"""From arguments by name, result, and the choice of elements: an item per noised result; None if it is not proven."""


def of_elements(values: Callable[[Arguments, Tensor, Indices], Sampled | None]) -> Recompute:
    """Return the recomputation of an operator with one result, from that of its elements at a place."""

    def recompute(arguments: Arguments, result: Tensor, draw: Draw) -> list[Sampled | None]:
        return [values(arguments, result, draw.places(result)) if result.numel() else None]

    return recompute


_ROWS = 32
"""Rows of queries of which attention is recomputed."""

_LARGEST_SCORES = 1 << 24
"""Queries times keys of the largest attention whose gradients are recomputed."""


# -- products of two operands ------------------------------------------------------------------------------------------


def _product(arguments: Arguments, result: Tensor, place: Indices) -> Sampled:
    first, second, *_ = arguments.values()
    return _matmul(first, second, result, place)


def _matmul(first: Tensor, second: Tensor, result: Tensor, place: Indices) -> Sampled:
    rows, columns = _factors(first, second, place)
    terms = rows * columns
    slack = _rounding(np.abs(terms).sum(-1), terms.shape[-1], result.dtype)
    return Sampled.of(result, place, terms.sum(-1), slack, rows=rows, columns=columns)


def _factors(first: Tensor, second: Tensor, place: Indices) -> tuple[FloatArray, FloatArray]:
    """Return the rows and columns [elements, terms] whose sums of products are the elements at `place`."""
    where = tuple(torch.from_numpy(np.asarray(axis)) for axis in place)
    if first.dim() == 1:
        one = wide(first)[None]
        return one, wide(second)[None]
    if second.dim() == 1:
        rows = wide(first[where[-1]])
        return rows, np.broadcast_to(wide(second), rows.shape)
    lead = where[:-2]
    return wide(first[(*lead, where[-2])]), wide(second.transpose(-1, -2)[(*lead, where[-1])])


def _sum(arguments: Arguments, result: Tensor, place: Indices) -> Sampled | None:
    added, first, second, *_ = arguments.values()
    beta, alpha = float(arguments.get("beta", 1)), float(arguments.get("alpha", 1))
    if alpha == 0:
        return None
    constant = beta * at(added.expand(result.shape), place) if beta else np.zeros(len(place[0]))
    return _without_constant(_matmul(first, second, result, place), constant, alpha, result.dtype)


def _whole_sum(arguments: Arguments, result: Tensor, place: Indices) -> Sampled | None:
    """Return samples of a sum with a product, whose error includes what is added."""
    inside = _sum(arguments, result, place)
    if inside is None:
        return None
    alpha, found = inside.alpha, at(result, place)
    constant = found - alpha * inside.found
    slack = abs(alpha) * (inside.slack + inside.after)
    return inside._replace(exact=alpha * inside.exact + constant, slack=slack, found=found, after=0.0, constant=None)


def _without_constant(sampled: Sampled, constant: FloatArray, alpha: float, dtype: torch.dtype) -> Sampled:
    """Return samples of the product inside `alpha * product + constant`, whose roundings add to the slack."""
    half = torch.finfo(dtype).eps
    found = (sampled.found - constant) / alpha
    rounding = half * (np.abs(sampled.found) + np.abs(constant) + np.abs(alpha * sampled.exact)) / abs(alpha)
    return sampled._replace(found=found, after=2 * rounding, constant=constant, alpha=alpha)


def numbered_in_order(sampled: Sampled, result: Tensor) -> Sampled:
    """Return samples numbered row by row: the product was made in memory of its own, and copied into `result`."""
    return sampled._replace(strides=_row_by_row(result.shape))


def in_whole(sampled: Sampled, result: Tensor, shards: Shards) -> Sampled:
    """Return samples numbered as in the whole, of which each row of `result` has the columns `shards`.

    Columns behind them pad a vocabulary: nothing is expected there.
    """
    rows, columns = np.divmod(np.ravel_multi_index(sampled.place, tuple(result.shape)), result[:1].numel())
    ends = np.cumsum([size for _, size, _ in shards])
    kept = columns < ends[-1]
    rows, columns = rows[kept], columns[kept]
    starts = np.array([start for start, _, _ in shards]) - np.append(0, ends[:-1])
    numbers = rows * shards[0][2] + columns + starts[np.searchsorted(ends, columns, side="right")]
    values: dict[str, Any] = sampled._asdict()
    values |= {name: value[kept] for name, value in values.items() if isinstance(value, np.ndarray)}
    return Sampled(**values | {"place": (numbers,), "strides": (1,)})


def unchanged(exact: Tensor, result: Tensor, place: Indices, shards: Shards | None = None) -> Sampled:
    """Return samples of what is its exact value before an error: hooks put it on what a module has computed."""
    values = at(exact, place)
    sampled = Sampled.of(result, place, values, np.zeros(len(values)))
    return sampled if shards is None else in_whole(sampled, result, shards)


def _grouped(arguments: Arguments, result: Tensor, place: Indices) -> Sampled | None:
    first, second, offsets = (*arguments.values(), None)[:3]
    if not isinstance(offsets, Tensor):
        return _matmul(first, second, result, place)
    ends = offsets.cpu().numpy().astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    terms = []
    for element in zip(*place, strict=True):
        *lead, i, j = (int(value) for value in element)
        if first.dim() == 2 and second.dim() == 2:
            inner = slice(int(starts[lead[0]]), int(ends[lead[0]]))
            terms.append(wide(first[i, inner]) * wide(second[inner, j]))
            continue
        group = int(np.searchsorted(ends, i if first.dim() == 2 else j, side="right"))
        if group == len(ends):
            # Behind the last group nothing is computed.
            return None
        row = first[i] if first.dim() == 2 else first[group, i]
        terms.append(wide(row) * wide(second[group, :, j] if second.dim() == 3 else second[:, j]))
    exact, magnitude = (np.array([each.sum() for each in of]) for of in (terms, [np.abs(each) for each in terms]))
    return Sampled.of(result, place, exact, _rounding(magnitude, max(map(len, terms)), result.dtype))


# -- attention ---------------------------------------------------------------------------------------------------------


class _Head(NamedTuple):
    """Rows of one query head of one sequence in float64: weights [queries, keys] with their relative error."""

    query: FloatArray
    key: FloatArray
    value: FloatArray
    weights: FloatArray
    scale: float
    slack: float


def _attention(arguments: Arguments, result: Any, draw: Draw) -> list[Sampled | None]:
    output, chosen = result[0], _chosen_head(arguments, draw)
    if chosen is None:
        return [None]
    rows = np.sort(draw.rng.choice(output.shape[2], min(_ROWS, output.shape[2]), replace=False))
    part = _head(arguments, *chosen, rows)
    exact, magnitude = part.weights @ part.value, part.weights @ np.abs(part.value)
    return [_sample_rows(output, chosen, rows, exact, magnitude * part.slack, draw)]


def _attention_backward(arguments: Arguments, result: Any, draw: Draw) -> list[Sampled | None]:
    chosen = _chosen_head(arguments, draw)
    if chosen is None or arguments["query"].shape[2] * arguments["key"].shape[2] > _LARGEST_SCORES:
        return [None, None, None]
    batch, head = chosen
    # Query heads that share keys and values add up in the gradients of these.
    sharing = arguments["query"].shape[1] // arguments["key"].shape[1]
    shared = head // sharing
    heads = [_gradients_of(arguments, batch, shared * sharing + each) for each in range(sharing)]
    found: list[Sampled | None] = []
    for axis, gradient in enumerate(result[:3]):
        number, used = (head, heads[head - shared * sharing :][:1]) if axis == 0 else (shared, heads)
        exact, slack = (np.sum([each[what][axis] for each in used], axis=0) for what in (0, 1))
        rows = np.arange(gradient.shape[2])
        found.append(_sample_rows(gradient, (batch, number), rows, exact, slack, draw))
    return found


def _gradients_of(arguments: Arguments, batch: int, head: int) -> tuple[Sequence[FloatArray], Sequence[FloatArray]]:
    """Return the gradients of queries, keys and values of one query head, and their slack."""
    whole = _head(arguments, batch, head, np.arange(arguments["query"].shape[2]))
    gradient = wide(next(iter(arguments.values()))[batch, head])
    weights, value = whole.weights, whole.value
    towards, size = gradient @ value.T, np.abs(gradient) @ np.abs(value).T
    scores = weights * (towards - (weights * towards).sum(-1, keepdims=True)) * whole.scale
    # Weights below the smallest normal number may be zero in the kernel; where one key has all the weight, the
    # gradients of queries and keys consist of them.
    uncertain = 4 * whole.slack * weights + torch.finfo(torch.float32).tiny
    largest = uncertain * (size + (weights * size).sum(-1, keepdims=True)) * whole.scale
    exact = (scores @ whole.key, scores.T @ whole.query, weights.T @ gradient)
    return exact, (largest @ np.abs(whole.key), largest.T @ np.abs(whole.query), uncertain.T @ np.abs(gradient))


def _chosen_head(arguments: Arguments, draw: Draw) -> tuple[int, int] | None:
    """Return a sequence and a query head; None where the weights cannot be recomputed."""
    query = arguments["query"]
    if arguments.get("dropout_p") or query.dim() != 4 or not query.numel():
        return None
    return int(draw.rng.integers(query.shape[0])), int(draw.rng.integers(query.shape[1]))


def _head(arguments: Arguments, batch: int, head: int, rows: IntArray) -> _Head:
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    shared = head * key.shape[1] // query.shape[1]
    q, k, v = wide(query[batch, head, torch.from_numpy(rows)]), wide(key[batch, shared]), wide(value[batch, shared])
    scale = arguments.get("scale")
    scale = float(scale) if scale is not None else query.shape[-1] ** -0.5
    scores = q @ k.T * scale
    mask = next((arguments[name] for name in ("attn_mask", "attn_bias") if arguments.get(name) is not None), None)
    if mask is not None:
        mask = mask.expand(*query.shape[:3], key.shape[2])[batch, head, torch.from_numpy(rows)]
        scores = np.where(mask.cpu().numpy(), scores, -np.inf) if mask.dtype == torch.bool else scores + wide(mask)
    if arguments.get("is_causal"):
        scores = np.where(np.arange(scores.shape[1]) <= rows[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
        weights = np.nan_to_num(powers / powers.sum(-1, keepdims=True))
    # Scores have the rounding of their sums, and the weights change by as much relatively.
    of_scores = float((np.abs(q) @ np.abs(k).T).max(initial=0.0)) * scale * gamma(q.shape[-1] + 2)
    epsilon = torch.finfo(query.dtype).eps
    slack = 2 * of_scores + 4 * epsilon + gamma(k.shape[0] + 8)
    return _Head(q, k, v, weights, scale, slack)


def _sample_rows(
    result: Tensor, lead: tuple[int, int], rows: IntArray, exact: FloatArray, slack: FloatArray, draw: Draw
) -> Sampled:
    index = draw.rng.integers(0, exact.size, min(draw.num_elements, exact.size))
    row, column = np.unravel_index(index, exact.shape)
    place = (np.full(len(index), lead[0]), np.full(len(index), lead[1]), rows[row], column)
    return with_rounding(result, place, exact[row, column], slack[row, column])


def with_rounding(result: Tensor, place: Indices, exact: FloatArray, slack: FloatArray, **others: Any) -> Sampled:
    """Return elements with the slack of their computation, and that of the number format of the result."""
    info = torch.finfo(result.dtype)
    return Sampled.of(result, place, exact, slack + info.eps * np.abs(exact) + info.tiny, **others)


# -- convolution -------------------------------------------------------------------------------------------------------


def _convolution(arguments: Arguments, result: Tensor, place: Indices) -> Sampled | None:
    inputs, weight, bias, stride, padding, dilation, transposed, _, groups = arguments.values()
    if transposed:
        return None
    padded = np.pad(wide(inputs), [(0, 0), (0, 0), *((size, size) for size in padding)])
    kernels, per_group = wide(weight), weight.shape[0] // groups
    exact, magnitude = np.zeros(len(place[0])), np.zeros(len(place[0]))
    for number, (batch, channel, *corner) in enumerate(zip(*place, strict=True)):
        first = channel // per_group * weight.shape[1]
        channels = slice(first, first + weight.shape[1])
        terms = padded[(batch, channels, *_taps(corner, weight.shape[2:], stride, dilation))] * kernels[channel]
        exact[number], magnitude[number] = terms.sum(), np.abs(terms).sum()
    sampled = Sampled.of(result, place, exact, _rounding(magnitude, kernels[0].size, result.dtype))
    return sampled if bias is None else _without_constant(sampled, wide(bias)[place[1]], 1.0, result.dtype)


def _taps(corner: list[Any], sizes: torch.Size, stride: Any, dilation: Any) -> list[slice]:
    starts = [position * step for position, step in zip(corner, stride, strict=True)]
    return [
        slice(start, start + (size - 1) * gap + 1, gap)
        for start, size, gap in zip(starts, sizes, dilation, strict=True)
    ]


# -- small things ------------------------------------------------------------------------------------------------------


def wide(tensor: Tensor) -> FloatArray:
    """Return a copy of a tensor as float64 of numpy: torch could not resize memory that is shared with numpy."""
    return tensor.detach().to("cpu", torch.float64, copy=True).numpy()


def rounded(values: FloatArray, dtype: torch.dtype) -> FloatArray:
    """Return values as numbers of `dtype`."""
    return wide(torch.from_numpy(values).to(dtype))


def at(tensor: Tensor, place: Indices) -> FloatArray:
    """Return the elements of a tensor at `place`."""
    found = tensor[tuple(torch.from_numpy(np.asarray(axis)) for axis in place)] if place else tensor
    return wide(found.reshape(-1))


def _rounding(magnitude: FloatArray, num_terms: int, dtype: torch.dtype) -> FloatArray:
    """Return how far a correct sum of `num_terms` products may be from the exact one (see `error_bounds`).

    Kernels for 16 bits (vdpbf16ps, say) take operands, products and results below the smallest normal number for zero.
    """
    info = torch.finfo(dtype)
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    parts = 0.0 if dtype in (torch.float32, torch.float64) else info.eps / 2
    found: FloatArray = magnitude * (gamma(num_terms + 1, unit) + parts + info.eps / 2) + (num_terms + 1) * info.tiny
    return found


def _strides(result: Tensor) -> tuple[int, ...]:
    """Return the strides by which the noise numbers elements: those of the tensor if it is dense, else row by row."""
    shape, strides = result.shape, result.stride()
    if sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1 == result.numel():
        return strides
    return _row_by_row(shape)


def _row_by_row(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


_FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")

RECOMPUTED: dict[str, Recompute] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), of_elements(_product)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), of_elements(_sum)),
    "_grouped_mm": of_elements(_grouped),
    **{f"_scaled_dot_product_{kernel}": _attention for kernel in _FUSED},
    **{f"_scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _FUSED},
    "convolution": of_elements(_convolution),
}
"""How the noised results of each operator are recomputed. What is missing here is counted as unproven."""

WHOLE_SUMS = dict.fromkeys(("addmm", "baddbmm", "addmv"), of_elements(_whole_sum))
"""How they are recomputed where the error includes what is added."""

UNPROVEN = frozenset({"_scaled_mm", "_int_mm", "addbmm", "_addmm_activation", "convolution_backward"})
"""Operators with an error that nothing here recomputes."""
