"""Options that several commands have (files, devices, models, data sets, noise levels), and the output of commands."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aqnpipe.config.base import MOST_THREADS, FrozenModel, describe_validation_error
from aqnpipe.config.custom_code import refuse_foreign_code
from aqnpipe.config.dataset import DatasetConfig, GeneratedDataset, PromptFormat
from aqnpipe.config.model import Attention, Dtype, ModelConfig
from aqnpipe.config.yaml_file import load_yaml
from aqnpipe.device import DeviceKind, resolve_device, torch_device
from aqnpipe.errors import ConfigError, DeviceError, ModelError, StorageError, first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from aqnpipe.report import tables

TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="run code, named by these files, from outside of the working directory")
]
ModelArgument = Annotated[str, typer.Argument(help="model: a folder, a hub id, or `tiny`")]
StudyArgument = Annotated[Path, typer.Argument(help="study file, described in config/README.md")]
CpuThreads = Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="CPU threads")]

_DEVICE = re.compile(r"(cuda|npu)(?::(\d+))?")


def check_writable(option: str, path: Path | None) -> None:
    """Raise StorageError unless a file can be written at `path`. No folder is made, and nothing is left behind."""
    if path is None:
        return
    if path.is_dir():
        raise StorageError(f"{option} {path}: found a folder, expected the name of a file")
    check_folder(option, path.parent)


def check_folder(option: str, folder: Path) -> None:
    """Raise StorageError unless `folder` exists and files can be written into it."""
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise StorageError(f"{option}: {folder}: found {found}, expected an existing folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StorageError(f"{option}: {folder}: cannot be written ({error.strerror})") from error


def parse_devices(option: str, text: str) -> tuple[str, ...]:
    """Return torch's names of the devices in `text`: `all`, or a list such as `cuda:0,cuda:1` or `cpu,cpu`.

    `all` means every GPU or NPU that this process sees. The CPU never stands in for them. Raises DeviceError if a
    device is not there, ConfigError if a name is unknown or an accelerator is named twice.
    """
    if text.strip() == "all":
        found = resolve_device("auto")
        if found.kind == "cpu":
            raise DeviceError(f"{option} all: found no GPU or NPU on this machine; `--devices cpu` tests its CPU")
        return tuple(torch_device(found.kind, index) for index in range(found.count))
    names = tuple(part.strip() for part in text.split(","))
    names = tuple(f"{name}:0" if name in ("cuda", "npu") else name for name in names)
    for name in names:
        known = _DEVICE.fullmatch(name)
        if name != "cpu" and known is None:
            raise ConfigError(f"{option}: found {name!r}, expected all, or a list of cuda:N, npu:N or cpu")
        if known is not None:
            kind: DeviceKind = "cuda" if known[1] == "cuda" else "npu"
            count = resolve_device(kind).count
            if int(known[2] or 0) >= count:
                raise DeviceError(f"{option}: {name} is not there; found {kind}:0 to {kind}:{count - 1}")
        if name != "cpu" and names.count(name) > 1:
            raise ConfigError(f"{option} {text}: {name} is named twice, expected once")
    return names


def usable_device(name: str) -> "torch.device":
    """Return the torch device `name`; ConfigError if it cannot be used."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        # torch goes on with a list of all of its backends.
        reason = first_line(error).split(". ")[0]
        raise ConfigError(f"--device {name}: not usable here ({reason})") from error
    return device


class ModelSource(FrozenModel):
    """Where the weights of a model come from, and how it computes. `name` is what the user called it."""

    name: str
    folder: Path
    random_weights: bool
    dtype: Dtype
    attention: Attention


def find_model(name: str, dtype: Dtype, attention: Attention, *, random_weights: bool) -> ModelSource:
    """Return the source of a model, after a download if it has to be; ModelError if it cannot be diagnosed.

    The shape of the model is created without weights, so that a model of another family is refused before they are
    read.
    """
    from aqnpipe.models.layout import decoder_layers, layer_sites
    from aqnpipe.models.loading import create_model

    folder = Path(name) if random_weights else _folder_of(name)
    for layer in decoder_layers(create_model(folder, "meta", attention=attention)):
        layer_sites(layer)
    return ModelSource(name=name, folder=folder, random_weights=random_weights, dtype=dtype, attention=attention)


def load(source: ModelSource, device: "torch.device", seed: int) -> "nn.Module":
    """Return the model on `device`, with the weights in its folder or with random ones drawn by `seed`."""
    from aqnpipe.models.loading import create_model, load_model
    from aqnpipe.seeding import derive_seed

    if source.random_weights:
        weights_seed = derive_seed(seed, "diagnosis.weights")
        return create_model(source.folder, device, dtype=source.dtype, attention=source.attention, seed=weights_seed)
    return load_model(source.folder, dtype=source.dtype, attention=source.attention, device=device)


