"""Runs fixed tokens through a transformers model and records every operator on the sampled ones."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor
from transformers import DynamicCache

from aqnpipe.artifacts.parities import CaptureConfig, CaptureIdentity
from aqnpipe.artifacts.provenance import versions
from aqnpipe.errors import ConfigError, DataError, ModelError
from aqnpipe.parity.capture_file import OPERATOR_COLUMNS, TOKEN_COLUMNS, Capture
from aqnpipe.parity.identity import compare_with_files, machine_facts, model_facts, tokens_sha256
from aqnpipe.parity.mapping import ModelMap, prove, watch
from aqnpipe.parity.recorder import Recorded, Recorder
from aqnpipe.parity.sample import Batch, Sample, batches_of, choose_sample

_SHARE_OF_LIMIT = 0.95
"""The rest is for tables and names."""

_LOGITS_AT_ONCE = 2**19
"""Logits that are made float64 at once: no more than fit into a processor's caches."""

Score = tuple[float, int]


class Replay:
    """Puts the results of another capture in the place of every operator's, so that the next is fed those."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        """`values`: see `replay_values`."""
        self._values = values

    def apply(self, name: str, rows: Tensor, values: Tensor) -> Tensor | None:
        """Return the other capture's rows of an operator."""
        found = self._values.get(name)
        if found is None:
            return None
        if found.shape[1] != values.shape[1]:
            raise DataError(
                f"operator {name} has {found.shape[1]} channels in the replayed capture, {values.shape[1]} here"
            )
        return found[rows].to(values)


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


@dataclass(frozen=True)
class Passes:
    """A model that is ready to run batches: its map and how it is run."""

    model: Any
    mapped: ModelMap
    config: CaptureConfig
    pad_token: int

    def run(self, batches: Sequence[Batch], recorder: Recorder) -> dict[tuple[int, int], Score]:
        """Run batches; return the log-probability of every token but the first of each sequence, and the best id."""
        scores: dict[tuple[int, int], Score] = {}
        device = next(self.model.parameters()).device
        with torch.no_grad(), watch(self.mapped, recorder):
            for batch in batches:
                cache = DynamicCache(config=self.model.config)
                for call in batch.calls(recorder.sample, self.config.num_decoded, self.pad_token):
                    recorder.begin(call)
                    logits = self.model(
                        input_ids=call.token_ids.to(device),
                        attention_mask=None if call.mask is None else call.mask.to(device),
                        position_ids=call.positions.to(device),
                        past_key_values=cache,
                        use_cache=True,
                    ).logits
                    scores |= scores_of(batch, call.first, logits)
        return scores


def scores_of(batch: Batch, first_column: int, logits: Tensor) -> dict[tuple[int, int], Score]:
    """Return the scores of the tokens behind the columns of `logits` [batch, columns, vocabulary]."""
    found: dict[tuple[int, int], Score] = {}
    for number, offset in enumerate(batch.offsets):
        sequence = batch.first_sequence + number
        places = [(sequence, first_column + column - offset) for column in range(logits.shape[1])]
        found |= score_rows(logits[number], places, {sequence: batch.sequences[number]})
    return found


def score_rows(
    logits: Tensor, places: Sequence[tuple[int, int]], sequences: Mapping[int, Sequence[int]] | Sequence[Sequence[int]]
) -> dict[tuple[int, int], Score]:
    """Return the scores of the tokens behind those at `places` (sequence, position), from logits [rows, vocabulary].

    Places outside of a sequence are padding.
    """
    behind = [
        (row, (sequence, position + 1))
        for row, (sequence, position) in enumerate(places)
        if 0 <= position < len(sequences[sequence]) - 1
    ]
    if not behind:
        return {}
    found: dict[tuple[int, int], Score] = {}
    at_once = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    for first in range(0, len(behind), at_once):
        part = behind[first : first + at_once]
        chosen = logits[[row for row, _ in part]].double()
        targets = torch.tensor([sequences[sequence][position] for _, (sequence, position) in part]).to(chosen.device)
        values = chosen.log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist()
        scores = zip(values, chosen.argmax(-1).tolist(), strict=True)
        found |= {place: score for (_, place), score in zip(part, scores, strict=True)}
    return found


def capture(
    model: Any,
    folder: Path,
    source: str,
    sequences: Sequence[Sequence[int]],
    config: CaptureConfig,
    replay: Capture | None = None,
) -> Capture:
    """Return the capture of a loaded transformers model, whose files are in `folder`.

    Raises ModelError if its operators cannot be mapped, ConfigError if not one token fits into `config.max_bytes`.
    """
    check_sequences(sequences, config, int(model.config.vocab_size))
    fed = None if replay is None else replay_values(replay)
    compared, stale = compare_with_files(model.state_dict(), folder)
    mapped, proven = prove(model)
    sample = sample_that_fits(proven, len(mapped.layers), config, sequences, replay)
    batches = batches_of(sequences, config.batch_size, config.padding)
    passes = Passes(model, mapped, config, int(getattr(model.config, "pad_token_id", None) or 0))
    started = time.monotonic()
    own = Recorder(sample, judges=replay is None, keeps_full=replay is None)
    scores = passes.run(batches, own)
    recorded, replayed, replay_scores = own.finish(), None, {}
    if fed is not None:
        judged = Recorder(sample, edits=Replay(fed))
        with_rows = [batch for batch in batches if batch.first_sequence < len(sample.lengths)]
        replay_scores = passes.run(with_rows, judged)
        replayed = judged.finish()
    for found in (recorded if replayed is None else replayed).values():
        found.is_linked |= not proven[proven_name(found)].is_linked
    facts = {
        **model_facts(folder, source),
        **machine_facts(next(model.parameters()).device),
        "model_class": type(model).__name__,
        "backend": "transformers",
        "attention": config.attention,
        "versions": versions(),
        "num_compared_parameters": compared,
        "stale_parameters": stale,
        "seconds": round(time.monotonic() - started, 3),
    }
    return assemble(facts, config, sequences, sample, recorded, scores, replay, replayed, replay_scores)


