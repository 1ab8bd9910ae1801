"""The evaluate stage: one checkpoint, every question at every noise level and noise seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch

from aqnpipe.artifacts import EvaluationTable, ProblemTable, RunRecord, read_table, write_json, write_table
from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.config.noise import Fault, OperatorNoise, RelativeGaussian
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.prompts import prompt_token_ids
from aqnpipe.device import resolve_device, torch_device
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.models.loading import load_model, load_tokenizer, sha256_of
from aqnpipe.noise.evaluation_receipt import EvaluationPass, EvaluationReceipts
from aqnpipe.noise.injection import NoiseKey, phase_noise
from aqnpipe.noise.layout import decoder_layers, rms_norms
from aqnpipe.noise.receipt import Receipt
from aqnpipe.noise.recorder import ReceiptRecorder
from aqnpipe.provenance import code_digest, sha256_of_file, versions
from aqnpipe.scoring import extract_answer, normalise_number


@dataclass(frozen=True)
class EvaluationOutputs:
    """Files that one evaluation writes."""

    table: Path
    receipt: Path
    record: Path


def evaluate(
    spec: EvaluationSpec,
    model_dir: Path,
    test_problems: Path,
    outputs: EvaluationOutputs,
    say: Callable[[str], None] = print,
) -> None:
    """Evaluate the checkpoint in `model_dir` greedily and write table, receipts and record.

    The model is loaded once. Raises ReceiptError, before anything is written, when the noise measured in a pass is not
    the noise of its level.
    """
    config = spec.evaluation
    torch.set_num_threads(config.threads)
    problems = read_table(test_problems, ProblemTable)
    if config.num_questions is not None:
        problems = problems.head(config.num_questions)
    device = resolve_device(spec.device)
    model = load_model(model_dir, dtype=spec.dtype, attention=spec.attention, device=torch_device(device.kind))
    tokenizer = load_tokenizer(model_dir)
    prompts = prompt_token_ids(problems["question"], spec.prompt, tokenizer)
    tables, passes = [], []
    for level, noise_seed in config.passes():
        completions, receipt = run_pass(model, tokenizer, prompts, config, level, noise_seed, spec.faults)
        passes.append(EvaluationPass(noise_level=level, noise_seed=noise_seed, receipt=receipt.check()))
        tables.append(score(problems, completions, tokenizer, level, noise_seed))
        correct = int(tables[-1][f"correct_{config.primary_scorer}"].sum())
        label = f"{spec.model_role}/{spec.arm_id} seed {spec.seed} step {spec.step}"
        say(f"{label}: noise {level:.0%} seed {noise_seed}: {correct}/{len(problems)} correct")
    write_json(outputs.receipt, EvaluationReceipts(passes=tuple(passes)))
    write_json(outputs.record, _record(spec, model_dir, test_problems, device.label))
    write_table(outputs.table, pl.concat(tables), EvaluationTable)


def run_pass(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    config: EvaluationConfig,
    noise_level: float,
    noise_seed: int,
    faults: Sequence[Fault] = (),
) -> tuple[list[Completion], Receipt]:
    """Generate a response to every prompt under one noise level and seed; return them in order, with the receipt.

    Prompts are batched by length (fewer padding tokens); the noise of a batch is keyed by its number, so it is the
    same for every model that answers the same questions. `faults` strike throughout; a threshold that they take from
    each call depends on the prompts of the batch.
    """
    noise = (
        OperatorNoise(
            operators=config.operators,
            error=RelativeGaussian(scale=noise_level),
            phases=("evaluation",),
            include_lm_head=config.include_lm_head,
        )
        if noise_level > 0
        else None
    )
    recorder = ReceiptRecorder(
        operator_noise=noise,
        aqn=None,
        faults=faults,
        expected_phases=("evaluation",),
        num_layers=len(decoder_layers(model)),
        num_norms=len(rms_norms(model)),
    )
    backend = TransformersBackend(model, tokenizer)
    sampling = Sampling(max_response_tokens=config.max_response_tokens)
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    completions: dict[int, Completion] = {}
    for number, start in enumerate(range(0, len(order), config.batch_size)):
        batch = order[start : start + config.batch_size]
        with phase_noise(model, recorder, "evaluation", NoiseKey(seed=noise_seed, step=number)):
            answers = backend.generate([prompts[index] for index in batch], sampling)
        completions.update(zip(batch, answers, strict=True))
    return [completions[index] for index in range(len(prompts))], recorder.receipt()


def score(
    problems: pl.DataFrame, completions: list[Completion], tokenizer: Any, noise_level: float, noise_seed: int
) -> pl.DataFrame:
    """Return the rows of one pass as `artifacts.EvaluationTable` wants them."""
    texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    strict = [extract_answer(text, "strict") for text in texts]
    last_number = [extract_answer(text, "last_number") for text in texts]
    gold = [normalise_number(answer) for answer in problems["gold_answer"]]
    return pl.DataFrame(
        {
            "question_id": problems["question_id"],
            "noise_level": [noise_level] * len(texts),
            "noise_seed": [noise_seed] * len(texts),
            "response": texts,
            "answer_strict": strict,
            "answer_last_number": last_number,
            "correct_strict": [found is not None and found == right for found, right in zip(strict, gold, strict=True)],
            "correct_last_number": [
                found is not None and found == right for found, right in zip(last_number, gold, strict=True)
            ],
            "response_tokens": [len(c.token_ids) for c in completions],
            "finish_reason": [c.finish_reason for c in completions],
        },
        schema_overrides={"answer_strict": pl.String, "answer_last_number": pl.String},
    )


def _record(spec: EvaluationSpec, model_dir: Path, test_problems: Path, device: str) -> RunRecord:
    return RunRecord(
        stage="evaluate",
        identity={"model": spec.model_role, "arm": spec.arm_id, "seed": spec.seed, "step": spec.step},
        config=spec.model_dump(mode="json"),
        code_digest=code_digest("aqnpipe.evaluation.stage"),
        inputs_sha256={
            "test_problems": sha256_of_file(test_problems),
            "weights": sha256_of(sorted(model_dir.glob("*.safetensors"))),
        },
        versions=versions(),
        device=device,
    )
