"""Compares two captures operator by operator and says what kind of difference each is.

The error of an operator is described by few figures. Its mean is a straight line over the results, and its variance is
`absolute^2 + (per_input*x)^2 + (per_result*y)^2` with figures that are not negative. Both are fitted with weights from
the variance, in a few rounds, because the rows with the largest values would decide them alone otherwise: their errors
are the most scattered ones.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aqnpipe.artifacts.parities import CaptureIdentity, OperatorParity, OperatorVerdict, is_product
from aqnpipe.config.measured_noise import ATTENTION, ErrorFigures, is_norm
from aqnpipe.config.model import settings_of_values
from aqnpipe.errors import DataError, first_line
from aqnpipe.models.loading import unreadable
from aqnpipe.parity.capture_file import Capture
from aqnpipe.parity.forms import ulps
from aqnpipe.parity.recorder import sampled_channels
from aqnpipe.parity.sample import Sample

_CLEARLY = 0.01
"""Difference of two shares of equal elements that makes one algorithm the better match."""

_MORE_ROUNDINGS = 1.25
"""Multiple of the bound of one rounding above which a result has been rounded more than once."""

_SAME_EXACT = 2.0**-20
"""Exact results of the same operands differ by the rounding of float64, as a share of a forward error bound."""

_LARGEST_GAIN_OF_ROUNDING = 2.0**-14
"""Rounded operands change results by chance; a slope above this is no rounding to 10 bits."""

_REDUCED = "operands of its products rounded to 10 bits (TF32)"
_SETTINGS = (
    *("backend", "dtype", "attention", "device", "driver", "toolkit", "threads", "tensor_parallel"),
    *("batch_invariant", "batch_size", "padding", "num_decoded", "model_class"),
)
_IGNORED_CONFIG = ("max_position_embeddings", "use_cache", "architectures")
_FloatArray = npt.NDArray[np.float64]
_IntArray = npt.NDArray[np.int64]
_STEPS = 200
_ROUNDS_OF_LINE = 3
_MOST_ELEMENTS = 10_000
"""Elements that the variance is fitted on, drawn at random: its figures are then known to one or two percent."""
_SMALLEST_SHARE = 1e-12
"""Smallest variance, as a share of the mean: exact zeros have no error at all."""


@dataclass(frozen=True)
class Sides:
    """Two captures of the same weights and tokens, and the tokens that both recorded."""

    first: Capture
    second: Capture
    shared: Sample
    same_inputs: bool

    def both(self, kind: str, name: str, second_kind: str | None = None) -> tuple[Tensor, Tensor]:
        """Return the tensors of an operator of both sides, on the same tokens."""
        one, other = self.first.tensor(kind, name), self.second.tensor(second_kind or kind, name)
        return one[self.first.sample.rows_of(self.shared)], other[self.second.sample.rows_of(self.shared)]

    def results(self, name: str) -> tuple[Tensor, Tensor]:
        """Return both results of an operator on the inputs that were judged, on the same rows and channels."""
        return _aligned(*self.both("output", name, "replay" if self.same_inputs else "output"))

    @property
    def is_same_dtype(self) -> bool:
        """Return whether both sides computed in the same dtype."""
        return self.first.identity.dtype == self.second.identity.dtype


def _aligned(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with the sampled channels, if one of them has only those."""
    if one.shape[1] > other.shape[1]:
        one = one[:, sampled_channels(one.shape[1])]
    elif other.shape[1] > one.shape[1]:
        other = other[:, sampled_channels(other.shape[1])]
    return one, other


def sides_of(first: Capture, second: Capture) -> tuple[Sides, tuple[str, ...]]:
    """Return two captures as sides of a comparison, and notes about it.

    A capture that was fed the other's values is the second. Raises DataError unless they are of the same weights,
    tokenizer and tokens, and have the same operators.
    """
    _refuse_other_subjects(first.identity, second.identity)
    notes = []
    if first.digest and first.identity.replay_of == second.digest:
        first, second = second, first
        notes.append("The two captures were exchanged: the one that was fed the other's values is the second.")
    if first.identity.replay_of is not None:
        raise DataError("the first capture is itself a replay of a third one; expected one made without --replay")
    same_inputs = second.identity.replay_of is not None
    if same_inputs and second.identity.replay_of != first.digest:
        raise DataError("the second capture is a replay of another file than the first; expected captures of one pair")
    names = [list(side.operators["name"]) for side in (first, second)]
    missing = sorted(set(names[0]) ^ set(names[1]))
    if missing:
        raise DataError(f"the captures have other operators: {', '.join(missing[:3])} on one side only")
    shared = first.sample.shared(second.sample)
    if not shared.num_rows:
        raise DataError("the captures have no recorded token in common; capture again with the same --max-rows")
    if not same_inputs:
        notes.append(
            "The second capture was not made with --replay, so the inputs of operators are those of their side: "
            "operator errors are differences of the errors against exact results, on sampled channels."
        )
    return Sides(first, second, shared, same_inputs), tuple(notes)


