"""Makes captures from the options of the command line."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from aqnpipe.artifacts.captures import Backend, CaptureConfig
from aqnpipe.cli.diagnose.loading import find_model, load
from aqnpipe.cli.diagnose.options import usable_device
from aqnpipe.config.base import FrozenModel, describe_validation_error
from aqnpipe.config.model import Attention, Dtype
from aqnpipe.errors import ConfigError
from aqnpipe.generation.vllm.requirements import check_vllm

if TYPE_CHECKING:
    from aqnpipe.parity.capture_file import Capture


class Side(FrozenModel):
    """One configuration of a model: how and where it is run."""

    backend: Backend = "transformers"
    dtype: Dtype = "float32"
    attention: Attention = "eager"
    device: str = "cpu"
    batch_size: int = 8
    padding: str = "left"
    decode: int = 4
    threads: int = 1


@dataclass(frozen=True)
class Bounds:
    """How large a capture may be."""

    max_megabytes: int
    rows: int


def parse_side(option: str, text: str) -> Side:
    """Return the side in text such as `dtype=bfloat16,attention=sdpa`; ConfigError if it is none."""
    settings: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = part.partition("=")
        if not separator or key in settings:
            raise ConfigError(f"{option} {text!r}: found {part!r}, expected key=value pairs, each key once")
        settings[key] = value
    refuse_unused(f"{option} {text!r}", settings.get("backend"), settings)
    unknown = sorted(settings.keys() - Side.model_fields.keys())
    if unknown:
        raise ConfigError(f"{option} {text!r}: found {unknown[0]}, expected {', '.join(Side.model_fields)}")
    return validated(option, settings)


def refuse_unused(option: str, backend: str | None, given: Iterable[str]) -> None:
    """Raise ConfigError for settings that a user gave and vLLM has no choice of."""
    unused = [name for name in given if name in ("attention", "padding")]
    if backend == "vllm" and unused:
        raise ConfigError(f"{option}: found {unused[0]}, which has no effect on vLLM, expected none")


def validated(option: str, settings: dict[str, Any]) -> Side:
    """Return the side with these settings; ConfigError, with the name of the option, for a value out of range."""
    try:
        side = Side.model_validate(settings, strict=False)
        config_of(side, Bounds(1, 1))
    except ValidationError as error:
        raise ConfigError(f"{option}: {describe_validation_error(error)}") from error
    return side


def config_of(side: Side, bounds: Bounds) -> CaptureConfig:
    """Return how a model is run for a side."""
    return CaptureConfig.model_validate(
        {
            "dtype": side.dtype,
            "attention": side.attention,
            "batch_size": side.batch_size,
            "padding": side.padding,
            "num_decoded": side.decode,
            "threads": side.threads,
            "max_bytes": bounds.max_megabytes * 1_000_000,
            "max_rows": bounds.rows,
        }
    )


def make_capture(
    model: str, side: Side, sequences: list[list[int]], bounds: Bounds, replay: "Capture | None" = None
) -> "Capture":
    """Return the capture of a model in one configuration; ConfigError or ModelError if it cannot be made."""
    import torch

    from aqnpipe.parity.capture import capture

    config = config_of(side, bounds)
    device = usable_device(side.device)
    source = find_model(model, side.dtype, side.attention, random_weights=False)
    if side.backend == "vllm":
        check_vllm(kind := device.type)  # type: ignore[arg-type]
        from aqnpipe.parity.vllm.capture import capture_vllm

        return capture_vllm(source.folder, model, sequences, config, kind, replay)  # type: ignore[arg-type]
    before = torch.get_num_threads()
    torch.set_num_threads(side.threads)
    try:
        return capture(load(source, device, 0), source.folder, model, sequences, config, replay)
    finally:
        torch.set_num_threads(before)


def folder_of(model: str) -> Path:
    """Return the folder of a model, which is refused if its family is none of a decoder."""
    return find_model(model, "float32", "eager", random_weights=False).folder
