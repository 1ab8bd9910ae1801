"""Receipts of requested and measured noise per run and phase, and the provenance of the report's numbers."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Any, get_args

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import (
    CacheNoise,
    FakeQuantization,
    MantissaTruncation,
    ModuleNoise,
    OperatorNoise,
    RelativeGaussian,
    ScaledError,
)
from aqnpipe.config.study import Study
from aqnpipe.noise.receipts.other_checks import cache_error
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.table import CACHE, Row
from aqnpipe.report import numbers, tables
from aqnpipe.report.inputs import Evaluated, ReportData, Run
from aqnpipe.report.tables import Part, RunLink, Table, table
from aqnpipe.report.words import Words
from aqnpipe.statistics.continuous import scale_standard_error

_SCALED_KINDS = frozenset(kind.model_fields["kind"].default for kind in (*get_args(ScaledError), MeasuredError))
"""Error models whose measured size should equal the requested one; the others round, within a bound."""

_Noise = OperatorNoise | ModuleNoise | CacheNoise

MAX_RUNS = 60
"""Runs whose receipts the page shows phase by phase, or whose problems it lists."""
_MAX_PROBLEMS = 10


def receipt_parts(data: ReportData, words: Words, run_link: RunLink) -> Iterator[Part]:
    """Yield the section on receipts: an overview, what was refused and why, every run and every evaluation."""
    yield Part("caption", words("receipts.caption"))
    yield Part("table", run_overview(data.runs, words, run_link))
    refused = [run for run in data.runs if run.receipt.problems()]
    for run in refused[:MAX_RUNS]:
        yield _problems(words("receipts.refused_run", name=_name(run, words)), run.receipt.problems(), words)
    yield from _left_out(refused, words)
    of_evaluations = ((_checkpoint(one, words), one.receipts.problems()) for one in data.evaluations)
    if found := [f"{checkpoint}: {problem}" for checkpoint, problems in of_evaluations for problem in problems]:
        yield _problems(words("receipts.refused_evaluations"), found, words)
    parts: list[Part] = []
    for run in data.runs[:MAX_RUNS]:
        name = _name(run, words)
        parts += [Part("name", name), Part("table", phase_table(run.receipt, words), title=name)]
        parts.append(Part("caption", sync_text(run.receipt, words)))
    yield Part("folded", (*parts, *_left_out(data.runs, words)), words("receipts.every_run"))
    evaluations = evaluation_overview(data.evaluations, words, run_link)
    yield Part("folded", (Part("table", evaluations),), words("receipts.every_evaluation"))


def _name(run: Run, words: Words) -> str:
    return words("run.name", arm=run.arm, seed=run.seed)


def _problems(title: str, problems: Sequence[str], words: Words) -> Part:
    more = [words("more", count=len(problems) - _MAX_PROBLEMS)] if len(problems) > _MAX_PROBLEMS else []
    return Part("problems", [*problems[:_MAX_PROBLEMS], *more], title)


def _left_out(runs: Sequence[Run], words: Words) -> list[Part]:
    return [Part("caption", words("receipts.more", count=len(runs) - MAX_RUNS))] if len(runs) > MAX_RUNS else []


def run_overview(runs: Sequence[Run], words: Words, run_link: RunLink) -> Table:
    """Return one row per run: operator noise and AQN, requested and measured."""
    rows = (_overview_row(run, words, run_link) for run in runs)
    lost = _lost_text({_name(run, words): run.receipt.cells for run in runs}, words)
    return replace(table("receipts", rows, words), note=lost)


def evaluation_overview(evaluations: Sequence[Evaluated], words: Words, run_link: RunLink) -> Table:
    """Return one row per evaluated checkpoint and noise level, noise seeds pooled."""
    rows = (row for evaluated in evaluations for row in _evaluation_rows(evaluated, words, run_link))
    cells = {
        _checkpoint(one, words): [cell for each in one.receipts.passes for cell in each.receipt.cells]
        for one in evaluations
    }
    return replace(table("evaluation-receipts", rows, words), note=_lost_text(cells, words))


def _lost_text(cells_of: Mapping[str, Sequence[Row]], words: Words) -> str:
    """Return a warning about runs or checkpoints whose noise the number format swallowed; empty if there are none."""
    shares = [
        words("receipts.left", name=name, share=_root_mean_square(lost, relative=True))
        for name, cells in cells_of.items()
        if (lost := [cell for cell in cells if cell.is_lost])
    ]
    return words("receipts.lost", shares=", ".join(shares)) if shares else ""


def _checkpoint(evaluated: Evaluated, words: Words) -> str:
    source = evaluated.source
    return words("checkpoint.name", arm=source.arm, seed=source.seed, step=source.step)


def _evaluation_rows(evaluated: Evaluated, words: Words, run_link: RunLink) -> Iterator[dict[str, Any]]:
    source, all_passes = evaluated.source, evaluated.receipts.passes
    for level in sorted({noise_pass.noise_level for noise_pass in all_passes}):
        passes = [noise_pass for noise_pass in all_passes if noise_pass.noise_level == level]
        problems = [problem for noise_pass in passes for problem in noise_pass.problems()]
        pooled = [noise_pass.receipt for noise_pass in passes]
        yield {
            "checkpoint": _checkpoint(evaluated, words),
            "receipt": "refused" if problems else "accepted",
            "noise_requested": _requested_text(_noises(passes[0].receipt), words),
            **_measured([cell for receipt in pooled for cell in _cells(receipt)], pooled, words),
            "alert": bool(problems),
            "link": run_link(source.model, source.arm, source.seed),
        }


def _overview_row(run: Run, words: Words, run_link: RunLink) -> dict[str, Any]:
    receipt, problems = run.receipt, run.receipt.problems()
    syncs = receipt.weight_syncs
    restored = all(sync.is_restored for sync in syncs)
    sigmas = [sync.sigma_requested for sync in syncs]
    return {
        "run": _name(run, words),
        "receipt": "refused" if problems else "accepted",
        "noise_requested": _requested_text(_noises(receipt), words),
        **_measured(_cells(receipt), [receipt], words),
        "syncs": len(syncs) or words("receipts.none"),
        "sigma_requested": words("span", low=f"{min(sigmas):.3g}", high=f"{max(sigmas):.3g}") if syncs else None,
        "sigma_ratio": _sync_ratio(receipt),
        "restored": words("yes" if restored else "no") if syncs else None,
        "alert": bool(problems) or any(cell.is_lost for cell in receipt.cells),
        "link": run_link(run.model, run.arm, run.seed),
    }


def phase_table(receipt: Receipt, words: Words) -> Table:
    """Return requested and measured noise by phase."""
    return table("phases", (_phase_row(receipt, record, words) for record in receipt.phases), words)


def operator_table(receipt: Receipt, words: Words) -> Table:
    """Return what was measured by phase, operator and error, over layers; keys and values in a cache are the last."""
    groups: dict[tuple[str, str, str, float], list[Row]] = {}
    for cell in receipt.cells:
        is_head = cell.layer is None and not cell.is_module
        operator = f"{cell.operator} (lm_head)" if is_head else cell.operator
        groups.setdefault((cell.phase, operator, cell.kind, cell.requested), []).append(cell)
    rows = [_operator_row(*key, cells) for key, cells in groups.items()]
    cache = receipt.kv_cache
    for phase in cache.phases if cache is not None else ():
        cells = [cell for cell in receipt.cache_cells if cell.phase == phase]
        rows.append(_operator_row(phase, CACHE, cache.format if cache else "", None, cells))
    return table("operators", rows, words)


def _operator_row(
    phase: str, operator: str, error: str, requested: float | None, cells: Sequence[Row]
) -> dict[str, Any]:
    is_measured = any(cell.measured_elements for cell in cells)
    return {
        "phase": phase,
        "operator": operator,
        "layers": numbers.number_ranges([cell.layer for cell in cells if cell.layer is not None]),
        "error": error,
        "calls": sum(cell.calls for cell in cells),
        "elements": sum(cell.elements for cell in cells),
        "requested": requested,
        "measured": _root_mean_square(cells, relative=False) if is_measured else cache_error(cells),
    }


def _phase_row(receipt: Receipt, record: Row, words: Words) -> dict[str, Any]:
    requested = [noise for noise in _noises(receipt) if record.phase in noise.phases]
    measured = [cell for cell in _cells(receipt) if cell.phase == record.phase]
    on_operators = any(not isinstance(noise, CacheNoise) for noise in requested)
    compared = words("receipts.reference_check", value=record.largest_difference, elements=record.compared)
    recomputed = words("receipts.recomputed", numbers=record.recomputed, deviation=record.largest_deviation)
    unrequested = not on_operators and bool(record.calls)
    found = bool(record.escaped) or bool(record.contradictions)
    return {
        "phase": record.phase,
        "noise_requested": _requested_text(requested, words),
        **_measured(measured, [], words),
        "calls": record.calls,
        "noised_share": record.noised_share,
        "recomputed_numbers": recomputed if record.recomputed else None,
        "reference_check": compared if record.compared and not on_operators else None,
        "alert": found or unrequested or bool(requested and not measured),
    }


def _noises(receipt: Receipt) -> list[_Noise]:
    """Return the requested noises that change anything."""
    noises = (receipt.operator_noise, receipt.module_noise)
    active: list[_Noise] = [noise for noise in noises if noise is not None and noise.is_active]
    return active + ([] if receipt.kv_cache is None else [receipt.kv_cache])


def _cells(receipt: Receipt) -> tuple[Row, ...]:
    """Return the rows of everything that has an error."""
    return (*receipt.cells, *receipt.cache_cells)


def _requested_text(noises: Sequence[_Noise], words: Words) -> str:
    """Return the requested errors: a relative scale as a number, every other error with its name."""
    return ", ".join(map(_error_text, noises)) or words("receipts.none")


def _error_text(noise: _Noise) -> str:
    if isinstance(noise, CacheNoise):
        return f"kv cache, {noise.format}"
    error = noise.error
    where = "" if isinstance(noise, OperatorNoise) else f"{noise.point} of {noise.modules}: "
    match error:
        case RelativeGaussian():
            return where + numbers.scale(error.scale)
        case MantissaTruncation():
            return f"{where}{error.kind.replace('_', ' ')}, {error.mantissa_bits} bits"
        case FakeQuantization():
            return f"{where}{error.kind.replace('_', ' ')}, {error.format}"
        case CustomError():
            size = " to ".join(dict.fromkeys(map(numbers.scale, error.sizes)))
            return f"{where}{error.function.rpartition('/')[2]} {size}"
        case MeasuredError():
            return f"{where}measured error of {error.source} × {error.multiple:g}"
        case _:
            return f"{where}{error.kind.replace('_', ' ')} {numbers.scale(error.scale)}"


def _measured(cells: Sequence[Row], compared: Sequence[Receipt], words: Words) -> dict[str, Any]:
    """Return size measured, its deviation in %, standard error in %, elements; operators, modules, caches pooled apart.

    Where nothing was noised, the size is the difference of the outputs from plain torch in `compared`.
    """
    measured = sorted((cell for cell in cells if cell.measured_elements), key=lambda cell: cell.is_module)
    parts = [list(part) for _, part in groupby(measured, key=lambda cell: cell.is_module)]
    caches = [cell for cell in cells if cell.operator == CACHE]
    sizes = [
        *(_root_mean_square(part, relative=False) for part in parts),
        *([] if not caches else [cache_error(caches)]),
    ]
    shown = ", ".join(numbers.scale(size) for size in sizes if size is not None)
    if not measured and not caches:
        shown = _reference_check_text(compared, words) if compared else words("receipts.none")
    exact = [cell for cell in measured if cell.kind in _SCALED_KINDS and cell.requested]
    elements = sum(cell.measured_elements for cell in measured) or sum(cell.recomputed for cell in caches)
    return {
        "noise_measured": shown,
        "off_by": 100 * (_root_mean_square(exact, relative=True) - 1) if exact else None,
        "sampling_error": 100 * scale_standard_error(elements) if measured else None,
        "elements": elements if measured or caches else None,
    }


def _root_mean_square(cells: Sequence[Row], *, relative: bool) -> float:
    """Return the root mean square of the measured sizes over all elements; `relative`: of measured / requested."""
    squares = sum(
        ((cell.measured or 0.0) / (cell.requested if relative else 1.0)) ** 2 * cell.measured_elements for cell in cells
    )
    return math.sqrt(squares / sum(cell.measured_elements for cell in cells))


def sync_text(receipt: Receipt, words: Words) -> str:
    """Return how often AQN was drawn, its size against the request, and whether the clean weights came back."""
    syncs = receipt.weight_syncs
    if not syncs:
        return words("receipts.no_aqn" if receipt.aqn is None else "receipts.no_sync")
    noisy = [sync for sync in syncs if sync.sigma_requested > 0]
    restored = sum(sync.is_restored for sync in syncs)
    parts = [words("receipts.syncs", syncs=len(syncs), targets=syncs[0].targets or 0, noisy=len(noisy))]
    if noisy:
        recomputed, wrong = (sum(getattr(sync, name) for sync in noisy) for name in ("recomputed", "wrong"))
        parts.append(words("receipts.sync_ratio", ratio=_sync_ratio(receipt), recomputed=recomputed, wrong=wrong))
    parts.append(words("receipts.restored", restored=restored, syncs=len(syncs)))
    return words.paragraph(parts)


def _sync_ratio(receipt: Receipt) -> str:
    """Return the root mean square of measured/requested over all elements of all noisy syncs."""
    noisy = [sync for sync in receipt.weight_syncs if sync.sigma_requested > 0]
    elements = sum(sync.elements for sync in noisy)
    if not elements:
        return numbers.MISSING
    ratios = ((sync.sigma_measured / sync.sigma_requested) ** 2 * sync.elements for sync in noisy)
    return f"{math.sqrt(sum(ratios) / elements):.4f}"


def _reference_check_text(receipts: Sequence[Receipt], words: Words) -> str:
    difference = max((record.largest_difference for receipt in receipts for record in receipt.phases), default=0.0)
    return words("receipts.exactly_none") if difference == 0 else words("receipts.differs", value=difference)


SHORT_DIGEST = 12
MAX_ARMS_IN_STUDY = 256
"""The text of 2,000 arms would be the largest part of a page."""


def run_links(runs: Sequence[Run]) -> RunLink:
    """Return the function from (model, arm, seed) to the anchor of the run in the provenance table; "" if none.

    Runs beyond the rows that the page shows have none.
    """
    shown = enumerate(islice(runs, tables.MAX_ROWS_ON_PAGE), start=1)
    anchors = {(run.model, run.arm, run.seed): f"run-{number}" for number, run in shown}
    return lambda model, arm, seed: anchors.get((model, arm, seed), "")


def provenance_parts(study: Study, data: ReportData, words: Words, run_link: RunLink) -> Iterator[Part]:
    """Yield the section on provenance: runs, evaluations, versions and the study itself."""
    yield Part("caption", words("provenance.caption"))
    yield Part("captioned", run_table(data.runs, words, run_link))
    for other in (evaluation_table(data.evaluations, words, run_link), version_table(data, words)):
        yield Part("folded", (Part("table", other),), other.caption)
    shown, all_arms = min(MAX_ARMS_IN_STUDY, len(study.arms)), len(study.arms)
    cut = [Part("caption", words("provenance.arms_left_out", shown=shown, all=all_arms))] if shown < all_arms else []
    yield Part("folded", (*cut, Part("code", study_text(study))), words("provenance.study"))


def run_table(runs: Sequence[Run], words: Words, run_link: RunLink) -> Table:
    """Return one row per training run."""
    rows = (_provenance(run, words) | {"anchor": run_link(run.model, run.arm, run.seed)} for run in runs)
    return table("provenance-runs", rows, words)


def evaluation_table(evaluations: Sequence[Evaluated], words: Words, run_link: RunLink) -> Table:
    """Return one row per evaluated checkpoint, which links to its run; a device with shards if layers were shared."""
    rows = []
    for one in evaluations:
        source, shards, row = one.source, one.receipts.facts.shards, _provenance(one, words)
        device = words("provenance.shards", device=row["device"], shards=shards) if shards > 1 else row["device"]
        rows.append(row | {"device": device, "link": run_link(source.model, source.arm, source.seed)})
    return table("provenance-evaluations", rows, words)


def version_table(data: ReportData, words: Words) -> Table:
    """Return the versions of the libraries; several in a cell if jobs differ."""
    records = [*(run.record for run in data.runs), *(evaluated.record for evaluated in data.evaluations)]
    unknown = words("provenance.unknown")
    rows = (
        {"library": name, "version": ", ".join(sorted({record.versions.get(name, unknown) for record in records}))}
        for name in sorted({name for record in records for name in record.versions})
    )
    return table("versions", rows, words)


def study_text(study: Study) -> str:
    """Return the resolved study with its first `MAX_ARMS_IN_STUDY` arms as indented JSON."""
    content = study.model_dump(mode="json")
    content["arms"] = dict(islice(content["arms"].items(), MAX_ARMS_IN_STUDY))
    return json.dumps(content, indent=1, ensure_ascii=False)


def _provenance(made: Run | Evaluated, words: Words) -> dict[str, Any]:
    record, device = made.record, made.record.device
    replays = record.generation.get("enforce_eager") is False
    return {
        "record": made.path,
        "device": words("provenance.graphs", device=device) if replays else device,
        "code": record.code_digest[:SHORT_DIGEST],
        "inputs": ", ".join(f"{name} {digest[:SHORT_DIGEST]}" for name, digest in record.inputs_sha256.items()),
    }
