"""The noises of a study in units of a measured machine: how many times that machine's error each one is, per operator.

Both are relative: the root mean square of an error over that of the operator's results. Relative Gaussian noise of
scale s has exactly s. What the machine does is in a parity, measured on the same inputs operator by operator.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import altair as alt
import polars as pl

from aqnpipe.artifacts.parities import SEVERITY, CaptureIdentity, OperatorParity, ParityFile
from aqnpipe.config.measured_noise import ATTENTION, MeasuredError
from aqnpipe.config.noise import AbsoluteGaussian, ErrorModel, OperatorNoise, RelativeGaussian, SystematicBias
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import Study
from aqnpipe.report import charts, numbers
from aqnpipe.report.charts import Panel, SeriesKey
from aqnpipe.report.inputs import MeasuredMachine, ReportData
from aqnpipe.report.markup import MUTED
from aqnpipe.report.tables import Figure, PanelGroup, Part, Row, Table, ranged, table
from aqnpipe.report.words import Words


@dataclass(frozen=True)
class StudyNoise:
    """A noise of the study on operators: of an evaluation (its `level`) or of the training of `arms`."""

    noise: OperatorNoise
    level: float | None
    arms: tuple[str, ...] = ()


def noises_of(study: Study, model: str, attention: str) -> list[StudyNoise]:
    """Return the noises on operators that a model meets: those of evaluations, then others that arms are trained with.

    Noise on modules is not among them.
    """
    plan, evaluation = StudyPlan(study), study.config.evaluation
    levels = [(level, evaluation.noise_at(level, attention).operator_noise) for level in evaluation.all_levels()]
    found = [StudyNoise(_resolved(plan, noise, model), level) for level, noise in levels if noise is not None]
    for name, arm in study.arms.items():
        noise = arm.operator_noise
        if noise is None or not noise.is_active or arm.model != model:
            continue
        trained = _resolved(plan, noise, model)
        same = next((one for one in found if one.noise == trained), None)
        if same is None:
            found.append(StudyNoise(trained, None, (name,)))
        elif same.level is None:
            found[found.index(same)] = StudyNoise(trained, None, (*same.arms, name))
    return found


def _resolved(plan: StudyPlan, noise: OperatorNoise, model: str) -> OperatorNoise:
    """Return the noise with the file of its measured error, and without the phases, which are no part of its size."""
    return plan.with_parity_files(noise, model).model_copy(update={"phases": ("evaluation",)})


def times_by_operator(
    noise: OperatorNoise, parity: ParityFile, parities: Mapping[str, ParityFile]
) -> Iterator[tuple[OperatorParity, float]]:
    """Yield each operator that `noise` is put on, and the noise as a multiple of the error in `parity`.

    `parities` by path, for noise that is itself measured. The multiple is infinite where the machine has no error.
    Nothing is yielded for noise without a fixed size, such as rounding to a number format.
    """
    own = _measured_sizes(noise.error, parities)
    for operator in parity.operators:
        size = _relative_size(noise, operator, own) if _is_put_on(noise, operator) else None
        if size is not None:
            yield operator, size / operator.relative_rms if operator.relative_rms else math.inf


def _is_put_on(noise: OperatorNoise, operator: OperatorParity) -> bool:
    """Return whether a noise is put on an operator: on products, and on norms if it is measured.

    With operators: all, it is put on norms within layers. Softmax and activations, which that has too, are parts of
    other operators in a parity.
    """
    if operator.is_norm:
        in_layers = noise.operators == "all" and operator.layer is not None
        return in_layers or isinstance(noise.error, MeasuredError)
    return operator.is_product


def _measured_sizes(error: ErrorModel, parities: Mapping[str, ParityFile]) -> dict[str, float]:
    """Return the relative size of measured noise by operator; empty for other noise and without its parity."""
    if not isinstance(error, MeasuredError) or error.source not in parities:
        return {}
    own = parities[error.source].operators
    return {one.name: error.multiple * one.figures_rms for one in own if one.figures_rms is not None}


def _relative_size(noise: OperatorNoise, operator: OperatorParity, own: Mapping[str, float]) -> float | None:
    if isinstance(noise.error, MeasuredError):
        return own.get(operator.name) if noise.is_in(operator.layer) else None
    match noise.error_in(operator.layer):
        case RelativeGaussian(scale=scale):
            return scale
        case AbsoluteGaussian(scale=scale) | SystematicBias(scale=scale):
            return scale / operator.result_rms if operator.result_rms else None
        case _:
            return None


_DIFFERING = ("backend", "dtype", "attention", "device", "threads", "batch_size", "tensor_parallel")
"""Properties that can differ between the sides of a parity; those that do name the machine."""


_HEADERS = ("operator", "parity", "operators", "machine_error")
"""Columns before those of the noises."""


@dataclass(frozen=True)
class MachineScale:
    """The noises of the study in units of one measured machine."""

    heading: str
    sentences: tuple[str, ...]
    figure: Figure

    @property
    def brief(self) -> Table:
        """The table of the operators with noise alone."""
        (table,) = self.figure.tables
        first = len(_HEADERS)
        noised = (row for row in table.rows if any(cell != numbers.MISSING for cell in row.cells[first:]))
        return replace(table, rows=tuple(noised))


@dataclass(frozen=True)
class _Column:
    """One noise: its name, and its multiples by operator."""

    name: str
    noise: StudyNoise
    times: Mapping[str, float]

    def over(self, operators: Sequence[OperatorParity]) -> list[float]:
        return [self.times[operator.name] for operator in operators if operator.name in self.times]


def machine_scales(study: Study, data: ReportData, words: Words) -> tuple[MachineScale, ...]:
    """Return the noises of the study on the scale of every machine with a parity."""
    parities = {str(measured.path): measured.parity for measured in data.parities}
    return tuple(_machine_scale(study, measured, parities, words) for measured in data.parities)


def scale_parts(scales: Sequence[MachineScale]) -> Iterator[Part]:
    """Yield the section on the noises of the study in units of machines."""
    for number, scale in enumerate(scales, start=1):
        yield Part("heading", scale.heading)
        if scale.sentences:
            yield Part("items", scale.sentences)
        yield Part("figure", scale.figure, stem=f"scale-{number}" if len(scales) > 1 else "")


def _machine_scale(
    study: Study, measured: MeasuredMachine, parities: Mapping[str, ParityFile], words: Words
) -> MachineScale:
    parity, machine = measured.parity, _named(measured, words)
    columns: list[_Column] = []
    without_size: list[_Column] = []
    for noise in noises_of(study, measured.model, parity.first.attention):
        times = {operator.name: found for operator, found in times_by_operator(noise.noise, parity, parities)}
        (columns if times else without_size).append(_Column(_name_of(noise, words), noise, times))
    panel = _picture(parity, columns, words)
    return MachineScale(
        heading=words("scale.heading", model=measured.model, machine=machine),
        sentences=tuple(_sentence(column, parity, machine, words) for column in columns),
        figure=Figure(
            _caption(parity, without_size, words),
            (PanelGroup([panel[0]], legend=panel[1]),) if panel else (),
            (_table(parity, columns, words),),
            alerts=_alerts(parity, words),
        ),
    )


def _caption(parity: ParityFile, without_size: Sequence[_Column], words: Words) -> str:
    sides = words(
        "scale.caption",
        first=parity.first.setting,
        second=parity.second.setting,
        rms=parity.log_probabilities.rms,
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
    return words("scale.machine", machine=measured.machine, setting=", ".join(differing) or second.device)


def _setting(identity: CaptureIdentity, name: str) -> str:
    value = getattr(identity, name)
    return value if isinstance(value, str) else f"{name} {value}"


def _name_of(noise: StudyNoise, words: Words) -> str:
    return ", ".join(noise.arms) if noise.level is None else words.level(noise.level)


def _sentence(column: _Column, parity: ParityFile, machine: str, words: Words) -> str:
    times = column.over([operator for operator in parity.operators if operator.is_product])
    if not times:
        return words("scale.not_on_products", noise=column.name)
    return words(
        "scale.sentence",
        noise=column.name,
        machine=machine,
        times=median(times),
        count=len(times),
        low=min(times),
        high=max(times),
    )


def _table(parity: ParityFile, columns: Sequence[_Column], words: Words) -> Table:
    """Return a row for all products and one per kind of operator, in the order in which they run."""
    kinds: dict[str, list[OperatorParity]] = {}
    for operator in parity.operators:
        kinds.setdefault(operator.kind, []).append(operator)
    products = [operator for operator in parity.operators if operator.is_product]
    groups = {words("scale.all_products"): products, **kinds}
    rows = tuple(_row(kind, operators, columns, words) for kind, operators in groups.items())
    headers = (
        *(words(f"column.{name}") for name in _HEADERS),
        *(words("scale.column", noise=column.name) for column in columns),
    )
    has_fused_noise = any(column.noise.noise.attention == "fused" for column in columns)
    notes = [words("scale.note")]
    if columns and not has_fused_noise and ATTENTION in kinds:
        notes.append(words("scale.attention"))
    return Table("machine-scale", words("scale.table"), headers, rows, 2, words.paragraph(notes))


def _row(kind: str, operators: Sequence[OperatorParity], columns: Sequence[_Column], words: Words) -> Row:
    verdict = max((operator.verdict for operator in operators), key=SEVERITY.index)
    error = [100 * operator.relative_rms for operator in operators]
    cells = (kind, words(f"parity.{verdict}"), str(len(operators)))
    times = (_cell(values, words) for values in (error, *(column.over(operators) for column in columns)))
    return Row((*cells, *times), alert=verdict == "fault")


def _cell(values: Sequence[float], words: Words) -> str:
    """Return median and range as text: 24 (20 to 28); of a single value that one, of none a dash."""
    middle = median(values) if values else None
    low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
    return ranged(middle, low, high, "times", words)


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
    shown = charts.told(pl.DataFrame(rows), "mark.error", words, series="", what=title)
    x = charts.number_axis("layer", words("axis.layer"))
    y = alt.Y("error:Q").title(words("axis.relative_error")).scale(type="log").axis(format="~g", tickCount=5)
    chart = alt.layer(*_rules(columns, y), *charts.lines_with_dots(shown, x, y, "kind", keys))
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
    named = pl.DataFrame(rows)
    return [
        charts.dashed_rules(named).encode(y=y),
        alt.Chart(named)
        .mark_text(align="left", baseline="bottom", dx=2, dy=-2, color=MUTED)
        .encode(y=y, x=alt.value(0), text="name:N"),
    ]


def machine_parts(study: Study, rows: pl.DataFrame, words: Words) -> tuple[Part, ...]:
    """Return what ran where, and the differences after the last steps; empty if no further machine evaluated any."""
    if rows.is_empty():
        return ()
    last = rows.filter(pl.col("step") == pl.col("step").max().over("machine", "model", "arm"))
    shown = table(
        "machines",
        last.with_columns(alert=pl.col("problem").is_not_null()),
        words,
        without=() if last["model"].n_unique() > 1 else ("model",),
        level=1 - study.config.statistics.alpha,
    )
    return Part("items", _sentences(rows, words)), Part("table", shown)


def _sentences(rows: pl.DataFrame, words: Words) -> list[str]:
    """Return what each machine ran on, what else differs there, and on what the checkpoints were trained."""
    sentences = []
    for (machine,), part in rows.group_by("machine", maintain_order=True):
        there, here, differs = (_names(part, name) for name in ("device_there", "device_here", "differs_in"))
        if there:
            sentences.append(words("machines.devices", machine=machine, there=there, here=here))
        if differs:
            sentences.append(words("machines.differs", machine=machine, differs=differs))
    trained = _names(rows, "trained_on")
    return [*sentences, words("diagnosis.trained_on", device=trained)] if trained else sentences


def _names(rows: pl.DataFrame, column: str) -> str:
    return "; ".join(rows[column].drop_nulls().unique().sort())
