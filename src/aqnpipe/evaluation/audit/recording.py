"""Observes a batch and makes its facts: the one place where the audit meets the generation of an evaluation.

A few rows of a batch are computed again, by ways that share nothing with the decoder. Every chosen row is read in one
forward: prompt and response at once, without a cache or padding before it. The logits of its tokens must be those that
decoding had, within rounding. Some rows are also decoded by transformers' `generate`. Only batches without noise and
faults can be computed again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.evaluation.audit.facts import AgainFacts, BatchFacts, Choice, Finding, audit_number, requested_choice
from aqnpipe.evaluation.audit.observation import Observation
from aqnpipe.evaluation.audit.weights import combined, digests_in_memory, tensor_digest
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.noisy_passes import NoisyGenerator, TransformersPasses

_TRIAL_ROWS = 8
_TRIAL_TOKENS = 24
_DRAWS_BATCHES = 8
"""The draws of one batch of so many are made again, and of the first batch of every sample."""

_ROUNDING = {torch.float32: 1024, torch.float16: 16, torch.bfloat16: 8}
"""Difference of a logit that rounding may cause, in units of the number format at the largest logit of its token.

Measured with 6 to 28 layers: below 60, 3 and 2 units. Other padding, a missing token or another row's keys change
logits by a share of their size.
"""
_ROWS_SHARE = 32
_MAX_LOGITS = 2**25
_MIN_ROWS = 3
_GENERATED_TOKENS = 24
_GENERATED_BATCHES = 8


@dataclass(frozen=True)
class BatchPlace:
    """Where a batch is in its evaluation: pass, sample, number in the sample, and step in the pass."""

    noise_level: float
    noise_seed: int
    sample: int
    number: int
    step: int


@dataclass(frozen=True)
class ObservedBatch:
    """A batch that was observed."""

    observation: Observation
    generator: TransformersPasses
    prompts: Sequence[Sequence[int]]
    place: BatchPlace
    number: int
    choice: Choice
    draws_checked: bool
    is_clean: bool
    trial: Sampling | None

    def facts(self, completions: Sequence[Completion]) -> BatchFacts:
        """Return the facts of the batch. Rows of a batch without noise and faults are computed again."""
        seen, model = self.observation, self.generator.model
        rows = seen.rows()
        again, problems_again = self._again(completions)
        num_tokens, num_most_probable = seen.choices.counts()
        weights = digests_in_memory(model)
        return BatchFacts(
            rows=rows,
            noise_key=seen.noise_key,
            special_tokens=self.generator.special_tokens,
            first_logits="" if seen.first_logits is None else tensor_digest(seen.first_logits, 6),
            dtype=seen.dtype,
            attention=seen.attention,
            autocast=seen.autocast,
            training=seen.training,
            draws_checked=self.draws_checked and self.choice.temperature is not None,
            num_tokens=num_tokens,
            num_most_probable=num_most_probable,
            weights=combined(weights),
            weights_by_name=weights if self.place.step == 0 else None,
            again=again,
            problems=tuple(seen.problems),
            problems_again=tuple(problems_again),
        )

    def _again(self, completions: Sequence[Completion]) -> tuple[AgainFacts | None, list[Finding]]:
        """Compute rows again: of this batch if it is clean, else of a trial where the evaluation has no clean batch."""
        if self.trial is not None:
            return self._trial(self.trial)
        responses = [completion.token_ids for completion in completions]
        # A batch with problems is refused because of them; its rows cannot be computed again.
        whole = len(responses) == len(self.prompts) and all(responses) and not self.observation.problems
        if not self.is_clean or not whole:
            return None, []
        return self._computed(self.observation, self.prompts, responses)

    def _trial(self, trial: Sampling) -> tuple[AgainFacts | None, list[Finding]]:
        """Decode some prompts without noise, and compute them again: noise has no part in what the decoder does."""
        prompts = self.prompts[:: max(1, len(self.prompts) // _TRIAL_ROWS)][:_TRIAL_ROWS]
        padding_token = self.generator.special_tokens[1]
        seen = Observation(self.generator.model, prompts, padding_token, Choice(), number=self.number, draws=False)
        with seen:
            responses = [one.token_ids for one in self.generator.decode_without_noise(prompts, trial)]
        rows = seen.rows()
        problems: list[Finding] = [(None, f"trial without noise, row {row}: {text}") for row, text in seen.problems]
        if not problems and any(tuple(text[:-1]) != row.fed for text, row in zip(responses, rows, strict=True)):
            problems = [(None, "trial without noise: the responses are not those that the model gave")]
        if problems:
            return None, problems
        facts, found = self._computed(seen, prompts, responses)
        return facts, [(None, f"trial without noise, row {row}: {text}") for row, text in found]

    def _computed(
        self, seen: Observation, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> tuple[AgainFacts, list[Finding]]:
        end_token, padding_token = self.generator.special_tokens
        return _compute_again(
            self.generator.model,
            prompts,
            responses,
            seen.choices.values(),
            Choice() if self.trial is not None else self.choice,
            number=self.number,
            generate=_is_generated(self.number, self.place.step),
            end_token=end_token,
            padding_token=padding_token,
        )


@contextmanager
def observed(
    generator: NoisyGenerator, spec: EvaluationSpec, place: BatchPlace, prompts: Sequence[Sequence[int]]
) -> Iterator[ObservedBatch | None]:
    """Observe the generation of a batch in the body; None if the model is in another process."""
    if not isinstance(generator, TransformersPasses):
        yield None
        return
    number = audit_number("batch", place, spec.arm_id, spec.seed, spec.step)
    choice = requested_choice(spec, place.noise_seed, place.sample, place.number)
    draws = place.number == 0 or number % _DRAWS_BATCHES == 0
    observation = Observation(generator.model, prompts, generator.special_tokens[1], choice, number=number, draws=draws)
    is_clean = place.noise_level == 0 and not spec.faults
    with observation:
        yield ObservedBatch(
            observation, generator, prompts, place, number, choice, draws, is_clean, _trial(spec, place)
        )


def _trial(spec: EvaluationSpec, place: BatchPlace) -> Sampling | None:
    """Return how the first batch of an evaluation without a clean pass is tried without noise; None for all others."""
    passes = spec.evaluation.passes()
    is_first = (place.noise_level, place.noise_seed, place.step) == (*passes[0], 0)
    has_clean_pass = not spec.faults and any(level == 0 for level, _ in passes)
    return Sampling(max_response_tokens=_TRIAL_TOKENS) if is_first and not has_clean_pass else None


def _rows_to_repeat(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], number: int) -> list[int]:
    """Return the rows to compute again: the shortest prompt, the longest response, and others chosen by `number`."""
    rows = range(len(prompts))
    wanted = min(len(prompts), max(_MIN_ROWS, -(-len(prompts) // _ROWS_SHARE)))
    extremes = [min(rows, key=lambda row: len(prompts[row])), max(rows, key=lambda row: len(responses[row]))]
    drawn = sorted(rows, key=lambda row: audit_number(number, row))
    return list(dict.fromkeys([*extremes, *drawn]))[:wanted]


def _is_generated(number: int, batch: int) -> bool:
    """Return whether transformers' `generate` also decodes rows of a batch: the first batch, and one of eight."""
    return batch == 0 or number % _GENERATED_BATCHES == 0


