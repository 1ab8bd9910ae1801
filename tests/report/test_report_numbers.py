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
        (numbers.p_value(0.0004), "<\u00a00.001"),
        (numbers.p_value(0.0126), "0.013"),
        (numbers.p_value(0.5), "0.50"),
        (numbers.scale(0.0499812), "0.04998"),
        (numbers.metric(float("nan")), "–"),
        (numbers.count(1319), "1,319"),
        (numbers.noise_level(0.05), "5\u00a0%"),
        (numbers.confidence(0.95), "95\u00a0%"),
        (numbers.metric(-0.0123456), "−0.01235"),
        (numbers.span(0.083, 0.161, load_words("en"), numbers.points), "+8.3 to +16.1"),
        (numbers.span(0.083, 0.161, load_words("zh"), numbers.percent), "8.3 至 16.1"),
        (numbers.span(None, 0.161, load_words("en"), numbers.points), "–"),
    ],
)
def test_formats(text, expected):
    assert text == expected
