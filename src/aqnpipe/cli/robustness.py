"""`aqnpipe robustness`: a study of given checkpoints in one process, declared by options instead of a file."""

import json as json_format
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from signal import SIGTERM
from typing import Annotated, Any

import typer

from aqnpipe.cli.interrupts import ends_at_once
from aqnpipe.cli.options import NAMES, CpuThreads, TrustCode, console_of, dataset_of, refuse_level
from aqnpipe.cli.study import check_checkpoints, check_custom_code, check_results
from aqnpipe.config.custom_code import refuse_foreign_code
from aqnpipe.config.evaluation import PRESETS, NoisesFile, refuse_unknown_scorer
from aqnpipe.config.generation import RequestedBackend
from aqnpipe.config.model import Attention, Dtype, ModelConfig, read_model_config, source_kind
from aqnpipe.config.noise import OperatorSet
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.config.study import CHECKPOINTS, Study, load_study
from aqnpipe.config.validation_messages import IDENTIFIER_PATTERN, one_of
from aqnpipe.config.yaml_file import load_yaml
from aqnpipe.device import RequestedDevice, resolve_device
from aqnpipe.errors import STOPPED, ConfigError

_SOURCE = "options"
"""Stands for the study file in messages of its validation."""

_SHORT = {
    "noise_levels": "levels",
    "max_response_tokens": "max-tokens",
    "num_examples": "shots",
    "primary_scorer": "scorer",
}
"""Options whose names are not those of the keys of a study."""

_KEYS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (rf"^{_SOURCE}: ", ""),
    (r"\bresults_dir\b", "--output"),
    (r"\bevaluation\.noises\.", "--noises: "),
    (r"\bdataset\.", "--data: "),
    (r"\bcheckpoints\.[\w.-]+\.(dtype|attention)\b", r"--\1"),
    (r"\bcheckpoints\.([\w.-]+?)(\.source)?:", r"checkpoint \1:"),
    (r"\bprompt: num_examples\b", "--shots"),
    (
        r"\b(?:prompt|evaluation|generation|statistics)\.(\w+)(?:\.\d+)?",
        lambda found: f"--{_SHORT.get(found[1], found[1].replace('_', '-'))}",
    ),
)
"""What stands in messages for the keys of a study: the options, in this order."""


