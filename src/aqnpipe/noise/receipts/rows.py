"""The rows of a receipt: running sums of measurements, which can be saved, restored, and added up over processes.

A row says what it is about in fields without a default; `place` is the same as one value. All others are sums, from
which a receipt derives its figures. Workers, parts of an evaluation and resumed runs are one table: rows of the same
place are added up by `merged`.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer
from torch import Tensor

from aqnpipe.config.noise import AppliedError, ErrorKind, Phase, Quantity, requested_size
from aqnpipe.config.own_noise import OwnError
from aqnpipe.noise.receipts.rounding import ROUNDED_DTYPES, FloatArray, noised_moments

_STRICT = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

SAMPLING_SIGMAS = 5.0
"""Width of an acceptance band in standard errors of the measurement: below one false alarm in a million cells."""

_LEAST_SHARE = 0.5
"""Noise is refused if less than this share is measured of what rounding must leave of it."""

_HALF_A_STEP = math.sqrt(3)
"""Half the distance between neighbouring numbers, in standard deviations of rounding to them."""

_FEWEST_FOR_A_SIZE = 64
"""Elements from which on half of the requested scale cannot be chance: 5.6 standard errors."""


def left_by_rounding(size: float, rounding: float | None) -> float:
    """Return the least root mean square that rounding leaves of errors of `size`, as it moves none by over half a step.

    `rounding`: standard deviation of the rounding. An error below half a step may be lost as a whole: this is what a
    number format does to it, and no mistake.
    """
    return max(size - _HALF_A_STEP * (rounding or 0.0), 0.0)


_VISIBLE_ROUNDING = 0.01
"""Share of the requested size from which on a receipt states the rounding of the number format."""

_Sums = TypeVar("_Sums")
_Member = TypeVar("_Member")
_Sorted = Annotated[set[_Member], PlainSerializer(sorted)]
"""A set that is written in order: the order of its own is another one in every process."""


def merged(parts: Sequence[_Sums]) -> _Sums:
    """Return the sums of all parts together, as if one recorder had seen everything.

    Numbers, counts and lists are added up, sets united, maxima kept. A field without a default says whose sums they
    are. Raises ValueError if the parts are sums of different things.
    """
    first: Any = parts[0]
    kept = {
        each.name: getattr(first, each.name)
        for each in fields(first)
        if each.default is MISSING and each.default_factory is MISSING
    }
    if any(getattr(part, name) != value for part in parts[1:] for name, value in kept.items()):
        raise ValueError(f"sums of different things are merged, not all of them of {kept}; this is a bug")
    names = [each.name for each in fields(first) if each.name not in kept]
    added = {name: _together(name, [getattr(part, name) for part in parts]) for name in names}
    combined: _Sums = type(first)(**kept, **added)
    return combined


def _together(name: str, values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    first = known[0] if known else None
    if first is None or isinstance(first, str):
        return first
    if name.startswith("largest_"):
        return max(known)
    if isinstance(first, set):
        return set().union(*known)
    if isinstance(first, dict):
        return dict(sum((Counter(value) for value in known), Counter()))
    if isinstance(first, list):
        return [sum(column) for column in zip(*known, strict=True)]
    return merged(known) if is_dataclass(first) else sum(known)


def grouped(tables: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the rows of all tables, those of the same place added up, in the order of first appearance."""
    groups: dict[Hashable, list[Any]] = {}
    for rows in tables:
        for row in rows:
            groups.setdefault(row.place, []).append(row)
    return [merged(group) for group in groups.values()]


