"""Layers of other families: one list of attention layers is found, everything else is refused in one line."""

import pytest
import torch
from decoder_families import tiny_model_of
from peft import LoraConfig, get_peft_model

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import (
    decoder_layers,
    matrices_outside,
    num_rms_norms,
    output_projection,
    rms_norms,
    takes_positions,
)


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss", "falcon", "dbrx", "granitemoehybrid of attention alone"])
def test_layers_of_attention_are_found(family):
    model = tiny_model_of(family)
    assert len(decoder_layers(model)) == 2
    assert matrices_outside(model) == []


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("mamba", "2 of 2 layers are linear_attention"),
        ("minimax", "1 of 2 layers are linear_attention"),
        ("falcon_h1", "2 of 2 layers are hybrid"),
        ("lfm2", "1 of 2 layers are conv"),
        ("deepseek_v32", "2 of 2 layers are indexed_attention"),
        ("rwkv", "keep a recurrent state"),
        ("recurrent_gemma", "keep a recurrent state"),
        ("openai-gpt", "takes no past_key_values"),
        ("cpmant", "takes no attention_mask"),
        ("hrm_text", "several lists of layers"),
    ],
)
def test_other_layers_are_refused_in_one_line(family, found):
    with pytest.raises(ModelError, match=found) as refusal:
        decoder_layers(tiny_model_of(family))
    assert "use another model family" in str(refusal.value)


def test_a_list_of_layers_within_a_layer_is_not_another_list(model):
    model.model.layers[0].mlp.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    assert decoder_layers(model) is model.model.layers


def test_adapters_change_neither_layers_nor_positions(model):
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    assert len(decoder_layers(adapted)) == 3
    assert takes_positions(adapted)


@pytest.mark.parametrize(
    ("family", "expected"),
    [("llama", True), ("gpt2", True), ("falcon", True), ("bloom", False), ("mpt", False), ("falcon with ALiBi", False)],
)
def test_models_that_count_the_places_of_a_row_are_recognised(family, expected):
    assert takes_positions(tiny_model_of(family)) == expected


@pytest.mark.parametrize(
    ("family", "names"),
    [("gemma4_text", ["model.per_layer_model_projection.weight"]), ("modernbert-decoder", ["lm_head.dense.weight"])],
)
def test_matrices_outside_layers_and_output_projection_are_named(family, names):
    model = tiny_model_of(family)
    assert matrices_outside(model) == names
    assert isinstance(output_projection(model), torch.nn.Linear)


def test_a_mixture_without_post_attention_norms_works_without_aqn_and_names_its_norms():
    model = tiny_model_of("longcat_flash")
    assert num_rms_norms(model) == 0
    with pytest.raises(ModelError, match=r"its RMSNorms are .*post_attention_layernorm.*all_norms or hidden_states"):
        rms_norms(model)
    assert rms_norms(model, "all_norms")


def test_aqn_on_a_model_with_layer_norm_is_refused_with_what_to_do():
    model = tiny_model_of("gpt_neox")
    assert num_rms_norms(model) == 0
    with pytest.raises(ModelError, match=r"no RMSNorm with a weight: use an arm without AQN"):
        rms_norms(model)
