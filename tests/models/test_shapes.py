import pytest
from transformers import GPT2Config

from aqnpipe.config.model import BUILTIN_MODELS, KNOWN_CONFIGS, ModelConfig
from aqnpipe.models.loading import describe_model, source_folder
from aqnpipe.models.shapes import ModelShape, ParameterCount, shape_from_config, shape_of

SMALL = ModelShape(
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=10,
    tied_embeddings=False,
    qkv_bias=True,
)


def test_parameters_and_operations_by_hand():
    # A layer: q and o 8x8 each, k and v 8x4 each, three MLP matrices 8x16.
    assert SMALL.body_matmul_parameters == 2 * (2 * 64 + 2 * 32 + 3 * 128)
    assert SMALL.head_matmul_parameters == 80
    biases, norms = 2 * (8 + 4 + 4), 5 * 8
    assert SMALL.num_parameters == 1152 + biases + norms + 2 * 80
    # Three tokens, one of which needs logits; each attends to two positions in 2 layers with 4 heads of 2.
    assert SMALL.forward_flops(3, 1, 2) == 3 * 2 * 1152 + 3 * (4 * 2 * 8 * 2) + 2 * 80
    assert ParameterCount(num_parameters=100).forward_flops(3, 1, 2) == 600
    # Of rank 3 on q (8 to 8) and k (8 to 4) and down (16 to 8), in two layers.
    assert SMALL.adapter_parameters(3, ("q_proj", "k_proj", "down_proj")) == 2 * 3 * (16 + 12 + 24)


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_counted_parameters_are_those_of_the_files(name):
    config = ModelConfig(source=name)
    shape = shape_of(config)
    assert shape is not None
    assert shape.num_parameters == describe_model(source_folder(config), config.source).num_parameters


def test_known_hub_models_have_the_sizes_that_their_cards_state():
    """1.54 and 7.61 billion, of which 1.31 and 6.53 outside the embeddings."""
    small, large = (shape_from_config(KNOWN_CONFIGS[f"Qwen/Qwen2.5-{size}-Instruct"]) for size in ("1.5B", "7B"))
    assert small is not None
    assert large is not None
    assert round(small.num_parameters / 1e9, 2) == 1.54
    assert round(large.num_parameters / 1e9, 2) == 7.62
    assert round((small.num_parameters - small.head_matmul_parameters) / 1e9, 2) == 1.31
    assert round((large.num_parameters - 2 * large.head_matmul_parameters) / 1e9, 2) == 6.53


def test_the_shapes_of_other_hub_models_and_of_some_families_are_unknown():
    assert shape_of(ModelConfig(source="some/model")) is None
    assert shape_from_config(GPT2Config().to_dict()) is None
