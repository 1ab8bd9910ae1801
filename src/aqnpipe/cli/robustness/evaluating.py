"""Evaluates the checkpoints of `aqnpipe robustness`, compares them, and writes what was found in three forms."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import typer
from rich.progress import Progress
from transformers.utils.logging import disable_progress_bar

from aqnpipe.artifacts.comparisons import CheckpointAccuracy, CheckpointComparison, RobustnessReport
from aqnpipe.artifacts.evaluations import EvaluationFiles, evaluation_files
from aqnpipe.artifacts.files import write_csv, write_json, write_text
from aqnpipe.cli.options import aligned, console_of
from aqnpipe.comparison.checkpoints import POWER, report_of
from aqnpipe.comparison.evaluations import EvaluationInput, load_evaluations
from aqnpipe.config.cross_references import expected_layers
from aqnpipe.config.dataset import Split
from aqnpipe.config.evaluation import EvaluationConfig, settings_of
from aqnpipe.config.model import ModelConfig, num_layers_in
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.stage import prepare_data
from aqnpipe.device import resolve_device
from aqnpipe.errors import ConfigError
from aqnpipe.evaluation.stage import EvaluationOutputs, evaluate, is_evaluated
from aqnpipe.models.loading import checked_folder
from aqnpipe.report.numbers import in_markdown_cell, markdown_table

_SPLITS: tuple[Split, Split] = ("test", "train")

_TITLES = {
    "noise": "What noise costs each checkpoint",
    "accuracy": "Differences at the same noise",
    "degradation": "Differences in what noise costs (above 0: the first loses less)",
}
_HEADINGS = ("comparison", "noise", "difference, points", "p (Holm)", "")


def evaluate_checkpoints(
    sources: Mapping[str, str],
    specs: Mapping[str, EvaluationSpec],
    data: str,
    dataset: Any,
    output: Path,
    alpha: float,
) -> RobustnessReport:
    """Evaluate every checkpoint that has no evaluation yet, and write the report to `output`.

    `data` is the name of `dataset` in the report.

    Raises DeviceError, ModelError or ConfigError, before anything is written, if the device is not there, a checkpoint
    is no safe and complete model folder, or a noise is in layers that a checkpoint does not have; DataError if the data
    set is malformed; ReceiptError if a pass did not have its noise.
    """
    first = next(iter(specs.values()))
    resolve_device(first.device)
    folders = {name: checked_folder(ModelConfig(source=source)) for name, source in sources.items()}
    _refuse_missing_layers(first.evaluation, folders)
    problems = {
        split: output / "data" / f"{split}.parquet" for split in _SPLITS[: 2 if first.prompt.num_examples else 1]
    }
    for split, path in problems.items():
        prepare_data(dataset.model_dump(), split, path)
    with _progress(len(specs) * len(first.evaluation.passes())) as show:
        made = [_evaluated(spec, folders[name], problems, output, show) for name, spec in specs.items()]
    inputs = [EvaluationInput(**vars(files)) for files in made]
    loaded = load_evaluations(inputs, first.evaluation.primary_scorer, alpha)
    report = report_of(list(loaded.values()), sources, data, first, alpha)
    write_json(output / "robustness.json", report)
    # One line per comparison, with all numbers as fractions.
    rows = [row.model_dump() for row in report.comparisons]
    write_csv(
        output / "robustness.csv", pl.DataFrame(rows, list(CheckpointComparison.model_fields), infer_schema_length=None)
    )
    write_text(output / "robustness.md", "\n".join(markdown_of(report)) + "\n")
    return report


@contextmanager
def _progress(num_passes: int) -> Iterator[Callable[..., None]]:
    """Yield a function that shows a line about one pass or several: with a bar on a terminal, as it is elsewhere."""
    disable_progress_bar()  # those of loading weights, which would break the lines
    console = console_of(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=num_passes)

        def show(line: str, passes: int = 1) -> None:
            # A stage names a run of a study, with arm, seed and step.
            run, _, found = line.partition(": ")
            line = f"{run.partition('/')[0]}: {found}"
            bar.update(task, advance=passes, description=line.partition(",")[0])
            if not console.is_terminal:
                typer.echo(line, err=True)

        yield show


def _refuse_missing_layers(evaluation: EvaluationConfig, folders: Mapping[str, Path]) -> None:
    for name, folder in folders.items():
        num_layers = num_layers_in(folder)
        for noise, named in evaluation.noises.items():
            operators = settings_of(named).operator_noise
            for key in ("layers", "layer_scales") if operators is not None else ():
                layers = getattr(operators, key) or ()
                if expected := expected_layers(layers, num_layers, name):
                    where = f"--noises: {noise}.operator_noise.{key}"
                    raise ConfigError(f"{where}: found {max(layers)}, expected {expected}")


def _evaluated(
    spec: EvaluationSpec, folder: Path, problems: Mapping[Split, Path], output: Path, show: Callable[..., None]
) -> EvaluationFiles:
    """Return the files of an evaluation, which are made unless they are there, of this spec, inputs and code."""
    files = evaluation_files(output, spec.model_role, spec.arm_id, spec.seed, spec.step)
    outputs = EvaluationOutputs(files.table, files.receipt, files.record)
    inputs = (problems["test"], problems.get("train"))
    if is_evaluated(spec, folder, outputs, *inputs):
        show(f"{spec.model_role}: evaluated before with these settings", len(spec.evaluation.passes()))
    else:
        files.table.parent.mkdir(parents=True, exist_ok=True)
        evaluate(spec, folder, inputs[0], outputs, show, inputs[1])
    return files


def markdown_of(report: RobustnessReport) -> list[str]:
    """Return the report as lines of Markdown: accuracies, comparisons, and what they do not say."""
    lines = ["# Robustness to operator noise", "", f"{_setting(report)}.", ""]
    heading, *rows = _accuracies(report)
    lines += markdown_table(heading, _escaped(rows))
    for title, cells in _comparisons(report):
        lines += ["", f"## {title}", "", *markdown_table(_HEADINGS, _escaped(cells))]
    return [*lines, "", *(f"- {note}" for note in report.notes), "", f"**{answer_of(report)}**"]


def text_of(report: RobustnessReport) -> list[str]:
    """Return the report as lines for the terminal."""
    heading, *rows = _accuracies(report)
    lines = [_setting(report), *aligned([heading, *rows])]
    for title, cells in _comparisons(report):
        lines += ["", title, *aligned([_HEADINGS, *cells])]
    return [*lines, "", *report.notes, "", answer_of(report)]


def answer_of(report: RobustnessReport) -> str:
    """Return yes, no or not known in one sentence: whether two checkpoints differ in what the highest noise costs them.

    It is about the pair with the smallest p-value, which is adjusted over all pairs. With one checkpoint it is about
    whether the noise costs anything.
    """
    kind = "degradation" if len(report.checkpoints) > 1 else "noise"
    levels = {row.noise_level for row in report.comparisons if row.kind == kind}
    level = max((one for one in levels if one < 1), default=max(levels, default=0.0))
    rows = [row for row in report.comparisons if (row.kind, row.noise_level) == (kind, level)]
    row = min(rows, key=lambda one: 2.0 if one.p_holm is None else one.p_holm, default=None)
    if row is None:
        return "Not known: no noise was evaluated."
    if row.difference is None or row.ci_low is None or row.ci_high is None or row.p_holm is None:
        return f"Not known: {row.refusal}."
    is_turned = kind == "noise" or row.difference < 0
    amount, low, high = (
        (-row.difference, -row.ci_high, -row.ci_low) if is_turned else (row.difference, row.ci_low, row.ci_high)
    )
    first, second = (row.second, row.first) if is_turned else (row.first, row.second)
    costs = f"{_noise(level, row.noise)} noise costs {first} {round(100 * amount, 1) + 0.0:.1f} points"
    costs += f" less than {second}" if kind == "degradation" else ""
    is_shown = row.p_holm < report.alpha
    verdict = "Not known" if not is_shown else "Yes" if amount > 0 else "No"
    sample = f"{report.accuracies[0].num_questions} questions" + (f"; {len(rows)} pairs" if len(rows) > 1 else "")
    more = "" if is_shown else "; no number of questions decides it if the true difference is this one"
    if not is_shown and row.questions_needed is not None:
        chance = f"{100 * POWER:g} %, if the true difference is this one"
        more = f"; {row.questions_needed:,} questions would decide it ({chance})"
    interval = f"{100 * (row.interval_level or 0.0):.3g} % interval {100 * low:+.1f} to {100 * high:+.1f}"
    return f"{verdict}: {costs} ({interval}; {sample}){more}."


def _setting(report: RobustnessReport) -> str:
    """Return what was asked, how it was graded, and where the noise was, so that a default is seen."""
    questions = max(row.num_questions for row in report.accuracies)
    return (
        f"Accuracy in percent on {questions} questions of {report.data} ({report.prompt}), graded by {report.scorer}, "
        f"in {report.dtype}; noise on {report.operators} operators"
    )


def _accuracies(report: RobustnessReport) -> Iterator[tuple[str, ...]]:
    levels = sorted({row.noise_level for row in report.accuracies})
    names = {row.noise_level: row.noise for row in report.accuracies}
    yield ("checkpoint", *(f"{_noise(level, names[level])} noise" if level else "no noise" for level in levels))
    for checkpoint in report.checkpoints:
        found = {row.noise_level: row for row in report.accuracies if row.checkpoint == checkpoint.name}
        yield checkpoint.name, *(_with_interval(found[level]) for level in levels)


def _comparisons(report: RobustnessReport) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    for kind, title in _TITLES.items():
        rows = [_cells(row, report.alpha) for row in report.comparisons if row.kind == kind]
        if rows:
            yield title, rows


def _cells(row: CheckpointComparison, alpha: float) -> tuple[str, ...]:
    name = f"{row.first}: noise - none" if row.kind == "noise" else f"{row.first} - {row.second}"
    level = _noise(row.noise_level, row.noise)
    if row.difference is None or row.ci_low is None or row.ci_high is None or row.p_holm is None:
        return name, level, "", "", f"not compared: {row.refusal}"
    points = f"{100 * row.difference:+.1f} ({100 * row.ci_low:+.1f} to {100 * row.ci_high:+.1f})"
    return name, level, points, f"{row.p_holm:.2g}", "shown" if row.p_holm < alpha else "not shown"


def _with_interval(row: CheckpointAccuracy) -> str:
    return f"{100 * row.accuracy:.1f} ({100 * row.ci_low:.1f} to {100 * row.ci_high:.1f})"


def _noise(level: float, name: str | None) -> str:
    return f"{100 * level:g} %" if name is None else name


def _escaped(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    return [list(map(in_markdown_cell, row)) for row in rows]
