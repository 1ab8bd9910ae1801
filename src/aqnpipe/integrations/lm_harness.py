"""A model for lm-evaluation-harness: its Hugging Face model, with noise on every matrix product and a receipt.

Every batch that the harness gives to the model is one step of the noise, so its random numbers follow from `noise_seed`
and the order of the batches, which the harness derives from the task. The receipt becomes part of the results; if it is
refused, the evaluation fails before results are returned or written.

Importing this module registers the models `aqnpipe` and, on vLLM, `aqnpipe-vllm` (`lm_harness_vllm`). `aqnpipe lm-eval`
is the harness's own command line with them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NoReturn

from lm_eval.api.registry import model_registry, register_model
from lm_eval.models.huggingface import HFLM
from pydantic import ValidationError

from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.model import builtin_folder, source_kind
from aqnpipe.errors import ConfigError
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import decoder_layers, noised_attention, num_rms_norms
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.receipt import Receipt

model_registry.register("aqnpipe-vllm", target="aqnpipe.integrations.lm_harness_vllm:NoisyVllm")

_PLAIN_LINEAR = "noise is defined on the products of plain linear modules"
_REFUSED = {
    "trust_remote_code": "code that comes with a model is never executed",
    "parallelize": "noise is applied in one process on one device",
    "tp_plan": "noise is applied in one process on one device",
    "autogptq": _PLAIN_LINEAR,
    "gptqmodel": _PLAIN_LINEAR,
    "peft": "merge the adapter first",
    "delta": "merge the weights first",
    "lora_local_path": "merge the adapter first",
    "quantization": _PLAIN_LINEAR,
    "tensor_parallel_size": "noise is applied in one process on one device",
    "data_parallel_size": "noise is applied in one process on one device",
    "gguf_file": "weights are read from safetensors only",
}


class NoisyHFLM(HFLM):
    """The harness's Hugging Face model with noise and faults on every forward pass, and a recorder of both."""

    noise: PassNoise

    def begin_pass(self, noise: PassNoise) -> None:
        """Start a pass under `noise`: its batches are numbered from 0, and its receipt begins empty."""
        self.noise = noise
        self._faults = noise.active_faults()
        self._recorder = noise.recorder(len(decoder_layers(self.model)), num_rms_norms(self.model))
        self._num_batches = 0

    @property
    def receipt(self) -> Receipt:
        """Requested and measured noise so far; not checked."""
        return self._recorder.receipt()

    def _model_call(self, *args: Any, **kwargs: Any) -> Any:
        with self._noisy_batch():
            return super()._model_call(*args, **kwargs)

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._noisy_batch():
            return super()._model_generate(*args, **kwargs)

    @contextmanager
    def _noisy_batch(self) -> Iterator[None]:
        key = NoiseKey(seed=self.noise.noise_seed or 0, step=self._num_batches)
        self._num_batches += 1
        with phase_noise(self.model, self.noise, self.noise.phase, key, self._recorder, faults=self._faults):
            yield


@register_model("aqnpipe")
class NoisyLM(NoisyHFLM):
    """`--model aqnpipe --model_args pretrained=...,noise=0.05,noise_seed=0`, and what the model `hf` takes.

    - pretrained: folder of the model; its weights are read from safetensors.
    - noise: standard deviation relative to each element, 0 for none.
    - noise_seed: the same seed gives the same noise.
    - noise_operators: `matmul` or `all`.
    - noise_lm_head: whether the output projection has noise.
    - batch_size: questions per batch.
    - kwargs: further arguments of the model `hf`.
    """

    def __init__(
        self,
        pretrained: str,
        noise: float = 0.0,
        noise_seed: int = 0,
        noise_operators: str = "matmul",
        noise_lm_head: bool = True,
        batch_size: int | str | None = 1,
        **kwargs: Any,
    ) -> None:
        """Load the model. Raises ConfigError for settings that cannot be, ModelError if noise cannot reach it."""
        kwargs = accepted("aqnpipe", kwargs)
        refuse_batches_of_no_number("aqnpipe", batch_size)
        if kwargs.get("backend", "default") not in ("default", "causal"):
            raise ConfigError(f"--model_args backend={kwargs['backend']}: expected causal, a decoder")
        if not isinstance(pretrained, str):
            raise ConfigError("pretrained: found a model in memory, expected a folder, a hub id or a built-in model")
        folder = str(builtin_folder(pretrained)) if source_kind(pretrained) == "builtin" else pretrained
        super().__init__(pretrained=folder, batch_size=batch_size, use_safetensors=True, **kwargs)
        refuse_quantised(pretrained, getattr(self.model.config, "quantization_config", None))
        if self.world_size != 1:
            raise ConfigError(f"found {self.world_size} processes, expected one: noise is applied in one process")
        attention = noised_attention(self.model) if noise else "fused"
        self.begin_pass(noise_of(noise, noise_seed, noise_operators, noise_lm_head, attention))

    def set_cache_hook(self, cache_hook: Any) -> NoReturn:
        """Refuse `--use_cache`."""
        refuse_stored_answers("aqnpipe")

    def get_model_info(self) -> dict[str, Any]:
        """Return the entries of the results about the model, with the receipt; ReceiptError if it is refused.

        The harness calls this when all answers are there, before it returns or writes results.
        """
        return super().get_model_info() | receipt_entries(self.receipt.check())


def accepted(model: str, given: dict[str, Any], supported: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the settings without those that noise rules out; raises ConfigError if one of these asks for anything.

    supported: settings that `model` has under noise although others have not.
    """
    refused = {name: reason for name, reason in _REFUSED.items() if name not in supported}
    for name, reason in refused.items():
        value = given.get(name)
        if value and not (name.endswith("_parallel_size") and value == 1):
            raise ConfigError(f"--model_args {name}={value}: not with the model {model}: {reason}")
    return {name: value for name, value in given.items() if name not in refused}


def refuse_batches_of_no_number(model: str, batch_size: int | str | None) -> None:
    """Raise ConfigError if the machine would choose the size of batches."""
    if batch_size is not None and not (str(batch_size).isdecimal() and int(batch_size) > 0):
        raise ConfigError(
            f"--batch_size {batch_size}: not with the model {model}, because the noise depends on the batches; "
            "expected a number"
        )


def refuse_quantised(pretrained: str, quantization: object) -> None:
    """Raise ConfigError if a model's configuration has a quantisation."""
    if quantization is not None:
        raise ConfigError(f"--model_args pretrained={pretrained}: found a quantised model; {_PLAIN_LINEAR}")


def refuse_stored_answers(model: str) -> NoReturn:
    """Raise ConfigError: the harness keys stored answers by their questions, not by the noise."""
    raise ConfigError(
        f"--use_cache: not with the model {model}, because stored answers of another noise would be taken"
    )


def receipt_entries(receipt: Receipt) -> dict[str, Any]:
    """Return the entries of the results about the noise."""
    return {"aqnpipe_version": version("aqnpipe"), "aqnpipe_receipt": receipt.model_dump(mode="json")}


def noise_of(scale: float, seed: int, operators: str, lm_head: bool, attention: str) -> PassNoise:
    """Return the noise that the arguments of a model request; ConfigError if it cannot be."""
    content: dict[str, Any] = {"noise_seed": seed}
    if scale != 0:
        content["operator_noise"] = {
            "error": {"kind": "relative_gaussian", "scale": scale},
            "operators": operators,
            "phases": ("evaluation",),
            "include_lm_head": lm_head,
            "attention": attention,
        }
    try:
        return PassNoise.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"--model_args: {describe_validation_error(error, content, PassNoise)}") from error
