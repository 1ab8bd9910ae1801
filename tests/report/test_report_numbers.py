import pytest

from aqnpipe.report import numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (numbers.percent(0.70499), "70.5"),
        (numbers.percent(None), "–"),
        (numbers.points(-0.0243), "−2.4"),
        (numbers.points(-0.00001), "+0.0"),
        (numbers.p_value(0.0004), "< 0.001"),
        (numbers.p_value(0.0126), "0.013"),
        (numbers.p_value(0.5), "0.50"),
        (numbers.scale(0.0499812), "0.04998"),
        (numbers.metric(float("nan")), "–"),
        (numbers.count(1319), "1,319"),
        (numbers.noise_level(0.05), "5\u00a0%"),
    ],
)
def test_formats(text, expected):
    assert text == expected
