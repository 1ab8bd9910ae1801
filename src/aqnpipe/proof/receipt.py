"""The receipt of a noisy machine: one table of what was seen, and the refusals that follow from it."""

import math
import threading
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from aqnpipe.errors import ReceiptError
from aqnpipe.noise.receipts.table import Place, Row, Rows, Shown, grouped
from aqnpipe.proof.elementwise import ELEMENTWISE
from aqnpipe.proof.request import AuditRequest

_NO_ERROR = 0.005
"""Largest size of what is found, as a multiple of the requested error, that is none."""

_SLOPE_TOLERANCE = 0.05
_STANDARD_ERRORS = 6.0
_LISTED = 6
_RESOLVED = 0.15
"""Largest standard error with which the size of an error counts as measured."""


def cell_of(phase: str, path: str, operator: str, dtype: torch.dtype) -> Place:
    """Return the place of results of an operator in a module: in a layer by its path, or in no layer."""
    return Place(phase, operator=operator, path=path, dtype=str(dtype).removeprefix("torch."))


class MachineReceipt(Shown, Rows):
    """Request to a machine, and the table of what the machine counted and the audit computed again.

    Its rows are about places by path, operators, and phases; `forward` and `backward` are the rows of the phases.
    """

    def __init__(self, requested: AuditRequest, draws: np.random.Generator) -> None:
        super().__init__()
        self.requested = requested
        # The audit's own: which passes it observes, and which elements.
        self.draws = draws
        self.forward = self.row(requested.stream)
        self.backward = self.row("backward")
        self._lock = threading.Lock()

    def add(self, place: Place, **columns: Any) -> None:
        """Add to columns of the row of a place."""
        with self._lock:
            self.row(*place).add(**columns)

    def include(self, rows: Iterable[Row]) -> None:
        """Add the rows of another receipt of the same request."""
        for row in rows:
            self.row(*row.place).include([row])

    def count(self, counts: Mapping[tuple[str, str, str], int]) -> None:
        """Add the machine's counts of products, by (phase, operator, what happened)."""
        for (phase, operator, what), number in counts.items():
            self.add(Place(phase, operator=operator), outcomes={what: number})

    def note_escape(self, what: str, number: int = 1) -> None:
        """Count calls that had no error."""
        self.add(Place(self.forward.phase, operator=what), escaped=number)

    def note(self, what: str) -> None:
        """Note a contradiction in words."""
        self.add(self.forward.place, contradictions={what: 1})

    @property
    def cells(self) -> dict[Place, Row]:
        """The rows of operators at places."""
        found = [place for place in list(self.rows) if place.path]
        found.sort(key=lambda place: (place.phase, place.path, place.operator, place.dtype))
        return {place: self.rows[place] for place in found}

    def outcomes(self, phase: str | None = None, operators: Container[str] | None = None) -> Counter[str]:
        """Return the machine's counts of products, by what happened to them; default: in all phases and operators."""
        found: Counter[str] = Counter()
        for place, row in list(self.rows.items()):
            if phase in (None, place.phase) and (operators is None or place.operator in operators):
                found.update(row.outcomes)
        return found

    @property
    def passes(self) -> int:
        """Number of passes of models."""
        return self.forward.passes

    @property
    def backward_passes(self) -> int:
        """Number of backward passes."""
        return self.backward.passes

    @property
    def products(self) -> int:
        """Number of products that the replaced kernels computed."""
        return sum(number for what, number in self.outcomes().items() if what not in _NO_PRODUCTS)

    @property
    def noised(self) -> int:
        """Number of products with an error."""
        return self.outcomes()["noised"]

    @property
    def recomputed_numbers(self) -> int:
        """Number of elements whose error was recomputed from independent keys."""
        return sum(seen.recomputed for seen in self.cells.values())

    @property
    def measured_scale(self) -> float | None:
        """The scale that was measured; None for an error without one, or before anything was measured."""
        size = _sum(self.rows.values()).size
        return None if self.requested.scale is None or size is None else size * self.requested.scale

    @property
    def table_rows(self) -> Iterable[Row]:
        """The rows of `table()`: those of operators at places."""
        return self.cells.values()

    def problems(self) -> list[str]:
        """Return one line per difference between what was requested and what was measured."""
        return [*self._missing(), *self.contradictions()]

    def contradictions(self) -> list[str]:
        """Return the problems that a program which ends too early does not explain: all but what is missing."""
        found = [*self._wrong(), *self._of_another_size()]
        escapes = sorted((row.operator, row.escaped) for row in self.rows.values() if row.escaped)
        found += [f"{number} calls of {what} had no error" for what, number in escapes]
        for row in sorted(self.rows.values(), key=lambda row: (row.phase, row.operator)):
            refused = sorted(row.outcomes.keys() & _REFUSED.keys())
            found += [f"{row.phase}: {row.outcomes[what]} calls of {row.operator} {_REFUSED[what]}" for what in refused]
        return found + sorted(self.forward.contradictions)

    def forward_problems(self) -> list[str]:
        """Return the problems of a program that computes no gradients: they cannot be missing."""
        return [problem for problem in self.problems() if not problem.startswith("backward: no ")]

    def check(self) -> "MachineReceipt":
        """Return self, or raise ReceiptError with every difference between requested and measured error."""
        if problems := self.problems():
            raise ReceiptError("; ".join(problems))
        return self

    def _missing(self) -> Iterator[str]:
        for phase in self.requested.phases:
            outcomes = self.outcomes(phase)
            if not outcomes["noised"]:
                yield f"{phase}: no product had the requested error, of {outcomes.total()} that were seen"
            elif not any(seen.recomputed for cell, seen in self.cells.items() if cell.phase == phase):
                yield f"{phase}: no result was recomputed, so nothing is proven; expected a call of the model" + (
                    " and of backward() in the context" if phase == "backward" else " in the context"
                )
        if self.requested.elementwise and not self.outcomes(operators=ELEMENTWISE)["noised"]:
            yield "no softmax, activation or norm had the requested error; expected a model with layers that have some"

    def wrong_values(self, phase: str) -> Iterator[str]:
        """Yield one line per operator and place of a phase whose values or sizes are not the requested ones."""
        for cell, seen in self.cells.items():
            if cell.phase != phase or not seen.wrong:
                continue
            where = f"{cell.operator} in {cell.path} ({cell.dtype})"
            if not seen.recomputed:
                yield f"{where}: {seen.wrong} of {seen.compared} values are not exact, no noise was requested"
                continue
            times = "" if seen.size is None else f", whose error is {seen.size:.2f} times the requested one"
            if math.sqrt(seen.found_squares) < _NO_ERROR * math.sqrt(seen.requested_squares):
                times = ": they have no error"
            yield f"{where}: {seen.wrong} of {seen.recomputed} recomputed values are not the requested ones{times}"
        for seen in self._by_operator():
            size = seen.size
            if seen.phase == phase and not seen.wrong and size is not None:
                allowed = _SLOPE_TOLERANCE + _STANDARD_ERRORS * seen.size_error
                if abs(size - 1) > allowed:
                    yield f"{seen.operator} ({seen.dtype}): the error found is {size:.2f} times the requested one"

    def _wrong(self) -> Iterator[str]:
        for phase in sorted({cell.phase for cell in self.cells}):
            yield from (f"{phase}: {line}" for line in self.wrong_values(phase))
        for phase, dtype in sorted({(cell.phase, cell.dtype) for cell in self.cells}):
            whole = _sum(seen for cell, seen in self.cells.items() if (cell.phase, cell.dtype) == (phase, dtype))
            if whole.requested_squares > 0 and whole.size_error > _RESOLVED:
                yield (
                    f"{phase} ({dtype}): an error of this size cannot be told from rounding; found {whole.size:.2f} "
                    f"times the requested one, with a standard error of {whole.size_error:.2f}"
                )

    def _of_another_size(self) -> Iterator[str]:
        """Yield the phases in which a user's own error changed nothing, or has another size than was announced."""
        own = self.requested.custom
        if own is None:
            return
        for phase in self.requested.phases:
            outcomes, total = self.outcomes(phase), _sum(row for row in self.cells.values() if row.phase == phase)
            if CHANGED in outcomes and not outcomes[CHANGED]:
                yield f"{phase}: {own.function} changed no value"
            elif total.recomputed:
                size = math.sqrt(total.own_squares / total.recomputed)
                if problem := own.size_problem(size, total.recomputed, "values"):
                    yield f"{phase}: {problem}"

    def _by_operator(self) -> list[Row]:
        found = grouped(replace(row, path="") for row in self.cells.values())
        return sorted(found, key=lambda row: (row.phase, row.operator, row.dtype))

    def __str__(self) -> str:
        """Return the receipt in about ten lines, and a line for every problem."""
        scale = self.measured_scale
        lines = [
            f"requested  {self.requested.in_words}, in {' and '.join(self.requested.phases)}",
            f"measured   {'-' if scale is None else f'{scale:.4f}'} from {self.recomputed_numbers:,} recomputed values",
            f"products   {self.noised:,} of {self.products:,} had the error, in {self.passes:,} forward passes"
            + (f" and {self.backward_passes:,} backward passes" if self.backward_passes else ""),
        ]
        for what, number in sorted(self.without_error().items()):
            lines.append(f"without    {number:,} {what}")
        operators = self._by_operator()
        for seen in operators[:_LISTED]:
            size = "-" if seen.size is None else f"{seen.size:.3f}"
            lines.append(
                f"           {seen.phase:<14}{seen.operator[:32]:<34}{seen.dtype:<10}{seen.products:>7} audited  "
                f"size {size:>6}  {seen.wrong} wrong"
            )
        if len(operators) > _LISTED:
            lines.append(f"           and {len(operators) - _LISTED} more operators, in table()")
        problems = self.problems()
        lines += [f"INVALID    {problem}" for problem in problems] or ["accepted"]
        return "\n".join(lines)

    def without_error(self) -> dict[str, int]:
        """Return the number of products that had no error, by why."""
        others = ("noised", *_NO_PRODUCTS)
        return {what: number for what, number in self.outcomes().items() if what not in others}


CHANGED = "changed elements"
_NO_PRODUCTS = ("captured", CHANGED)

_REFUSED = {
    "of integers": "multiplied integers or complex numbers, which cannot have the error",
    "captured": "were captured into a CUDA graph, which repeats one error in every replay",
}


def _sum(rows: Iterable[Row]) -> Row:
    return Row("forward").include(rows)
