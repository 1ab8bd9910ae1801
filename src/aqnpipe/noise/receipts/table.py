"""The table of a receipt: one row per phase, step, layer and operator, with what was seen there.

Columns are sums, so workers, shards, resume points and phases are groups of rows that are added up: numbers are summed,
sets united, and of columns that begin with `largest_` the maximum is kept. What a study requires is rows too.
"""

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import polars as pl
from pydantic import ConfigDict, PlainSerializer, SerializerFunctionWrapHandler, model_serializer

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.noise import AppliedError, Phase, requested_size

TablePhase = Phase | Literal["forward"]
"""A phase of a study, or a pass of a program of which no more is known."""


class Place(NamedTuple):
    """Subject of a row, see `Row`. `path`: of a module, and `dtype`: of results, where a program has no layers."""

    phase: Any
    step: int | None = None
    layer: int | None = None
    operator: str = ""
    path: str = ""
    dtype: str = ""


AQN = "AQN"
"""The operator of rows about AQN's noise, which is on weights or hidden states."""

CACHE = "kv_cache"
"""The operator of rows about keys and values that attention reads back from a cache."""

SYNC = "AQN sync"
"""The operator of rows about redraws of AQN's noise in a step, over all targets."""

REQUEST = "request"
"""The operator of the row that lists what was installed and not requested."""

_FAULT = "fault "
_FIXED = ("error", "num_channels", "num_faulty_channels", "sigma", "targets")
"""Columns that have one value in all rows of a place."""

_VISIBLE_ROUNDING = 0.01
"""Share of the requested size from which on a receipt states the rounding of the number format."""

_Member = TypeVar("_Member")
_Sorted = Annotated[set[_Member], PlainSerializer(sorted)]
"""A set that is written in order: the order of its own is another one in every process."""


