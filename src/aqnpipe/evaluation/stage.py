"""The evaluate stage: one checkpoint, every question at every noise level, noise seed and sample.

On a task of lm-evaluation-harness, the harness asks and grades, and every pass has a receipt. Each pass runs the whole
task under its noise. What the harness got is stored per question, and graded a second time from what is stored; a grade
that differs from the harness's ends the evaluation.
"""

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl
import torch

from aqnpipe.artifacts.evaluations import EvaluationFacts, EvaluationTable, PassFacts, row_digests
from aqnpipe.artifacts.files import read_json, read_table, write_json, write_table
from aqnpipe.artifacts.measured_errors import spec_with_figures
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import (
    code_digest,
    sha256_of_file,
    sha256_of_files,
    sha256_of_json,
    short_digest,
    versions,
)
from aqnpipe.artifacts.runs import RunRecord, StageFiles
from aqnpipe.config.evaluation import scorer_column
from aqnpipe.config.model import read_model_config, settings_of_values
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.graders import Grader, columns_of, graders_of, pairs
from aqnpipe.data.harness_task import HarnessTask, question_id, task_manager
from aqnpipe.data.prompts import (
    check_context,
    choose_examples,
    end_of_response,
    prompt_token_ids,
    refuse_overlap,
    refuse_unusable_template,
)
from aqnpipe.device import refuse_other_numbers, resolve_device, torch_device
from aqnpipe.errors import DataError, ReceiptError
from aqnpipe.evaluation.audit import Judge, differing_weight, digests_in_memory
from aqnpipe.evaluation.shards import OpenShardRunner, assembled_passes, local_shard_runner, noise_of, shards_of
from aqnpipe.generation.backend import Completion
from aqnpipe.models.loading import file_digests, load_model, load_tokenizer, refuse_removed
from aqnpipe.noise.receipts.receipt import EvaluationPass, EvaluationReceipts

_UNOBSERVED = ("prompts as the model reads them", "choice of tokens", "responses computed again")
"""Steps that the harness does by itself, and that the audit of an evaluation does not observe."""


MAKES_OWN_BATCHES = ("vllm",)
"""Backends that split and join the batches that they are given."""


