"""Receipts: the requested noise, the measured noise, and a check that refuses every mismatch between the two.

The checks are in five modules: `passes`, `operator_checks` (operators and modules), `cache_checks`, `fault_checks` and
`aqn_checks`.
"""

from typing import Self

from aqnpipe.config.noise import requested_size
from aqnpipe.errors import ReceiptError
from aqnpipe.noise.receipts.aqn_checks import aqn_problems
from aqnpipe.noise.receipts.cache_checks import cache_problems
from aqnpipe.noise.receipts.fault_checks import fault_problems
from aqnpipe.noise.receipts.operator_checks import operator_problems
from aqnpipe.noise.receipts.passes import pass_problems
from aqnpipe.noise.receipts.receipt_content import ReceiptContent
from aqnpipe.noise.receipts.table import Row, Shown


class Receipt(Shown, ReceiptContent):
    """Requested and measured noise of one training run or one evaluation pass."""

    @property
    def table_rows(self) -> tuple[Row, ...]:
        """The rows of `table()`: all."""
        return self.rows

    def check(self, steps_done: int | None = None) -> Self:
        """Return self, or raise ReceiptError with every mismatch between requested and measured noise."""
        problems = self.problems(steps_done)
        if problems:
            when = "" if steps_done is None else f" after step {steps_done}"
            raise ReceiptError(f"receipt invalid{when}: " + "; ".join(problems), tuple(problems))
        return self

    def problems(self, steps_done: int | None = None, *, is_share: bool = False) -> list[str]:
        """Return one line per mismatch between requested and measured noise.

        `steps_done`: number of optimiser steps so far, by which the noise of the first ones must be measured; None: the
        run has ended, and so must be all that was requested. `is_share`: the receipt is of one worker of several.
        """
        steps = self.num_steps if steps_done is None else steps_done
        return [
            *self.mismatches,
            *pass_problems(self, steps),
            *operator_problems(self, has_ended=steps_done is None, is_share=is_share),
            *aqn_problems(self, steps),
            *cache_problems(self, has_ended=steps_done is None),
            *fault_problems(self),
        ]

    def __str__(self) -> str:
        """Return the request, a line per phase, and the verdict."""
        noises = [noise for noise in (self.operator_noise, self.module_noise) if noise is not None]
        lines = [
            f"requested     {noise.error.kind} {requested_size(noise.error):g} in {', '.join(noise.phases)}"
            for noise in noises
        ]
        cache = self.kv_cache
        lines += [f"requested     {cache.format} cache in {', '.join(cache.phases)}"] if cache else []
        lines += [f"requested     AQN on {self.aqn.targets}"] if self.aqn else []
        lines += [f"requested     fault {fault.type} in layer {fault.layer}" for fault in self.faults]
        for row in self.phases:
            size, elements = self.measured_scale(row.phase)
            noised = (
                f"{row.calls:,} calls with an error of size {size:.4g}" if elements else "no operator with an error"
            )
            audited = f"{row.recomputed:,} values recomputed, {row.wrong:,} wrong"
            lines.append(f"{row.phase:<14}{row.passes:,} runs, {noised}; {audited}")
        return "\n".join([*lines, *([f"INVALID       {problem}" for problem in self.problems()] or ["accepted"])])
