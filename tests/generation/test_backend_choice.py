"""Which backend a study gets, and the message if vLLM is not installed."""

import os
from types import SimpleNamespace

import pytest

import aqnpipe.generation.backend_choice as choice
import aqnpipe.generation.vllm.launch as requirements
from aqnpipe.config.generation import GenerationConfig
from aqnpipe.config.model import builtin_folder, read_model_config
from aqnpipe.device import Device
from aqnpipe.errors import DeviceError, ModelError

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


@pytest.mark.parametrize(("for_training", "devices"), [(False, 2), (True, 1)])
def test_an_engine_has_the_devices_of_evaluations_and_in_training_one(monkeypatch, for_training, devices):
    monkeypatch.setattr(choice, "VllmEngine", lambda *_, **settings: settings)
    started = choice.open_engine(
        GenerationConfig(backend="vllm", tensor_parallel=2),
        builtin_folder("tiny"),
        SimpleNamespace(eos_token_id=1),
        dtype="float32",
        device=CPU,
        max_tokens=64,
        batch_size=4,
        threads=1,
        for_training=for_training,
    )
    assert started["tensor_parallel"] == devices


@pytest.mark.parametrize(
    ("asked", "device", "has"), [(True, "cuda", True), (False, "cuda", False), (True, "cpu", False)]
)
def test_evaluations_have_graphs_where_they_are_asked_for_and_the_device_has_them(monkeypatch, asked, device, has):
    started = {}

    def start(*_, **settings):
        started.update(settings)
        return SimpleNamespace(when_closed=lambda _: None)

    monkeypatch.setattr(choice, "VllmEngine", start)
    choice.open_generator(
        GenerationConfig(backend="vllm", cuda_graphs=asked),
        builtin_folder("tiny"),
        SimpleNamespace(eos_token_id=1),
        dtype="float32",
        attention="sdpa",
        device=Device(device, 1, ("a device",)),
        max_tokens=64,
        batch_size=4,
        threads=1,
    )
    assert started["cuda_graphs"] is has


@pytest.mark.parametrize(
    ("number", "error", "says"),
    [
        (0, ModelError, "tensor parallelism: found 0, expected 1 or more"),
        (-1, ModelError, "found -1"),
        (3, ModelError, "tensor parallelism over 3 workers: 4 attention heads do not divide by 3"),
        (4, DeviceError, "tensor parallelism over 4 workers: found 2 CPU cores; every worker of an engine needs one"),
    ],
)
def test_shards_that_cannot_be_are_one_line(monkeypatch, number, error, says):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    folder = builtin_folder("tiny")
    with pytest.raises(error) as refused:
        requirements.check_tensor_parallel(folder, read_model_config(folder), "cpu", number)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_as_many_shards_as_devices_are_accepted(monkeypatch):
    monkeypatch.setattr(requirements, "resolve_device", lambda kind: Device(kind, 2, ("GPU",) * 2))
    folder = builtin_folder("tiny")
    requirements.check_tensor_parallel(folder, read_model_config(folder), "cuda", 2)
    with pytest.raises(DeviceError, match="found 2 cuda devices"):
        requirements.check_tensor_parallel(folder, read_model_config(folder), "cuda", 4)
