"""Made-up answers, receipts and records, as the stages would have written them; the synthetic studies share them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from aqnpipe.artifacts.evaluations import EvaluationFacts, EvaluationFiles, EvaluationTable, PassFacts, row_digests
from aqnpipe.artifacts.files import read_json, write_json, write_table
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.comparison.evaluations import EvaluationInput
from aqnpipe.config.noise import AdaptiveNoise, OperatorNoise, RelativeGaussian
from aqnpipe.config.study import Study
from aqnpipe.data.scoring import SCORERS
from aqnpipe.noise.receipts.receipt import EvaluationPass, EvaluationReceipts, Receipt
from aqnpipe.noise.receipts.table import SYNC, Row
from aqnpipe.noise.schedule import sigma_at
from aqnpipe.seeding import derive_seed

NUM_LAYERS = 6
LEVEL_COST = {0.0: 0.0, 0.05: 0.25, 0.1: 0.8}


def write_evaluation(
    source: EvaluationInput, made_up: Study, logit: float, num_questions: int, settings: Mapping[str, object]
) -> None:
    """Write the files of one evaluation whose correctness follows a logistic model of question, arm, seed and level.

    `logit` is the arm's; `settings` are added to the config of the record.
    """
    passes = made_up.config.evaluation.passes()
    run = (source.arm, source.seed)
    rows = [evaluation_pass(*run, level, noise_seed, num_questions, logit) for level, noise_seed in passes]
    write_table(source.table, pl.concat(rows), EvaluationTable)
    receipts = (
        EvaluationPass(noise_level=level, noise_seed=seed, receipt=evaluation_receipt(level)) for level, seed in passes
    )
    write_json(source.receipt, EvaluationReceipts(passes=tuple(receipts), facts=facts_of(pl.concat(rows))))
    write_json(source.record, record("evaluate", source.arm, source.seed, source.step, settings))


def evaluation_pass(
    arm: str, seed: int, level: float, noise_seed: int, num_questions: int, logit: float
) -> pl.DataFrame:
    """Rows of one pass; questions are equally hard for every arm."""
    difficulty = np.random.default_rng(7).normal(0, 2, num_questions)
    seed_variance = np.random.default_rng(derive_seed(seed, f"luck {arm}")).normal(0, 0.05)
    draws = np.random.default_rng(derive_seed(seed, f"draws {arm} {level}", noise_seed))
    chances = logit + seed_variance + difficulty - LEVEL_COST[level]
    correct = draws.random(num_questions) < 1 / (1 + np.exp(-chances))
    answers = [str(number) if right else None for number, right in enumerate(correct)]
    return pl.DataFrame(
        {
            "question_id": [f"q{number:05d}" for number in range(num_questions)],
            "noise_level": level,
            "noise_seed": noise_seed,
            "sample": 0,
            "response": [f"{arm} {seed} {level} {noise_seed} #### {answer}" for answer in answers],
            **{f"answer_{scorer}": answers for scorer in SCORERS},
            **{f"correct_{scorer}": correct for scorer in SCORERS},
            "response_tokens": draws.integers(9, 31, num_questions),
            "finish_reason": np.where(draws.random(num_questions) < 0.02, "length", "stop"),
        },
        schema_overrides={
            "noise_seed": pl.Int64,
            "sample": pl.Int64,
            **{f"answer_{scorer}": pl.String for scorer in SCORERS},
            "finish_reason": pl.String,
        },
    )


def facts_of(rows: pl.DataFrame) -> EvaluationFacts:
    """Facts that agree with these rows."""
    keys = rows.select("noise_level", "noise_seed").unique(maintain_order=True)
    return EvaluationFacts(
        end_token=1,
        stop_text=None,
        prompts="".join(f"{derive_seed(0, name):016x}" for name in sorted(rows["question_id"].unique())),
        passes=tuple(
            PassFacts(
                noise_level=level,
                noise_seed=seed,
                first_logits=(f"{level}{seed}",),
                rows="".join(row_digests(rows.filter(noise_level=level, noise_seed=seed))),
                rows_again=0 if level else 3,
                largest_difference=0.0,
            )
            for level, seed in keys.iter_rows()
        ),
    )


def rewrite_table(source: EvaluationFiles, table: pl.DataFrame) -> None:
    """Write another table, and the facts that agree with it."""
    write_table(source.table, table, EvaluationTable)
    receipts = read_json(source.receipt, EvaluationReceipts)
    write_json(source.receipt, receipts.model_copy(update={"facts": facts_of(table)}))


def evaluation_receipt(level: float) -> Receipt:
    """A receipt of a pass at `level` that passes its check."""
    noise = OperatorNoise(error=RelativeGaussian(scale=level), phases=("evaluation",)) if level else None
    return receipt(noise, None, ("evaluation",))


def receipt(
    noise: OperatorNoise | None, weight_noise: AdaptiveNoise | None, phases: tuple[Any, ...], num_steps: int = 0
) -> Receipt:
    """A receipt that passes its check, with measurements off by their sampling error."""
    draws = np.random.default_rng(11)
    scale = {phase: noise.error.scale if noise and phase in noise.phases else 0.0 for phase in phases}
    return Receipt(
        operator_noise=noise,
        aqn=weight_noise,
        expected_phases=phases,
        rows=(
            *(
                Row(
                    phase,
                    passes=10,
                    compared=0 if phase == "backward" else 51200,
                    audited_passes={"several tokens": 14} if requested else {},
                    recomputed=8960 if requested else 0,
                    largest_deviation=0.21 if requested else 0.0,
                )
                for phase, requested in scale.items()
            ),
            *(
                Row(
                    phase,
                    None,
                    layer,
                    operator,
                    error=noise.error,
                    measured_elements=64_000,
                    squares=64_000 * (requested * (1 + draws.normal() / math.sqrt(2 * 64_000))) ** 2,
                    calls=70,
                    elements=900_000,
                )
                for phase, requested in scale.items()
                if requested
                for layer in [*range(NUM_LAYERS), None]
                for operator in (("mm", "bmm") if layer is not None else ("mm",))
            ),
            *(_sync(weight_noise, step, num_steps, draws) for step in range(num_steps if weight_noise else 0)),
        ),
        num_layers=NUM_LAYERS,
        num_norms=2 * NUM_LAYERS + 1,
        num_steps=num_steps,
        num_epochs=2,
    )


def _sync(weight_noise: AdaptiveNoise, step: int, num_steps: int, draws: np.random.Generator) -> Row:
    sigma, elements = sigma_at(weight_noise.schedule, step, num_steps, 2), 13 * 128
    drawn = elements * sigma**2
    squares = {"squares": drawn * (1 + draws.normal() * math.sqrt(2 / elements)), "drawn_squares": drawn}
    counts = {"calls": 1, "targets": 13, "elements": elements, "recomputed": 13 * 64}
    return Row("rollout", step, operator=SYNC, sigma=sigma, digests={"c1" * 32}, **counts, **squares)


def record(stage: str, arm: str, seed: int, step: int, config: Mapping[str, object]) -> RunRecord:
    """A record as the stages write it."""
    return RunRecord(
        stage=stage,
        identity={"model": "base", "arm": arm, "seed": seed, "step": step},
        config={"model_role": "base", "arm_id": arm, "seed": seed, "step": step, "dtype": "float32", **config},
        code_digest="0123456789abcdef",
        inputs_sha256={"test_problems": "ab" * 32, "weights": f"{derive_seed(seed, arm):064x}"},
        versions={"aqnpipe": "0.1.0", "torch": "2.13.0", "transformers": "5.19.0"},
        device="cpu",
    )
