"""Observes a batch and makes its facts: the one place where the audit meets the generation of an evaluation."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.evaluation.audit.decoding_again import compute_again, is_generated
from aqnpipe.evaluation.audit.facts import AgainFacts, BatchFacts, Choice, Finding, audit_number, requested_choice
from aqnpipe.evaluation.audit.observation import Observation
from aqnpipe.evaluation.audit.weights import combined, digests_in_memory
from aqnpipe.generation.backend import Completion
from aqnpipe.generation.noisy_passes import NoisyGenerator, TransformersPasses

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
            first_logits="" if seen.first_logits is None else _digest(seen.first_logits),
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
        responses = [completion.token_ids for completion in completions]
        # What was not observed well is refused for that; it cannot be computed again.
        whole = len(responses) == len(self.prompts) and all(responses) and not self.observation.problems
        if not self.is_clean or not whole:
            return None, []
        end_token, padding_token = self.generator.special_tokens
        return compute_again(
            self.generator.model,
            self.prompts,
            responses,
            self.observation.choices.values(),
            self.choice,
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
        yield ObservedBatch(observation, generator, prompts, place, number, choice, draws, is_clean)


def _digest(logits: Tensor) -> str:
    content = logits.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=6).hexdigest()
