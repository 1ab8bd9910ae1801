"""Ends a vLLM request at a stop text, inside the worker.

vLLM detects its own stop strings in the client process, which then cancels the request. How many tokens the worker
computes until then depends on timing, and so does the noise of all other requests in the batch. This processor forces
the end token in the worker instead.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from aqnpipe.generation.backend import END_TOKEN, STOP_TEXTS, StopText
from aqnpipe.models.loading import load_tokenizer


class StopTextProcessor(AdapterLogitsProcessor):
    """Forces the end token after any stop text of a request."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._folder = vllm_config.model_config.model
        self._stop_texts: dict[str, StopText] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: the processor changes greedy choices too."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], Tensor], Tensor] | None:
        """Return the function that changes the logits of a request; None if the request has no stop text."""
        arguments = params.extra_args or {}
        stops, end_token = [self._stop_text(text) for text in arguments.get(STOP_TEXTS, ())], arguments.get(END_TOKEN)
        if not stops:
            return None

        def force_end(output_ids: list[int], logits: Tensor) -> Tensor:
            if any(stop.is_complete(output_ids) for stop in stops):
                logits.fill_(-torch.inf)[end_token] = 0
            return logits

        return force_end

    def _stop_text(self, text: str) -> StopText:
        if text not in self._stop_texts:
            self._stop_texts[text] = StopText(load_tokenizer(Path(self._folder)), text)
        return self._stop_texts[text]
