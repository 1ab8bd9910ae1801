import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import build_tokenizer

from aqnpipe.generation.stop_text import StopText

TOKENIZER = build_tokenizer()
TEXT = "Question:"


class Counting:
    """A tokenizer that counts how often it decodes more than one token."""

    def __init__(self):
        self.calls = 0

    def decode(self, token_ids, **settings):
        self.calls += len(token_ids) > 1
        return TOKENIZER.decode(token_ids, **settings)


def first_complete(stop, token_ids):
    return next((n for n in range(len(token_ids) + 1) if stop.is_complete(token_ids[:n])), None)


@given(before=st.text("ab Question:#\n1", max_size=30), after=st.text("ab :\n", max_size=5))
@settings(deadline=None)
def test_the_first_token_that_completes_the_text_is_detected(before, after):
    token_ids = TOKENIZER(f"{before}{TEXT}{after}")["input_ids"]
    expected = next(n for n in range(len(token_ids) + 1) if TEXT in TOKENIZER.decode(token_ids[:n]))
    assert first_complete(StopText(TOKENIZER, TEXT), token_ids) == expected


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
@settings(deadline=None)
def test_no_response_without_the_text_ends(token_ids):
    stop = StopText(TOKENIZER, ":")
    decoded = [TOKENIZER.decode(token_ids[:n], skip_special_tokens=True) for n in range(len(token_ids) + 1)]
    assert first_complete(stop, token_ids) == next((n for n, text in enumerate(decoded) if ":" in text), None)


def test_only_tokens_that_may_complete_the_text_are_decoded_in_context():
    tokenizer = Counting()
    stop = StopText(tokenizer, TEXT)
    words = TOKENIZER("Tom has 5 apples . Question Question")["input_ids"]
    assert first_complete(stop, words) is None
    assert tokenizer.calls == 0
    assert first_complete(stop, TOKENIZER("a: Question:")["input_ids"]) is not None
    assert tokenizer.calls == 2


def test_an_empty_text_is_a_bug():
    with pytest.raises(ValueError, match="this is a bug"):
        StopText(TOKENIZER, "")
