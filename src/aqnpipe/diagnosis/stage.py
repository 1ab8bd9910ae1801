"""The stages srdd_diagnose and generate_layer_sigmas: they read and write the files of a diagnosis."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import torch
from torch import Tensor

from aqnpipe.artifacts.diagnoses import DiagnosisOrigin, LayerTable, Verdict
from aqnpipe.artifacts.files import atomic_path, read_json, read_table, write_json, write_table, write_yaml
from aqnpipe.artifacts.measured_errors import measured_layer_errors
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import has_digest
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.diagnosis import DiagnosisConfig, SigmaRule, SigmaStrategy
from aqnpipe.config.model import Attention, Dtype
from aqnpipe.config.noise import Machine
from aqnpipe.data.prompts import choose_examples, prompt_token_ids
from aqnpipe.device import RequestedDevice, resolve_device, torch_device
from aqnpipe.diagnosis.api import diagnose_model
from aqnpipe.diagnosis.sensitivity.first_order import ScoredText, texts_of_problems, with_sensitivity
from aqnpipe.diagnosis.sigmas import layer_sigmas
from aqnpipe.errors import DataError, ModelError
from aqnpipe.models.loading import load_model, load_tokenizer, weights_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAYERS_FILE = "layers.parquet"
VERDICT_FILE = "verdict.json"
PACE_SECONDS = 10.0


def diagnose(
    model_dir: Path,
    problems: Path,
    prompt: PromptFormat,
    machine: Machine,
    config: DiagnosisConfig,
    output_dir: Path,
    *,
    dtype: Dtype = "float32",
    attention: Attention = "eager",
    device: RequestedDevice = "auto",
    names: tuple[str, str] = ("", ""),
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Diagnose the model on `machine` and write layers.parquet and verdict.json, each atomically.

    The scans use the first num_prompts questions, the sensitivity at most the first sensitivity_texts. `names`: model
    and machine in the study, recorded in the verdict, as is the device of a machine that names its own. `say` gets what
    is probed, every 10 seconds, and the verdict. Raises DataError if there are too few questions, ModelError if the
    layer or site of a fault does not exist or a layer outputs NaN or infinity, ReceiptError if a simulated fault
    changed no value.
    """
    torch.set_num_threads(config.threads)
    found = resolve_device(device)
    target = torch_device(found.kind)
    tokenizer = load_tokenizer(model_dir)
    prompt_ids = [ids.to(target) for ids in read_prompts(problems, prompt, tokenizer, config.num_prompts)]
    model = load_model(model_dir, dtype=dtype, attention=attention, device=target)
    progress = _paced(lambda line: say(f"{'/'.join(names)}: {line}"))
    diagnosed = diagnose_model(
        model,
        prompt_ids,
        config,
        faults=machine.faults,
        weights=model_dir,
        show_progress=progress,
        names_kernels=not machine.faults,
    )
    if diagnosed.table is None:
        raise diagnosed.unscanned or ModelError("a diagnosis by all methods gave no table of layers; this is a bug")
    texts = read_texts(problems, prompt, tokenizer, config.sensitivity_texts)
    table = with_sensitivity(diagnosed.table, model, texts, machine.faults)
    write_table(output_dir / LAYERS_FILE, table, LayerTable)
    origin = DiagnosisOrigin(
        model=names[0],
        machine=names[1],
        weights_sha256=weights_sha256(model_dir),
        layers_sha256=sha256_of_file(output_dir / LAYERS_FILE),
        device=found.label if machine.device is not None else None,
    )
    write_json(output_dir / VERDICT_FILE, diagnosed.verdict.model_copy(update={"origin": origin}))
    say(f"{'/'.join(names)}: {diagnosed.verdict.verdict}")


