import pytest
import torch

from aqnpipe.config.noise import NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.errors import ReceiptError
from aqnpipe.noise.audit.phase_audit import audited_backward
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
from aqnpipe.noise.injection.recomputed_weights import RecomputedWeights
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

NOISE = OperatorNoise(operators="all", error=RelativeGaussian(scale=0.05), phases=("actor_forward", "backward"))
ROWS, TOKENS = 2, 23


def double(tensor):
    return tensor * 2


def training_step(model, noise):
    """Return the gradients of a step under `noise` and the attention weights kept for its backward pass."""
    spec = NoiseSpec(operator_noise=noise)
    recorder = ReceiptRecorder(
        spec, expected_phases=("actor_forward", "backward") if noise else ("actor_forward",), num_layers=3, num_norms=7
    )
    ids = torch.randint(2, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    kept = {}

    def pack(tensor):
        if tensor.shape[-2:] == (TOKENS, TOKENS) and tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    model.zero_grad()
    noised_phase = phase_noise(model, spec, "actor_forward", NoiseKey(seed=0, step=0), recorder, backward=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), noised_phase:
        loss = model(ids, labels=ids, use_cache=False).loss
    with audited_backward(model, recorder):
        loss.backward()
    if noise:
        recorder.count_forward("backward")
        recorder.receipt().check()
    return {name: p.grad.clone() for name, p in model.named_parameters()}, len(kept)


@pytest.mark.parametrize("shape", [(3, 5, 5), (2, 3, 5, 7), (2, 3, 1, 9)])
def test_the_product_and_its_gradients_are_those_of_matmul_in_every_bit(shape):
    generator = torch.Generator().manual_seed(0)
    clean = torch.softmax(torch.randn(shape, generator=generator), -1)
    values = torch.randn(*shape[:-2], shape[-1], 4, generator=generator, requires_grad=True)
    noised = double(clean).requires_grad_()
    outputs = torch.matmul(noised, values), RecomputedWeights(noised, clean, double).product(noised, values)
    assert torch.equal(*outputs)
    weights = torch.randn(outputs[0].shape, generator=generator)
    expected, found = (torch.autograd.grad((out * weights).sum(), (noised, values)) for out in outputs)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_step_keeps_one_tensor_of_attention_weights_per_layer_as_without_noise(make_model):
    model = make_model()
    clean = training_step(model, None)[1]
    assert clean == 3
    assert training_step(model, NOISE)[1] == clean


def test_a_step_learns_what_it_would_learn_from_kept_weights(make_model, monkeypatch):
    model = make_model()
    recomputed, _ = training_step(model, NOISE)
    monkeypatch.setattr(RecomputedWeights, "is_first_of", lambda self, operands: False)
    kept, count = training_step(model, NOISE)
    assert count == 2 * 3
    for name, gradient in kept.items():
        assert torch.equal(gradient, recomputed[name]), name


@pytest.mark.parametrize(
    "operands",
    [
        pytest.param(lambda weights, values: (weights.clone(), values), id="other weights"),
        pytest.param(lambda weights, values: (weights, values[:, :1]), id="broadcast values"),
        pytest.param(lambda weights, values: (weights, values.double()), id="another dtype"),
        pytest.param(lambda weights, values: (weights,), id="a named operand"),
    ],
)
def test_another_product_is_left_to_matmul(operands):
    weights, values = torch.rand(2, 3, 5, 5), torch.rand(2, 3, 5, 4)
    softmax = RecomputedWeights(weights, weights / 2, double)
    assert softmax.is_first_of((weights, values))
    assert not softmax.is_first_of(operands(weights, values))


def test_other_weights_in_the_backward_pass_than_in_the_forward_are_refused():
    weights, values = torch.rand(2, 3, 5, 5), torch.rand(2, 3, 5, 4, requires_grad=True)
    output = RecomputedWeights(weights, weights / 2, lambda clean: clean * 2.001).product(weights, values)
    with pytest.raises(ReceiptError, match="computed again is not the noise of the forward"):
        output.sum().backward()
