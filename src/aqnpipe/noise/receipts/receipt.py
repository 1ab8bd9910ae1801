"""Receipts: the requested noise, the measured noise, and a check that refuses every mismatch between the two.

The checks are in three modules: `operator_checks` (operators and modules), `fault_checks` and `aqn_checks`.
"""

from typing import Self

from aqnpipe.errors import ReceiptError
from aqnpipe.noise.receipts.aqn_checks import aqn_problems
from aqnpipe.noise.receipts.fault_checks import fault_problems
from aqnpipe.noise.receipts.operator_checks import operator_problems
from aqnpipe.noise.receipts.receipt_content import ReceiptContent


class Receipt(ReceiptContent):
    """Requested and measured noise of one training run or one evaluation pass."""

    def check(self) -> Self:
        """Return self, or raise ReceiptError with every mismatch between requested and measured noise."""
        problems = self.problems()
        if problems:
            raise ReceiptError("receipt refused: " + "; ".join(problems), tuple(problems))
        return self

    def problems(self, steps_done: int | None = None) -> list[str]:
        """Return one line per mismatch between requested and measured noise.

        `steps_done`: the receipt is of a run that has made so many optimiser steps, so nothing is missing yet that only
        later steps bring; None: the run has ended.
        """
        return [
            *self.mismatches,
            *operator_problems(self, has_ended=steps_done is None),
            *aqn_problems(self, self.num_steps if steps_done is None else steps_done),
            *fault_problems(self),
        ]
