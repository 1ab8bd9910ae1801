"""Methods for vLLM's worker processes: vLLM adds them to its Worker class, and the engine calls them by name.

Arguments and results are plain data, so that nothing is pickled. A user's mistake is returned as
`{"model_error": "one line"}`, weights that cannot be used as `{"receipt_error": "one line"}`. Any other exception is a
bug and fails the call.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from aqnpipe.errors import AqnpipeError, ModelError, ReceiptError
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.vllm.graphs import WorkerGraphs
from aqnpipe.generation.vllm.injection import check_noise_is_supported, engine_noise
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.generation.vllm.plugin import version_in_this_process
from aqnpipe.generation.vllm.weight_buffer import opened
from aqnpipe.generation.vllm.weights import Digests, load_sent
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import num_rms_norms
from aqnpipe.noise.aqn import noised_rollout
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.receipts.recorder import ReceiptRecorder


def is_batch_invariant() -> bool:
    """Return whether vLLM's batch-invariant mode is in force in this process, not merely asked for."""
    # Set by vLLM 0.32 when the mode is enabled. Its workers on a CPU ignore the environment variable.
    mode = sys.modules.get("vllm.model_executor.determinism.batch_invariant")
    return bool(getattr(mode, "_batch_invariant_MODE", False))


_NO_TRAINING = {"model_error": "rollouts on tensor-parallel engines are not supported, expected one worker"}


class _WorkerPass:
    """One pass on one worker: its noise and faults, the recorder, and the hooks of the current batch."""

    def __init__(self, engine: EngineModel, noise: PassNoise, graphs: WorkerGraphs | None) -> None:
        self.engine = engine
        self.graphs = graphs
        self._step = 0
        self.noise = noise
        self.faults = noise.active_faults()
        self.recorder: ReceiptRecorder = noise.recorder(len(engine.layers), num_rms_norms(engine.model))
        if noise.clean_norms is not None:
            self.recorder.expect_clean_norms(noise.clean_norms, engine.model)
        self.batch: ExitStack | None = None
        self.shards: dict[str, set[Shard]] = {}
        self._batch_shards: Mapping[str, set[Shard]] = {}

    def begin_batch(self, hooks: ExitStack, shards: Mapping[str, set[Shard]], step: int) -> None:
        """Note the hooks of a batch, and where its tensor-parallel shares will be found."""
        self.batch, self._batch_shards, self._step = hooks, shards, step
        if self.graphs is not None:
            self.graphs.replays = 0
            self.graphs.allow(self.noise.is_clean)

    def measured(self, rank: int, num_workers: int) -> dict[str, Any]:
        """Return what this worker measured so far, as plain data; between batches."""
        return {
            "rank": rank,
            "num_workers": num_workers,
            "state": self.recorder.state().model_dump_json(),
            "shards": {operator: sorted(shards) for operator, shards in self.shards.items()},
        }

    def end_batch(self) -> None:
        """Remove the hooks of the batch, if there is one."""
        if self.batch is not None:
            batch, self.batch = self.batch, None
            batch.close()
            if self.graphs is not None:
                self.graphs.allow(False)
                self.recorder.count_replays(self.noise.phase, self._step, self.graphs.replays)
            for operator, shards in self._batch_shards.items():
                self.shards[operator] = self.shards.get(operator, set()) | shards


class NoiseExtension:
    """Mixin for vLLM's worker (`worker_extension_cls`); `self` is the worker."""

    _aqnpipe_pass: _WorkerPass
    _aqnpipe_graphs: WorkerGraphs | None = None

    def aqnpipe_describe(self: Any) -> dict[str, Any]:
        """Return the rank, process and model of this worker, and the version of the plugin that prepared it."""
        model = self.get_model()
        self._aqnpipe_graphs = WorkerGraphs(self.model_runner)
        return {
            "rank": self.rank,
            "num_workers": self.parallel_config.world_size,
            "tensor_parallel": self.parallel_config.tensor_parallel_size,
            "process": os.getpid(),
            "plugin": version_in_this_process(),
            "enforce_eager": bool(self.model_config.enforce_eager),
            "compiles": bool(self.vllm_config.compilation_config.mode),
            "cuda_graphs": self._aqnpipe_graphs.number,
            "batch_invariant": is_batch_invariant(),
            "model": type(model).__name__,
            "num_layers": len(EngineModel(model).layers),
            "num_norms": num_rms_norms(model),
        }

    def aqnpipe_load_weights(self: Any, shared: Sequence[Any], index: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Load the weights in the trainer's buffer (see `WeightBuffer`)."""
        if self.parallel_config.tensor_parallel_size > 1:
            return _NO_TRAINING
        try:
            load_sent(EngineModel(self.get_model()), opened(shared, index, self.device))
            if self._aqnpipe_graphs is not None:
                self._aqnpipe_graphs.refuse_moved(self.get_model())
        except ModelError as error:
            return {"model_error": str(error)}
        except ReceiptError as error:
            return {"receipt_error": str(error)}
        return {}

    def aqnpipe_digests(self: Any, key: int) -> dict[str, Any]:
        """Return the digest of every parameter that this worker holds, under `key`."""
        digests = Digests(key)
        held = EngineModel(self.get_model()).weights()
        return {"digests": {name: digests.of(weight) for name, weight in held.items()}}

    def aqnpipe_begin_pass(self: Any, noise: dict[str, Any]) -> dict[str, Any]:
        """Start a pass under `noise` (`PassNoise` as plain data)."""
        requested, engine = PassNoise.model_validate(noise), EngineModel(self.get_model())
        if requested.clean_norms is not None and self.parallel_config.tensor_parallel_size > 1:
            return _NO_TRAINING
        try:
            check_noise_is_supported(engine, requested)
        except AqnpipeError as error:
            return {"model_error": str(error)}
        self._aqnpipe_pass = _WorkerPass(engine, requested, self._aqnpipe_graphs)
        return {}

    def aqnpipe_begin_batch(self: Any, key: dict[str, int]) -> dict[str, Any]:
        """Install the noise of the pass for one batch, keyed by `key` (`NoiseKey` as plain data)."""
        current: _WorkerPass = self._aqnpipe_pass
        noise, noise_key = current.noise, NoiseKey(**key)
        with ExitStack() as stack:
            hidden_sigmas: dict[int, float] = {}
            try:
                if noise.clean_norms is not None:
                    hidden_sigmas = stack.enter_context(
                        noised_rollout(
                            current.engine.model,
                            noise.aqn,
                            noise.factors,
                            current.recorder,
                            sigma=noise.sigma,
                            seed=noise_key.seed,
                            step=noise_key.step,
                        )
                    )
                shards = stack.enter_context(
                    engine_noise(current.engine, noise, noise_key, current.recorder, current.faults, hidden_sigmas)
                )
            except AqnpipeError as error:
                return {"model_error": str(error)}
            current.begin_batch(stack.pop_all(), shards, noise_key.step)
        return {}

    def aqnpipe_end_batch(self: Any) -> dict[str, Any]:
        """Remove the noise of the batch; does nothing if there is none."""
        current: _WorkerPass = self._aqnpipe_pass
        current.end_batch()
        return {}

    def aqnpipe_end_pass(self: Any) -> dict[str, Any]:
        """End the pass; return rank, number of workers, the recorder's state as JSON, and the states of the faults.

        `shards`: by operator, the tensor-parallel shares that had noise.
        """
        current: _WorkerPass = self._aqnpipe_pass
        del self._aqnpipe_pass
        fault_states = [asdict(state) for state in current.faults.states()]
        return current.measured(self.rank, self.parallel_config.world_size) | {"fault_states": fault_states}
