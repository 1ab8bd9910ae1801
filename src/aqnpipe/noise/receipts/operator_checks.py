"""Checks of operator noise and module noise: the phases, layers, operators and sizes, and the reference check."""

import math
from collections.abc import Sequence

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
from aqnpipe.noise.receipts.passes import places_with_gradients
from aqnpipe.noise.receipts.receipt_content import ReceiptContent
from aqnpipe.noise.receipts.table import Row, TablePhase

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


def operator_problems(receipt: ReceiptContent, *, has_ended: bool = True, is_share: bool = False) -> list[str]:
    """Return one line per mismatch in operator and module noise.

    `has_ended`: every phase must have run. `is_share`: the receipt is of one worker of several, and all rewards of its
    groups may have been equal: its gradients were zero then, and only those of all workers have a size.
    """
    return [
        *(_phases_that_did_not_run(receipt) if has_ended else []),
        *_noise_that_was_not_requested(receipt),
        *_operator_noise_missing(receipt),
        *_module_noise_missing(receipt),
        *_audit_problems(receipt),
        *_noise_of_wrong_size(receipt),
        *([] if is_share else _noise_without_size(receipt)),
        *_custom_error_problems(receipt),
        *_reference_check_problems(receipt),
    ]


def _is_requested(noise: OperatorNoise | ModuleNoise | None, phase: TablePhase) -> bool:
    return noise is not None and noise.is_active and phase in noise.phases


def _phases_that_did_not_run(receipt: ReceiptContent) -> list[str]:
    ran = {record.phase for record in receipt.phases if record.passes}
    problems = [f"phase {phase} never ran" for phase in receipt.expected_phases if phase not in ran]
    for noise in (receipt.operator_noise, receipt.module_noise):
        # A training without KL has no reference phase, so a single requested phase may be missing.
        if noise is not None and noise.is_active and not ran & set(noise.phases):
            problems.append(f"noise was requested in {', '.join(noise.phases)} alone, which never ran")
    return problems


def _noise_that_was_not_requested(receipt: ReceiptContent) -> list[str]:
    """Return a line per phase and error that was put on anything else than what it was requested of."""
    found: dict[tuple[str, str, float], list[Row]] = {}
    for cell in receipt.cells:
        error = _requested_error(receipt, cell)
        if error is None or (cell.kind, cell.requested) != (error.kind, requested_size(error)):
            found.setdefault((cell.phase, cell.kind, cell.requested), []).append(cell)
    problems = [
        f"{cells[0].where}: noised with {kind} {size:g}, which was not requested"
        + (f", and {len(cells) - 1} more operators" if len(cells) > 1 else "")
        for (_, kind, size), cells in found.items()
    ]
    for record in receipt.phases:
        # Of modules that should have no noise, also where only some layers have it.
        if record.largest_difference != 0.0:
            problems.append(
                f"{record.phase}: operators differ from plain torch by {record.largest_difference:.3g}, "
                "no noise was requested"
            )
    return problems


def _operator_noise_missing(receipt: ReceiptContent) -> list[str]:
    noise = receipt.operator_noise
    if noise is None:
        return []
    return [
        problem
        for record in receipt.phases
        if _is_requested(noise, record.phase)
        for problem in _coverage_problems(receipt, noise, record)
    ]


def _coverage_problems(receipt: ReceiptContent, noise: OperatorNoise, record: Row) -> list[str]:
    """Return mismatches between the layers and operators that `noise` requests and those with noise in one phase."""
    wanted = {layer for layer in range(receipt.num_layers) if noise.error_in(layer) is not None}
    cells = [cell for cell in receipt.cells if cell.phase == record.phase and cell.calls > 0 and not cell.is_module]
    reached: dict[int | None, set[str]] = {}
    for cell in cells:
        operator = cell.operator.split(".")[0]
        reached.setdefault(cell.layer, set()).add("attention" if "attention" in operator else operator)
    problems = []
    required = wanted & places_with_gradients(receipt, record.phase)
    missing = sorted(required - reached.keys())
    if missing:
        problems.append(f"noise was requested but never reached layers {missing}")
    for kinds in _operator_kinds(noise):
        without = sorted(layer for layer in required & reached.keys() if reached[layer].isdisjoint(kinds))
        if without:
            advice = _ADVICE.get(kinds, "")
            problems.append(f"no {_WORDS[kinds]} was noised in layers {without}{advice}")
    problems += _measured_operators_missing(noise, cells, receipt.num_layers)
    has_head = noise.error_in(None) is not None and receipt.num_layers in places_with_gradients(receipt, record.phase)
    if has_head and None not in reached:
        problems.append("lm_head was not noised although requested")
    for operator, calls in _escaped(receipt, record).items():
        advice = _FUSED_ADVICE if "attention" in operator else "not supported"
        problems.append(f"{calls} calls of {operator} had no noise ({advice})")
    problems += _share_missing(receipt, noise, record)
    return [f"{record.phase}: {problem}" for problem in problems]


