"""Makes captures from the options of the command line, of random token ids, the lines of a text, or ids in a file."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from aqnpipe.artifacts.parities import CaptureConfig
from aqnpipe.cli.options import find_model, load, usable_device
from aqnpipe.config.base import describe_validation_error, key_values
from aqnpipe.config.model import read_model_config
from aqnpipe.device import DeviceKind, nvidia_capability
from aqnpipe.errors import ConfigError
from aqnpipe.generation.vllm.launch import BATCH_INVARIANT, check_vllm, why_not_batch_invariant

if TYPE_CHECKING:
    from aqnpipe.parity.capture_file import Capture


_WITHOUT_EFFECT = {"vllm": ("attention", "padding"), "transformers": ("tensor_parallel", "batch_invariant")}


_KEYS = (
    *("backend", "dtype", "attention", "device", "batch_size", "padding", "decode", "threads"),
    *("tensor_parallel", "batch_invariant"),
)


def parse_side(option: str, text: str) -> CaptureConfig:
    """Return the configuration in text such as `dtype=bfloat16,attention=sdpa`; ConfigError if it is none."""
    settings = key_values(option, text, _KEYS) if text.strip() else {}
    refuse_unused(f"{option} {text!r}", settings.get("backend"), settings)
    # A refusal names the number, not its text.
    return validated(option, {key: int(value) if value.isdecimal() else value for key, value in settings.items()})


def refuse_unused(option: str, backend: str | None, given: Iterable[str]) -> None:
    """Raise ConfigError for settings that a user gave and the backend has no choice of."""
    unused = [name for name in given if name in _WITHOUT_EFFECT.get(backend or "transformers", ())]
    if unused:
        name = "vLLM" if backend == "vllm" else "transformers"
        raise ConfigError(f"{option}: found {unused[0]}, which has no effect on {name}, expected none")


def validated(option: str, settings: Mapping[str, Any]) -> CaptureConfig:
    """Return a configuration with these settings; ConfigError, with the name of the option, for a wrong value."""
    try:
        return CaptureConfig.model_validate(settings, strict=False)
    except ValidationError as error:
        raise ConfigError(f"{option}: {describe_validation_error(error)}") from error


def make_capture(
    model: str, config: CaptureConfig, sequences: list[list[int]], replay: "Capture | None" = None
) -> "Capture":
    """Return the capture of a model in one configuration; ConfigError or ModelError if it cannot be made."""
    from aqnpipe.parity.capture import capture

    device = usable_device(config.device)
    source = find_model(model, config.dtype, config.attention, random_weights=False)
    if config.backend == "vllm":
        kind: DeviceKind = device.type  # type: ignore[assignment] # torch has a str
        check_vllm(kind)
        from aqnpipe.parity.vllm.capture import capture_vllm

        config = config.model_copy(update={"batch_invariant": _requested_invariance(config.batch_invariant, kind)})
        return capture_vllm(source.folder, model, sequences, config, kind, replay)
    return capture(load(source, device, 0), source.folder, model, sequences, config, replay)


def folder_of(model: str) -> Path:
    """Return the folder of a model, which is refused if its family is none of a decoder."""
    return find_model(model, "float32", "eager", random_weights=False).folder


def _requested_invariance(found: bool | None, device: DeviceKind) -> bool:
    """Return whether vLLM's batch-invariant mode is requested; ConfigError if the device does not have it."""
    place = "batch-invariant mode"
    if found is None:
        value, place = os.environ.get(BATCH_INVARIANT, "0"), f"the environment variable {BATCH_INVARIANT}"
        if value not in ("0", "1"):
            raise ConfigError(f"{place}: found {value!r}, expected 0 or 1")
        found = value == "1"
    reason = why_not_batch_invariant(
        is_requested=True,
        device=device,
        capability=nvidia_capability(device),
        noised_rollouts=False,
    )
    if found and reason:
        raise ConfigError(f"{place}: found it on, expected off: {reason}")
    return found


def token_ids(data: Path | None, folder: Path, num_sequences: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Return at most `num_sequences` sequences of at most `num_tokens` ids for the model in `folder`.

    Raises ConfigError, in one line, if the file has none.
    """
    if data is None:
        return _random(folder, num_sequences, num_tokens, seed)
    if not data.is_file():
        raise ConfigError(f"--data {data}: found {'a folder' if data.is_dir() else 'no such file'}, expected a file")
    try:
        text = data.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {data}: cannot be read as text ({error})") from error
    rows = _stored(data, text) if data.suffix == ".json" else _tokenised(data, text, folder, num_sequences)
    return [ids[:num_tokens] for ids in rows[:num_sequences]]


def _random(folder: Path, num_sequences: int, num_tokens: int, seed: int) -> list[list[int]]:
    import torch

    from aqnpipe.seeding import keyed_generator

    vocabulary = read_model_config(folder).get("vocab_size")
    if not isinstance(vocabulary, int):
        raise ConfigError(f"{folder / 'config.json'}: no vocab_size for random token ids; expected --data FILE")
    generator = keyed_generator("cpu", seed, "parity.tokens")
    rows: list[list[int]] = torch.randint(vocabulary, (num_sequences, num_tokens), generator=generator).tolist()
    return rows


def _stored(data: Path, text: str) -> list[list[int]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--data {data}: not valid JSON ({error})") from error
    is_ids = isinstance(rows, list) and all(
        isinstance(ids, list) and ids and all(type(token) is int for token in ids) for ids in rows
    )
    if not is_ids or not rows:
        raise ConfigError(f"--data {data}: expected a list of lists of token ids")
    return rows


def _tokenised(data: Path, text: str, folder: Path, num_sequences: int) -> list[list[int]]:
    from aqnpipe.models.loading import load_tokenizer

    lines = [line for line in text.splitlines() if line.strip()][:num_sequences]
    if not lines:
        raise ConfigError(f"--data {data}: found no text, expected a text in each line")
    tokenizer = load_tokenizer(folder)
    return [list(tokenizer(line)["input_ids"]) for line in lines]
