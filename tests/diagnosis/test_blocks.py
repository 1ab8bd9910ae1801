"""What attention and MLP read, and the sum over experts: faults between the modules of a layer."""

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.diagnosis.probes.flow import mixture_check
from aqnpipe.diagnosis.probes.sequences import probe_sequences
from aqnpipe.models.layout import decoder_layers, layer_sites

LAYER = 1


def places(model):
    layers = [layer_sites(layer) for layer in decoder_layers(model)]
    with torch.no_grad():
        return {(check.layer, check.site) for check in probe_sequences(model, layers, 0, {}) if check.mismatch}


def one_channel_lost(module, args, kwargs):
    if args:
        return (torch.cat([args[0][..., :5], 0 * args[0][..., 5:6], args[0][..., 6:]], -1), *args[1:]), kwargs
    (lost,), _ = one_channel_lost(module, (kwargs["hidden_states"],), {})
    return args, kwargs | {"hidden_states": lost}


@pytest.mark.parametrize("block", ["attention", "mlp"])
@pytest.mark.parametrize("family", ["qwen2", "olmo2", "gemma2", "gpt_neox", "cohere", "gpt2"])
def test_a_channel_that_is_lost_on_the_way_into_a_block_is_found(family, block):
    model = tiny_model_of(family)
    module = getattr(layer_sites(decoder_layers(model)[LAYER]), block)
    module.register_forward_pre_hook(one_channel_lost, with_kwargs=True)
    assert places(model) == {(LAYER, f"{block}_input")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "part"),
    [("dots1", "shared_experts"), ("qwen2_moe", "shared_expert"), ("mixtral", "experts"), ("glm4_moe", "experts")],
)
def test_a_term_that_is_lost_from_the_sum_over_experts_is_found(family, part, dtype):
    model = tiny_model_of(family).to(dtype)
    block = layer_sites(decoder_layers(model)[LAYER]).mlp
    kept = {}
    getattr(block, part).register_forward_hook(
        lambda m, a, out: kept.__setitem__("lost", out.reshape(-1, out.shape[-1]))
    )

    def without(module, args, output):
        lost = torch.cat([0 * kept["lost"][:, :3], kept["lost"][:, 3:4], 0 * kept["lost"][:, 4:]], -1)
        return output - lost.reshape(output.shape)

    block.register_forward_hook(without)
    assert (LAYER, "mlp_output") in places(model)


def added_in_place(block, hidden_states):
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, shares, chosen = block.gate(flat)
    output = block.experts(flat, chosen, shares)
    output += torch.sigmoid(block.shared_expert_gate(flat)) * block.shared_expert(flat)
    return output.reshape(hidden_states.shape)


def test_a_sum_over_experts_that_is_made_in_place_is_healthy(monkeypatch):
    model = tiny_model_of("qwen2_moe")
    monkeypatch.setattr(type(layer_sites(decoder_layers(model)[LAYER]).mlp), "forward", added_in_place)
    assert places(model) == set()


def test_the_gate_of_a_shared_expert_by_hand():
    terms = {"routed": torch.tensor([[1.0, 2.0]]), "shared": torch.tensor([[4.0, 8.0]]), "gate": torch.tensor([[0.0]])}
    assert mixture_check(0, terms, torch.tensor([[3.0, 6.0]])).mismatch is None
    assert mixture_check(0, terms, torch.tensor([[3.0, 6.00001]])).mismatch.channels.tolist() == [1]
    assert mixture_check(0, terms, torch.tensor([[3.0, 2.0]])).mismatch.channels.tolist() == [1]
