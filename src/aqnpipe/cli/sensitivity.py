"""`aqnpipe sensitivity`: which layers are fragile; `aqnpipe sigmas`: a sigma per layer from a stored diagnosis.

`aqnpipe measure-noise`: the noise of an arm on a model: operators, share of the compute, and scale.
"""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from aqnpipe.cli.options import (
    GENERATED,
    NAMES,
    CpuThreads,
    ModelArgument,
    TrustCode,
    as_printed,
    check_writable,
    console_of,
    dataset_of,
    find_model,
    load,
    refuse_level,
    say_written,
    table_of,
    usable_device,
)
from aqnpipe.cli.study import refuse_unusable_errors
from aqnpipe.config.arm import Arm
from aqnpipe.config.base import describe_validation_error, replaced
from aqnpipe.config.custom_code import refuse_foreign_code
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.diagnosis import NEED_SENSITIVITY, NEEDS_PARITY, SigmaRule, SigmaStrategy
from aqnpipe.config.fault_spec import parse_fault
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.model import Attention, Dtype, ModelConfig
from aqnpipe.config.noise import FakeQuantization
from aqnpipe.config.study import read_arms
from aqnpipe.config.validation_messages import one_of
from aqnpipe.errors import ConfigError, DataError, ModelError, ReceiptError

if TYPE_CHECKING:
    from aqnpipe.artifacts.diagnoses import SensitivityFile
    from aqnpipe.diagnosis.sensitivity.first_order import ScoredText
    from aqnpipe.noise.receipts.receipt import Receipt


