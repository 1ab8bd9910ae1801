"""Observes a batch and makes its facts: the one place where the audit meets the generation of an evaluation.

A few rows of a batch without noise and faults are computed again, by a way that shares nothing with the decoder: prompt
and response are read at once, in one forward, without a cache or padding before them. The logits of every token must be
those that decoding had, within rounding, and the tokens the most probable ones.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import ConfigDict
from torch import Tensor

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.evaluation.audit.weights import combined, digests_in_memory, tensor_digest
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.noisy_passes import NoisyGenerator, TransformersPasses
from aqnpipe.proof.random_numbers import derived_key
from aqnpipe.reference.decoder import Choice, DecodingTrace, Finding, Verdict, unobserved
from aqnpipe.seeding import derive_seed

_TRIAL_ROWS = 8

_ROUNDING = {torch.float32: 1024, torch.float16: 16, torch.bfloat16: 8}
"""Difference of a logit that rounding may cause, in units of the number format at the largest logit of its token.

Measured with 6 to 28 layers: below 60, 3 and 2 units. Other padding, a missing token or another row's keys change
logits by a share of their size.
"""
_ROWS_SHARE = 32
_MAX_LOGITS = 2**25
_MIN_ROWS = 3


@dataclass(frozen=True)
class BatchPlace:
    """Where a batch is in its evaluation: pass, sample, number in the sample, and step in the pass."""

    noise_level: float
    noise_seed: int
    sample: int
    number: int
    step: int


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


@dataclass(frozen=True)
class _Again:
    """Rows that were read again, the largest difference in units of rounding, and what is wrong with rows."""

    rows: int = 0
    largest: float = 0.0
    problems: tuple[Finding, ...] = ()


class ObservedBatch:
    """A batch whose generation is observed by a hook on the model, from `observed` on."""

    def __init__(
        self,
        generator: TransformersPasses,
        spec: EvaluationSpec,
        place: BatchPlace,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self._generator, self._spec, self._place, self._prompts = generator, spec, place, prompts
        self._choice = requested_choice(spec, place.noise_seed, place.sample, place.number)
        self._trace = DecodingTrace(prompts, generator.special_tokens[1], self._choice)
        self._first_logits = ""

    def note(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Note a forward of the model, as a hook behind it."""
        if not self._first_logits:
            with unobserved():
                self._first_logits = tensor_digest(output.logits[0, -1].detach(), 6)
        self._trace.note(kwargs, output.logits)

    def facts(self, completions: Sequence[Completion]) -> BatchFacts:
        """Return the facts of the batch. Rows of a batch without noise and faults are computed again."""
        responses = [completion.token_ids for completion in completions]
        verdict = self._trace.judge(responses)
        trial, again = _trial(self._spec, self._place), _Again()
        if trial is not None:
            again = self._tried(trial)
        elif self._place.noise_level == 0 and not self._spec.faults and not verdict.findings:
            # A batch with problems is refused because of them; its rows cannot be computed again.
            again = self._again(self._prompts, responses, verdict, self._choice)
        weights = digests_in_memory(self._generator.model)
        return BatchFacts(
            prompts=tuple(map(tokens_digest, self._trace.prompts_read)),
            responses=tuple(map(tokens_digest, responses)),
            special_tokens=self._generator.special_tokens,
            weights=combined(weights),
            weights_by_name=weights if self._place.step == 0 else None,
            first_logits=self._first_logits,
            problems=(*verdict.findings, *again.problems),
            rows_again=again.rows,
            largest_difference=again.largest,
        )

    def _tried(self, trial: Sampling) -> _Again:
        """Decode some prompts without noise, and compute them again: noise has no part in what the decoder does."""
        prompts = self._prompts[:: max(1, len(self._prompts) // _TRIAL_ROWS)][:_TRIAL_ROWS]
        trace = DecodingTrace(prompts, self._generator.special_tokens[1], Choice())
        model = self._generator.model
        with model.register_forward_hook(
            lambda module, args, kwargs, output: trace.note(kwargs, output.logits), with_kwargs=True
        ):
            responses = [one.token_ids for one in self._generator.decode_without_noise(prompts, trial)]
        verdict = trace.judge(responses)
        again = _Again() if verdict.findings else self._again(prompts, responses, verdict, Choice())
        found = [(None, f"trial without noise, row {row}: {text}") for row, text in verdict.findings or again.problems]
        return _Again(again.rows, again.largest, tuple(found))

    def _again(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], verdict: Verdict, choice: Choice
    ) -> _Again:
        number = derive_seed(self._place.noise_seed, "rows computed again", self._place.step, self._spec.seed)
        rows = _rows_to_repeat(prompts, responses, verdict.moved, number)
        problems: list[Finding] = []
        largest = 0.0
        with torch.no_grad():
            for row, logits in _read_again(self._generator, prompts, responses, rows):
                decoded = torch.tensor(verdict.top_logits[row], device=logits.device)
                differences = (logits.amax(-1).float() - decoded).abs() / _unit(logits)
                greedy = _gaps(logits, responses[row]) if choice.temperature is None else torch.zeros_like(differences)
                largest = max(largest, float(differences.max()), float(greedy.max()))
                if bool((differences > 1).any()):
                    problems.append((row, _differs(1 + int((differences > 1).int().argmax()), verdict.moved.get(row))))
                elif bool((greedy > 1).any()):
                    step = 1 + int(greedy.argmax())
                    problems.append((row, f"token {step} is not the most probable one behind this prompt"))
        return _Again(len(rows), round(largest, 3), tuple(problems))


def requested_choice(spec: EvaluationSpec, noise_seed: int, sample: int, batch: int) -> Choice:
    """Return how the study chooses the tokens of one batch of one sample under one noise seed."""
    sampling = spec.evaluation.sampling
    if sampling is None:
        return Choice()
    return Choice(sampling.temperature, derived_key(sampling.seed, "evaluation_sampling", noise_seed, sample, batch))


def tokens_digest(token_ids: Sequence[int]) -> str:
    """Return a digest of token ids: 16 hexadecimal digits."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=8).hexdigest()


@contextmanager
def observed(
    generator: NoisyGenerator, spec: EvaluationSpec, place: BatchPlace, prompts: Sequence[Sequence[int]]
) -> Iterator[ObservedBatch | None]:
    """Observe the generation of a batch in the body; None if the model is in another process."""
    if not isinstance(generator, TransformersPasses):
        yield None
        return
    batch = ObservedBatch(generator, spec, place, prompts)
    with generator.model.register_forward_hook(batch.note, with_kwargs=True):
        yield batch


def _trial(spec: EvaluationSpec, place: BatchPlace) -> Sampling | None:
    """Return how the first batch of an evaluation without a clean pass is tried without noise; None for all others."""
    passes = spec.evaluation.passes()
    is_first = (place.noise_level, place.noise_seed, place.step) == (*passes[0], 0)
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
    first = [
        min(rows, key=lambda row: len(prompts[row])),
        by_length[0],
        *[row for row in by_length if row in moved][:1],
    ]
    drawn = sorted(rows, key=lambda row: derive_seed(number, "row", row))
    return list(dict.fromkeys([*first, *drawn]))[:wanted]


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


def _unit(logits: Tensor) -> Tensor:
    """Return what rounding may do to each row of logits [tokens, vocabulary]."""
    return _ROUNDING[logits.dtype] * torch.finfo(logits.dtype).eps * logits.abs().amax(-1).float()


def _gaps(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the distance of each token to the most probable one, in units of rounding."""
    chosen = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return (logits.amax(-1) - chosen).float() / _unit(logits)
