"""Checks of simulated faults: every requested one ran in every phase, and masks gradients where it replaces values."""

from aqnpipe.config.noise import Fault
from aqnpipe.noise.receipts.receipt_content import ReceiptContent

_MASKING_FAULTS = frozenset({"dead_zone", "saturation", "spike"})
"""Faults that replace an element by another value, which has no gradient; the other faults add to the element."""


def fault_problems(receipt: ReceiptContent) -> list[str]:
    """Return one line per mismatch between the requested faults and those that ran."""
    unknown = {cell.fault for cell in receipt.fault_cells} - set(range(len(receipt.faults)))
    problems = [
        f"fault number {number} was applied, {len(receipt.faults)} were requested" for number in sorted(unknown)
    ]
    for number, fault in enumerate(receipt.faults):
        where = f"fault {fault.type} in layer {fault.layer} ({fault.site})"
        cells = {cell.phase: cell for cell in receipt.fault_cells if cell.fault == number}
        for record in receipt.phases:
            if record.phase != "backward" and (record.phase not in cells or not cells[record.phase].calls):
                problems.append(f"{record.phase}: {where} did not run")
        if cells and not any(cell.changed for cell in cells.values()):
            elements = sum(cell.elements for cell in cells.values())
            problems.append(f"{where} changed none of {elements} elements")
        problems += _gradient_problems(receipt, number, fault, where)
    return problems


def _gradient_problems(receipt: ReceiptContent, number: int, fault: Fault, where: str) -> list[str]:
    flow = next((flow for flow in receipt.gradient_flows if flow.fault == number), None)
    if flow is None:
        ran = any(record.phase == "backward" and record.passes for record in receipt.phases)
        return [f"backward: no gradient was measured at {where}"] if ran else []
    if fault.type in _MASKING_FAULTS and flow.leaked:
        return [f"backward: {where}: {flow.leaked} elements that it replaced passed a gradient"]
    alone = sum(other.layer == fault.layer and other.site == fault.site for other in receipt.faults) == 1
    if fault.type not in _MASKING_FAULTS and alone and flow.zeroed:
        return [f"backward: {where}: {flow.zeroed} gradients were zeroed, expected none"]
    return []
