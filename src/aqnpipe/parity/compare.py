"""Compares two captures operator by operator, says what kind of difference each is, and gives a verdict."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from torch import Tensor

from aqnpipe.artifacts.parities import (
    SEVERITY,
    WITHIN_ROUNDING,
    CaptureIdentity,
    LogProbabilities,
    OperatorParity,
    OperatorVerdict,
    ParityFile,
    ParityVerdict,
    Substitution,
    is_product,
)
from aqnpipe.config.measured_noise import ATTENTION, ErrorFigures, is_norm
from aqnpipe.config.model import settings_of_values
from aqnpipe.errors import DataError, first_line
from aqnpipe.models.loading import unreadable
from aqnpipe.parity.capture_file import Capture
from aqnpipe.parity.figures import error_figures
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
_SUBJECTS = (("weights_sha256", "weights"), ("tokenizer_sha256", "tokenizers"), ("tokens_sha256", "token ids"))
_NAMED = 3


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

    def results(self, name: str, *, of_own_passes: bool = False) -> tuple[Tensor, Tensor]:
        """Return both results of an operator, on the inputs that were judged or on those of each side's own pass.

        They have the same rows, and the sampled channels if one of them has only those.
        """
        is_replay = self.same_inputs and not of_own_passes
        one, other = self.both("output", name, "replay" if is_replay else "output")
        if one.shape[1] > other.shape[1]:
            one = one[:, sampled_channels(one.shape[1])]
        elif other.shape[1] > one.shape[1]:
            other = other[:, sampled_channels(other.shape[1])]
        return one, other

    @property
    def is_same_dtype(self) -> bool:
        """Return whether both sides computed in the same dtype."""
        return self.first.identity.dtype == self.second.identity.dtype


def parity_of(first: Capture, second: Capture, substitute: Callable[[Sides], Substitution] | None = None) -> ParityFile:
    """Return the parity of two captures; `substitute` measures which operators explain the log-probabilities.

    Raises DataError if the captures cannot be compared.
    """
    sides, notes = sides_of(first, second)
    one, other = sides.first.identity, sides.second.identity
    rows = sides.second.operators.rows_by_key("name", named=True, unique=True, include_key=True)
    operators = tuple(_compared(sides, row, rows[row["name"]]) for row in sides.first.operators.iter_rows(named=True))
    beyond = [operator for operator in operators if operator.verdict not in WITHIN_ROUNDING]
    verdict: ParityVerdict = max((operator.verdict for operator in operators), key=SEVERITY.index)
    log_probabilities = log_probability_differences(sides.first, sides.second)
    if verdict == "equal" and log_probabilities.largest > 0:
        # Operators were recorded on some tokens only, so the cause is in others.
        verdict = "not located"
    # With the same inputs a setting that changes a result is a fault of its operator.
    other_function = () if sides.same_inputs else function_differences(one, other)
    if other_function and verdict != "fault" and log_probabilities.largest > 0:
        verdict = "different function"
    if one.stale_parameters or other.stale_parameters:
        verdict = "stale weights"
    if substitute is None:
        notes.append("No model was given (--model), so no operator was put in the place of another.")
    elif not sides.same_inputs:
        notes.append("Operators are put in each other's place only if the second capture was made with --replay.")
        substitute = None
    decoded = scored_by_both(sides.first, sides.second).filter(pl.col("is_decoded") | pl.col("is_decoded_second"))
    places = decoded.select("sequence", "position").iter_rows()
    if decoded.height and not any(sides.shared.row(*place) is not None for place in places):
        notes.append("No decoded token is among the recorded ones: no operator was compared while decoding.")
    return ParityFile(
        verdict=verdict,
        summary=_summary(verdict, sides, beyond, other_function, log_probabilities.rms),
        first=one,
        second=other,
        same_inputs=sides.same_inputs,
        num_rows=sides.shared.num_rows,
        first_beyond_rounding=beyond[0].name if beyond else None,
        operators=operators,
        log_probabilities=log_probabilities,
        substitution=None if substitute is None else substitute(sides),
        settings=setting_differences(one, other),
        notes=tuple(notes),
    )


def sides_of(first: Capture, second: Capture) -> tuple[Sides, list[str]]:
    """Return two captures as sides of a comparison, and notes about it.

    A capture that was fed the other's values is the second. Raises DataError unless they are of the same weights,
    tokenizer and tokens, and have the same operators.
    """
    for field, what in _SUBJECTS:
        one, other = (getattr(side.identity, field) for side in (first, second))
        if one != other:
            raise DataError(
                f"captures of different {what}: found {str(one)[:12]} ({first.identity.model}) and {str(other)[:12]} "
                f"({second.identity.model}), expected the same"
            )
    notes = []
    if first.digest and first.identity.replay_of == second.digest:
        first, second = second, first
        notes.append("The two captures were exchanged: the one that was fed the other's values is the second.")
    if first.identity.replay_of is not None:
        raise DataError("the first capture is itself a replay of a third one; expected one made without --replay")
    same_inputs = second.identity.replay_of is not None
    if same_inputs and second.identity.replay_of != first.digest:
        raise DataError("the second capture is a replay of another file than the first; expected captures of one pair")
    if missing := sorted({*first.operators["name"]} ^ {*second.operators["name"]}):
        raise DataError(f"the captures have other operators: {', '.join(missing[:3])} on one side only")
    shared = first.sample.shared(second.sample)
    if not shared.num_rows:
        raise DataError("the captures have no recorded token in common; capture again with the same --max-rows")
    if not same_inputs:
        notes.append(
            "The second capture was not made with --replay, so the inputs of operators are those of their side: "
            "operator errors are differences of the errors against exact results, on sampled channels."
        )
    return Sides(first, second, shared, same_inputs), notes


def setting_differences(first: CaptureIdentity, second: CaptureIdentity) -> tuple[str, ...]:
    """Return the settings that differ, as `name: first / second`."""
    found = _differing(dict(first), dict(second), keys=_SETTINGS)
    for title in ("numerics", "versions", "config"):
        found += _differing(getattr(first, title), getattr(second, title), prefix=f"{title}.")
    return tuple(found)


def function_differences(first: CaptureIdentity, second: CaptureIdentity) -> tuple[str, ...]:
    """Return the settings of the model that differ and may change what it computes, as `name: first / second`.

    Keys that one file leaves out have the default of transformers.
    """
    one, other = (settings_of_values(_completed(identity.config)) for identity in (first, second))
    return tuple(_differing(one, other))


def _differing(
    one: Mapping[str, object], other: Mapping[str, object], *, prefix: str = "", keys: Sequence[str] = ()
) -> list[str]:
    keys = keys or sorted((one.keys() | other.keys()) - set(_IGNORED_CONFIG))
    return [f"{prefix}{key}: {one.get(key)} / {other.get(key)}" for key in keys if one.get(key) != other.get(key)]


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


def scored_by_both(first: Capture, second: Capture) -> pl.DataFrame:
    """Return the tokens that have a log-probability, with the columns of the second capture as `*_second`."""
    both = first.tokens.join(second.tokens, on=["sequence", "position"], suffix="_second")
    return both.drop_nulls(["log_probability", "log_probability_second"])


def log_probability_differences(first: Capture, second: Capture) -> LogProbabilities:
    """Return how the log-probabilities of all tokens differ."""
    both = scored_by_both(first, second)
    difference = (both["log_probability_second"] - both["log_probability"]).to_torch()
    decoded = (both["is_decoded"] | both["is_decoded_second"]).to_torch()
    return LogProbabilities(
        num_tokens=both.height,
        mean=finite(difference.mean()),
        rms=root_mean_square(difference),
        p99=finite(quantile(difference.abs(), 0.99)),
        largest=finite(difference.abs().max()),
        argmax_changes=float((both["predicted"] != both["predicted_second"]).mean() or 0.0),  # type: ignore[arg-type]
        prefill_rms=root_mean_square(difference[~decoded]) if bool((~decoded).any()) else None,
        decode_rms=root_mean_square(difference[decoded]) if bool(decoded.any()) else None,
    )


def _compared(sides: Sides, first: dict[str, Any], second: dict[str, Any]) -> OperatorParity:
    """Return the comparison of an operator, whose rows in the tables of both sides are given."""
    name, kind = str(first["name"]), str(first["kind"])
    one, other = sides.results(name)
    exact, bounds = sides.both("exact", name), sides.both("bound", name)
    bound = (bounds[0] + bounds[1]).double()
    channels = sampled_channels(one.shape[1])
    if sides.same_inputs:
        error = other.double() - one.double()
        at_channels = error[:, channels]
    else:
        one, other = one[:, channels], other[:, channels]
        at_channels = error = (other.double() - exact[1]) - (one.double() - exact[0])
    results, input_rms = one.double(), sides.both("input_rms", name)[0]
    result_rms = results.square().mean().sqrt()
    rms = float(result_rms) or 1.0
    gain = finite((error * results).mean() / rms**2)
    algorithms = _algorithms(first, second)
    # Weights and inputs of another dtype are themselves rounded.
    drift = _largest_share(exact[1] - exact[0], bound * (_SAME_EXACT if sides.is_same_dtype else 2))
    verdict, reason = _judged(sides, first, second, sides.results(name), float(drift), algorithms, gain)
    coarser = max(one.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    units = ulps(error, results, coarser)
    own_one, own_other = (part.double() for part in sides.results(name, of_own_passes=True))
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
    results: tuple[Tensor, Tensor],
    drift: float,
    algorithms: tuple[str | None, str | None],
    gain: float,
) -> tuple[OperatorVerdict, str]:
    """Return the verdict on an operator and its reason. `drift`: between exact results, relative to its bound."""
    one, other = results
    has_same_bits = one.dtype == other.dtype and torch.equal(one, other)
    equal: tuple[OperatorVerdict, str] = ("equal", "every element has the same bits")
    if sides.same_inputs and has_same_bits:
        return equal
    named = (("first", first, one, sides.first), ("second", second, other, sides.second))
    for side, row, values, capture in named:
        # On all channels: exact results are known on the sampled ones only.
        if not bool(values.isfinite().all()):
            return "fault", f"the {side} side has values that are not finite"
        if not row["is_linked"]:
            return "fault", f"on the {side} side its input is not what the operator before it returned"
        is_reduced = _may_be_reduced(capture.identity, row) and abs(gain) < _LARGEST_GAIN_OF_ROUNDING
        if row["loose"] > 1 and not is_reduced:
            return "fault", f"the {side} side is {row['loose']:.3g} times its forward error bound from the exact result"
    if sides.same_inputs and drift > 1:
        return "fault", "on the same input the sides compute something else: other weights or settings"
    for side, row, *_ in named:
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


def _summary(
    verdict: ParityVerdict, sides: Sides, beyond: list[OperatorParity], other_function: tuple[str, ...], rms: float
) -> str:
    match verdict:
        case "stale weights":
            parts = [
                f"the {name} side computed with other weights than its files: {_list(side.identity.stale_parameters)}"
                for name, side in (("first", sides.first), ("second", sides.second))
                if side.identity.stale_parameters
            ]
            return f"{'; '.join(parts)}. What follows is not noise of a machine."
        case "different function":
            return (
                f"the two sides do not compute the same function: their models have other settings "
                f"({_list(other_function)}), and log-probabilities differ by {rms:.2g} nats (RMS). Operators were "
                "compared with what the settings of their side ask for; capture the second side again with --replay "
                "to see which of them differ on the same input."
            )
        case "equal":
            return "every operator gives the same bits on both sides."
        case "not located":
            return (
                "log-probabilities differ although the recorded operators are equal: the cause is in tokens, batches "
                "or channels that were not recorded. Capture again with more --rows."
            )
        case "rounding" if sides.same_inputs:
            return "all operators differ by rounding at most."
        case "rounding":
            return "every operator is within rounding of the exact result for the input that it has on its side."
    kinds = [operator.kind for operator in beyond if operator.verdict == verdict]
    return (
        f"{len(kinds)} operators ({_list(list(Counter(kinds)))}) are of verdict {verdict!r}; the first beyond rounding "
        f"is {beyond[0].name}: {beyond[0].reason}."
    )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


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


def root_mean_square(values: Tensor) -> float:
    """Return the root mean square as a number that JSON can hold; 0 of nothing."""
    return finite(values.double().square().mean().sqrt()) if len(values) else 0.0


def finite(value: Tensor) -> float:
    """Return a number that JSON can hold; a result that is not finite has the largest error."""
    number = float(value)
    return number if math.isfinite(number) else 1e308
