"""The general plugin of vLLM: what has to happen in each of its processes before a model is loaded."""

import os
import signal
import threading
import time
from importlib.metadata import version
from importlib.util import find_spec

LAUNCHER = "AQNPIPE_VLLM_LAUNCHER"
"""Environment variable: process id of who started an engine of ours. vLLM loads plugins in everybody's engines."""

_MARK = "_aqnpipe_plugin"
_POLL_SECONDS = 1.0


def register() -> None:
    """Entry point `vllm.general_plugins`: keep linear layers plain, and leave a mark that workers are requested.

    On a CPU vLLM would pack weights for oneDNN or AMX kernels: such a layer has no weight that can be recomputed with,
    so the witness could not compare it with bare torch.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    import vllm
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm._custom_ops
        import vllm.model_executor.layers.utils

        vllm._custom_ops._supports_onednn = False
        vllm.model_executor.layers.utils.check_cpu_sgl_kernel = _no_packed_kernel
    setattr(vllm, _MARK, version("aqnpipe"))
    if os.getppid() == int(launcher):
        threading.Thread(target=_end_after, args=(int(launcher),), daemon=True).start()


def version_in_this_process() -> str | None:
    """Return the version of the plugin that prepared vLLM in this process, None if none did."""
    import vllm

    return getattr(vllm, _MARK, None)


def is_vllm_installed() -> bool:
    """Tell whether vLLM is installed, without importing it."""
    return find_spec("vllm") is not None


def _no_packed_kernel(*_: object) -> bool:
    return False


def _end_after(launcher: int) -> None:
    """End the engine's process once its launcher is gone: vLLM's would live on after a kill. Its workers follow it."""
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
