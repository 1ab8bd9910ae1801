"""A model in memory is compared with its folder: each refusal names the weight and its cause."""

import pytest
import torch
from random_models import random_mixture_of
from safetensors.torch import load_file, save_file

from aqnpipe.errors import ModelError
from aqnpipe.models.loading import load_model
from aqnpipe.models.verification import _compare_weights

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), rf"{NAME} has NaN in its file, expected numbers"),
        (2.0, rf"{NAME} in memory is not the weight of this checkpoint"),
    ],
)
def test_a_weight_that_differs_is_named_with_its_cause(save_model, value, message):
    folder = save_model(2)
    model = load_model(folder, dtype="float32", attention="eager")
    _compare_weights(model, folder, "float32")
    weights = load_file(folder / "model.safetensors")
    weights[NAME][0, 0] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if value != value:
        model.state_dict()[NAME][0, 0] = torch.nan
    with pytest.raises(ModelError, match=message):
        _compare_weights(model, folder, "float32")


MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v3")


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_that_the_loader_fuses_are_compared_with_their_file(architecture, tmp_path):
    random_mixture_of(architecture).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", attention="eager")
    _compare_weights(model, tmp_path, "bfloat16")
    experts = next(weight for name, weight in model.named_parameters() if "expert" in name and weight.ndim == 3)
    with torch.no_grad():
        experts[3, 5, 7] += 1
    with pytest.raises(ModelError, match=r"expert.* in memory is not the weight of this checkpoint"):
        _compare_weights(model, tmp_path, "bfloat16")
