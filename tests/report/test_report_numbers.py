import pytest

from aqnpipe.report import numbers
from aqnpipe.report.words import load_words


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
