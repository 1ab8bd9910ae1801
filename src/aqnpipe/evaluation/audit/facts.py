"""Observations of a worker in one batch, and the keys and digests that the audit derives for itself."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.noise.audit.random_numbers import derived_key

_PLAIN = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

Finding = tuple[int | None, str]
"""A row of a batch, None for the whole batch, and what is wrong with it."""


@dataclass(frozen=True)
class Choice:
    """How the study chooses tokens: the most probable one if `temperature` is None, else draws keyed by `seed`."""

    temperature: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class RowFacts:
    """One row of a batch, as the model computed it.

    prompt: digest of the token ids that the embedding read, without padding. fed: the response's tokens that the model
    read, one per step. last: the token that the logits of the last step choose, which no step reads; None if only the
    draws of the generator know it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _PLAIN

    prompt: str
    fed: tuple[int, ...]
    last: int | None


@dataclass(frozen=True)
class AgainFacts:
    """Results of computing rows again.

    `rows` were read again in one forward each, `tokens` in all; `generated` of them were also decoded again by
    transformers' `generate`. `largest_difference`: of a chosen token's logit, in units of what rounding may do.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _PLAIN

    rows: int
    tokens: int
    generated: int
    largest_difference: float


@dataclass(frozen=True)
class BatchFacts:
    """Observations made while a batch was generated.

    rows: in the order of the batch's prompts. noise_key: seed and step of the noise that was installed. first_logits:
    digest of the first logits of the batch. weights: digest of sampled weights in memory; by name in the first batch of
    a pass. special_tokens: end and padding token of the worker. again: None for batches with noise or faults. Problems:
    row (None: the batch) and what is wrong with it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _PLAIN

    rows: tuple[RowFacts, ...]
    noise_key: tuple[int, int] | None
    special_tokens: tuple[int, int]
    first_logits: str
    dtype: str
    attention: str
    autocast: str | None
    training: bool
    draws_checked: bool
    num_tokens: int
    num_most_probable: int
    weights: str
    weights_by_name: dict[str, str] | None
    again: AgainFacts | None
    problems: tuple[Finding, ...]
    problems_again: tuple[Finding, ...] = ()


def requested_choice(spec: EvaluationSpec, noise_seed: int, sample: int, batch: int) -> Choice:
    """Return how the study chooses the tokens of one batch of one sample under one noise seed."""
    sampling = spec.evaluation.sampling
    if sampling is None:
        return Choice()
    return Choice(sampling.temperature, derived_key(sampling.seed, "evaluation_sampling", noise_seed, sample, batch))


def tokens_digest(token_ids: Sequence[int]) -> str:
    """Return a digest of token ids: 16 hexadecimal digits."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=8).hexdigest()


def without_padding(token_ids: Sequence[int], padding_token: int) -> list[int]:
    """Return token ids without the padding tokens at the end, which no token before them sees."""
    length = len(token_ids)
    while length and token_ids[length - 1] == padding_token:
        length -= 1
    return list(token_ids[:length])


def audit_number(*parts: object) -> int:
    """Return a number that depends on `parts` alone, and on which nothing else depends: it chooses what is audited."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")
