"""What has noise, and what has none, of the functions that a layer may call."""

import pytest
import torch
import torch.nn.functional as F
from on_modules import on_modules
from torch import nn
from torch.nn.utils import parametrize

from aqnpipe.noise.injection.operators import contracted_indices

IDS = torch.randint(2, 64, (2, 6), generator=torch.Generator().manual_seed(0))


class WithBranch(nn.Module):
    """An MLP and beside it `compute(x, module)`, whose result is kept."""

    def __init__(self, mlp, compute):
        super().__init__()
        self.mlp = mlp
        self.compute = compute
        self.weight = nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(1)) / 6)
        self.linear = nn.Linear(32, 32)
        self.register_buffer("positions", torch.arange(1, 7))
        self.seen = None

    def forward(self, x):
        self.seen = self.compute(x, self)
        return self.mlp(x) + self.seen


def with_branch(model, compute):
    layer = model.model.layers[1]
    layer.mlp = WithBranch(layer.mlp, compute)
    return model, layer.mlp


def receipt_of(model, *, backward):
    with on_modules(model, 0.05, backward=backward) as receipt, torch.set_grad_enabled(backward):
        loss = model(IDS, labels=IDS).loss
        if backward:
            loss.backward()
    return receipt


@pytest.mark.parametrize(
    ("equation", "contracted"),
    [
        ("ij,jk->ik", ["j", "j"]),
        ("btd, hde -> bthe", ["d", "d"]),
        ("bthd,hdm->btm", ["hd", "hd"]),
        ("ij,jk", ["j", "j"]),
        ("...i,...i->...", ["i", "i"]),
        ("...i,...i->i", [".", "."]),
        ("...i,ij", ["i", "i"]),
        ("i,j->ij", ["", ""]),
        ("ij,ij->ij", ["", ""]),
        ("ij,k->ik", ["", ""]),
        ("ij->ji", [""]),
        ("ij->i", [""]),
        ("ii", [""]),
    ],
)
def test_an_einsum_contracts_what_two_operands_have_and_its_result_has_not(equation, contracted):
    assert contracted_indices(equation) == contracted


@pytest.mark.parametrize("backward", [False, True])
def test_an_einsum_that_sums_nothing_changes_neither_activations_nor_weights_nor_buffers(make_model, backward):
    def compute(x, module):
        before = [value.detach().clone() for value in (x, module.weight, module.positions)]
        turned = torch.einsum("btd->bdt", x)
        weight = torch.einsum("ij->ji", module.weight)
        torch.einsum("i->i", module.positions)
        angles = torch.einsum("i,j->ij", module.positions.float(), module.positions.float())
        assert torch.equal(angles, module.positions[:, None] * module.positions.float())
        output = turned.transpose(1, 2) @ weight
        for value, clean in zip((x, module.weight, module.positions), before, strict=True):
            assert torch.equal(value, clean)
        return output

    model, branch = with_branch(make_model(), compute)
    receipt_of(model, backward=backward).check()
    assert branch.seen is not None


def test_a_product_written_as_an_einsum_without_a_sum_is_refused(make_model):
    model, _ = with_branch(make_model(), lambda x, module: torch.einsum("btd,de->btde", x, module.weight).sum(2))
    problems = receipt_of(model, backward=False).problems()
    assert any("aten.mul on a weight matrix in model.layers.1.mlp" in problem for problem in problems)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x, module: torch.matmul(input=x, other=module.weight),
        lambda x, module: torch.bmm(x, mat2=module.weight.expand(2, -1, -1)),
        lambda x, module: torch.einsum("btd,de->bte", [x, module.weight]),
        lambda x, module: F.linear(input=x, weight=module.weight),
        lambda x, module: torch.addmm(mat2=module.weight, mat1=x.flatten(0, 1), input=x.flatten(0, 1)).view_as(x),
        lambda x, module: module.linear(input=x),
    ],
    ids=["matmul", "bmm", "einsum of a list", "linear", "addmm", "nn.Linear"],
)
def test_operands_by_name_or_in_a_list_have_noise_like_others(make_model, compute, backward):
    model, _ = with_branch(make_model(), compute)
    receipt_of(model, backward=backward).check()


def test_the_factors_of_a_sum_are_told_apart_by_name_and_its_result_may_have_a_place(make_model):
    first, second = torch.full((3, 2), 2.0), torch.full((2, 4), 3.0)
    seen = []

    def compute(x, module):
        places = [torch.empty(3, 4) for _ in range(2)]
        seen.append(torch.addmm(torch.ones(3, 4), mat2=second, mat1=first, out=places[0]))
        seen.append(torch.addmm(torch.full((3, 4), torch.nan), first, second, beta=0, out=places[1]))
        assert all(found is place for found, place in zip(seen, places, strict=True))
        return x

    model, _ = with_branch(make_model(), compute)
    receipt_of(model, backward=False)
    for sums, added in zip(seen, (1, 0), strict=True):
        relative = (sums - added) / 12 - 1
        # 12 draws of 5 %: none beyond ten standard deviations, and not all zero.
        assert 0 < relative.abs().max() < 0.5


@pytest.mark.parametrize("backward", [False, True])
def test_a_weight_that_is_computed_in_the_layer_is_accepted(make_model, backward):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.full((32, 2), 0.1)), nn.Parameter(torch.full((2, 32), 0.1))

        def forward(self, weight):
            return weight + self.a @ self.b

    model, branch = with_branch(make_model(), lambda x, module: module.linear(x))
    parametrize.register_parametrization(branch.linear, "weight", Adapted())
    receipt_of(model, backward=backward).check()


@pytest.mark.parametrize("shape", [(32,), (32, 1)])
def test_a_weight_with_a_gain_per_channel_is_accepted(make_model, shape):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.full(shape, 2.0))

        def forward(self, weight):
            return weight * self.gain.view(-1, 1)

    model, branch = with_branch(make_model(), lambda x, module: module.linear(x))
    parametrize.register_parametrization(branch.linear, "weight", Scaled())
    receipt_of(model, backward=False).check()


def test_activations_with_such_a_gain_are_no_weight_and_a_product_with_the_scaled_weight_is_refused(make_model):
    def compute(x, module):
        return ((x * module.linear.bias).unsqueeze(-1) * (module.weight * module.linear.bias)).sum(-2)

    model, _ = with_branch(make_model(), compute)
    problems = receipt_of(model, backward=False).problems()
    assert any("aten.mul on a weight matrix in model.layers.1.mlp" in problem for problem in problems)