def _paced(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes the first line on, and then one every 10 seconds: a layer may take a second."""
    last = -PACE_SECONDS

    def paced(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PACE_SECONDS:
            last = time.monotonic()
            say(line)

    return paced


def generate_layer_sigmas(
    layers: Path,
    verdict: Path,
    rule: SigmaRule,
    output: Path,
    model: str,
    machine: str,
    strategy: SigmaStrategy = "published",
    parity: Path | None = None,
) -> None:
    """Write the sigmas file that `strategy` derives from a diagnosis, and from a parity if it needs one.

    Raises DataError if the two files are not from the same diagnosis, or not of `model` on `machine`; ConfigError if
    the parity is of other weights or no machine's noise.
    """
    table, judged = _read(layers, verdict)
    origin = judged.origin
    if origin is None or (origin.model, origin.machine) != (model, machine):
        found = f"model {origin.model} on machine {origin.machine}" if origin else "an unknown model"
        raise DataError(f"{verdict}: found a diagnosis of {found}, expected model {model} on machine {machine}")
    metadata: dict[str, int | float | str] = {
        "model": model,
        "machine": machine,
        "weights_sha256": origin.weights_sha256,
    }
    errors = None
    if parity is not None:
        errors = measured_layer_errors(parity, origin.weights_sha256)
        metadata["parity_sha256"] = sha256_of_file(parity)
    write_yaml(output, layer_sigmas(table, judged, rule, strategy, errors=errors, metadata=metadata))


def _read(layers: Path, verdict: Path) -> tuple[pl.DataFrame, Verdict]:
    """Return the two files of a diagnosis; DataError if they are not of one."""
    table, judged = read_table(layers, LayerTable), read_json(verdict, Verdict)
    if judged.num_layers != table.height:
        raise DataError(f"{verdict}: num_layers is {judged.num_layers}, but {layers} has {table.height} rows")
    if judged.origin is not None and not has_digest(layers, judged.origin.layers_sha256):
        raise DataError(f"{layers}: not from the same diagnosis as {verdict} (SHA-256 differs)")
    return table, judged


def read_prompts(
    problems: Path, prompt: PromptFormat, tokenizer: "PreTrainedTokenizerBase", num_prompts: int
) -> list[Tensor]:
    """Return the token ids [tokens] of the first questions of a ProblemTable; DataError if it has fewer."""
    questions = read_table(problems, ProblemTable)["question"].head(num_prompts).to_list()
    if len(questions) < num_prompts:
        raise DataError(f"{problems}: {len(questions)} questions, expected at least num_prompts = {num_prompts}")
    examples = choose_examples(prompt, problems)
    return [torch.tensor(ids) for ids in prompt_token_ids(questions, prompt, tokenizer, examples)]


def read_texts(
    problems: Path, prompt: PromptFormat, tokenizer: "PreTrainedTokenizerBase", num_texts: int
) -> list[ScoredText]:
    """Return at most the first `num_texts` questions of a ProblemTable with their gold solutions."""
    table = read_table(problems, ProblemTable).head(num_texts)
    return texts_of_problems(table, prompt, tokenizer, choose_examples(prompt, problems))


def import_diagnosis(
    folder: Path,
    model_dir: Path,
    output_dir: Path,
    *,
    names: tuple[str, str],
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Write layers.parquet and verdict.json of the diagnosis in `folder` to `output_dir`.

    `names`: model and machine in this study. The verdict keeps where it came from. Raises DataError if the files are
    damaged, not of one diagnosis, or not of the weights in `model_dir`.
    """
    layers, verdict = folder / LAYERS_FILE, folder / VERDICT_FILE
    _, judged = _read(layers, verdict)
    origin = judged.origin
    if origin is None:
        raise DataError(f"{verdict}: does not say of which weights it is, expected a diagnosis of a study")
    weights = weights_sha256(model_dir)
    if origin.weights_sha256 != weights:
        raise DataError(
            f"{verdict}: a diagnosis of weights {origin.weights_sha256[:12]} (model {origin.model} there), expected "
            f"those of model {names[0]} here, {weights[:12]}"
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    with atomic_path(output_dir / LAYERS_FILE) as temporary:
        shutil.copyfile(layers, temporary)
    source = f"{folder}: {origin.model} on {origin.machine}"
    taken = origin.model_copy(update={"model": names[0], "machine": names[1], "imported_from": source})
    write_json(output_dir / VERDICT_FILE, judged.model_copy(update={"origin": taken}))
    say(f"{'/'.join(names)}: {judged.verdict}, diagnosed elsewhere ({source})")
