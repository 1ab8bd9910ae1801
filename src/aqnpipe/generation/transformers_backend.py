"""Generation with transformers, in this process and on the given model object itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from aqnpipe.errors import ModelError
from aqnpipe.generation.backend import Completion, Sampling


class TransformersBackend:
    """Batched generation by `model.generate`; prompts are left-padded, global random state is left as it was."""

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
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=self._cuda_devices()):
                torch.manual_seed(sampling.seed)
                output = self._model.generate(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    generation_config=self._generation_config(sampling),
                )
        finally:
            self._model.train(was_training)
        return [self._completion(row) for row in output[:, input_ids.shape[1] :].tolist()]

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
        chosen: dict[str, Any] = {"do_sample": False}
        if sampling.temperature is not None:
            chosen = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(
            max_new_tokens=sampling.max_response_tokens,
            pad_token_id=self._padding_token,
            eos_token_id=self._end_token,
            use_cache=True,
            disable_compile=True,
            **chosen,
        )

    def _completion(self, token_ids: list[int]) -> Completion:
        if self._end_token in token_ids:
            return Completion(token_ids[: token_ids.index(self._end_token) + 1], "stop")
        return Completion(token_ids, "length")

    def _cuda_devices(self) -> list[torch.device]:
        return [self._model.device] if self._model.device.type == "cuda" else []
