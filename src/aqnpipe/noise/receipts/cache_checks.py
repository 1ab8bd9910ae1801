"""Checks of keys and values in a cache: that attention read the rounded ones, in every layer and every pass."""

import math
from collections.abc import Iterator, Sequence

from aqnpipe.noise.receipts.receipt_content import ReceiptContent
from aqnpipe.noise.receipts.table import Row


def cache_problems(receipt: ReceiptContent, *, has_ended: bool) -> list[str]:
    """Return one line per mismatch in the rounding of keys and values. `has_ended`: every phase must have run."""
    noise = receipt.kv_cache
    passes = {record.phase: record.passes for record in receipt.phases}
    wanted = noise.phases if noise is not None else ()
    if noise is not None and has_ended and not any(passes.get(phase) for phase in wanted):
        return [f"kv_cache was requested in {', '.join(wanted)} alone, which never ran"]
    problems = []
    for phase, number in passes.items():
        rows = {row.layer: row for row in receipt.cache_cells if row.phase == phase}
        if phase in wanted and number:
            of_layers = [rows.get(layer) or Row(phase, None, layer) for layer in range(receipt.num_layers)]
            problems += [f"{phase}: {problem}" for problem in _problems(of_layers, number)]
        elif rows and phase not in wanted:
            problems.append(f"{phase}: keys and values were rounded, which was not requested")
    return problems


def cache_error(rows: Sequence[Row]) -> float | None:
    """Return the root mean square of what rounding adds, relative to that of keys and values; None without any."""
    exact = sum(row.expected_squares for row in rows)
    return math.sqrt(sum(row.squares for row in rows) / exact) if exact else None


def _problems(rows: Sequence[Row], passes: int) -> Iterator[str]:
    for row in rows:
        where = f"the cache of layer {row.layer}"
        if row.calls < passes:
            verified = f"{row.calls} of {passes} forward passes"
            yield f"{where} was verified in {verified}: attention read no keys and values from it"
        found = [
            f"{row.wrong} of {row.elements} keys and values that attention read were not rounded" if row.wrong else "",
            f"{row.escaped} of {row.recomputed} new ones, rounded, were not read" if row.escaped else "",
        ]
        if any(found):
            yield f"{where}: {'; '.join(filter(None, found))}"
        if row.calls and not row.squares:
            yield f"{where}: rounding changed none of its {row.recomputed} keys and values"
