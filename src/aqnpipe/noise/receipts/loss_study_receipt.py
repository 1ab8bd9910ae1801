"""The receipts of a loss study: one per pass over its texts."""

from pydantic import Field

from aqnpipe.config.loss_study import LossCondition
from aqnpipe.config.noise import FaultOrder
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.receipt_content import ReceiptModel


class LossStudyPass(ReceiptModel):
    """The receipt of one pass: a condition, with a magnitude if it has a fault, and an order if it needs one."""

    condition: LossCondition
    magnitude: float = Field(ge=0, description="magnitude of every fault; 0 without a fault")
    order: FaultOrder | None = Field(description="null unless a faulty layer has noise")
    noise_seed: int = Field(ge=0, description="0 without noise")
    noised_layers: tuple[int, ...]
    receipt: Receipt

    def problems(self) -> list[str]:
        """Return the mismatches between the condition, the requested noise and faults, and the measured ones."""
        where = f"{self.condition} at magnitude {self.magnitude:g}, order {self.order}, noise seed {self.noise_seed}"
        receipt, problems = self.receipt, []
        magnitudes = {fault.magnitude for fault in receipt.faults} or {0.0}
        if magnitudes != {self.magnitude}:
            problems.append(f"the receipt requested magnitudes {sorted(magnitudes)}")
        orders = {fault.order for fault in receipt.faults if fault.layer in self.noised_layers}
        if orders != ({self.order} if self.order else set()):
            problems.append(f"the receipt requested orders {sorted(orders)}")
        noised = {cell.layer for cell in receipt.weight_cells}
        if noised != set(self.noised_layers):
            problems.append(f"noise was measured in layers {sorted(noised, key=str)}")
        return [f"{where}: {problem}" for problem in [*problems, *receipt.problems()]]


class LossStudyReceipts(ReceiptModel):
    """results/loss_study/<model>/<name>.receipt.json: every pass of the table beside it."""

    vocabulary_size: int = Field(ge=2)
    num_layers: int = Field(ge=1)
    faulty_layers: tuple[int, ...]
    gamma: float
    passes: tuple[LossStudyPass, ...] = Field(min_length=1)

    def problems(self) -> list[str]:
        """Return the problems of all passes, and the passes that occur twice."""
        keys = [
            (studied.condition, studied.magnitude, studied.order or "", studied.noise_seed) for studied in self.passes
        ]
        twice = [f"evaluation {key}: recorded twice" for key in sorted({key for key in keys if keys.count(key) > 1})]
        return twice + [problem for studied in self.passes for problem in studied.problems()]
