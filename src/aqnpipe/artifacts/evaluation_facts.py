"""Facts of an evaluation: what its passes really used, as observed while the model computed.

The evaluate stage compares them with the study before it writes anything; the comparison judges them again.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import polars as pl
from pydantic import Field

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.provenance import short_digest

_DIGITS = 8
"""Hexadecimal digits of the digest of a row: for one row in four thousand million, a change goes unseen."""

_OF_A_ROW = ("question_id", "sample", "response", "response_tokens", "finish_reason")


class PassFacts(Artifact):
    """Facts about what one pass over the questions used.

    first_logits: digest of the first logits of each batch, in order. rows: `row_digests` of the responses, without
    separator.
    """

    noise_level: float = Field(ge=0)
    noise_seed: int = Field(ge=0)
    first_logits: tuple[str, ...]
    rows: str
    rows_again: int = Field(ge=0)  # rows computed again in one forward, without noise
    largest_difference: float = Field(ge=0)  # of a logit computed again; 1 is what rounding may cause

    @property
    def name(self) -> str:
        """The evaluation in messages."""
        return f"evaluation at level {self.noise_level:g}, noise seed {self.noise_seed}"

    def row_problems(self, rows: pl.DataFrame) -> Iterator[str]:
        """Yield what is wrong with the rows of this pass, if they are not the responses that the facts are about."""
        digests = row_digests(rows)
        if "".join(digests) == self.rows:
            return
        stored = [self.rows[start : start + _DIGITS] for start in range(0, len(self.rows), _DIGITS)]
        where = [number for number, pair in enumerate(zip(digests, stored, strict=False)) if pair[0] != pair[1]]
        if len(digests) != len(stored) or not where:
            yield f"{self.name}: {len(digests)} responses in the table, {len(stored)} were given"
        else:
            yield (
                f"{self.name}: {len(where)} responses in the table are not those that the model gave to their "
                f"questions, first {rows.sort('sample', 'question_id')['question_id'][where[0]]}"
            )


class EvaluationFacts(Artifact):
    """Facts about what an evaluation used.

    `prompts`: digest of the prompt that the model read for each question, 16 digits each. `shards`: workers of vLLM
    that shared every layer; each engine has so many. `unchecked`: what this backend does not let the pipeline observe,
    in words; empty for transformers.
    """

    end_token: int
    stop_text: str | None
    prompts: str
    passes: tuple[PassFacts, ...]
    shards: int = Field(default=1, ge=1)
    unchecked: tuple[str, ...] = ()

    def shard_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Return a number of shards that an evaluation with these settings, `EvaluationSpec` as plain data, has not."""
        requested = config.get("generation", {}).get("tensor_parallel", 1)
        used = f"used shards {self.shards}, the study requests {requested}"
        return [used] if self.shards != requested else []

    def row_problems(self, rows: pl.DataFrame) -> Iterator[str]:
        """Yield the passes whose rows in the table are not the responses that the facts are about."""
        for facts in self.passes:
            yield from facts.row_problems(rows.filter(noise_level=facts.noise_level, noise_seed=facts.noise_seed))

    def problems(self) -> Iterator[str]:
        """Yield passes that share their noise: two that differ in noise have other logits in every batch."""
        for first, second in combinations(self.passes, 2):
            same = sum(one == other for one, other in zip(first.first_logits, second.first_logits, strict=False))
            if not same:
                continue
            if first.noise_level == second.noise_level:
                yield (
                    f"noise level {first.noise_level:g}: noise seeds {first.noise_seed} and {second.noise_seed} gave "
                    f"the same noise in {same} of {len(first.first_logits)} batches, one noise seed was used twice"
                )
            else:
                yield (
                    f"noise levels {first.noise_level:g} and {second.noise_level:g} gave the same logits in {same} of "
                    f"{len(first.first_logits)} batches: one of the evaluations did not run under its noise"
                )


def row_digests(rows: pl.DataFrame) -> list[str]:
    """Return a digest of each row of one pass: question, sample, response and its length and end.

    Sorted by sample and question.
    """
    return [row_digest(*row) for row in rows.select(_OF_A_ROW).sort("sample", "question_id").iter_rows()]


def row_digest(question_id: str, sample: int, response: str, num_tokens: int, finish_reason: str) -> str:
    """Return the digest of one response to one question."""
    return short_digest((question_id, sample, response, num_tokens, finish_reason), _DIGITS // 2)
