"""Captures of vLLM: starts an engine, proves its operators on random weights, and runs the tokens through it."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aqnpipe.artifacts.parities import CaptureConfig
from aqnpipe.config.model import read_model_config
from aqnpipe.device import DeviceKind
from aqnpipe.errors import ConfigError, ModelError, ReceiptError
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.parity.capture import Engine, Scores, check_sequences, machine_facts
from aqnpipe.parity.capture_file import Capture
from aqnpipe.parity.recorder import Recording
from aqnpipe.parity.sample import Sample, choose_sample
from aqnpipe.parity.vllm.worker import SEQUENCE
from aqnpipe.seeding import keyed_generator

WORKER_EXTENSION = "aqnpipe.parity.vllm.worker.CaptureExtension"
_PROOF_TOKENS, _PROOF_DECODED = 8, 2
_SPREAD = 0.3
_TOKENS_PER_PASS = 2048
"""Tokens that the engine reads in one pass, at least."""


class EngineCapture(Engine):
    """A running engine whose workers record operators."""

    def __init__(
        self, engine: VllmEngine, folder: Path, config: CaptureConfig, device: DeviceKind, scratch: Path
    ) -> None:
        super().__init__(folder, config)
        self._running, self._scratch = engine, scratch
        self._device = torch.device(device)
        self._attention = ""
        self._held = engine.call_workers("aqnpipe_compare_with_files", str(folder))
        described = read_model_config(folder)
        self.num_layers, self._vocabulary = int(described["num_hidden_layers"]), int(described["vocab_size"])
        self.proven = self._prove()

    def run(
        self,
        sequences: Sequence[Sequence[int]],
        num_decoded: int,
        sample: Sample,
        fed: Mapping[str, Tensor] | None = None,
        *,
        judges: bool = True,
    ) -> tuple[Recording, Scores]:
        """See `Engine`. Raises ModelError unless vLLM ran exactly these tokens."""
        ids, values, target = [list(row) for row in sequences], None, self._scratch / "recorded.safetensors"
        if fed is not None:
            values = str(self._scratch / "replay.safetensors")
            save_file({name: tensor.contiguous() for name, tensor in fed.items()}, values)
        self._running.call_workers("aqnpipe_begin_capture", ids, num_decoded, list(sample.lengths), values, judges)
        for first in range(0, len(ids), self._config.batch_size):
            self._read(ids[first : first + self._config.batch_size], num_decoded, first)
        reply, *others = self._running.call_workers("aqnpipe_end_capture", str(target))
        if any(other["sha256"] != reply["sha256"] for other in others):
            raise ReceiptError("vLLM's tensor-parallel workers recorded other values than each other")
        self._attention = reply["attention"]
        scores = {(sequence, position): (value, best) for sequence, position, value, best in reply["scores"]}
        return Recording(reply["operators"], load_file(target)), scores

    def _read(self, batch: list[list[int]], num_decoded: int, first: int) -> None:
        """Run a batch. The last token that vLLM chooses is not run, so there is one more than those to decode."""
        from vllm import SamplingParams

        given = {"max_tokens": num_decoded + 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        numbers = range(first, first + len(batch))
        parameters = [SamplingParams(**given, extra_args={SEQUENCE: number}) for number in numbers]
        # The workers prove that each token is the given one.
        self._running.complete([ids[: len(ids) - num_decoded] for ids in batch], parameters)

    def _prove(self) -> Recording:
        """Load random weights, compare every operator with its form, and load the weights again; see `Engine`."""
        generator, random = keyed_generator("cpu", 0, "parity.proof"), self._scratch / "random"
        random.mkdir()
        for path in sorted(self._folder.glob("*.safetensors")):
            save_file({name: _random(part, generator) for name, part in load_file(path).items()}, random / path.name)
        self._running.call_workers("aqnpipe_load_for_capture", str(random))
        shape = (2, _PROOF_TOKENS)
        sequences = torch.randint(self._vocabulary, shape, generator=generator).tolist()
        sample = choose_sample([_PROOF_TOKENS] * 2, 2 * _PROOF_TOKENS)
        recording, _ = self.run(sequences, min(self._config.num_decoded, _PROOF_DECODED), sample)
        self._running.call_workers("aqnpipe_load_for_capture", str(self._folder))
        shutil.rmtree(random)
        for name, row in recording.operators.items():
            if row["loose"] > 1 or not row["is_linked"]:
                raise ModelError(
                    f"vLLM's {self._running.description['model_class']}: on random weights its {name} is not what "
                    f"parity takes it for (error {row['loose']:.3g} times the bound of rounding): it cannot be mapped"
                )
        return recording

    def facts(self) -> dict[str, Any]:
        """See `Engine`."""
        description = self._running.description
        return {
            **machine_facts(self._device),
            "model_class": str(description["model_class"]),
            "backend": "vllm",
            "attention": self._attention,
            "versions": {"vllm": str(description["vllm"])},
            "num_compared_parameters": min(worker["compared"] for worker in self._held),
            "stale_parameters": tuple(sorted({name for worker in self._held for name in worker["stale"]})),
        }


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
    check_sequences(sequences, config, int(read_model_config(folder)["vocab_size"]), replay)
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
            batch_invariant=bool(config.batch_invariant),
            tensor_parallel=config.tensor_parallel,
        ) as engine,
    ):
        return EngineCapture(engine, folder, config, device, Path(scratch_name)).captured(source, sequences, replay)


def _random(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return random weights of the same shape: matrices that keep the size of their input, gains around 1."""
    noise = torch.randn(tensor.shape, generator=generator)
    return (noise * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 1 + _SPREAD * noise).to(tensor.dtype)
