"""The running sums behind a receipt, as plain data: they can be saved, restored, and added up over processes."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from aqnpipe.config.noise import ErrorModel, Phase, Quantity
from aqnpipe.noise.receipts.receipt_content import WeightSync

_STRICT = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass
class RatioSums:
    """Running sums of errors, in the unit of their `Quantity`."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    quantity: Quantity = "relative"
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest_difference: float = 0.0

    def add(self, before: Tensor, after: Tensor) -> None:
        """Add the errors of `after` relative to `before` (same shapes)."""
        # In numpy: on short samples its calls cost a fraction of torch's.
        clean, used = (values.double().cpu().numpy() for values in (before, after))
        difference = used - clean
        if clean.size:
            self.largest_difference = max(self.largest_difference, float(np.abs(difference).max()))
        known = clean != 0
        match self.quantity:
            case "relative":
                ratio = difference[known] / clean[known]
            case "absolute":
                ratio = difference
            case "outward":
                ratio = difference[known] * np.sign(clean[known])
        self.count += ratio.size
        self.total += float(ratio.sum())
        self.squares += float(np.square(ratio).sum())

    @property
    def root_mean_square(self) -> float:
        """Root of the mean square of all errors; 0 without any."""
        return (self.squares / self.count) ** 0.5 if self.count else 0.0


@dataclass
class CellSums:
    """One noised operator, or kind of module, of one layer in one phase."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    phase: Phase
    operator: str
    layer: int | None
    error: ErrorModel
    ratios: RatioSums
    calls: int = 0
    elements: int = 0


@dataclass
class PhaseSums:
    """Counts and sums of one phase."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    phase: Phase
    forwards: int = 0
    noised_calls: int = 0
    reference_check: RatioSums = field(default_factory=RatioSums)
    reference_checked_elements: int = 0
    escaped: dict[str, int] = field(default_factory=dict)
    census: dict[str, int] = field(default_factory=dict)
    flops: int | None = None
    noised_flops: int = 0
    modules: set[str] = field(default_factory=set)
    norms_checked: int = 0
    norms_noised: int = 0


@dataclass
class FaultSums:
    """Counts of one fault in one phase."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    phase: Phase
    fault: int
    num_channels: int
    num_faulty_channels: int
    calls: int = 0
    elements: int = 0
    affected_elements: int = 0


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
    """AQN noise in one layer: sum of (added noise / scheduled sigma)^2 over its elements."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    layer: int | None
    squares: float = 0.0
    elements: int = 0


@dataclass
class RecorderState:
    """Everything that a `ReceiptRecorder` has measured. The requested noise is not part of it.

    Floats survive JSON bit for bit, so a restored recorder ends with the same receipt.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    cells: list[CellSums]
    phases: list[PhaseSums]
    faults: list[FaultSums]
    gradients: list[GradientSums]
    foreign_faults: set[str]
    weight_syncs: list[WeightSync]
    weight_factors: list[FactorSums]
    num_noised_modules: int
    mismatches: set[str] = field(default_factory=set)

    def to_json(self) -> str:
        """Return the state as JSON."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "RecorderState":
        """Return the state that `to_json` wrote. Raises pydantic's ValidationError on anything else."""
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(RecorderState)
