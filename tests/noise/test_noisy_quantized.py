"""`aqnpipe.noisy` with fake quantization: which operands are rounded, along which dimension, and what is proven."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from random_models import random_mixture_of
from torch import Tensor, nn

import aqnpipe
from aqnpipe.config.noise import FakeQuantization, NoiseSpec, OperatorNoise
from aqnpipe.errors import ReceiptError
from aqnpipe.machine import quantized
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.kernels.quantization import fake_quantize
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

MXFP4 = FakeQuantization(format="mxfp4")
NVFP4 = FakeQuantization(format="nvfp4")
FP8 = FakeQuantization(format="fp8", activations=True)
FP8_BLOCK = FakeQuantization(format="fp8_block", activations=True)
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
    receipt = quantized_run(model, error, forwards=1, gradients=gradients)[1].check()
    # Those of attention have no weight.
    products = [seen for cell, seen in receipt.cells.items() if cell.operator != "bmm"]
    assert all(seen.recomputed for seen in products)
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
    assert receipt.check().without_error()["without a weight"] >= 6
    ((x, output),) = matrices.seen
    torch.testing.assert_close(output, fake_quantize(experts_of(x), "mxfp4") @ matrices.weight, rtol=1e-4, atol=1e-5)


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
    with pytest.raises(ReceiptError, match=r"aten\.bmm with a copy of a weight in model\.layers\.0 had no"):
        quantized_run(model, MXFP4)[1].check()


def test_activations_beside_copies_of_experts_are_refused_by_name():
    model = random_mixture_of("mixtral", intermediate_size=64)
    model.set_experts_implementation("batched_mm")
    error = FakeQuantization(format="mxfp4", weights=False, activations=True)
    with pytest.raises(ReceiptError, match=r"aten\.bmm with a copy of a weight in model\.layers\.0 had no"):
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


def trained(model, error, **inputs):
    model.zero_grad()
    with aqnpipe.noisy(model, error=error) as receipt:
        model(input_ids=IDS, labels=IDS, use_cache=False, **inputs).loss.backward()
    return [None if w.grad is None else w.grad.clone() for w in model.parameters()], receipt


BOTH = FakeQuantization(format="nvfp4", activations=True)


@pytest.mark.parametrize(
    "error", [MXFP4, NVFP4, BOTH, FP8, FP8_BLOCK], ids=["mxfp4", "nvfp4", "both", "fp8", "fp8_block"]
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_and_gradients_are_those_of_studies(make_model, error, attention):
    model = make_model(intermediate_size=160, attn_implementation=attention)
    noise = OperatorNoise(
        error=error, phases=("actor_forward",), attention="fused" if attention == "sdpa" else "decomposed"
    )
    recorder = ReceiptRecorder(
        NoiseSpec(operator_noise=noise), expected_phases=("actor_forward",), num_layers=4, num_norms=9
    )
    with phase_noise(model, NoiseSpec(operator_noise=noise), "actor_forward", NoiseKey(seed=0, step=0), recorder):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    expected = [w.grad.clone() for w in model.parameters()]
    found, receipt = trained(model, error)
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(expected, found, strict=True))
    assert {cell.phase for cell, seen in receipt.check().cells.items() if seen.recomputed} == {"evaluation", "backward"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_again_with_quantized_operands(make_model, reentrant):
    model = make_model(intermediate_size=64).train()
    stored, receipt = trained(model, BOTH)
    receipt.check()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    again, receipt = trained(model, BOTH)
    receipt.check()
    assert all(torch.equal(*pair) for pair in zip(stored, again, strict=True))


@pytest.mark.parametrize("error", [BOTH, FP8, FP8_BLOCK], ids=["nvfp4", "fp8", "fp8_block"])
@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_other_number_formats(make_model, precision, error):
    model = make_model(intermediate_size=160)
    model = model.bfloat16() if precision == "bfloat16" else model
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        _, receipt = trained(model, error)
    receipt.check()


def test_adapters_a_generation_and_inference_mode(make_model):
    model = make_model(intermediate_size=64)
    outer = get_peft_model(model, LoraConfig(r=32, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    trained(outer, MXFP4)[1].check()
    with torch.inference_mode(), aqnpipe.noisy(outer, error=NVFP4) as receipt:
        outer.eval().generate(input_ids=IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    assert receipt.check().noised > 0


def test_weights_are_rounded_once_and_forgotten(make_model, monkeypatch):
    calls, rounded = [], quantized._rounded
    monkeypatch.setattr(quantized, "_rounded", lambda *args, **kind: calls.append(1) or rounded(*args, **kind))
    model = make_model(intermediate_size=64)
    quantized_run(model, MXFP4, forwards=3)[1].check()
    assert len(calls) == sum(isinstance(module, nn.Linear) for module in model.modules())
    assert not [w for w in model.parameters() if hasattr(w.untyped_storage(), "_aqnpipe_quantized")]


# -- wrong uses --------------------------------------------------------------------------------------------------------


WRONG = {
    "switched off": lambda error, tensor, *rest, **kind: tensor,
    "of another format": lambda error, *rest, **kind: rounded_by(
        error.model_copy(update={"format": ANOTHER[error.format]}), *rest, **kind
    ),
    "of another size": lambda error, tensor, *rest, **kind: (
        tensor + 1.2 * (rounded_by(error, tensor, *rest, **kind) - tensor)
    ),
    "in other blocks": lambda error, tensor, dim, batch, **kind: rounded_by(
        error, tensor.roll(8, dim), dim, batch, **kind
    ).roll(-8 if error.format == "fp8_block" else -16, dim),
}
ANOTHER = {"mxfp4": "nvfp4", "nvfp4": "mxfp4", "fp8": "fp8_block", "fp8_block": "fp8"}
rounded_by = quantized._rounded


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("error", [MXFP4, BOTH, FP8_BLOCK, FP8], ids=["weights", "both", "fp8_block", "fp8"])
def test_another_rounding_is_refused(make_model, monkeypatch, wrong, error):
    monkeypatch.setattr(quantized, "_rounded", WRONG[wrong])
    _, receipt = trained(make_model(intermediate_size=160), error)
    with pytest.raises(ReceiptError, match="recomputed values are not the requested ones"):
        receipt.check()


@pytest.mark.parametrize("is_gradient", [False, True])
def test_weights_left_exact_in_one_layer_are_refused(make_model, monkeypatch, is_gradient):
    model = make_model(intermediate_size=64)
    chosen, of = model.model.layers[1].mlp.up_proj.weight.untyped_storage(), quantized.QuantizedOperands.of

    def skip(self, error, first, second, of_gradient):
        if of_gradient == is_gradient and second.untyped_storage() is chosen:
            return None
        return of(self, error, first, second, of_gradient)

    monkeypatch.setattr(quantized.QuantizedOperands, "of", skip)
    _, receipt = trained(model, MXFP4)
    with pytest.raises(ReceiptError, match=r"mm in model.layers.1 .* recomputed values are not the requested ones"):
        receipt.check()


def test_a_convolution_is_refused():
    model = nn.Sequential(nn.Conv1d(32, 4, 2), nn.Flatten(), nn.Linear(32, 2))
    with torch.no_grad(), aqnpipe.noisy(model, error=MXFP4) as receipt:
        model(torch.randn(2, 32, 9))
    with pytest.raises(ReceiptError, match=r"aten\.convolution with a weight in no layer had no"):
        receipt.check()
