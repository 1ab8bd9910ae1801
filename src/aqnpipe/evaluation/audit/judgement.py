"""Compares what was observed in a pass with what the study requests, and with the rows that will be stored."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path

import polars as pl

from aqnpipe.artifacts.evaluations import EvaluationFacts, PassFacts, row_digest
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.graders import columns_of, graders_of, pairs
from aqnpipe.data.prompts import read_questions
from aqnpipe.errors import ReceiptError
from aqnpipe.evaluation.audit.recording import BatchFacts, tokens_digest
from aqnpipe.evaluation.audit.weights import combined, differing_weight
from aqnpipe.evaluation.shards import Batch, PassResult
from aqnpipe.generation.backend import Completion
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.noise.receipts.passes import other_settings, stated
from aqnpipe.noise.receipts.table import Row
from aqnpipe.reference.decoder import Finding, end_problem, without_padding

UNOBSERVED = (
    "prompts as the model reads them",
    "choice of tokens",
    "sampled tokens",
    "responses computed again",
    "weights and number format at the time of a forward pass",
)
"""Facts that only transformers in this package's own processes lets the audit observe."""

_MOST_NAMED = 3


class Judge:
    """Judges the passes of one evaluation, in order, by what its spec and its files define.

    `description`: of the backend that its workers named.
    """

    def __init__(
        self,
        spec: EvaluationSpec,
        model_dir: Path,
        test_problems: Path,
        train_problems: Path | None,
        description: Mapping[str, str | int | bool],
    ) -> None:
        self._spec, self._model_dir = spec, model_dir
        self._tokenizer = load_tokenizer(model_dir)
        self._questions = read_questions(
            test_problems, spec.prompt, self._tokenizer, train_problems, spec.evaluation.num_questions
        )
        padding = self._tokenizer.pad_token_id
        self._prompts = [tokens_digest(without_padding(ids, padding)) for ids in self._questions.prompts]
        self._is_observed, self._shards = description["backend"] != "vllm", int(description.get("workers", 1))
        self._weights: str | None = None
        self._passes: list[PassFacts] = []
        self._graders = graders_of(spec.evaluation.primary_scorer, spec.evaluation.scorer_sha256)
        self._graded, self._text_of = cache(self._grades), cache(self._decoded)

    @cached_property
    def stop_text(self) -> str | None:
        """The text that ends a response; None if the prompt's layout has none."""
        return "Question:" if self._spec.prompt.layout == "question_answer" else None

    def judge(self, result: PassResult, rows: pl.DataFrame) -> None:
        """Raise ReceiptError if a pass, or the table of it, is not what the study requests."""
        where = f"evaluation at level {result.noise_level:g}, noise seed {result.noise_seed}"
        facts = self._facts(result)
        problems = list(dict.fromkeys(self._problems(result, facts, rows)))
        if not problems:
            self._passes.append(facts)
            # Compared with the passes before, and judged again by the comparison.
            where, problems = "", list(self.facts().problems())
        if problems:
            more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
            text = f"{'; '.join(problems[:_MOST_NAMED])}{more}"
            raise ReceiptError(f"evaluation invalid: {where}{': ' if where else ''}{text}")

    def facts(self) -> EvaluationFacts:
        """Return the facts of all passes judged so far."""
        return EvaluationFacts(
            end_token=int(self._tokenizer.eos_token_id),
            stop_text=self.stop_text,
            prompts="".join(self._prompts),
            passes=tuple(self._passes),
            shards=self._shards,
            unchecked=() if self._is_observed else UNOBSERVED,
        )

    def _problems(self, result: PassResult, facts: PassFacts, rows: pl.DataFrame) -> Iterator[str]:
        if self._is_observed:
            yield from self._batch_problems(result)
        yield from self._response_problems(result.samples)
        yield from facts.row_problems(rows)
        yield from self._row_problems(result, rows)

    def _batch_problems(self, result: PassResult) -> Iterator[str]:
        if len(result.facts) != len(result.batches):
            yield f"{len(result.facts)} of {len(result.batches)} batches were observed"
            return
        needed = Row("evaluation", **stated(self._spec.dtype, self._spec.attention))
        if found := [problem for row in result.receipt.phases for problem in other_settings(needed, row)]:
            yield from found
            return
        for batch, facts in zip(result.batches, result.facts, strict=True):
            # Each of these causes the next: other settings, other prompts, other tokens.
            yield from (
                list(self._setting_problems(facts, batch))
                or list(self._prompt_problems(batch, facts))
                or list(self._found_problems(batch, facts.problems))
                or list(self._token_problems(batch, facts.responses, result.samples))
            )

    def _setting_problems(self, facts: BatchFacts, batch: Batch) -> Iterator[str]:
        if facts.weights_by_name is not None:
            name = differing_weight(facts.weights_by_name, self._model_dir)
            if name is not None:
                yield f"{name} in memory is not the weight of the checkpoint {self._model_dir}"
            self._weights = self._weights or combined(facts.weights_by_name)
        if facts.weights != self._weights:
            yield f"the weights in memory in batch {batch.step} are not those of the first batch"
        special = (int(self._tokenizer.eos_token_id), int(self._tokenizer.pad_token_id))
        if facts.special_tokens != special:
            yield (
                f"end and padding token are {facts.special_tokens}, those of the checkpoint's tokenizer are {special}: "
                "the tokenizer of another model"
            )

    def _prompt_problems(self, batch: Batch, facts: BatchFacts) -> Iterator[str]:
        for question, prompt in zip(batch.questions, facts.prompts, strict=False):
            if prompt == self._prompts[question]:
                continue
            others = [self._name(number) for number, digest in enumerate(self._prompts) if digest == prompt]
            what = (
                "another prompt than its text in the study's format, with the checkpoint's tokenizer and chat template"
            )
            read = f"the prompt of question {others[0]}" if others else what
            yield f"for question {self._name(question)} the model read {read}"

    def _found_problems(self, batch: Batch, findings: Sequence[Finding]) -> Iterator[str]:
        for row, text in findings:
            yield (
                f"batch {batch.step}: {text}" if row is None else f"question {self._name(batch.questions[row])}: {text}"
            )

    def _token_problems(
        self, batch: Batch, responses: Sequence[str], samples: Sequence[Sequence[Completion]]
    ) -> Iterator[str]:
        """Yield the responses that are not those that were observed."""
        for question, observed in zip(batch.questions, responses, strict=True):
            stored = samples[batch.sample][question].token_ids
            if tokens_digest(stored) != observed:
                yield (
                    f"question {self._name(question)}: the response of {len(stored)} tokens is not the one that the "
                    "model gave behind this prompt"
                )

    def _response_problems(self, samples: Sequence[Sequence[Completion]]) -> Iterator[str]:
        """Yield responses that end too early, too late or for another reason than they say."""
        limit, end = self._spec.evaluation.max_response_tokens, int(self._tokenizer.eos_token_id)
        for sample in samples:
            for question, completion in enumerate(sample):
                tokens = tuple(completion.token_ids)
                problem = end_problem(tokens, limit, end, self.stop_text, self._text_of, completion.finish_reason)
                if problem:
                    yield f"question {self._name(question)}: {problem}"

    def _row_problems(self, result: PassResult, rows: pl.DataFrame) -> Iterator[str]:
        """Yield rows of the table that are not of their pass, question or response, or have another grade."""
        samples = self._spec.evaluation.num_samples
        if len(result.samples) != samples:
            yield f"{len(result.samples)} responses per question, the study requests {samples}"
        for name in ("noise_level", "noise_seed"):
            if set(rows[name]) != {getattr(result, name)}:
                yield f"its rows are labelled with another {name.replace('_', ' ')}"
        golds = dict(zip(self._questions.ids, self._questions.golds, strict=True))
        columns = columns_of(self._graders)
        for row in rows.iter_rows(named=True):
            gold = golds.get(row["question_id"])
            if gold is not None and {name: row[name] for name in columns} != self._graded(row["response"], gold):
                name = row["question_id"]
                yield f"question {name}: the stored grade is not that of its response and gold answer {gold!r}"

    def _shown(self, completion: Completion) -> tuple[str, int, str]:
        """Return text, number of tokens and finish reason of a response as the table shows them."""
        whole = self._text_of(tuple(completion.token_ids))
        text = whole if self.stop_text is None else whole.partition(self.stop_text)[0]
        return text, len(completion.token_ids), "stop" if len(text) < len(whole) else completion.finish_reason

    def _facts(self, result: PassResult) -> PassFacts:
        names = self._questions.ids
        return PassFacts(
            noise_level=result.noise_level,
            noise_seed=result.noise_seed,
            first_logits=tuple(facts.first_logits for facts in result.facts),
            rows="".join(
                row_digest(names[question], sample, *self._shown(completions[question]))
                for sample, completions in enumerate(result.samples)
                for question in sorted(range(len(names)), key=names.__getitem__)
            ),
            rows_again=sum(facts.rows_again for facts in result.facts),
            largest_difference=max((facts.largest_difference for facts in result.facts), default=0.0),
        )

    def _decoded(self, token_ids: tuple[int, ...]) -> str:
        """Return the whole text of a response, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _grades(self, text: str, gold: str) -> Mapping[str, str | bool | None]:
        return pairs({name: grade(text, gold) for name, grade in self._graders.items()})

    def _name(self, question: int) -> str:
        names = self._questions.ids
        return names[question] if question < len(names) else f"number {question}"
