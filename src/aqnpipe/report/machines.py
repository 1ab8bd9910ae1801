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

    def name(self, words: Words) -> str:
        """Return the name of its level, or those of its arms."""
        return ", ".join(self.arms) if self.level is None else words.level(self.level)

    @property
    def same_everywhere(self) -> float | None:
        """The scale of relative noise that is the same in all layers; None for any other noise."""
        error, is_partial = self.noise.error, self.noise.layers is not None or bool(self.noise.layer_scales)
        return error.scale if isinstance(error, RelativeGaussian) and not is_partial else None


def noises_of(study: Study, model: str, attention: str) -> list[StudyNoise]:
    """Return the noises on operators that a model meets: those of evaluations, then others that arms are trained with.

    Noise on modules is not among them.
    """
    plan, evaluation = StudyPlan(study), study.config.evaluation
    levels = [(level, evaluation.noise_at(level, attention).operator_noise) for level in evaluation.all_levels()]
    found = [StudyNoise(_resolved(plan, noise, model), level) for level, noise in levels if noise is not None]
    for name, arm in study.arms.items():
        if arm.model != model or arm.operator_noise is None or not arm.operator_noise.is_active:
            continue
        trained = _resolved(plan, arm.operator_noise, model)
        same = next((place for place, one in enumerate(found) if one.noise == trained), None)
        if same is None:
            found.append(StudyNoise(trained, None, (name,)))
        elif found[same].level is None:
            found[same] = StudyNoise(trained, None, (*found[same].arms, name))
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

_Times = Sequence[tuple[StudyNoise, Mapping[str, float]]]
"""Noises with their multiples of a machine's error by operator."""


@dataclass(frozen=True)
class MachineScale:
    """The noises of the study in units of one measured machine. `brief`: the table of operators with noise alone."""

    heading: str
    sentences: tuple[str, ...]
    figure: Figure

    @property
    def brief(self) -> Table:
        """The table of the operators with noise alone."""
        (table,) = self.figure.tables
        noised = (row for row in table.rows if {*row.cells[len(_HEADERS) :]} - {numbers.MISSING})
        return replace(table, rows=tuple(noised))


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
    found = [
        (noise, {operator.name: times for operator, times in times_by_operator(noise.noise, parity, parities)})
        for noise in noises_of(study, measured.model, parity.first.attention)
    ]
    columns, without_size = ([one for one in found if bool(one[1]) is has_size] for has_size in (True, False))
    caption = words(
        "scale.caption",
        first=parity.first.setting,
        second=parity.second.setting,
        rms=parity.log_probabilities.rms,
        changes=parity.log_probabilities.argmax_changes,
    )
    names = ", ".join(noise.name(words) for noise, _ in without_size)
    others = [words("scale.without_size", names=names)] if names else []
    return MachineScale(
        heading=words("scale.heading", model=measured.model, machine=machine),
        sentences=tuple(_sentence(*column, parity, machine, words) for column in columns),
        figure=Figure(
            words.paragraph([caption, *others]),
            tuple(_picture(parity, columns, words)),
            (_table(parity, columns, words),),
            alerts=tuple(_alerts(parity, words)),
        ),
    )


def _alerts(parity: ParityFile, words: Words) -> Iterator[str]:
    """Yield what makes the errors of a parity no noise of a machine."""
    if parity.verdict not in ("equal", "rounding", "different algorithm"):
        yield words("scale.no_noise", verdict=words(f"parity.{parity.verdict}"))
    if not parity.same_inputs:
        yield words("scale.other_inputs")


def _named(measured: MeasuredMachine, words: Words) -> str:
    """Return the name of a measured machine: what of its second side is not as on its first."""
    first, second = measured.parity.first, measured.parity.second
    differing = [_setting(second, name) for name in _DIFFERING if getattr(first, name) != getattr(second, name)]
    return words("scale.machine", machine=measured.machine, setting=", ".join(differing) or second.device)


