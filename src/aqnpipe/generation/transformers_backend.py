"""Generation with transformers, in this process and on the given model object itself."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aqnpipe.errors import ModelError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.decoding import decode
from aqnpipe.generation.kv_cache import BatchMemory
from aqnpipe.generation.stop_text import StopText


class TransformersBackend:
    """Batched generation by the model's own forward; nothing of the model or of global random state is changed."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None or tokenizer.pad_token_id is None:
            raise ModelError("the tokenizer needs an end token and a padding token for batched generation")
        self._model, self._tokenizer = model, tokenizer
        self._memory = BatchMemory()
        self._end_token: int = tokenizer.eos_token_id
        self._padding_token: int = tokenizer.pad_token_id

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, reads_beginning_once: bool = False
    ) -> list[Completion]:
        """Return one completion per prompt, in order.

        What all prompts begin with may be read once for all rows with `reads_beginning_once`: they then have its noise
        in common, if there is any.
        """
        if not prompts:
            return []
        is_over = self._is_over(sampling.stop_text)
        draws = None if sampling.temperature is None else _Draws(sampling, len(prompts), self._model.device)
        was_training = self._model.training
        self._model.eval()
        try:
            responses = decode(
                self._model,
                prompts,
                _most_probable if draws is None else draws,
                is_over=is_over,
                padding_token=self._padding_token,
                limit=sampling.max_response_tokens,
                memory=self._memory,
                reads_beginning_once=reads_beginning_once,
            )
        finally:
            self._model.train(was_training)
        completions = [Completion(one, "stop" if is_over(one) else "length") for one in responses]
        if draws is None or not sampling.log_probabilities:
            return completions
        return [
            replace(one, log_probabilities=row) for one, row in zip(completions, draws.log_probabilities(), strict=True)
        ]

    def _is_over(self, stop_text: str | None) -> Callable[[Sequence[int]], bool]:
        end_token = self._end_token
        if stop_text is None:
            return lambda response: response[-1] == end_token
        stop = StopText(self._tokenizer, stop_text)
        return lambda response: response[-1] == end_token or stop.is_complete(response)


def _most_probable(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits.argmax(dim=-1)


class _Draws:
    """Draws tokens from the softmax of logits: `argmax_i p_i/e_i`, e_i ~ Exp(1).

    That is what torch.multinomial computes for one draw, here for some rows of a batch, each of which has numbers of
    its own in it, whatever other rows there are.
    """

    def __init__(self, sampling: Sampling, rows: int, device: torch.device) -> None:
        if sampling.temperature is None:
            raise ValueError("tokens are drawn at a temperature, found None; this is a bug")
        self._temperature = sampling.temperature
        self._num_rows = rows if sampling.num_rows is None else sampling.num_rows
        self._first_row = sampling.first_row
        self._generator = torch.Generator(device=device).manual_seed(sampling.seed)
        self._keeps_log_probabilities = sampling.log_probabilities
        self._chosen: list[tuple[Sequence[int], Tensor]] = []

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Return a token for each of the rows, by their logits [rows, vocabulary]."""
        logits = logits.float()
        draws = torch.empty(self._num_rows, logits.shape[-1], device=logits.device)
        draws.exponential_(generator=self._generator)
        probabilities = torch.softmax(logits / self._temperature, dim=-1)
        places = torch.tensor(rows, device=logits.device) + self._first_row
        tokens = (probabilities / draws[places]).argmax(dim=-1)
        if self._keeps_log_probabilities:
            self._chosen.append((list(rows), probabilities.gather(-1, tokens[:, None])[:, 0].log()))
        return tokens

    def log_probabilities(self) -> list[list[float]]:
        """Return those of the drawn tokens, row by row."""
        found: dict[int, list[float]] = {}
        for rows, values in self._chosen:
            for row, value in zip(rows, values.tolist(), strict=True):
                found.setdefault(row, []).append(value)
        return [found[row] for row in sorted(found)]
