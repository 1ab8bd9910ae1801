"""Observations of a worker in one batch, and the keys and digests that the audit derives for itself."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.noise.audit.random_numbers import derived_key
from aqnpipe.reference.decoder import Choice, Finding

_PLAIN = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True)
class AgainFacts:
    """Results of reading `rows` again, each in one forward; `tokens` in all.

    `largest_difference`: of the largest logit behind a token, in units of what rounding may do.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _PLAIN

    rows: int
    tokens: int
    largest_difference: float


@dataclass(frozen=True)
class BatchFacts:
    """Observations made while a batch was generated.

    prompts: digests of the prompts that the network read, without padding, in the order of the batch. responses:
    digests of the responses that it gave. first_logits: digest of the first logits of the batch. weights: digest of
    sampled weights in memory; by name in the first batch of a pass. special_tokens: end and padding token of a worker.
    again: None for batches with noise or faults. Problems: row (None: the batch) and what is wrong with it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _PLAIN

    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    special_tokens: tuple[int, int]
    draws_checked: bool
    num_tokens: int
    num_most_probable: int
    weights: str
    weights_by_name: dict[str, str] | None
    again: AgainFacts | None
    problems: tuple[Finding, ...]
    problems_again: tuple[Finding, ...] = ()
    first_logits: str = ""


def requested_choice(spec: EvaluationSpec, noise_seed: int, sample: int, batch: int) -> Choice:
    """Return how the study chooses the tokens of one batch of one sample under one noise seed."""
    sampling = spec.evaluation.sampling
    if sampling is None:
        return Choice()
    return Choice(sampling.temperature, derived_key(sampling.seed, "evaluation_sampling", noise_seed, sample, batch))


def tokens_digest(token_ids: Sequence[int]) -> str:
    """Return a digest of token ids: 16 hexadecimal digits."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=8).hexdigest()


def audit_number(*parts: object) -> int:
    """Return a number that depends on `parts` alone, and on which nothing else depends: it chooses what is audited."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")
