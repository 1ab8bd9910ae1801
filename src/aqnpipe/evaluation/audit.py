"""Facts about an evaluation, taken while the model computes, and compared with the study before anything is written.

`observed` records the forwards of a batch for `reference.decoder`, which judges the decoding. A few rows of a batch
without noise and faults are computed again, by a way that shares nothing with the decoder: prompt and response are read
at once, in one forward, without a cache or padding before them. The logits of every token must be those that decoding
had, within rounding, and the tokens the most probable ones. `Judge` reads questions and prompts from the files of the
study, and compares. Weights are compared by digests of samples: in memory, and of the checkpoint on the disk.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import polars as pl
import torch
from pydantic import ConfigDict
from torch import Tensor

from aqnpipe.artifacts.evaluations import EvaluationFacts, PassFacts, row_digest
from aqnpipe.artifacts.provenance import short_digest
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.graders import columns_of, graders_of, pairs
from aqnpipe.data.prompts import read_questions
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.noisy_passes import NoisyGenerator, TransformersPasses
from aqnpipe.models.loading import load_tokenizer, stored_weights
from aqnpipe.models.prepared import find_base, has_only_adapters
from aqnpipe.models.verification import name_in_files
from aqnpipe.noise.receipts.passes import other_settings, stated
from aqnpipe.noise.receipts.table import Row
from aqnpipe.proof.random_numbers import derived_key
from aqnpipe.reference.decoder import Choice, DecodingTrace, Finding, Verdict, end_problem, unobserved, without_padding
from aqnpipe.seeding import derive_seed

if TYPE_CHECKING:
    from aqnpipe.evaluation.shards import Batch, PassResult, Shard

UNOBSERVED = (
    "prompts as the model reads them",
    "choice of tokens",
    "sampled tokens",
    "responses computed again",
    "weights and number format at the time of a forward pass",
)
"""Facts that only transformers in this package's own processes lets the audit observe."""

_TRIAL_ROWS = 8
_ROUNDING = {torch.float32: 1024, torch.float16: 16, torch.bfloat16: 8}
"""Difference of a logit that rounding may cause, in units of the number format at the largest logit of its token.

Measured with 6 to 28 layers: below 60, 3 and 2 units. Other padding, a missing token or another row's keys change
logits by a share of their size.
"""
_ROWS_SHARE = 32
_MAX_LOGITS = 2**25
_MIN_ROWS = 3
_MOST_NAMED = 3


# -- weights -----------------------------------------------------------------------------------------------------------


def digests_in_memory(model: Any) -> dict[str, str]:
    """Return a digest of one row of every weight of a model, by its name in files."""
    own = {name_in_files(name): tensor for name, tensor in model.state_dict().items()}
    return {name: _tensor_digest(_row(tensor.detach(), name)) for name, tensor in sorted(own.items()) if tensor.ndim}


def differing_weight(found: Mapping[str, str], folder: Path) -> str | None:
    """Return the first weight of a checkpoint whose digest in any number format is not in `found`; None if all are.

    Of a checkpoint of adapters, its base is compared, too. Weights that the loader renames or fuses have no digest
    under their name and are not compared.
    """
    folders = [folder, find_base(folder)] if has_only_adapters(folder) else [folder]
    for each in folders:
        with stored_weights(each) as files:
            for name in sorted(found.keys() & files.keys()):
                stored = _row(files[name].get_slice(name), name)
                if found[name] not in {_tensor_digest(stored), *(_tensor_digest(stored.to(d)) for d in _ROUNDING)}:
                    return name
    return None


def _tensor_digest(tensor: Tensor, num_bytes: int = 4) -> str:
    """Return a digest of the bits of a tensor."""
    content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=num_bytes).hexdigest()


def _combined(digests: Mapping[str, str]) -> str:
    return short_digest(sorted(digests.items()), 16)


def _row(tensor: Any, name: str) -> Tensor:
    """Return a row of a tensor, or of a slice of a file: all of a vector, one row of a matrix."""
    shape = list(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())
    number = derive_seed(0, f"audited row of {name}", *shape) % shape[0] if len(shape) > 1 else 0
    row: Tensor = tensor[number : number + 1] if len(shape) > 1 else tensor[:]
    return row


def _tokens_digest(token_ids: Sequence[int]) -> str:
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=8).hexdigest()


