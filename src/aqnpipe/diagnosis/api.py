"""`aqnpipe.diagnose`: the diagnosis of a model in memory, with what a file of it says."""

import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from aqnpipe.artifacts.diagnoses import DiagnosisFile
from aqnpipe.artifacts.hardware import Hardware, read_hardware
from aqnpipe.artifacts.provenance import versions
from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.diagnosis import DiagnosisConfig, DiagnosisMethod
from aqnpipe.config.fault_spec import parse_fault
from aqnpipe.config.model import Dtype
from aqnpipe.config.noise import Fault
from aqnpipe.diagnosis.diagnose import diagnose_model, layer_metrics
from aqnpipe.diagnosis.kernels import write_reproducer
from aqnpipe.errors import ConfigError, ModelError
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.loading import weights_sha256
from aqnpipe.seeding import keyed_generator

RANDOM_PROMPT_TOKENS = 64


def diagnose(
    model: nn.Module,
    *,
    method: DiagnosisMethod = "all",
    prompt_ids: Sequence[Tensor] | None = None,
    faults: Sequence[Fault | str] = (),
    name: str | None = None,
    weights: Path | None = None,
    reproducer: Path | None = None,
    show_progress: Callable[[str], None] = lambda line: None,
    **options: object,
) -> DiagnosisFile:
    """Diagnose the machine that `model` is on.

    The weights of one layer at a time are replaced by known ones and then restored bit for bit, also after an error.
    The result shows `verdict` ("healthy", "fault" or "abstain"), `faults`, `untested`, `cost` and everything else that
    `aqnpipe diagnose --json` writes.

    - model: a causal language model of transformers.
    - method: exact probes, which decide, or also the published statistical scans.
    - prompt_ids: prompts [tokens] of the scans; by default random tokens.
    - faults: faults to simulate, as in `type=saturation,layer=3,magnitude=0.3`.
    - name: the name of the model in the result.
    - weights: the folder that the model was loaded from and has not changed since; its weights are compared with it.
    - reproducer: a folder; if a kernel errs, a short script that shows it without aqnpipe is written there.
    - show_progress: called with a line of text before each part of the work.
    - options: settings of the diagnosis by their names in a study (`seed`, `num_prompts`, ...).

    Raises ConfigError if an option or a fault is unknown, ModelError if the model is of another family, on several
    devices or quantized.
    """
    config = _config(method, options)
    simulated = tuple(parse_fault(fault) if isinstance(fault, str) else fault for fault in faults)
    _refuse(model)
    started, clock = datetime.now(UTC), time.monotonic()
    hardware = read_hardware(device_of(model))
    prompts = random_prompts(model, config) if prompt_ids is None else [ids.to(device_of(model)) for ids in prompt_ids]
    with _threads(config.threads if "threads" in options else None):
        diagnosed = diagnose_model(
            model, prompts, config, faults=simulated, method=method, show_progress=show_progress, weights=weights
        )
    if reproducer is not None and diagnosed.kernels is not None:
        kernels, device = diagnosed.verdict.kernels, str(device_of(model))
        write_reproducer(diagnosed.kernels, kernels, device, reproducer, simulated=bool(simulated))
    settings = getattr(model, "config", None)
    return DiagnosisFile.model_validate(
        {
            **diagnosed.verdict.model_dump(),
            "model": name or getattr(settings, "name_or_path", "") or type(model).__name__,
            "weights_sha256": None if weights is None else weights_sha256(weights),
            "device": device_label(device_of(model), hardware),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "attention": str(getattr(settings, "_attn_implementation", None) or "unknown"),
            "seed": config.seed,
            "time": started,
            "host": socket.gethostname(),
            "hardware": hardware,
            "versions": versions(),
            "seconds": round(time.monotonic() - clock, 2),
            "layers": [layer.model_dump() for layer in layer_metrics(diagnosed)],
        }
    )


def random_prompts(model: nn.Module, config: DiagnosisConfig, num_tokens: int = RANDOM_PROMPT_TOKENS) -> list[Tensor]:
    """Return `num_prompts` prompts [tokens] of random tokens on the device of `model`."""
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    shape = (config.num_prompts, num_tokens)
    ids = torch.randint(0, vocabulary, shape, generator=keyed_generator("cpu", config.seed, "diagnosis.prompts"))
    return list(ids.to(device_of(model)))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the weights of `model`."""
    return next(model.parameters()).device


def device_label(device: torch.device, hardware: Hardware) -> str:
    """Return text for a device: the name of a GPU or NPU, or `cpu` and its instruction set."""
    return hardware.name if device.type != "cpu" else f"{device} ({platform.processor() or platform.machine()})"


def _refuse(model: nn.Module) -> None:
    """Raise ModelError unless `model` is of a known family, on one device, in a number format that can be probed."""
    decoder_layers(model)
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ModelError(
            f"{type(model).__name__}: its weights are on {', '.join(devices)}, expected all of them on one device"
        )
    dtype = str(next(decoder_layers(model).parameters()).dtype).removeprefix("torch.")
    if dtype not in get_args(Dtype):
        raise ModelError(f"{type(model).__name__}: its layers are {dtype}, expected {', '.join(get_args(Dtype))}")


def _config(method: str, options: dict[str, object]) -> DiagnosisConfig:
    if method not in get_args(DiagnosisMethod):
        raise ConfigError(f"diagnose: method is {method!r}, expected {', '.join(get_args(DiagnosisMethod))}")
    try:
        return DiagnosisConfig.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"diagnose: {describe_validation_error(error)}") from error


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Compute with `number` CPU threads in the body; with those of the process if it is None."""
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)
