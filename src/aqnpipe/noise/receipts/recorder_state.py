"""The running sums behind a receipt, as plain data: they can be saved, restored, and added up over processes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from aqnpipe.config.noise import AppliedError, Phase, Quantity
from aqnpipe.noise.receipts.passes import PassRow
from aqnpipe.noise.receipts.receipt_content import FaultCell, WeightSync
from aqnpipe.noise.receipts.rounding import ROUNDED_DTYPES, FloatArray, noised_moments

_STRICT = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

_Sums = TypeVar("_Sums")


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
class CellSums:
    """One noised operator, or kind of module, of one layer in one phase.

    `changed`: the elements that an error of a user's own changed; it is not counted for other errors.
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


@dataclass
class ReferenceSums:
    """Outputs of linear modules compared with plain torch.

    `largest_difference` is over those that should have no noise, `squares` of relative differences over the others.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    elements: int = 0
    largest_difference: float = 0.0
    squares: float = 0.0
    relative_elements: int = 0


@dataclass
class AuditSums:
    """Result of the audits of one phase.

    `passes` counts the observed passes of layers, by kind of forward. `whole` are the kinds of which a whole forward
    was observed. `numbers` are the elements whose noise was recomputed; `largest_deviation` is their largest difference
    from the recomputed values, as a multiple of what rounding explains.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    passes: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    classified: int = 0
    numbers: int = 0
    largest_deviation: float = 0.0
    contradictions: dict[str, int] = field(default_factory=dict)
    reference: ReferenceSums = field(default_factory=ReferenceSums)


@dataclass
class PhaseSums:
    """Counts and sums of one phase. `gradients`: parts whose inputs needed a gradient, None without a backward pass."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    phase: Phase
    forwards: int = 0
    noised_calls: int = 0
    audit: AuditSums = field(default_factory=AuditSums)
    escaped: dict[str, int] = field(default_factory=dict)
    flops: int | None = None
    noised_flops: int = 0
    gradients: set[int] | None = None
    modules: set[str] = field(default_factory=set)
    norms_checked: int = 0
    norms_noised: int = 0


@dataclass
class GradientSums:
    """Sums over the gradients at one fault.

    In order: elements with a gradient, zeroed ones, leaked ones, squared norm of all, squared norm of the zeroed ones.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    fault: int
    calls: int = 0
    totals: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, sums: list[float]) -> None:
        """Add the five sums of one call."""
        self.totals = [total + added for total, added in zip(self.totals, sums, strict=True)]


@dataclass
class FactorSums:
    """AQN noise in one layer: sum of (added noise / scheduled sigma)^2 over its elements.

    `phase`: rollout, in which every AQN is, or actor_forward.
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


@dataclass
class RecorderState:
    """Everything that a `ReceiptRecorder` has measured. The requested noise is not part of it.

    `keys` are those of the noise of an evaluation: phase, seed, step, micro-step and rank of each batch.

    Floats survive JSON bit for bit, so a restored recorder ends with the same receipt.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    cells: list[CellSums]
    phases: list[PhaseSums]
    faults: list[FaultCell]
    gradients: list[GradientSums]
    foreign_faults: set[str]
    weight_syncs: list[WeightSync]
    weight_factors: list[FactorSums]
    num_noised_modules: int
    mismatches: set[str] = field(default_factory=set)
    passes: list[PassRow] = field(default_factory=list)
    keys: list[tuple[Phase, int, int, int, int]] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the state as JSON."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "RecorderState":
        """Return the state that `to_json` wrote. Raises pydantic's ValidationError on anything else."""
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(RecorderState)
