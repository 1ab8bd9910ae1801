"""A text at which a response ends, seen in its tokens while they are generated."""

from collections.abc import Sequence
from typing import Any

STOP_TEXT, END_TOKEN = "aqnpipe_stop_text", "aqnpipe_end_token"
"""Names under which a request to vLLM carries the text, and the token that then follows."""


class StopText:
    """Tells whether a response has come to `text`; its tokens are only decoded where one may complete it."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        if not text:
            raise ValueError("a stop text has a character, found none; this is a bug")
        self._tokenizer, self._text = tokenizer, text
        self._may_complete: dict[int, bool] = {}

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last of these tokens completes the text."""
        if not token_ids:
            return False
        last = token_ids[-1]
        if last not in self._may_complete:
            self._may_complete[last] = self._text[-1] in self._tokenizer.decode([last])
        # A token is a character or more, so that earlier ones have no part in it.
        return self._may_complete[last] and self._text in self._tokenizer.decode(
            list(token_ids[-len(self._text) :]), skip_special_tokens=True
        )
