"""The receipt of a noisy machine: one table of what was seen, and the refusals that follow from it."""

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.noise import AppliedError, MeasuredError
from aqnpipe.errors import ReceiptError
from aqnpipe.proof.elementwise import ELEMENTWISE

_NO_ERROR = 0.005
"""Largest size of what is found, as a multiple of the requested error, that is none."""

_SLOPE_TOLERANCE = 0.05
_STANDARD_ERRORS = 6.0
_RESOLVED = 0.15
"""Largest standard error with which the size of an error counts as measured."""


class Cell(NamedTuple):
    """Subject of a row of the table. `place`: a layer by its path, the output projection, or `outside`."""

    phase: str
    place: str
    operator: str
    dtype: str


@dataclass
class Seen:
    """Sums over the sampled elements of one cell.

    `products` the audit saw; of `recomputed` elements `wrong` are not those of the requested error, and the largest
    deviation is a multiple of what rounding explains. `found_expected` and its neighbours are sums of products of the
    found error (what was found less the exact value) and the expected one; relative errors are divided by the value, so
    that no large element decides alone. `rounding_squared`: of what rounding may have hidden. `error_squared` is that
    of a user's own error, in the quantity that was announced. `compared`: elements of which no error was requested,
    compared with the exact ones; `largest_difference` is the largest that rounding does not explain.
    """

    products: int = 0
    recomputed: int = 0
    wrong: int = 0
    largest_deviation: float = 0.0
    found_expected: float = 0.0
    expected_squared: float = 0.0
    found_squared: float = 0.0
    rounding_squared: float = 0.0
    error_squared: float = 0.0
    compared: int = 0
    largest_difference: float = 0.0

    def add(self, other: "Seen") -> None:
        """Add the sums of another part of the same cell."""
        for field in fields(self):
            own, added = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(own, added) if field.name.startswith("largest_") else own + added)

    @property
    def size(self) -> float | None:
        """Size of the error found, as a multiple of the requested one with the same random numbers; 1 if it is that."""
        return self.found_expected / self.expected_squared if self.expected_squared > 0 else None

    @property
    def size_error(self) -> float:
        """Standard error of `size`, from what the requested error does not explain, and rounding may hide."""
        if not self.recomputed or self.expected_squared <= 0:
            return math.inf
        rest = max(self.found_squared - self.found_expected**2 / self.expected_squared, self.rounding_squared)
        return math.sqrt(rest / max(self.recomputed - 1, 1) / self.expected_squared)


class Requested(NamedTuple):
    """Request that a receipt is checked against: phases, a description of the error, and its scale if it has one.

    `elementwise`: softmax, activations and norms must have the error too. `own`: the error, if it is a user's own.
    """

    phases: tuple[str, ...]
    error: str
    scale: float | None
    elementwise: bool = False
    own: CustomError | None = None


def described(error: AppliedError | MeasuredError | None) -> str:
    """Return an error model in words."""
    if error is None:
        return "no error"
    settings = error.model_dump(exclude={"kind", "figures", "source_sha256"}, exclude_none=True, exclude_defaults=True)
    values = [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
    ]
    return " ".join([error.kind.replace("_", " "), *values])


