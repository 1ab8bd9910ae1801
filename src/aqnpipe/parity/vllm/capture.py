"""Captures of vLLM: starts an engine, proves its operators on random weights, and runs the tokens through it."""

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aqnpipe.artifacts.parities import CaptureConfig
from aqnpipe.artifacts.provenance import versions
from aqnpipe.config.model import read_model_config
from aqnpipe.device import DeviceKind
from aqnpipe.errors import ConfigError, ModelError, ReceiptError
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.parity.capture import (
    Score,
    assemble,
    check_sequences,
    replay_values,
    sample_that_fits,
)
from aqnpipe.parity.capture_file import Capture
from aqnpipe.parity.forms import Operator
from aqnpipe.parity.identity import machine_facts, model_facts
from aqnpipe.parity.recorder import Recorded, Tally
from aqnpipe.parity.sample import Sample, choose_sample
from aqnpipe.parity.vllm.tokens import SEQUENCE
from aqnpipe.seeding import keyed_generator

WORKER_EXTENSION = "aqnpipe.parity.vllm.worker.CaptureExtension"
_PROOF_TOKENS, _PROOF_DECODED = 8, 2
_SPREAD = 0.3
_TOKENS_PER_PASS = 2048
"""Tokens that the engine reads in one pass, at least."""


class EngineCapture:
    """A running engine whose workers record operators."""

    def __init__(self, engine: VllmEngine, folder: Path, config: CaptureConfig, scratch: Path) -> None:
        self.engine, self._folder, self._config, self._scratch = engine, folder, config, scratch
        self.attention = ""

    def run(
        self,
        sequences: Sequence[Sequence[int]],
        num_decoded: int,
        sample: Sample,
        replay: Path | None,
        *,
        judges: bool,
    ) -> tuple[dict[str, Recorded], dict[tuple[int, int], Score]]:
        """Return what was recorded of the sample, and the scores of all tokens.

        Raises ModelError unless vLLM ran the tokens of `sequences`, the last `num_decoded` of each in decode.
        """
        ids = [list(sequence) for sequence in sequences]
        path = None if replay is None else str(replay)
        self.engine.call_workers("aqnpipe_begin_capture", ids, num_decoded, list(sample.lengths), path, judges)
        for first in range(0, len(ids), self._config.batch_size):
            self._read(ids[first : first + self._config.batch_size], num_decoded, first)
        target = self._scratch / "recorded.safetensors"
        reply, *others = self.engine.call_workers("aqnpipe_end_capture", str(target))
        if any(other["sha256"] != reply["sha256"] for other in others):
            raise ReceiptError("vLLM's tensor-parallel workers recorded other values than each other")
        self.attention = reply["attention"]
        scores = {(sequence, position): (value, best) for sequence, position, value, best in reply["scores"]}
        return _recorded(reply["operators"], load_file(target)), scores

    def _read(self, batch: list[list[int]], num_decoded: int, first: int) -> None:
        """Run a batch. The last token that vLLM chooses is not run, so there is one more than those to decode."""
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                max_tokens=num_decoded + 1,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                extra_args={SEQUENCE: first + row},
            )
            for row in range(len(batch))
        ]
        prompts = [ids[: len(ids) - num_decoded] for ids in batch]
        for ids, output in zip(batch, self.engine.complete(prompts, parameters), strict=True):
            chosen = list(output.outputs[0].token_ids)[:num_decoded]
            if chosen != ids[len(ids) - num_decoded :]:
                raise ModelError(f"vLLM decoded the ids {chosen[:4]}, expected {ids[len(ids) - num_decoded :][:4]}")

    def prove(self, vocabulary: int) -> dict[str, Recorded]:
        """Load random weights, compare every operator with its form, and load the model's weights again.

        Raises ModelError, which names the first operator that computes something else.
        """
        generator, random = keyed_generator("cpu", 0, "parity.proof"), self._scratch / "random"
        random.mkdir()
        for path in sorted(self._folder.glob("*.safetensors")):
            save_file({name: _random(part, generator) for name, part in load_file(path).items()}, random / path.name)
        self.engine.call_workers("aqnpipe_load_for_capture", str(random))
        shape = (2, _PROOF_TOKENS)
        sequences = torch.randint(vocabulary, shape, generator=generator).tolist()
        sample = choose_sample([_PROOF_TOKENS] * 2, 2 * _PROOF_TOKENS)
        num_decoded = min(self._config.num_decoded, _PROOF_DECODED)
        recorded, _ = self.run(sequences, num_decoded, sample, None, judges=True)
        self.engine.call_workers("aqnpipe_load_for_capture", str(self._folder))
        shutil.rmtree(random)
        for name, found in recorded.items():
            if found.tally.loose > 1 or not found.is_linked:
                raise ModelError(
                    f"vLLM's {self.engine.description['model_class']}: on random weights its {name} is not what parity "
                    f"takes it for (error {found.tally.loose:.3g} times the bound of rounding): it cannot be mapped"
                )
        return recorded


