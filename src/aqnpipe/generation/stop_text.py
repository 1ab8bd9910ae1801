"""Detects a stop text in the tokens of a response while they are generated."""

from collections.abc import Sequence
from typing import Any

STOP_TEXTS, END_TOKEN = "aqnpipe_stop_texts", "aqnpipe_end_token"
"""Keys of the extra arguments of a vLLM request: the stop texts, and the token to force behind any of them."""


class StopText:
    """Detects `text` in a response; decodes the response only if its last token may complete the text."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        if not text:
            raise ValueError("found an empty stop text, expected at least one character; this is a bug")
        self._tokenizer, self._text = tokenizer, text
        self._may_complete: dict[int, bool] = {}

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token completes the text."""
        if not token_ids:
            return False
        last = token_ids[-1]
        if last not in self._may_complete:
            self._may_complete[last] = self._text[-1] in self._tokenizer.decode([last])
        # Each token has at least one character, so tokens before the last len(text) cannot be part of the text.
        return self._may_complete[last] and self._text in self._tokenizer.decode(
            list(token_ids[-len(self._text) :]), skip_special_tokens=True
        )
