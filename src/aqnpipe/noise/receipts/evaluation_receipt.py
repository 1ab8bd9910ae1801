"""The receipts of one evaluated checkpoint: one per pass (noise level and noise seed) over the questions."""

from pydantic import Field

from aqnpipe.artifacts.evaluation_facts import EvaluationFacts
from aqnpipe.config.noise import NoiseSpec
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.receipt_content import ReceiptModel


class EvaluationPass(ReceiptModel):
    """The receipt of one pass over all questions."""

    noise_level: float = Field(ge=0, description="a scale below 1, or the number of a named noise")
    noise_seed: int = Field(ge=0)
    receipt: Receipt

    def problems(self) -> list[str]:
        """Return the mismatches between the pass's noise level, the requested noise, and the measured noise."""
        where = _named(self.noise_level, self.noise_seed)
        return [f"{where}: {problem}" for problem in (*self._mismatches(), *self.receipt.problems())]

    def _mismatches(self) -> list[str]:
        requested = self.receipt.requested_scale("evaluation")
        if self.noise_level < 1:
            return [f"the receipt requested scale {requested:g}"] if requested != self.noise_level else []
        noises = (self.receipt.operator_noise, self.receipt.module_noise, self.receipt.kv_cache)
        has_noise = any(noise is not None and "evaluation" in noise.phases for noise in noises)
        return [] if has_noise else ["the receipt requested no noise"]

    def differences(self, wanted: NoiseSpec) -> list[str]:
        """Return where the noise that the receipt is about differs from `wanted`; faults are compared elsewhere."""
        if self.receipt.has_noise_of(wanted):
            return []
        return [f"{_named(self.noise_level, self.noise_seed)}: the receipt is of other noise"]


def _named(level: float, seed: int) -> str:
    return f"evaluation at level {level:g}, noise seed {seed}"


class EvaluationReceipts(ReceiptModel):
    """results/eval/.../step<N>.receipt.json: every pass of the table beside it, and the facts of the evaluation."""

    passes: tuple[EvaluationPass, ...] = Field(min_length=1)
    facts: EvaluationFacts

    def problems(self) -> list[str]:
        """Return the problems of all passes, and the passes that occur twice."""
        keys = [(evaluated.noise_level, evaluated.noise_seed) for evaluated in self.passes]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        twice = [f"{_named(*key)}: recorded twice" for key in repeated]
        of_passes = [problem for evaluated in self.passes for problem in evaluated.problems()]
        in_facts = {(facts.noise_level, facts.noise_seed) for facts in self.facts.passes}
        unknown = [f"{_named(*key)}: has no facts" for key in keys if key not in in_facts]
        return [*twice, *of_passes, *unknown, *self.facts.problems()]
