from aqnpipe.cli.terminal import aligned


def test_columns_are_as_wide_as_their_longest_cell_and_lines_have_no_blanks_at_their_end():
    assert aligned([("a", "bb", ""), ("ccc", "d", "e")]) == ["a    bb", "ccc  d   e"]
