"""Layers, norms and modules by name: one list of attention layers is found, everything else is refused in one line."""

import pytest
import torch
from decoder_families import tiny_model_of
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2MoeConfig

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import (
    decoder_layers,
    is_mixture_of_experts,
    matrices_outside,
    num_rms_norms,
    output_projection,
    rms_norms,
    select_modules,
    takes_positions,
)


@pytest.fixture(scope="module")
def qwen2_1_5b():
    """Qwen2.5-1.5B's architecture without memory for its weights."""
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("scope", "count"), [("minimal", 57), ("mlp", 85), ("linear", 197), ("all", 254)])
def test_scopes_have_the_published_counts(qwen2_1_5b, scope, count):
    assert len(select_modules(qwen2_1_5b, scope)) == count


def test_aqn_targets_every_norm_of_the_dense_model(qwen2_1_5b):
    assert not is_mixture_of_experts(qwen2_1_5b)
    assert len(rms_norms(qwen2_1_5b)) == 57


def test_a_mixture_of_experts_has_its_post_attention_norms_noised():
    config = Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, num_experts=2, shared_expert_intermediate_size=16,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert is_mixture_of_experts(model)
    assert list(rms_norms(model)) == [f"model.layers.{i}.post_attention_layernorm" for i in range(3)]


def test_patterns_select_by_name(qwen2_1_5b):
    chosen = select_modules(qwen2_1_5b, ("*.layers.3.mlp.*_proj", "lm_head"))
    expected = [f"model.layers.3.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert list(chosen) == [*expected, "lm_head"]


def test_a_scope_without_modules_is_refused():
    with pytest.raises(ModelError, match="no module is in scope 'minimal'"):
        select_modules(torch.nn.Linear(2, 2), "minimal")


def test_excluded_modules_are_left_out(qwen2_1_5b):
    chosen = select_modules(qwen2_1_5b, "linear", ("*.down_proj", "lm_head"))
    assert len(chosen) == 197 - 29
    with pytest.raises(ModelError, match=r"excluded '\.norm' matches none of the 197 selected modules"):
        select_modules(qwen2_1_5b, "linear", (".norm",))
    with pytest.raises(ModelError, match="all 57 selected modules are excluded"):
        select_modules(qwen2_1_5b, "minimal", ("*",))


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
