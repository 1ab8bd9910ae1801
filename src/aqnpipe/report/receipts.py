"""Receipts as the report shows them: asked against measured, per run and phase, and what was refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aqnpipe.noise.receipt import Receipt
from aqnpipe.report import numbers
from aqnpipe.report.inputs import EvaluatedCheckpoint, Run
from aqnpipe.report.tables import Row, Table

IN_ORDER, REFUSED = "in order", "refused"


@dataclass(frozen=True)
class RunReceipt:
    """One run's receipt: its phases and weight syncs in words, and its problems."""

    name: str
    phases: Table
    syncs: str
    problems: tuple[str, ...]


def run_receipts(runs: Sequence[Run]) -> list[RunReceipt]:
    """Return what the receipt of every run says, phase by phase."""
    return [
        RunReceipt(
            name=f"{run.arm} seed {run.seed}",
            phases=_phase_table(run.receipt),
            syncs=_sync_text(run.receipt),
            problems=tuple(run.receipt.problems()),
        )
        for run in runs
    ]


def run_overview(runs: Sequence[Run]) -> Table:
    """One row per run: operator noise and AQN, asked and measured."""
    headers = (
        "run",
        "receipt",
        "operator noise asked",
        "measured",
        "off by %",
        "sampling error %",
        "AQN syncs",
        "sigma asked",
        "measured / asked",
        "weights restored",
    )
    return Table("Receipts of the training runs", headers, tuple(_overview_row(run) for run in runs), 2)


def evaluation_overview(evaluations: Sequence[EvaluatedCheckpoint]) -> Table:
    """One row per evaluated checkpoint and noise level, noise seeds pooled."""
    rows = []
    for one in evaluations:
        for level in sorted({each.noise_level for each in one.receipts.passes}):
            passes = [each for each in one.receipts.passes if each.noise_level == level]
            problems = [problem for each in passes for problem in each.problems()]
            measured, elements = _pooled([each.receipt for each in passes])
            rows.append(
                Row(
                    (
                        f"{one.arm} seed {one.seed} step {one.step}",
                        REFUSED if problems else IN_ORDER,
                        numbers.scale(level),
                        numbers.scale(measured) if elements else _witness_text([each.receipt for each in passes]),
                        _deviation(measured, level) if elements else numbers.MISSING,
                        _sampling_error(elements),
                        numbers.count(elements) if elements else numbers.MISSING,
                    ),
                    alert=bool(problems),
                )
            )
    headers = ("checkpoint", "receipt", "asked", "measured", "off by %", "sampling error %", "elements measured")
    return Table("Receipts of the evaluations", headers, tuple(rows), 2)


def evaluation_problems(evaluations: Sequence[EvaluatedCheckpoint]) -> list[str]:
    """Return every problem of every evaluation receipt, named."""
    return [
        f"{one.arm} seed {one.seed} step {one.step}: {problem}"
        for one in evaluations
        for problem in one.receipts.problems()
    ]


def _overview_row(run: Run) -> Row:
    receipt, problems = run.receipt, run.receipt.problems()
    asked = receipt.operator_noise.relative_scale if receipt.operator_noise else 0.0
    measured, elements = _pooled([receipt])
    syncs = receipt.weight_syncs
    restored = all(sync.clean_sha256_before == sync.clean_sha256_after for sync in syncs)
    sigmas = [sync.sigma_asked for sync in syncs]
    return Row(
        (
            f"{run.arm} seed {run.seed}",
            REFUSED if problems else IN_ORDER,
            numbers.scale(asked) if asked else "none",
            numbers.scale(measured) if elements else _witness_text([receipt]),
            _deviation(measured, asked) if elements and asked else numbers.MISSING,
            _sampling_error(elements),
            str(len(syncs)) if syncs else "none",
            f"{min(sigmas):.3g} to {max(sigmas):.3g}" if syncs else numbers.MISSING,
            _sync_ratio(receipt),
            ("yes" if restored else "NO") if syncs else numbers.MISSING,
        ),
        alert=bool(problems),
    )


def _phase_table(receipt: Receipt) -> Table:
    rows = []
    for record in receipt.phases:
        asked = receipt.asked_scale(record.phase)
        measured, elements = receipt.measured_scale(record.phase)
        seen = f"scale {record.witness_scale:.4g}" if asked else f"difference {record.witness_difference:.3g}"
        witness = f"{seen} in {record.witnessed_elements:,}" if record.witnessed_elements else numbers.MISSING
        rows.append(
            Row(
                (
                    record.phase.replace("_", " "),
                    numbers.scale(asked) if asked else "none",
                    numbers.scale(measured) if elements else "none",
                    _deviation(measured, asked) if elements and asked else numbers.MISSING,
                    _sampling_error(elements),
                    numbers.count(elements) if elements else numbers.MISSING,
                    numbers.count(record.noised_calls),
                    witness,
                ),
                alert=bool(record.escaped)
                or (asked == 0 and bool(record.noised_calls))
                or bool(asked and not elements),
            )
        )
    headers = (
        "phase",
        "asked",
        "measured",
        "off by %",
        "sampling error %",
        "elements measured",
        "calls noised",
        "against bare torch, in elements compared",
    )
    return Table("Operator noise by phase", headers, tuple(rows))


def _sync_text(receipt: Receipt) -> str:
    syncs = receipt.weight_syncs
    if not syncs:
        return "No AQN noise was added." if receipt.weight_noise is None else "AQN was asked for, no sync happened."
    noisy = [sync for sync in syncs if sync.sigma_asked > 0]
    restored = sum(sync.clean_sha256_before == sync.clean_sha256_after for sync in syncs)
    first = (
        f"{len(syncs)} weight syncs on {syncs[0].norms} of {receipt.num_norms} norms, {len(noisy)} of them with noise"
    )
    if noisy:
        # The most deviant sync, in standard errors of the mean square of its elements (2/n for Gaussian noise).
        worst = max(abs(sync.squared_error_ratio - 1) / math.sqrt(2 / sync.elements) for sync in noisy)
        first += f"; measured over asked {_sync_ratio(receipt)}, the worst single sync {worst:.1f} standard errors off"
    return f"AQN: {first}. Clean weights restored bit for bit after {restored} of {len(syncs)}."


def _sync_ratio(receipt: Receipt) -> str:
    """Root mean square of measured/asked over all elements of all noisy syncs."""
    noisy = [sync for sync in receipt.weight_syncs if sync.sigma_asked > 0]
    elements = sum(sync.elements for sync in noisy)
    if not elements:
        return numbers.MISSING
    return f"{math.sqrt(sum(sync.squared_error_ratio * sync.elements for sync in noisy) / elements):.4f}"


def _pooled(receipts: Sequence[Receipt]) -> tuple[float, int]:
    """(root mean square relative error, elements) over all cells of all phases."""
    cells = [cell for receipt in receipts for cell in receipt.cells if cell.measured is not None]
    elements = sum(cell.measured_elements for cell in cells)
    if not elements:
        return 0.0, 0
    squares = sum(cell.measured**2 * cell.measured_elements for cell in cells if cell.measured is not None)
    return math.sqrt(squares / elements), elements


def _witness_text(receipts: Sequence[Receipt]) -> str:
    difference = max((record.witness_difference for one in receipts for record in one.phases), default=0.0)
    return "exactly none" if difference == 0 else f"differs by {difference:.3g}"


def _deviation(measured: float, asked: float) -> str:
    return f"{100 * (measured / asked - 1):+.2f}".replace("-", "−")


def _sampling_error(elements: int) -> str:
    return f"{100 / math.sqrt(2 * elements):.2f}" if elements else numbers.MISSING