def evaluate(
    spec: EvaluationSpec,
    model_dir: Path,
    test_problems: Path,
    outputs: StageFiles,
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
    spec = spec_with_figures(spec, config=read_model_config(model_dir))
    config = spec.evaluation
    torch.set_num_threads(config.threads)
    problems = read_table(test_problems, ProblemTable)
    if config.num_questions is not None:
        problems = problems.head(config.num_questions)
    device = resolve_device(spec.device)
    if spec.task is not None:
        table, receipts = _evaluate_task(spec, model_dir, problems, say)
        backend: dict[str, str | int | bool] = {"backend": "lm_eval", "version": version("lm_eval")}
        _write(
            spec, outputs, table, receipts, _digests_of_inputs(model_dir, test_problems, None), (device.label, backend)
        )
        return
    tokenizer = load_tokenizer(model_dir)
    examples = choose_examples(spec.prompt, train_problems)
    refuse_overlap(examples, problems["question"])
    prompts = prompt_token_ids(problems["question"], spec.prompt, tokenizer, examples)
    check_context(prompts, config.max_response_tokens, read_model_config(model_dir), tokenizer.pad_token_id)
    shards = shards_of(spec, prompts)
    tables, passes, graders = [], [], graders_of(config.primary_scorer, config.scorer_sha256)
    max_tokens = max(map(len, prompts)) + config.max_response_tokens
    with open_runner(spec, model_dir, max_tokens) as runner:
        described = runner.description
        judge = Judge(spec, model_dir, test_problems, train_problems, described)
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
    _write(spec, outputs, pl.concat(tables), receipts, digests, (device.label, runner.description))


def _write(
    spec: EvaluationSpec,
    outputs: StageFiles,
    table: pl.DataFrame,
    receipts: EvaluationReceipts,
    digests: dict[str, str],
    machine: tuple[str, dict[str, str | int | bool]],
) -> None:
    """Write table, receipts and record; `machine`: device and backend of the record."""
    write_json(outputs.receipt, receipts)
    write_table(outputs.table, table, EvaluationTable)
    record = RunRecord(
        stage="evaluate",
        identity={"model": spec.model_role, "arm": spec.arm_id, "seed": spec.seed, "step": spec.step},
        config=spec.model_dump(mode="json"),
        code_digest=code_digest("aqnpipe.evaluation.stage"),
        inputs_sha256=digests,
        outputs_sha256=_digests_of_outputs(outputs),
        versions=versions(),
        device=machine[0],
        generation=machine[1],
    )
    write_json(outputs.record, record)


def is_evaluated(
    spec: EvaluationSpec,
    model_dir: Path,
    outputs: StageFiles,
    test_problems: Path,
    train_problems: Path | None = None,
) -> bool:
    """Return whether `outputs` are those of this evaluation, unchanged: same settings, model, questions and code."""
    if not outputs.exist:
        return False
    record = read_json(outputs.record, RunRecord)
    spec = spec_with_figures(spec)
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


def _digests_of_outputs(outputs: StageFiles) -> dict[str, str]:
    return sha256_of_files({"table": outputs.table, "receipt": outputs.receipt})


def _digests_of_inputs(model_dir: Path, test_problems: Path, train_problems: Path | None) -> dict[str, str]:
    settings = sha256_of_json(settings_of_values(read_model_config(model_dir)))
    digests = {"test_problems": sha256_of_file(test_problems), "settings": settings}
    if train_problems is not None:
        digests["train_problems"] = sha256_of_file(train_problems)
    return digests | {name.removesuffix("_sha256"): digest for name, digest in file_digests(model_dir).items()}


def _evaluate_task(
    spec: EvaluationSpec, model_dir: Path, problems: pl.DataFrame, say: Callable[[str], None]
) -> tuple[pl.DataFrame, EvaluationReceipts]:
    """Return the rows of all passes over the task of `spec`, and their receipts.

    problems: the study's questions. Raises DataError if the task has others, ReceiptError if the noise measured in a
    pass differs from its level, the weights in memory are not those of the checkpoint, or a response graded again has
    another grade.
    """
    if spec.task is None:
        raise RuntimeError("the evaluation of a task has no task; this is a bug")
    task = HarnessTask.load(spec.task)
    if not task.problems().head(len(problems)).equals(problems):
        raise DataError(
            f"task {spec.task.task}: its questions or answers changed after the study prepared them; remove "
            "data/test.parquet from the results"
        )
    golds = dict(problems.select("question_id", "gold_answer").iter_rows())
    run = _TaskRun(spec, task, model_dir)
    tables, passes, facts = [], [], []
    for level, noise_seed in spec.evaluation.passes():
        rows, prompts = run.rows(level, noise_seed, golds)
        passes.append(EvaluationPass(noise_level=level, noise_seed=noise_seed, receipt=run.model.receipt.check()))
        facts.append(run.facts(level, noise_seed, rows))
        tables.append(rows)
        right = int(rows["correct_task"].sum())
        name = spec.evaluation.noise_names().get(level, f"{level:.0%}")
        say(f"{spec.model_role}/{spec.arm_id}: noise {name} seed {noise_seed}: {right}/{len(rows)} correct")
    receipts = EvaluationReceipts(passes=tuple(passes), facts=run.all_facts(prompts, tuple(facts)))
    for problem in receipts.facts.problems():
        raise ReceiptError(f"evaluation invalid: {problem}")
    return pl.concat(tables), receipts


class _TaskRun:
    """A checkpoint in memory as the harness's model."""

    def __init__(self, spec: EvaluationSpec, task: HarnessTask, model_dir: Path) -> None:
        from aqnpipe.integrations.lm_harness import NoisyHFLM

        self._spec, self._task = spec, task
        self._graders = graders_of("task")
        device = torch_device(resolve_device(spec.device).kind)
        model = load_model(model_dir, dtype=spec.dtype, attention=spec.attention, device=device)
        self._tokenizer = load_tokenizer(model_dir)
        refuse_unusable_template(spec.prompt, self._tokenizer)
        self.model = NoisyHFLM(
            pretrained=model, tokenizer=self._tokenizer, backend="causal", batch_size=spec.evaluation.batch_size
        )
        self._weights = digests_in_memory(model)
        name = differing_weight(self._weights, model_dir)
        if name is not None:
            raise ReceiptError(f"evaluation invalid: {name} in memory is not the weight of the checkpoint {model_dir}")

    def rows(self, level: float, noise_seed: int, golds: dict[str, str]) -> tuple[pl.DataFrame, str]:
        """Return the rows of one pass, as `EvaluationTable` has them, and the digests of its prompts."""
        self.model.begin_pass(noise_of(self._spec, level, noise_seed))
        samples = self._samples()
        if [question_id(sample["doc_id"]) for sample in samples] != list(golds):
            raise DataError(
                f"task {self._task.settings.task}: asked {len(samples)} questions, the study has {len(golds)}: was the "
                "task changed after its questions were prepared?"
            )
        content = [self._row(sample, golds, level, noise_seed) for sample in samples]
        types = {f"answer_{name}": pl.String for name in (*self._graders, "task")} | {"batch": pl.Int64}
        prompts = "".join(str(sample["prompt_hash"])[:16] for sample in samples)
        return pl.DataFrame(content, schema_overrides=types, infer_schema_length=None), prompts

    def facts(self, level: float, noise_seed: int, rows: pl.DataFrame) -> PassFacts:
        """Return the facts of a pass."""
        if digests_in_memory(self.model.model) != self._weights:
            raise ReceiptError("evaluation invalid: the weights in memory changed during an evaluation")
        return PassFacts(
            noise_level=level,
            noise_seed=noise_seed,
            first_logits=self._log_likelihoods(rows),
            rows="".join(row_digests(rows)),
            rows_again=0,
            largest_difference=0.0,
        )

    def all_facts(self, prompts: str, passes: tuple[PassFacts, ...]) -> EvaluationFacts:
        """Return the facts of the evaluation."""
        return EvaluationFacts(
            end_token=int(self._tokenizer.eos_token_id),
            stop_text=None,
            prompts=prompts,
            passes=passes,
            unchecked=_UNOBSERVED,
        )

    def _samples(self) -> list[dict[str, Any]]:
        """Run the task under the noise of this pass; return what the harness logged of every question, in order."""
        from lm_eval import simple_evaluate

        settings, evaluation = self._task.settings, self._spec.evaluation
        counts = [each for each in (evaluation.num_questions, settings.num_test) if each is not None]
        results = simple_evaluate(
            model=self.model,
            tasks=[settings.task],
            task_manager=task_manager(settings),
            num_fewshot=settings.num_fewshot,
            limit=min(counts) if counts else None,
            batch_size=evaluation.batch_size,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=self._spec.prompt.style == "chat",
            gen_kwargs={"max_gen_toks": evaluation.max_response_tokens},
        )
        ours = [each for each in results["samples"][settings.task] if each["filter"] == self._task.filter_name]
        return sorted(ours, key=lambda sample: int(sample["doc_id"]))

    def _row(self, sample: dict[str, Any], golds: dict[str, str], level: float, noise_seed: int) -> dict[str, Any]:
        number = int(sample["doc_id"])
        response = self._task.response_of(number, [responses[0] for responses in sample["resps"]])
        graded = self._task.grade(number, response)
        if float(graded.correct) != float(sample[self._task.metric_name]):
            raise ReceiptError(
                f"evaluation invalid: question {question_id(number)}: the harness gives {self._task.metric_name} "
                f"{sample[self._task.metric_name]}, graded again it is {float(graded.correct)}"
            )
        gold = golds[question_id(number)]
        tokens = 0 if self._task.is_choice else len(self._tokenizer(response, add_special_tokens=False)["input_ids"])
        by_number = {name: grade(response, gold) for name, grade in self._graders.items()}
        return {
            "question_id": question_id(number),
            "batch": None,
            "noise_level": level,
            "noise_seed": noise_seed,
            "sample": 0,
            "response": response,
            **pairs({**by_number, "task": graded}),
            "response_tokens": tokens,
            "finish_reason": "length" if tokens >= self._spec.evaluation.max_response_tokens else "stop",
        }

    def _log_likelihoods(self, rows: pl.DataFrame) -> tuple[str, ...]:
        """Return a digest of the log-likelihoods of every question, which another noise would change; none of texts."""
        if not self._task.is_choice:
            return ()
        return tuple(
            short_digest([value for _, value, _ in json.loads(response)], 8) for response in rows["response"].to_list()
        )