def _refuse_other_subjects(first: CaptureIdentity, second: CaptureIdentity) -> None:
    for name, what in (
        ("weights_sha256", "weights"),
        ("tokenizer_sha256", "tokenizers"),
        ("tokens_sha256", "token ids"),
    ):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            raise DataError(
                f"captures of different {what}: found {str(one)[:12]} ({first.model}) and {str(other)[:12]} "
                f"({second.model}), expected the same"
            )


def setting_differences(first: CaptureIdentity, second: CaptureIdentity) -> tuple[str, ...]:
    """Return the settings that differ, as `name: first / second`."""
    found = [(name, getattr(first, name), getattr(second, name)) for name in _SETTINGS]
    for title in ("numerics", "versions", "config"):
        one, other = getattr(first, title), getattr(second, title)
        keys = sorted((one.keys() | other.keys()) - set(_IGNORED_CONFIG))
        found += [(f"{title}.{key}", one.get(key), other.get(key)) for key in keys]
    return tuple(f"{name}: {one} / {other}" for name, one, other in found if one != other)


def function_differences(first: CaptureIdentity, second: CaptureIdentity) -> tuple[str, ...]:
    """Return the settings of the model that differ and may change what it computes, as `name: first / second`.

    Keys that one file leaves out have the default of transformers.
    """
    one, other = (settings_of_values(_completed(identity.config)) for identity in (first, second))
    return tuple(
        f"{key}: {one.get(key)} / {other.get(key)}"
        for key in sorted((one.keys() | other.keys()) - set(_IGNORED_CONFIG))
        if one.get(key) != other.get(key)
    )


