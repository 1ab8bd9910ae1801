"""Routers of mixtures: the experts that run are observed in every family, and another choice is replayed."""

import pytest
import torch
from random_models import random_mixture_of, random_model_of
from transformers import GptOssConfig, GptOssForCausalLM, Llama4ForCausalLM, Llama4TextConfig

from aqnpipe.errors import ModelError
from aqnpipe.models.routers import Routers

GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
FAMILIES = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_moe top-1": {"num_experts_per_tok": 1},
    "olmoe": {},
    "granitemoe": {},
    "deepseek_v3": {},
    "deepseek_v3 in groups": GROUPED,
    "deepseek_v3 with a dense layer": {"first_k_dense_replace": 1, "num_hidden_layers": 3},
}
IDS = torch.randint(2, 60, (3, 7), generator=torch.Generator().manual_seed(0))


def mixture(name, **overrides):
    return random_mixture_of(name.split()[0], **FAMILIES[name], **overrides)


def gpt_oss():
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager",
    )  # fmt: skip
    return GptOssForCausalLM(config).eval()


def chosen_by_routers(model, ids):
    """Return what the routers' own modules return as experts [rows, places, slots] (their only integers)."""
    seen = []

    def note(module, args, output):
        seen.extend(part for part in output if not part.is_floating_point())

    named = (module for name, module in model.named_modules() if name.rpartition(".")[2] in ("gate", "router"))
    handles = [module.register_forward_hook(note) for module in named]
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return torch.cat(seen, -1).unflatten(0, ids.shape)


def experts_of(model, ids=IDS, routers=None):
    routers = routers or Routers(model)
    with routers.observed(), torch.no_grad():
        logits = model(input_ids=ids).logits
        return routers.take(len(ids)), logits


@pytest.mark.parametrize("name", [*FAMILIES, "gpt_oss"])
def test_observed_are_the_experts_that_the_routers_return(name):
    model = gpt_oss() if name == "gpt_oss" else mixture(name)
    found, _ = experts_of(model)
    assert found is not None
    assert torch.equal(found.long(), chosen_by_routers(model, IDS))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", [*FAMILIES, "gpt_oss"])
def test_a_replay_runs_the_given_experts_and_the_own_choice_changes_nothing(name, implementation):
    model = gpt_oss() if name == "gpt_oss" else mixture(name)
    model.set_experts_implementation(implementation)
    routers = Routers(model)
    routers.examine()
    own, logits = experts_of(model, routers=routers)
    with routers.replayed(own):
        again, same = experts_of(model, routers=routers)
    assert torch.equal(again, own)
    assert torch.equal(same, logits)
    # Other experts in two rows, and no choice in the first, whose tokens the others do not see.
    other = (own + 1) % (8 if "groups" in name else 4)
    other[0] = -1
    with routers.replayed(other):
        found, moved = experts_of(model, routers=routers)
    assert torch.equal(found[1:], other[1:])
    assert torch.equal(found[0], own[0])
    assert torch.allclose(moved[0], logits[0], atol=1e-6)
    assert not torch.allclose(moved[1:], logits[1:], atol=1e-3)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, logits)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3 in groups"])
def test_replayed_experts_have_their_own_scores_and_the_router_gets_a_gradient(name):
    """Shares by hand: softmax or sigmoid of the router's logits at the given experts, with sum 1, times a factor."""
    model = mixture(name)
    block = next(m for m in model.modules() if hasattr(m, "experts") and hasattr(m, "gate"))
    shares, hidden = [], []
    block.experts.register_forward_pre_hook(lambda module, args: shares.append(args[2]))
    block.gate.register_forward_pre_hook(lambda module, args: hidden.append(args[0].detach()))
    routers = Routers(model)
    routers.examine()
    own, _ = experts_of(model, routers=routers)
    other = (own + 1) % 4
    with routers.replayed(other):
        loss = model(input_ids=IDS).logits[..., 0].sum()
        loss.backward()
    logits = hidden[-1].reshape(-1, hidden[-1].shape[-1]) @ block.gate.weight.detach().T
    scores = logits.softmax(-1) if name == "mixtral" else logits.sigmoid()
    expected = scores.gather(-1, routers.by_layer(other.flatten(0, 1))[0].long())
    expected = expected / expected.sum(-1, keepdim=True) * getattr(block.gate, "routed_scaling_factor", 1.0)
    torch.testing.assert_close(shares[-1].detach(), expected)
    assert block.gate.weight.grad.abs().sum() > 0


def test_the_own_choice_replayed_gives_the_same_gradients_with_and_without_checkpointing():
    gradients = []
    for replays, checkpoints in ((False, False), (True, False), (True, True)):
        model = mixture("deepseek_v3").train()
        routers = Routers(model)
        routers.examine()
        assert model.training
        own, _ = experts_of(model, routers=routers)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with routers.replayed(own if replays else torch.full_like(own, -1)):
            model(input_ids=IDS, use_cache=False).logits.square().sum().backward()
        gradients.append([weight.grad for weight in model.parameters() if weight.grad is not None])
    for other in gradients[1:]:
        assert len(other) == len(gradients[0])
        assert all(map(torch.equal, gradients[0], other))


def test_a_model_without_routers_is_refused():
    routers = Routers(random_model_of("qwen2"))
    assert not routers
    with pytest.raises(ModelError, match="routing_replay: Qwen2ForCausalLM has no routers, expected a mixture of exp"):
        routers.examine()


def test_routers_that_give_experts_no_numbers_are_refused_and_not_observed():
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, intermediate_size_mlp=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=1,
        attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    model = Llama4ForCausalLM(config).eval()
    assert experts_of(model)[0] is None
    routers = Routers(model)
    with pytest.raises(
        ModelError, match="Llama4ForCausalLM has a router that does not choose by topk what its experts"
    ):
        routers.examine()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
