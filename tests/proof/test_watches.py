"""What an audit sees of linear modules: that they return their product, and their noise where it does not observe."""

from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import aqnpipe
from aqnpipe.machine.machine import Machine
from aqnpipe.proof.audit import Audit

PASSES = 24


class Experts(nn.Module):
    """A layer whose linear module comes behind as many products as the present pass needs."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 8)
        self.products = 1

    def forward(self, hidden):
        for _ in range(self.products):
            hidden = hidden @ self.last.weight.detach().abs()
        return self.last(hidden)


class Small(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.lm_head = nn.Linear(8, 8, bias=False)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(hidden)


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return torch.randn(4, 8)


def observed(model, inputs, passes=PASSES):
    with aqnpipe.noisy(model, scale=0.05, seed=0) as receipt, torch.no_grad():
        for _ in range(passes):
            model(inputs)
    return receipt


def test_linear_modules_are_compared_in_passes_that_are_not_observed(inputs):
    model = Small(nn.Linear(8, 8))
    observing = []
    on_result = Machine._on_result

    def on_noted_result(self, *args):
        observing.append(is_in_torch_dispatch_mode())
        return on_result(self, *args)

    with mock.patch.object(Machine, "_on_result", on_noted_result):
        receipt = observed(model, inputs)
    receipt.check()
    # 16 elements of each product that was compared, of which some had no mode around them.
    assert receipt.recomputed_numbers > 16 * sum(observing)


def test_a_machine_that_is_exact_where_nobody_observes_is_refused(inputs):
    on_result = Machine._on_result

    def on_observed_result(self, operator, result, *args):
        return on_result(self, operator, result, *args) if is_in_torch_dispatch_mode() else result

    with mock.patch.object(Machine, "_on_result", on_observed_result):
        receipt = observed(Small(nn.Linear(8, 8)), inputs)
    assert "recomputed values are not the requested ones" in "; ".join(receipt.problems())


def trained(model, inputs, passes=PASSES):
    with aqnpipe.noisy(model, scale=0.05, seed=0, backward=True) as receipt:
        for _ in range(passes):
            model(inputs).square().sum().backward()
    return receipt


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8)])
def test_gradients_of_linear_modules_are_compared_where_no_mode_is_around_them(bias, shape):
    """Of the first layer the inputs have no gradient, of the others both factors have one."""
    torch.manual_seed(0)
    model = Small(*(nn.Linear(8, 8, bias=bias) for _ in range(3)))
    compared = Audit._compare_gradients
    calls = []

    def noted(self, passed, part, *others):
        calls.append(part)
        return compared(self, passed, part, *others)

    with mock.patch.object(Audit, "_compare_gradients", noted):
        receipt = trained(model, torch.randn(shape), 4 * PASSES).check()
    assert len(set(calls)) >= 3
    assert receipt.passes == 4 * PASSES


def test_gradients_that_are_exact_where_nobody_observes_are_refused(inputs):
    on_result = Machine._on_result

    def on_observed_result(self, operator, result, *args):
        is_gradient = torch._C._current_autograd_node() is not None
        is_left_out = is_gradient and not is_in_torch_dispatch_mode()
        return result if is_left_out else on_result(self, operator, result, *args)

    with mock.patch.object(Machine, "_on_result", on_observed_result):
        receipt = trained(Small(*(nn.Linear(8, 8) for _ in range(3))), inputs)
    problems = "; ".join(receipt.problems())
    assert "backward: mm in" in problems
    assert "recomputed values are not the requested ones" in problems


def test_gradients_of_a_linear_module_under_a_checkpoint_pass(inputs):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden):
            return torch.utils.checkpoint.checkpoint(self.linear, hidden, use_reentrant=False)

    trained(Small(nn.Linear(8, 8), Checkpointed(), Checkpointed()), inputs).check()


def test_several_backward_passes_through_one_product_pass(inputs):
    model = Small(nn.Linear(8, 8))
    model.layers.requires_grad_(False)
    with aqnpipe.noisy(model, scale=0.05, seed=0, backward=True) as receipt:
        for _ in range(4 * PASSES):
            loss = model(inputs).square().sum()
            for number in range(3):
                loss.backward(retain_graph=number < 2)
    receipt.check()


def test_gradients_of_gradients_pass(inputs):
    model = Small(*(nn.Linear(8, 8) for _ in range(3)))
    with aqnpipe.noisy(model, scale=0.05, seed=0, backward=True) as receipt:
        for _ in range(4 * PASSES):
            gradients = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()), create_graph=True)
            sum(gradient.square().sum() for gradient in gradients).backward()
    receipt.check()


def test_a_layer_that_several_places_share_passes(inputs):
    trained(Small(*[nn.Linear(8, 8)] * 3), inputs).check()


def test_code_in_the_place_of_a_linear_function_is_refused(inputs):
    linear = functional.linear
    with mock.patch.object(functional, "linear", lambda *args: linear(*args) * 1.01):
        receipt = observed(Small(nn.Linear(8, 8)), inputs, 1)
    assert receipt.problems() == [
        "the output of layers.0 is not the result of its product, so other code computes in its place",
        "the output of lm_head is not the result of its product, so other code computes in its place",
    ]


def test_a_linear_module_behind_other_products_is_compared_wherever_it_is(inputs):
    experts = Experts()
    model = Small(experts)
    with aqnpipe.noisy(model, scale=0.05, seed=0) as receipt, torch.no_grad():
        for number in range(PASSES):
            experts.products = 1 + number % 5
            model(inputs)
    receipt.check()


@pytest.mark.parametrize("hidden", [torch.randn(3, 2, 8).transpose(0, 1), torch.randn(2, 3, 4, 8), torch.randn(5, 8)])
def test_a_bias_that_torch_adds_apart_is_no_other_code(hidden):
    model = Small(nn.Linear(8, 8), nn.Linear(8, 8))
    with aqnpipe.noisy(model, 0.05, backward=True) as receipt:
        model(hidden).sum().backward()
    receipt.check()
