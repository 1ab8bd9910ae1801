"""Which operands are quantized, along which dimension, and what the receipt says of the others."""

import pytest
import torch
import torch.nn.functional as F
from random_models import random_mixture_of
from torch import Tensor, nn

import aqnpipe
from aqnpipe.config.noise import FakeQuantization
from aqnpipe.errors import ReceiptError
from aqnpipe.noise.kernels.quantization import fake_quantize

MXFP4 = FakeQuantization(format="mxfp4")
NVFP4 = FakeQuantization(format="nvfp4")
NUM_EXPERTS = 4
IDS = torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(0))


class Matrices(nn.Module):
    """In place of an MLP: `compute(x, weight)` with four matrices as one parameter; `seen` has its results."""

    def __init__(self, compute):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, 32, 32, generator=torch.Generator().manual_seed(1)) / 6)
        self.compute = compute
        self.seen = []

    def forward(self, x):
        self.seen.append((x, self.compute(x, self.weight)))
        return self.seen[-1][1].reshape(x.shape)


def quantized_run(model, error, *, forwards=2, between=None, gradients=False):
    with aqnpipe.noisy(model, error=error) as receipt, torch.set_grad_enabled(gradients):
        for number in range(forwards):
            if number and between is not None:
                between(model)
            output = model(IDS, use_cache=False).logits
    return output, receipt


def layer_with(make_model, compute):
    model = make_model(intermediate_size=64)
    model.model.layers[1].mlp = Matrices(compute)
    return model, model.model.layers[1].mlp


def columns_of(weight: Tensor, number_format: str) -> Tensor:
    """Each matrix [inputs, outputs] quantized by itself, in blocks of inputs."""
    return torch.stack([fake_quantize(matrix.T.contiguous(), number_format).T for matrix in weight])


def experts_of(x: Tensor) -> Tensor:
    return x.reshape(NUM_EXPERTS, -1, 32)


