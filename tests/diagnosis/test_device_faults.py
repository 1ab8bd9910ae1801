"""Faults that hardware has: shared by every layer, in single bits, in tiles, NaN, and in some calls only."""

import pytest
import torch

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.exact_probes import run_exact
from aqnpipe.diagnosis.verdict import judge
from aqnpipe.models.layout import site_module

CONFIG = DiagnosisConfig(exact_repeats=2, intermittent_rate=0.02, miss_probability=0.1)
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def damage(model, site, change, layers=(0, 1, 2)):
    """Apply `change` to the output of `site` in `layers`."""

    def hook(module, args, output):
        tensor = output[0] if isinstance(output, tuple) else output
        changed = change(tensor.clone())
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    for layer in layers:
        site_module(model, layer, site).register_forward_hook(hook)


def diagnosed(model, site, change, layers=(0, 1, 2)):
    damage(model, site, change, layers)
    return run_exact(model, CONFIG)


def with_factor(channels, factor):
    def change(output):
        output[..., channels] *= factor
        return output

    return change


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_channel_that_is_wrong_in_every_layer_is_a_fault_of_the_device(random_model, dtype):
    model = random_model(dtype=dtype, num_layers=2)
    sites = ["attention_output", "input_layernorm", "layer_output", "o_proj", "up_proj"]
    for channel, site in enumerate(sites):
        damage(model, site, with_factor([channel], 0.75), layers=(0, 1))
    result = run_exact(model, CONFIG)
    assert [(fault.scope, fault.layer, fault.site, fault.layers) for fault in result.faults] == [
        ("device", None, site, (0, 1)) for site in sites
    ]
    assert [fault.faulty_channel_indices for fault in result.faults] == [(channel,) for channel in range(5)]
    verdict = judge(result, None, CONFIG)
    assert (verdict.verdict, verdict.layer) == ("fault", None)


def test_the_same_channel_in_two_of_five_layers_is_two_faults(random_model):
    result = diagnosed(random_model(num_layers=5), "o_proj", with_factor([7], 0.75), layers=(0, 3))
    assert [(fault.scope, fault.layer) for fault in result.faults] == [("layer", 0), ("layer", 3)]


def test_a_layer_with_a_fault_of_its_own_beside_that_of_the_device(random_model):
    model = random_model()
    site_module(model, 1, "o_proj").register_forward_hook(lambda m, a, output: with_factor([30], 0.5)(output.clone()))
    result = diagnosed(model, "o_proj", with_factor([7], 0.75))
    assert [(fault.layer, fault.faulty_channel_indices) for fault in result.faults] == [(None, (7,)), (1, (30,))]


@pytest.mark.parametrize(
    ("turn", "dtype"),
    [(0, torch.float32), (1, torch.bfloat16), pytest.param(2, torch.float16, marks=pytest.mark.slow)],
)
def test_stuck_mantissa_bits_are_found_and_named(random_model, turn, dtype):
    """Bit and value of each of four layers at two of three sites; over the dtypes, every one at every site.

    Every layer has channels of its own: those that most layers share would be a fault of the device.
    """

    def stuck(bit, value, channels):
        def change(output):
            words = output.view(WORDS[dtype])[..., channels]
            words.copy_((words & ~(1 << bit)) | (value << bit))
            return output

        return change

    model, sites = random_model(dtype=dtype, num_layers=4), ["down_proj", "layer_output", "q_proj"]
    bits = {}
    for layer, (bit, value) in enumerate([(0, 0), (0, 1), (5, 0), (5, 1)]):
        for shift in range(2):
            site = sites[(layer + shift + turn) % 3]
            bits[layer, site] = bit
            damage(model, site, stuck(bit, value, slice(layer, None, 4)), layers=(layer,))
    result = run_exact(model, CONFIG)
    assert {(fault.layer, fault.site) for fault in result.faults} == set(bits)
    for fault in result.faults:
        bit = bits[fault.layer, fault.site]
        assert set(fault.bits.flipped) == {bit}
        assert int(fault.bits.expected, 16) ^ int(fault.bits.observed, 16) == int(fault.bits.xor_mask, 16) == 1 << bit
        assert fault.rate_per_call >= 0.2


@pytest.mark.parametrize("sites", [("o_proj", "layer_output"), ("input_layernorm", "mlp_output")])
@pytest.mark.parametrize(
    "values", [(torch.nan, torch.inf), pytest.param((torch.inf, torch.nan), marks=pytest.mark.slow)]
)
def test_nan_is_a_fault_of_its_own_layer_only(random_model, sites, values):
    def filled(value):
        def change(output):
            output[..., 3] = value
            return output

        return change

    model = random_model(dtype=torch.bfloat16)
    for layer, site, value in zip((0, 2), sites, values, strict=True):
        damage(model, site, filled(value), layers=(layer,))
    result = run_exact(model, CONFIG)
    assert [(fault.layer, fault.site) for fault in result.faults] == [(0, sites[0]), (2, sites[1])]
    assert judge(result, None, CONFIG).verdict == "fault"


def test_nan_for_ordinary_inputs_only_is_a_fault(random_model):
    def change(output):
        output[..., 3] = torch.nan if output.abs().max() < 100 else output[..., 3]
        return output

    (fault,) = diagnosed(random_model(num_layers=2), "layer_output", change, layers=(0,)).faults
    assert (fault.layer, fault.site, fault.type) == (0, "layer_output", "other")
    assert "NaN" in fault.evidence


def test_a_lane_of_a_tile_is_named(random_model):
    (fault,) = diagnosed(random_model(num_layers=2), "o_proj", with_factor(slice(5, None, 32), 2.0), layers=(1,)).faults
    assert (fault.tile.width, fault.tile.offsets) == (32, (5,))


def test_one_call_in_three_has_its_rate(random_model):
    calls = []

    def change(output):
        calls.append(1)
        return output * 2 if len(calls) % 3 == 0 else output

    (fault,) = diagnosed(random_model(num_layers=2), "v_proj", change, layers=(1,)).faults
    assert 0.1 < fault.rate_per_call < 0.7
    assert fault.calls >= 5


def test_a_device_wide_fault_of_every_channel_is_one_fault(random_model):
    (fault,) = diagnosed(random_model(num_layers=2), "gate_proj", lambda output: output * 1.01, layers=(0, 1)).faults
    assert (fault.scope, fault.num_faulty_channels, fault.num_channels) == ("device", 160, 160)
