"""Arguments of `aqnpipe.noisy` of the wrong kind or size: one clear line each. The nearest right ones are accepted."""

import numpy as np
import pytest
import torch

import aqnpipe
from aqnpipe.config.noise import FakeQuantization, NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.errors import ConfigError, ModelError
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import decoder_layers
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 1}, r"noisy: layers is 1, expected a list of numbers from 0 to \d+$"),
        ({"layers": "all"}, r"noisy: layers is 'all', expected"),
        ({"layers": [-1]}, r"noisy: layers is \[-1\], expected"),
        ({"layers": [0, 99]}, r"noisy: layers is \[0, 99\], expected"),
        ({"layers": [True]}, r"noisy: layers is \[True\], expected"),
        ({"layers": [], "include_lm_head": False}, "layers is empty and include_lm_head is False"),
        ({"scale": "0.05"}, "noisy: scale is '0.05', expected a number"),
        ({"scale": float("nan")}, "noisy: scale is nan, expected a number"),
        ({"seed": "x"}, "noisy: seed is 'x', expected a whole number"),
        ({"seed": 2**63}, "noisy: seed is 9223372036854775808, expected a whole number"),
        ({"step": 0.5}, "noisy: step is 0.5, expected a whole number"),
        ({"operators": "everything"}, "noisy: operators is 'everything', expected matmul or all"),
        ({"operators": ["matmul"]}, r"noisy: operators is \['matmul'\], expected matmul or all"),
        ({"backward": "yes"}, "noisy: backward is 'yes', expected True or False"),
        ({"include_lm_head": None}, "noisy: include_lm_head is None, expected True or False"),
        ({"receipt": "a.json"}, "noisy: receipt is 'a.json', expected what an earlier noisy context gave"),
        ({"scale": None, "error": 0.05}, "noisy: error is 0.05, expected an error model"),
        (
            {"scale": None, "error": FakeQuantization(format="mxfp4"), "operators": "all"},
            "noisy: .*fake_quantization applies to products with a weight only",
        ),
    ],
)
def test_a_wrong_argument_is_one_line(model, arguments, message):
    with pytest.raises(ConfigError, match=message) as found, aqnpipe.noisy(model, **{"scale": 0.05, **arguments}):
        pass
    assert "\n" not in str(found.value)


def test_a_model_that_replicates_another_is_one_line(model):
    with pytest.raises(ConfigError, match=r"^noisy: model is a DataParallel, expected the model inside it"):
        aqnpipe.noisy(torch.nn.DataParallel(model), 0.05).__enter__()


def test_what_is_no_model_is_one_line():
    with pytest.raises(ConfigError, match="noisy: model is 'gpt2', expected a model in memory"):
        aqnpipe.noisy("gpt2", 0.05).__enter__()


@pytest.mark.parametrize(
    "arguments",
    [
        {"layers": range(2)},
        {"layers": np.array([1])},
        {"layers": []},
        {"scale": np.float32(0.05)},
        {"seed": np.int64(3), "step": -1},
        {"seed": 2**63 - 1},
    ],
)
def test_right_arguments_of_other_types_are_accepted(model, ids, arguments):
    with aqnpipe.noisy(model, **{"scale": 0.05, **arguments}) as receipt, torch.no_grad():
        model(input_ids=ids)
    receipt.check()


@pytest.mark.parametrize("where", [{"layers": (0, 99)}, {"layer_scales": {99: 0.1}}])
def test_an_arm_of_layers_that_the_model_does_not_have_is_refused(model, where):
    spec = NoiseSpec(operator_noise=OperatorNoise(error=RelativeGaussian(scale=0.05), **where))
    layers = len(decoder_layers(model))
    recorder = ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=layers, num_norms=1)
    with (
        pytest.raises(ModelError, match=rf"layers \[99\]: the model has layers 0 to {layers - 1}"),
        phase_noise(model, spec, "rollout", NoiseKey(seed=0, step=0), recorder),
    ):
        pass
