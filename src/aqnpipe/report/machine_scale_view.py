"""Every noise level of the study on the scale of a measured machine: sentences, a table, and a picture over layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import altair as alt
import polars as pl

from aqnpipe.artifacts.captures import CaptureIdentity
from aqnpipe.artifacts.parities import SEVERITY, OperatorParity, ParityFile
from aqnpipe.config.measured_noise import ATTENTION
from aqnpipe.config.noise import RelativeGaussian
from aqnpipe.config.study import Study
from aqnpipe.report import charts, numbers
from aqnpipe.report.charts import Panel, SeriesKey
from aqnpipe.report.inputs import MeasuredMachine, ReportData
from aqnpipe.report.machine_scale import Spread, StudyNoise, noises_of, spread_of, times_by_operator
from aqnpipe.report.svg import MUTED, described
from aqnpipe.report.tables import Figure, PanelGroup, Row, Table
from aqnpipe.report.words import Words

_DIFFERING = ("backend", "dtype", "attention", "device", "threads", "batch_size", "tensor_parallel")
"""What can differ between the sides of a parity; those that do name the machine."""


@dataclass(frozen=True)
class MachineScale:
    """The noises of the study in units of one measured machine. `brief` has the operators with noise alone."""

    heading: str
    sentences: tuple[str, ...]
    figure: Figure
    brief: Table


@dataclass(frozen=True)
class _Column:
    """One noise: its name, and its multiples by operator."""

    name: str
    noise: StudyNoise
    times: Mapping[str, float]

    def over(self, operators: Sequence[OperatorParity]) -> Spread | None:
        return spread_of([self.times[operator.name] for operator in operators if operator.name in self.times])


def machine_scales(study: Study, data: ReportData, words: Words) -> tuple[MachineScale, ...]:
    """Return the noises of the study on the scale of every machine with a parity."""
    parities = {str(measured.source.path): measured.parity for measured in data.parities}
    return tuple(_machine_scale(study, measured, parities, words) for measured in data.parities)


def _machine_scale(
    study: Study, measured: MeasuredMachine, parities: Mapping[str, ParityFile], words: Words
) -> MachineScale:
    parity, machine = measured.parity, _named(measured, words)
    columns: list[_Column] = []
    without_size: list[_Column] = []
    for noise in noises_of(study, measured.source.model, parity.first.attention):
        times = {operator.name: found for operator, found in times_by_operator(noise.noise, parity, parities)}
        (columns if times else without_size).append(_Column(_name_of(noise, words), noise, times))
    panel = _picture(parity, columns, words)
    table = _table(parity, columns, words, "machine-scale", only_noised=False)
    return MachineScale(
        heading=words("scale.heading", model=measured.source.model, machine=machine),
        sentences=tuple(_sentence(column, parity, machine, words) for column in columns),
        figure=Figure(
            _caption(parity, without_size, words),
            (PanelGroup([panel[0]], legend=panel[1]),) if panel else (),
            (table,),
            alerts=_alerts(parity, words),
        ),
        brief=_table(parity, columns, words, "machine-scale-brief", only_noised=True),
    )


def _caption(parity: ParityFile, without_size: Sequence[_Column], words: Words) -> str:
    sides = words(
        "scale.caption",
        first=parity.first.setting,
        second=parity.second.setting,
        rms=f"{parity.log_probabilities.rms:.2g}",
        changes=parity.log_probabilities.argmax_changes,
    )
    names = ", ".join(column.name for column in without_size)
    return words.paragraph([sides, *([words("scale.without_size", names=names)] if names else [])])


def _alerts(parity: ParityFile, words: Words) -> tuple[str, ...]:
    """Return what makes the errors of a parity no noise of a machine."""
    is_noise = parity.verdict in ("equal", "rounding", "different algorithm")
    alerts = [] if is_noise else [words("scale.no_noise", verdict=words(f"parity.{parity.verdict}"))]
    return (*alerts, *([] if parity.same_inputs else [words("scale.other_inputs")]))


def _named(measured: MeasuredMachine, words: Words) -> str:
    """Return the name of a measured machine: what of its second side is not as on its first."""
    first, second = measured.parity.first, measured.parity.second
    differing = [_setting(second, name) for name in _DIFFERING if getattr(first, name) != getattr(second, name)]
    return words("scale.machine", machine=measured.source.machine, setting=", ".join(differing) or second.device)


def _setting(identity: CaptureIdentity, name: str) -> str:
    value = getattr(identity, name)
    return value if isinstance(value, str) else f"{name} {value}"


def _name_of(noise: StudyNoise, words: Words) -> str:
    return ", ".join(noise.arms) if noise.level is None else words.level(noise.level)


def _sentence(column: _Column, parity: ParityFile, machine: str, words: Words) -> str:
    spread = column.over([operator for operator in parity.operators if operator.is_product])
    if spread is None:
        return words("scale.not_on_products", noise=column.name)
    return words(
        "scale.sentence",
        noise=column.name,
        machine=machine,
        times=_times(spread.middle),
        count=spread.count,
        low=_times(spread.lowest),
        high=_times(spread.highest),
    )


def _table(parity: ParityFile, columns: Sequence[_Column], words: Words, name: str, *, only_noised: bool) -> Table:
    """Return a row for all products and one per kind of operator, in the order in which they run."""
    kinds: dict[str, list[OperatorParity]] = {}
    for operator in parity.operators:
        kinds.setdefault(operator.kind, []).append(operator)
    products = [operator for operator in parity.operators if operator.is_product]
    groups = {words("scale.all_products"): products, **kinds}
    rows = tuple(
        _row(kind, operators, columns, words)
        for kind, operators in groups.items()
        if not only_noised or any(column.over(operators) for column in columns)
    )
    headers = (
        *(words(f"column.{name}") for name in ("operator", "parity", "operators", "machine_error")),
        *(words("scale.column", noise=column.name) for column in columns),
    )
    has_fused_noise = any(column.noise.noise.attention == "fused" for column in columns)
    notes = [words("scale.note")]
    if columns and not has_fused_noise and ATTENTION in kinds:
        notes.append(words("scale.attention"))
    return Table(name, words("scale.table"), headers, rows, 2, words.paragraph(notes))


def _row(kind: str, operators: Sequence[OperatorParity], columns: Sequence[_Column], words: Words) -> Row:
    verdict = max((operator.verdict for operator in operators), key=SEVERITY.index)
    error = spread_of([100 * operator.relative_rms for operator in operators])
    cells = (kind, words(f"parity.{verdict}"), str(len(operators)), _cell(error, words))
    times = (_cell(column.over(operators), words) for column in columns)
    return Row((*cells, *times), alert=verdict == "fault")


def _cell(spread: Spread | None, words: Words) -> str:
    """Return median and range as text: 24 (20 to 28)."""
    if spread is None:
        return numbers.MISSING
    middle = _times(spread.middle)
    if spread.count == 1:
        return middle
    return f"{middle} ({words('span', low=_times(spread.lowest), high=_times(spread.highest))})"


def _times(value: float) -> str:
    """Return a number with two significant digits, or all of a whole number; ∞ without an error to compare with.

    >>> _times(23.84), _times(1234.5), _times(0.0312)
    ('24', '1,234', '0.031')
    """
    if value == float("inf"):
        return "∞"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _picture(parity: ParityFile, columns: Sequence[_Column], words: Words) -> tuple[Panel, list[SeriesKey]] | None:
    """Return the machine's error over the layers, a line per kind of product, with the relative noises as rules."""
    rows = [
        {"layer": operator.layer, "kind": operator.kind, "error": 100 * operator.relative_rms}
        for operator in parity.operators
        if operator.is_product and operator.layer is not None and operator.relative_rms > 0
    ]
    if not rows:
        return None
    title = words("scale.picture")
    keys = [SeriesKey(kind, n) for n, kind in enumerate(dict.fromkeys(str(row["kind"]) for row in rows), start=1)]
    texts = [
        described(
            str(row["kind"]),
            words("mark.layer", name=row["kind"], layer=row["layer"], what=title, value=f"{row['error']:.2g}"),
        )
        for row in rows
    ]
    table = pl.DataFrame(rows).with_columns(about=pl.Series(texts, dtype=pl.String))
    x = alt.X("layer:Q").title(words("axis.layer")).axis(grid=False, tickMinStep=1, format="d")
    y = alt.Y("error:Q").title(words("axis.relative_error")).scale(type="log").axis(format="~g", tickCount=5)
    colour, dash = charts.colour_scale("kind", keys), charts.dash_scale("kind", keys)
    base = charts.base_chart(table)
    chart = alt.layer(
        *_rules(columns, y),
        base.mark_line(strokeWidth=1.8).encode(x, y, color=colour, strokeDash=dash),
        base.mark_point(filled=True, size=22, opacity=1).encode(x, y, color=colour, description="about:N"),
    )
    return charts.panel(title, chart, words("alt.scale")), keys


def _rules(columns: Sequence[_Column], y: alt.Y) -> list[alt.Chart]:
    """Return a horizontal line with its name for every relative noise of the same scale in all layers."""
    rows = [
        {"error": 100 * column.noise.noise.error.scale, "name": column.name}
        for column in columns
        if isinstance(column.noise.noise.error, RelativeGaussian)
        and column.noise.noise.layers is None
        and not column.noise.noise.layer_scales
    ]
    if not rows:
        return []
    base = alt.Chart(pl.DataFrame(rows))
    return [
        base.mark_rule(color=MUTED, strokeDash=[3, 3], strokeWidth=1.2).encode(y=y),
        base.mark_text(align="left", baseline="bottom", dx=2, dy=-2, color=MUTED).encode(
            y=y, x=alt.value(0), text="name:N"
        ),
    ]