@dataclass
class Row:
    """What was seen in one phase, at one step, layer and operator; each is left out where it does not matter.

    `layer` is None outside the layers too. `error`: what the operator, or kind of module, was noised with.

    - Passes, by step. `sequences` were read from their first token on without gradients, `trained_sequences` with
      gradients; None where an engine does not say. `noised_parts` counts, over all passes, the layers (and output
      projection) with an error. `formats`: the number formats; `modes`: training, evaluation; `attention`: the kernels;
      `algorithms`: deterministic where torch was told to use no others, else default.
      `largest_first_position`: of the first pass of a phase, above 0 if tokens were read before. `graph_replays`:
      passes that were replayed from CUDA graphs, without noise, faults and audit. A required row has 1 pass where some
      are due.
    - Phases. `keys` of the noise of batches of an evaluation; `largest_selected`: modules that module noise selects.
      `flops` of one forward, computed from shapes, summed over workers or batches, `noised_flops` of results with
      operator noise. `gradients`: the parts (layers, then output projection) whose inputs needed a gradient; None
      without a backward pass. `modules` with noise. `norms_checked`: how often norm weights were compared with the
      clean ones, `norms_noised`: how often they were others. `audited_passes` of layers by kind of forward; a whole
      forward was audited of the kinds in `audited_whole`. `contradictions`: what the audit found, in words.
    - Operators, and modules. `calls` with an error, on `elements`; `changed`: those that an error of a user's own
      changed. Of `measured_elements`, in the unit of the error's `Quantity`: sum and squares of the error, and expected
      squares of what rounding adds; `zeros` before and after have no relative error. The audit recomputed elements: the
      `largest_deviation` is a multiple of what rounding explains. It `compared` others, which must be exact.
      `escaped`: calls with a matrix product inside that the noise does not reach. Of what the audit saw, `products`,
      and as multiples of each element: `found_expected`, sum of products of the error found and the requested one with
      the same random numbers, the squares of both, and of what rounding may have hidden. `own_squares`: of a user's own
      error, in the quantity that was announced. `outcomes`: what became of all products, in words.
    - Faults, whose operator is `fault N`: calls, elements on any channel, those `changed`; of an unchanged program also
      its `passes`: calls of the layer, where they are observed by themselves. Their backward row is about
      the gradient behind the fault: non-zero `elements`, `squares` of all, `zeroed` ones that have none before it
      (faults on one site share this count), and `leaked` ones, which the fault changed and which passed nevertheless.
    - AQN: squares of added noise / scheduled sigma, and `drawn_squares` that it should have before it is rounded to the
      tensor's number format. The phase is rollout, or actor_forward. Of a step, whose operator is `AQN sync`: `calls`
      redraws at the scheduled `sigma` on `targets` norms or layers, and squares over all `elements` of norms, or mean
      squares of relative noise over layers; `digests` of the norm weights, which are clean before and after.
    - Cache, whose operator is `kv_cache`: `calls` of attention; keys and values of one token and head are an element:
      `recomputed` new ones, `elements` read, of which `wrong` are no rounded ones, and `escaped` new ones, which were
      not read. `squares` of the error, over all numbers, and `expected_squares` of the exact ones.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    phase: TablePhase
    step: int | None = None
    layer: int | None = None
    operator: str = ""
    path: str = ""
    dtype: str = ""
    error: AppliedError | None = None
    passes: int = 0
    graph_replays: int = 0
    gradient_passes: int = 0
    sequences: int | None = None
    trained_sequences: int = 0
    noised_parts: int | None = None
    formats: _Sorted[str] = field(default_factory=set)
    modes: _Sorted[str] = field(default_factory=set)
    attention: _Sorted[str] = field(default_factory=set)
    algorithms: _Sorted[str] = field(default_factory=set)
    largest_first_position: int = 0
    flops: int = 0
    noised_flops: int = 0
    gradients: _Sorted[int] | None = None
    modules: _Sorted[str] = field(default_factory=set)
    norms_checked: int = 0
    norms_noised: int = 0
    audited_passes: dict[str, int] = field(default_factory=dict)
    audited_whole: _Sorted[str] = field(default_factory=set)
    contradictions: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    elements: int = 0
    changed: int = 0
    measured_elements: int = 0
    error_sum: float = 0.0
    squares: float = 0.0
    rounding_squares: float = 0.0
    zeros: int = 0
    recomputed: int = 0
    wrong: int = 0
    largest_deviation: float = 0.0
    compared: int = 0
    largest_difference: float = 0.0
    escaped: int = 0
    products: int = 0
    found_expected: float = 0.0
    found_squares: float = 0.0
    requested_squares: float = 0.0
    hidden_squares: float = 0.0
    own_squares: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    num_channels: int | None = None
    num_faulty_channels: int | None = None
    zeroed: int = 0
    zeroed_squares: float = 0.0
    leaked: int = 0
    drawn_squares: float = 0.0
    sigma: float | None = None
    targets: int | None = None
    digests: _Sorted[str] = field(default_factory=set)
    keys: dict[str, int] = field(default_factory=dict)
    largest_selected: int = 0
    expected_squares: float = 0.0

    @model_serializer(mode="wrap")
    def _as_short_as_possible(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        return {name: value for name, value in written.items() if getattr(self, name) != _DEFAULTS.get(name)}

    @property
    def place(self) -> Place:
        """What the row is about."""
        return Place(self.phase, self.step, self.layer, self.operator, self.path, self.dtype)

    def add(self, **columns: Any) -> None:
        """Add values to columns."""
        for name, value in columns.items():
            setattr(self, name, _combined(name, getattr(self, name), value))

    def include(self, rows: "Iterable[Row]", names: Iterable[str] | None = None) -> Self:
        """Add the columns `names` (default: all that are no place and not fixed) of other rows; return self."""
        wanted = _COLUMNS if names is None else frozenset(names)
        for row in rows:
            for name, value in vars(row).items():
                # A zero says something where nothing was seen otherwise.
                if (value or (value is not None and _DEFAULTS.get(name) is None)) and name in wanted:
                    self.add(**{name: value})
        return self

    @property
    def kind(self) -> str:
        """The kind of the error; empty without one."""
        return self.error.kind if self.error else ""

    @property
    def requested(self) -> float:
        """The expected value of `measured`: the error's scale, or an upper bound for roundings and users' errors."""
        return requested_size(self.error) if self.error else 0.0

    @property
    def measured(self) -> float | None:
        """Root mean square of the measured errors; None before anything was measured."""
        return (self.squares / self.measured_elements) ** 0.5 if self.measured_elements else None

    @property
    def rounding(self) -> float | None:
        """Root mean square of what rounding the result adds, where it is visible beside the error."""
        if not self.measured_elements:
            return None
        rounding = (self.rounding_squares / self.measured_elements) ** 0.5
        return (
            rounding if isinstance(self.error, CustomError) or rounding > _VISIBLE_ROUNDING * self.requested else None
        )

    @property
    def is_lost(self) -> bool:
        """Return whether rounding to the number format left less than half of the requested size."""
        return self.measured is not None and self.rounding is not None and self.measured < self.requested / 2

    @property
    def is_zero(self) -> bool:
        """Return whether it is of a gradient that was zero wherever recomputed: noise on it has no relative size."""
        return self.phase == "backward" and not self.measured_elements and self.zeros > 0

    @property
    def is_module(self) -> bool:
        """Return whether the row belongs to module noise."""
        return self.operator.startswith("module.")

    @property
    def where(self) -> str:
        """Phase, operator and layer, for messages."""
        if self.layer is None and self.operator.startswith("norm."):
            return f"{self.phase} {self.operator} outside the layers"
        return f"{self.phase} {self.operator} layer {'lm_head' if self.layer is None else self.layer}"

    @property
    def noised_share(self) -> float | None:
        """Share of a forward pass's operations that have operator noise; None if they were not counted."""
        return self.noised_flops / self.flops if self.flops else None

    @property
    def fault(self) -> int:
        """Index of the fault among those of the receipt; -1 for a row about something else."""
        return int(self.operator.removeprefix(_FAULT)) if self.operator.startswith(_FAULT) else -1

    @property
    def survival_rate(self) -> float:
        """Share of elements that the fault leaves unchanged."""
        return 1 - self.changed / self.elements if self.elements else 1.0

    @property
    def zeroed_share(self) -> float:
        """Share of the elements with a gradient whose gradient the site sets to zero."""
        return self.zeroed / self.elements if self.elements else 0.0

    @property
    def zeroed_norm_share(self) -> float:
        """Norm of the gradient that the site sets to zero, as a share of the norm that arrives."""
        return self.zeroed_squares**0.5 / self.squares**0.5 if self.squares else 0.0

    @property
    def size(self) -> float | None:
        """Size of the error found, as a multiple of the requested one with the same random numbers; 1 if it is that."""
        return self.found_expected / self.requested_squares if self.requested_squares > 0 else None

    @property
    def size_error(self) -> float:
        """Standard error of `size`, from what the requested error does not explain, and rounding may hide."""
        if not self.recomputed or self.requested_squares <= 0:
            return math.inf
        unexplained = self.found_squares - self.found_expected**2 / self.requested_squares
        rest = max(unexplained, self.hidden_squares)
        return math.sqrt(rest / max(self.recomputed - 1, 1) / self.requested_squares)

    @property
    def sigma_measured(self) -> float:
        """Root mean square of AQN's noise; of a layer, over the scheduled sigma."""
        return (self.squares / self.elements) ** 0.5

    @property
    def sigma_requested(self) -> float:
        """What `sigma_measured` should be before rounding, after the factors of layers."""
        return (self.drawn_squares / self.elements) ** 0.5

    @property
    def is_restored(self) -> bool:
        """Return whether the norm weights were the same before and after AQN's noise."""
        return len(self.digests) == 1


