"""Which backend a study gets, and the message if vLLM is not installed."""

from types import SimpleNamespace

import pytest

import aqnpipe.generation.backend_choice as choice
import aqnpipe.generation.vllm.requirements as requirements
from aqnpipe.config.generation import GenerationConfig
from aqnpipe.config.model import builtin_folder
from aqnpipe.device import Device
from aqnpipe.errors import ModelError

CPU, GPU = Device("cpu", 1, ("cpu",)), Device("cuda", 1, ("some GPU",))


@pytest.mark.parametrize(
    ("device", "attention", "installed", "expected"),
    [
        (GPU, "sdpa", True, "vllm"),
        (GPU, "sdpa", False, "transformers"),
        (GPU, "eager", True, "transformers"),
        (CPU, "sdpa", True, "transformers"),
    ],
)
def test_auto_is_vllm_on_a_device_if_it_supports_the_noise(monkeypatch, device, attention, installed, expected):
    monkeypatch.setattr(choice, "is_vllm_installed", lambda: installed)
    assert choice.chosen_backend(GenerationConfig(), attention, device) == expected


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_a_requested_backend_is_used(backend):
    assert choice.chosen_backend(GenerationConfig(backend=backend), "eager", CPU) == backend


@pytest.mark.parametrize(("device", "command"), [(CPU, "make vllm"), (GPU, "make setup DEVICE=cuda")])
def test_vllm_requested_but_missing_is_one_line_with_the_remedy(monkeypatch, device, command):
    monkeypatch.setattr(requirements, "is_vllm_installed", lambda: False)
    with pytest.raises(ModelError, match=f"not installed here: {command}") as refused:
        choice.open_generator(
            GenerationConfig(backend="vllm"),
            builtin_folder("tiny"),
            SimpleNamespace(eos_token_id=1),
            dtype="float32",
            attention="sdpa",
            device=device,
            max_tokens=64,
            batch_size=4,
            threads=1,
        )
    assert "\n" not in str(refused.value)
