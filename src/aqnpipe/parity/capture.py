"""Runs fixed tokens through a model and records every operator on the sampled ones."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import polars as pl
import torch
from torch import Tensor

from aqnpipe.artifacts.parities import CaptureConfig, CaptureIdentity
from aqnpipe.artifacts.provenance import versions
from aqnpipe.errors import ConfigError, DataError, ModelError
from aqnpipe.models.layout import decoder_layers
from aqnpipe.parity.capture_file import OPERATOR_COLUMNS, TOKEN_COLUMNS, Capture
from aqnpipe.parity.identity import compare_with_files, machine_facts, model_facts, tokens_sha256
from aqnpipe.parity.mapping import Runner, prove
from aqnpipe.parity.recorder import Recorder, Recording, replaying
from aqnpipe.parity.sample import Sample, Score, choose_sample

_SHARE_OF_LIMIT = 0.95
"""The rest is for tables and names."""

Scores = dict[tuple[int, int], Score]


class Pass(NamedTuple):
    """A pass over all tokens of `sequences`, the last `num_decoded` of each decoded.

    `fed`: results that are put in the place of the operators' own. `judges`: see `Recorder`.
    """

    sequences: Sequence[Sequence[int]]
    num_decoded: int
    sample: Sample
    fed: Mapping[str, Tensor] | None = None
    judges: bool = True


class Engine(Protocol):
    """What runs a model of `num_layers` layers for a capture.

    `proven`: what random weights gave in some layers, 0 among them, where every operator was what its name says.
    """

    num_layers: int
    proven: Recording

    def run(self, asked: Pass) -> tuple[Recording, Scores]:
        """Return what was recorded of the sample, and the scores of all tokens."""

    def facts(self) -> dict[str, Any]:
        """Return the fields of a capture's identity that the engine decides."""


def capture(
    model: Any,
    folder: Path,
    source: str,
    sequences: Sequence[Sequence[int]],
    config: CaptureConfig,
    replay: Capture | None = None,
) -> Capture:
    """Return the capture of a loaded transformers model, whose files are in `folder`, with `config.threads`.

    Raises ModelError if its operators cannot be mapped, ConfigError if not one token fits into `config.max_bytes`.
    """
    check_sequences(sequences, config, int(model.config.vocab_size))
    fed = None if replay is None else replay_values(replay)
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        return captured(_Transformers(model, folder, config), folder, source, sequences, config, replay, fed)
    finally:
        torch.set_num_threads(before)


class _Transformers:
    """A transformers model as the engine of a capture."""

    def __init__(self, model: Any, folder: Path, config: CaptureConfig) -> None:
        self._model, self._config = model, config
        self.num_layers = len(decoder_layers(model))
        self._compared, self._stale = compare_with_files(model.state_dict(), folder)
        interleaved, self.proven = prove(model)
        self._runner = Runner(model, config.batch_size, config.padding, interleaved=interleaved)

    def run(self, asked: Pass) -> tuple[Recording, Scores]:
        """See `Engine`."""
        recorder = Recorder(asked.sample, edit=None if asked.fed is None else replaying(asked.fed), judges=asked.judges)
        scores = self._runner.run(asked.sequences, asked.num_decoded, recorder)
        return recorder.finish(), scores

    def facts(self) -> dict[str, Any]:
        """See `Engine`."""
        return {
            **machine_facts(next(self._model.parameters()).device),
            "model_class": type(self._model).__name__,
            "backend": "transformers",
            "attention": self._config.attention,
            "versions": versions(),
            "num_compared_parameters": self._compared,
            "stale_parameters": self._stale,
        }


