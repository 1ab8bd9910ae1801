"""Generation with transformers, in this process and on the given model object itself."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from aqnpipe.errors import ModelError
from aqnpipe.generation.backend import Completion, Sampling


class TransformersBackend:
    """Batched generation by `model.generate`; prompts are left-padded, global random state is left alone."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None or tokenizer.pad_token_id is None:
            raise ModelError("the tokenizer needs an end token and a padding token for batched generation")
        self._model = model
        self._end_token: int = tokenizer.eos_token_id
        self._padding_token: int = tokenizer.pad_token_id

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """Return one completion per prompt, in order."""
        if not prompts:
            return []
        input_ids, attention_mask = self._left_padded(prompts)
        draws = self._draws(sampling, len(prompts))
        was_training, preferences = self._model.training, self._model.generation_config
        self._model.eval()
        # What a model's folder suggests (Qwen2.5: a repetition penalty) would fill in what `Sampling` leaves open.
        self._model.generation_config = GenerationConfig()
        try:
            with torch.no_grad():
                output = self._model.generate(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    generation_config=self._generation_config(sampling),
                    logits_processor=LogitsProcessorList([] if draws is None else [draws]),
                )
        finally:
            self._model.generation_config = preferences
            self._model.train(was_training)
        completions = [self._completion(row) for row in output[:, input_ids.shape[1] :].tolist()]
        if draws is None or not sampling.log_probabilities:
            return completions
        rows = draws.log_probabilities()
        return [
            replace(one, log_probabilities=row[: len(one.token_ids)])
            for one, row in zip(completions, rows, strict=True)
        ]

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        device = self._model.device
        ids = torch.full((len(prompts), longest), self._padding_token, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
            mask[row, longest - len(prompt) :] = 1
        return ids.to(device), mask.to(device)

    def _generation_config(self, sampling: Sampling) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=sampling.max_response_tokens,
            pad_token_id=self._padding_token,
            eos_token_id=self._end_token,
            use_cache=True,
            disable_compile=True,
            # `_ShareOfDraws` decides where tokens are sampled.
            do_sample=False,
        )

    def _draws(self, sampling: Sampling, rows: int) -> "_ShareOfDraws | None":
        if sampling.temperature is None:
            return None
        generator = torch.Generator(device=self._model.device).manual_seed(sampling.seed)
        return _ShareOfDraws(sampling, rows, sampling.temperature, generator)

    def _completion(self, token_ids: list[int]) -> Completion:
        if self._end_token in token_ids:
            return Completion(token_ids[: token_ids.index(self._end_token) + 1], "stop")
        return Completion(token_ids, "length")


class _ShareOfDraws(LogitsProcessor):
    """Turns logits into scores whose largest is a draw from their softmax: `argmax_i p_i/e_i`, e_i ~ Exp(1).

    That is what torch.multinomial computes for one draw, here for a share of the rows of a larger batch.
    """

    def __init__(self, sampling: Sampling, rows: int, temperature: float, generator: torch.Generator) -> None:
        self._temperature = temperature
        self._num_rows = rows if sampling.num_rows is None else sampling.num_rows
        self._share = slice(sampling.first_row, sampling.first_row + rows)
        self._generator = generator
        self._keeps_log_probabilities = sampling.log_probabilities
        self._chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [rows, vocabulary] of the next token; `input_ids` are those so far."""
        draws = torch.empty(self._num_rows, scores.shape[-1], dtype=scores.dtype, device=scores.device)
        draws.exponential_(generator=self._generator)
        probabilities = torch.softmax(scores / self._temperature, dim=-1)
        races = probabilities / draws[self._share]
        if self._keeps_log_probabilities:
            self._chosen.append(probabilities.gather(-1, races.argmax(dim=-1, keepdim=True)).log())
        return races

    def log_probabilities(self) -> list[list[float]]:
        """Return those of the drawn tokens, row by row; those behind a row's end have no meaning."""
        rows: list[list[float]] = torch.cat(self._chosen, dim=-1).tolist()
        return rows
