"""The pinned AdamW computes an update by its rule (Loshchilov and Hutter 2019), which audits do not repeat."""

import pytest
import torch

RATE, BETAS, EPSILON, DECAY = 1e-2, (0.8, 0.95), 1e-8, 0.1


@pytest.mark.parametrize("variant", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_the_rule(variant, dtype):
    torch.manual_seed(0)
    decayed, plain = (torch.nn.Parameter(torch.randn(5, 3).to(dtype)) for _ in range(2))
    groups = [{"params": [decayed], "weight_decay": DECAY}, {"params": [plain], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON, **variant)
    precision = torch.finfo(dtype).eps
    for step in range(1, 5):
        before = {}
        for weight, decay in ((decayed, DECAY), (plain, 0.0)):
            weight.grad = torch.randn(5, 3).to(dtype)
            state = optimizer.state.get(weight) or {"exp_avg": weight * 0, "exp_avg_sq": weight * 0}
            before[weight] = [tensor.detach().double() for tensor in (weight, state["exp_avg"], state["exp_avg_sq"])]
            before[weight] += [weight.grad.double(), decay]
        optimizer.step()
        for weight, (value, first, second, gradient, decay) in before.items():
            first = BETAS[0] * first + (1 - BETAS[0]) * gradient
            second = BETAS[1] * second + (1 - BETAS[1]) * gradient.square()
            root = (second / (1 - BETAS[1] ** step)).sqrt() + EPSILON
            change = -RATE * first / (1 - BETAS[0] ** step) / root
            allowed = 1.5 * precision * value.abs() + (2e-4 + 12 * precision) * change.abs()
            error = weight.detach().double() - (value * (1 - RATE * decay) + change)
            assert bool((error.abs() <= allowed).all())
            assert int(optimizer.state[weight]["step"]) == step