def assemble(
    facts: dict[str, Any],
    config: CaptureConfig,
    sequences: Sequence[Sequence[int]],
    sample: Sample,
    recorded: dict[str, Recorded],
    scores: dict[tuple[int, int], Score],
    replay: Capture | None,
    replayed: dict[str, Recorded] | None,
    replay_scores: dict[tuple[int, int], Score],
) -> Capture:
    """Return a capture from what was recorded of its own pass and, if there was one, of the replay.

    Raises ModelError if tokens have no score, or if no parameter of the model was found in its files.
    """
    num_scored = sum(len(ids) - 1 for ids in sequences)
    if len(scores) != num_scored:
        raise ModelError(f"{len(scores)} tokens have a log-probability, expected {num_scored}: some were not seen")
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
        dtype=config.dtype,
        threads=config.threads,
        batch_size=config.batch_size,
        tensor_parallel=config.tensor_parallel,
        batch_invariant=config.batch_invariant,
        # vLLM has one row per token.
        padding="none" if facts["backend"] == "vllm" or len(set(map(len, sequences))) == 1 else config.padding,
        num_decoded=config.num_decoded,
        replay_of=None if replay is None else replay.digest,
        members={},
        **facts,
    )
    judged = recorded if replayed is None else replayed
    tensors: dict[str, Tensor] = {}
    for name, found in judged.items():
        tensors[f"output/{name}"] = recorded[name].output
        tensors[f"exact/{name}"], tensors[f"bound/{name}"] = found.exact, found.bound
        tensors[f"input_rms/{name}"] = found.input_rms
        if replayed is not None:
            tensors[f"replay/{name}"] = found.output
    operators = pl.DataFrame([_operator_row(found) for found in judged.values()], schema=OPERATOR_COLUMNS)
    tokens = _token_table(sequences, config.num_decoded, sample, scores, replay_scores)
    return Capture(identity, operators, tokens, tensors)


def sample_that_fits(
    proven: Mapping[str, Recorded],
    num_layers: int,
    config: CaptureConfig,
    sequences: Sequence[Sequence[int]],
    replay: Capture | None,
) -> Sample:
    """Return the tokens to record, of a replay the first of its own; ConfigError if not one fits into the file.

    Room is left for a replay, which is larger, so that another site can use the same limit.
    """
    per_row = bytes_per_row(proven, num_layers, config)
    rows = int(_SHARE_OF_LIMIT * config.max_bytes / per_row)
    if not rows:
        size = per_row / _SHARE_OF_LIMIT / 1e6
        raise ConfigError(f"--max-megabytes {config.max_bytes / 1e6:g}: found too few, expected at least {size:.1f}")
    lengths = [len(ids) for ids in sequences] if replay is None else list(replay.sample.lengths)
    return choose_sample(lengths, min(rows, config.max_rows) if replay is None else rows)


def bytes_per_row(proven: Mapping[str, Recorded], num_layers: int, config: CaptureConfig) -> int:
    """Return the size of one recorded token in a replay, from the operators of a small model of the same kind."""
    item = 4 if config.dtype == "float32" else 2
    total = 0
    for found in proven.values():
        channels = found.exact.shape[1]
        kept = channels if found.operator.is_wide else found.width
        # Results of both passes, exact results (8 bytes) with bounds (4), and the size of the input (4).
        size = item * (kept + channels) + 12 * channels + 4
        total += size * (num_layers if found.operator.layer == 0 else found.operator.layer is None)
    return total


def proven_name(found: Recorded) -> str:
    """Return the name that an operator of this kind has in a model of two layers."""
    layer, kind = found.operator.layer, found.operator.kind
    return found.operator.name if layer is None else f"layers.{min(layer, 1)}.{kind}"


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


def _operator_row(found: Recorded) -> dict[str, object]:
    values = found.output.double()
    shares = {name: number / found.tally.elements for name, number in found.tally.equal.items()}
    return {
        "name": found.operator.name,
        "kind": found.operator.kind,
        "layer": found.operator.layer,
        "width": found.width,
        "dtype": str(found.output.dtype).removeprefix("torch."),
        "mean": float(values.mean()),
        "rms": float(values.square().mean().sqrt()),
        "largest": float(values.abs().max()),
        "zero_share": float((values == 0).double().mean()),
        "sha256": sha256(found.output.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
        "strict": found.tally.strict,
        "loose": found.tally.loose,
        "reduced": found.tally.reduced,
        "algorithms": json.dumps(shares),
        "is_linked": found.is_linked,
    }


def _token_table(
    sequences: Sequence[Sequence[int]],
    num_decoded: int,
    sample: Sample,
    scores: dict[tuple[int, int], Score],
    replay_scores: dict[tuple[int, int], Score],
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
