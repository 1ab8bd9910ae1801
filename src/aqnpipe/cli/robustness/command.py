"""`aqnpipe robustness`: accuracy of checkpoints of any origin over noise levels, with receipts and statistics."""

import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from signal import SIGTERM
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from aqnpipe.cli.interrupts import ends_at_once
from aqnpipe.cli.options import NAMES, TrustCode, dataset_of, refuse_level
from aqnpipe.cli.study import refuse_unusable_errors
from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.base import MOST_THREADS, describe_validation_error
from aqnpipe.config.custom_code import refuse_foreign_code
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.evaluation import (
    PRESETS,
    EvaluationConfig,
    NoisesFile,
    expected_scorer,
    refuse_unknown_scorer,
    settings_of,
)
from aqnpipe.config.generation import GenerationConfig, RequestedBackend
from aqnpipe.config.model import Attention, Dtype, read_model_config, source_kind
from aqnpipe.config.noise import OperatorSet
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.config.validation_messages import one_of
from aqnpipe.config.yaml_file import load_yaml
from aqnpipe.data.graders import refuse_unusable_scorer
from aqnpipe.device import RequestedDevice
from aqnpipe.errors import STOPPED, ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

_OPTIONS = {"noise_levels": "levels", "max_response_tokens": "max-tokens", "num_examples": "shots"}


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
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="CPU threads")] = 1,
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
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output}: found a file, expected a folder or a new name")
    dataset = dataset_of(data, questions, trust_code=trust_code)
    refuse_unknown_scorer(scorer)
    if expected := expected_scorer(scorer, dataset.answer_format):
        raise ConfigError(f"--scorer: found {scorer}, expected {expected}")
    prompt = _validated(
        PromptFormat,
        {"style": style, "layout": layout, "instruction": instruction, "num_examples": shots},
    )
    relative = sorted(numbers(levels, "--levels", float))
    for level in relative:
        refuse_level("--levels", level, may_be_zero=True)
    evaluation = _validated(
        EvaluationConfig,
        {
            "noise_levels": relative,
            "noises": _noises(noise or [], noises, trust_code=trust_code),
            "noise_seeds": numbers(noise_seeds, "--noise-seeds", int),
            "operators": operators,
            "max_response_tokens": max_tokens,
            "batch_size": batch_size,
            "primary_scorer": scorer,
            "threads": threads,
        },
    )
    generation = _validated(GenerationConfig, {"backend": backend, "tensor_parallel": tensor_parallel})
    refuse_unusable_scorer(evaluation)
    for name, named in evaluation.noises.items():
        if unlike := settings_of(named).attention_problem(attention):
            raise ConfigError(f"--noises: {name}.{unlike} (--attention)")
        refuse_unusable_errors(f"--noises: {name}", settings_of(named))
    evaluation = evaluation.planned()
    if 0.0 not in evaluation.noise_levels:
        raise ConfigError(f"--levels {levels}: expected 0 among them, to which the other levels are compared")
    specs = {
        name: EvaluationSpec(
            model_role=name,
            arm_id=PRETRAINED,
            seed=0,
            step=0,
            device=device,
            dtype=dtype,
            attention=attention,
            prompt=prompt,
            generation=generation,
            evaluation=evaluation,
        )
        for name in sources
    }
    # Standard output is for the result; a scorer of a user's own may print too.
    with redirect_stdout(sys.stderr), ends_at_once(SIGTERM, f"{STOPPED.format(signal='SIGTERM')}\n"):
        from aqnpipe.cli.robustness.evaluating import evaluate_checkpoints, text_of

        report = evaluate_checkpoints(sources, specs, data, dataset, output, alpha)
    typer.echo(f"written: {output / 'robustness.json'}, robustness.csv and robustness.md", err=True)
    typer.echo(report.model_dump_json(indent=2) if json else "\n".join(text_of(report)))


def named_sources(checkpoints: Sequence[str]) -> dict[str, str]:
    """Return the source of every checkpoint by name: given as NAME=SOURCE, else the last part of its path."""
    sources: dict[str, str] = {}
    for given in checkpoints:
        name, separator, source = given.partition("=")
        if not separator:
            source = given
            path = Path(given)
            name = (path.resolve() if path.is_dir() else path).name
        if not _NAME.fullmatch(name):
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
    named: dict[str, Any] = {name: name for name in PRESETS if name in presets}
    if path is None:
        return named
    file = load_yaml(path, NoisesFile)
    if not trust_code:
        refuse_foreign_code(file, [path])
    found = file.root
    repeated = sorted({*named} & {*found})
    if repeated:
        raise ConfigError(f"--noises {path}: {repeated[0]} is also given as --noise, expected other names")
    return named | found


def _validated(kind: Any, settings: dict[str, Any]) -> Any:
    """Return settings as a model; ConfigError names the options that are wrong."""
    try:
        return TypeAdapter(kind).validate_python(settings)
    except ValidationError as error:
        said = describe_validation_error(error).replace("(top level): ", "")
        for name in settings:
            option = _OPTIONS.get(name, name.replace("_", "-"))
            said = re.sub(rf"(^|; ){name}\b(\.\d+)?", rf"\g<1>--{option}", said)
        raise ConfigError(said) from error