def _escaped(receipt: ReceiptContent, record: Row) -> dict[str, int]:
    return {row.operator: row.escaped for row in receipt.rows if row.phase == record.phase and row.escaped}


def _share_missing(receipt: ReceiptContent, noise: OperatorNoise, record: Row) -> list[str]:
    """Return a line if operations of a forward pass had no noise although all products were to have it.

    An arm that names its layers accepts products around them.
    """
    places = (None, *range(receipt.num_layers))
    all_wanted = noise.layers is None and all(noise.error_in(layer) is not None for layer in places)
    # A quantization changes the operands of products with a weight, not the two products of attention.
    if not all_wanted or isinstance(noise.error, FakeQuantization) or _escaped(receipt, record):
        return []
    without = record.flops - record.noised_flops
    return [f"{without} of {record.flops} operations of its forward passes had no noise"] if without else []


def _measured_operators_missing(noise: OperatorNoise, cells: Sequence[Row], num_layers: int) -> list[str]:
    """Return one line per layer with measured errors that were not applied, and one if all of them are zero."""
    if not isinstance(noise.error, MeasuredError):
        return []
    problems = []
    places = {layer: noise.error_in(layer) for layer in (*range(num_layers), None)}
    measured = {layer: errors for layer, errors in places.items() if isinstance(errors, LayerErrors)}
    if not any(error.size for errors in measured.values() for error in errors.operators.values()):
        problems.append(
            "the measured error is zero in all requested layers, expected layers in which the machine has an error"
        )
    for layer, errors in measured.items():
        reached = {cell.operator.partition(".")[2] for cell in cells if cell.layer == layer}
        missing = sorted(name for name, error in errors.operators.items() if error.size and name not in reached)
        if missing:
            place = "outside the layers" if layer is None else f"in layer {layer}"
            problems.append(f"the measured error of {', '.join(missing)} was put on nothing {place}")
    return problems


def _operator_kinds(noise: OperatorNoise) -> list[tuple[str, ...]]:
    """Return groups of operators. Every noised layer must have noise on at least one operator of each group."""
    if isinstance(noise.error, FakeQuantization):
        return [_PRODUCTS]
    attention = _FUSED_ATTENTION if noise.attention == "fused" else _DECOMPOSED_ATTENTION
    return [_PRODUCTS, attention, *([_NORMS, _ACTIVATIONS] if noise.operators == "all" else [])]


def _module_noise_missing(receipt: ReceiptContent) -> list[str]:
    noise = receipt.module_noise
    if noise is None:
        return []
    return [
        f"{record.phase}: module noise reached {len(record.modules)} of {receipt.num_noised_modules} modules"
        for record in receipt.phases
        if _is_requested(noise, record.phase)
        and (len(record.modules) != receipt.num_noised_modules or not receipt.num_noised_modules)
    ]


def _noise_of_wrong_size(receipt: ReceiptContent) -> list[str]:
    # Where the numbers are wrong, their size is no second problem.
    contradicted = {record.phase for record in receipt.phases if record.contradictions}
    cells = [cell for cell in receipt.cells if cell.phase not in contradicted and _requested_error(receipt, cell)]
    return [problem for cell in cells for problem in size_problems(cell)] + mean_problems(cells)


def _noise_without_size(receipt: ReceiptContent) -> list[str]:
    without_size = [cell for cell in receipt.cells if cell.is_zero]
    return [
        f"{phase} noise has no size: all results that were recomputed are zero"
        for phase in dict.fromkeys(cell.phase for cell in without_size)
        if not any(cell.measured_elements for cell in receipt.cells if cell.phase == phase)
    ]


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
    together = [
        Row(phase).include(cell for cell in gaussian if cell.phase == phase)
        for phase in dict.fromkeys(cell.phase for cell in gaussian)
    ]
    each = [problem for cell in gaussian for problem in _mean_problem(cell.where, cell)]
    return each or [problem for whole in together for problem in _mean_problem(whole.phase, whole)]


def _mean_problem(where: str, sums: Row) -> list[str]:
    if sums.measured_elements < _FEWEST_FOR_A_SIZE:
        return []
    mean = sums.error_sum / sums.measured_elements
    rounding = math.sqrt(sums.rounding_squares / sums.measured_elements)
    allowed = _MEAN_BAND * math.sqrt(sums.squares) / sums.measured_elements + _BIAS_OF_ROUNDING * rounding
    if abs(mean) <= allowed:
        return []
    return [f"{where}: the error has a mean of {mean:.3g}, requested 0; chance explains {allowed:.2g}"]