def captured(
    engine: Engine,
    folder: Path,
    source: str,
    sequences: Sequence[Sequence[int]],
    config: CaptureConfig,
    replay: Capture | None,
    fed: Mapping[str, Tensor] | None,
) -> Capture:
    """Return the capture of the model in `folder` on an engine; `fed` are the `replay_values` of `replay`.

    Raises ModelError if tokens have no score, or if no parameter of the model was found in its files.
    """
    proven = engine.proven
    sample = sample_that_fits(proven, engine.num_layers, config, sequences, replay)
    started = time.monotonic()
    asked = Pass(sequences, config.num_decoded, sample, judges=fed is None)
    own, scores = engine.run(asked)
    judged, replay_scores = own, Scores()
    if fed is not None:
        used = sequences[: -(-len(sample.lengths) // config.batch_size) * config.batch_size]
        judged, replay_scores = engine.run(asked._replace(sequences=used, fed=fed, judges=True))
    seconds = round(time.monotonic() - started, 3)
    num_scored = sum(len(ids) - 1 for ids in sequences)
    if len(scores) != num_scored:
        raise ModelError(f"{len(scores)} tokens have a log-probability, expected {num_scored}: some were not seen")
    facts = engine.facts()
    if not facts["num_compared_parameters"]:
        raise ModelError(
            f"{facts['model_class']}: no parameter has the name and shape of one in the model's files, so its weights "
            "cannot be compared with them; save it again with save_pretrained"
        )
    identity = CaptureIdentity(
        aqnpipe=version("aqnpipe"),
        created=datetime.now(UTC),
        tokens_sha256=tokens_sha256(sequences),
        num_sequences=len(sequences),
        num_tokens=sum(map(len, sequences)),
        lengths=sample.lengths,
        # vLLM has one row per token.
        padding="none" if facts["backend"] == "vllm" or len(set(map(len, sequences))) == 1 else config.padding,
        batch_invariant=bool(config.batch_invariant),
        replay_of=None if replay is None else replay.digest,
        members={},
        seconds=seconds,
        **config.model_dump(include={"dtype", "threads", "batch_size", "tensor_parallel", "num_decoded"}),
        **model_facts(folder, source),
        **facts,
    )
    tensors = dict(judged.tensors)
    if judged is not own:
        tensors |= {name.replace("output/", "replay/", 1): tensor for name, tensor in tensors.items()} | own.tensors
    for row in judged.operators.values():
        row["is_linked"] |= not proven.operators[_proven_name(row)]["is_linked"]
    operators = pl.DataFrame(list(judged.operators.values()), schema=OPERATOR_COLUMNS)
    tokens = _token_table(sequences, config.num_decoded, sample, scores, replay_scores)
    return Capture(identity, operators, tokens, tensors)


def sample_that_fits(
    proven: Recording,
    num_layers: int,
    config: CaptureConfig,
    sequences: Sequence[Sequence[int]],
    replay: Capture | None,
) -> Sample:
    """Return the tokens to record, of a replay the first of its own; ConfigError if not one fits into the file.

    Room is left for a replay, which is larger, so that another site can use the same limit.
    """
    per_row = _bytes_per_row(proven, num_layers, config)
    rows = int(_SHARE_OF_LIMIT * config.max_bytes / per_row)
    if not rows:
        size = per_row / _SHARE_OF_LIMIT / 1e6
        raise ConfigError(f"--max-megabytes {config.max_bytes / 1e6:g}: found too few, expected at least {size:.1f}")
    lengths = [len(ids) for ids in sequences] if replay is None else list(replay.sample.lengths)
    return choose_sample(lengths, min(rows, config.max_rows) if replay is None else rows)


def _bytes_per_row(proven: Recording, num_layers: int, config: CaptureConfig) -> int:
    """Return the size of one recorded token in a replay, from the operators of a small model of the same kind."""
    item = 4 if config.dtype == "float32" else 2
    total = 0
    for name, row in proven.operators.items():
        kept, channels = (proven.tensors[f"{kind}/{name}"].shape[1] for kind in ("output", "exact"))
        # Results of both passes, exact results (8 bytes) with bounds (4), and the size of the input (4).
        size = item * (kept + channels) + 12 * channels + 4
        total += size * (num_layers if row["layer"] == 0 else row["layer"] is None)
    return total


def _proven_name(row: Mapping[str, Any]) -> str:
    """Return the name that an operator of this kind has in a model of two layers."""
    return str(row["name"] if row["layer"] is None else f"layers.{min(row['layer'], 1)}.{row['kind']}")


def replay_values(other: Capture) -> dict[str, Tensor]:
    """Return the results of a capture by operator, of those that have all their channels in it.

    Raises DataError if it is itself a replay: no comparison could take the new capture.
    """
    if other.identity.replay_of is not None:
        raise DataError("--replay: the capture is itself a replay; expected one made without --replay")
    return {
        name: other.tensor("output", name)
        for name, width in other.operators.select("name", "width").iter_rows()
        if other.tensor("output", name).shape[1] == width
    }


def check_sequences(sequences: Sequence[Sequence[int]], config: CaptureConfig, vocabulary: int) -> None:
    """Raise ConfigError for sequences that cannot be run: too short, or with ids outside of the vocabulary."""
    shortest = min(map(len, sequences), default=0)
    if shortest < config.num_decoded + 1:
        raise ConfigError(
            f"--decode {config.num_decoded}: the shortest sequence has {shortest} tokens, expected at least "
            f"{config.num_decoded + 1}"
        )
    if config.padding == "right" and config.num_decoded and len(set(map(len, sequences))) > 1:
        raise ConfigError("--padding right: sequences of several lengths cannot be decoded; expected --decode 0")
    if max(map(len, sequences)) < 2:
        raise ConfigError("token ids: found sequences of one token, expected two or more: the first has no score")
    wrong = next((token for ids in sequences for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ConfigError(f"token ids: found {wrong}, expected 0 to {vocabulary - 1}, the vocabulary of the model")


def _token_table(
    sequences: Sequence[Sequence[int]],
    num_decoded: int,
    sample: Sample,
    scores: Scores,
    replay_scores: Scores,
) -> pl.DataFrame:
    rows = []
    for sequence, ids in enumerate(sequences):
        for position, token in enumerate(ids):
            value, predicted = scores.get((sequence, position), (None, None))
            # A score is replayed if the token before it is recorded, whose hidden state it comes from.
            is_replayed = sample.row(sequence, position - 1) is not None if position else False
            replayed = replay_scores.get((sequence, position), (None,))[0] if is_replayed else None
            is_decoded = position >= len(ids) - num_decoded
            rows.append((sequence, position, token, is_decoded, value, predicted, replayed))
    return pl.DataFrame(rows, schema=TOKEN_COLUMNS, orient="row")
