"""Checks of operator noise and module noise: the phases, layers, operators and sizes, and the reference check."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.measured_noise import LayerErrors, MeasuredError
from aqnpipe.config.noise import (
    AppliedError,
    FakeQuantization,
    ModuleNoise,
    OperatorNoise,
    is_fixed,
    requested_size,
)
from aqnpipe.noise.receipts.passes import noised_places, places_with_gradients
from aqnpipe.noise.receipts.table import Row, TablePhase

if TYPE_CHECKING:
    from aqnpipe.noise.receipts.receipt import Receipt

_LISTED_CONTRADICTIONS = 8

_LEAST_SHARE = 0.5
"""Noise is refused if less than this share is measured of what rounding must leave of it."""

_FEWEST_FOR_A_SIZE = 64
"""Elements from which on half of the requested scale cannot be chance: 5.6 standard errors."""

_MEAN_BAND = 6.5 * math.sqrt(3)
"""Largest sum of errors around 0, as a multiple of the root of the sum of their squares.

6.5 standard errors: for symmetric independent errors at most 2 exp(-6.5^2 / 2) = 1.3e-9 of the cells are beyond it, by
chance (Efron 1969). Elements are drawn with replacement and a layer under checkpointing is seen twice, which at most
triples the variance of the sum.
"""

_HALF_A_STEP = math.sqrt(3)
"""Half the distance between neighbouring numbers, in standard deviations of rounding to them."""

_BIAS_OF_ROUNDING = 0.01
"""Largest mean error that rounding leaves, as a multiple of its own size.

