"""Results of any operator, recomputed in float64 on the host from the operands that it had, by rows.

An operator is looked up by its name and computed with numpy, so that no kernel under test takes part. What has no entry
is run by torch in float64 on the host. Of a large result some rows are computed, always with the first and the last;
a row is a whole one, so that one wrong column of a result shows in every call.

How far a correct result may be from the exact one depends on the class of the operator and on its operands, and never
on what the device shows: a copy is exact, an IEEE operation has one rounding, a function some units in the last place,
and a sum the error bound of its terms in any order (see `error_bounds`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aqnpipe.diagnosis.reference import operand_bits
from aqnpipe.error_bounds import TWO_ROUNDINGS, gamma
from aqnpipe.noise.audit.random_numbers import FloatArray, IntArray
from aqnpipe.proof.elementwise import gelu_parts, sigmoid, standardised
from aqnpipe.proof.recompute import gradients_of_head, head_of, product_slack, rounded, wide

_MOST_VALUES = 1 << 13
"""Values of a result that are recomputed."""

_MOST_TERMS = 1 << 20
"""Products of numbers that a recomputed product has."""

_MOST_WHOLE = 1 << 22
"""Values of operators that are computed as a whole, and not by rows."""

_MOST_WEIGHTS = 1 << 22
"""Weights that are held in float64 at once."""

_MOST_HEADS = 4
"""Heads of which fused attention is recomputed, and rows of each."""

_UNIT = 2.0**-24
_LOW = (torch.bfloat16, torch.float16)


class Answer(NamedTuple):
    """Rows [rows, channels] of one result: exact values, how far a correct result may be from them, and the result."""

    exact: FloatArray
    slack: FloatArray
    found: FloatArray
    dtype: torch.dtype

    def wrong(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """Return the values that no correct computation has. A NaN is wrong unless the exact value is one."""
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.abs(self.found - self.exact) <= self.slack
            if near.all():
                return ~near
            near |= (self.found == self.nearest()) | (np.isnan(self.found) & np.isnan(self.exact))
            if self.dtype.is_floating_point:
                # An infinity stands for a number that a correct rounding may take beyond the range.
                top = torch.finfo(self.dtype).max
                overflow = np.abs(self.exact) + self.slack >= top
                near |= np.isinf(self.found) & overflow & (np.sign(self.found) == np.sign(self.exact))
        return ~near

    def nearest(self) -> FloatArray:
        """Return the exact values, rounded to the format of the result."""
        return rounded(self.exact, self.dtype) if self.dtype.is_floating_point else self.exact


Arguments = Mapping[str, Any]
Answers = Callable[[Arguments, Any, np.random.Generator], list[Answer] | None]
"""From arguments by name, result and random numbers: the rows of each result; None where they are not known."""


def chosen_rows(total: int, most: int, rng: np.random.Generator) -> IntArray:
    """Return the numbers of at most `most` rows: all, or the first, the last and random ones between."""
    if total <= most:
        return np.arange(total)
    # Random, because a regular stride aliases with the tiles of a kernel.
    return np.unique(np.concatenate([[0, total - 1], rng.integers(0, total, max(most - 2, 0))]))


def _width(tensor: Tensor) -> int:
    return tensor.shape[-1] if tensor.dim() else 1


def _rows_of(tensor: Tensor, shape: Sequence[int], rows: IntArray) -> FloatArray:
    """Return rows [rows, width] of a tensor that is broadcast to `shape`."""
    if not shape:
        return wide(tensor).reshape(1, 1)
    whole = tensor.expand(tuple(shape))
    if len(rows) == int(np.prod(shape[:-1])):
        return wide(whole).reshape(len(rows), shape[-1])
    place = tuple(torch.from_numpy(axis).to(tensor.device) for axis in np.unravel_index(rows, tuple(shape[:-1])))
    return wide(whole[place])


def _rows_chosen(result: Tensor, rng: np.random.Generator) -> IntArray:
    width = max(_width(result), 1)
    return chosen_rows(result.numel() // width, max(_MOST_VALUES // width, 2), rng)


def _half(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


# -- one element of the result from one element of each operand --------------------------------------------------------


class _Rule(NamedTuple):
    """How an element is computed, and the slack in multiples of its size. `size`: of what roundings are relative to."""

    compute: Callable[..., Any]
    roundings: str = "exact"
    size: Callable[..., Any] | None = None


def _elementwise(rule: _Rule) -> Answers:
    def answer(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
        if not isinstance(result, Tensor) or arguments.get("rounding_mode") is not None:
            return None
        rows = _rows_chosen(result, rng)
        shape = tuple(result.shape)
        values = [_rows_of(v, shape, rows) if isinstance(v, Tensor) else v for v in arguments.values()]
        with np.errstate(all="ignore"):
            exact = np.array(np.broadcast_to(rule.compute(*values), (len(rows), _width(result))), np.float64)
            size = np.abs(exact) if rule.size is None else np.abs(rule.size(*values))
        if result.dtype == torch.bool:
            exact = (exact != 0).astype(np.float64)
        elif not result.dtype.is_floating_point:
            exact = np.trunc(exact)
        slack = np.zeros_like(exact)
        if result.dtype.is_floating_point and rule.roundings != "exact":
            slack = slack + _roundings(rule, exact, size, result.dtype)
            if any(_is_rounded(value, result.dtype) for value in arguments.values()):
                slack = slack + _UNIT * size
        return [Answer(exact, np.nan_to_num(slack), _rows_of(result, shape, rows), result.dtype)]

    return answer


def _is_rounded(value: Any, dtype: torch.dtype) -> bool:
    """Return whether an operand is a number of Python that kernels round to float32 before they compute with it."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype == torch.float64 != dtype
    return isinstance(value, float) and dtype != torch.float64 and float(np.float32(value)) != value


