"""`aqnpipe diagnose`: diagnose any model on this machine, without a study."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.dataset import GeneratedDataset, PromptFormat
from aqnpipe.config.diagnosis import DiagnosisConfig, DiagnosisMethod
from aqnpipe.config.fault_spec import parse_fault
from aqnpipe.config.model import Attention, Dtype, ModelConfig, read_model_config
from aqnpipe.errors import ConfigError, ModelError, first_line

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor, nn

    from aqnpipe.artifacts.diagnoses import DiagnosisFile, LayerMetrics

EXIT_CODES = {"healthy": 0, "fault": 3, "abstain": 4}

_RANDOM_PROMPT_TOKENS = 64

_SHOWN_SCANS = ("gain", "kurtosis", "instability")


def diagnose(
    model: Annotated[str, typer.Argument(help="model: a folder, a hub id, or `tiny`")],
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="simulate a fault: comma-separated key=value pairs, keys type, layer, magnitude, sparsity, site"
        ),
    ] = None,
    method: Annotated[
        DiagnosisMethod, typer.Option(help="exact probes, statistical scans, or both; exact probes decide if they run")
    ] = "all",
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda, cuda:1, npu, ...")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="number format of the computation")] = "float32",
    attention: Annotated[Attention, typer.Option(help="attention kernel")] = "eager",
    json: Annotated[
        Path | None, typer.Option(help="write the verdict and the metrics of every layer to this file")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="number of prompts for the scans")] = 5,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="draw random weights for the shape in the config.json of the folder"),
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="seed of probes, scan noise and random weights")] = 0,
) -> None:
    """Diagnose this machine: find faulty layers, sites and channels. Exit code 0: healthy, 3: fault, 4: no verdict.

    The weights of one layer at a time are replaced by known ones and then restored. A model with random weights and the
    real shape tests a device as well as a trained model.
    """
    import torch

    from aqnpipe.artifacts.diagnoses import DiagnosisFile
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.diagnosis.diagnose import diagnose_model, layer_metrics

    console = _console(stderr=True)
    started = time.monotonic()
    faults = tuple(parse_fault(spec) for spec in fault or ())
    config = DiagnosisConfig(num_prompts=prompts, threads=threads, seed=seed)
    target = _device(device)
    torch.set_num_threads(config.threads)
    loaded, prompt_ids = _load(model, target, dtype, attention, config, random_weights)
    with console.status("loading") as status:
        diagnosed = diagnose_model(
            loaded, prompt_ids, config, faults=faults, method=method, show_progress=status.update
        )
    file = DiagnosisFile.model_validate(
        {
            **diagnosed.verdict.model_dump(),
            "model": model,
            "device": _device_name(target),
            "dtype": dtype,
            "seconds": round(time.monotonic() - started, 2),
            "layers": [layer.model_dump() for layer in layer_metrics(diagnosed)],
        }
    )
    if json is not None:
        write_json(json, file)
        console.print(f"written: {json}", highlight=False)
    _show(file)
    raise typer.Exit(EXIT_CODES[file.verdict])


def _device(name: str) -> "torch.device":
    """Return the torch device `name`; ConfigError if it cannot be used."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = first_line(error)
        raise ConfigError(f"--device {name}: not usable here ({reason})") from error
    return device


def _device_name(device: "torch.device") -> str:
    import platform

    from aqnpipe.device import name_of_device

    name = name_of_device(device)
    if name is not None:
        return name
    return f"{device} ({platform.processor() or platform.machine()})"


