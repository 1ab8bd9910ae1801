"""The table of a receipt: one row per phase, step, layer and operator, with what was seen there.

Columns are sums, so workers, shards, resume points and phases are groups of rows that are added up: numbers are summed,
sets united, and of columns that begin with `largest_` the maximum is kept. What a study requires is rows too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import ConfigDict, PlainSerializer, SerializerFunctionWrapHandler, model_serializer

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.noise import AppliedError, Phase, requested_size

Place = tuple[Phase, int | None, int | None, str]

AQN = "AQN"
"""The operator of rows about AQN's noise, which is on weights or hidden states."""

_FAULT = "fault "
_FIXED = ("error", "num_channels", "num_faulty_channels")
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
      projection) with an error. `formats`: the number formats. `graph_replays`: passes that were replayed from CUDA
      graphs, without noise, faults and audit. A required row has 1 pass where some are due.
    - Phases. `flops` of one forward, computed from shapes, summed over workers or batches, `noised_flops` of results
      with operator noise. `gradients`: the parts (layers, then output projection) whose inputs needed a gradient; None
      without a backward pass. `modules` with noise. `norms_checked`: how often norm weights were compared with the
      clean ones, `norms_noised`: how often they were others. `audited_passes` of layers by kind of forward; a whole
      forward was audited of the kinds in `audited_whole`. `contradictions`: what the audit found, in words.
      `relative_squares` of differences from exact results, over `relative_elements`.
    - Operators, and modules. `calls` with an error, on `elements`; `changed`: those that an error of a user's own
      changed. Of `measured_elements`, in the unit of the error's `Quantity`: sum and squares of the error, and expected
      squares of what rounding adds; `zeros` before and after have no relative error. The audit recomputed elements: the
      `largest_deviation` is a multiple of what rounding explains. It `compared` others, which must be exact.
      `escaped`: calls with a matrix product inside that the noise does not reach.
    - Faults, whose operator is `fault N`: calls, elements on any channel, those `changed`. Their backward row is about
      the gradient behind the fault: non-zero `elements`, `squares` of all, `zeroed` ones that have none before it
      (faults on one site share this count), and `leaked` ones, which the fault changed and which passed nevertheless.
    - AQN: squares of added noise / scheduled sigma, `drawn_squares` before it is rounded to the tensor's number format,
      and the expected sum after rounding with its variance. The phase is rollout, or actor_forward.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    phase: Phase
    step: int | None = None
    layer: int | None = None
    operator: str = ""
    error: AppliedError | None = None
    passes: int = 0
    graph_replays: int = 0
    gradient_passes: int = 0
    sequences: int | None = None
    trained_sequences: int = 0
    noised_parts: int | None = None
    formats: _Sorted[str] = field(default_factory=set)
    flops: int = 0
    noised_flops: int = 0
    gradients: _Sorted[int] | None = None
    modules: _Sorted[str] = field(default_factory=set)
    norms_checked: int = 0
    norms_noised: int = 0
    audited_passes: dict[str, int] = field(default_factory=dict)
    audited_whole: _Sorted[str] = field(default_factory=set)
    contradictions: dict[str, int] = field(default_factory=dict)
    relative_elements: int = 0
    relative_squares: float = 0.0
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
    num_channels: int | None = None
    num_faulty_channels: int | None = None
    zeroed: int = 0
    zeroed_squares: float = 0.0
    leaked: int = 0
    drawn_squares: float = 0.0
    expected_squares: float = 0.0
    expected_variance: float = 0.0

    @model_serializer(mode="wrap")
    def _as_short_as_possible(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        return {name: value for name, value in written.items() if getattr(self, name) != _DEFAULTS.get(name)}

    @property
    def place(self) -> Place:
        """Phase, step, layer and operator."""
        return self.phase, self.step, self.layer, self.operator

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
    def reference_scale(self) -> float:
        """Root mean square of the relative differences from exact results; 0 without any."""
        return (self.relative_squares / self.relative_elements) ** 0.5 if self.relative_elements else 0.0

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
    def measured_factor(self) -> float:
        """Root mean square of AQN's noise over the scheduled sigma."""
        return (self.squares / self.elements) ** 0.5


_DEFAULTS: dict[str, Any] = {name: getattr(Row("rollout"), name) for name in [each.name for each in fields(Row)][1:]}
_COLUMNS = frozenset(_DEFAULTS) - {"step", "layer", "operator", *_FIXED}


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


def fault_operator(number: int) -> str:
    """Return the operator of rows about fault `number`."""
    return f"{_FAULT}{number}"