def _roundings(rule: _Rule, exact: FloatArray, size: Any, dtype: torch.dtype) -> FloatArray:
    """Return the slack of an element: one rounding of an IEEE operation, a few of a function.

    Numbers of 16 bits are computed in float32, and rounded to 16 bits at the end; a function once more before it.
    """
    tiny = torch.finfo(dtype).tiny
    of_float32 = 2 * _UNIT * size if dtype in _LOW else 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        if rule.roundings == "ieee":
            return _half(dtype) * 1.001 * np.abs(exact) + of_float32 + tiny
        own = TWO_ROUNDINGS * 2 * _half(dtype) * np.abs(exact) if dtype in _LOW else 0.0
        unit = 2.0**-53 if dtype == torch.float64 else _UNIT
        found: FloatArray = 8 * unit * (np.abs(exact) + size) + own + tiny
        return found


def _gelu(x: FloatArray, approximate: str = "none") -> FloatArray:
    return x * gelu_parts(x, approximate)[0]


def _gelu_backward(gradient: FloatArray, x: FloatArray, approximate: str = "none") -> FloatArray:
    factor, slope = gelu_parts(x, approximate)
    return gradient * (factor + x * slope)


def _silu_backward(gradient: FloatArray, x: FloatArray) -> FloatArray:
    factor = sigmoid(x)
    return gradient * (factor + x * factor * (1 - factor))


def _softplus(x: FloatArray, beta: float = 1.0, threshold: float = 20.0) -> FloatArray:
    return np.where(x * beta > threshold, x, np.log1p(np.exp(np.minimum(x * beta, threshold))) / beta)


def _pow_size(base: FloatArray, exponent: Any) -> FloatArray:
    result = np.power(base, exponent)
    found: FloatArray = result * (1 + np.abs(exponent * np.log(np.maximum(np.abs(base), 1e-300))) / 8)
    return found


def _clamp(x: FloatArray, low: Any = None, high: Any = None) -> FloatArray:
    return np.clip(x, -np.inf if low is None else low, np.inf if high is None else high)


def _of_gradient(gradient: FloatArray, x: FloatArray, *_: Any) -> FloatArray:
    found: FloatArray = np.abs(gradient) * 8 * (1 + np.abs(x))
    return found


