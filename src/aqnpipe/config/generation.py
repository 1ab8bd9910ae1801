"""Which engine generates."""

from typing import Literal

from pydantic import Field

from aqnpipe.config.base import FrozenModel

AskedBackend = Literal["auto", "transformers", "vllm"]


class GenerationConfig(FrozenModel):
    """The backend that evaluations generate with."""

    backend: AskedBackend = Field(
        default="auto",
        description="auto: vLLM where the device is a GPU or NPU, vLLM is installed and can compute the noise that is "
        "asked for, else transformers; transformers; vllm",
    )
    gpu_memory_utilization: float = Field(
        default=0.8, gt=0, le=1, description="share of a device's memory that vLLM may take; not used on a CPU"
    )
