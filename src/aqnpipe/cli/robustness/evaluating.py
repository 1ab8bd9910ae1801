"""Evaluates the checkpoints of `aqnpipe robustness`, compares them, and writes what was found."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from aqnpipe.artifacts.evaluations import EvaluationFiles, evaluation_files
from aqnpipe.artifacts.files import write_json
from aqnpipe.cli.robustness.show import csv_of, markdown_of, table_of
from aqnpipe.comparison.checkpoints import report_of
from aqnpipe.comparison.evaluations import EvaluationInput, LoadedEvaluation, load_evaluation
from aqnpipe.config.cross_references import beyond_layers
from aqnpipe.config.dataset import Split
from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.config.evaluation_noise import settings_of
from aqnpipe.config.model import ModelConfig, num_layers_in
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.stage import prepare_data
from aqnpipe.device import resolve_device
from aqnpipe.errors import ConfigError
from aqnpipe.evaluation.stage import EvaluationOutputs, evaluate, is_evaluated
from aqnpipe.models.loading import checked_folder

_SPLITS: tuple[Split, Split] = ("test", "train")


def evaluate_checkpoints(
    sources: Mapping[str, str],
    specs: Mapping[str, EvaluationSpec],
    data: str,
    dataset: Any,
    output: Path,
    alpha: float,
) -> list[str]:
    """Evaluate every checkpoint that has no evaluation yet and write the report to `output`; return its tables.

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
    loaded = [_evaluated(spec, folders[name], problems, output, alpha) for name, spec in specs.items()]
    report = report_of(loaded, sources, data, first, alpha)
    write_json(output / "robustness.json", report)
    (output / "robustness.csv").write_text(csv_of(report), encoding="utf-8")
    (output / "robustness.md").write_text("\n".join(markdown_of(report)) + "\n", encoding="utf-8")
    return table_of(report)


def _refuse_missing_layers(evaluation: EvaluationConfig, folders: Mapping[str, Path]) -> None:
    for name, folder in folders.items():
        num_layers = num_layers_in(folder)
        for noise, named in evaluation.noises.items():
            operators = settings_of(named).operator_noise
            for key in ("layers", "layer_scales") if operators is not None else ():
                if problem := beyond_layers(getattr(operators, key) or (), num_layers, name):
                    raise ConfigError(f"--noises: {noise}.operator_noise.{key}: {problem}")


def _evaluated(
    spec: EvaluationSpec, folder: Path, problems: Mapping[Split, Path], output: Path, alpha: float
) -> LoadedEvaluation:
    """Return an evaluation, which is made unless its files are there, of this spec, these inputs and this code."""
    files = evaluation_files(output, spec.model_role, spec.arm_id, spec.seed, spec.step)
    outputs = EvaluationOutputs(files.table, files.receipt, files.record)
    inputs = (problems["test"], problems.get("train"))
    if is_evaluated(spec, folder, outputs, *inputs):
        typer.echo(f"{spec.model_role}: evaluated before with these settings", err=True)
    else:
        files.table.parent.mkdir(parents=True, exist_ok=True)
        evaluate(spec, folder, inputs[0], outputs, lambda line: typer.echo(line, err=True), inputs[1])
    return load_evaluation(_input_of(files), spec.evaluation.primary_scorer, alpha)


def _input_of(files: EvaluationFiles) -> EvaluationInput:
    return EvaluationInput(**vars(files))
