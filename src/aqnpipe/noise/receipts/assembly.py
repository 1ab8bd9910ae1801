"""Turns the running sums of a recorder into the parts of a receipt."""

from aqnpipe.config.noise import requested_size
from aqnpipe.config.own_noise import OwnError
from aqnpipe.noise.receipts.receipt_content import (
    GradientFlow,
    NoiseCell,
    PhaseRecord,
    WeightCell,
)
from aqnpipe.noise.receipts.recorder_state import (
    CellSums,
    FactorSums,
    GradientSums,
    PhaseSums,
)

_VISIBLE_ROUNDING = 0.01
"""Share of the requested size from which on a receipt states the rounding of the number format."""


def phase_record(sums: PhaseSums) -> PhaseRecord:
    """Return the record of one phase."""
    audit, reference = sums.audit, sums.audit.reference
    relative = reference.relative_elements
    return PhaseRecord(
        phase=sums.phase,
        forwards=sums.forwards,
        noised_calls=sums.noised_calls,
        reference_checked_elements=reference.elements,
        reference_check_difference=reference.largest_difference,
        reference_check_scale=(reference.squares / relative) ** 0.5 if relative else 0.0,
        audited_passes=dict(audit.passes),
        recomputed_numbers=audit.numbers,
        largest_deviation=audit.largest_deviation,
        contradictions=dict(audit.contradictions),
        escaped=dict(sums.escaped),
        forward_flops=sums.flops or 0,
        noised_flops=sums.noised_flops,
        gradients=tuple(sorted(sums.gradients)) if sums.gradients is not None else None,
        modules_noised=len(sums.modules),
        norms_checked=sums.norms_checked,
        norms_noised=sums.norms_noised,
    )


def place_of(cell: CellSums) -> tuple[str, bool, int, str]:
    """Return the sort key of a cell: phase, layer (outside the layers last), operator."""
    return cell.phase, cell.layer is None, cell.layer or 0, cell.operator


def noise_cell(cell: CellSums) -> NoiseCell:
    """Return the cell of one operator, or kind of module, of one layer in one phase."""
    is_own, requested = isinstance(cell.error, OwnError), requested_size(cell.error)
    rounding = (cell.ratios.rounding_squares / cell.ratios.count) ** 0.5 if cell.ratios.count else None
    is_visible = is_own or (rounding is not None and rounding > _VISIBLE_ROUNDING * requested)
    return NoiseCell(
        phase=cell.phase,
        operator=cell.operator,
        layer=cell.layer,
        calls=cell.calls,
        elements=cell.elements,
        error=cell.error.kind,
        requested=requested,
        measured=cell.ratios.root_mean_square if cell.ratios.count else None,
        mean_error=cell.ratios.total / cell.ratios.count if cell.ratios.count else None,
        measured_elements=cell.ratios.count,
        changed_elements=cell.changed if is_own else None,
        rounding=rounding if is_visible else None,
        zeros=0 if cell.ratios.count else cell.ratios.zeros,
    )


def weight_cell(sums: FactorSums) -> WeightCell:
    """Return the cell of AQN's noise in one layer."""
    expected = sums.expected_squares
    return WeightCell(
        phase=sums.phase,
        layer=sums.layer,
        measured_factor=(sums.squares / sums.elements) ** 0.5,
        elements=sums.elements,
        rounding_factor=(expected / sums.drawn_squares) ** 0.5,
        standard_error=sums.expected_variance**0.5 / (2 * expected) if expected else 0.0,
    )


def gradient_flow(sums: GradientSums) -> GradientFlow:
    """Return the gradients at one simulated fault."""
    carried, zeroed, leaked, squares, zeroed_squares = sums.totals
    return GradientFlow(
        fault=sums.fault,
        calls=sums.calls,
        elements=int(carried),
        zeroed_elements=int(zeroed),
        leaked_elements=int(leaked),
        norm=squares**0.5,
        zeroed_norm=zeroed_squares**0.5,
    )
