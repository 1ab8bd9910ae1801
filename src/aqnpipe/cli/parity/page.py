"""A parity as one HTML page with pictures over depth; it loads nothing from elsewhere."""

from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from aqnpipe.artifacts.parities import SEVERITY, ParityFile
from aqnpipe.cli.parity.show import HEADINGS, MEANINGS, kind_rows, log_probability_lines, reasons, scale_lines, share_of
from aqnpipe.report.markup import render_svg, series_colour
from aqnpipe.report.words import visible

_WIDTH = 560
_ROW = 18
_STREAM = "mlp_residual"


def page_of(file: ParityFile) -> str:
    """Return the page; names from files are escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined
    )
    template = environment.get_template("parity.html.jinja")
    substitution = file.substitution
    return template.render(
        file=file,
        summary=visible(file.summary),
        headings=HEADINGS,
        rows=kind_rows(file),
        meanings=MEANINGS,
        reasons=reasons(file),
        log_probabilities=[*log_probability_lines(file), *scale_lines(file)],
        pictures=[_verdicts(file), _errors(file)],
        substituted=[]
        if substitution is None
        else [
            (" + ".join(row.kinds), f"{row.rms:.2g}", share_of(row.explained))
            for row in (*substitution.alone, *substitution.together)
        ],
    )


def _verdicts(file: ParityFile) -> Markup:
    """Return a field per operator and layer, coloured by its verdict and with its own error in powers of ten."""
    rows = [
        {"kind": row.kind, "layer": row.layer, "verdict": row.verdict, "error": _power(row.relative_rms)}
        for row in file.operators
        if row.layer is not None
    ]
    kinds = list(dict.fromkeys(str(row["kind"]) for row in rows))
    domain = list(SEVERITY[:4])
    colours = alt.Scale(domain=domain, range=[series_colour(index) for index in range(1, 5)])
    base = alt.Chart(pl.DataFrame(rows), width=_WIDTH, height=_ROW * len(kinds))
    x: Any = alt.X("layer:O").title("layer").axis(labelAngle=0, labelOverlap=True)
    y: Any = alt.Y("kind:N").sort(kinds).title(None)
    field = base.mark_rect(opacity=0.55).encode(
        x, y, color=alt.Color("verdict:N").scale(colours).legend(orient="top", title=None)
    )
    text = base.mark_text(fontSize=8).encode(x, y, text="error:N")
    return render_svg(alt.layer(field, text), "verdict and error of every operator over depth")


def _errors(file: ParityFile) -> Markup:
    """Return the largest operator error of each layer and the error accumulated behind it."""
    layers = sorted({row.layer for row in file.operators if row.layer is not None})
    rows: list[dict[str, object]] = []
    for layer in layers:
        own = [row for row in file.operators if row.layer == layer]
        rows.append({"layer": layer, "error": "largest operator error", "value": max(row.relative_rms for row in own)})
        stream = [row.accumulated_relative_rms for row in own if row.kind == _STREAM]
        rows += [{"layer": layer, "error": "accumulated behind the layer", "value": value} for value in stream]
    names = ["largest operator error", "accumulated behind the layer"]
    colours = alt.Scale(domain=names, range=[series_colour(1), series_colour(2)])
    chart = (
        alt.Chart(
            pl.DataFrame(rows, schema={"layer": pl.Int64, "error": pl.String, "value": pl.Float64}).filter(
                pl.col("value") > 0
            ),
            width=_WIDTH,
            height=200,
        )
        .mark_line(point=True)
        .encode(
            alt.X("layer:O").title("layer").axis(labelAngle=0, labelOverlap=True),
            alt.Y("value:Q").title("error, relative RMS").scale(type="log").axis(format="~e", tickCount=5),
            alt.Color("error:N").scale(colours).legend(orient="top", title=None),
        )
    )
    return render_svg(chart, "error over depth")


def _power(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
