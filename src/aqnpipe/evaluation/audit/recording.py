"""Observes a batch and makes its facts: the one place where the audit meets the generation of an evaluation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.evaluation.audit.decoding_again import compute_again, is_generated
from aqnpipe.evaluation.audit.facts import AgainFacts, BatchFacts, Choice, Finding, audit_number, requested_choice
from aqnpipe.evaluation.audit.observation import Observation
from aqnpipe.evaluation.audit.weights import combined, digests_in_memory, tensor_digest
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.noisy_passes import NoisyGenerator, TransformersPasses

_TRIAL_ROWS = 8
_TRIAL_TOKENS = 24
_DRAWS_BATCHES = 8
"""The draws of one batch of so many are made again, and of the first batch of every sample."""


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
        return compute_again(
            self.generator.model,
            prompts,
            responses,
            seen.choices.values(),
            Choice() if self.trial is not None else self.choice,
            number=self.number,
            generate=is_generated(self.number, self.place.step),
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