# -- what is observed of a batch ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Again:
    """Rows that were read again, the largest difference in units of rounding, and what is wrong with rows."""

    rows: int = 0
    largest: float = 0.0
    problems: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class BatchFacts:
    """Observations made while a batch was generated.

    prompts: digests of the prompts that the network read, without padding, in the order of the batch. responses:
    digests of the responses that it gave. special_tokens: end and padding token of a worker. weights: digest of
    sampled weights in memory; by name in the first batch of a pass. first_logits: digest of the first logits of the
    batch. problems: row (None: the batch) and what is wrong with it. rows_again: rows that were read again, each in one
    forward; largest_difference: of the largest logit behind a token of theirs, in units of what rounding may do.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    special_tokens: tuple[int, int]
    weights: str
    weights_by_name: dict[str, str] | None
    first_logits: str
    problems: tuple[Finding, ...]
    rows_again: int = 0
    largest_difference: float = 0.0


class ObservedBatch:
    """A batch whose generation is observed by a hook on the model, from `observed` on."""

    def __init__(self, generator: TransformersPasses, spec: EvaluationSpec, shard: "Shard", batch: "Batch") -> None:
        self._generator, self._spec, self._shard, self._batch = generator, spec, shard, batch
        self._choice = requested_choice(spec, shard.noise_seed, batch.sample, batch.number)
        self._trace = DecodingTrace(batch.prompts, generator.special_tokens[1], self._choice)
        self._first_logits = ""

    def note(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Note a forward of the model, as a hook behind it."""
        if not self._first_logits:
            with unobserved():
                self._first_logits = _tensor_digest(output.logits[0, -1].detach(), 6)
        self._trace.note(kwargs, output.logits)

    def facts(self, completions: Sequence[Completion]) -> BatchFacts:
        """Return the facts of the batch. Rows of a batch without noise and faults are computed again."""
        responses = [completion.token_ids for completion in completions]
        verdict = self._trace.judge(responses)
        trial, again = _trial(self._spec, self._shard, self._batch.step), _Again()
        if trial is not None:
            again = self._tried(trial)
        elif self._shard.noise_level == 0 and not self._spec.faults and not verdict.findings:
            # A batch with problems is refused because of them; its rows cannot be computed again.
            again = self._again(self._batch.prompts, responses, verdict, self._choice)
        weights = digests_in_memory(self._generator.model)
        return BatchFacts(
            prompts=tuple(map(_tokens_digest, self._trace.prompts_read)),
            responses=tuple(map(_tokens_digest, responses)),
            special_tokens=self._generator.special_tokens,
            weights=_combined(weights),
            weights_by_name=weights if self._batch.step == 0 else None,
            first_logits=self._first_logits,
            problems=(*verdict.findings, *again.problems),
            rows_again=again.rows,
            largest_difference=again.largest,
        )

    def _tried(self, trial: Sampling) -> _Again:
        """Decode some prompts without noise, and compute them again: noise has no part in what the decoder does."""
        every = max(1, len(self._batch.prompts) // _TRIAL_ROWS)
        prompts = self._batch.prompts[::every][:_TRIAL_ROWS]
        trace = DecodingTrace(prompts, self._generator.special_tokens[1], Choice())
        hook = self._generator.model.register_forward_hook(
            lambda module, args, kwargs, output: trace.note(kwargs, output.logits), with_kwargs=True
        )
        with hook:
            responses = [one.token_ids for one in self._generator.decode_without_noise(prompts, trial)]
        verdict = trace.judge(responses)
        again = _Again() if verdict.findings else self._again(prompts, responses, verdict, Choice())
        found = [(None, f"trial without noise, row {row}: {text}") for row, text in verdict.findings or again.problems]
        return _Again(again.rows, again.largest, tuple(found))

    def _again(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], verdict: Verdict, choice: Choice
    ) -> _Again:
        number = derive_seed(self._shard.noise_seed, "rows computed again", self._batch.step, self._spec.seed)
        rows = _rows_to_repeat(prompts, responses, verdict.moved, number)
        problems: list[Finding] = []
        largest = 0.0
        with torch.no_grad():
            for row, logits in _read_again(self._generator, prompts, responses, rows):
                top = logits.amax(-1).float()
                # What rounding may do to the logits of each token.
                unit = _ROUNDING[logits.dtype] * torch.finfo(logits.dtype).eps * logits.abs().amax(-1).float()
                differences = (top - torch.tensor(verdict.top_logits[row], device=logits.device)).abs() / unit
                chosen = logits.gather(-1, torch.tensor(responses[row], device=logits.device)[:, None])[:, 0]
                gaps = (logits.amax(-1) - chosen).float() / unit
                gaps = gaps if choice.temperature is None else torch.zeros_like(gaps)
                largest = max(largest, float(differences.max()), float(gaps.max()))
                if bool((differences > 1).any()):
                    problems.append((row, _differs(1 + int((differences > 1).int().argmax()), verdict.moved.get(row))))
                elif bool((gaps > 1).any()):
                    step = 1 + int(gaps.argmax())
                    problems.append((row, f"token {step} is not the most probable one behind this prompt"))
        return _Again(len(rows), round(largest, 3), tuple(problems))


