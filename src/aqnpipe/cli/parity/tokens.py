"""The token ids of a capture: random ones by a seed, the lines of a text, or ids from a JSON file."""

import json
from pathlib import Path

from aqnpipe.config.model import read_model_config
from aqnpipe.errors import ConfigError


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
