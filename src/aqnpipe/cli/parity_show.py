"""A parity as lines for the terminal, and as a page with pictures over depth that loads nothing from elsewhere."""

from collections.abc import Iterator, Sequence
from statistics import median_high

import altair as alt
import polars as pl
from markupsafe import Markup

from aqnpipe.artifacts.parities import SEVERITY, OperatorParity, ParityFile, SubstitutedKind, Substitution
from aqnpipe.cli.options import aligned
from aqnpipe.report.charts import row_axis
from aqnpipe.report.markup import page_template, render_svg, series_colour

HEADINGS = (
    "operator",
    "layers",
    "verdict",
    "operator error",
    "bias",
    "ulps (99 %)",
    "same bits",
    "of bound",
    "accumulated",
    "alone, nats",
)
MEANINGS = (
    "operator error: RMS on the same input, relative to the results; bias: mean in the same unit; ulps: in the coarser "
    "dtype; of bound: largest error over the forward error bounds; accumulated: in each side's forward passes, at the "
    "last layer; alone: RMS change of log-probabilities with the second side's operator in the first side's place."
)
SYSTEMATIC = (
    "Rounding errors do not repeat when their inputs change a little: they may have the whole size and explain "
    "nothing. What explains a large share is systematic."
)
_WIDTH, _ROW = 560, 18
_APART = 50
"""Pixels between the names of a legend: a page may show them in a wider font than the one they were measured with."""
_STREAM = "mlp_residual"


def text_of(file: ParityFile) -> list[str]:
    """Return the parity as lines: verdict, operators by kind, log-probabilities, and what explains them."""
    why = reasons(file)
    return [
        f"first:  {file.first.setting}",
        f"second: {file.second.setting}",
        f"differing settings: {'; '.join(file.settings) or 'none'}",
        "",
        f"{file.verdict}: {file.summary}",
        "",
        *aligned([HEADINGS, *kind_rows(file)]),
        MEANINGS,
        "",
        *([*why, ""] if why else []),
        *log_probability_lines(file),
        *(["", *_substitution_lines(file.substitution)] if file.substitution is not None else []),
        *(["", *file.notes] if file.notes else []),
    ]


def page_of(file: ParityFile) -> str:
    """Return the page; names from files are escaped."""
    found = file.substitution
    explained = [] if found is None else [*found.alone, *found.together]
    return page_template("parity.html.jinja").render(
        file=file,
        headings=HEADINGS,
        rows=kind_rows(file),
        meanings=MEANINGS,
        reasons=reasons(file),
        log_probabilities=log_probability_lines(file),
        pictures=[_verdicts(file), _errors(file)],
        substituted=[_substitution_row(row) for row in explained],
        systematic=SYSTEMATIC,
    )


def kind_rows(file: ParityFile) -> list[tuple[str, ...]]:
    """Return one row of cells per kind of operator, each with the worst of its layers."""
    alone = {row.kinds[0]: row.rms for row in file.substitution.alone} if file.substitution else {}
    kinds = dict.fromkeys(row.kind for row in file.operators)
    return [_kind_row(kind, [row for row in file.operators if row.kind == kind], alone.get(kind)) for kind in kinds]


def _kind_row(kind: str, rows: Sequence[OperatorParity], alone: float | None) -> tuple[str, ...]:
    same = [row.equal_share for row in rows if row.equal_share is not None]
    return (
        kind,
        str(len(rows)),
        max((row.verdict for row in rows), key=SEVERITY.index),
        f"{median_high(row.relative_rms for row in rows):.2g}",
        f"{max((row.bias for row in rows), key=abs):+.1g}",
        f"{median_high(row.ulps_p99 for row in rows):.3g}",
        f"{100 * sum(same) / len(same):.0f} %" if same else "",
        f"{max(row.bound_share for row in rows):.2g}",
        f"{rows[-1].accumulated_relative_rms:.2g}",
        "" if alone is None else f"{alone:.2g}",
    )


