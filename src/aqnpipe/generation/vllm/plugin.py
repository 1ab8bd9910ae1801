"""A vLLM plugin. vLLM runs it in each of its processes before it loads a model."""

import os
import signal
import threading
import time
from importlib.metadata import version
from importlib.util import find_spec

LAUNCHER = "AQNPIPE_VLLM_LAUNCHER"
"""Environment variable: id of the process that started an engine of aqnpipe.

vLLM loads plugins in every engine on the machine; in engines that others started, the plugin does nothing.
"""

_MARK = "_aqnpipe_plugin"
_POLL_SECONDS = 1.0


def register() -> None:
    """Entry point `vllm.general_plugins`: keep linear layers plain, and mark the process as prepared.

    On a CPU vLLM would pack weights for oneDNN or AMX kernels. The reference check cannot recompute a layer with packed
    weights. The engine reads the mark of each worker when it starts.
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
        threading.Thread(target=_exit_after, args=(int(launcher),), daemon=True).start()


def version_in_this_process() -> str | None:
    """Return the version of the plugin that prepared vLLM in this process, None if none did."""
    import vllm

    return getattr(vllm, _MARK, None)


def is_vllm_installed() -> bool:
    """Return whether vLLM is installed, without importing it."""
    return find_spec("vllm") is not None


def _no_packed_kernel(*_: object) -> bool:
    return False


def _exit_after(launcher: int) -> None:
    """End this engine process once its launcher is gone; its workers end with it. vLLM alone would keep running."""
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
