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

from aqnpipe.generation.stop_text import END_TOKEN, STOP_TEXT, StopText
from aqnpipe.models.loading import load_tokenizer


class StopTextProcessor(AdapterLogitsProcessor):
    """Forces the end token after the stop text of a request, if the request has one."""

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
        text = arguments.get(STOP_TEXT)
        if text is None:
            return None
        if text not in self._stop_texts:
            self._stop_texts[text] = StopText(load_tokenizer(Path(self._folder)), text)
        stop, end_token = self._stop_texts[text], arguments[END_TOKEN]

        def force_end(output_ids: list[int], logits: Tensor) -> Tensor:
            if stop.is_complete(output_ids):
                logits.fill_(-torch.inf)[end_token] = 0
            return logits

        return force_end
