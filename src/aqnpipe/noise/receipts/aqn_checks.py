"""Checks of AQN: the time, size and place of its noise, and the clean norm weights everywhere else."""

import math

from aqnpipe.config.noise import AdaptiveNoise
from aqnpipe.noise.receipts.receipt_content import ReceiptContent
from aqnpipe.noise.schedule import sigma_at


def aqn_problems(receipt: ReceiptContent, steps_done: int) -> list[str]:
    """Return one line per mismatch between the requested and the measured noise of AQN in the steps done."""
    return [*_weight_noise_problems(receipt, steps_done), *_norm_problems(receipt)]


def _weight_noise_problems(receipt: ReceiptContent, steps_done: int) -> list[str]:
    if receipt.aqn is None:
        return [f"AQN ran at {len(receipt.weight_syncs)} syncs, none was requested"] if receipt.weight_syncs else []
    problems, syncs = [], receipt.weight_syncs
    if receipt.steps_per_rollout:
        due = [(step, receipt.num_workers) for step in range(0, steps_done, receipt.steps_per_rollout)]
        if [(sync.step, sync.calls) for sync in syncs] != due:
            drawn = sum(sync.calls for sync in syncs)
            problems.append(f"AQN: {drawn} weight syncs, expected one at each of {len(due)} steps")
    machine = receipt.aqn.layer_sigmas_from
    if (machine is None) != (receipt.layer_factors is None):
        factors = "no layer factors" if receipt.layer_factors is None else "layer factors"
        problems.append(f"AQN: layer_sigmas_from is {machine!r}, the receipt has {factors}")
    return problems + _weight_sync_problems(receipt, receipt.aqn) + _layer_factor_problems(receipt, receipt.aqn)


def _weight_sync_problems(receipt: ReceiptContent, aqn: AdaptiveNoise) -> list[str]:
    problems = []
    counts = _target_counts(receipt, aqn)
    for sync in receipt.weight_syncs:
        where = f"AQN step {sync.step}"
        if not sync.is_restored:
            problems.append(f"{where}: norm weights were not restored")
        if sync.targets not in counts:
            problems.append(f"{where}: {sync.targets} targets, expected {counts[0]} ({aqn.targets})")
        due, used = sigma_at(aqn.schedule, sync.step or 0, receipt.num_steps, receipt.num_epochs), sync.sigma or 0.0
        if not math.isclose(used, due, rel_tol=1e-9):
            problems.append(f"{where}: the trainer used sigma {used:.4g}, the schedule gives {due:.4g}")
        is_measured = bool(sync.recomputed) if sync.sigma_requested else sync.sigma_measured == 0
        if sync.wrong or not is_measured:
            problems.append(f"{where}: measured sigma {sync.sigma_measured:.4g}, requested {sync.sigma_requested:.4g}")
    return problems


def _target_counts(receipt: ReceiptContent, aqn: AdaptiveNoise) -> tuple[int, ...]:
    """Return the possible numbers of targets. For auto it depends on the kind of model, which is not recorded."""
    match aqn.targets:
        case "auto":
            return receipt.num_norms, receipt.num_layers
        case "all_norms":
            return (receipt.num_norms,)
        case "post_attention" | "hidden_states":
            return (receipt.num_layers,)


def _layer_factor_problems(receipt: ReceiptContent, aqn: AdaptiveNoise) -> list[str]:
    problems = []
    for cell in receipt.weight_cells:
        requested = aqn.factor(cell.layer, receipt.layer_factors)
        if cell.wrong or not math.isclose(cell.sigma_requested, requested, rel_tol=1e-6):
            where = "outside the layers" if cell.layer is None else f"in layer {cell.layer}"
            what = "norms" if cell.phase == "rollout" else f"hidden states of {cell.phase}"
            problems.append(
                f"AQN: {what} {where} got {cell.sigma_measured:.3f} times the schedule's sigma, "
                f"requested {requested:.3f}"
            )
    # Every norm of a layer may be excluded; the audit compares each norm with its own request.
    is_checked = not (aqn.is_uniform or aqn.exclude) or aqn.actor_forward
    layers = range(receipt.num_layers if is_checked else 0)
    wanted = {layer for layer in layers if aqn.factor(layer, receipt.layer_factors) > 0}
    for phase in ("rollout", "actor_forward") if aqn.actor_forward else ("rollout",):
        missing = sorted(wanted - {cell.layer for cell in receipt.weight_cells if cell.phase == phase})
        if missing and any(sync.sigma_requested > 0 for sync in receipt.weight_syncs):
            where = "" if phase == "rollout" else f" of {phase}"
            problems.append(f"AQN: noise was requested in layers {missing}{where}, none was measured there")
    return problems


def _norm_problems(receipt: ReceiptContent) -> list[str]:
    """Return phases with noise on the norm weights, other than rollouts whose AQN requests it, and the reverse."""
    if not receipt.norms_watched:
        return []
    on_norms = receipt.aqn is not None and receipt.aqn.targets != "hidden_states"
    due = sum(sync.calls for sync in receipt.weight_syncs if sync.sigma_requested > 0) if on_norms else 0
    problems = []
    for record in receipt.phases:
        # Without AQN there is no record of the reference's clean weights.
        if record.phase == "backward" or (record.phase == "reference" and receipt.aqn is None):
            continue
        requested = due if record.phase == "rollout" else 0
        if not record.norms_checked:
            problems.append(f"{record.phase}: its norm weights were never compared with the clean ones")
        elif record.norms_noised != requested:
            problems.append(
                f"{record.phase}: computed with noise on the norm weights in {record.norms_noised} of "
                f"{record.norms_checked} forward passes, requested in {requested}"
            )
    return problems
