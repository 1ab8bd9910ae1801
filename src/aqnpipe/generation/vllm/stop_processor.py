"""Ends a request of vLLM at a text, inside the worker.

vLLM's own stop strings are seen by the process that asks, which then cancels the request: how many tokens are computed
meanwhile depends on timing, and with them the noise of all others in the batch. Here the end token is forced instead.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from aqnpipe.generation.stop_text import END_TOKEN, STOP_TEXT, StopText
from aqnpipe.models.loading import load_tokenizer


class EndsAtText(AdapterLogitsProcessor):
    """Forces the end token behind the stop text of a request, if it has one."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._folder = vllm_config.model_config.model
        self._known: dict[str, StopText] = {}

    def is_argmax_invariant(self) -> bool:
        """Tell vLLM that greedy choice needs this too."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], Tensor], Tensor] | None:
        """Return what changes the logits of a request; None if it has no stop text."""
        requested = params.extra_args or {}
        text = requested.get(STOP_TEXT)
        if text is None:
            return None
        if text not in self._known:
            self._known[text] = StopText(load_tokenizer(Path(self._folder)), text)
        stop, end_token = self._known[text], requested[END_TOKEN]

        def force_end(output_ids: list[int], logits: Tensor) -> Tensor:
            if stop.is_complete(output_ids):
                logits.fill_(-torch.inf)[end_token] = 0
            return logits

        return force_end
