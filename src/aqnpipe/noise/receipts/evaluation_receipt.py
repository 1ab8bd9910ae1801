"""The receipts of one evaluated checkpoint: one per pass (noise level and noise seed) over the questions."""

from pydantic import Field

from aqnpipe.noise.receipts.receipt import Receipt, ReceiptModel


class EvaluationPass(ReceiptModel):
    """The measured account of one pass over all questions."""

    noise_level: float = Field(ge=0, lt=1)
    noise_seed: int = Field(ge=0)
    receipt: Receipt

    def problems(self, tolerance: float = 0.0) -> list[str]:
        """Return every gap between the level this pass stands for, what was requested, and what was measured."""
        where = f"pass at level {self.noise_level:g}, noise seed {self.noise_seed}"
        requested = self.receipt.requested_scale("evaluation")
        mismatch = [f"{where}: the receipt requested scale {requested:g}"] if requested != self.noise_level else []
        return mismatch + [f"{where}: {problem}" for problem in self.receipt.problems(tolerance)]


class EvaluationReceipts(ReceiptModel):
    """results/eval/.../step<N>.receipt.json: every pass that stands in the table beside it."""

    passes: tuple[EvaluationPass, ...] = Field(min_length=1)

    def problems(self, tolerance: float = 0.0) -> list[str]:
        """Return the problems of all passes, and passes that occur twice."""
        keys = [(one.noise_level, one.noise_seed) for one in self.passes]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        twice = [f"pass at level {level:g}, noise seed {seed}: recorded twice" for level, seed in repeated]
        return twice + [problem for one in self.passes for problem in one.problems(tolerance)]
