"""The receipts of one evaluated checkpoint: one per pass (noise level and noise seed) over the questions."""

from pydantic import Field

from aqnpipe.artifacts.evaluation_facts import EvaluationFacts
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.receipt_content import ReceiptModel


class EvaluationPass(ReceiptModel):
    """The receipt of one pass over all questions."""

    noise_level: float = Field(ge=0, lt=1)
    noise_seed: int = Field(ge=0)
    receipt: Receipt

    def problems(self) -> list[str]:
        """Return the mismatches between the pass's noise level, the requested noise, and the measured noise."""
        where = f"pass at level {self.noise_level:g}, noise seed {self.noise_seed}"
        requested = self.receipt.requested_scale("evaluation")
        mismatch = [f"{where}: the receipt requested scale {requested:g}"] if requested != self.noise_level else []
        return mismatch + [f"{where}: {problem}" for problem in self.receipt.problems()]


class EvaluationReceipts(ReceiptModel):
    """results/eval/.../step<N>.receipt.json: every pass of the table beside it, and the facts of the evaluation."""

    passes: tuple[EvaluationPass, ...] = Field(min_length=1)
    facts: EvaluationFacts

    def problems(self) -> list[str]:
        """Return the problems of all passes, and the passes that occur twice."""
        keys = [(evaluated.noise_level, evaluated.noise_seed) for evaluated in self.passes]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        twice = [f"pass at level {level:g}, noise seed {seed}: recorded twice" for level, seed in repeated]
        of_passes = [problem for evaluated in self.passes for problem in evaluated.problems()]
        in_facts = {(facts.noise_level, facts.noise_seed) for facts in self.facts.passes}
        unknown = [
            f"pass at level {level:g}, noise seed {seed}: has no facts"
            for level, seed in keys
            if (level, seed) not in in_facts
        ]
        return twice + of_passes + unknown + self.facts.problems()