def word_problems(source: ModelSource, num_prompts: int, device: "torch.device") -> "list[Tensor] | None":
    """Return word problems as prompts [tokens]; None if the model has no tokenizer of its own or random weights."""
    import torch

    from aqnpipe.data.loader import load_problems
    from aqnpipe.data.prompts import prompt_token_ids
    from aqnpipe.models.loading import load_tokenizer

    if source.random_weights or not (source.folder / "tokenizer.json").is_file():
        return None
    questions = load_problems(GeneratedDataset(num_train=num_prompts), "train")["question"].to_list()
    rows = prompt_token_ids(questions, PromptFormat(), load_tokenizer(source.folder))
    return [torch.tensor(ids).to(device) for ids in rows]


def _folder_of(name: str) -> Path:
    from aqnpipe.models.loading import source_folder
    from aqnpipe.models.prepared import find_base, has_only_adapters

    try:
        folder = source_folder(ModelConfig.model_validate({"source": name}))
    except ValidationError as error:
        raise ModelError(describe_validation_error(error).split("Value error, ")[-1]) from error
    if has_only_adapters(folder):
        raise ModelError(
            f"model {str(folder)!r}: a checkpoint of adapters; a diagnosis is of the machine and needs whole "
            f"weights, expected its base {str(find_base(folder))!r}"
        )
    return folder


class DatasetFile(FrozenModel):
    """Content of a file that describes a data set: the section `dataset` of a study."""

    dataset: DatasetConfig


GENERATED = ("word_problems", "comparison")
NAMES = (
    "word_problems, comparison (generated), gsm8k, a folder with train and test as .jsonl, .csv or .parquet, one such "
    "file, a .yaml file with the section `dataset` of a study (columns, formats of answers), or a hub id"
)


def dataset_of(data: str, num_test: int | None, *, trust_code: bool) -> Any:
    """Return the data set (`DatasetConfig`) that `--data` names, with its first `num_test` test questions or all.

    Raises ConfigError if it is neither a known name nor of the form of a folder or hub id, or if its file has tasks
    from outside of the working directory that are not trusted.
    """
    settings: dict[str, Any]
    if Path(data).suffix in (".yaml", ".yml"):
        described: Any = load_yaml(Path(data), DatasetFile).dataset
        if not trust_code:
            refuse_foreign_code(described, [Path(data)])
        return described if num_test is None else described.model_copy(update={"num_test": num_test})
    if data in GENERATED:
        settings = {"source": "generated", "task": data}
    elif data == "gsm8k":
        settings = {"source": "hub", "hub_id": "openai/gsm8k"}
    elif Path(data).exists():
        settings = {"source": "local", "path": data}
    elif data.startswith((".", "/")) or Path(data).suffix in (".jsonl", ".csv", ".parquet"):
        raise ConfigError(f"--data {data}: no such file or folder, expected {NAMES}")
    else:
        settings = {"source": "hub", "hub_id": data}
    if num_test is not None:
        settings["num_test"] = num_test
    try:
        return TypeAdapter(DatasetConfig).validate_python(settings)
    except ValidationError as error:
        raise ConfigError(f"--data: found {data!r}, which is no file or folder here, expected {NAMES}") from error


def console_of(*, stderr: bool, width: int | None = None) -> Console:
    """Return a console on standard output, or on standard error for progress; `width`: where that is no terminal."""
    console = Console(stderr=stderr, soft_wrap=False, highlight=False)
    if width is not None and not console.is_terminal:
        console.width = width
    return console


def table_of(title: str, left: Sequence[str], right: Sequence[str], remarks: Sequence[str] = ()) -> Table:
    """Return an empty table with columns of text, of numbers, and of remarks, which break into lines."""
    table = Table(title=escape(title) or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", overflow="fold")
    for column in remarks:
        table.add_column(column)
    return table


def as_printed(found: "tables.Table") -> Table:
    """Return a table of the report for the terminal."""
    number = found.num_text_columns
    table = table_of(found.caption, found.headers[:number], found.headers[number:])
    for row in found.rows:
        table.add_row(*map(escape, row.cells))
    return table


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line per row, with the cells of a column in the same place; rows have equally many cells."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def say_written(*paths: Path | None) -> None:
    """Say on standard error which of the files that a user asked for are written."""
    for path in paths:
        if path is not None:
            typer.echo(f"written: {path}", err=True)


def given_options(context: typer.Context) -> list[str]:
    """Return the names of the arguments and options that are on the command line, in the order of the command's own."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def refuse_level(option: str, level: float, *, may_be_zero: bool = False) -> None:
    """Raise ConfigError for a relative noise outside its range, with the share that a percentage probably means."""
    if not (0 < level < 1 or (may_be_zero and level == 0)):
        meant = f"; did you mean {level / 100:g}?" if 1 <= level < 100 else ""
        least = "" if level >= 1 else "at least 0 and " if may_be_zero else "above 0 and "
        raise ConfigError(f"{option}: found {level:g}, expected {least}below 1{meant}")
