"""Weights in memory against their file and against themselves."""

import pytest
import torch
from decoder_families import tiny_model_of
from random_models import random_mixture_of

from aqnpipe.diagnosis.stored_weights import compare_with_earlier, compare_with_file, row_checksums
from aqnpipe.models.loading import load_model

DTYPES = ["float32", "bfloat16", "float16"]
FAMILIES = ["qwen2", "gemma2", "gpt_neox", "gpt2", "opt", "mixtral", "qwen2_moe", "deepseek_v3"]


@pytest.fixture
def folder_of(tmp_path):
    def save(family):
        is_mixture = family in ("mixtral", "qwen2_moe", "deepseek_v3")
        model = random_mixture_of(family) if is_mixture else tiny_model_of(family)
        model.save_pretrained(tmp_path)
        return tmp_path

    return save


def places(checks):
    return {(check.layer, check.site) for check in checks if check.mismatch}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_weights_agree(folder_of, family, dtype):
    folder = folder_of(family)
    model = load_model(folder, dtype=dtype, attention="eager")
    checks = compare_with_file(model, folder)
    compared = sum(check.num_channels * check.elements_per_channel for check in checks)
    assert compared == sum(parameter.numel() for parameter in model.parameters())
    assert not places(checks)
    assert not places(compare_with_earlier(model, row_checksums(model)))


def flipped_bit(weight):
    bits = weight.data.view(torch.int16)
    bits[3, 2] ^= 1


def swapped_rows(weight):
    weight.data[[1, 2]] = weight.data[[2, 1]]


def four_bits(weight):
    scale = weight.data.abs().amax() / 7
    weight.data.copy_((weight.data / scale).round() * scale)


@pytest.mark.parametrize("change", [flipped_bit, swapped_rows, four_bits])
@pytest.mark.parametrize(
    ("family", "name", "place"),
    [
        ("qwen2", "model.layers.1.mlp.down_proj.weight", (1, "down_proj")),
        ("qwen2", "model.embed_tokens.weight", (-1, "embedding")),
        ("qwen2", "lm_head.weight", (-1, "lm_head")),
        ("mixtral", "model.layers.0.mlp.experts.gate_up_proj", (0, "experts.1")),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", (0, "query_key_value")),
    ],
)
def test_corrupted_weights_are_found(folder_of, family, name, place, change):
    folder = folder_of(family)
    model = load_model(folder, dtype="bfloat16", attention="eager")
    before = row_checksums(model)
    weight = model.get_parameter(name)
    change(weight[1] if weight.ndim == 3 else weight)
    assert places(compare_with_file(model, folder)) == {place}
    assert places(compare_with_earlier(model, before)) == {place}


def test_the_faulty_rows_are_named(folder_of):
    folder = folder_of("qwen2")
    model = load_model(folder, dtype="float32", attention="eager")
    before = row_checksums(model)
    model.model.norm.weight.data[7] += 1e-6
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data[5, 9] = float("nan")
    for checks in (compare_with_file(model, folder), compare_with_earlier(model, before)):
        found = {(check.layer, check.site): check.mismatch.channels.tolist() for check in checks if check.mismatch}
        assert found == {(-1, "final_norm"): [7], (0, "up_proj"): [5]}
