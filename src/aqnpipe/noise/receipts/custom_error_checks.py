"""Checks of an error model of a user's own: that it has an effect, and the size that was announced.

That its values are those of its function is checked where they are recomputed, in the audit.
"""

import math

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.noise import ModuleNoise, OperatorNoise, Phase
from aqnpipe.noise.receipts.receipt_content import ReceiptContent
from aqnpipe.noise.receipts.rounding import left_by_rounding
from aqnpipe.noise.receipts.table import Row


def custom_error_problems(receipt: ReceiptContent) -> list[str]:
    """Return one line per phase whose error of a user's own had no effect, or another size than was announced."""
    return [
        problem
        for noise in (receipt.operator_noise, receipt.module_noise)
        if noise is not None and isinstance(noise.error, CustomError)
        for record in receipt.phases
        if record.phase in noise.phases
        for problem in _size_problems(noise.error, record.phase, _cells_of(receipt, noise, record.phase))
    ]


def _cells_of(receipt: ReceiptContent, noise: OperatorNoise | ModuleNoise, phase: Phase) -> list[Row]:
    of_modules = isinstance(noise, ModuleNoise)
    return [
        cell
        for cell in receipt.cells
        if (cell.phase, cell.is_module) == (phase, of_modules) and cell.measured_elements and cell.measured is not None
    ]


def _size_problems(error: CustomError, phase: Phase, cells: list[Row]) -> list[str]:
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
