"""Chooses the generation backend of a study and opens it on a model folder."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from aqnpipe.config.generation import GenerationConfig
from aqnpipe.config.model import Attention, Dtype
from aqnpipe.device import Device, torch_device
from aqnpipe.generation.noisy_passes import NoisyGenerator, TransformersPasses
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.generation.vllm.launch import why_no_graphs
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.models.adapters import whole_weights
from aqnpipe.models.loading import load_model
from aqnpipe.models.verification import refuse_other_weights


def chosen_backend(requested: GenerationConfig, attention: Attention, device: Device) -> str:
    """Return "vllm" or "transformers". `auto` is vLLM on GPUs and NPUs if it is installed and supports the noise.

    With eager attention, noise is applied to the two products inside attention; vLLM does not expose them.
    """
    if requested.backend != "auto":
        return requested.backend
    supports_noise = attention == "sdpa"
    use_vllm = device.kind != "cpu" and supports_noise and is_vllm_installed()
    return "vllm" if use_vllm else "transformers"


def open_generator(
    requested: GenerationConfig,
    folder: Path,
    tokenizer: Any,
    *,
    dtype: Dtype,
    attention: Attention,
    device: Device,
    max_tokens: int,
    batch_size: int,
    threads: int,
) -> NoisyGenerator:
    """Load the model in `folder` with the chosen backend; the caller closes it.

    `max_tokens`: limit of a prompt and its response together. Raises ModelError if the backend is missing or cannot
    load the model, ReceiptError if a vLLM worker is not prepared for noise.
    """
    if chosen_backend(requested, attention, device) == "transformers":
        model = load_model(folder, dtype=dtype, attention=attention, device=torch_device(device.kind))
        return TransformersPasses(model, tokenizer, partial(refuse_other_weights, model, folder, dtype))
    with ExitStack() as files:
        whole = files.enter_context(whole_weights(folder, dtype))
        engine = open_engine(
            requested,
            whole,
            tokenizer,
            dtype=dtype,
            device=device,
            max_tokens=max_tokens,
            batch_size=batch_size,
            threads=threads,
            cuda_graphs=why_no_graphs(is_requested=requested.cuda_graphs, device=device.kind) is None,
        )
        # Its workers read the tokenizer in the folder when they need it.
        engine.when_closed(files.pop_all().close)
    return engine


def open_engine(
    requested: GenerationConfig,
    folder: Path,
    tokenizer: Any,
    *,
    dtype: Dtype,
    device: Device,
    max_tokens: int,
    batch_size: int,
    threads: int,
    for_training: bool = False,
    batch_invariant: bool | None = None,
    cuda_graphs: bool = False,
) -> VllmEngine:
    """Start vLLM on the model in `folder`; the caller closes it. In training it has less memory and may sleep.

    There it is on the one device of its training worker. batch_invariant: vLLM's batch-invariant mode; None leaves it
    to the environment. cuda_graphs: passes without noise are replayed, see `vllm.graphs`.
    """
    return VllmEngine(
        folder,
        end_token=tokenizer.eos_token_id,
        dtype=dtype,
        max_tokens=max_tokens,
        batch_size=batch_size,
        device=device.kind,
        threads=threads,
        gpu_memory_utilization=(
            requested.rollout_gpu_memory_utilization if for_training else requested.gpu_memory_utilization
        ),
        sleeps=for_training and requested.rollout_sleep,
        batch_invariant=batch_invariant,
        cuda_graphs=cuda_graphs,
        tensor_parallel=1 if for_training else requested.tensor_parallel,
    )
