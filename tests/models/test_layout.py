import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2MoeConfig

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import is_mixture_of_experts, rms_norms, select_modules


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