def requested_choice(spec: EvaluationSpec, noise_seed: int, sample: int, batch: int) -> Choice:
    """Return how the study chooses the tokens of one batch of one sample under one noise seed."""
    sampling = spec.evaluation.sampling
    if sampling is None:
        return Choice()
    return Choice(sampling.temperature, derived_key(sampling.seed, "evaluation_sampling", noise_seed, sample, batch))


@contextmanager
def observed(
    generator: NoisyGenerator, spec: EvaluationSpec, shard: "Shard", batch: "Batch"
) -> Iterator[ObservedBatch | None]:
    """Observe the generation of a batch in the body; None if the model is in another process."""
    if not isinstance(generator, TransformersPasses):
        yield None
        return
    found = ObservedBatch(generator, spec, shard, batch)
    with generator.model.register_forward_hook(found.note, with_kwargs=True):
        yield found


def _trial(spec: EvaluationSpec, shard: "Shard", step: int) -> Sampling | None:
    """Return how the first batch of an evaluation without a clean pass is tried without noise; None for all others."""
    passes = spec.evaluation.passes()
    is_first = (shard.noise_level, shard.noise_seed, step) == (*passes[0], 0)
    has_clean_pass = not spec.faults and any(level == 0 for level, _ in passes)
    # As long as the study's responses, so that rows leave the batch.
    tokens = spec.evaluation.max_response_tokens
    return Sampling(max_response_tokens=tokens) if is_first and not has_clean_pass else None


