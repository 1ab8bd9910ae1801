"""A model in memory is compared with its folder: each refusal names the weight and its cause."""

import pytest
import torch
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
