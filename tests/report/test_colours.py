"""Colours are accessible: enough contrast, and colours that can be confused never share a dash pattern."""

import itertools
import re
from importlib import resources

import numpy as np
import pytest

from aqnpipe.report.claims import VERDICT_SYMBOLS
from aqnpipe.report.markup import NUM_SERIES, palette_position, series_dash

CSS = (resources.files("aqnpipe.report") / "templates" / "report.css").read_text()
SCHEMES = dict(zip(("light", "dark"), re.findall(r":root\{(.*?)\}", CSS, re.DOTALL), strict=False))

# Machado, Oliveira & Fernandes 2009, severity 1, on linear RGB.
DEFICIENCIES = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def colours(scheme):
    found = dict(re.findall(r"--(\w+):(#[0-9a-f]{3,6})", SCHEMES[scheme]))
    return {name: linear(value) for name, value in found.items()}


def linear(text):
    digits = text[1:] if len(text) == 7 else "".join(2 * digit for digit in text[1:])
    srgb = np.array([int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)])
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def contrast(first, second):
    weights = np.array([0.2126, 0.7152, 0.0722])
    light, dark = sorted((float(weights @ first), float(weights @ second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def lab(rgb):
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = matrix @ rgb / np.array([0.9505, 1.0, 1.089])
    fx, fy, fz = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_text_have_enough_contrast(scheme):
    found = colours(scheme)
    for name in (f"c{n}" for n in range(NUM_SERIES + 1)):
        assert contrast(found[name], found["card"]) >= 3, name
    for name in ("ink", "muted", "link", "good", "bad", "open", "void"):
        assert contrast(found[name], found["card"]) >= 4.5, name
        assert contrast(found[name], found["page"]) >= 4.5, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("deficiency", [None, *DEFICIENCIES])
def test_two_series_differ_in_colour_or_in_dashes(scheme, deficiency):
    found = colours(scheme)
    matrix = np.array(DEFICIENCIES[deficiency]) if deficiency else np.eye(3)
    seen = {n: lab(np.clip(matrix @ found[f"c{palette_position(n)}"], 0, 1)) for n in range(NUM_SERIES + 1)}
    for first, second in itertools.combinations(seen, 2):
        different_dashes = series_dash(first) != series_dash(second)
        assert different_dashes or np.linalg.norm(seen[first] - seen[second]) > 8, (first, second)


def test_series_repeat_only_after_all_combinations():
    looks = [(palette_position(n), tuple(series_dash(n))) for n in range(1, 33)]
    assert len(set(looks)) == 32


def test_verdicts_have_a_symbol_besides_their_colour():
    assert len(set(VERDICT_SYMBOLS.values())) == len(VERDICT_SYMBOLS) >= 4
