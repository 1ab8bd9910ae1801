"""Effects by segment, as the page shows them."""

from types import SimpleNamespace

import pytest

from aqnpipe.artifacts.comparisons import ClaimsFile, SegmentEffect
from aqnpipe.report.numbers import MISSING, points
from aqnpipe.report.stage import segment_figure
from aqnpipe.report.words import load_words

CLAIMS = SimpleNamespace(
    claims=[SimpleNamespace(comparison_id=name, claim=f"claim {name}", claim_zh=None) for name in "ab"]
)


def effect(by, segment, difference, clusters=None):
    low, high = difference - 0.05, difference + 0.05
    return SegmentEffect(
        comparison_id="a", by=by, segment=segment, num_questions=40, num_clusters=clusters, difference=difference,
        ci_low=low, ci_high=high,
    )  # fmt: skip


@pytest.mark.parametrize(("language", "by"), [("en", "Steps of the worked answer"), ("zh", "解答步数")])
def test_effects_by_segment_are_pictures_and_a_table(language, by):
    segments = (effect("kind", "+-", 0.1), effect("kind", "<b>", -0.02), effect("steps", "2", 0.04, clusters=7))
    claims = SimpleNamespace(claims=CLAIMS.claims, segments=segments, alpha=0.05)
    figure = segment_figure(claims, load_words(language))
    assert "claim a" in figure.caption
    assert "95" in figure.caption
    (table,) = figure.tables
    assert [row.cells[1:] for row in table.rows] == [
        ("+-", "40", MISSING, "+10.0", load_words(language).span(0.05, 0.15, points)),
        ("<b>", "40", MISSING, "−2.0", load_words(language).span(-0.07, 0.03, points)),
        ("2", "40", "7", "+4.0", load_words(language).span(-0.01, 0.09, points)),
    ]
    kinds, steps = figure.groups[0].panels
    assert steps.title == by
    assert kinds.svg.count("aqn-mark") + kinds.svg.count("<title>") > 0
    assert "<b>" not in kinds.svg


def test_without_segments_there_is_no_figure():
    assert (
        segment_figure(ClaimsFile(alpha=0.05, power=0.8, family_size=0, families=(), claims=()), load_words("en"))
        is None
    )