def capture_vllm(
    folder: Path,
    source: str,
    sequences: Sequence[Sequence[int]],
    config: CaptureConfig,
    device: DeviceKind,
    replay: Capture | None = None,
) -> Capture:
    """Return the capture of vLLM with the model in `folder`.

    Raises ConfigError for sequences that do not fit, ModelError if vLLM cannot run the model, if its operators cannot
    be mapped, or if it ran other tokens than the given ones.
    """
    vocabulary = int(read_model_config(folder)["vocab_size"])
    check_sequences(sequences, config, vocabulary)
    fed = None if replay is None else replay_values(replay)
    longest = max(map(len, sequences))
    if longest * config.batch_size > _TOKENS_PER_PASS:
        raise ConfigError(
            f"--batch-size {config.batch_size}: sequences of {longest} tokens, which vLLM would split over forward "
            f"passes; expected at most {_TOKENS_PER_PASS} tokens in a batch"
        )
    with (
        tempfile.TemporaryDirectory(prefix="aqnpipe-capture-") as scratch_name,
        VllmEngine(
            folder,
            end_token=0,
            dtype=config.dtype,
            max_tokens=max(longest, _PROOF_TOKENS) + 1,
            batch_size=max(2, min(config.batch_size, len(sequences))),
            device=device,
            threads=config.threads,
            worker_extension=WORKER_EXTENSION,
            batch_invariant=config.batch_invariant,
            tensor_parallel=config.tensor_parallel,
        ) as engine,
    ):
        scratch = Path(scratch_name)
        held = engine.call_workers("aqnpipe_compare_with_files", str(folder))
        running = EngineCapture(engine, folder, config, scratch)
        proven = running.prove(vocabulary)
        num_layers = int(read_model_config(folder)["num_hidden_layers"])
        sample = sample_that_fits(proven, num_layers, config, sequences, replay)
        started = time.monotonic()
        recorded, scores = running.run(sequences, config.num_decoded, sample, None, judges=replay is None)
        replayed: dict[str, Recorded] | None = None
        replay_scores: dict[tuple[int, int], Score] = {}
        if fed is not None:
            values = scratch / "replay.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in fed.items()}, values)
            used = sequences[: -(-len(sample.lengths) // config.batch_size) * config.batch_size]
            replayed, replay_scores = running.run(used, config.num_decoded, sample, values, judges=True)
        description = engine.description
        facts: dict[str, Any] = {
            **model_facts(folder, source),
            **machine_facts(torch.device(device)),
            "model_class": str(description["model_class"]),
            "backend": "vllm",
            "attention": running.attention,
            "versions": {**versions(), "vllm": str(description["vllm"])},
            "num_compared_parameters": min(worker["compared"] for worker in held),
            "stale_parameters": tuple(sorted({name for worker in held for name in worker["stale"]})),
            "seconds": round(time.monotonic() - started, 3),
        }
        return assemble(facts, config, sequences, sample, recorded, scores, replay, replayed, replay_scores)


def _recorded(facts: list[dict[str, Any]], tensors: dict[str, Tensor]) -> dict[str, Recorded]:
    return {
        row["name"]: Recorded(
            operator=Operator(row["name"], row["kind"], row["layer"], None, row["is_wide"]),
            width=row["width"],
            **{kind: tensors[f"{kind}/{row['name']}"] for kind in ("output", "exact", "bound", "input_rms")},
            tally=Tally(**row["tally"]),
            is_linked=row["is_linked"],
        )
        for row in facts
    }


def _random(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return random weights of the same shape: matrices that keep the size of their input, gains around 1."""
    noise = torch.randn(tensor.shape, generator=generator)
    return (noise * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 1 + _SPREAD * noise).to(tensor.dtype)