def _setting(identity: CaptureIdentity, name: str) -> str:
    value = getattr(identity, name)
    return value if isinstance(value, str) else f"{name} {value}"


def _over(times: Mapping[str, float], operators: Sequence[OperatorParity]) -> list[float]:
    return [times[operator.name] for operator in operators if operator.name in times]


def _sentence(noise: StudyNoise, times: Mapping[str, float], parity: ParityFile, machine: str, words: Words) -> str:
    name, found = noise.name(words), _over(times, [operator for operator in parity.operators if operator.is_product])
    if not found:
        return words("scale.not_on_products", noise=name)
    low, high, number = min(found), max(found), len(found)
    return words("scale.sentence", noise=name, machine=machine, times=median(found), count=number, low=low, high=high)


def _table(parity: ParityFile, columns: _Times, words: Words) -> Table:
    """Return a row for all products and one per kind of operator, in the order in which they run."""
    groups = {words("scale.all_products"): [operator for operator in parity.operators if operator.is_product]}
    for operator in parity.operators:
        groups.setdefault(operator.kind, []).append(operator)
    rows = tuple(_row(kind, operators, columns, words) for kind, operators in groups.items())
    headers = (
        *(words(f"column.{name}") for name in _HEADERS),
        *(words("scale.column", noise=noise.name(words)) for noise, _ in columns),
    )
    is_fused = any(noise.noise.attention == "fused" for noise, _ in columns)
    notes = [words("scale.note")]
    notes += [words("scale.attention")] if columns and not is_fused and ATTENTION in groups else []
    return Table("machine-scale", words("scale.table"), headers, rows, 2, words.paragraph(notes))


def _row(kind: str, operators: Sequence[OperatorParity], columns: _Times, words: Words) -> Row:
    verdict = max((operator.verdict for operator in operators), key=SEVERITY.index)
    error = [100 * operator.relative_rms for operator in operators]
    times = (_cell(values, words) for values in (error, *(_over(found, operators) for _, found in columns)))
    return Row((kind, words(f"parity.{verdict}"), str(len(operators)), *times), alert=verdict == "fault")


def _cell(values: Sequence[float], words: Words) -> str:
    """Return median and range as text: 24 (20 to 28); of a single value that one, of none a dash."""
    middle = median(values) if values else None
    low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
    return ranged(middle, low, high, "times", words)


def _picture(parity: ParityFile, columns: _Times, words: Words) -> Iterator[PanelGroup]:
    """Yield the machine's error over the layers, a line per kind of product, above the relative noises as rules."""
    rows = [
        {"layer": operator.layer, "kind": operator.kind, "error": 100 * operator.relative_rms}
        for operator in parity.operators
        if operator.is_product and operator.layer is not None and operator.relative_rms > 0
    ]
    if not rows:
        return
    title, label = words("scale.picture"), words("alt.scale")
    keys = charts.keys_of(str(row["kind"]) for row in rows)
    shown = charts.told(pl.DataFrame(rows), "mark.error", words, series="", what=title)
    x = charts.number_axis("layer", words("axis.layer"))
    y = alt.Y("error:Q").title(words("axis.relative_error")).scale(type="log").axis(format="~g", tickCount=5)
    scales = {noise.name(words): noise.same_everywhere for noise, _ in columns}
    known = [{"error": 100 * scale, "name": name} for name, scale in scales.items() if scale is not None]
    rules = []
    if known:
        names = alt.Chart(pl.DataFrame(known)).mark_text(align="left", baseline="bottom", dx=2, dy=-2, color=MUTED)
        rules.append(charts.dashed_rules(pl.DataFrame(known)).encode(y=y))
        rules.append(names.encode(y=y, x=alt.value(0), text="name:N"))
    yield PanelGroup([charts.line_panel(title, label, shown, x, y, "kind", keys, rules)], legend=keys)


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
