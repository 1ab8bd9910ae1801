import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqnpipe.report.words import clipped, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, with 5\u00a0% − ± é 漢字 ✓\n\tnext", "plain, with 5\u00a0% − ± é 漢字 ✓\n\tnext"),
        ("\x1b[31mred\x07", "⟨U+001B⟩[31mred⟨U+0007⟩"),
        ("a\u202eb\u2066c\u200f", "a⟨U+202E⟩b⟨U+2066⟩c⟨U+200F⟩"),
        ("\x00\r\ufeff\ufffe\ud800\ue000\u2028", "⟨U+0000⟩⟨U+000D⟩⟨U+FEFF⟩⟨U+FFFE⟩⟨U+D800⟩⟨U+E000⟩⟨U+2028⟩"),
        ("\u00ad\U000e0041", "⟨U+00AD⟩⟨U+E0041⟩"),
    ],
)
def test_invisible_characters_are_shown_as_codes(text, shown):
    assert visible(text) == shown


@given(st.text(st.characters(codec=None)))
def test_no_invisible_character_is_left_and_repeating_changes_nothing(text):
    shown = visible(text)
    unseen = [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")]
    assert set(unseen) <= {"\n", "\t"}
    assert visible(shown) == shown
    shown.encode("utf-8")


def test_long_text_is_cut_and_says_by_how_much():
    assert clipped("abcdef", 4) == ("abcd", 2)
    assert clipped("abc", 4) == ("abc", 0)