def _load(
    source: str,
    device: "torch.device",
    dtype: Dtype,
    attention: Attention,
    config: DiagnosisConfig,
    random_weights: bool,
) -> "tuple[nn.Module, list[Tensor]]":
    """Return the model and the prompts of the scans: word problems or, without a tokenizer, random tokens."""
    import torch

    from aqnpipe.models.adapted import find_base, has_only_adapters
    from aqnpipe.models.loading import load_model, source_folder
    from aqnpipe.seeding import derive_seed, keyed_generator

    if random_weights:
        loaded = _random_model(Path(source), device, dtype, attention, derive_seed(config.seed, "diagnosis.weights"))
    else:
        try:
            folder = source_folder(ModelConfig.model_validate({"source": source}))
        except ValidationError as error:
            raise ModelError(describe_validation_error(error).split("Value error, ")[-1]) from error
        if has_only_adapters(folder):
            raise ModelError(
                f"model {str(folder)!r}: a checkpoint of adapters; a diagnosis is of the machine and needs whole "
                f"weights, expected its base {str(find_base(folder))!r}"
            )
        loaded = load_model(folder, dtype=dtype, attention=attention, device=device)
        if (folder / "tokenizer.json").is_file():
            return loaded, [ids.to(device) for ids in _word_problems(folder, config.num_prompts)]
    vocabulary = loaded.get_input_embeddings().num_embeddings  # type: ignore[operator]
    shape = (config.num_prompts, _RANDOM_PROMPT_TOKENS)
    ids = torch.randint(0, vocabulary, shape, generator=keyed_generator("cpu", config.seed, "diagnosis.prompts"))
    return loaded, list(ids.to(device))


def _word_problems(folder: Path, num_prompts: int) -> "list[Tensor]":
    import torch

    from aqnpipe.data.loader import load_problems
    from aqnpipe.data.prompts import prompt_token_ids
    from aqnpipe.models.loading import load_tokenizer

    questions = load_problems(GeneratedDataset(num_train=num_prompts), "train")["question"].to_list()
    return [torch.tensor(ids) for ids in prompt_token_ids(questions, PromptFormat(), load_tokenizer(folder))]


def _random_model(folder: Path, device: "torch.device", dtype: Dtype, attention: Attention, seed: int) -> "nn.Module":
    """Return a model with the shape in `folder`/config.json and random weights, created in `dtype` on `device`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    read_model_config(folder)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention
            )
    except (OSError, ValueError) as error:
        raise ModelError(f"model {str(folder)!r} cannot be created: {first_line(error)}") from error
    return model.eval()


def _console(*, stderr: bool) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=False)


def _show(file: "DiagnosisFile") -> None:
    """Print verdict, faults and layers on standard output, within 80 columns."""
    from rich.text import Text

    console = _console(stderr=False)
    style = {"healthy": "bold green", "fault": "bold red", "abstain": "bold yellow"}[file.verdict]
    console.print(Text(file.verdict.upper(), style), Text(f"{file.model} on {file.device}, {file.dtype}"))
    console.print(Text(file.reason))
    if file.faults:
        faults = _table("Faults", left=("layer", "site", "type"), right=("channels", "magnitude", "threshold"))
        for fault in file.faults:
            faulty = fault.num_faulty_channels
            channels = "?" if faulty is None else f"{faulty} of {fault.num_channels}"
            magnitude = "?" if fault.magnitude is None else f"{fault.magnitude:.3g}"
            faults.add_row(str(fault.layer), fault.site, fault.type, channels, magnitude, fault.threshold or "")
        console.print(faults)
    layers = _table("Layers", left=("layer", "faulty sites"), right=("probed", "deviation", *_SHOWN_SCANS))
    for layer in file.layers:
        layers.add_row(str(layer.layer), *_layer_cells(layer))
    console.print(layers)
    cost = f"cost: {file.forward_equivalents:.1f} whole-model forwards ({file.exact_forward_equivalents:.1f} exact, "
    console.print(Text(f"{cost}{file.statistical_forward_equivalents:.1f} statistical), {file.seconds:.1f} s"))


def _table(title: str, *, left: tuple[str, ...], right: tuple[str, ...]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _layer_cells(layer: "LayerMetrics") -> list[str]:
    if layer.largest_deviation is None:
        probed = ["", "", ""]
    else:
        probed = [", ".join(layer.faulty_sites), f"{layer.elements_probed:,}", f"{layer.largest_deviation:.2g}"]
    scans = layer.scans or {}
    return probed + [f"{value:.3g}" if isinstance(value := scans.get(key), float) else "" for key in _SHOWN_SCANS]