At powers of two the spacing of numbers halves toward 0: -0.0024 in 2e7 simulated bfloat16 numbers, scale 0.002.
"""

_PRODUCTS = ("linear", "mm", "mv", "bmm", "_grouped_mm")
_NORMS = ("rms_norm", "layer_norm", "norm", "norm_gradient", "native_layer_norm", "native_layer_norm_backward")
_ACTIVATIONS = ("silu", "gelu", "silu_backward", "gelu_backward")
_DECOMPOSED_ATTENTION = ("bmm",)
_FUSED_ATTENTION = ("attention", "bmm")
_WORDS: dict[tuple[str, ...], str] = {
    _PRODUCTS: "product with a weight",
    _NORMS: "norm",
    _ACTIVATIONS: "silu or gelu",
    _DECOMPOSED_ATTENTION: "product of attention",
    _FUSED_ATTENTION: "attention",
}
_ADVICE: dict[tuple[str, ...], str] = {
    **dict.fromkeys((_NORMS, _ACTIVATIONS), ", expected operators: matmul"),
    _DECOMPOSED_ATTENTION: ", expected eager attention (or attention: fused); name the layers that have it",
}
_FUSED_ADVICE = (
    "use eager attention, or set attention: fused, which `noisy` reads from the model's config._attn_implementation"
)


def operator_problems(receipt: "Receipt", *, has_ended: bool = True, is_share: bool = False) -> Iterator[str]:
    """Yield one line per mismatch in operator and module noise.

    `has_ended`: every phase must have run. `is_share`: the receipt is of one worker of several, and all rewards of its
    groups may have been equal: its gradients were zero then, and only those of all workers have a size.
    """
    if has_ended:
        yield from _phases_that_did_not_run(receipt)
    yield from _noise_that_was_not_requested(receipt)
    noise, modules = receipt.operator_noise, receipt.module_noise
    for record in receipt.phases:
        if noise is not None and _is_requested(noise, record.phase):
            yield from (f"{record.phase}: {problem}" for problem in _coverage_problems(receipt, noise, record))
    selected = receipt.num_noised_modules
    for record in receipt.phases:
        if _is_requested(modules, record.phase) and (len(record.modules) != selected or not selected):
            yield f"{record.phase}: module noise reached {len(record.modules)} of {selected} modules"
    for record in receipt.phases:
        yield from (f"{record.phase}: {problem}" for problem in _audit_problems(receipt, record))
    yield from _noise_of_wrong_size(receipt)
    if not is_share:
        yield from _noise_without_size(receipt)
    yield from _custom_error_problems(receipt)
    for record in receipt.phases:
        if record.passes and not record.compared and record.phase != "backward":
            yield f"{record.phase}: no operator output was compared with plain torch"


def _is_requested(noise: OperatorNoise | ModuleNoise | None, phase: TablePhase) -> bool:
    return noise is not None and noise.is_active and phase in noise.phases


def _phases_that_did_not_run(receipt: "Receipt") -> Iterator[str]:
    ran = {record.phase for record in receipt.phases if record.passes}
    yield from (f"phase {phase} never ran" for phase in receipt.expected_phases if phase not in ran)
    for noise in (receipt.operator_noise, receipt.module_noise):
        # A training without KL has no reference phase, so a single requested phase may be missing.
        if noise is not None and noise.is_active and not ran & set(noise.phases):
            yield f"noise was requested in {', '.join(noise.phases)} alone, which never ran"


def _noise_that_was_not_requested(receipt: "Receipt") -> Iterator[str]:
    """Yield a line per phase and error that was put on anything else than what it was requested of."""
    found: dict[tuple[str, str, float], list[Row]] = {}
    for cell in receipt.cells:
        error = _requested_error(receipt, cell)
        if error is None or (cell.kind, cell.requested) != (error.kind, requested_size(error)):
            found.setdefault((cell.phase, cell.kind, cell.requested), []).append(cell)
    for (_, kind, size), cells in found.items():
        more = f", and {len(cells) - 1} more operators" if len(cells) > 1 else ""
        yield f"{cells[0].where}: noised with {kind} {size:g}, which was not requested{more}"
    for record in receipt.phases:
        # Of modules that should have no noise, also where only some layers have it.
        if record.largest_difference != 0.0:
            difference = f"operators differ from plain torch by {record.largest_difference:.3g}"
            yield f"{record.phase}: {difference}, no noise was requested"


def _coverage_problems(receipt: "Receipt", noise: OperatorNoise, record: Row) -> Iterator[str]:
    """Yield mismatches between the layers and operators that `noise` requests and those with noise in one phase."""
    cells = [cell for cell in receipt.cells if cell.phase == record.phase and cell.calls > 0 and not cell.is_module]
    reached: dict[int | None, set[str]] = {}
    for cell in cells:
        operator = cell.operator.split(".")[0]
        reached.setdefault(cell.layer, set()).add("attention" if "attention" in operator else operator)
    required = noised_places(receipt) & places_with_gradients(receipt, record.phase)
    layers = required - {receipt.num_layers}
    if missing := sorted(layers - reached.keys()):
        yield f"noise was requested but never reached layers {missing}"
    for kinds in _operator_kinds(noise):
        if without := sorted(layer for layer in layers & reached.keys() if reached[layer].isdisjoint(kinds)):
            yield f"no {_WORDS[kinds]} was noised in layers {without}{_ADVICE.get(kinds, '')}"
    yield from _measured_operators_missing(noise, cells, receipt.num_layers)
    if layers != required and None not in reached:
        yield "lm_head was not noised although requested"
    escaped = {row.operator: row.escaped for row in receipt.rows if row.phase == record.phase and row.escaped}
    for operator, calls in escaped.items():
        advice = _FUSED_ADVICE if "attention" in operator else "not supported"
        yield f"{calls} calls of {operator} had no noise ({advice})"
    without_noise = record.flops - record.noised_flops
    if not escaped and without_noise and _is_everywhere(receipt, noise):
        yield f"{without_noise} of {record.flops} operations of its forward passes had no noise"


def _is_everywhere(receipt: "Receipt", noise: OperatorNoise) -> bool:
    """Return whether all products were to have noise; an arm that names its layers accepts products around them."""
    is_whole = noise.layers is None and len(noised_places(receipt)) == receipt.num_layers + 1
    # A quantization changes the operands of products with a weight, not the two products of attention.
    return is_whole and not isinstance(noise.error, FakeQuantization)


def _measured_operators_missing(noise: OperatorNoise, cells: Sequence[Row], num_layers: int) -> Iterator[str]:
    """Yield one line per layer with measured errors that were not applied, and one if all of them are zero."""
    if not isinstance(noise.error, MeasuredError):
        return
    places = {layer: noise.error_in(layer) for layer in (*range(num_layers), None)}
    measured = {layer: errors for layer, errors in places.items() if isinstance(errors, LayerErrors)}
    if not any(error.size for errors in measured.values() for error in errors.operators.values()):
        yield "the measured error is zero in all requested layers, expected layers in which the machine has an error"
    for layer, errors in measured.items():
        reached = {cell.operator.partition(".")[2] for cell in cells if cell.layer == layer}
        missing = sorted(name for name, error in errors.operators.items() if error.size and name not in reached)
        if missing:
            place = "outside the layers" if layer is None else f"in layer {layer}"
            yield f"the measured error of {', '.join(missing)} was put on nothing {place}"


def _operator_kinds(noise: OperatorNoise) -> list[tuple[str, ...]]:
    """Return groups of operators. Every noised layer must have noise on at least one operator of each group."""
    if isinstance(noise.error, FakeQuantization):
        return [_PRODUCTS]
    attention = _FUSED_ATTENTION if noise.attention == "fused" else _DECOMPOSED_ATTENTION
    return [_PRODUCTS, attention, *([_NORMS, _ACTIVATIONS] if noise.operators == "all" else [])]


def _audit_problems(receipt: "Receipt", record: Row) -> Iterator[str]:
    if not record.passes:
        return
    found = list(record.contradictions.items())
    for what, count in found[:_LISTED_CONTRADICTIONS]:
        yield f"{what} ({count} times)" if count > 1 else what
    if len(found) > _LISTED_CONTRADICTIONS:
        yield f"{len(found) - _LISTED_CONTRADICTIONS} more contradictions"
    has_noise = _has_noised_parts(receipt, record.phase)
    if record.graph_replays and (has_noise or receipt.aqn or receipt.faults):
        which = f"{record.graph_replays} of {record.passes} forward passes"
        yield f"{which} replayed CUDA graphs, which have neither noise nor faults"
    if has_noise and not record.audited_passes:
        yield f"it ran {record.passes} times and was never audited"
    elif has_noise and not record.recomputed and not _only_quantizes(receipt, record.phase):
        yield "no number of its noise was recomputed"


def _has_noised_parts(receipt: "Receipt", phase: TablePhase) -> bool:
    """Return whether any layer of this model was requested to have noise in `phase`."""
    on_operators = _is_requested(receipt.operator_noise, phase) and bool(noised_places(receipt))
    return on_operators or _is_requested(receipt.module_noise, phase)


def _only_quantizes(receipt: "Receipt", phase: TablePhase) -> bool:
    """Return whether the noise of a phase has no values of its own: a quantization changes operands of products."""
    noise = receipt.operator_noise
    is_quantization = noise is not None and isinstance(noise.error, FakeQuantization)
    return is_quantization and not _is_requested(receipt.module_noise, phase)


# -- sizes -------------------------------------------------------------------------------------------------------------


def _requested_error(receipt: "Receipt", cell: Row) -> AppliedError | None:
    noise = receipt.module_noise if cell.is_module else receipt.operator_noise
    if noise is None or not _is_requested(noise, cell.phase):
        return None
    if isinstance(noise, ModuleNoise):
        return noise.error
    error = noise.error_in(cell.layer)
    return error.operators.get(cell.operator.partition(".")[2]) if isinstance(error, LayerErrors) else error


def _noise_of_wrong_size(receipt: "Receipt") -> list[str]:
    # Where the numbers are wrong, their size is no second problem.
    contradicted = {record.phase for record in receipt.phases if record.contradictions}
    cells = [cell for cell in receipt.cells if cell.phase not in contradicted and _requested_error(receipt, cell)]
    return [problem for cell in cells for problem in size_problems(cell)] + mean_problems(cells)


def _noise_without_size(receipt: "Receipt") -> Iterator[str]:
    for phase in dict.fromkeys(cell.phase for cell in receipt.cells if cell.is_zero):
        if not any(cell.measured_elements for cell in receipt.cells if cell.phase == phase):
            yield f"{phase} noise has no size: all results that were recomputed are zero"


def left_by_rounding(size: float, rounding: float | None) -> float:
    """Return the least root mean square that rounding leaves of errors of `size`, as it moves none by over half a step.

    `rounding`: standard deviation of the rounding. An error below half a step may be lost as a whole: this is what a
    number format does to it, and no mistake.
    """
    return max(size - _HALF_A_STEP * (rounding or 0.0), 0.0)


def size_problems(cell: Row) -> list[str]:
    """Return what contradicts the request in the measured size. The audit compares the numbers themselves."""
    if cell.is_zero or (cell.kind == "measured" and not cell.requested):
        # Of an operator whose measured error is zero, the audit compares the values: there is no size.
        return []
    if cell.measured is None:
        return [f"{cell.where}: {cell.calls} noised calls but nothing measured"]
    left = left_by_rounding(cell.requested, cell.rounding)
    is_gaussian = _has_independent_errors(cell) or cell.kind == "measured"
    if is_gaussian and cell.measured < _LEAST_SHARE * left and cell.measured_elements >= _FEWEST_FOR_A_SIZE:
        return [
            f"{cell.where}: measured scale {cell.measured:.3g}, requested {cell.requested:.3g}, of which rounding "
            f"to the number format explains {cell.requested - left:.3g}"
        ]
    if cell.kind == "fake_quantization" and not 0 < cell.measured < cell.requested:
        return [f"{cell.where}: measured a relative error of {cell.measured:.4g}, expected one in (0, 1)"]
    return []


def _has_independent_errors(cell: Row) -> bool:
    """Return whether every element has a number of its own; on a fixed machine equal operands have one error."""
    return cell.kind in ("relative_gaussian", "absolute_gaussian") and not is_fixed(cell.error)


def mean_problems(cells: Sequence[Row]) -> list[str]:
    """Return the cells whose errors have a mean; otherwise the phases in which those of all cells together have one."""
    gaussian = [cell for cell in cells if _has_independent_errors(cell)]
    together: dict[TablePhase, Row] = {}
    for cell in gaussian:
        together.setdefault(cell.phase, Row(cell.phase)).include([cell])
    each = [problem for cell in gaussian for problem in _mean_problem(cell.where, cell)]
    return each or [problem for phase, whole in together.items() for problem in _mean_problem(phase, whole)]


def _mean_problem(where: str, sums: Row) -> Iterator[str]:
    if sums.measured_elements < _FEWEST_FOR_A_SIZE:
        return
    mean = sums.error_sum / sums.measured_elements
    rounding = math.sqrt(sums.rounding_squares / sums.measured_elements)
    allowed = _MEAN_BAND * math.sqrt(sums.squares) / sums.measured_elements + _BIAS_OF_ROUNDING * rounding
    # A mean that is no number is none that chance explains.
    if not abs(mean) <= allowed:
        yield f"{where}: the error has a mean of {mean:.3g}, requested 0; chance explains {allowed:.2g}"


def _custom_error_problems(receipt: "Receipt") -> Iterator[str]:
    """Yield one line per phase whose error of a user's own had no effect, or another size than was announced."""
    for noise in (receipt.operator_noise, receipt.module_noise):
        if noise is None or not isinstance(noise.error, CustomError):
            continue
        measured = [cell for cell in receipt.cells if cell.is_module == isinstance(noise, ModuleNoise)]
        for phase in (record.phase for record in receipt.phases if record.phase in noise.phases):
            cells = [cell for cell in measured if cell.phase == phase and cell.measured_elements]
            total = Row(phase, error=noise.error).include(cells)
            # Another check says that nothing was measured.
            problem = _own_size_problem(noise.error, total) if cells else None
            if problem:
                yield f"{phase}: {problem}"


def _own_size_problem(error: CustomError, total: Row) -> str | None:
    low, high = error.sizes
    rounding = total.rounding or 0.0
    is_lost = low > 0 and not left_by_rounding(low, rounding)
    if not is_lost and not total.changed:
        return f"{error.function} changed none of {total.elements:,} elements"
    # Rounding adds its own error to a large one, and removes one that is smaller than half the spacing of numbers.
    limits = left_by_rounding(low, rounding), math.hypot(high, rounding)
    return error.size_problem(total.measured or 0.0, total.measured_elements, "elements", limits)