class MachineReceipt:
    """Request to a machine, what the machine counted, and what the audit computed again."""

    def __init__(self, requested: Requested, draws: np.random.Generator) -> None:
        self.requested = requested
        # The audit's own: which passes it observes, and which elements.
        self.draws = draws
        self.audited_kinds: set[str] = set()
        self.cells: dict[Cell, Seen] = {}
        self._lock = threading.Lock()
        self.counts: dict[tuple[str, str, str], int] = {}
        self.escapes: dict[str, int] = {}
        self.notes: dict[str, int] = {}
        self.passes = self.gradient_passes = 0
        self.backward_passes = 0
        self.audited_passes = 0
        self.observed: Counter[str] = Counter()
        self.has_backward = False
        self.operations: tuple[int, int] | None = None

    def add(self, cell: Cell, seen: Seen) -> None:
        """Add what was seen of a cell."""
        with self._lock:
            self.cells.setdefault(cell, Seen()).add(seen)

    def count(self, counts: Mapping[tuple[str, str, str], int]) -> None:
        """Add the machine's counts of products, by (phase, operator, what happened)."""
        for key, number in counts.items():
            self.counts[key] = self.counts.get(key, 0) + number

    def note(self, kind: dict[str, int], what: str, number: int = 1) -> None:
        """Count an escape or a note."""
        kind[what] = kind.get(what, 0) + number

    @property
    def products(self) -> int:
        """Number of products that the replaced kernels computed."""
        return sum(number for (_, _, what), number in self.counts.items() if what not in _NO_PRODUCTS)

    @property
    def noised(self) -> int:
        """Number of products with an error."""
        return sum(number for (_, _, what), number in self.counts.items() if what == "noised")

    @property
    def recomputed_numbers(self) -> int:
        """Number of elements whose error was recomputed from independent keys."""
        return sum(seen.recomputed for seen in self.cells.values())

    @property
    def measured_scale(self) -> float | None:
        """The scale that was measured; None for an error without one, or before anything was measured."""
        total = _sum(self.cells.values())
        size = total.size
        return None if self.requested.scale is None or size is None else size * self.requested.scale

    def table(self) -> pl.DataFrame:
        """Return the cells as a table, one row each."""
        names = [field.name for field in fields(Seen)]
        rows = [(*cell, *astuple(seen), seen.size) for cell, seen in sorted(self.cells.items())]
        schema: dict[str, Any] = {**dict.fromkeys(Cell._fields, pl.String)}
        schema |= {
            name: pl.Float64 if name not in ("products", "recomputed", "wrong", "compared") else pl.Int64
            for name in names
        }
        return pl.DataFrame(rows, schema=schema | {"size": pl.Float64}, orient="row")

    def problems(self) -> list[str]:
        """Return one line per difference between what was requested and what was measured."""
        found = [*self._missing(), *self._wrong(), *self._of_another_size()]
        found += [f"{number} calls of {what} escaped the error" for what, number in sorted(self.escapes.items())]
        for (phase, operator, what), number in sorted(self.counts.items()):
            if what in _REFUSED:
                found.append(f"{phase}: {number} calls of {operator} {_REFUSED[what]}")
        return found + sorted(self.notes)

    def forward_problems(self) -> list[str]:
        """Return the problems of a program that computes no gradients: they cannot be missing."""
        return [problem for problem in self.problems() if not problem.startswith("backward: no ")]

    def check(self) -> "MachineReceipt":
        """Return self, or raise ReceiptError with every difference between requested and measured error."""
        if problems := self.problems():
            raise ReceiptError("; ".join(problems))
        return self

    def _missing(self) -> Iterable[str]:
        for phase in self.requested.phases:
            if not any(number for (seen, _, what), number in self.counts.items() if seen == phase and what == "noised"):
                seen = sum(number for (of, _, _), number in self.counts.items() if of == phase)
                yield f"{phase}: no product had the requested error, of {seen} that were seen"
            elif not any(seen.recomputed for cell, seen in self.cells.items() if cell.phase == phase):
                yield f"{phase}: no result was recomputed, so nothing is proven; expected a call of the model" + (
                    " and of backward() in the context" if phase == "backward" else " in the context"
                )

        if self.requested.elementwise and not any(
            number
            for (_, operator, what), number in self.counts.items()
            if what == "noised" and operator in ELEMENTWISE
        ):
            yield "no softmax, activation or norm had the requested error; expected a model with layers that have some"

    def wrong_values(self, phase: str) -> Iterator[str]:
        """Yield one line per operator and place of a phase whose values or sizes are not the requested ones."""
        for cell, seen in sorted(self.cells.items()):
            if cell.phase != phase or not seen.wrong:
                continue
            where = f"{cell.operator} in {cell.place} ({cell.dtype})"
            if not seen.recomputed:
                yield f"{where}: {seen.wrong} of {seen.compared} values are not exact, no noise was requested"
                continue
            times = "" if seen.size is None else f", whose error is {seen.size:.2f} times the requested one"
            if math.sqrt(seen.found_squared) < _NO_ERROR * math.sqrt(seen.expected_squared):
                times = ": they have no error"
            yield f"{where}: {seen.wrong} of {seen.recomputed} recomputed values are not the requested ones{times}"
        for (of_phase, operator, dtype), seen in sorted(self._by_operator().items()):
            size = seen.size
            if of_phase == phase and not seen.wrong and size is not None:
                allowed = _SLOPE_TOLERANCE + _STANDARD_ERRORS * seen.size_error
                if abs(size - 1) > allowed:
                    yield f"{operator} ({dtype}): the error found is {size:.2f} times the requested one"

    def _wrong(self) -> Iterable[str]:
        for phase in sorted({cell.phase for cell in self.cells}):
            yield from (f"{phase}: {line}" for line in self.wrong_values(phase))
        for phase, dtype in sorted({(cell.phase, cell.dtype) for cell in self.cells}):
            whole = _sum(seen for cell, seen in self.cells.items() if (cell.phase, cell.dtype) == (phase, dtype))
            if whole.expected_squared > 0 and whole.size_error > _RESOLVED:
                yield (
                    f"{phase} ({dtype}): an error of this size cannot be told from rounding; found {whole.size:.2f} "
                    f"times the requested one, with a standard error of {whole.size_error:.2f}"
                )

    def _of_another_size(self) -> Iterable[str]:
        """Yield the phases in which a user's own error changed nothing, or has another size than was announced."""
        own = self.requested.own
        if own is None:
            return
        for phase in self.requested.phases:
            changed = [number for (seen, _, what), number in self.counts.items() if (seen, what) == (phase, CHANGED)]
            if changed and not any(changed):
                yield f"{phase}: {own.function} changed no value"
                continue
            total = _sum(seen for cell, seen in self.cells.items() if cell.phase == phase)
            if not total.recomputed:
                continue
            size = math.sqrt(total.error_squared / total.recomputed)
            if problem := own.size_problem(size, total.recomputed, "values"):
                yield f"{phase}: {problem}"

    def _by_operator(self) -> dict[tuple[str, str, str], Seen]:
        found: dict[tuple[str, str, str], Seen] = {}
        for cell, seen in self.cells.items():
            found.setdefault((cell.phase, cell.operator, cell.dtype), Seen()).add(seen)
        return found

    def __str__(self) -> str:
        """Return the receipt in about ten lines."""
        scale = self.measured_scale
        lines = [
            f"requested  {self.requested.error}, in {' and '.join(self.requested.phases)}",
            f"measured   {'-' if scale is None else f'{scale:.4f}'} from {self.recomputed_numbers:,} recomputed values",
            f"products   {self.noised:,} of {self.products:,} had the error, in {self.passes:,} passes"
            + (f" and {self.backward_passes:,} backward passes" if self.backward_passes else ""),
        ]
        for what, number in sorted(self.without_error().items()):
            lines.append(f"without    {number:,} {what}")
        for (phase, operator, dtype), seen in sorted(self._by_operator().items()):
            shown = "-" if seen.size is None else f"{seen.size:.3f}"
            lines.append(
                f"           {phase:<14}{operator[:32]:<34}{dtype:<10}{seen.products:>7} audited  size {shown:>6}  "
                f"{seen.wrong} wrong"
            )
        problems = self.problems()
        lines += [f"REFUSED    {problem}" for problem in problems] or ["accepted"]
        return "\n".join(lines)

    __repr__ = __str__

    def without_error(self) -> dict[str, int]:
        """Return the number of products that had no error, by why."""
        found: dict[str, int] = {}
        for (_, _, what), number in self.counts.items():
            if what != "noised" and what not in _NO_PRODUCTS:
                found[what] = found.get(what, 0) + number
        return found


CHANGED = "changed elements"
_NO_PRODUCTS = ("captured", CHANGED)

_REFUSED = {
    "of integers": "multiplied integers or complex numbers, which cannot have the error",
    "captured": "were captured into a CUDA graph, which repeats one error in every replay",
}


def _sum(parts: Iterable[Seen]) -> Seen:
    total = Seen()
    for part in parts:
        total.add(part)
    return total
