"""Methods for vLLM's worker processes: vLLM adds them to its Worker class, and the engine calls them by name.

Arguments and results are plain data, so that nothing is pickled. A user's mistake is returned as
`{"model_error": "one line"}`, weights that cannot be used as `{"receipt_error": "one line"}`. Any other exception is a
bug and fails the call.

CUDA graphs: in passes without noise, decode steps are replayed and not computed by Python. A graph repeats kernels that
were recorded when the engine started, before there was any noise or fault, so a replay has none. Nor does it run hooks,
and noise, faults and their audit need those in every pass. An engine with graphs therefore replays in passes without
noise alone, and computes the others as one without graphs does. Prompts are always read by Python, with the audit of a
clean pass. Every replay is counted, and the receipt states the number. A graph reads the memory in which the weights
were when it was captured, so weights that move are refused. Never run on a GPU: tested with vLLM's own dispatcher and
wrapper on a CPU, and stand-ins for the graphs.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import wraps
from typing import Any

from torch import nn

from aqnpipe.errors import AqnpipeError, ModelError, ReceiptError
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.vllm.injection import check_noise_is_supported, engine_noise
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.generation.vllm.plugin import version_in_this_process
from aqnpipe.generation.vllm.weights import Digests, load_sent, opened
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


def reported(method: Callable[..., dict[str, Any] | None]) -> Callable[..., dict[str, Any]]:
    """Decorator of a method for workers: it returns the errors that a user can correct."""

    @wraps(method)
    def run(self: Any, *args: Any) -> dict[str, Any]:
        try:
            return method(self, *args) or {}
        except ReceiptError as error:
            return {"receipt_error": str(error)}
        except AqnpipeError as error:
            return {"model_error": str(error)}

    return run


def checked_reply(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a worker replied; raise ModelError or ReceiptError for what it reports in one line."""
    if "model_error" in reply:
        raise ModelError(reply["model_error"])
    if "receipt_error" in reply:
        raise ReceiptError(reply["receipt_error"])
    return reply


class WorkerGraphs:
    """The graphs of one worker, whose `model_runner` is given; off until they are allowed. `replays` counts them."""

    def __init__(self, runner: Any) -> None:
        self.replays = 0
        self._dispatcher = runner.cudagraph_dispatcher
        self._modes = {True: self._dispatcher.cudagraph_mode, False: type(self._dispatcher.cudagraph_mode).NONE}
        self._addresses = _addresses(runner.get_model())
        entries = getattr(runner.model, "concrete_cudagraph_entries", {}).values()
        captured = [entry for entry in entries if entry.cudagraph is not None]
        for entry in captured:
            entry.cudagraph = _Counted(entry.cudagraph, self)
        self.number = len(captured)
        self.allow(False)

    def allow(self, is_clean: bool) -> None:
        """Let vLLM replay in what follows, or compute every pass by Python."""
        # Of what vLLM computes next, its dispatcher alone decides whether it is replayed.
        self._dispatcher.cudagraph_mode = self._modes[is_clean]

    def refuse_moved(self, model: nn.Module) -> None:
        """Raise ReceiptError if a weight is not where it was at the start, where graphs read it."""
        if not self.number:
            return
        now = _addresses(model)
        if moved := [name for name, address in self._addresses.items() if now.get(name) != address]:
            raise ReceiptError(
                f"weight sync: {len(moved)} of {len(now)} parameters moved, and CUDA graphs read their old memory: "
                f"{', '.join(moved[:3])}; generation.cuda_graphs: false runs without"
            )


class _Counted:
    def __init__(self, graph: Any, graphs: WorkerGraphs) -> None:
        self._graph, self._graphs = graph, graphs

    def replay(self) -> None:
        self._graphs.replays += 1
        self._graph.replay()


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


