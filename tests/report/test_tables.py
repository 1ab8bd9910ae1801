"""Tables from rows and a specification of columns, and what of a section is exported."""

import polars as pl
import pytest

from aqnpipe.report.tables import Figure, Part, Section, table_of
from aqnpipe.report.words import load_words

WORDS = load_words("en", {1.0: "fp8"})
ROW = {"arm": "E5", "noise_level": 1.0, "mean": 0.705, "ci_low": -0.012, "ci_high": 0.3, "num": 1319, "problem": None}


@pytest.mark.parametrize(
    ("column", "header", "cell"),
    [
        ("arm", "arm", "E5"),
        ("noise=noise_level:level", "noise", "fp8"),
        ("mean:points", "mean %", "70.5"),
        ("difference=mean:signed_points", "difference, points", "+70.5"),
        ("interval=ci:spans_signed_points", "interval", "−1.2 to +30.0"),
        ("questions=num:count", "questions", "1,319"),
        ("loss=mean:.4f", "loss, nats", "0.7050"),
        ("problem:count", "problem", "–"),
    ],
)
def test_a_column_is_a_header_a_field_and_a_form(column, header, cell):
    table = table_of("name", "caption", [ROW], column, WORDS)
    assert (table.headers, table.rows[0].cells) == ((header,), (cell,))


def test_a_form_that_ends_with_a_dot_is_a_key_of_the_catalogue():
    (row,) = table_of("name", "", pl.DataFrame({"verdict": ["not_shown"]}), "verdict:verdict.", WORDS).rows
    assert row.cells == (WORDS("verdict.not_shown"),)


def test_rows_say_what_needs_attention_and_where_they_lead():
    (row,) = table_of("name", "", [ROW | {"alert": True, "link": "run-1", "anchor": "here"}], "arm", WORDS).rows
    assert (row.alert, row.link, row.anchor) == (True, "run-1", "here")


@pytest.mark.parametrize("column", ["arm:no_such_form", "no_such_header=arm", "arm=no_such_field"])
def test_a_column_that_does_not_exist_is_an_error(column):
    with pytest.raises((KeyError, ValueError)):
        table_of("name", "", [ROW], column, WORDS)


def test_an_export_has_folded_tables_too_under_the_name_of_their_section_or_their_own():
    first, second = (table_of(name, "", [ROW], "arm", WORDS) for name in ("first", "second"))
    figure = Figure("", (), ())
    inner = Part("folded", (Part("table", second, stem="loss-1"), Part("table", first, title="a run")), "more")
    section = Section("faults", (Part("text", "words"), Part("table", first), inner, Part("figure", figure)))
    assert list(section.exported()) == [("faults", first), ("loss-1", second), ("faults", figure)]
