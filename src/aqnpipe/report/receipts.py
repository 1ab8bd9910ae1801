"""Receipts as the report shows them: requested and measured noise per run and phase, and the reasons of refusals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import (
    FakeQuantization,
    MantissaTruncation,
    ModuleNoise,
    OperatorNoise,
    Phase,
    RelativeGaussian,
    ScaledError,
)
from aqnpipe.config.own_noise import OwnError
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.receipt_content import NoiseCell, PhaseRecord
from aqnpipe.report import numbers
from aqnpipe.report.inputs import Evaluated, Run
from aqnpipe.report.tables import Row, RunLink, Table
from aqnpipe.report.words import Words

_SCALED_KINDS = frozenset(kind.model_fields["kind"].default for kind in (*get_args(ScaledError), MeasuredError))
"""Error models whose measured size should equal the requested one; the others round, within a bound."""


@dataclass(frozen=True)
class RunReceipt:
    """The receipt of one run: its phases as a table, its weight syncs in words, and its problems."""

    name: str
    phases: Table
    syncs: str
    problems: tuple[str, ...]


def run_receipts(runs: Sequence[Run], words: Words) -> list[RunReceipt]:
    """Return the receipt of every run, phase by phase."""
    return [_run_receipt(run, words) for run in runs]


def run_overview(runs: Sequence[Run], words: Words, run_link: RunLink) -> Table:
    """Return one row per run: operator noise and AQN, requested and measured."""
    names = (
        *("run", "receipt", "noise_requested", "noise_measured", "off_by", "sampling_error", "elements"),
        *("syncs", "sigma_requested", "sigma_ratio", "restored"),
    )
    rows = tuple(_overview_row(run, words, run_link) for run in runs)
    headers = tuple(words(f"column.{name}") for name in names)
    lost = _lost_text([(words("run.name", arm=run.arm, seed=run.seed), run.receipt.cells) for run in runs], words)
    return Table("receipts", words("receipts.runs"), headers, rows, 2, lost)


def evaluation_overview(evaluations: Sequence[Evaluated], words: Words, run_link: RunLink) -> Table:
    """Return one row per evaluated checkpoint and noise level, noise seeds pooled."""
    names = ("checkpoint", "receipt", "noise_requested", "noise_measured", "off_by", "sampling_error", "elements")
    rows = tuple(row for evaluated in evaluations for row in _evaluation_rows(evaluated, words, run_link))
    headers = tuple(words(f"column.{name}") for name in names)
    cells_of = [
        (_checkpoint(evaluated, words), [cell for each in evaluated.receipts.passes for cell in each.receipt.cells])
        for evaluated in evaluations
    ]
    return Table("evaluation-receipts", words("receipts.evaluations"), headers, rows, 2, _lost_text(cells_of, words))


def _lost_text(cells_of: Sequence[tuple[str, Sequence[NoiseCell]]], words: Words) -> str:
    """Return a warning about runs or checkpoints whose noise the number format swallowed; empty if there are none."""
    lost = {name: [cell for cell in cells if cell.is_lost] for name, cells in cells_of}
    shares = [
        words("receipts.left", name=name, share=_root_mean_square(cells, relative=True))
        for name, cells in lost.items()
        if cells
    ]
    return words("receipts.lost", shares=", ".join(shares)) if shares else ""


def evaluation_problems(evaluations: Sequence[Evaluated], words: Words) -> list[str]:
    """Return every problem of every evaluation receipt, with the checkpoint."""
    return [
        f"{_checkpoint(evaluated, words)}: {problem}"
        for evaluated in evaluations
        for problem in evaluated.receipts.problems()
    ]


def _run_receipt(run: Run, words: Words) -> RunReceipt:
    return RunReceipt(
        name=words("run.name", arm=run.arm, seed=run.seed),
        phases=_phase_table(run.receipt, words),
        syncs=_sync_text(run.receipt, words),
        problems=tuple(run.receipt.problems()),
    )


def _checkpoint(evaluated: Evaluated, words: Words) -> str:
    source = evaluated.source
    return words("checkpoint.name", arm=source.arm, seed=source.seed, step=source.step)


def _evaluation_rows(evaluated: Evaluated, words: Words, run_link: RunLink) -> list[Row]:
    source, all_passes = evaluated.source, evaluated.receipts.passes
    rows = []
    for level in sorted({noise_pass.noise_level for noise_pass in all_passes}):
        passes = [noise_pass for noise_pass in all_passes if noise_pass.noise_level == level]
        problems = [problem for noise_pass in passes for problem in noise_pass.problems()]
        pooled = [noise_pass.receipt for noise_pass in passes]
        cells = (
            _checkpoint(evaluated, words),
            _state(problems, words),
            _requested_text([passes[0].receipt.operator_noise], words),
            *_measured_cells([cell for receipt in pooled for cell in receipt.cells], pooled, words),
        )
        link = run_link(source.model, source.arm, source.seed)
        rows.append(Row(cells, alert=bool(problems), link=link))
    return rows


def _overview_row(run: Run, words: Words, run_link: RunLink) -> Row:
    receipt, problems = run.receipt, run.receipt.problems()
    syncs = receipt.weight_syncs
    restored = all(sync.clean_sha256_before == sync.clean_sha256_after for sync in syncs)
    sigmas = [sync.sigma_requested for sync in syncs]
    cells = (
        words("run.name", arm=run.arm, seed=run.seed),
        _state(problems, words),
        _requested_text([receipt.operator_noise, receipt.module_noise], words),
        *_measured_cells(receipt.cells, [receipt], words),
        str(len(syncs)) if syncs else words("receipts.none"),
        words("span", low=f"{min(sigmas):.3g}", high=f"{max(sigmas):.3g}") if syncs else numbers.MISSING,
        _sync_ratio(receipt),
        words("yes" if restored else "no") if syncs else numbers.MISSING,
    )
    alert = bool(problems) or any(cell.is_lost for cell in receipt.cells)
    return Row(cells, alert=alert, link=run_link(run.model, run.arm, run.seed))


def _phase_table(receipt: Receipt, words: Words) -> Table:
    rows = tuple(_phase_row(receipt, record, words) for record in receipt.phases)
    names = (
        *("phase", "noise_requested", "noise_measured", "off_by", "sampling_error", "elements"),
        *("noised_calls", "noised_share", "recomputed_numbers", "reference_check"),
    )
    headers = tuple(words(f"column.{name}") for name in names)
    return Table("phases", words("receipts.phases"), headers, rows)


def _phase_row(receipt: Receipt, record: PhaseRecord, words: Words) -> Row:
    requested = _requested_in(receipt, record.phase)
    measured = [cell for cell in receipt.cells if cell.phase == record.phase]
    key, value = (
        ("scale", record.reference_check_scale) if requested else ("difference", record.reference_check_difference)
    )
    reference_check = words(f"receipts.reference_check.{key}", value=value, elements=record.reference_checked_elements)
    cells = (
        record.phase.replace("_", " "),
        _requested_text(requested, words),
        *_measured_cells(measured, [], words),
        numbers.count(record.noised_calls),
        numbers.percent(record.noised_share),
        _recomputed_text(record, words),
        reference_check if record.reference_checked_elements else numbers.MISSING,
    )
    unrequested = not requested and bool(record.noised_calls)
    found = bool(record.escaped) or bool(record.contradictions)
    return Row(cells, alert=found or unrequested or bool(requested and not measured))


def _recomputed_text(record: PhaseRecord, words: Words) -> str:
    """Return how many numbers of the noise were recomputed, and their largest difference from those used."""
    if not record.recomputed_numbers:
        return numbers.MISSING
    return words("receipts.recomputed", numbers=record.recomputed_numbers, deviation=record.largest_deviation)


def _requested_in(receipt: Receipt, phase: Phase) -> list[OperatorNoise | ModuleNoise]:
    noises = (receipt.operator_noise, receipt.module_noise)
    return [noise for noise in noises if noise and noise.is_active and phase in noise.phases]


def _requested_text(noises: Sequence[OperatorNoise | ModuleNoise | None], words: Words) -> str:
    """Return the requested errors: a relative scale as a number, every other error with its name."""
    return ", ".join(_error_text(noise) for noise in noises if noise and noise.is_active) or words("receipts.none")


def _error_text(noise: OperatorNoise | ModuleNoise) -> str:
    error = noise.error
    where = "" if isinstance(noise, OperatorNoise) else f"{noise.point} of {noise.modules}: "
    match error:
        case RelativeGaussian():
            return where + numbers.scale(error.scale)
        case MantissaTruncation():
            return f"{where}{error.kind.replace('_', ' ')}, {error.mantissa_bits} bits"
        case FakeQuantization():
            return f"{where}{error.kind.replace('_', ' ')}, {error.format}"
        case OwnError():
            size = " to ".join(dict.fromkeys(map(numbers.scale, error.sizes)))
            return f"{where}{error.function.rpartition('/')[2]} {size}"
        case MeasuredError():
            return f"{where}measured error of {error.source} × {error.multiple:g}"
        case _:
            return f"{where}{error.kind.replace('_', ' ')} {numbers.scale(error.scale)}"


def _measured_cells(cells: Sequence[NoiseCell], compared: Sequence[Receipt], words: Words) -> tuple[str, ...]:
    """Return size measured, its deviation in %, standard error in %, elements; operators and modules pooled apart.

    Where nothing was noised, the first cell is the difference of the outputs from plain torch in `compared`.
    """
    parts = [
        [cell for cell in cells if cell.is_module == module and cell.measured_elements] for module in (False, True)
    ]
    sizes = [numbers.scale(_root_mean_square(part, relative=False)) for part in parts if part]
    measured = [cell for part in parts for cell in part]
    if not measured:
        size = _reference_check_text(compared, words) if compared else words("receipts.none")
        return size, numbers.MISSING, numbers.MISSING, numbers.MISSING
    elements = sum(cell.measured_elements for cell in measured)
    exact = [cell for cell in measured if cell.error in _SCALED_KINDS and cell.requested]
    return (
        ", ".join(sizes),
        f"{100 * (_root_mean_square(exact, relative=True) - 1):+.2f}".replace("-", "−") if exact else numbers.MISSING,
        f"{100 / math.sqrt(2 * elements):.2f}",
        numbers.count(elements),
    )


def _root_mean_square(cells: Sequence[NoiseCell], *, relative: bool) -> float:
    """Return the root mean square of the measured sizes over all elements; `relative`: of measured / requested."""
    squares = sum(
        ((cell.measured or 0.0) / (cell.requested if relative else 1.0)) ** 2 * cell.measured_elements for cell in cells
    )
    return math.sqrt(squares / sum(cell.measured_elements for cell in cells))


def _state(problems: Sequence[str], words: Words) -> str:
    return words("receipts.refused" if problems else "receipts.accepted")


def _sync_text(receipt: Receipt, words: Words) -> str:
    syncs = receipt.weight_syncs
    if not syncs:
        return words("receipts.no_aqn" if receipt.aqn is None else "receipts.no_sync")
    noisy = [sync for sync in syncs if sync.sigma_requested > 0]
    restored = sum(sync.clean_sha256_before == sync.clean_sha256_after for sync in syncs)
    parts = [words("receipts.syncs", syncs=len(syncs), targets=syncs[0].targets, noisy=len(noisy))]
    if noisy:
        # In standard errors of the mean square over the elements of a sync; its variance is 2/n for Gaussian noise.
        worst = max(abs(sync.squared_error_ratio - sync.expected_ratio) / sync.ratio_error for sync in noisy)
        parts.append(words("receipts.sync_ratio", ratio=_sync_ratio(receipt), worst=worst))
    parts.append(words("receipts.restored", restored=restored, syncs=len(syncs)))
    return words.paragraph(parts)


def _sync_ratio(receipt: Receipt) -> str:
    """Return the root mean square of measured/requested over all elements of all noisy syncs."""
    noisy = [sync for sync in receipt.weight_syncs if sync.sigma_requested > 0]
    elements = sum(sync.elements for sync in noisy)
    if not elements:
        return numbers.MISSING
    return f"{math.sqrt(sum(sync.squared_error_ratio * sync.elements for sync in noisy) / elements):.4f}"


def _reference_check_text(receipts: Sequence[Receipt], words: Words) -> str:
    difference = max(
        (record.reference_check_difference for receipt in receipts for record in receipt.phases), default=0.0
    )
    return words("receipts.exactly_none") if difference == 0 else words("receipts.differs", value=difference)