_DEFAULTS: dict[str, Any] = {name: getattr(Row("rollout"), name) for name in [each.name for each in fields(Row)][1:]}
_COLUMNS = frozenset(_DEFAULTS) - {*Place._fields, *_FIXED}


def _combined(name: str, before: Any, value: Any) -> Any:
    if before is None or value is None:
        return value if before is None else before
    if name in _FIXED:
        return before
    if name.startswith("largest_"):
        return max(before, value)
    if isinstance(value, dict):
        return {key: before.get(key, 0) + value.get(key, 0) for key in {**before, **value}}
    return before | value if isinstance(value, set) else before + value


def grouped(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows, those of the same place added up, in the order of first appearance.

    Raises ValueError if rows of one place are about different errors or channels.
    """
    groups: dict[Place, Row] = {}
    for row in rows:
        group = groups.setdefault(row.place, Row(*row.place))
        for name in _FIXED:
            group.add(**{name: getattr(row, name)})
            if getattr(row, name) not in (None, getattr(group, name)):
                raise ValueError(f"sums of different things are merged at {row.where}: {name}; this is a bug")
        group.include([row])
    return tuple(groups.values())


class Rows:
    """Rows by place, to which measurements are added."""

    def __init__(self) -> None:
        self.rows: dict[Place, Row] = {}

    def row(
        self,
        phase: Any,
        step: int | None = None,
        layer: int | None = None,
        operator: str = "",
        path: str = "",
        dtype: str = "",
    ) -> Row:
        """Return the row of a place, an empty one if nothing was seen there."""
        place = Place(phase, step, layer, operator, path, dtype)
        if place not in self.rows:
            self.rows[place] = Row(*place)
        return self.rows[place]


def fault_operator(number: int) -> str:
    """Return the operator of rows about fault `number`."""
    return f"{_FAULT}{number}"


class Shown:
    """A receipt with a table, also as a notebook shows it."""

    @property
    def table_rows(self) -> Iterable[Row]:
        """The rows of `table()`."""
        raise NotImplementedError

    def table(self) -> pl.DataFrame:
        """Return the table: what each row is about, and the numbers that are not 0 everywhere, with `size` if known."""
        rows = list(self.table_rows)
        columns = {name: [getattr(row, name) for row in rows] for name in (*Row.__dataclass_fields__, "size")}
        places = {name: columns.pop(name) for name in Place._fields}
        numbers = {
            name: values
            for name, values in columns.items()
            if any(values) and all(isinstance(value, int | float | None) for value in values)
        }
        used = {name: values for name, values in places.items() if not {None, ""}.issuperset(values)}
        return pl.DataFrame(used | numbers)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>{self.table()._repr_html_()}"
