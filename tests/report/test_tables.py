"""Tables from rows and a specification of columns, forms of numbers, and what of a section is exported."""

import polars as pl
import pytest

from aqnpipe.report import numbers
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (numbers.percent(0.70499), "70.5"),
        (numbers.percent(None), "–"),
        (numbers.points(-0.0243), "−2.4"),
        (numbers.points(-0.00001), "+0.0"),
        (numbers.p_value(0.0004), "4.0e−4"),
        (numbers.p_value(2.345e-12), "2.3e−12"),
        (numbers.p_value(0.0), "<\u00a01e−15"),
        (numbers.p_value(0.0126), "0.013"),
        (numbers.p_value(0.5), "0.50"),
        (numbers.scale(0.0499812), "0.04998"),
        (numbers.metric(float("nan")), "–"),
        (numbers.count(1319), "1,319"),
        (numbers.level(0.05), "5\u00a0%"),
        (numbers.level(0.95), "95\u00a0%"),
        (numbers.metric(-0.0123456), "−0.01235"),
        (load_words("en").span(0.083, 0.161, numbers.points), "+8.3 to +16.1"),
        (load_words("zh").span(0.083, 0.161, numbers.percent), "8.3 至 16.1"),
        (load_words("en").span(None, 0.161, numbers.points), "–"),
    ],
)
def test_formats(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        (0.705, "percent", "70.5\u00a0%"),
        (-0.674, "percent", "−67.4\u00a0%"),
        (0.9, "level", "90\u00a0%"),
        (0.0243, "points", "2.4"),
        (0.0623, "points_2", "6.23"),
        (-0.0243, "signed_points", "−2.4"),
        (-8.7187, "signed_2", "−8.72"),
        (-0.01234, "signed_nats", "−0.0123"),
        (0.0004, "p", "p\u00a0=\u00a04.0e−4"),
        (1e-20, "p", "p\u00a0<\u00a01e−15"),
        (0.18, "p", "p\u00a0=\u00a00.18"),
        (1319, "count", "1,319"),
        (1, "count seed|seeds", "1 seed"),
        (2, "count seed|seeds", "2 seeds"),
        (-1.582, ".4g", "−1.582"),
        ("a-b", "", "a-b"),
    ],
)
def test_forms_of_the_catalogue(value, form, expected):
    assert numbers.formatted(value, form) == expected
