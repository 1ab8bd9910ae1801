"""Runs fixed tokens through a model and records every operator on the sampled ones, with the identity of the capture:

digests of the model's files, the state of its weights in memory, device and versions.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors import safe_open
from torch import Tensor

from aqnpipe.artifacts.hardware import read_hardware
from aqnpipe.artifacts.parities import CaptureConfig, CaptureIdentity
from aqnpipe.artifacts.provenance import sha256_of_json, versions
from aqnpipe.config.model import read_model_config, source_kind
from aqnpipe.errors import ConfigError, DataError, ModelError
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.loading import describe_model
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.parity.capture_file import OPERATOR_COLUMNS, TOKEN_COLUMNS, Capture
from aqnpipe.parity.mapping import Runner, prove
from aqnpipe.parity.recorder import Recorder, Recording, replaying
from aqnpipe.parity.sample import Sample, Score, choose_sample

_SHARE_OF_LIMIT = 0.95
"""The rest is for tables and names."""

_COMPARED_VALUES = 4096
"""Values of each parameter that are compared with the files; every optimiser step changes some of them."""

_NOT_NUMERIC = ("transformers_version", "torch_dtype", "dtype")

Scores = dict[tuple[int, int], Score]


class Engine(ABC):
    """What runs the model in `folder`, of `num_layers` layers, for a capture.

    `proven`: what random weights gave in some layers, 0 among them, where every operator was what its name says.
    """

    num_layers: int
    proven: Recording

    def __init__(self, folder: Path, config: CaptureConfig) -> None:
        self._folder, self._config = folder, config

    @abstractmethod
    def run(
        self,
        sequences: Sequence[Sequence[int]],
        num_decoded: int,
        sample: Sample,
        fed: Mapping[str, Tensor] | None = None,
        *,
        judges: bool = True,
    ) -> tuple[Recording, Scores]:
        """Return what was recorded of the sample in a pass over all tokens, and the scores of these.

        The last `num_decoded` tokens of each sequence are decoded. `fed`: results that are put in the place of the
        operators' own. `judges`: see `Recorder`.
        """

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the fields of a capture's identity that the engine decides."""

    def captured(self, source: str, sequences: Sequence[Sequence[int]], replay: Capture | None) -> Capture:
        """Return the capture of the model from `source`.

        Raises ModelError if tokens have no score, or if no parameter of the model was found in its files.
        """
        config, fed = self._config, None if replay is None else replay_values(replay)
        sample = self._sample_that_fits(sequences, replay)
        started = time.monotonic()
        own, scores = self.run(sequences, config.num_decoded, sample, judges=fed is None)
        judged, replay_scores = own, Scores()
        if fed is not None:
            used = sequences[: -(-len(sample.lengths) // config.batch_size) * config.batch_size]
            judged, replay_scores = self.run(used, config.num_decoded, sample, fed)
        seconds = round(time.monotonic() - started, 3)
        num_scored = sum(len(ids) - 1 for ids in sequences)
        if len(scores) != num_scored:
            raise ModelError(f"{len(scores)} tokens have a log-probability, expected {num_scored}: some were not seen")
        facts = self.facts()
        if not facts["num_compared_parameters"]:
            raise ModelError(
                f"{facts['model_class']}: no parameter has the name and shape of one in the model's files, so its "
                "weights cannot be compared with them; save it again with save_pretrained"
            )
        identity = CaptureIdentity(
            aqnpipe=version("aqnpipe"),
            created=datetime.now(UTC),
            tokens_sha256=sha256_of_json([list(map(int, ids)) for ids in sequences]),
            num_sequences=len(sequences),
            num_tokens=sum(map(len, sequences)),
            lengths=sample.lengths,
            # vLLM has one row per token.
            padding="none" if facts["backend"] == "vllm" or len(set(map(len, sequences))) == 1 else config.padding,
            batch_invariant=bool(config.batch_invariant),
            versions=versions() | facts.pop("versions", {}),
            replay_of=None if replay is None else replay.digest,
            members={},
            seconds=seconds,
            **config.model_dump(include={"dtype", "threads", "batch_size", "tensor_parallel", "num_decoded"}),
            **model_facts(self._folder, source),
            **facts,
        )
        tensors = dict(judged.tensors)
        if judged is not own:
            tensors |= {name.replace("output/", "replay/", 1): tensor for name, tensor in tensors.items()} | own.tensors
        for row in judged.operators.values():
            # The name that an operator of this kind has in a model of two layers.
            name = row["name"] if row["layer"] is None else f"layers.{min(row['layer'], 1)}.{row['kind']}"
            row["is_linked"] |= not self.proven.operators[name]["is_linked"]
        operators = pl.DataFrame(list(judged.operators.values()), schema=OPERATOR_COLUMNS)
        tokens = _token_table(sequences, config.num_decoded, sample, scores, replay_scores)
        return Capture(identity, operators, tokens, tensors)

    def _sample_that_fits(self, sequences: Sequence[Sequence[int]], replay: Capture | None) -> Sample:
        """Return the tokens to record, of a replay the first of its own; ConfigError if not one fits into the file.

        Room is left for a replay, which is larger, so that another site can use the same limit. The size of a token is
        that in a small model of the same kind.
        """
        config, per_row = self._config, 0
        item = 4 if config.dtype == "float32" else 2
        for name, row in self.proven.operators.items():
            kept, channels = (self.proven.tensors[f"{kind}/{name}"].shape[1] for kind in ("output", "exact"))
            # Results of both passes, exact results (8 bytes) with bounds (4), and the size of the input (4).
            size = item * (kept + channels) + 12 * channels + 4
            per_row += size * (self.num_layers if row["layer"] == 0 else row["layer"] is None)
        rows = int(_SHARE_OF_LIMIT * config.max_bytes / per_row)
        if not rows:
            least, found = per_row / _SHARE_OF_LIMIT / 1e6, config.max_bytes / 1e6
            raise ConfigError(f"--max-megabytes {found:g}: found too few, expected at least {least:.1f}")
        lengths = [len(ids) for ids in sequences] if replay is None else list(replay.sample.lengths)
        return choose_sample(lengths, min(rows, config.max_rows) if replay is None else rows)


class _Transformers(Engine):
    """A transformers model as the engine of a capture."""

    def __init__(self, model: Any, folder: Path, config: CaptureConfig) -> None:
        super().__init__(folder, config)
        self._model = model
        self.num_layers = len(decoder_layers(model))
        self._compared, self._stale = compare_with_files(model.state_dict(), folder)
        interleaved, self.proven = prove(model)
        self._runner = Runner(model, config.batch_size, config.padding, interleaved=interleaved)

    def run(
        self,
        sequences: Sequence[Sequence[int]],
        num_decoded: int,
        sample: Sample,
        fed: Mapping[str, Tensor] | None = None,
        *,
        judges: bool = True,
    ) -> tuple[Recording, Scores]:
        """See `Engine`."""
        recorder = Recorder(sample, edit=None if fed is None else replaying(fed), judges=judges)
        scores = self._runner.run(sequences, num_decoded, recorder)
        return recorder.finish(), scores

    def facts(self) -> dict[str, Any]:
        """See `Engine`."""
        return {
            **machine_facts(next(self._model.parameters()).device),
            "model_class": type(self._model).__name__,
            "backend": "transformers",
            "attention": self._config.attention,
            "num_compared_parameters": self._compared,
            "stale_parameters": self._stale,
        }


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
    check_sequences(sequences, config, int(model.config.vocab_size), replay)
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        return _Transformers(model, folder, config).captured(source, sequences, replay)
    finally:
        torch.set_num_threads(before)


def replay_values(other: Capture) -> dict[str, Tensor]:
    """Return the results of a capture by operator, of those that have all their channels in it."""
    return {
        name: other.tensor("output", name)
        for name, width in other.operators.select("name", "width").iter_rows()
        if other.tensor("output", name).shape[1] == width
    }


def check_sequences(
    sequences: Sequence[Sequence[int]], config: CaptureConfig, vocabulary: int, replay: Capture | None = None
) -> None:
    """Raise ConfigError for sequences that cannot be run: too short, or with ids outside of the vocabulary.

    Raises DataError if `replay` is itself a replay: no comparison could take the new capture.
    """
    if replay is not None and replay.identity.replay_of is not None:
        raise DataError("--replay: the capture is itself a replay; expected one made without --replay")
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


def model_facts(folder: Path, source: str) -> dict[str, Any]:
    """Return the fields of a capture's identity that come from the files of a model, without folders above it."""
    name = Path(source).resolve().name if source_kind(source) == "folder" else source
    described = describe_model(folder, name)
    has_tokenizer = any((folder / file).is_file() for file in ("tokenizer.json", "vocab.json"))
    return {
        "model": name,
        "weights_sha256": described.weights_sha256,
        "tokenizer_sha256": described.tokenizer_sha256 if has_tokenizer else None,
        "config": {
            key: value
            for key, value in read_model_config(folder).items()
            if not key.startswith("_") and key not in _NOT_NUMERIC
        },
    }


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return the fields that say where a capture was made, without serial numbers and host names."""
    hardware = read_hardware(device)
    return {
        "device": f"{device.type} ({hardware.name})",
        "driver": hardware.driver,
        "toolkit": hardware.toolkit,
        "numerics": {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        },
    }


def compare_with_files(
    held: Mapping[str, Tensor],
    folder: Path,
    shares: Mapping[str, tuple[int, Shard]] | None = None,
    *,
    every_value: bool = False,
) -> tuple[int, tuple[str, ...]]:
    """Return how many parameters in memory were compared with the model's files, and the names of those that differ.

    About 4,096 evenly spaced values of each are compared, unless it shall be every value, after rounding to the dtype
    in memory. Parameters that have another name or shape in the files are not compared. `shares`: the dimension of a
    parameter that is divided, and what this process holds of it, before rows that pad a vocabulary.
    """
    compared, stale = 0, []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in sorted(set(stored.keys()) & held.keys()):
                tensor, own = stored.get_tensor(name), held[name].detach()
                if shares is not None and name in shares:
                    dim, shard = shares[name]
                    if tensor.dim() > dim and tensor.shape[dim] == shard.width:
                        tensor, own = tensor.narrow(dim, shard.start, shard.size), own.narrow(dim, 0, shard.size)
                if tensor.shape != own.shape:
                    continue
                compared += 1
                step = 1 if every_value else max(1, own.numel() // _COMPARED_VALUES)
                if not torch.equal(tensor.reshape(-1)[::step].to(own.dtype), own.reshape(-1)[::step].cpu()):
                    stale.append(name)
    return compared, tuple(stale)
