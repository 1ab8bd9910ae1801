"""The closed world of operations: a product that the noise does not reach is refused by operation and module."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import NoiseSpec, OperatorNoise
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.injection.phase_state import NoiseKey
from aqnpipe.noise.measure_arm import measure_arm
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

NOISE = OperatorNoise.model_validate({"error": {"kind": "relative_gaussian", "scale": 0.05}, "phases": ["rollout"]})
TOKENS = torch.arange(2, 14).reshape(2, 6)


def problems_of(model, noise=NOISE):
    spec = NoiseSpec(operator_noise=noise)
    recorder = ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=3, num_norms=7)
    with torch.no_grad(), phase_noise(model, spec, "rollout", NoiseKey(seed=0, step=0), recorder):
        model(input_ids=TOKENS)
    return recorder.receipt().problems()


class WithBranch(nn.Module):
    """An MLP and beside it a branch that multiplies in a way of its own."""

    def __init__(self, mlp, branch):
        super().__init__()
        self.mlp = mlp
        self.branch = branch

    def forward(self, x):
        return self.mlp(x) + self.branch(x)


class Branch(nn.Module):
    """`compute(x, weight)` with a square weight; x is [batch, tokens, channels]."""

    def __init__(self, compute, size=32):
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.eye(size) / 8)

    def forward(self, x):
        return self.compute(x, self.weight)


@torch.jit.script
def scripted(x, weight):
    return torch.mm(x.reshape(-1, 32), weight).view(x.shape)


def rows_by_vector(x, weight):
    return torch.stack([torch.mv(weight, row) for row in x.reshape(-1, 32)]).view(x.shape)


def by_dot(x, weight):
    return torch.stack([torch.dot(row, weight[0]) for row in x.reshape(-1, 32)]).view(*x.shape[:2], 1) + 0 * x


PRODUCTS = {
    "aten.mv": rows_by_vector,
    "aten.dot": by_dot,
    "aten.mm": lambda x, w: torch.ops.aten.mm(x.reshape(-1, 32), w).view(x.shape),
    "scripted": scripted,
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([2], [1])),
    "inner": lambda x, w: torch.inner(x, w),
    "addbmm": lambda x, w: torch.addbmm(torch.zeros(6, 32), x, w.expand(2, 32, 32)).expand_as(x),
    "convolution": lambda x, w: F.conv1d(x.transpose(1, 2), w.unsqueeze(-1)).transpose(1, 2),
    "cdist": lambda x, w: torch.cdist(x, w.expand(2, 32, 32)),
    "sparse": lambda x, w: torch.sparse.mm(w.to_sparse(), x.reshape(-1, 32).T).T.view(x.shape),
    "sum of products": lambda x, w: (x.unsqueeze(-2) * w).sum(-1),
    "sum of squared differences": lambda x, w: (x.unsqueeze(-2) - w).square().sum(-1),
    "product of activations": lambda x, w: torch.ops.aten.bmm(torch.ops.aten.bmm(x, x.transpose(1, 2)), x),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_that_the_noise_does_not_reach_is_refused_by_module(model, name):
    layer = model.model.layers[1]
    layer.mlp = WithBranch(layer.mlp, Branch(PRODUCTS[name]))
    problems = problems_of(model)
    assert any("model.layers.1.mlp.branch" in problem and "escaped the noise" in problem for problem in problems), (
        problems
    )


def test_a_recurrent_network_is_refused(model):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(32, 32, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    layer = model.model.layers[2]
    layer.mlp = WithBranch(layer.mlp, Recurrent())
    assert any("model.layers.2.mlp.branch" in problem for problem in problems_of(model))


HARMLESS = {
    "bias of every token": lambda x, w: x + w[: x.shape[1]],
    "lookup": lambda x, w: F.embedding(torch.zeros(x.shape[:2], dtype=torch.long), w),
    "noised product": lambda x, w: x @ w,
    "cast": lambda x, w: F.linear(x.double(), w.double()).float(),
    "selected rows": lambda x, w: F.linear(x, w[torch.arange(32)]),
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "dropout by hand": lambda x, w: x * torch.empty_like(x).bernoulli_(0.5),
    "gated": lambda x, w: F.silu(x) * x,
    "normalised": lambda x, w: F.layer_norm(x, (32,)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_product_or_is_noised_is_accepted(model, name):
    layer = model.model.layers[1]
    layer.mlp = WithBranch(layer.mlp, Branch(HARMLESS[name]))
    assert problems_of(model) == []


def test_layers_without_noise_may_compute_anything(model):
    layer = model.model.layers[1]
    layer.mlp = WithBranch(layer.mlp, Branch(rows_by_vector))
    assert problems_of(model, NOISE.model_copy(update={"layers": (0, 2), "include_lm_head": False})) == []


def test_a_product_of_the_forward_that_reads_one_token_is_seen(model):
    class OnOneToken(nn.Module):
        def forward(self, x):
            return x if x.shape[1] > 1 else torch.ops.aten.bmm(x, x.transpose(1, 2)) * x

    layer = model.model.layers[0]
    layer.mlp = WithBranch(layer.mlp, OnOneToken())
    spec = NoiseSpec(operator_noise=NOISE)
    recorder = ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=3, num_norms=7)
    with torch.no_grad(), phase_noise(model, spec, "rollout", NoiseKey(seed=0, step=0), recorder):
        cache = model(input_ids=TOKENS, use_cache=True).past_key_values
        model(input_ids=TOKENS[:, -1:], past_key_values=cache, use_cache=True)
    assert any("aten.bmm in model.layers.0.mlp.branch" in problem for problem in recorder.receipt().problems())


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_noise_reaches_every_expert_forward_and_backward(implementation):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation=implementation
    ).eval()
    arm = Arm.model_validate(
        {"description": "", "operator_noise": {"error": {"kind": "relative_gaussian", "scale": 0.05}}}
    )
    receipt = measure_arm(model, arm)
    assert receipt.problems() == []
    shares = {record.phase: record.noised_share for record in receipt.phases if record.noised_calls}
    assert shares == {"rollout": 1.0, "reference": 1.0, "actor_forward": 1.0, "backward": None}
    # Gate, up and down projections of two experts per token, beside attention and the router.
    rollout = next(record for record in receipt.phases if record.phase == "rollout")
    assert rollout.forward_flops > 2 * (3 * 32 * 48) * 2 * 2 * 4 * 48
    if implementation == "grouped_mm":
        operators = {cell.operator for cell in receipt.cells if cell.phase == "backward"}
        assert {"grouped_mm.gradient_0", "grouped_mm.gradient_1"} <= operators


def test_experts_that_compute_clean_change_the_logits_less(model):
    """The share of a mixture's operations is counted by shape: experts are in it, whatever kernel computes them."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, pad_token_id=0,
    )  # fmt: skip
    mixture = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    arm = Arm.model_validate(
        {"description": "", "operator_noise": {"error": {"kind": "relative_gaussian", "scale": 0.05}}}
    )
    record = next(one for one in measure_arm(mixture, arm).phases if one.phase == "rollout")
    tokens = 4 * 48
    experts = 2 * tokens * 2 * (3 * 32 * 256)
    assert experts / record.forward_flops > 0.8
    assert record.noised_flops == record.forward_flops
