"""Families whose layers the diagnosis cannot probe are refused in one line."""

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.capture import capture_layer_inputs
from aqnpipe.diagnosis.exact import run_exact
from aqnpipe.errors import ModelError

CONFIG = DiagnosisConfig(exact_repeats=2, intermittent_rate=0.05, miss_probability=0.1)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3n_text", r"takes hidden states of shape \(4, 1, 1, 32\)"),
        ("gpt2", "no linear modules to probe"),
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
