"""A vLLM plugin. vLLM runs it in each of its processes before it loads a model."""

import os
import signal
import threading
import time
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from aqnpipe.errors import ModelError

LAUNCHER = "AQNPIPE_VLLM_LAUNCHER"
"""Environment variable: id of the process that started an engine of aqnpipe.

vLLM loads plugins in every engine on the machine; in engines that others started, the plugin does nothing.
"""

NOISE_FILE = "AQNPIPE_VLLM_NOISE"
"""Environment variable: the file with the noise of a server that a user started (see `serving`)."""

_MARK = "_aqnpipe_plugin"
_POLL_SECONDS = 1.0


def register() -> None:
    """Entry point `vllm.general_plugins`: keep linear layers plain, and mark the process as prepared.

    On a CPU vLLM would pack weights for oneDNN or AMX kernels. The reference check cannot recompute a layer with packed
    weights. The engine reads the mark of each worker when it starts.
    """
    launcher, noise_file = os.environ.get(LAUNCHER), os.environ.get(NOISE_FILE)
    if launcher is None and noise_file is None:
        return
    import vllm
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm._custom_ops
        import vllm.model_executor.layers.utils

        vllm._custom_ops._supports_onednn = False
        vllm.model_executor.layers.utils.check_cpu_sgl_kernel = _no_packed_kernel
    setattr(vllm, _MARK, version("aqnpipe"))
    if noise_file is not None and launcher is None:
        _serve_after_warm_up(noise_file, is_cpu=current_platform.is_cpu())
    elif launcher is not None and os.getppid() == int(launcher):
        threading.Thread(target=_exit_after, args=(int(launcher),), daemon=True).start()


def version_in_this_process() -> str | None:
    """Return the version of the plugin that prepared vLLM in this process, None if none did."""
    import vllm

    return getattr(vllm, _MARK, None)


def is_vllm_installed() -> bool:
    """Return whether vLLM is installed, without importing it."""
    return find_spec("vllm") is not None


def _serve_after_warm_up(path: str, *, is_cpu: bool) -> None:
    """Make every worker of this process install the noise in the file at `path` once vLLM has warmed it up.

    `serving` is imported only then: vLLM's CPU worker fails if llvmlite is imported before it starts.
    """
    module = import_module("vllm.v1.worker.cpu_worker" if is_cpu else "vllm.v1.worker.gpu_worker")
    worker: Any = module.CPUWorker if is_cpu else module.Worker
    warm_up = worker.compile_or_warm_up_model
    if hasattr(warm_up, _MARK):
        return

    @wraps(warm_up)
    def warm_up_and_serve(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = warm_up(self, *args, **kwargs)
        if not hasattr(self, "aqnpipe_serve"):
            raise ModelError(
                f"{NOISE_FILE}: found no --worker-extension-cls, expected aqnpipe.generation.vllm.serving.ServedNoise"
            )
        self.aqnpipe_serve(path)
        return result

    setattr(warm_up_and_serve, _MARK, True)
    worker.compile_or_warm_up_model = warm_up_and_serve


def _no_packed_kernel(*_: object) -> bool:
    return False


def _exit_after(launcher: int) -> None:
    """End this engine process once its launcher is gone; its workers end with it. vLLM alone would keep running."""
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
