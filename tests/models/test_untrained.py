"""Checkpoints that learned nothing: weights in any number format, and adapters whose second factors are zero."""

import pytest
import torch
from safetensors.torch import save_file

from aqnpipe.models.adapted import ADAPTERS_FILE
from aqnpipe.models.untrained import is_untrained


@pytest.fixture
def model(tmp_path):
    return written(tmp_path / "model", "model.safetensors", {"a": torch.arange(4.0), "b": torch.ones(2, 2)})


def written(folder, name, tensors):
    folder.mkdir()
    save_file(tensors, folder / name)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_of_the_model_are_untrained(tmp_path, model, dtype):
    tensors = {"a": torch.arange(4.0).to(dtype), "b": torch.ones(2, 2).to(dtype)}
    assert is_untrained(written(tmp_path / "same", "model.safetensors", tensors), model)
    tensors["b"][1, 1] = 2
    assert not is_untrained(written(tmp_path / "other", "model.safetensors", tensors), model)


def test_other_names_and_missing_files_are_not_untrained(tmp_path, model):
    assert not is_untrained(written(tmp_path / "names", "model.safetensors", {"a": torch.arange(4.0)}), model)
    assert not is_untrained(tmp_path / "gone", model)


def test_adapters_are_untrained_while_their_second_factor_is_zero(tmp_path, model):
    tensors = {"x.lora_A.weight": torch.ones(2, 2), "x.lora_B.weight": torch.zeros(2, 2)}
    assert is_untrained(written(tmp_path / "start", ADAPTERS_FILE, tensors), model)
    tensors["x.lora_B.weight"] += 1
    assert not is_untrained(written(tmp_path / "trained", ADAPTERS_FILE, tensors), model)
