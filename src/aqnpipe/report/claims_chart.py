"""The claims as one picture for a paper: what the page draws as a strip per claim."""

from collections import Counter

import altair as alt
import polars as pl

from aqnpipe.report import charts
from aqnpipe.report.charts import Panel
from aqnpipe.report.claims_view import ClaimsOverview
from aqnpipe.report.svg import INK
from aqnpipe.report.words import Words

_WIDTH, _ROW_HEIGHT = 380, 24


def claims_panel(overview: ClaimsOverview, comparisons: pl.DataFrame, words: Words) -> Panel | None:
    """Return the difference of every claim with its interval, in percentage points; None if none was compared.

    Claims are in the study's order. `comparisons`: as in `artifacts.comparisons.ComparisonTable`.
    """
    found = {row["comparison_id"]: row for row in comparisons.iter_rows(named=True)}
    texts = Counter(row.claim for row in overview.rows)
    drawn = [
        {
            "claim": row.claim if texts[row.claim] == 1 else f"{row.claim} ({row.comparison_id})",
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
    base = alt.Chart(pl.DataFrame(drawn), width=_WIDTH, height=_ROW_HEIGHT * len(drawn))
    y = alt.Y("claim:N").sort(names).title(None).axis(labelColor=INK, ticks=False, domain=False, labelLimit=360)
    title = words("claims.axis")
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(color=INK, strokeWidth=1)
    chart = alt.layer(
        zero.encode(alt.X("zero:Q").title(title)),
        base.mark_rule(strokeWidth=2, color=INK).encode(alt.X("low:Q").title(title), alt.X2("high:Q"), y),
        base.mark_point(filled=True, size=44, opacity=1, color=INK).encode(alt.X("difference:Q").title(title), y),
    )
    return charts.panel(words("claims.label"), chart, words("claims.axis"), wide=True)