def _requested_error(receipt: ReceiptContent, cell: Row) -> AppliedError | None:
    noise = receipt.module_noise if cell.is_module else receipt.operator_noise
    if noise is None or not _is_requested(noise, cell.phase):
        return None
    if isinstance(noise, ModuleNoise):
        return noise.error
    error = noise.error_in(cell.layer)
    return error.operators.get(cell.operator.partition(".")[2]) if isinstance(error, LayerErrors) else error


def _custom_error_problems(receipt: ReceiptContent) -> list[str]:
    """Return one line per phase whose error of a user's own had no effect, or another size than was announced."""
    return [
        problem
        for noise in (receipt.operator_noise, receipt.module_noise)
        if noise is not None and isinstance(noise.error, CustomError)
        for record in receipt.phases
        if record.phase in noise.phases
        for problem in _own_size_problems(noise.error, record.phase, _cells_of(receipt, noise, record.phase))
    ]


def _cells_of(receipt: ReceiptContent, noise: OperatorNoise | ModuleNoise, phase: TablePhase) -> list[Row]:
    of_modules = isinstance(noise, ModuleNoise)
    return [
        cell
        for cell in receipt.cells
        if (cell.phase, cell.is_module) == (phase, of_modules) and cell.measured_elements and cell.measured is not None
    ]


def _own_size_problems(error: CustomError, phase: TablePhase, cells: list[Row]) -> list[str]:
    elements = sum(cell.measured_elements for cell in cells)
    if not elements:
        return []  # Another check says that nothing was measured.
    measured, rounding = (
        math.sqrt(sum((value or 0.0) ** 2 * cell.measured_elements for cell, value in values) / elements)
        for values in ([(cell, cell.measured) for cell in cells], [(cell, cell.rounding) for cell in cells])
    )
    is_lost = error.sizes[0] > 0 and not left_by_rounding(error.sizes[0], rounding)
    if not is_lost and not any(cell.changed for cell in cells):
        return [f"{phase}: {error.function} changed none of {sum(cell.elements for cell in cells):,} elements"]
    low, high = error.sizes
    # Rounding adds its own error to a large one, and removes one that is smaller than half the spacing of numbers.
    limits = left_by_rounding(low, rounding), math.hypot(high, rounding)
    problem = error.size_problem(measured, elements, "elements", limits)
    return [f"{phase}: {problem}"] if problem else []


def _audit_problems(receipt: ReceiptContent) -> list[str]:
    problems = []
    for record in receipt.phases:
        if not record.passes:
            continue
        found = list(record.contradictions.items())
        problems += [
            f"{record.phase}: {what}{f' ({count} times)' if count > 1 else ''}"
            for what, count in found[:_LISTED_CONTRADICTIONS]
        ]
        if len(found) > _LISTED_CONTRADICTIONS:
            problems.append(f"{record.phase}: {len(found) - _LISTED_CONTRADICTIONS} more contradictions")
        has_noise = _has_noised_parts(receipt, record.phase)
        if record.graph_replays and (has_noise or receipt.aqn or receipt.faults):
            which = f"{record.graph_replays} of {record.passes} forward passes"
            problems.append(f"{record.phase}: {which} replayed CUDA graphs, which have neither noise nor faults")
        if not has_noise:
            continue
        if not record.audited_passes:
            problems.append(f"{record.phase}: it ran {record.passes} times and was never audited")
        elif not record.recomputed and not _only_quantizes(receipt, record.phase):
            problems.append(f"{record.phase}: no number of its noise was recomputed")
    return problems


def _has_noised_parts(receipt: ReceiptContent, phase: TablePhase) -> bool:
    """Return whether any layer of this model was requested to have noise in `phase`."""
    noise = receipt.operator_noise
    in_layers = noise is not None and any(
        noise.error_in(layer) is not None for layer in [None, *range(receipt.num_layers)]
    )
    return (in_layers and _is_requested(noise, phase)) or _is_requested(receipt.module_noise, phase)


def _only_quantizes(receipt: ReceiptContent, phase: TablePhase) -> bool:
    """Return whether the noise of a phase has no values of its own: a quantization changes operands of products."""
    noise = receipt.operator_noise
    return (
        noise is not None
        and isinstance(noise.error, FakeQuantization)
        and not _is_requested(receipt.module_noise, phase)
    )


def _reference_check_problems(receipt: ReceiptContent) -> list[str]:
    problems = []
    for record in receipt.phases:
        if record.phase == "backward" or not record.passes:
            continue
        if not record.compared:
            problems.append(f"{record.phase}: no operator output was compared with plain torch")
            continue
        quantizes = _only_quantizes(receipt, record.phase) and _has_noised_parts(receipt, record.phase)
        if quantizes and record.reference_scale == 0:
            problems.append(f"{record.phase}: outputs do not differ from plain torch, fake_quantization was requested")
    return problems