def robustness(
    checkpoints: Annotated[
        list[str], typer.Argument(help="model folders, hub ids or `tiny`; NAME=FOLDER gives one a name")
    ],
    data: Annotated[str, typer.Option(help=NAMES)] = "word_problems",
    levels: Annotated[str, typer.Option(help="relative scales of the operator noise; 0 is no noise")] = "0,0.05,0.1",
    noise: Annotated[
        list[str] | None, typer.Option(help=f"further noise: {', '.join(PRESETS)}; may be repeated")
    ] = None,
    noises: Annotated[
        Path | None, typer.Option(help="YAML file of further noises by name, as evaluation.noises of a study")
    ] = None,
    noise_seeds: Annotated[str, typer.Option(help="seeds of the noise; noisy levels run once with each")] = "0",
    questions: Annotated[
        int | None, typer.Option(min=2, help="first questions of the test split; default: all")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest response")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="questions per batch")] = 32,
    style: Annotated[str, typer.Option(help="plain, or chat: the chat template of each checkpoint")] = "plain",
    layout: Annotated[str, typer.Option(help="bare or question_answer")] = "bare",
    instruction: Annotated[str, typer.Option(help="instruction in every prompt")] = "",
    shots: Annotated[int, typer.Option(min=0, help="training questions with answers before each question")] = 0,
    scorer: Annotated[
        str, typer.Option(help="how answers are graded: a scorer, or a custom module:function, run with your rights")
    ] = "strict",
    operators: Annotated[OperatorSet, typer.Option(help="operators with noise")] = "matmul",
    dtype: Annotated[Dtype, typer.Option(help="number format of the computation")] = "float32",
    attention: Annotated[Attention, typer.Option(help="attention kernel")] = "eager",
    backend: Annotated[RequestedBackend, typer.Option(help="generation backend")] = "auto",
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="devices that share every layer, with --backend vllm")
    ] = 1,
    device: Annotated[RequestedDevice, typer.Option(help="device")] = "auto",
    threads: CpuThreads = 1,
    alpha: Annotated[float, typer.Option(min=0.0001, max=0.5, help="error rate of each kind of comparison")] = 0.05,
    output: Annotated[Path, typer.Option(help="folder of the results; finished results are reused")] = Path(
        "robustness"
    ),
    trust_code: TrustCode = False,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Evaluate checkpoints at several noise levels and compare them, paired over questions.

    Every evaluation has a receipt: its noise was measured, or the command fails.
    """
    sources = named_sources(checkpoints)
    dataset = dataset_of(data, questions, trust_code=trust_code)
    refuse_unknown_scorer(scorer)
    relative = sorted(numbers(levels, "--levels", float))
    for level in relative:
        refuse_level("--levels", level, may_be_zero=True)
    named = _noises(noise or [], noises, trust_code=trust_code)
    asked = f"{data} (style {style}, layout {layout}{f', {shots} examples' if shots else ''})"
    content = {
        "study": "robustness",
        "checkpoints": {
            name: {"source": source, "dtype": dtype, "attention": attention} for name, source in sources.items()
        },
        "dataset": dataset.model_dump(),
        "prompt": {"style": style, "layout": layout, "instruction": instruction, "num_examples": shots},
        "device": device,
        "generation": {"backend": backend, "tensor_parallel": tensor_parallel},
        "evaluation": {
            "noise_levels": relative,
            "noises": named,
            "noise_seeds": numbers(noise_seeds, "--noise-seeds", int),
            "operators": operators,
            "max_response_tokens": max_tokens,
            "batch_size": batch_size,
            "primary_scorer": scorer,
            "threads": threads,
        },
        "statistics": {"alpha": alpha},
        "report": {
            "title": f"Checkpoints under noise: {asked}",
            "question": f"What does noise on {operators} operators cost, in {dtype}, graded by {scorer}?",
        },
    }
    plan = StudyPlan(_study(content, output))
    if 0.0 not in relative:
        raise ConfigError(f"--levels {levels}: expected 0 among them, to which the other levels are compared")
    # Standard output is for the result; a scorer of a user's own may print too.
    with redirect_stdout(sys.stderr), ends_at_once(SIGTERM, f"{STOPPED.format(signal='SIGTERM')}\n"):
        evaluate_and_report(plan)
    typer.echo(f"written: {output / 'report.html'}, summary.md, comparisons.csv and accuracy.csv", err=True)
    show(plan, json=json)


def named_sources(checkpoints: Sequence[str]) -> dict[str, str]:
    """Return the source of every checkpoint by name: given as NAME=SOURCE, else the last part of its path."""
    sources: dict[str, str] = {}
    for given in checkpoints:
        name, separator, source = given.partition("=")
        if not separator:
            source = given
            path = Path(given)
            name = (path.resolve() if path.is_dir() else path).name
        if not re.match(IDENTIFIER_PATTERN, name):
            raise ConfigError(f"checkpoint {given!r}: its name is {name!r}, expected letters, digits, `_`, `.` or `-`")
        if name in sources:
            raise ConfigError(
                f"checkpoints {sources[name]!r} and {source!r} are both called {name!r}: name them, as in a={source}"
            )
        if source_kind(source) == "folder":
            read_model_config(Path(source))
        sources[name] = source
    return sources


def numbers(text: str, option: str, kind: type[float] | type[int]) -> list[Any]:
    """Return the comma-separated numbers of an option; ConfigError names what is none."""
    found = []
    for part in text.split(","):
        try:
            found.append(kind(part))
        except ValueError:
            expected = "whole numbers" if kind is int else "numbers"
            raise ConfigError(
                f"{option} {text!r}: found {part!r}, expected {expected} with commas between them"
            ) from None
    return found


def _noises(presets: Sequence[str], path: Path | None, *, trust_code: bool) -> dict[str, Any]:
    """Return the further noises by name: presets, and those of a file."""
    for name in presets:
        if expected := one_of(name, PRESETS):
            raise ConfigError(f"--noise: found {name!r}, expected {expected}")
        if presets.count(name) > 1:
            raise ConfigError(f"--noise {name}: given twice, expected once")
    named: dict[str, Any] = {name: name for name in PRESETS if name in presets}
    if path is None:
        return named
    file = load_yaml(path, NoisesFile)
    if not trust_code:
        refuse_foreign_code(file, [path])
    found = file.model_dump(mode="json", by_alias=True, exclude_unset=True)
    repeated = sorted({*named} & {*found})
    if repeated:
        raise ConfigError(f"--noises {path}: {repeated[0]} is also given as --noise, expected other names")
    return named | found


def _study(content: Mapping[str, Any], output: Path) -> Study:
    """Return the study with its results in `output`; ConfigError names the options that are wrong."""
    try:
        study = load_study(content, _SOURCE)
        # A study file may not name every folder that a user may type.
        study = study.model_copy(update={"config": study.config.model_copy(update={"results_dir": str(output)})})
        for check in (check_results, check_custom_code, check_checkpoints):
            check(study, _SOURCE)
    except ConfigError as error:
        message = str(error)
        for pattern, option in _KEYS:
            message = re.sub(pattern, option, message)
        raise ConfigError(message) from error
    return study


def evaluate_and_report(plan: StudyPlan) -> None:
    """Evaluate every checkpoint that has no evaluation of these settings, inputs and code; compare, and report.

    Raises DeviceError, ModelError or ConfigError, before anything is written, if the device is not there or a
    checkpoint is no safe and complete model folder; DataError if the data set is malformed; ReceiptError if a pass did
    not have its noise.
    """
    from aqnpipe.artifacts.evaluations import evaluation_files
    from aqnpipe.comparison.stage import EvaluationInput, compare
    from aqnpipe.data.stage import prepare_data
    from aqnpipe.evaluation.stage import evaluate, is_evaluated
    from aqnpipe.models.loading import checked_folder
    from aqnpipe.report.inputs import read_study
    from aqnpipe.report.stage import build_report

    study, results = plan.study, Path(plan.results)
    resolve_device(study.config.device)
    folders = {name: checked_folder(ModelConfig(source=model.source)) for name, model in study.models().items()}
    problems = {split: results / "data" / f"{split}.parquet" for split in plan.splits()}
    for split, path in problems.items():
        prepare_data(study.config.dataset.model_dump(), split, path)
    num_passes, test, train = len(study.config.evaluation.passes()), problems["test"], problems.get("train")
    with _progress(len(folders) * num_passes) as say:
        for name, folder in folders.items():
            found = plan.evaluation_spec(model=CHECKPOINTS, arm=name, seed="0", step="0")
            spec, files = EvaluationSpec.model_validate(found), evaluation_files(results, CHECKPOINTS, name, 0, 0)
            if is_evaluated(spec, folder, files, test, train):
                say(f"{CHECKPOINTS}/{name} : evaluated before with these settings", num_passes)
            else:
                files.table.parent.mkdir(parents=True, exist_ok=True)
                evaluate(spec, folder, test, files, say, train)
    evaluations = [evaluation_files(results, *checkpoint) for checkpoint in plan.evaluations()]
    compare(study, [EvaluationInput(**vars(one)) for one in evaluations], results, problems=test)
    build_report(study, read_study(plan), results)


@contextmanager
def _progress(num_passes: int) -> Iterator[Callable[..., None]]:
    """Yield a function that shows a line about one pass or several: with a bar on a terminal, as it is elsewhere."""
    from rich.progress import Progress
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # those of loading weights, which would break the lines
    console = console_of(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=num_passes)

        def say(line: str, passes: int = 1) -> None:
            # The stage names a run of a study: role/arm, seed and step.
            run, _, found = line.partition(": ")
            line = f"{run.partition('/')[2].partition(' ')[0]}: {found}"
            bar.update(task, advance=passes, description=line.partition(",")[0])
            if not console.is_terminal:
                typer.echo(line, err=True)

        yield say


def show(plan: StudyPlan, *, json: bool) -> None:
    """Print the summary and the answer, or the tables and the answer as JSON."""
    import polars as pl
    from rich.markdown import Markdown

    from aqnpipe.report.summary import closing_lines

    results, noises = Path(plan.results), plan.study.config.evaluation.noise_names()
    answer = closing_lines(results, "en", noises)[-1]
    if json:
        tables = {name: pl.read_parquet(results / f"{name}.parquet").to_dicts() for name in ("accuracy", "comparisons")}
        typer.echo(json_format.dumps({"answer": answer, **tables}, indent=2, ensure_ascii=False))
        return
    # The last paragraph names code and versions.
    summary = (results / "summary.md").read_text(encoding="utf-8").strip().rpartition("\n\n")[0]
    console_of(stderr=False, width=140).print(Markdown(summary))
    typer.echo(answer)
