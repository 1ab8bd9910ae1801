"""The claims as one picture for a paper: what the page draws as a strip per claim."""

import textwrap
from collections import Counter

import altair as alt
import polars as pl

from aqnpipe.report import charts
from aqnpipe.report.charts import Panel
from aqnpipe.report.claims_view import ClaimsOverview
from aqnpipe.report.svg import INK
from aqnpipe.report.words import Words

_WIDTH, _LINE_HEIGHT, _FONT_SIZE = 380, 14, 11
_LETTERS_PER_LINE = {"en": 58, "zh": 30}


def claims_panel(overview: ClaimsOverview, comparisons: pl.DataFrame, words: Words) -> Panel | None:
    """Return the difference of every claim with its interval, in percentage points; None if none was compared.

    Claims are in the study's order. `comparisons`: as in `artifacts.comparisons.ComparisonTable`.
    """
    found = {row["comparison_id"]: row for row in comparisons.iter_rows(named=True)}
    texts = Counter(row.claim for row in overview.rows)
    drawn = [
        {
            "claim": _wrapped(row.claim if texts[row.claim] == 1 else f"{row.claim} ({row.comparison_id})", words),
            "difference": 100 * found[row.comparison_id]["difference"],
            "low": 100 * found[row.comparison_id]["ci_low"],
            "high": 100 * found[row.comparison_id]["ci_high"],
        }
        for row in overview.rows
        if row.strip is not None
    ]
    if not drawn:
        return None
    names = [row["claim"] for row in drawn]
    lines = [name.split("\n") for name in names]
    row_height = _LINE_HEIGHT * (1 + max(map(len, lines)))
    base = alt.Chart(pl.DataFrame(drawn), width=_WIDTH, height=row_height * len(drawn))
    axis = alt.Axis(
        labelColor=INK,
        ticks=False,
        domain=False,
        labelLimit=0,
        labelLineHeight=_LINE_HEIGHT,
        labelFontSize=_FONT_SIZE,
        minExtent=charts.room_for_labels((line for claim in lines for line in claim), _FONT_SIZE),
        labelExpr="split(datum.label, '\\n')",
    )
    y = alt.Y("claim:N", axis=axis).sort(names).title(None)
    title = words("claims.axis")
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(color=INK, strokeWidth=1)
    chart = alt.layer(
        zero.encode(alt.X("zero:Q").title(title)),
        base.mark_rule(strokeWidth=2, color=INK).encode(alt.X("low:Q").title(title), alt.X2("high:Q"), y),
        base.mark_point(filled=True, size=44, opacity=1, color=INK).encode(alt.X("difference:Q").title(title), y),
    )
    return charts.panel(words("claims.label"), chart, words("claims.axis"), wide=True)


def _wrapped(text: str, words: Words) -> str:
    """Break a claim into lines, because a label beyond the edge of a picture is cut off."""
    return "\n".join(textwrap.wrap(text, _LETTERS_PER_LINE[words.language]))
