"""Passes of the policy over fixed tokens, without noise: log-probabilities of the drawn tokens in several set-ups.

They leave no trace in the run: no gradient, no draw from a generator (so no dropout), no entry in a receipt.
`logits_to_keep` is a tensor of places in all of them; the run's audit takes a forward with a number of places for one
of the trainer. All of them raise NotMeasurableError if a log-probability is not finite.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import selective_log_softmax

from aqnpipe.generation.decoding import decode
from aqnpipe.generation.kv_cache import BufferPool


class NotMeasurableError(Exception):
    """What was drawn, or its log-probability, is not that of a sound run; whether the run is one, its audit decides."""


@dataclass(frozen=True)
class Drawn:
    """A prompt, the tokens that were drawn behind it, and their log-probabilities under the sampler."""

    prompt: list[int]
    response: list[int]
    sampled: list[float]


def sequences_of(batch: Mapping[str, Tensor], most: int) -> list[Drawn]:
    """Return the first sequences of one of TRL's micro-batches, without padding."""
    found = []
    for row in range(min(most, len(batch["prompt_ids"]))):
        prompt, response = batch["prompt_mask"][row].bool(), batch["completion_mask"][row].bool()
        found.append(
            Drawn(
                batch["prompt_ids"][row][prompt].tolist(),
                batch["completion_ids"][row][response].tolist(),
                batch["sampling_per_token_logps"][row][response].tolist(),
            )
        )
    return found


def masked(values: Tensor, batch: Mapping[str, Tensor], most: int) -> Tensor:
    """Return values [rows, tokens] at the tokens of `sequences_of`, flat, in float64 on the CPU.

    Raises NotMeasurableError if one of them is not finite.
    """
    mask = batch["completion_mask"][:most].bool()
    return _finite(values[:most][mask].double().cpu())


class Passes:
    """Passes of one policy; `forwards` counts them."""

    def __init__(self, network: Any, temperature: float, *, end_token: int, padding_token: int, limit: int) -> None:
        """`limit`: the most tokens of a response, with which the sampler ended it."""
        self.network = network
        self.forwards = 0
        self._temperature = temperature
        self._end_token, self._padding_token, self._limit = end_token, padding_token, limit

    def in_one_pass(self, sequences: Sequence[Drawn]) -> Tensor:
        """Return log-probabilities of the sequences in one pass, padding behind them: flat, float64, on the CPU."""
        ids, mask = self._padded(sequences)
        first = min(len(sequence.prompt) for sequence in sequences) - 1
        scored = self._scored(ids, mask, ids.shape[1] - first - 1)
        rows = [
            values[len(sequence.prompt) - 1 - first :][: len(sequence.response)]
            for values, sequence in zip(scored, sequences, strict=True)
        ]
        return _finite(torch.cat(rows).double().cpu())

    def micro_batch(self, batch: Mapping[str, Tensor], most: int) -> Tensor:
        """Return log-probabilities of the first `most` rows in the padded micro-batch, computed as the trainer does."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        return masked(self._scored(ids, mask, batch["completion_ids"].shape[1]), batch, most)

    def decoded(self, sequences: Sequence[Drawn]) -> Tensor:
        """Return log-probabilities of the sequences decoded again as the rollout was, with their tokens forced.

        Raises NotMeasurableError if decoding would not have ended a response where it ends.
        """
        if not all(self._ends_as_drawn(sequence.response) for sequence in sequences):
            raise NotMeasurableError("a response does not end where decoding ends")
        forced = _Forced([sequence.response for sequence in sequences], self._temperature)
        with _without_dropout(self.network):
            decode(
                self.network,
                [sequence.prompt for sequence in sequences],
                forced,
                is_finished=lambda response: response[-1] == self._end_token,
                padding_token=self._padding_token,
                limit=self._limit,
                pool=BufferPool(),
            )
        self.forwards += max(len(sequence.response) for sequence in sequences)
        return _finite(forced.log_probabilities())

    def _ends_as_drawn(self, response: Sequence[int]) -> bool:
        before, last = response[:-1], response[-1:]
        return self._end_token not in before and (last == [self._end_token] or len(response) == self._limit)

    def _padded(self, sequences: Sequence[Drawn]) -> tuple[Tensor, Tensor]:
        """Return ids and attention mask [rows, tokens] with the padding behind the responses."""
        whole = [torch.tensor(sequence.prompt + sequence.response) for sequence in sequences]
        ids = pad_sequence(whole, batch_first=True, padding_value=self._padding_token)
        mask = pad_sequence([torch.ones_like(row) for row in whole], batch_first=True)
        return ids.to(self.network.device), mask.to(self.network.device)

    def _scored(self, ids: Tensor, mask: Tensor, columns: int) -> Tensor:
        places = torch.arange(ids.shape[1] - columns - 1, ids.shape[1], device=ids.device)
        with torch.no_grad(), _without_dropout(self.network):
            output = self.network(input_ids=ids, attention_mask=mask, logits_to_keep=places, use_cache=False)
            logits = output.logits[:, :-1].float() / self._temperature
            self.forwards += 1
            scored: Tensor = selective_log_softmax(logits, ids[:, -columns:])
        return scored


class _Forced:
    """Chooses given tokens; keeps their log-probabilities, computed as the sampler does."""

    def __init__(self, responses: Sequence[Sequence[int]], temperature: float) -> None:
        self._responses, self._temperature = responses, temperature
        self._found: list[list[float]] = [[] for _ in responses]

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the next given token of every row."""
        chosen = [self._responses[row][len(self._found[row])] for row in rows]
        tokens = torch.tensor(chosen, device=logits.device)
        probabilities = torch.softmax(logits.float() / self._temperature, dim=-1).gather(-1, tokens[:, None])[:, 0]
        # What noise made likely may have probability 0 without it.
        values = probabilities.clamp_min(torch.finfo(torch.float32).tiny).log().tolist()
        for row, value in zip(rows, values, strict=True):
            self._found[row].append(value)
        return tokens

    def log_probabilities(self) -> Tensor:
        """Return the log-probabilities of all tokens, row after row, in float64."""
        return torch.tensor([value for row in self._found for value in row], dtype=torch.float64)


@contextmanager
def _without_dropout(network: Any) -> Iterator[None]:
    """Dropout would draw from the generator of the run, whose trained pass would then drop other values."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


def _finite(values: Tensor) -> Tensor:
    if not values.isfinite().all():
        raise NotMeasurableError("a log-probability is not finite")
    return values