def _rows_to_repeat(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], moved: Mapping[int, int], number: int
) -> list[int]:
    """Return the rows to compute again: what a decoder gets wrong first, and others chosen by `number`.

    The shortest prompt has the most padding; the longest response reads the most cached keys; the longest one that
    changed its place reads keys that were moved.
    """
    rows = range(len(prompts))
    wanted = min(len(prompts), max(_MIN_ROWS, -(-len(prompts) // _ROWS_SHARE)))
    by_length = sorted(rows, key=lambda row: -len(responses[row]))
    shortest, moved_ones = min(rows, key=lambda row: len(prompts[row])), [row for row in by_length if row in moved]
    drawn = sorted(rows, key=lambda row: derive_seed(number, "row", row))
    return list(dict.fromkeys([shortest, by_length[0], *moved_ones[:1], *drawn]))[:wanted]


def _differs(step: int, moved_at: int | None) -> str:
    if moved_at is not None and step == moved_at:
        return f"token {step} was read with the cached keys of another row, when rows had left the batch"
    return (
        f"token {step} has another logit than the same prompt and response read at once: the row was decoded behind "
        "other tokens, padding, positions or cached keys"
    )


def _read_again(
    generator: TransformersPasses,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rows: Sequence[int],
) -> Iterator[tuple[int, Tensor]]:
    """Yield the logits [tokens, vocabulary] of every row, read together with others where these fit."""
    model, padding_token = generator.model, generator.special_tokens[1]
    texts = [[*prompts[row], *responses[row][:-1]] for row in rows]
    width = max(map(len, texts))
    if len(texts) * width * model.config.get_text_config().vocab_size > _MAX_LOGITS:
        for row, text in zip(rows, texts, strict=True):
            ids = torch.tensor([text], device=model.device)
            yield row, model(input_ids=ids, use_cache=False, logits_to_keep=len(responses[row])).logits[0]
        return
    # Padding behind a text is not seen by the tokens before it.
    ids = torch.tensor([[*text, *[padding_token] * (width - len(text))] for text in texts], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits
    for place, row in enumerate(rows):
        first = len(prompts[row]) - 1
        yield row, logits[place, first : first + len(responses[row])]


# -- the study's judgement ---------------------------------------------------------------------------------------------


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
        end, padding = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        self._special_tokens = int(end), int(padding)
        self._prompts = [_tokens_digest(without_padding(ids, padding)) for ids in self._questions.prompts]
        self._is_observed, self._shards = description["backend"] != "vllm", int(description.get("workers", 1))
        self._weights: str | None = None
        self._passes: list[PassFacts] = []
        self._graders = graders_of(spec.evaluation.primary_scorer, spec.evaluation.scorer_sha256)
        self._graded, self._text_of = cache(self._grades), cache(self._decoded)

    @cached_property
    def stop_text(self) -> str | None:
        """The text that ends a response; None if the prompt's layout has none."""
        return "Question:" if self._spec.prompt.layout == "question_answer" else None

    def judge(self, result: "PassResult", rows: pl.DataFrame) -> None:
        """Raise ReceiptError if a pass, or the table of it, is not what the study requests."""
        facts = self._facts(result)
        where, problems = f"{facts.name}: ", list(dict.fromkeys(self._problems(result, facts, rows)))
        if not problems:
            self._passes.append(facts)
            # Compared with the passes before, and judged again by the comparison.
            where, problems = "", list(self.facts().problems())
        if problems:
            more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
            raise ReceiptError(f"evaluation invalid: {where}{'; '.join(problems[:_MOST_NAMED])}{more}")

    def facts(self) -> EvaluationFacts:
        """Return the facts of all passes judged so far."""
        return EvaluationFacts(
            end_token=self._special_tokens[0],
            stop_text=self.stop_text,
            prompts="".join(self._prompts),
            passes=tuple(self._passes),
            shards=self._shards,
            unchecked=() if self._is_observed else UNOBSERVED,
        )

    def _problems(self, result: "PassResult", facts: PassFacts, rows: pl.DataFrame) -> Iterator[str]:
        if self._is_observed:
            yield from self._batch_problems(result)
        yield from self._response_problems(result.samples)
        yield from facts.row_problems(rows)
        yield from self._row_problems(result, rows)

    def _batch_problems(self, result: "PassResult") -> Iterator[str]:
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

    def _setting_problems(self, facts: BatchFacts, batch: "Batch") -> Iterator[str]:
        if facts.weights_by_name is not None:
            name = differing_weight(facts.weights_by_name, self._model_dir)
            if name is not None:
                yield f"{name} in memory is not the weight of the checkpoint {self._model_dir}"
            self._weights = self._weights or _combined(facts.weights_by_name)
        if facts.weights != self._weights:
            yield f"the weights in memory in batch {batch.step} are not those of the first batch"
        if facts.special_tokens != self._special_tokens:
            yield (
                f"end and padding token are {facts.special_tokens}, those of the checkpoint's tokenizer are "
                f"{self._special_tokens}: the tokenizer of another model"
            )

    def _prompt_problems(self, batch: "Batch", facts: BatchFacts) -> Iterator[str]:
        for question, prompt in zip(batch.questions, facts.prompts, strict=False):
            if prompt == self._prompts[question]:
                continue
            read = (
                "another prompt than its text in the study's format, with the checkpoint's tokenizer and chat template"
            )
            if prompt in self._prompts:
                read = f"the prompt of question {self._name(self._prompts.index(prompt))}"
            yield f"for question {self._name(question)} the model read {read}"

    def _found_problems(self, batch: "Batch", findings: Sequence[Finding]) -> Iterator[str]:
        for row, text in findings:
            where = f"batch {batch.step}" if row is None else f"question {self._name(batch.questions[row])}"
            yield f"{where}: {text}"

    def _token_problems(
        self, batch: "Batch", responses: Sequence[str], samples: Sequence[Sequence[Completion]]
    ) -> Iterator[str]:
        """Yield the responses that are not those that were observed."""
        for question, observed in zip(batch.questions, responses, strict=True):
            stored = samples[batch.sample][question].token_ids
            if _tokens_digest(stored) != observed:
                yield (
                    f"question {self._name(question)}: the response of {len(stored)} tokens is not the one that the "
                    "model gave behind this prompt"
                )

    def _response_problems(self, samples: Sequence[Sequence[Completion]]) -> Iterator[str]:
        """Yield responses that end too early, too late or for another reason than they say."""
        limit, end = self._spec.evaluation.max_response_tokens, self._special_tokens[0]
        for question, completion in (pair for sample in samples for pair in enumerate(sample)):
            tokens = tuple(completion.token_ids)
            problem = end_problem(tokens, limit, end, self.stop_text, self._text_of, completion.finish_reason)
            if problem:
                yield f"question {self._name(question)}: {problem}"

    def _row_problems(self, result: "PassResult", rows: pl.DataFrame) -> Iterator[str]:
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

    def _facts(self, result: "PassResult") -> PassFacts:
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