def _compute_again(
    model: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    values: Mapping[int, Sequence[float]],
    choice: Choice,
    *,
    number: int,
    generate: bool,
    end_token: int,
    padding_token: int,
) -> tuple[AgainFacts, list[Finding]]:
    """Compute some rows of a batch again; `values` are the logits that its responses had when they were chosen."""
    rows = _rows_to_repeat(prompts, responses, number)
    problems: list[Finding] = []
    largest, tokens = 0.0, 0
    with torch.no_grad():
        for row, logits in _read_again(model, prompts, responses, rows, padding_token):
            difference, step = _largest_difference(logits, responses[row], values.get(row, ()))
            greedy = _largest_gap(logits, responses[row]) if choice.temperature is None else (0.0, 0)
            largest, tokens = max(largest, difference, greedy[0]), tokens + len(responses[row])
            if difference > 1:
                problems.append((row, _differs(step)))
            elif greedy[0] > 1:
                problems.append((row, f"token {greedy[1]} is not the most probable one behind this prompt"))
        # The shortest prompt, which has the most padding, and one that was drawn; the longest response takes long.
        again = [*rows[:1], *rows[2:3]] if generate and choice.temperature is None else []
        problems += _generated_problems(model, prompts, responses, again, end_token, padding_token)
    return AgainFacts(len(rows), tokens, len(again), round(largest, 3)), problems


