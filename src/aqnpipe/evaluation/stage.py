"""The evaluate stage: one checkpoint, every question at every noise level, noise seed and sample."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch

from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table, write_json, write_table
from aqnpipe.artifacts.measured_errors import evaluation_with_figures
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import code_digest, sha256_of_file, sha256_of_files, versions
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.config.evaluation import scorer_column
from aqnpipe.config.model import read_model_config
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.examples import choose_examples, refuse_overlap
from aqnpipe.data.graders import Grader, columns_of, graders_of, pairs
from aqnpipe.data.prompts import check_context, end_of_response, prompt_token_ids
from aqnpipe.device import refuse_other_numbers, resolve_device
from aqnpipe.evaluation.audit.expectation import Expectation
from aqnpipe.evaluation.audit.judgement import Judge
from aqnpipe.evaluation.shards import OpenShardRunner, assembled_passes, local_shard_runner, shards_of
from aqnpipe.generation.backend import Completion
from aqnpipe.models.loading import load_tokenizer, refuse_removed, weights_sha256
from aqnpipe.noise.receipts.evaluation_receipt import EvaluationPass, EvaluationReceipts

MAKES_OWN_BATCHES = ("vllm",)
"""Backends that split and join the batches that they are given."""


@dataclass(frozen=True)
class EvaluationOutputs:
    """The files that one evaluation writes."""

    table: Path
    receipt: Path
    record: Path


def evaluate(
    spec: EvaluationSpec,
    model_dir: Path,
    test_problems: Path,
    outputs: EvaluationOutputs,
    say: Callable[[str], None] = print,
    train_problems: Path | None = None,
    open_runner: OpenShardRunner = local_shard_runner,
) -> None:
    """Evaluate the checkpoint in `model_dir` and write table, receipts and record.

    `train_problems` contains the examples of a few-shot prompt. `open_runner` starts the workers, each of which loads
    the model once; the choice of runner does not affect the results. Raises DataError if there are too few examples, if
    an example is a test question, or if prompt and response exceed the model's context; ReceiptError, before it writes
    anything, if the noise measured in a pass differs from its level, or if prompts, tokens, weights, keys or rows are
    not those of the study (`evaluation.audit`); WorkerError if a worker did not start or all died.
    """
    refuse_other_numbers()
    refuse_removed(model_dir)
    spec = evaluation_with_figures(spec, config=read_model_config(model_dir))
    config = spec.evaluation
    torch.set_num_threads(config.threads)
    problems = read_table(test_problems, ProblemTable)
    if config.num_questions is not None:
        problems = problems.head(config.num_questions)
    device = resolve_device(spec.device)
    tokenizer = load_tokenizer(model_dir)
    examples = choose_examples(spec.prompt, train_problems)
    refuse_overlap(examples, problems["question"])
    prompts = prompt_token_ids(problems["question"], spec.prompt, tokenizer, examples)
    check_context(prompts, config.max_response_tokens, read_model_config(model_dir).get("max_position_embeddings"))
    shards = shards_of(spec, prompts)
    expected = Expectation.of(spec, model_dir, test_problems, train_problems)
    tables, passes, graders = [], [], graders_of(config.primary_scorer, config.scorer_sha256)
    max_tokens = max(map(len, prompts)) + config.max_response_tokens
    with open_runner(spec, model_dir, max_tokens) as runner:
        described = runner.description
        judge = Judge(expected, model_dir, str(described["backend"]), int(described.get("workers", 1)))
        for result in assembled_passes(spec, shards, runner.run(shards)):
            level, noise_seed = result.noise_level, result.noise_seed
            passes.append(EvaluationPass(noise_level=level, noise_seed=noise_seed, receipt=result.receipt.check()))
            rows = score(problems, result.samples, tokenizer, level, noise_seed, spec.prompt.stop_text, graders)
            number_of = {} if described["backend"] in MAKES_OWN_BATCHES else result.batch_of_question
            numbers = [number_of.get(index) for index in range(len(problems))] * len(result.samples)
            tables.append(rows.with_columns(pl.Series("batch", numbers, pl.Int64)))
            judge.judge(result, tables[-1])
            label = f"{spec.model_role}/{spec.arm_id} seed {spec.seed} step {spec.step}"
            name = config.noise_names().get(level, f"{level:.0%}")
            say(f"{label}: noise {name} seed {noise_seed}: {pass_summary(tables[-1], config.primary_scorer)}")
    receipts = EvaluationReceipts(passes=tuple(passes), facts=judge.facts())
    digests = _digests_of_inputs(model_dir, test_problems, train_problems)
    write_json(outputs.receipt, receipts)
    write_table(outputs.table, pl.concat(tables), EvaluationTable)
    record = _record(spec, digests, device.label, runner.description)
    write_json(outputs.record, record.model_copy(update={"outputs_sha256": _digests_of_outputs(outputs)}))


def is_evaluated(
    spec: EvaluationSpec,
    model_dir: Path,
    outputs: EvaluationOutputs,
    test_problems: Path,
    train_problems: Path | None = None,
) -> bool:
    """Return whether `outputs` are those of this evaluation, unchanged: same settings, weights, questions and code."""
    if not all(path.is_file() for path in (outputs.table, outputs.receipt, outputs.record)):
        return False
    record = read_json(outputs.record, RunRecord)
    spec = evaluation_with_figures(spec)
    return (
        record.config == spec.model_dump(mode="json")
        and record.code_digest == code_digest("aqnpipe.evaluation.stage")
        and record.inputs_sha256 == _digests_of_inputs(model_dir, test_problems, train_problems)
        and record.outputs_sha256 == _digests_of_outputs(outputs)
    )


def score(
    problems: pl.DataFrame,
    samples: list[list[Completion]],
    tokenizer: Any,
    noise_level: float,
    noise_seed: int,
    stop_text: str | None = None,
    graders: Mapping[str, Grader] | None = None,
) -> pl.DataFrame:
    """Return the rows of one pass, sample by sample, with the columns of `EvaluationTable`.

    A response ends at `stop_text`; its finish reason is then "stop", even if the tokens reached the limit. `graders`:
    by column name; those of `strict` if there are none.
    """
    completions = [completion for sample in samples for completion in sample]
    decoded = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    texts = [end_of_response(text, stop_text) for text in decoded]
    golds = problems["gold_answer"].to_list() * len(samples)
    graders = graders_of("strict") if graders is None else graders
    grades = [
        pairs({name: grade(text, gold) for name, grade in graders.items()})
        for text, gold in zip(texts, golds, strict=True)
    ]
    has_clusters = "cluster" in problems.columns
    clusters: dict[str, list[str]] = {"cluster": problems["cluster"].to_list() * len(samples)} if has_clusters else {}
    return pl.DataFrame(
        {
            "question_id": problems["question_id"].to_list() * len(samples),
            **clusters,
            "noise_level": [noise_level] * len(texts),
            "noise_seed": [noise_seed] * len(texts),
            "sample": [number for number in range(len(samples)) for _ in range(len(problems))],
            "response": texts,
            **{column: [graded[column] for graded in grades] for column in columns_of(graders)},
            "response_tokens": [len(c.token_ids) for c in completions],
            "finish_reason": [
                "stop" if len(text) < len(full_text) else completion.finish_reason
                for completion, text, full_text in zip(completions, texts, decoded, strict=True)
            ],
        },
        schema_overrides={f"answer_{scorer}": pl.String for scorer in graders},
    )


def pass_summary(rows: pl.DataFrame, primary: str) -> str:
    """Return a line about a pass: correct responses, truncated ones, and for each scorer those without an answer."""
    correct = int(rows[f"correct_{scorer_column(primary)}"].sum())
    truncated = int((rows["finish_reason"] == "length").sum())
    scorers = [name.removeprefix("answer_") for name in rows.columns if name.startswith("answer_")]
    missing = ", ".join(f"{scorer} {rows[f'answer_{scorer}'].null_count()}" for scorer in scorers)
    return f"{correct}/{len(rows)} correct, {truncated} cut off; without an answer: {missing}"


def _digests_of_outputs(outputs: EvaluationOutputs) -> dict[str, str]:
    return sha256_of_files({"table": outputs.table, "receipt": outputs.receipt})


def _digests_of_inputs(model_dir: Path, test_problems: Path, train_problems: Path | None) -> dict[str, str]:
    digests = {"test_problems": sha256_of_file(test_problems)}
    if train_problems is not None:
        digests["train_problems"] = sha256_of_file(train_problems)
    return digests | {"weights": weights_sha256(model_dir)}


def _record(
    spec: EvaluationSpec,
    inputs_sha256: dict[str, str],
    device: str,
    generation: dict[str, str | int | bool],
) -> RunRecord:
    return RunRecord(
        stage="evaluate",
        identity={"model": spec.model_role, "arm": spec.arm_id, "seed": spec.seed, "step": spec.step},
        config=spec.model_dump(mode="json"),
        code_digest=code_digest("aqnpipe.evaluation.stage"),
        inputs_sha256=inputs_sha256,
        versions=versions(),
        device=device,
        generation=generation,
    )