_EXACT: dict[str, Callable[..., Any]] = {
    "_to_copy": lambda x, *_: x,
    "clone": lambda x, *_: x,
    "copy": lambda x, source, *_: source,
    "fill": lambda x, value: np.broadcast_to(value, x.shape),
    "zero": np.zeros_like,
    "neg": np.negative,
    "abs": np.abs,
    "relu": lambda x: np.where(np.isnan(x), x, np.maximum(x, 0.0)),
    "maximum": np.maximum,
    "minimum": np.minimum,
    "clamp": _clamp,
    "clamp_min": np.maximum,
    "clamp_max": np.minimum,
    "where": lambda condition, x, y: np.where(condition != 0, x, y),
    "masked_fill": lambda x, mask, value: np.where(mask != 0, value, x),
    "threshold_backward": lambda gradient, x, threshold: np.where(x <= threshold, 0.0, gradient),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "logical_and": lambda x, y: (x != 0) & (y != 0),
    "logical_or": lambda x, y: (x != 0) | (y != 0),
    "logical_not": lambda x: x == 0,
}
"""Operators whose results are their operands, or are rounded in no way."""

_RULES: dict[str, _Rule] = {
    **{name: _Rule(compute) for name, compute in _EXACT.items()},
    "add": _Rule(lambda x, y, a=1: x + a * y, "ieee", lambda x, y, a=1: np.abs(x) + np.abs(a * y)),
    "sub": _Rule(lambda x, y, a=1: x - a * y, "ieee", lambda x, y, a=1: np.abs(x) + np.abs(a * y)),
    "rsub": _Rule(lambda x, y, a=1: y - a * x, "ieee", lambda x, y, a=1: np.abs(y) + np.abs(a * x)),
    "mul": _Rule(lambda x, y: x * y, "ieee"),
    "div": _Rule(lambda x, y, *_: x / y, "ieee"),
    "sqrt": _Rule(np.sqrt, "function"),
    "reciprocal": _Rule(lambda x: 1 / x, "function"),
    "rsqrt": _Rule(lambda x: 1 / np.sqrt(x), "function"),
    "exp": _Rule(np.exp, "function", lambda x: np.exp(x) * (1 + np.abs(x))),
    "log": _Rule(np.log, "function", lambda x: 1 + np.abs(np.log(x))),
    "sin": _Rule(np.sin, "function", np.ones_like),
    "cos": _Rule(np.cos, "function", np.ones_like),
    "tanh": _Rule(np.tanh, "function"),
    "sigmoid": _Rule(sigmoid, "function", lambda x: sigmoid(x) * (1 + np.abs(np.minimum(x, 0)))),
    "silu": _Rule(lambda x: x * sigmoid(x), "function", lambda x: 4 * x * sigmoid(x) * (1 + np.abs(np.minimum(x, 0)))),
    # The tail of a GELU is what is left of one minus one.
    "gelu": _Rule(_gelu, "function", lambda x, *_: 4 * x),
    "softplus": _Rule(_softplus, "function", lambda x, *_: 1 + np.abs(x)),
    "pow": _Rule(np.power, "function", _pow_size),
    "silu_backward": _Rule(_silu_backward, "function", _of_gradient),
    "gelu_backward": _Rule(_gelu_backward, "function", _of_gradient),
    "sigmoid_backward": _Rule(lambda g, y: g * y * (1 - y), "function", _of_gradient),
    "tanh_backward": _Rule(lambda g, y: g * (1 - y * y), "function", _of_gradient),
}


# -- sums along dimensions ---------------------------------------------------------------------------------------------


