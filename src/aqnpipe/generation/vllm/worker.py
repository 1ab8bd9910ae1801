"""What vLLM's worker processes are requested to do: methods that vLLM adds to its Worker class and calls by name.

Arguments and results are plain data, so that nothing is pickled. A mistake of the user comes back as
`{"refused": "one line"}`, weights that did not arrive as `{"unproven": "one line"}`; everything else is a bug and
fails the call.
"""

import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aqnpipe.errors import AqnpipeError, ReceiptError
from aqnpipe.generation.noisy_passes import PassNoise, RolloutNoise
from aqnpipe.generation.vllm.injection import engine_noise, refuse_what_cannot_be_mapped
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.generation.vllm.plugin import version_in_this_process
from aqnpipe.generation.vllm.weights import take_weights
from aqnpipe.models.layout import rms_norms
from aqnpipe.noise.aqn import noised_rollout
from aqnpipe.noise.injection.phase_state import NoiseKey
from aqnpipe.noise.receipts.recorder import ReceiptRecorder


class _WorkerPass:
    """One pass on one worker: what was requested, what was recorded, and the batch that is under way."""

    def __init__(self, engine: EngineModel, noise: PassNoise) -> None:
        self.engine = engine
        self.noise = noise
        self.faults = noise.active_faults()
        self.recorder: ReceiptRecorder = noise.recorder(len(engine.layers), len(rms_norms(engine.model)))
        self.batch: ExitStack | None = None


class NoiseExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`); `self` is that worker."""

    _aqnpipe_pass: _WorkerPass

    def aqnpipe_describe(self: Any) -> dict[str, Any]:
        """Return who this worker is and whether the plugin prepared it."""
        model = self.get_model()
        return {
            "rank": self.rank,
            "num_workers": self.parallel_config.world_size,
            "process": os.getpid(),
            "plugin": version_in_this_process(),
            "enforce_eager": bool(self.model_config.enforce_eager),
            "model": type(model).__name__,
            "num_layers": len(EngineModel(model).layers),
            "num_norms": len(rms_norms(model)),
        }

    def aqnpipe_load_weights(self: Any, path: str, sha256: str) -> dict[str, Any]:
        """Take the weights in the file at `path`, whose digest is `sha256`; return that of what the model now holds."""
        try:
            take_weights(EngineModel(self.get_model()), Path(path), sha256)
        except ReceiptError as error:
            return {"unproven": str(error)}
        return {"sha256": sha256}

    def aqnpipe_begin_pass(self: Any, noise: dict[str, Any]) -> dict[str, Any]:
        """Start a pass under `noise` (`PassNoise` as plain data)."""
        return self._aqnpipe_begin(PassNoise.model_validate(noise))

    def aqnpipe_begin_rollout(self: Any, noise: dict[str, Any]) -> dict[str, Any]:
        """Start a rollout under `noise` (`RolloutNoise` as plain data)."""
        return self._aqnpipe_begin(RolloutNoise.model_validate(noise))

    def _aqnpipe_begin(self: Any, noise: PassNoise) -> dict[str, Any]:
        try:
            engine = EngineModel(self.get_model())
            refuse_what_cannot_be_mapped(engine, noise)
        except AqnpipeError as error:
            return {"refused": str(error)}
        self._aqnpipe_pass = _WorkerPass(engine, noise)
        return {}

    def aqnpipe_begin_batch(self: Any, key: dict[str, int]) -> dict[str, Any]:
        """Install the noise of the pass, named by `key` (`NoiseKey` as plain data)."""
        current: _WorkerPass = self._aqnpipe_pass
        noise, named = current.noise, NoiseKey(**key)
        with ExitStack() as stack:
            hidden_sigmas: dict[int, float] = {}
            try:
                if isinstance(noise, RolloutNoise):
                    hidden_sigmas = stack.enter_context(
                        noised_rollout(
                            current.engine.model,
                            noise.aqn,
                            noise.factors,
                            current.recorder,
                            sigma=noise.sigma,
                            seed=named.seed,
                            step=named.step,
                        )
                    )
                stack.enter_context(
                    engine_noise(current.engine, noise, named, current.recorder, current.faults, hidden_sigmas)
                )
            except AqnpipeError as error:
                return {"refused": str(error)}
            current.batch = stack.pop_all()
        return {}

    def aqnpipe_end_batch(self: Any) -> dict[str, Any]:
        """Remove the noise; does nothing if there is none."""
        current: _WorkerPass = self._aqnpipe_pass
        if current.batch is not None:
            batch, current.batch = current.batch, None
            batch.close()
        return {}

    def aqnpipe_end_pass(self: Any) -> dict[str, Any]:
        """Return the record of the pass: rank, number of workers, state of the recorder as JSON, and of the faults."""
        current: _WorkerPass = self._aqnpipe_pass
        del self._aqnpipe_pass
        return {
            "rank": self.rank,
            "num_workers": self.parallel_config.world_size,
            "state": current.recorder.state().to_json(),
            "fault_states": [asdict(state) for state in current.faults.states()],
        }
