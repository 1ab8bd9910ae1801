"""Checks of AQN, of keys and values in a cache, and of simulated faults.

Of AQN: the time, size and place of its noise, and the clean norm weights everywhere else. Of a cache: that attention
read the rounded keys and values, in every layer and every pass. Of faults: that every requested one ran in every phase,
and masks gradients where it replaces values.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aqnpipe.config.noise import AdaptiveNoise, Fault
from aqnpipe.noise.receipts.table import Row
from aqnpipe.noise.schedule import sigma_at

if TYPE_CHECKING:
    from aqnpipe.noise.receipts.receipt import Receipt

_MASKING_FAULTS = frozenset({"dead_zone", "saturation", "spike"})
"""Faults that replace an element by another value, which has no gradient; the other faults add to the element."""


# -- AQN ---------------------------------------------------------------------------------------------------------------


def aqn_problems(receipt: "Receipt", steps_done: int) -> Iterator[str]:
    """Yield one line per mismatch between the requested and the measured noise of AQN in the steps done."""
    aqn, syncs = receipt.aqn, receipt.weight_syncs
    if aqn is not None:
        yield from _sync_times(receipt, aqn, steps_done)
        yield from _sync_problems(receipt, aqn)
        yield from _layer_factor_problems(receipt, aqn)
    elif syncs:
        yield f"AQN ran at {len(syncs)} syncs, none was requested"
    if receipt.norms_watched:
        yield from _norm_problems(receipt)


def _sync_times(receipt: "Receipt", aqn: AdaptiveNoise, steps_done: int) -> Iterator[str]:
    if receipt.steps_per_rollout:
        due = [(step, receipt.num_workers) for step in range(0, steps_done, receipt.steps_per_rollout)]
        if [(sync.step, sync.calls) for sync in receipt.weight_syncs] != due:
            drawn = sum(sync.calls for sync in receipt.weight_syncs)
            yield f"AQN: {drawn} weight syncs, expected one at each of {len(due)} steps"
    machine = aqn.layer_sigmas_from
    if (machine is None) != (receipt.layer_factors is None):
        factors = "no layer factors" if receipt.layer_factors is None else "layer factors"
        yield f"AQN: layer_sigmas_from is {machine!r}, the receipt has {factors}"


def _sync_problems(receipt: "Receipt", aqn: AdaptiveNoise) -> Iterator[str]:
    counts = _target_counts(receipt, aqn)
    for sync in receipt.weight_syncs:
        where = f"AQN step {sync.step}"
        if not sync.is_restored:
            yield f"{where}: norm weights were not restored"
        if sync.targets not in counts:
            yield f"{where}: {sync.targets} targets, expected {counts[0]} ({aqn.targets})"
        due, used = sigma_at(aqn.schedule, sync.step or 0, receipt.num_steps, receipt.num_epochs), sync.sigma or 0.0
        if not math.isclose(used, due, rel_tol=1e-9):
            yield f"{where}: the trainer used sigma {used:.4g}, the schedule gives {due:.4g}"
        is_measured = bool(sync.recomputed) if sync.sigma_requested else sync.sigma_measured == 0
        if sync.wrong or not is_measured:
            yield f"{where}: measured sigma {sync.sigma_measured:.4g}, requested {sync.sigma_requested:.4g}"


def _target_counts(receipt: "Receipt", aqn: AdaptiveNoise) -> tuple[int, ...]:
    """Return the possible numbers of targets. For auto it depends on the kind of model, which is not recorded."""
    match aqn.targets:
        case "auto":
            return receipt.num_norms, receipt.num_layers
        case "all_norms":
            return (receipt.num_norms,)
        case "post_attention" | "hidden_states":
            return (receipt.num_layers,)


def _layer_factor_problems(receipt: "Receipt", aqn: AdaptiveNoise) -> Iterator[str]:
    for cell in receipt.weight_cells:
        requested = aqn.factor(cell.layer, receipt.layer_factors)
        if cell.wrong or not math.isclose(cell.sigma_requested, requested, rel_tol=1e-6):
            where = "outside the layers" if cell.layer is None else f"in layer {cell.layer}"
            what = "norms" if cell.phase == "rollout" else f"hidden states of {cell.phase}"
            measured = f"{cell.sigma_measured:.3f} times the schedule's sigma"
            yield f"AQN: {what} {where} got {measured}, requested {requested:.3f}"
    # Every norm of a layer may be excluded; the audit compares each norm with its own request.
    is_checked = not (aqn.is_uniform or aqn.exclude) or aqn.actor_forward
    layers = range(receipt.num_layers if is_checked else 0)
    wanted = {layer for layer in layers if aqn.factor(layer, receipt.layer_factors) > 0}
    for phase in ("rollout", "actor_forward") if aqn.actor_forward else ("rollout",):
        missing = sorted(wanted - {cell.layer for cell in receipt.weight_cells if cell.phase == phase})
        if missing and any(sync.sigma_requested > 0 for sync in receipt.weight_syncs):
            where = "" if phase == "rollout" else f" of {phase}"
            yield f"AQN: noise was requested in layers {missing}{where}, none was measured there"


def _norm_problems(receipt: "Receipt") -> Iterator[str]:
    """Yield phases with noise on the norm weights, other than rollouts whose AQN requests it, and the reverse."""
    on_norms = receipt.aqn is not None and receipt.aqn.targets != "hidden_states"
    due = sum(sync.calls for sync in receipt.weight_syncs if sync.sigma_requested > 0) if on_norms else 0
    for record in receipt.phases:
        # Without AQN there is no record of the reference's clean weights.
        if record.phase == "backward" or (record.phase == "reference" and receipt.aqn is None):
            continue
        requested = due if record.phase == "rollout" else 0
        if not record.norms_checked:
            yield f"{record.phase}: its norm weights were never compared with the clean ones"
        elif record.norms_noised != requested:
            passes = f"{record.norms_noised} of {record.norms_checked} forward passes"
            yield f"{record.phase}: computed with noise on the norm weights in {passes}, requested in {requested}"


# -- keys and values in a cache ----------------------------------------------------------------------------------------


def cache_problems(receipt: "Receipt", *, has_ended: bool) -> Iterator[str]:
    """Yield one line per mismatch in the rounding of keys and values. `has_ended`: every phase must have run."""
    noise = receipt.kv_cache
    passes = {record.phase: record.passes for record in receipt.phases}
    wanted = noise.phases if noise is not None else ()
    if noise is not None and has_ended and not any(passes.get(phase) for phase in wanted):
        yield f"kv_cache was requested in {', '.join(wanted)} alone, which never ran"
        return
    for phase, number in passes.items():
        rows = {row.layer: row for row in receipt.cache_cells if row.phase == phase}
        if phase in wanted and number:
            for layer in range(receipt.num_layers):
                row = rows.get(layer) or Row(phase, None, layer)
                yield from (f"{phase}: the cache of layer {layer}{problem}" for problem in _of_layer(row, number))
        elif rows and phase not in wanted:
            yield f"{phase}: keys and values were rounded, which was not requested"


def cache_error(rows: Sequence[Row]) -> float | None:
    """Return the root mean square of what rounding adds, relative to that of keys and values; None without any."""
    exact = sum(row.expected_squares for row in rows)
    return math.sqrt(sum(row.squares for row in rows) / exact) if exact else None


def _of_layer(row: Row, passes: int) -> Iterator[str]:
    if row.calls < passes:
        yield f" was verified in {row.calls} of {passes} forward passes: attention read no keys and values from it"
    found = [
        f"{row.wrong} of {row.elements} keys and values that attention read were not rounded" if row.wrong else "",
        f"{row.escaped} of {row.recomputed} new ones, rounded, were not read" if row.escaped else "",
    ]
    if any(found):
        yield f": {'; '.join(filter(None, found))}"
    if row.calls and not row.squares:
        yield f": rounding changed none of its {row.recomputed} keys and values"


# -- simulated faults --------------------------------------------------------------------------------------------------


def fault_problems(receipt: "Receipt") -> Iterator[str]:
    """Yield one line per mismatch between the requested faults and those that ran."""
    unknown = {cell.fault for cell in receipt.fault_cells} - set(range(len(receipt.faults)))
    for number in sorted(unknown):
        yield f"fault number {number} was applied, {len(receipt.faults)} were requested"
    for number, fault in enumerate(receipt.faults):
        where = f"fault {fault.type} in layer {fault.layer} ({fault.site})"
        cells = {cell.phase: cell for cell in receipt.fault_cells if cell.fault == number}
        for record in receipt.phases:
            if record.phase != "backward" and (record.phase not in cells or not cells[record.phase].calls):
                yield f"{record.phase}: {where} did not run"
        if cells and not any(cell.changed for cell in cells.values()):
            yield f"{where} changed none of {sum(cell.elements for cell in cells.values())} elements"
        yield from _gradient_problems(receipt, number, fault, where)


def _gradient_problems(receipt: "Receipt", number: int, fault: Fault, where: str) -> Iterator[str]:
    flow = next((flow for flow in receipt.gradient_flows if flow.fault == number), None)
    alone = sum(other.layer == fault.layer and other.site == fault.site for other in receipt.faults) == 1
    if flow is None:
        if any(record.phase == "backward" and record.passes for record in receipt.phases):
            yield f"backward: no gradient was measured at {where}"
    elif fault.type in _MASKING_FAULTS:
        if flow.leaked:
            yield f"backward: {where}: {flow.leaked} elements that it replaced passed a gradient"
    elif alone and flow.zeroed:
        yield f"backward: {where}: {flow.zeroed} gradients were zeroed, expected none"
