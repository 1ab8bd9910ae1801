"""Families whose layers the diagnosis cannot probe are refused in one line, or probed in part with the part named."""

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.capture import capture_layer_inputs
from aqnpipe.diagnosis.exact_probes import run_exact
from aqnpipe.diagnosis.probes.flow import HANDOFFS
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import site_module

CONFIG = DiagnosisConfig(exact_repeats=2, intermittent_rate=0.05, miss_probability=0.1)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3n_text", r"takes hidden states of shape \(4, 1, 1, 32\)"),
        ("llama4_text", "does not support the layer_output of decoder layer 0"),
        ("phimoe", "does not support the router of decoder layer 0"),
        ("longcat_flash", "no module named self_attn"),
        ("mamba", "layers are linear_attention"),
    ],
)
def test_layers_that_cannot_be_probed_are_refused(family, reason):
    with pytest.raises(ModelError, match=reason) as refusal:
        run_exact(tiny_model_of(family), CONFIG)
    assert "\n" not in str(refusal.value)


def test_arguments_without_names_are_kept_by_their_names():
    """Gemma 4 passes the inputs of each layer without a name."""
    captured = capture_layer_inputs(tiny_model_of("gemma4_text"), torch.arange(3, 9).reshape(1, 6))
    assert captured[0].kwargs["per_layer_input"].shape == (1, 6, 8)
    assert captured[0].hidden.shape == (1, 6, 32)


ALL_TESTED = ("mixtral", "gpt_neox", "phi", "starcoder2", "stablelm", "cohere", "gemma3_text", "olmo2", "phi3")


@pytest.mark.parametrize(
    ("family", "untested"),
    [
        ("qwen2_moe", set()),
        ("deepseek_v3", set()),
        ("gpt2", {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        ("diffllama", None),
        ("afmoe", None),
        *(pytest.param(family, set(), marks=pytest.mark.slow) for family in ALL_TESTED),
    ],
)
def test_healthy_families_are_healthy_and_name_what_no_probe_fits(family, untested):
    result = run_exact(tiny_model_of(family), CONFIG)
    assert result.faults == ()
    named = {gap.part for gap in result.untested if gap.layers}
    if untested is not None:
        assert named == untested
    else:
        assert any("on a copy on the host" in gap.reason for gap in result.untested)


@pytest.mark.parametrize(
    ("family", "untested"),
    [("opt", {"inputs of MLPs"}), ("granite", {"inputs of attention", "inputs of MLPs", HANDOFFS}), ("phi", set())],
)
def test_inputs_of_blocks_that_no_probe_compares_are_named(family, untested):
    named = {gap.part for gap in run_exact(tiny_model_of(family), CONFIG).untested}
    assert {part for part in named if part.startswith("inputs of")} == untested


def test_a_fault_of_the_device_is_found_where_a_probe_does_not_fit():
    """The copy on the host tells a probe that does not fit (attention of DiffLlama) from a fault that layers share."""
    model = tiny_model_of("diffllama")
    for layer in range(2):
        factors = torch.ones(32)
        factors[5] = 0.75
        site_module(model, layer, "layer_output").register_forward_hook(lambda m, args, output, f=factors: output * f)
    result = run_exact(model, CONFIG)
    assert [(fault.scope, fault.site, fault.faulty_channel_indices) for fault in result.faults] == [
        ("device", "layer_output", (5,))
    ]
    assert any("on a copy on the host" in gap.reason for gap in result.untested)