class WorkerPass:
    """One pass on one worker: its noise and faults, the recorder, and the hooks of the current batch.

    `shards`: by operator, the tensor-parallel shares that had noise in the batches that have ended.
    """

    def __init__(self, engine: EngineModel, noise: PassNoise, graphs: WorkerGraphs | None) -> None:
        self.engine, self.noise, self._graphs = engine, noise, graphs
        self.faults = noise.active_faults()
        self.recorder: ReceiptRecorder = noise.recorder(len(engine.layers), num_rms_norms(engine.model))
        if noise.clean_norms is not None:
            self.recorder.expect_clean_norms(noise.clean_norms, engine.model)
        self.shards: dict[str, set[Shard]] = {}
        self._batch = ExitStack()

    def begin_batch(self, key: NoiseKey) -> None:
        """Install the noise of the pass for one batch, keyed by `key`, until `end_batch`."""
        noise = self.noise
        with ExitStack() as stack:
            hidden_sigmas: dict[int, float] = {}
            if noise.clean_norms is not None:
                rollout = noised_rollout(
                    self.engine.model,
                    noise.aqn,
                    noise.factors,
                    self.recorder,
                    sigma=noise.sigma,
                    seed=key.seed,
                    step=key.step,
                )
                hidden_sigmas = stack.enter_context(rollout)
            shards = stack.enter_context(
                engine_noise(self.engine, noise, key, self.recorder, self.faults, hidden_sigmas)
            )
            self._batch.callback(self._note, shards, key.step)
            self._batch.push(stack.pop_all())
        if self._graphs is not None:
            self._graphs.replays = 0
            self._graphs.allow(noise.is_clean)

    def end_batch(self) -> None:
        """Remove the hooks of the batch, if there is one, and note what it measured."""
        self._batch.close()

    def _note(self, shards: Mapping[str, set[Shard]], step: int) -> None:
        if self._graphs is not None:
            self._graphs.allow(False)
            self.recorder.count_replays(self.noise.phase, step, self._graphs.replays)
        for operator, noised in shards.items():
            self.shards[operator] = self.shards.get(operator, set()) | noised

    def measured(self, rank: int, num_workers: int) -> dict[str, Any]:
        """Return what this worker measured so far, as plain data; between batches."""
        return {
            "rank": rank,
            "num_workers": num_workers,
            "state": self.recorder.state().model_dump_json(),
            "shards": {operator: sorted(shards) for operator, shards in self.shards.items()},
        }


class NoiseExtension:
    """Mixin for vLLM's worker (`worker_extension_cls`); `self` is the worker."""

    _aqnpipe_pass: WorkerPass
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

    @reported
    def aqnpipe_load_weights(self: Any, shared: Sequence[Any], index: Sequence[Sequence[Any]]) -> None:
        """Load the weights in the trainer's buffer (see `WeightBuffer`)."""
        _refuse_training_on_shares(self.parallel_config)
        load_sent(EngineModel(self.get_model()), opened(shared, index, self.device))
        if self._aqnpipe_graphs is not None:
            self._aqnpipe_graphs.refuse_moved(self.get_model())

    def aqnpipe_digests(self: Any, key: int) -> dict[str, Any]:
        """Return the digest of every parameter that this worker holds, under `key`."""
        digests = Digests(key)
        held = EngineModel(self.get_model()).weights()
        return {"digests": {name: digests.of(weight) for name, weight in held.items()}}

    @reported
    def aqnpipe_begin_pass(self: Any, noise: dict[str, Any]) -> None:
        """Start a pass under `noise` (`PassNoise` as plain data)."""
        requested, engine = PassNoise.model_validate(noise), EngineModel(self.get_model())
        if requested.clean_norms is not None:
            _refuse_training_on_shares(self.parallel_config)
        check_noise_is_supported(engine, requested)
        self._aqnpipe_pass = WorkerPass(engine, requested, self._aqnpipe_graphs)

    @reported
    def aqnpipe_begin_batch(self: Any, key: dict[str, int]) -> None:
        """Install the noise of the pass for one batch, keyed by `key` (`NoiseKey` as plain data)."""
        self._aqnpipe_pass.begin_batch(NoiseKey(**key))

    def aqnpipe_end_batch(self: Any) -> dict[str, Any]:
        """Remove the noise of the batch; does nothing if there is none."""
        self._aqnpipe_pass.end_batch()
        return {}

    def aqnpipe_end_pass(self: Any) -> dict[str, Any]:
        """End the pass; return rank, number of workers, the recorder's state as JSON, and the states of the faults.

        `shards`: by operator, the tensor-parallel shares that had noise.
        """
        current: WorkerPass = self._aqnpipe_pass
        del self._aqnpipe_pass
        fault_states = [asdict(state) for state in current.faults.states()]
        return current.measured(self.rank, self.parallel_config.world_size) | {"fault_states": fault_states}


def _refuse_training_on_shares(config: Any) -> None:
    if config.tensor_parallel_size > 1:
        raise ModelError("rollouts on tensor-parallel engines are not supported, expected one worker")