def reasons(file: ParityFile) -> list[str]:
    """Return why operators are beyond rounding, once for each kind and reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in file.operators:
        if row.verdict in ("different algorithm", "fault"):
            place = "" if row.layer is None else str(row.layer)
            found.setdefault((row.kind, row.verdict, row.reason), []).append(place)
    return [f"{kind}{_layers(places)}: {verdict}: {reason}" for (kind, verdict, reason), places in found.items()]


def _layers(places: list[str]) -> str:
    if places == [""]:
        return ""
    shown = ", ".join(places) if len(places) < 6 else f"{', '.join(places[:3])} ... {places[-1]}"
    return f" (layer{'s' if len(places) > 1 else ''} {shown})"


def log_probability_lines(file: ParityFile) -> list[str]:
    """Return the differences of the log-probabilities in words, and beside them the scale of relative noise.

    It is noise of 5 % on matrix products as a multiple of the measured difference, unless that is zero.
    """
    found = file.log_probabilities
    phases = (("prefill", found.prefill_rms), ("decoding", found.decode_rms))
    lines = [
        f"log-probabilities of {found.num_tokens} tokens: mean {found.mean:+.2g}, RMS {found.rms:.2g} nats "
        f"({', '.join(f'{name} {value:.2g}' for name, value in phases if value is not None)}), 99th percentile "
        f"{found.p99:.2g}, largest {found.largest:.2g}; another token most likely in {100 * found.argmax_changes:.2g} %"
    ]
    products = [row.relative_rms for row in file.operators if row.is_product]
    if typical := median_high(products) if products else 0.0:
        lines.append(
            f"noise of 5 % on matrix products is {0.05 / typical:.2g} times the difference of theirs here (median "
            f"relative RMS {typical:.2g})"
        )
    return lines


def _substitution_lines(found: Substitution) -> Iterator[str]:
    """Yield which operators explain the difference of the log-probabilities."""
    if not found.alone:
        yield "no operator of the second side changes a log-probability"
        return
    yield (
        f"the second side's operators in the first side's place, on {found.num_tokens} tokens that differ by RMS "
        f"{found.rms:.2g} nats:"
    )
    rows = [_substitution_row(row) for row in (found.alone[0], *found.together)]
    yield from aligned([("operators", "RMS, nats", "explained"), *rows])
    yield SYSTEMATIC


def _substitution_row(row: SubstitutedKind) -> tuple[str, str, str]:
    """Return operators, their effect, and the share of the mean square that they explain (nothing if negative)."""
    kinds = " + ".join(row.kinds) if len(row.kinds) < 6 else f"all {len(row.kinds)}"
    return kinds, f"{row.rms:.2g}", "" if row.explained is None else f"{100 * max(0.0, row.explained):.0f} %"


def _verdicts(file: ParityFile) -> Markup:
    """Return a field per operator and layer, coloured by its verdict and with its own error in powers of ten."""
    rows = pl.DataFrame(
        {"kind": row.kind, "layer": row.layer, "verdict": row.verdict, "error": _power(row.relative_rms)}
        for row in file.operators
        if row.layer is not None
    )
    kinds = rows["kind"].unique(maintain_order=True).to_list()
    colours = alt.Scale(domain=list(SEVERITY[:4]), range=[series_colour(index) for index in range(1, 5)])
    base = alt.Chart(rows, width=_WIDTH, height=_ROW * len(kinds)).encode(_depth(), row_axis("kind", kinds, kinds, 10))
    colour = alt.Color("verdict:N").scale(colours).legend(orient="top", title=None, columnPadding=_APART)
    field, text = base.mark_rect(opacity=0.55).encode(color=colour), base.mark_text(fontSize=8).encode(text="error:N")
    return render_svg(alt.layer(field, text), "verdict and error of every operator over depth")


def _errors(file: ParityFile) -> Markup:
    """Return the largest operator error of each layer and the error accumulated behind it."""
    names = ["largest operator error", "accumulated behind the layer"]
    schema = {"layer": pl.Int64, "error": pl.String, "value": pl.Float64}
    found = [(row.layer, names[0], row.relative_rms) for row in file.operators]
    found += [(row.layer, names[1], row.accumulated_relative_rms) for row in file.operators if row.kind == _STREAM]
    table = pl.DataFrame(found, schema=schema, orient="row").drop_nulls()
    rows = table.group_by("layer", "error", maintain_order=True).max().sort("layer", maintain_order=True)
    value = alt.Y("value:Q").title("error, relative RMS").scale(type="log").axis(format="~e", tickCount=5)
    colours = alt.Scale(domain=names, range=[series_colour(1), series_colour(2)])
    colour = alt.Color("error:N").scale(colours).legend(orient="top", title=None, columnPadding=_APART)
    chart = alt.Chart(rows.filter(pl.col("value") > 0), width=_WIDTH, height=200).mark_line(point=True)
    return render_svg(chart.encode(_depth(), value, colour), "error over depth")


def _depth() -> alt.X:
    return alt.X("layer:O").title("layer").axis(labelAngle=0, labelOverlap=True)


def _power(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
