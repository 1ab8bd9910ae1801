"""Proves that the tokens which an engine computes are the given ones, each once, the last ones in decode.

vLLM chooses the tokens that it decodes. Here the logits of all others are set to minus infinity, so its sampler has one
choice: the next given token, which the engine then runs like one of its own. The worker finds the tokens of a pass by
the engine's requests, each of which carries the number of its sequence.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aqnpipe.errors import ModelError

SEQUENCE = "aqnpipe_sequence"
"""Key of a request's `extra_args`: the number of the sequence that it reads."""

Place = tuple[int, int]


def requests_of(runner: Any) -> list[Place]:
    """Return the requests of the pass that vLLM's model runner computes: number of the sequence, number of tokens.

    Raises ModelError for a model runner that does not say them.
    """
    batch = getattr(runner, "input_batch", None)
    if batch is None:
        raise ModelError(
            f"vLLM's {type(runner).__module__}: which request a token belongs to is not known here; expected the first "
            "version of its model runner (VLLM_USE_V2_MODEL_RUNNER=0)"
        )
    ends = runner.query_start_loc.np
    found = []
    for row, request in enumerate(batch.req_ids):
        arguments = runner.requests[request].sampling_params.extra_args or {}
        found.append((int(arguments.get(SEQUENCE, -1)), int(ends[row + 1] - ends[row])))
    return found


class GivenTokens:
    """Token ids of `sequences`, of which the last `num_decoded` of each are run one at a time."""

    def __init__(self, sequences: Sequence[Sequence[int]], num_decoded: int) -> None:
        self._sequences, self._num_decoded = [list(ids) for ids in sequences], num_decoded
        self._done = [0] * len(sequences)
        self._ends: list[Place] = []
        self._reason = ""

    def take(self, requests: Sequence[Place], ids: Sequence[int], positions: Sequence[int]) -> list[Place]:
        """Return sequence and position of the tokens of a pass; empty if it is none over given tokens.

        vLLM runs passes of its own, without requests. What else is not the next given token is kept for `check`.
        """
        self._ends = []
        places: list[Place] = []
        for sequence, count in requests:
            part = slice(len(places), len(places) + count)
            reason = self._why_not_next(sequence, ids[part], positions[part])
            if reason:
                self._reason = self._reason or reason
                return []
            places += [(sequence, self._done[sequence] + column) for column in range(count)]
            self._ends.append((sequence, self._done[sequence] + count))
        for sequence, done in self._ends:
            self._done[sequence] = done
        return places

    def only_next(self, logits: Tensor) -> Tensor:
        """Return logits [requests, vocabulary] of the last pass in which only the next given token is possible."""
        if not self._ends:
            return logits
        if len(logits) != len(self._ends):
            self._reason = self._reason or f"logits of {len(logits)} tokens, expected one for each of its requests"
            return logits
        chosen = torch.full_like(logits, -torch.inf)
        for row, (sequence, position) in enumerate(self._ends):
            # Behind the last token vLLM chooses one more, which it does not run.
            given = self._sequences[sequence][min(position, len(self._sequences[sequence]) - 1)]
            chosen[row, given] = 0
        return chosen

    def check(self) -> None:
        """Raise ModelError unless all given tokens were run, each once, and no others."""
        if self._reason:
            raise ModelError(f"vLLM ran other tokens than the given ones: {self._reason}")
        for number, (done, ids) in enumerate(zip(self._done, self._sequences, strict=True)):
            if done != len(ids):
                raise ModelError(f"vLLM ran {done} tokens of sequence {number}, expected its {len(ids)}")

    def _why_not_next(self, sequence: int, ids: Sequence[int], positions: Sequence[int]) -> str:
        if not 0 <= sequence < len(self._sequences):
            return "a request that is none of the capture"
        done, whole = self._done[sequence], self._sequences[sequence]
        expected = whole[done : done + len(ids)]
        if list(ids) != expected or list(positions) != list(range(done, done + len(ids))):
            return (
                f"sequence {sequence}: found ids {list(ids)[:4]} at position {positions[0] if positions else None}, "
                f"expected {expected[:4]} at position {done}"
            )
        num_read = len(whole) - self._num_decoded
        if done + len(ids) > num_read and len(ids) != 1:
            return f"sequence {sequence}: {len(ids)} tokens in a forward pass, expected 1 from position {num_read} on"
        return ""