@dataclass
class RatioSums:
    """Running sums of errors, in the unit of their `Quantity`.

    `rounded_count` of the errors are of 16-bit tensors: the expected sum of their squares is `expected_squares`, with
    the variance `expected_variance` (see `rounding`). `rounding_squares`: the expected sum of the squares of what
    rounding the results adds to them. `zeros`: values that are zero before and after, and have no relative error.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    quantity: Quantity = "relative"
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    rounded_count: int = 0
    expected_squares: float = 0.0
    expected_variance: float = 0.0
    rounding_squares: float = 0.0
    zeros: int = 0

    def add(self, before: Tensor, after: Tensor, scale: float | None = None) -> None:
        """Add the errors of `after` relative to `before` (same shapes).

        `scale`: the scale of the Gaussian noise that the error is expected to be.
        """
        # In numpy: on short samples its calls cost a fraction of torch's.
        clean, used = (values.double().cpu().numpy() for values in (before, after))
        self.add_values(clean, used)
        if scale and before.dtype in ROUNDED_DTYPES and self.quantity != "outward":
            self._expect(before, clean, scale)

    def add_values(self, clean: FloatArray, used: FloatArray) -> None:
        """Add the errors of the values `used` relative to the values `clean`."""
        difference = used - clean
        known = clean != 0
        self.zeros += int((~known & (used == 0)).sum())
        match self.quantity:
            case "relative" | "measured":
                ratio = difference[known] / clean[known]
            case "absolute":
                ratio = difference
            case "outward":
                ratio = difference[known] * np.sign(clean[known])
        self.count += ratio.size
        self.total += float(ratio.sum())
        self.squares += float(np.square(ratio).sum())

    def add_rounding(self, clean: FloatArray, deviation: FloatArray) -> None:
        """Add the standard deviations of the roundings of values that are `clean` before their error."""
        known = clean != 0
        parts = deviation[known] / clean[known] if self.quantity in ("relative", "measured") else deviation
        self.rounding_squares += float(np.square(parts).sum())

    def _expect(self, before: Tensor, clean: FloatArray, scale: float) -> None:
        """Add the expected squares of the errors of a 16-bit tensor: the noise and the rounding of the result."""
        relative = self.quantity == "relative"
        mean, variance = noised_moments(before, scale * np.abs(clean) if relative else np.full(clean.shape, scale))
        if relative:
            known = clean != 0
            mean, variance = mean[known] / clean[known] ** 2, variance[known] / clean[known] ** 4
        self.rounded_count += mean.size
        self.expected_squares += float(mean.sum())
        self.expected_variance += float(variance.sum())

    def expected_sums(self, scale: float) -> tuple[float, float]:
        """Return the expected value of `squares` for Gaussian noise of `scale`, and its variance."""
        exact = self.count - self.rounded_count
        return self.expected_squares + exact * scale**2, self.expected_variance + 2 * exact * scale**4

    @property
    def root_mean_square(self) -> float:
        """Root of the mean square of all errors; 0 without any."""
        return (self.squares / self.count) ** 0.5 if self.count else 0.0


@dataclass
class NoiseCell:
    """Error on one operator, or one kind of module, of one layer in one phase.

    `layer` is None for the output projection, and outside the layers. `changed`: the elements that an error of a user's
    own changed; it is not counted for other errors. `measured` is the root mean square over `measured_elements` sampled
    elements, `mean_error` their mean. The quantity is (y' - y)/y over non-zero y for relative errors, y' - y for
    absolute ones, (y' - y)*sign(y) for a bias, and for measured errors y' - y in units of the measured machine: over
    the size of its error at y. `requested` is the expected value of `measured`: the error's scale, or an upper bound
    for roundings of a number format and errors of a user's own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    phase: Phase
    operator: str
    layer: int | None
    error: AppliedError
    ratios: RatioSums = field(default_factory=RatioSums)
    calls: int = 0
    elements: int = 0
    changed: int = 0

    @property
    def place(self) -> tuple[Phase, str, int | None]:
        """Phase, operator and layer."""
        return self.phase, self.operator, self.layer

    @property
    def kind(self) -> ErrorKind:
        """The kind of the error."""
        return self.error.kind

    @property
    def requested(self) -> float:
        """The expected value of `measured`."""
        return requested_size(self.error)

    @property
    def measured(self) -> float | None:
        """Root mean square of the measured errors; None before anything was measured."""
        return self.ratios.root_mean_square if self.ratios.count else None

    @property
    def mean_error(self) -> float | None:
        """Mean of the measured errors; None before anything was measured."""
        return self.ratios.total / self.ratios.count if self.ratios.count else None

    @property
    def measured_elements(self) -> int:
        """Number of elements that were measured."""
        return self.ratios.count

    @property
    def rounding(self) -> float | None:
        """Root mean square of what rounding the result adds, where it is visible beside the error."""
        if not self.ratios.count:
            return None
        rounding = (self.ratios.rounding_squares / self.ratios.count) ** 0.5
        is_visible = isinstance(self.error, OwnError) or rounding > _VISIBLE_ROUNDING * self.requested
        return rounding if is_visible else None

    @property
    def is_lost(self) -> bool:
        """Return whether rounding to the number format left less than half of the requested size."""
        return self.measured is not None and self.rounding is not None and self.measured < self.requested / 2

    @property
    def is_zero(self) -> bool:
        """Return whether it is of a gradient that was zero wherever recomputed: noise on it has no relative size."""
        return self.phase == "backward" and not self.ratios.count and self.ratios.zeros > 0

    @property
    def is_module(self) -> bool:
        """Return whether the cell belongs to module noise."""
        return self.operator.startswith("module.")

    @property
    def where(self) -> str:
        """Phase, operator and layer, for messages."""
        if self.layer is None and self.operator.startswith("norm."):
            return f"{self.phase} {self.operator} outside the layers"
        return f"{self.phase} {self.operator} layer {'lm_head' if self.layer is None else self.layer}"

    def problems(self) -> list[str]:
        """Return what contradicts the request in the measured size. The audit compares the numbers themselves."""
        if self.kind == "measured" and not self.requested:
            # An operator whose measured error is zero: the audit compares its values, there is no size.
            return []
        if self.is_zero:
            return []
        if self.measured is None or self.mean_error is None or not self.measured_elements:
            return [f"{self.where}: {self.calls} noised calls but nothing measured"]
        is_gaussian = self.kind in ("relative_gaussian", "absolute_gaussian", "measured")
        is_too_small = self.measured < _LEAST_SHARE * left_by_rounding(self.requested, self.rounding)
        if is_gaussian and is_too_small and self.measured_elements >= _FEWEST_FOR_A_SIZE:
            return [
                f"{self.where}: measured scale {self.measured:.3g}, requested {self.requested:.3g}, of which rounding "
                f"to the number format explains {self.requested - left_by_rounding(self.requested, self.rounding):.3g}"
            ]
        if self.kind == "fake_quantization" and not 0 < self.measured < self.requested:
            return [f"{self.where}: measured a relative error of {self.measured:.4g}, expected one in (0, 1)"]
        return []


@dataclass
class ReferenceSums:
    """Outputs of operators compared with exact ones.

    `largest_difference` is over those that should have no noise, `squares` of relative differences over the others.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    elements: int = 0
    largest_difference: float = 0.0
    squares: float = 0.0
    relative_elements: int = 0

    @property
    def scale(self) -> float:
        """Root mean square of the relative differences; 0 without any."""
        return (self.squares / self.relative_elements) ** 0.5 if self.relative_elements else 0.0


@dataclass
class PhaseRecord:
    """Counts and measurements of one phase, noised or clean.

    The audit observes some passes of layers in torch's dispatcher. In these it classifies every operation, and
    recomputes sampled numbers of the noise from keys of its own: `recomputed_numbers` elements, whose largest
    difference is `largest_deviation` (1 is what rounding explains). `contradictions` counts what it found otherwise
    than requested, `audited_passes` the observed passes of layers by kind of forward, `audited_whole` has the kinds of
    which a whole forward was observed, and `classified` is 0 since vLLM's engines have the same audit. `reference`:
    results compared with those of exact products in float64. `graph_replays`: passes that were replayed from CUDA
    graphs, without noise, faults and audit; `forwards` counts them too. `escaped`: calls with a matrix product inside
    that the noise does not reach. `flops`: operations of one forward pass, computed from the shapes, summed over
    workers or over the batches of an evaluation, and `noised_flops` those whose result has operator noise; None: not
    counted.
    `gradients`: the parts of the model (layers, then the output projection) whose inputs needed a gradient; None
    without a backward pass. `modules`: those with module noise. `norms_checked`: how often the phase compared its norm
    weights with the clean ones before it computed; `norms_noised`: how often they were others.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    phase: Phase
    forwards: int = 0
    graph_replays: Annotated[int, Field(exclude_if=lambda number: not number)] = 0
    noised_calls: int = 0
    audited_passes: dict[str, int] = field(default_factory=dict)
    audited_whole: _Sorted[str] = field(default_factory=set)
    classified: int = 0
    recomputed_numbers: int = 0
    largest_deviation: float = 0.0
    contradictions: dict[str, int] = field(default_factory=dict)
    reference: ReferenceSums = field(default_factory=ReferenceSums)
    escaped: dict[str, int] = field(default_factory=dict)
    flops: int | None = None
    noised_flops: int = 0
    gradients: _Sorted[int] | None = None
    modules: _Sorted[str] = field(default_factory=set)
    norms_checked: int = 0
    norms_noised: int = 0

    @property
    def place(self) -> Phase:
        """The phase."""
        return self.phase

    @property
    def forward_flops(self) -> int:
        """Operations of a forward pass; 0: not counted."""
        return self.flops or 0

    @property
    def noised_share(self) -> float | None:
        """Share of a forward pass's operations that have operator noise; None if they were not counted."""
        return self.noised_flops / self.flops if self.flops else None


@dataclass(kw_only=True)
class FaultCell:
    """Effect of one simulated fault in one phase; elements are all values of its site's output, on any channel."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    fault: Annotated[int, Field(ge=0, description="index among the receipt's faults")]
    phase: Phase
    calls: int = 0
    elements: int = 0
    affected_elements: Annotated[int, Field(description="elements changed by the fault")] = 0
    num_channels: int
    num_faulty_channels: int

    @property
    def place(self) -> tuple[Phase, int]:
        """Phase and fault."""
        return self.phase, self.fault

    @property
    def survival_rate(self) -> float:
        """Share of elements that the fault leaves unchanged."""
        return 1 - self.affected_elements / self.elements if self.elements else 1.0


@dataclass
class GradientFlow:
    """Gradient at a fault's site over all backward passes: the gradient that arrives, and the part that passes on.

    `elements` have a non-zero gradient behind the fault. `zeroed_elements` of them have none before it; several faults
    on one site share this count. `leaked_elements` were changed by the fault and passed a gradient nevertheless. The
    squares are summed over all elements of all passes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    fault: Annotated[int, Field(ge=0, description="index among the receipt's faults")]
    calls: int = 0
    elements: int = 0
    zeroed_elements: int = 0
    leaked_elements: int = 0
    squares: float = 0.0
    zeroed_squares: float = 0.0

    @property
    def place(self) -> int:
        """The fault."""
        return self.fault

    def add(self, sums: Sequence[float]) -> None:
        """Add the five sums of one call: elements, zeroed ones, leaked ones, squares of all, squares of zeroed ones."""
        elements, zeroed, leaked, squares, zeroed_squares = sums
        self.elements += int(elements)
        self.zeroed_elements += int(zeroed)
        self.leaked_elements += int(leaked)
        self.squares += squares
        self.zeroed_squares += zeroed_squares

    @property
    def norm(self) -> float:
        """Euclidean norm of the gradient that arrives."""
        return self.squares**0.5

    @property
    def zeroed_norm(self) -> float:
        """Euclidean norm of the gradient that the site sets to zero."""
        return self.zeroed_squares**0.5

    @property
    def zeroed_share(self) -> float:
        """Share of the elements with a gradient whose gradient the site sets to zero."""
        return self.zeroed_elements / self.elements if self.elements else 0.0

    @property
    def zeroed_norm_share(self) -> float:
        """Norm of the gradient that the site sets to zero, as a share of the norm that arrives."""
        return self.zeroed_norm / self.norm if self.norm else 0.0


@dataclass
class WeightCell:
    """AQN noise in one layer: sum of (added noise / scheduled sigma)^2 over its elements.

    `layer` is None for norms outside the layers. `phase`: rollout, in which every AQN is, or actor_forward.
    `drawn_squares`: the expected sum before the result is rounded to the number format of the tensor.
    `expected_squares` and `expected_variance`: the expected sum after rounding, and its variance.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    layer: int | None
    squares: float = 0.0
    elements: int = 0
    drawn_squares: float = 0.0
    expected_squares: float = 0.0
    expected_variance: float = 0.0
    phase: Phase = "rollout"

    @property
    def place(self) -> tuple[Phase, int | None]:
        """Phase and layer."""
        return self.phase, self.layer

    @property
    def measured_factor(self) -> float:
        """Root mean square of the noise over the scheduled sigma."""
        return (self.squares / self.elements) ** 0.5

    @property
    def rounding_factor(self) -> float:
        """What rounding to a 16-bit number format multiplies the factor by."""
        return (self.expected_squares / self.drawn_squares) ** 0.5

    @property
    def standard_error(self) -> float:
        """Relative standard error of `measured_factor`."""
        expected = self.expected_squares
        return self.expected_variance**0.5 / (2 * expected) if expected else 0.0


class ReceiptModel(BaseModel):
    """Base of the parts of a receipt that are no sums: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WeightSync(ReceiptModel):
    """One redraw of AQN noise on the rollout policy: on its norm weights, or on its hidden states.

    `sigma_scheduled` is the sigma that the trainer used. `sigma_requested` is the root mean square over all elements
    after per-layer factors. `sigma_measured` is that of the added noise (hidden states: relative, from samples). The
    hashes are of the norm weights, which are clean before and after, for every target.
    """

    step: int
    sigma_scheduled: float
    sigma_requested: float
    sigma_measured: float
    targets: int = Field(description="number of norms, or decoder layers, that AQN targets")
    elements: int = Field(description="elements that were noised and measured")
    squared_error_ratio: float = Field(description="mean of (measured/requested)^2 over elements")
    expected_ratio: float = Field(description="what it should be: 1, or what rounding to 16 bits makes of it")
    ratio_error: float = Field(description="standard error of squared_error_ratio")
    clean_sha256_before: str
    clean_sha256_after: str