def _differs(step: int) -> str:
    return (
        f"token {step} has another logit than the same prompt and response read at once: the row was decoded behind "
        "other tokens, padding, positions or cached keys"
    )


def _read_again(
    model: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rows: Sequence[int],
    padding_token: int,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the logits [tokens, vocabulary] of every row, read together with others where these fit."""
    texts = [[*prompts[row], *responses[row][:-1]] for row in rows]
    width = max(map(len, texts))
    if len(texts) * width * model.config.get_text_config().vocab_size > _MAX_LOGITS:
        yield from ((row, _logits_of(model, prompts[row], responses[row])) for row in rows)
        return
    # Padding behind a text is not seen by the tokens before it.
    ids = [[*text, *[padding_token] * (width - len(text))] for text in texts]
    logits = model(input_ids=torch.tensor(ids, device=model.device), use_cache=False).logits
    for place, row in enumerate(rows):
        first = len(prompts[row]) - 1
        yield row, logits[place, first : first + len(responses[row])]


def _logits_of(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Return the logits [tokens, vocabulary] from which the tokens of a response were chosen."""
    ids = torch.tensor([[*prompt, *response[:-1]]], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=len(response)).logits[0]
    return logits


def _unit(logits: Tensor) -> Tensor:
    """Return what rounding may do to each row of logits [tokens, vocabulary]."""
    return _ROUNDING[logits.dtype] * torch.finfo(logits.dtype).eps * logits.abs().amax(-1).float()


def _largest_difference(logits: Tensor, tokens: Sequence[int], values: Sequence[float]) -> tuple[float, int]:
    """Return the largest difference between logits and `values`, in units of rounding, and its token (from 1)."""
    known = min(len(tokens), len(values))
    if not known:
        return 0.0, 0
    chosen = logits[:known].gather(-1, torch.tensor(tokens[:known], device=logits.device)[:, None])[:, 0].float()
    return _largest((chosen - torch.tensor(values[:known], device=logits.device)).abs() / _unit(logits[:known]))


def _largest_gap(logits: Tensor, tokens: Sequence[int]) -> tuple[float, int]:
    chosen = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return _largest((logits.amax(-1) - chosen).float() / _unit(logits))


def _largest(differences: Tensor) -> tuple[float, int]:
    place = int(differences.argmax())
    return float(differences[place]), place + 1


def _generated_problems(
    model: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rows: Sequence[int],
    end_token: int,
    padding_token: int,
) -> Iterator[Finding]:
    """Yield the rows that transformers' `generate` decodes otherwise; a tie within rounding is none."""
    if not rows:
        return
    found = _generate(model, [prompts[row] for row in rows], responses, rows, end_token, padding_token)
    for row, ids in zip(rows, found, strict=True):
        stored = responses[row]
        step = next((place for place, pair in enumerate(zip(stored, ids, strict=False)) if pair[0] != pair[1]), None)
        if step is None:
            continue
        # Behind the first difference both decode other texts.
        gap, _ = _largest_gap(_logits_of(model, prompts[row], [*stored[:step], ids[step]])[-1:], [ids[step]])
        own, _ = _largest_gap(_logits_of(model, prompts[row], stored[: step + 1])[-1:], [stored[step]])
        if max(gap, own) > 1:
            yield row, f"token {step + 1} is {stored[step]}, and {ids[step]} by transformers' generate"


def _generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rows: Sequence[int],
    end_token: int,
    padding_token: int,
) -> list[list[int]]:
    """Return what `generate` decodes greedily behind left-padded prompts."""
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    ids = [[padding_token] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in padding]
    settings = GenerationConfig(
        max_new_tokens=min(_GENERATED_TOKENS, max(len(responses[row]) for row in rows)),
        do_sample=False,
        eos_token_id=end_token,
        pad_token_id=padding_token,
        disable_compile=True,
    )
    with _no_settings_of_the_model(model):
        found = model.generate(
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=settings,
        )
    texts: list[list[int]] = found[:, width:].tolist()
    return texts


@contextmanager
def _no_settings_of_the_model(model: Any) -> Iterator[None]:
    """Hide the model's generation_config.json, whose settings would replace those that are not given."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
