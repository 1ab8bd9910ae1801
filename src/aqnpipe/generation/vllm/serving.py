"""Noise in a server that a user starts with `vllm serve`: a spec in a file, and a receipt to be fetched.

AQNPIPE_VLLM_NOISE=noise.yaml vllm serve MODEL --enforce-eager --no-enable-prefix-caching \\
    --worker-extension-cls aqnpipe.generation.vllm.serving.ServedNoise

The plugin installs the noise in every worker when vLLM has warmed it up, before the server answers. A worker in which
it cannot be installed fails, and the server does not start. `aqnpipe_receipt`, called through vLLM's endpoint
`/collective_rpc` (VLLM_SERVER_DEV_MODE=1), returns what was measured since the start.
"""

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import distributed

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.noise import ErrorModel, LayerIndex, OperatorNoise, OperatorSet
from aqnpipe.config.yaml_file import load_yaml, validated
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.vllm.plugin import NOISE_FILE
from aqnpipe.generation.vllm.worker import NoiseExtension, checked_reply
from aqnpipe.generation.vllm.worker_merge import merged_workers, shares_of, states_of
from aqnpipe.models.layout import num_rms_norms
from aqnpipe.noise.receipts.receipt import Receipt


class ServedNoiseFile(FrozenModel):
    """Content of the file that `AQNPIPE_VLLM_NOISE` names."""

    error: ErrorModel = Field(discriminator="kind")
    seed: int = Field(default=0, ge=0)
    operators: OperatorSet = "matmul"
    layers: tuple[LayerIndex, ...] | None = Field(default=None, description="decoder layers with noise; null: all")
    include_lm_head: bool = True

    def as_pass(self, source: str) -> PassNoise:
        """Return the noise of the server as that of one evaluation pass; ConfigError if it is none."""
        content = {**self.model_dump(mode="json", exclude={"seed"}), "phases": ["evaluation"], "attention": "fused"}
        return PassNoise(operator_noise=validated(OperatorNoise, content, source), noise_seed=self.seed)


class ServedNoise(NoiseExtension):
    """Methods for the workers of a server (`--worker-extension-cls`); `self` is the worker."""

    _aqnpipe_steps: int

    def aqnpipe_serve(self: Any, path: str) -> None:
        """Install the noise in the file at `path`. Raises ConfigError or ModelError in one line if it cannot be."""
        if not self.model_config.enforce_eager:
            raise ModelError(f"{NOISE_FILE}: compiled code would run without the noise, expected --enforce-eager")
        if self.cache_config.enable_prefix_caching:
            raise ModelError(
                f"{NOISE_FILE}: requests would share the noise of a cached prefix, expected --no-enable-prefix-caching"
            )
        noise = load_yaml(Path(path), ServedNoiseFile).as_pass(path)
        self._aqnpipe_steps = 0
        checked_reply(self.aqnpipe_begin_pass(noise.model_dump(mode="json")))
        checked_reply(self.aqnpipe_begin_batch({"seed": noise.noise_seed, "step": 0}))

    def aqnpipe_receipt(self: Any) -> dict[str, Any]:
        """Return the receipt since the start, and its problems; what is answered later has further noise.

        Tensor-parallel workers exchange their measurements: each returns the receipt of all together.
        """
        current = self._aqnpipe_pass
        self.aqnpipe_end_batch()
        receipt, problems = self._aqnpipe_judged(current)
        self._aqnpipe_steps += 1
        checked_reply(self.aqnpipe_begin_batch({"seed": current.noise.noise_seed, "step": self._aqnpipe_steps}))
        return {"rank": self.rank, "problems": problems, "receipt": receipt.model_dump(mode="json")}

    def _aqnpipe_judged(self: Any, current: Any) -> tuple[Receipt, list[str]]:
        if self.parallel_config.world_size == 1:
            receipt = current.recorder.receipt()
            return receipt, receipt.problems()
        own = json.dumps(current.measured(self.rank, self.parallel_config.world_size))
        replies = [json.loads(text) for text in texts_of_all_workers(own)]
        recorder = current.noise.recorder(len(current.engine.layers), num_rms_norms(current.engine.model))
        try:
            recorder.restore(merged_workers(states_of(replies), shares_of(replies), recorder))
        except ReceiptError as error:
            return current.recorder.receipt(), list(error.problems)
        receipt = recorder.receipt()
        return receipt, receipt.problems()


def texts_of_all_workers(text: str) -> list[str]:
    """Return the `text` of every worker, by rank; every worker must call this. Nothing is pickled."""
    from vllm.distributed import get_tp_group

    return exchanged(text, get_tp_group().cpu_group)


def exchanged(text: str, group: distributed.ProcessGroup | None) -> list[str]:
    """Return the `text` of every process of a group that can send tensors on the CPU, by rank."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    num_workers = distributed.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_workers)]
    distributed.all_gather(sizes, torch.tensor([len(own)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.cat([own, torch.zeros(longest - len(own), dtype=torch.uint8)])
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(num_workers)]
    distributed.all_gather(texts, padded, group=group)
    return [bytes(data[: int(size)].tolist()).decode() for data, size in zip(texts, sizes, strict=True)]