def _reduced(is_mean: bool) -> Answers:
    def answer(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
        x = arguments["self"]
        named = arguments.get("dim")
        dims = (
            [d % x.dim() for d in ([named] if isinstance(named, int) else named or range(x.dim()))] if x.dim() else []
        )
        kept = [d for d in range(x.dim()) if d not in dims]
        number = int(np.prod([x.shape[d] for d in dims])) if dims else 1
        if not number or not result.numel():
            return None
        terms = x.permute(*kept, *dims).reshape(-1, number) if x.dim() else x.reshape(1, 1)
        rows = chosen_rows(len(terms), max(min(_MOST_TERMS // number, _MOST_VALUES), 2), rng)
        values = wide(terms[torch.from_numpy(rows).to(x.device)])
        share = 1 / number if is_mean else 1.0
        exact, magnitude = values.sum(-1) * share, np.abs(values).sum(-1) * share
        if result.dtype.is_floating_point:
            slack = product_slack(magnitude, number, result.dtype) + 2 * _UNIT * magnitude
        else:
            slack = np.zeros_like(exact)
        found = wide(result.reshape(-1)[torch.from_numpy(rows).to(x.device)])
        # A sum over rows has channels; one over channels has none.
        width = x.shape[kept[-1]] if kept and kept[-1] == x.dim() - 1 and len(rows) == len(terms) else 1
        exact, slack, found = (part.reshape(-1, width) for part in (exact, slack, found))
        return [Answer(exact, slack, found, result.dtype)]

    return answer


def _last(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, -1) if tensor.dim() else tensor


def _softmax(is_log: bool) -> Answers:
    def answer(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
        dim = int(arguments["dim"])
        scores, found = _last(arguments["self"], dim), _last(result, dim)
        rows = _rows_chosen(found, rng)
        x = _rows_of(scores, tuple(scores.shape), rows)
        with np.errstate(all="ignore"):
            below = x - x.max(-1, keepdims=True)
            powers = np.exp(below)
            total = powers.sum(-1, keepdims=True)
            exact = below - np.log(total) if is_log else powers / total
        length, dtype = x.shape[-1], result.dtype
        finite = np.where(np.isfinite(below), np.abs(below), 0.0)
        # A difference of scores has a rounding relative to its size, which is one of the weight relative to it.
        size = finite + 1 + np.log(length) if is_log else exact * (finite + 4)
        slack = size * (4 * _UNIT) + (1.0 if is_log else exact) * gamma(length)
        slack = slack + 2 * TWO_ROUNDINGS * _half(dtype) * np.abs(exact) + torch.finfo(dtype).tiny
        return [Answer(exact, np.nan_to_num(slack), _rows_of(found, tuple(found.shape), rows), dtype)]

    return answer


def _softmax_backward(is_log: bool) -> Answers:
    def answer(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
        dim = int(arguments["dim"])
        found = _last(result, dim)
        rows, shape = _rows_chosen(found, rng), tuple(found.shape)
        gradient, output = (_rows_of(_last(arguments[name], dim), shape, rows) for name in ("grad_output", "output"))
        with np.errstate(all="ignore"):
            share = np.exp(output) if is_log else output
            towards = gradient if is_log else gradient * output
            total, size = towards.sum(-1, keepdims=True), np.abs(towards).sum(-1, keepdims=True)
            exact = gradient - share * total if is_log else share * (gradient - total)
            largest = np.abs(gradient) + share * size if is_log else share * (np.abs(gradient) + size)
        roundings = 2 * gamma(shape[-1] + 8) + 4 * _half(output_dtype(arguments)) + 4 * _half(result.dtype)
        slack = largest * roundings + torch.finfo(result.dtype).tiny
        return [Answer(exact, slack, _rows_of(found, shape, rows), result.dtype)]

    return answer


def output_dtype(arguments: Arguments) -> torch.dtype:
    """Return the format of the output that a gradient is computed from."""
    found: torch.dtype = arguments["output"].dtype
    return found


def _layer_norm(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
    output, width = result[0], int(np.prod(arguments["normalized_shape"]))
    flat = output.reshape(-1, width)
    rows = chosen_rows(len(flat), max(_MOST_VALUES // width, 2), rng)
    x = _rows_of(arguments["input"].reshape(-1, width), flat.shape, rows)
    exact, scale = standardised(arguments, x)
    size = (np.abs(x) + np.abs(x).mean(-1, keepdims=True)) * scale
    for name, is_factor in (("weight", True), ("bias", False)):
        if arguments[name] is not None:
            own = wide(arguments[name].reshape(-1))
            exact = exact * own if is_factor else exact + own
            size = size * np.abs(own) if is_factor else size + np.abs(own)
    # A mean far above the scatter costs the variance its digits.
    scatter = 1 + x.mean(-1, keepdims=True) ** 2 * scale**2
    slack = 4 * gamma(width + 8) * size * scatter + 2 * TWO_ROUNDINGS * _half(output.dtype) * np.abs(exact)
    return [Answer(exact, slack + torch.finfo(output.dtype).tiny, _rows_of(flat, flat.shape, rows), output.dtype)]


# -- products ----------------------------------------------------------------------------------------------------------


def _operand_slack(dtype: torch.dtype) -> float:
    """Return what the operands of float32 products may lose under the settings of torch (TF32)."""
    return 0.0 if dtype != torch.float32 or operand_bits(dtype) == 24 else 2.0 ** (1 - operand_bits(dtype))


class _Added(NamedTuple):
    """What a sum adds to its product: `beta * values + alpha * product`."""

    values: Tensor
    beta: float = 1.0
    alpha: float = 1.0


def _rows_of_product(
    first: Tensor, second: Tensor, found: Tensor, rows: IntArray, added: _Added | None = None
) -> Answer:
    """Return rows of the product of two matrices; columns in blocks, because their weights are held in float64."""
    index = torch.from_numpy(rows).to(first.device)
    left, terms = wide(first[index]), first.shape[-1]
    exact, magnitude = np.zeros((len(rows), second.shape[1])), np.zeros((len(rows), second.shape[1]))
    block = max(_MOST_WEIGHTS // max(terms, 1), 1)
    for start in range(0, second.shape[1], block):
        right = wide(second[:, start : start + block])
        with np.errstate(all="ignore"):
            exact[:, start : start + block] = left @ right
            magnitude[:, start : start + block] = np.abs(left) @ np.abs(right)
    slack = product_slack(magnitude, terms, found.dtype) + _operand_slack(found.dtype) * magnitude
    if added is not None:
        # The product may be rounded before the sum, whose own rounding is relative to both.
        constant = added.beta * wide(added.values.expand(found.shape)[index])
        exact = added.alpha * exact + constant
        slack = abs(added.alpha) * slack + _half(found.dtype) * (np.abs(exact) + np.abs(constant))
        slack = slack + 2 * _UNIT * np.abs(constant)
    return Answer(exact, slack, wide(found[index]), found.dtype)


def _stacked(parts: Sequence[Answer]) -> list[Answer] | None:
    if not parts:
        return None
    exact, slack, found = (np.concatenate([getattr(part, name) for part in parts]) for name in Answer._fields[:3])
    return [Answer(exact, slack, found, parts[0].dtype)]


def _num_rows(first: Tensor, second: Tensor) -> int:
    return max(_MOST_TERMS // max(first.shape[-1] * second.shape[-1], 1), 2)


def _matrices(
    first: Tensor, second: Tensor, found: Tensor, rng: np.random.Generator, added: _Added | None = None
) -> list[Answer] | None:
    """Return rows of a product of matrices, or of batches of them."""
    if not found.numel():
        return None
    most = _num_rows(first, second)
    if first.dim() == 2:
        return [_rows_of_product(first, second, found, chosen_rows(len(first), most, rng), added)]
    batches = [int(batch) for batch in chosen_rows(len(first), 64, rng)]
    each = max(most // len(batches), 2)
    parts = []
    for b in batches:
        own = None if added is None else added._replace(values=added.values.expand(found.shape)[b])
        rows = chosen_rows(first.shape[1], each, rng)
        parts.append(_rows_of_product(first[b], second[b], found[b], rows, own))
    return _stacked(parts)


def _product(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
    first, second, *_ = arguments.values()
    if second.dim() == 1:
        return _matrices(first, second.unsqueeze(-1), result.unsqueeze(-1), rng)
    return _matrices(first, second, result, rng)


def _sum_with_product(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
    values, first, second, *_ = arguments.values()
    added = _Added(values, float(arguments.get("beta", 1)), float(arguments.get("alpha", 1)))
    return _matrices(first, second, result, rng, added)


def _linear(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
    x, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
    flat, found = x.reshape(-1, x.shape[-1]), result.reshape(-1, result.shape[-1])
    return _matrices(flat, weight.t(), found, rng, None if bias is None else _Added(bias))


def _grouped(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
    first, second, offsets = (*arguments.values(), None)[:3]
    if not isinstance(offsets, Tensor) or first.dim() != 2 or not result.numel():
        return None if isinstance(offsets, Tensor) and first.dim() != 2 else _matrices(first, second, result, rng)
    ends = offsets.tolist()
    most = max(_num_rows(first, second) // max(len(ends), 1), 2)
    parts = []
    for group, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if second.dim() == 3 and end > start:
            rows = chosen_rows(end - start, most, rng)
            parts.append(_rows_of_product(first[start:end], second[group], result[start:end], rows))
        elif second.dim() == 2 and end > start:
            rows = chosen_rows(first.shape[0], most, rng)
            parts.append(_rows_of_product(first[:, start:end], second[start:end], result[group], rows))
    return _stacked(parts)


# -- fused attention ---------------------------------------------------------------------------------------------------


def _heads(query: Tensor, rng: np.random.Generator) -> list[tuple[int, int]]:
    chosen = chosen_rows(query.shape[0] * query.shape[1], _MOST_HEADS, rng)
    return [(int(head) // query.shape[1], int(head) % query.shape[1]) for head in chosen]


def _attention(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
    output, query = result[0], arguments["query"]
    if arguments.get("dropout_p") or query.dim() != 4 or not output.numel():
        return None
    parts = []
    for batch, head in _heads(query, rng):
        rows = chosen_rows(query.shape[2], max(_MOST_TERMS // 8 // max(arguments["key"].shape[2], 1), 2), rng)
        part = head_of(arguments, batch, head, rows)
        exact = part.weights @ part.value
        slack = part.slack * (part.weights @ np.abs(part.value)) + 2 * _half(output.dtype) * np.abs(exact)
        found = wide(output[batch, head][torch.from_numpy(rows).to(output.device)])
        parts.append(Answer(exact, slack + torch.finfo(output.dtype).tiny, found, output.dtype))
    return _stacked(parts)


def _attention_backward(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
    query, key = arguments["query"], arguments["key"]
    if arguments.get("dropout_p") or query.dim() != 4 or query.shape[2] * key.shape[2] > _MOST_WHOLE // 4:
        return None
    batch, head = _heads(query, rng)[0]
    sharing = query.shape[1] // key.shape[1]
    shared = head // sharing
    heads = [
        gradients_of_head(arguments, batch, shared * sharing + each, from_output="out" in arguments)
        for each in range(sharing)
    ]
    own, own_slack = heads[head - shared * sharing]
    exact = (own[0], *(np.sum([values[axis] for values, _ in heads], 0) for axis in (1, 2)))
    slack = (own_slack[0], *(np.sum([bounds[axis] for _, bounds in heads], 0) for axis in (1, 2)))
    answers = []
    for axis, found in enumerate(result[:3]):
        bound = slack[axis] + 2 * _half(found.dtype) * np.abs(exact[axis]) + torch.finfo(found.dtype).tiny
        answers.append(Answer(exact[axis], bound, wide(found[batch, head if axis == 0 else shared]), found.dtype))
    return answers


# -- rows of tables ----------------------------------------------------------------------------------------------------


def _embedding(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
    weight, indices = arguments["weight"], arguments["indices"].reshape(-1)
    flat = result.reshape(-1, weight.shape[1])
    rows = chosen_rows(len(flat), max(_MOST_VALUES // weight.shape[1], 16), rng)
    index = torch.from_numpy(rows).to(weight.device)
    exact = wide(weight[indices[index]])
    return [Answer(exact, np.zeros_like(exact), wide(flat[index]), result.dtype)]


def _embedding_backward(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
    """Return the rows that are used and some that are not; those have no gradient."""
    gradient, indices = arguments["grad_output"], arguments["indices"].reshape(-1).cpu().numpy()
    if arguments.get("scale_grad_by_freq"):
        return None
    values = wide(gradient.reshape(-1, gradient.shape[-1]))
    values[indices == int(arguments["padding_idx"])] = 0.0
    used = np.unique(indices)[: max(_MOST_WHOLE // gradient.shape[-1], 2)]
    rows = np.union1d(used, chosen_rows(result.shape[0], 16, rng))
    exact, magnitude = (np.zeros((len(rows), gradient.shape[-1])) for _ in range(2))
    kept = np.isin(indices, rows)
    place = np.searchsorted(rows, indices[kept])
    np.add.at(exact, place, values[kept])
    np.add.at(magnitude, place, np.abs(values[kept]))
    terms = np.bincount(place, minlength=len(rows))[:, None]
    # The sum of a row may be in the format of the gradients, term by term.
    slack = magnitude * 2 * _half(result.dtype) * (terms + 1) + torch.finfo(result.dtype).tiny * (terms > 0)
    return [Answer(exact, slack, wide(result[torch.from_numpy(rows).to(result.device)]), result.dtype)]


def _unsafe_view(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
    rows, shape = _rows_chosen(result, rng), tuple(result.shape)
    exact = _rows_of(arguments["self"].reshape(shape), shape, rows)
    return [Answer(exact, np.zeros_like(exact), _rows_of(result, shape, rows), result.dtype)]


def _cat(arguments: Arguments, result: Any, rng: np.random.Generator) -> list[Answer] | None:
    if result.numel() > _MOST_WHOLE or not result.numel():
        return None
    tensors = [tensor for tensor in arguments["tensors"] if tensor.dim() == result.dim()]
    exact = np.concatenate([wide(tensor) for tensor in tensors], int(arguments.get("dim", 0)))
    flat = exact.reshape(-1, _width(result))
    return [Answer(flat, np.zeros_like(flat), wide(result).reshape(flat.shape), result.dtype)]


ANSWERS: dict[str, Answers] = {
    **{name: _elementwise(rule) for name, rule in _RULES.items()},
    "sum": _reduced(is_mean=False),
    "mean": _reduced(is_mean=True),
    "_softmax": _softmax(is_log=False),
    "_safe_softmax": _softmax(is_log=False),
    "_log_softmax": _softmax(is_log=True),
    "_softmax_backward_data": _softmax_backward(is_log=False),
    "_log_softmax_backward_data": _softmax_backward(is_log=True),
    "native_layer_norm": _layer_norm,
    **dict.fromkeys(("mm", "bmm", "mv"), _product),
    **dict.fromkeys(("addmm", "baddbmm"), _sum_with_product),
    "linear": _linear,
    "_grouped_mm": _grouped,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "cat": _cat,
    "_unsafe_view": _unsafe_view,
    **{
        f"_scaled_dot_product_{kind}{ending}": compute
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
        for ending, compute in (("", _attention), ("_backward", _attention_backward))
    },
}
"""How the results of each operator are recomputed; names without the mark of working in place."""

# fmt: off
_MOVES = frozenset({
    "arange", "constant_pad_nd", "flip", "full", "full_like", "gather", "index", "index_select", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "repeat", "roll", "scalar_tensor", "select_backward", "slice_backward", "stack",
    "tril", "triu", "zeros", "zeros_like",
})
# fmt: on
"""Operators that only move or set values."""


def answers_of_whole(function: Any, arguments: Arguments, result: Any) -> list[Answer] | None:
    """Return the results of an operator that is run by torch in float64 on the host; None if it is too large for it.

    Its steps are not known, so the slack is relative to the largest value of each row. Indices that depend on the order
    of equal values are left to the values that come with them.
    """
    tensors = _tensors((*arguments.values(), result))
    if sum(tensor.numel() for tensor in tensors) > _MOST_WHOLE or any(t.layout != torch.strided for t in tensors):
        return None
    name = function.overloadpacket.__name__.removesuffix("_")
    positional, named = [], {}
    for argument in function._schema.arguments:
        value = _on_host(arguments[argument.name])
        if argument.name == "device" and value is not None:
            value = torch.device("cpu")
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    expected = function(*positional, **named)
    found, has_values = [], any(t.is_floating_point() for t in _tensors((result,)))
    for own, exact in zip(_tensors((result,)), _tensors((expected,)), strict=True):
        if own.shape != exact.shape or not own.numel() or own.is_complex():
            continue
        if has_values and not own.is_floating_point():
            continue
        width = _width(own)
        values = wide(exact).reshape(-1, width)
        slack = np.zeros_like(values)
        if own.is_floating_point() and name not in _MOVES:
            with np.errstate(all="ignore"):
                size = np.abs(values) + np.abs(np.nan_to_num(values)).max(-1, keepdims=True) / 2
            slack = np.nan_to_num(size * (4 * _half(own.dtype) + 64 * _UNIT)) + torch.finfo(own.dtype).tiny
        found.append(Answer(values, slack, wide(own).reshape(-1, width), own.dtype))
    return found or None


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64 if value.is_floating_point() else value.dtype)
    if isinstance(value, list | tuple):
        return type(value)(_on_host(item) for item in value) if type(value) in (list, tuple) else value
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in _tensors(value)] if isinstance(values, list | tuple) else []