def _completed(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return a config.json with the defaults of its family; as it is, if transformers here has no such family."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return config
    try:
        found: dict[str, Any] = CONFIG_MAPPING[kind](**config).to_dict()
    except unreadable() as error:
        raise DataError(f"a capture has a config.json that transformers cannot read: {first_line(error)}") from error
    return found


def compare_operators(sides: Sides) -> tuple[OperatorParity, ...]:
    """Return the comparison of every operator, in the order in which they run."""
    facts = [side.operators.rows_by_key("name", named=True, unique=True) for side in (sides.first, sides.second)]
    return tuple(_compared(sides, name, facts[0][name], facts[1][name]) for name in sides.first.operators["name"])


def _compared(sides: Sides, name: str, first: dict[str, Any], second: dict[str, Any]) -> OperatorParity:
    one, other = sides.results(name)
    has_same_bits = one.dtype == other.dtype and torch.equal(one, other)
    exact, bound = sides.both("exact", name), sum(sides.both("bound", name)).double()  # type: ignore[union-attr]
    channels, drift = sampled_channels(one.shape[1]), 0.0
    if sides.same_inputs:
        # Weights and inputs of another dtype are themselves rounded.
        allowed = bound * (_SAME_EXACT if sides.is_same_dtype else 2)
        drift = float(_largest_share(exact[1] - exact[0], allowed))
        error = other.double() - one.double()
        at_channels = error[:, channels]
    else:
        one, other = one[:, channels], other[:, channels]
        at_channels = error = (other.double() - exact[1]) - (one.double() - exact[0])
    results, kind, input_rms = one.double(), str(first["kind"]), sides.both("input_rms", name)[0]
    algorithms = _algorithms(first, second)
    result_rms = results.square().mean().sqrt()
    rms = float(result_rms) or 1.0
    gain = finite((error * results).mean() / rms**2)
    verdict, reason = _judged(sides, first, second, one, other, has_same_bits, drift, algorithms, gain)
    coarser = max(one.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    units = ulps(error, results, coarser)
    own_one, own_other = (part.double() for part in _aligned(*sides.both("output", name)))
    own_rms = float(own_one.square().mean().sqrt()) or 1.0
    figures, figures_rms = _figures(kind, results, error, input_rms) if sides.same_inputs else (None, 0.0)
    return OperatorParity(
        name=name,
        kind=kind,
        layer=first["layer"],
        verdict=verdict,
        reason=reason,
        relative_rms=finite(error.square().mean().sqrt() / rms),
        bias=finite(error.mean() / rms),
        ulps_p99=finite(quantile(units, 0.99)),
        ulps_largest=finite(units.max()),
        gain=gain,
        input_correlation=_correlation(error.square().mean(-1).sqrt(), input_rms.double()),
        equal_share=float((one.to(coarser) == other.to(coarser)).double().mean()) if sides.same_inputs else None,
        bound_share=finite(_largest_share(at_channels, bound)),
        first_algorithm=algorithms[0],
        second_algorithm=algorithms[1],
        accumulated_relative_rms=finite((own_other - own_one).square().mean().sqrt() / own_rms),
        accumulated_correlation=_correlation(own_one.flatten(), own_other.flatten()),
        figures=figures,
        figures_rms=None if figures is None else figures_rms / rms,
        result_rms=finite(result_rms),
    )


def _figures(kind: str, results: Tensor, error: Tensor, input_rms: Tensor) -> tuple[ErrorFigures | None, float]:
    """Return the figures of an operator's error, if it has any, and the root mean square that they give.

    The error of attention, whose input here is the query, and of norms shall not depend on the size of the input,
    because it does not scale the result.
    """
    are_finite = all(bool(tensor.isfinite().all()) for tensor in (results, error, input_rms))
    if not (is_product(kind) or is_norm(kind)) or not are_finite:
        return None, 0.0
    return error_figures(results, error, None if kind == ATTENTION or is_norm(kind) else input_rms)


def _judged(
    sides: Sides,
    first: dict[str, Any],
    second: dict[str, Any],
    one: Tensor,
    other: Tensor,
    has_same_bits: bool,
    drift: float,
    algorithms: tuple[str | None, str | None],
    gain: float,
) -> tuple[OperatorVerdict, str]:
    equal: tuple[OperatorVerdict, str] = ("equal", "every element has the same bits")
    if sides.same_inputs and has_same_bits:
        return equal
    for side, row, values in (("first", first, one), ("second", second, other)):
        # On all channels: exact results are known on the sampled ones only.
        if not bool(values.isfinite().all()):
            return "fault", f"the {side} side has values that are not finite"
        if not row["is_linked"]:
            return "fault", f"on the {side} side its input is not what the operator before it returned"
        is_reduced = _may_be_reduced(getattr(sides, side).identity, row) and abs(gain) < _LARGEST_GAIN_OF_ROUNDING
        if row["loose"] > 1 and not is_reduced:
            return "fault", f"the {side} side is {row['loose']:.3g} times its forward error bound from the exact result"
    if drift > 1:
        return "fault", "on the same input the sides compute something else: other weights or settings"
    for side, row in (("first", first), ("second", second)):
        if row["loose"] > 1:
            return "different algorithm", f"the {side} side has {_REDUCED}"
    if sides.is_same_dtype and one.dtype != other.dtype:
        kept = "second" if other.dtype == torch.float32 else "first"
        return "different algorithm", f"the {kept} side keeps the result in float32"
    if algorithms[0] != algorithms[1] and None not in algorithms:
        return "different algorithm", f"first: {algorithms[0]}; second: {algorithms[1]}"
    strict = sorted(row["strict"] for row in (first, second))
    if sides.is_same_dtype and one.dtype != torch.float32 and strict[0] <= 1 and strict[1] > _MORE_ROUNDINGS:
        more = "first" if first["strict"] > 1 else "second"
        return "different algorithm", f"the {more} side rounds more than its result"
    return equal if has_same_bits else ("rounding", "within the forward error bounds of both sides")


def _may_be_reduced(identity: CaptureIdentity, row: dict[str, Any]) -> bool:
    """Return whether the errors are no larger than those of TF32, on a machine that may have computed in it."""
    is_allowed = not identity.device.startswith("cpu") or identity.numerics["float32_matmul_precision"] != "highest"
    return is_allowed and row["reduced"] is not None and bool(row["reduced"] <= 1)


def _algorithms(first: dict[str, Any], second: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the algorithm that each side agrees with best; the same for both where that cannot be told apart."""
    shares = [json.loads(str(row["algorithms"])) for row in (first, second)]
    best = [max(found, key=found.get) if found else None for found in shares]
    if None in best or best[0] == best[1]:
        return best[0], best[1]
    # Only an engine that fuses two operators has the algorithms that fuse them.
    is_clear = all(
        found[own] - found.get(others, 0.0) > _CLEARLY
        for found, own, others in zip(shares, best, reversed(best), strict=True)
    )
    return (best[0], best[1]) if is_clear else (best[0], best[0])


def _largest_share(differences: Tensor, bounds: Tensor) -> Tensor:
    """Return the largest |difference| over its bound. Both are zero where float32 cannot hold a bound of zero."""
    # max() of a NaN is NaN, which no comparison finds.
    return (differences.abs() / bounds).where(differences != 0, 0.0).nan_to_num(torch.inf, posinf=torch.inf).max()


def quantile(values: Tensor, share: float) -> Tensor:
    """Return a quantile without interpolation; torch.quantile refuses large tensors."""
    flat = values.flatten()
    return flat.kthvalue(max(1, math.ceil(share * flat.numel())))[0]


def _correlation(one: Tensor, other: Tensor) -> float | None:
    one, other = one - one.mean(), other - other.mean()
    size = float(one.norm() * other.norm())
    return float(one @ other) / size if size > 0 and math.isfinite(size) else None


def finite(value: Tensor) -> float:
    """Return a number that JSON can hold; a result that is not finite has the largest error."""
    number = float(value)
    return number if math.isfinite(number) else 1e308


def error_figures(results: Tensor, errors: Tensor, input_rms: Tensor | None) -> tuple[ErrorFigures, float]:
    """Return the figures of `errors` [rows, channels], and their root mean square by the figures.

    `results` has the same shape, `input_rms` [rows] is the root mean square of each row's input; None: the error shall
    not depend on it. All must be finite.
    """
    y, error = results.double().numpy(), errors.double().numpy()
    if not error.any():
        return ErrorFigures(), 0.0
    rows = np.zeros(y.shape) if input_rms is None else np.broadcast_to(input_rms.double().numpy()[:, None], y.shape)
    columns = np.stack([np.ones(y.size), np.square(rows).ravel(), np.square(y).ravel()])
    chosen = _sampled(y.size)
    drawn = columns[:, chosen]
    weights = np.ones(y.shape)
    for turn in range(_ROUNDS_OF_LINE):
        bias, gain = _line(y, error, weights)
        squares = np.square(error - bias - gain * y).ravel()
        factors = _factors(drawn, squares[chosen])
        if turn < _ROUNDS_OF_LINE - 1:
            weights = 1 / np.maximum(factors @ columns, _SMALLEST_SHARE * squares.mean() or 1.0).reshape(y.shape)
    absolute, per_input, per_result = np.sqrt(factors)
    figures = ErrorFigures(
        bias=bias,
        gain=gain,
        absolute=float(absolute),
        per_input=float(per_input),
        per_result=float(per_result),
    )
    mean_square = float(np.square(bias + gain * y).mean() + (factors @ columns).mean())
    return figures, mean_square**0.5


@lru_cache(maxsize=64)
def _sampled(count: int) -> _IntArray:
    """Return the elements that the variance is fitted on; the same array each time, not to be written to."""
    if count <= _MOST_ELEMENTS:
        return np.arange(count)
    return np.random.default_rng(0).choice(count, _MOST_ELEMENTS, replace=False)


def _line(y: _FloatArray, error: _FloatArray, weights: _FloatArray) -> tuple[float, float]:
    """Return intercept and slope of the error over the results, by weighted least squares."""
    weights = weights / weights.sum()
    centred = y - (weights * y).sum()
    spread = float((weights * np.square(centred)).sum())
    gain = float((weights * centred * error).sum() / spread) if spread > 0 else 0.0
    return float((weights * (error - gain * y)).sum()), gain


def _factors(columns: _FloatArray, squares: _FloatArray) -> _FloatArray:
    """Return the factors, not negative, with which `columns` [3, n] add up to the expected `squares` [n].

    They maximise the likelihood of normal errors with these variances. Each step is that of Fevotte and Idier,
    "Algorithms for nonnegative matrix factorization with the beta-divergence" (2011), which never lowers it.
    """
    means = columns.mean(1)
    factors = np.where(means > 0, squares.mean() / (len(means) * np.where(means > 0, means, 1.0)), 0.0)
    if not squares.any():
        return np.zeros(len(means))
    smallest = _SMALLEST_SHARE * squares.mean()
    variances, ratios = np.empty_like(squares), np.empty_like(squares)
    for _ in range(_STEPS):
        # In place: new arrays would cost as much as the arithmetic.
        np.maximum(np.matmul(factors, columns, out=variances), smallest, out=variances)
        wanted = columns @ np.divide(squares, np.square(variances, out=ratios), out=ratios)
        found = columns @ np.divide(1.0, variances, out=ratios)
        factors = factors * np.sqrt(wanted / np.where(found > 0, found, 1.0))
    return np.asarray(factors)
