"""Replacements in the texts of files fail where the text is not as expected."""

import pytest
from replacing import replace_in, replaced, substituted


def test_what_is_there_as_often_as_expected_is_replaced(tmp_path):
    assert replaced("a b a", "a", "c", times=2) == "c b c"
    assert substituted(b"x1 y", rb"x\d", b"z") == b"z y"
    (tmp_path / "file").write_text("a: 1\nb: 2\n")
    replace_in(tmp_path / "file", ("a: 1", "a: 3"), ("b: 2", "b: 4"))
    assert (tmp_path / "file").read_text() == "a: 3\nb: 4\n"


@pytest.mark.parametrize("text", ["", "a a"])
def test_a_replacement_of_nothing_or_of_more_than_expected_fails(text, tmp_path):
    with pytest.raises(AssertionError, match=r"expected 1: 'a'"):
        replaced(text, "a", "b")
    with pytest.raises(AssertionError, match=r"expected 1: 'a'"):
        substituted(text, "a", "b")
    (tmp_path / "file").write_text(text)
    with pytest.raises(AssertionError, match=r"expected 1: 'a'"):
        replace_in(tmp_path / "file", ("a", "b"))
    assert (tmp_path / "file").read_text() == text