OFFSETS = torch.arange(1, NUM_EXPERTS + 1, dtype=torch.int32) * (IDS.numel() // NUM_EXPERTS)


@pytest.mark.parametrize("error", [MXFP4, NVFP4], ids=["mxfp4", "nvfp4"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x, weight: torch.bmm(experts_of(x), weight),
        lambda x, weight: torch.bmm(experts_of(x), mat2=weight),
        lambda x, weight: torch.matmul(input=experts_of(x), other=weight),
        lambda x, weight: experts_of(x) @ weight,
        lambda x, weight: torch.einsum("eti,eio->eto", experts_of(x), weight),
        lambda x, weight: torch.einsum("...ti,...io->...to", [experts_of(x), weight]),
        lambda x, weight: (weight.transpose(1, 2) @ experts_of(x).transpose(1, 2)).transpose(1, 2),
        lambda x, weight: torch.baddbmm(torch.zeros(1, 1, 32), experts_of(x), weight),
        lambda x, weight: torch.stack([F.linear(rows, w.T) for rows, w in zip(experts_of(x), weight, strict=True)]),
        lambda x, weight: torch.stack([rows @ w for rows, w in zip(experts_of(x), weight, strict=True)]),
        lambda x, weight: F.grouped_mm(x.reshape(-1, 32), weight, offs=OFFSETS),
    ],
    ids=["bmm", "named", "matmul", "@", "einsum", "ellipsis", "left", "baddbmm", "linear", "slices", "grouped"],
)
def test_weights_are_quantized_along_what_the_product_sums_in_every_spelling(make_model, compute, error, gradients):
    model, matrices = layer_with(make_model, compute)
    quantized_run(model, error, forwards=1, gradients=gradients)[1].check()
    ((x, output),) = matrices.seen
    expected = experts_of(x) @ columns_of(matrices.weight, error.format)
    torch.testing.assert_close(output.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)
    exact = experts_of(x) @ matrices.weight
    assert (expected - exact).norm() > 0.01 * exact.norm()


def test_a_sum_over_two_indices_has_blocks_over_both(make_model):
    model, matrices = layer_with(
        make_model,
        lambda x, weight: torch.einsum("btij,ijo->bto", x.unflatten(-1, (2, 16)), weight[0].unflatten(0, (2, 16))),
    )
    quantized_run(model, MXFP4, forwards=1)[1].check()
    ((x, output),) = matrices.seen
    torch.testing.assert_close(output, x @ columns_of(matrices.weight, "mxfp4")[0], rtol=1e-4, atol=1e-5)


def test_activations_of_a_product_with_a_weight_are_quantized_and_those_of_attention_are_not(make_model):
    model, matrices = layer_with(make_model, lambda x, weight: experts_of(x) @ weight)
    error = FakeQuantization(format="mxfp4", weights=False, activations=True)
    receipt = quantized_run(model, error, forwards=1)[1]
    receipt.check()
    ((x, output),) = matrices.seen
    torch.testing.assert_close(output, fake_quantize(experts_of(x), "mxfp4") @ matrices.weight, rtol=1e-4, atol=1e-5)
    cells = {cell.operator for cell in receipt.content.cells if cell.layer == 1}
    assert cells == {"linear.activation", "matmul.activation"}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("error", [MXFP4, NVFP4], ids=["mxfp4", "nvfp4"])
def test_experts_compute_with_quantized_weights_without_gradients_too(implementation, error):
    """Equal implementations, and equal forwards: each expert has its own weights, not those of another one."""
    model = random_mixture_of("mixtral", intermediate_size=64)
    model.set_experts_implementation(implementation)
    first, receipt = quantized_run(model, error, forwards=1)
    receipt.check()
    again, receipt = quantized_run(model, error, forwards=4)
    receipt.check()
    assert torch.equal(first, again)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3:
                parameter.copy_(torch.stack([fake_quantize(matrix, error.format) for matrix in parameter]))
            elif parameter.ndim == 2 and "embed" not in name:
                parameter.copy_(fake_quantize(parameter, error.format))
        by_hand = model(IDS, use_cache=False).logits
    torch.testing.assert_close(first, by_hand, rtol=1e-3, atol=1e-4)


def test_products_with_copies_of_experts_are_refused_by_name():
    model = random_mixture_of("mixtral", intermediate_size=64)
    model.set_experts_implementation("batched_mm")
    with pytest.raises(ReceiptError, match=r"aten\.bmm with exact weights in model\.layers\.0\.mlp\.experts escaped"):
        quantized_run(model, MXFP4)[1].check()


def test_activations_beside_copies_of_experts_are_refused_by_name():
    model = random_mixture_of("mixtral", intermediate_size=64)
    model.set_experts_implementation("batched_mm")
    error = FakeQuantization(format="mxfp4", weights=False, activations=True)
    with pytest.raises(ReceiptError, match=r"aten\.bmm with exact weights in model\.layers\.0\.mlp\.experts escaped"):
        quantized_run(model, error)[1].check()


def scaled(parameter: nn.Parameter) -> None:
    parameter.data.mul_(-1.5)


def copied(parameter: nn.Parameter) -> None:
    parameter.copy_(-1.5 * parameter)


def replaced(parameter: nn.Parameter) -> None:
    parameter.data = -1.5 * parameter.data


@pytest.mark.parametrize("change", [scaled, copied, replaced])
def test_weights_that_change_between_two_forwards_are_quantized_again(make_model, change):
    def change_all(model):
        for name, parameter in model.named_parameters():
            if "up_proj" in name:
                change(parameter)

    model = make_model(intermediate_size=64)
    output, receipt = quantized_run(model, MXFP4, between=change_all)
    receipt.check()
    fresh, _ = quantized_run(model, MXFP4, forwards=1)
    assert torch.equal(output, fresh)


def test_the_share_of_operations_counts_products_with_quantized_operands_alone(make_model):
    """Per layer of this model: 7 linear modules, and two products of attention, which have no weight."""
    model = make_model(intermediate_size=64)
    receipt = quantized_run(model, MXFP4, forwards=1)[1]
    receipt.check()
    (record,) = receipt.content.phases
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert record.noised_flops == 2 * IDS.numel() * sum(linear.weight.numel() for linear in linears)
    attention = model.config.num_hidden_layers * 2 * IDS.numel() * IDS.shape[1] * 2 * 32
    assert record.forward_flops == record.noised_flops + attention
