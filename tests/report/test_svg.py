"""Charts as SVG beyond the page: sizes that no synthetic study has."""

import altair as alt
import polars as pl

from aqnpipe.report.markup import render_svg


def test_a_chart_of_more_rows_than_altair_takes_is_drawn_whole():
    rows = pl.DataFrame({"x": range(6000), "y": [0.5] * 6000})
    svg = render_svg(alt.Chart(rows).mark_point().encode(x="x:Q", y="y:Q"), "many")
    assert svg.count("translate(") >= 6000
    assert alt.data_transformers.options == {}