def sensitivity(
    model: ModelArgument,
    scale: Annotated[float, typer.Option(help="relative noise on matrix products, above 0 and below 1")] = 0.1,
    data: Annotated[str, typer.Option(help=f"{NAMES}; or a .txt file with texts as lines")] = "word_problems",
    texts: Annotated[int, typer.Option(min=1, help="number of texts, at most")] = 64,
    noise_seeds: Annotated[int, typer.Option(min=1, help="number of noise seeds")] = 2,
    fault: Annotated[
        list[str] | None, typer.Option(help="simulate a fault meanwhile, as in `aqnpipe diagnose --fault`")
    ] = None,
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda, cuda:1, npu, ...")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="number format of the computation")] = "float32",
    attention: Annotated[Attention, typer.Option(help="attention kernel")] = "eager",
    trust_code: TrustCode = False,
    json: Annotated[Path | None, typer.Option(help="write the result to this file")] = None,
    figure: Annotated[Path | None, typer.Option(help="write a picture over depth to this .svg or .png file")] = None,
    threads: CpuThreads = 1,
) -> None:
    """Measure which layers of a model are fragile: loss and accuracy with noise in one layer at a time.

    Also shows the first-order estimate of the same from one backward pass, which the diagnosis of a study uses, and how
    well it ranks the layers. Receipts prove the noise of every measurement.
    """
    import torch

    from aqnpipe.artifacts.diagnoses import SensitivityFile
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.artifacts.hardware import read_hardware
    from aqnpipe.diagnosis.api import device_label
    from aqnpipe.diagnosis.sensitivity import layers as measurement
    from aqnpipe.models.loading import load_tokenizer
    from aqnpipe.report.charts import check_format, write_sensitivity_chart

    refuse_level("--scale", scale)
    check_writable("--json", json)
    if figure is not None:
        check_format(figure)
    check_writable("--figure", figure)
    faults = tuple(parse_fault(spec) for spec in fault or ())
    target = usable_device(device)
    source = find_model(model, dtype, attention, random_weights=False)
    if not any((source.folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise ModelError(f"model {model!r}: found no tokenizer, expected tokenizer.json; texts cannot be read without")
    tokenizer = load_tokenizer(source.folder)
    scored = _texts(data, texts, tokenizer, trust_code=trust_code)
    torch.set_num_threads(threads)
    started, progress = time.monotonic(), console_of(stderr=True)
    with progress.status("loading") as status:
        measured = measurement.sensitivity(
            load(source, target, 0),
            scored,
            tokenizer=tokenizer,
            scale=scale,
            noise_seeds=range(noise_seeds),
            faults=faults,
            show_progress=status.update,
        )
    file = SensitivityFile(
        **measured.model_dump(),
        model=model,
        data=data,
        simulated_faults=tuple(fault or ()),
        device=device_label(target, read_hardware(target)),
        dtype=dtype,
        seconds=round(time.monotonic() - started, 2),
    )
    if json is not None:
        write_json(json, file)
    if figure is not None:
        write_sensitivity_chart(figure, file)
    say_written(json, figure)
    _show(file)


def _texts(data: str, number: int, tokenizer: Any, *, trust_code: bool) -> "list[ScoredText | str]":
    """Return at most `number` texts: test questions with gold solutions, or the lines of a text file."""
    from aqnpipe.data.loader import load_problems
    from aqnpipe.diagnosis.sensitivity.first_order import texts_of_problems

    path = Path(data)
    if path.suffix == ".txt":
        return list(_lines(path)[:number])
    # A generated data set has as many questions as are asked for, a stored one may have fewer.
    dataset = dataset_of(data, number if data in GENERATED else None, trust_code=trust_code)
    return list(texts_of_problems(load_problems(dataset, "test").head(number), PromptFormat(), tokenizer))


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError as error:
        raise DataError(f"--data {path}: no such file, expected texts as lines") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--data {path}: cannot be read ({error})") from error
    found = [line for line in lines if line]
    if not found:
        raise DataError(f"--data {path}: found no text, expected one per line")
    return found


def _show(file: "SensitivityFile") -> None:
    console, noise = console_of(stderr=False), f"noise of {100 * file.scale:g} % in one layer"
    layers = ", ".join(map(str, file.fragile_layers))
    if not file.fragile_layers:
        verdict = f"no fragile layer shown: {noise} raises the loss in none of them by more than chance"
    elif len(file.fragile_layers) == 1:
        verdict = f"layer {layers} is the most fragile: {noise} costs most there"
    else:
        verdict = (
            f"layers {layers} are the most fragile and cannot be told apart with these texts: {noise} costs most there"
        )
    console.print(verdict, soft_wrap=True)
    has_accuracy = file.accuracy is not None
    table = table_of("", ["layer"], ["estimate", "loss", "± s.e.", *(["accuracy", "± s.e."] if has_accuracy else [])])
    for layer in file.layers:
        cells = [f"{layer.estimate:+.4f}", f"{layer.loss_increase:+.4f}", _error(layer.loss_standard_error, 1, 4)]
        if layer.accuracy_change is not None:
            cells += [f"{100 * layer.accuracy_change:+.1f}", _error(layer.accuracy_standard_error, 100, 1)]
        table.add_row("output projection" if layer.layer is None else str(layer.layer), *cells)
    console.print(table)
    without = f"without noise: loss {file.loss:.4f} nats per token"
    if file.accuracy is not None:
        without += f", accuracy {100 * file.accuracy:.1f} % of {file.num_questions} questions"
    console.print(f"{without}; {file.num_texts} texts, {len(file.noise_seeds)} noise seeds, {file.seconds:.1f} s")
    if file.rank_correlation is not None:
        console.print(f"rank correlation of estimate and measured loss over layers: {file.rank_correlation:+.2f}")
    if file.untested:
        console.print(f"not tested, outside the layers: {', '.join(file.untested)}", soft_wrap=True)


def _error(value: float | None, factor: int, digits: int) -> str:
    return "" if value is None else f"{factor * value:.{digits}f}"


def sigmas(
    diagnosis: Annotated[Path, typer.Argument(help="file written by `aqnpipe diagnose --json`")],
    strategy: Annotated[
        SigmaStrategy, typer.Option(help="strategy that derives sigmas from the diagnosis")
    ] = "published",
    sensitivity: Annotated[
        Path | None,
        typer.Option(help="file written by `aqnpipe sensitivity --json`, for strategies that need the sensitivity"),
    ] = None,
    parity: Annotated[
        Path | None,
        typer.Option(help="file written by `aqnpipe parity --json`, for strategies that need the measured error"),
    ] = None,
    base_sigma: Annotated[float, typer.Option(help="sigma of a layer to which no rule applies")] = 0.05,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write to this file instead of standard output")
    ] = None,
) -> None:
    """Derive one AQN sigma per layer, with reasons, from a diagnosis; print it as YAML."""
    import polars as pl

    from aqnpipe.artifacts.diagnoses import SENSITIVITY_SCALE, DiagnosisFile, SensitivityFile, Verdict
    from aqnpipe.artifacts.files import read_json, write_yaml
    from aqnpipe.artifacts.measured_errors import measured_layer_errors
    from aqnpipe.diagnosis.sigmas import layer_sigmas

    users = {"--parity": (NEEDS_PARITY,), "--sensitivity": NEED_SENSITIVITY}
    for (option, strategies), given in zip(users.items(), (parity, sensitivity), strict=True):
        if given is not None and strategy not in strategies:
            expected = " or ".join(strategies)
            raise ConfigError(
                f"{option}: found beside --strategy {strategy}, which does not use it; expected --strategy {expected}"
            )
    file = read_json(diagnosis, DiagnosisFile)
    rows = [layer.scans for layer in file.layers if layer.scans is not None]
    if len(rows) < len(file.layers) or not rows:
        raise DataError(f"{diagnosis}: no scan metrics found, expected a diagnosis with --method all")
    try:
        rule = SigmaRule(base_sigma=base_sigma)
    except ValidationError as error:
        raise ConfigError(f"--base-sigma: {describe_validation_error(error)}") from error
    table = pl.DataFrame(rows)
    if sensitivity is not None:
        measured = read_json(sensitivity, SensitivityFile)
        # An estimate grows with the square of the noise; strategies take that of the usual scale.
        factor = (SENSITIVITY_SCALE / measured.scale) ** 2
        estimates = [part.estimate * factor for part in measured.layers if part.layer is not None]
        if len(estimates) != table.height:
            raise DataError(f"{sensitivity}: found {len(estimates)} layers, expected {table.height} as in {diagnosis}")
        table = table.with_columns(pl.Series("sensitivity", estimates))
    verdict = Verdict.model_validate(file.model_dump(include=set(Verdict.model_fields)))
    if parity is not None and file.weights_sha256 is None:
        raise DataError(
            f"{diagnosis}: no weights_sha256, so its model cannot be compared with that of {parity}; expected a "
            "diagnosis of a model in files, by this version of `aqnpipe diagnose`"
        )
    errors = None if parity is None else measured_layer_errors(parity, file.weights_sha256)
    known: dict[str, int | float | str] = {"model": file.model, "device": file.device}
    result = layer_sigmas(table, verdict, rule, strategy, errors=errors, metadata=known)
    if output is None:
        typer.echo(yaml.safe_dump(result.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)
    else:
        write_yaml(output, result)


def measure_noise(
    model: ModelArgument,
    arm: Annotated[str, typer.Option(help="id of an arm in the arms file")] = "E5",
    arms: Annotated[Path, typer.Option(help="arms file")] = Path("config/arms.yaml"),
    dtype: Annotated[Dtype, typer.Option(help="number format of the computation")] = "float32",
    attention: Annotated[Attention, typer.Option(help="attention kernel")] = "eager",
    trust_code: TrustCode = False,
    json: Annotated[Path | None, typer.Option(help="write the whole receipt to this file")] = None,
) -> None:
    """Apply the noise of an arm to a model for one training step and show the measurements.

    Exit code 2 if requested noise is missing, or noise was measured that was not requested.
    """
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.artifacts.measured_errors import with_figures
    from aqnpipe.models.loading import load_model, source_folder
    from aqnpipe.noise.measure_arm import measure_arm
    from aqnpipe.report.receipts import operator_table, phase_table, sync_text
    from aqnpipe.report.words import load_words

    known = read_arms(arms)
    if expected := one_of(arm, sorted(known)):
        raise ConfigError(f"--arm: found {arm!r}, expected {expected}, which {arms} defines")
    requested = known[arm]
    error = requested.operator_noise.error if requested.operator_noise else None
    if isinstance(error, MeasuredError) and error.machine is not None:
        raise ConfigError(
            f"--arm: {arm} has the noise of machine {error.machine}, which the jobs of a study measure; expected an "
            "arm with `from:` a file of `aqnpipe parity --json`, or with another error"
        )
    if not trust_code:
        refuse_foreign_code(requested, [arms])
    refuse_unusable_errors(f"{arms}: arms.{arm}", requested)
    check_writable("--json", json)
    try:
        settings = ModelConfig(source=model)
    except ValidationError as wrong:
        raise ConfigError(describe_validation_error(wrong).removeprefix("source: ")) from wrong
    loaded = load_model(source_folder(settings), dtype=dtype, attention=attention)
    figures_of = partial(with_figures, dtype=dtype, attention=attention, config=loaded.config.to_dict())
    measured = replaced(requested, MeasuredError, figures_of).on_attention(attention).planned()
    receipt = measure_arm(loaded, measured)
    if json is not None:
        write_json(json, receipt)
    words, console = load_words("en"), console_of(stderr=False, width=160)
    for table in (phase_table(receipt, words), operator_table(receipt, words)):
        console.print(as_printed(table))
    for line in (sync_text(receipt, words), *_notes(receipt, measured)):
        console.print(line)
    problems = receipt.problems()
    if problems:
        raise ReceiptError(f"arm {arm} on {model}: " + "; ".join(problems))
    console.print(f"arm {arm} on {model}: every phase has what was requested.")


def _notes(receipt: "Receipt", arm: Arm) -> list[str]:
    lines = []
    if (noise := arm.operator_noise) is not None:
        attention = "decomposed, with noise on both products"
        if isinstance(noise.error, FakeQuantization):
            attention = (
                "its products have no weight and are exact; the operands of products with a weight are quantized"
            )
        elif noise.attention == "fused":
            attention = "one fused operator with noise on its output"
        lines.append(f"attention: {attention}")
    for phase in dict.fromkeys(cell.phase for cell in receipt.weight_cells):
        cells = [cell for cell in receipt.weight_cells if cell.phase == phase]
        sigmas = [f"{'outside' if cell.layer is None else cell.layer}: {cell.sigma_measured:.2f}" for cell in cells]
        lines.append(f"AQN in {phase} by layer, measured, times the scheduled sigma: {', '.join(sigmas)}")
    if arm.aqn is not None and arm.aqn.layer_sigmas_from is not None:
        lines.append(
            "AQN: in a study the sigma of each layer comes from a diagnosis; here it was the same in every layer"
        )
    return lines
