"""`aqnpipe.noisy` on a model under `fully_shard`: the noise of the whole model, and nothing escapes the audit."""

import pytest
import torch
from measured_figures import measured
from torch import distributed, nn

import aqnpipe
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import FakeQuantization
from aqnpipe.errors import ReceiptError
from aqnpipe.models.loading import load_model


@pytest.fixture(scope="module")
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def new_model():
    return load_model(builtin_folder("tiny"), dtype="float32", attention="eager")


def sharded(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model, ids):
    with aqnpipe.noisy(model, scale=0.05, seed=0, backward=True) as receipt:
        result = model(input_ids=ids, labels=ids)
        result.loss.backward()
    return result.logits.detach(), receipt


def test_a_sharded_model_has_the_noise_of_the_whole_model(mesh, ids):
    logits, whole = step(new_model(), ids)
    model = sharded(new_model(), mesh)
    for _ in range(3):
        shared_logits, receipt = step(model, ids)
        assert torch.equal(shared_logits, logits)
        assert receipt.check().recomputed_numbers == whole.recomputed_numbers


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale": 0.05, "operators": "all", "backward": True},
        {"error": FakeQuantization(format="mxfp4", activations=True)},
    ],
    ids=["all", "mxfp4"],
)
def test_other_forms_are_those_of_the_whole_model(mesh, ids, arguments):
    def trained(model):
        with aqnpipe.noisy(model, **arguments) as receipt:
            result = model(input_ids=ids, labels=ids)
            result.loss.backward()
        return result.logits.detach(), receipt.check().recomputed_numbers

    (logits, recomputed), (found, again) = trained(new_model()), trained(sharded(new_model(), mesh))
    assert torch.equal(found, logits)
    assert again == recomputed


def test_the_hooks_are_as_before(mesh, ids):
    model = sharded(new_model(), mesh)
    before = [(module._forward_pre_hooks, dict(module._forward_pre_hooks)) for module in model.modules()]
    step(model, ids)
    for module, (hooks, content) in zip(model.modules(), before, strict=True):
        assert module._forward_pre_hooks is hooks
        assert list(hooks.items()) == list(content.items())
    assert torch.equal(model(input_ids=ids).logits, new_model()(input_ids=ids).logits)


def test_a_sharded_model_has_the_measured_errors_of_the_whole_model(mesh, ids):
    def forward(model):
        with aqnpipe.noisy(model, error=measured(model, 0.5), seed=0) as receipt:
            model(input_ids=ids, labels=ids).loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients], receipt.check()

    gradients, whole = forward(new_model())
    found, receipt = forward(sharded(new_model(), mesh))
    assert {cell: seen.products for cell, seen in receipt.cells.items()} == {
        cell: seen.products for cell, seen in whole.cells.items()
    }
    assert {cell.operator for cell in receipt.cells} >= {"norm.input_layernorm", "norm.norm"}
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, gradients, strict=True))


class Unobserved(nn.Module):
    """A linear module that multiplies elements and sums them, where noise is not applied."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, values):
        return (values[..., None, :] * self.weight).sum(-1)


def test_a_product_with_gathered_weights_that_has_no_noise_is_refused(mesh, ids):
    model = new_model()
    model.model.layers[2].mlp.down_proj = Unobserved(model.model.layers[2].mlp.down_proj)
    _, receipt = step(sharded(model, mesh), ids)
    with pytest.raises(ReceiptError, match=r"aten\.mul on a weight matrix in model\.layers\.2 had no"):
        receipt.check()
