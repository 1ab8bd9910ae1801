"""Generation with transformers, in this process, on the given model object."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aqnpipe.errors import ModelError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.decoding import decode
from aqnpipe.generation.kv_cache import BufferPool
from aqnpipe.generation.stop_text import StopText


class TransformersBackend:
    """Batched generation by the model's own forward; the model and the global random state stay unchanged."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None or tokenizer.pad_token_id is None:
            raise ModelError("the tokenizer has no end token or no padding token; batched generation needs both")
        self._model, self._tokenizer = model, tokenizer
        self._pool = BufferPool()
        self._end_token: int = tokenizer.eos_token_id
        self._padding_token: int = tokenizer.pad_token_id

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, share_prefix: bool = False
    ) -> list[Completion]:
        """Return one completion per prompt, in order.

        With `share_prefix` the common prefix of all prompts may be computed once for all rows. Noise on the prefix
        would then be the same in all rows.
        """
        if not prompts:
            return []
        is_finished = self._is_finished(sampling.stop_text)
        draws = None if sampling.temperature is None else _Draws(sampling, len(prompts), self._model.device)
        was_training = self._model.training
        self._model.eval()
        try:
            responses = decode(
                self._model,
                prompts,
                _most_probable if draws is None else draws,
                is_finished=is_finished,
                padding_token=self._padding_token,
                limit=sampling.max_response_tokens,
                pool=self._pool,
                share_prefix=share_prefix,
            )
        finally:
            self._model.train(was_training)
        completions = [Completion(ids, "stop" if is_finished(ids) else "length") for ids in responses]
        if draws is None or not sampling.log_probabilities:
            return completions
        return [
            replace(completion, log_probabilities=log_probabilities)
            for completion, log_probabilities in zip(completions, draws.log_probabilities(), strict=True)
        ]

    def _is_finished(self, stop_text: str | None) -> Callable[[Sequence[int]], bool]:
        end_token = self._end_token
        if stop_text is None:
            return lambda response: response[-1] == end_token
        stop = StopText(self._tokenizer, stop_text)
        return lambda response: response[-1] == end_token or stop.is_complete(response)


def _most_probable(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits.argmax(dim=-1)


class _Draws:
    """Draws tokens from the softmax of logits: `argmax_i p_i/e_i`, e_i ~ Exp(1).

    torch.multinomial computes the same for one draw. Here each row of the whole batch has its own e, whichever rows are
    present, so that a row's draws do not depend on the other rows.
    """

    def __init__(self, sampling: Sampling, rows: int, device: torch.device) -> None:
        if sampling.temperature is None:
            raise ValueError("drawing tokens needs a temperature, found None; this is a bug")
        self._temperature = sampling.temperature
        self._num_rows = rows if sampling.num_rows is None else sampling.num_rows
        self._first_row = sampling.first_row
        self._generator = torch.Generator(device=device).manual_seed(sampling.seed)
        self._keeps_log_probabilities = sampling.log_probabilities
        self._chosen: list[tuple[Sequence[int], Tensor]] = []

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Return a token per row, drawn by the logits [rows, vocabulary]."""
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
        """Return the log-probabilities of the drawn tokens, row by row."""
        found: dict[int, list[float]] = {}
        for rows, values in self._chosen:
            for row, value in zip(rows, values.tolist(), strict=True):
                found.setdefault(row, []).append(value)
        return [found[row] for row in sorted(found)]
