"""What vLLM's worker processes are asked to do: methods that vLLM adds to its Worker class and calls by name.

Arguments and results are plain data, so that nothing is pickled. A mistake of the user comes back as
`{"refused": "one line"}`; everything else is a bug and fails the call.
"""

import os
from contextlib import ExitStack
from typing import Any

from aqnpipe.errors import AqnpipeError
from aqnpipe.generation.noisy import PassNoise
from aqnpipe.generation.vllm.injection import engine_noise, refuse_what_cannot_be_mapped
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.generation.vllm.plugin import version_in_this_process
from aqnpipe.noise.layout import rms_norms
from aqnpipe.noise.phase_state import NoiseKey
from aqnpipe.noise.recorder import ReceiptRecorder


class _WorkerPass:
    """One pass on one worker: what was asked, what was recorded, and the batch that is under way."""

    def __init__(self, engine: EngineModel, noise: PassNoise) -> None:
        self.engine = engine
        self.noise = noise
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

    def aqnpipe_begin_pass(self: Any, noise: dict[str, Any]) -> dict[str, Any]:
        """Start a pass under `noise` (`PassNoise` as plain data)."""
        try:
            engine, asked = EngineModel(self.get_model()), PassNoise.model_validate(noise)
            refuse_what_cannot_be_mapped(engine, asked)
        except AqnpipeError as error:
            return {"refused": str(error)}
        self._aqnpipe_pass = _WorkerPass(engine, asked)
        return {}

    def aqnpipe_begin_batch(self: Any, key: dict[str, int]) -> dict[str, Any]:
        """Install the noise of the pass, named by `key` (`NoiseKey` as plain data)."""
        current: _WorkerPass = self._aqnpipe_pass
        stack = ExitStack()
        try:
            stack.enter_context(engine_noise(current.engine, current.recorder, current.noise, NoiseKey(**key)))
        except AqnpipeError as error:
            return {"refused": str(error)}
        current.batch = stack
        return {}

    def aqnpipe_end_batch(self: Any) -> dict[str, Any]:
        """Remove the noise; does nothing if there is none."""
        current: _WorkerPass = self._aqnpipe_pass
        if current.batch is not None:
            batch, current.batch = current.batch, None
            batch.close()
        return {}

    def aqnpipe_end_pass(self: Any) -> dict[str, Any]:
        """Return the account of the pass: rank, number of workers, and the state of the recorder as JSON."""
        current: _WorkerPass = self._aqnpipe_pass
        del self._aqnpipe_pass
        return {
            "rank": self.rank,
            "num_workers": self.parallel_config.world_size,
            "state": current.recorder.state().to_json(),
        }
