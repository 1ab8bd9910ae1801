"""An evaluation on a task of lm-evaluation-harness: the harness asks and grades, every pass has a receipt.

The checkpoint is loaded once. Each pass runs the whole task under its noise. What the harness got is stored per
question, and graded a second time from what is stored; a grade that differs from the harness's ends the evaluation.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from aqnpipe.artifacts.evaluation_facts import EvaluationFacts, PassFacts, row_digests
from aqnpipe.artifacts.provenance import short_digest
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.graders import graders_of, pairs
from aqnpipe.data.harness_task import HarnessTask, question_id, task_manager
from aqnpipe.data.prompts import refuse_unusable_template
from aqnpipe.device import resolve_device, torch_device
from aqnpipe.errors import DataError, ReceiptError
from aqnpipe.evaluation.audit.weights import combined, differing_weight, digests_in_memory
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.models.loading import load_model, load_tokenizer
from aqnpipe.noise.receipts.evaluation_receipt import EvaluationPass, EvaluationReceipts

UNOBSERVED = ("prompts as the model reads them", "choice of tokens", "responses computed again")
"""Steps that the harness does by itself, and that the audit of an evaluation does not observe."""


def evaluate_task(
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
        raise ReceiptError(f"evaluation refused: {problem}")
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
            raise ReceiptError(f"evaluation refused: {name} in memory is not the weight of the checkpoint {model_dir}")

    def rows(self, level: float, noise_seed: int, golds: dict[str, str]) -> tuple[pl.DataFrame, str]:
        """Return the rows of one pass, as `EvaluationTable` has them, and the digests of its prompts."""
        operators, modules = self._spec.evaluation.noise_at(level, self._spec.attention)
        self.model.begin_pass(
            PassNoise(operator_noise=operators, module_noise=modules, faults=self._spec.faults, noise_seed=noise_seed)
        )
        samples = self._samples()
        if [question_id(sample["doc_id"]) for sample in samples] != list(golds):
            raise DataError(
                f"task {self._task.settings.task}: asked {len(samples)} questions, the study has {len(golds)}: was the "
                "task changed after its questions were prepared?"
            )
        content = [self._row(sample, golds, level, noise_seed) for sample in samples]
        names = {f"answer_{name}": pl.String for name in (*self._graders, "task")}
        prompts = "".join(str(sample["prompt_hash"])[:16] for sample in samples)
        return pl.DataFrame(content, schema_overrides=names, infer_schema_length=None), prompts

    def facts(self, level: float, noise_seed: int, rows: pl.DataFrame) -> PassFacts:
        """Return the facts of a pass."""
        if digests_in_memory(self.model.model) != self._weights:
            raise ReceiptError("evaluation refused: the weights in memory changed during a pass")
        has_noise = self.model.noise.operator_noise or self.model.noise.module_noise
        return PassFacts(
            noise_level=level,
            noise_seed=noise_seed,
            noise_keys=(noise_seed,) if has_noise else (),
            first_logits=self._log_likelihoods(rows),
            rows="".join(row_digests(rows)),
            tokens_read=0,
            most_probable=0,
            draws_checked=0,
            rows_again=0,
            rows_generated=0,
            largest_difference=0.0,
        )

    def all_facts(self, prompts: str, passes: tuple[PassFacts, ...]) -> EvaluationFacts:
        """Return the facts of the evaluation."""
        return EvaluationFacts(
            dtype=self._spec.dtype,
            attention=self._spec.attention,
            temperature=None,
            max_response_tokens=self._spec.evaluation.max_response_tokens,
            end_token=int(self._tokenizer.eos_token_id),
            stop_text=None,
            weights=combined(self._weights),
            prompts=prompts,
            passes=passes,
            unchecked=UNOBSERVED,
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
                f"evaluation refused: question {question_id(number)}: the harness gives {self._task.metric_name} "
                f"{sample[self._task.metric_name]}, graded again it is {float(graded.correct)}"
            )
        gold = golds[question_id(number)]
        tokens = 0 if self._task.is_choice else len(self._tokenizer(response, add_special_tokens=False)["input_ids"])
        by_number = {name: grade(response, gold) for name, grade in self._graders.items()}
        return {
            "question_id": question_id(number),
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
