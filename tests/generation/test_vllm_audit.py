"""The observer of vLLM's operations, on plain modules: it needs no vLLM."""

import sys
import types
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aqnpipe.config.noise import RelativeGaussian
from aqnpipe.generation.vllm import observer as observers
from aqnpipe.generation.vllm.observer import EngineObserver, Part

ERROR = RelativeGaussian(scale=0.1)
PRODUCTS = {
    "linear": (lambda self, x: F.linear(x, self.weight, self.bias), "aten.addmm in layer.mlp"),
    "matmul": (lambda self, x: x @ self.weight.T, "aten.mm in layer.mlp"),
    "einsum": (lambda self, x: torch.einsum("ti,oi->to", x, self.weight), "aten.bmm in layer.mlp"),
    "sum": (lambda self, x: (x[:, None] * self.weight).sum(-1), "aten.mul on a weight matrix in layer.mlp"),
    "packet": (lambda self, x: torch.ops.aten.mv(self.weight, x[0]), "aten.mv in layer.mlp"),
    "operator": (lambda self, x: torch.ops.audit_test.fused_moe(x, self.weight), "audit_test.fused_moe in layer.mlp"),
    "known operator on a matrix": (
        lambda self, x: torch.ops.audit_test.rotary_by(x, self.weight),
        "audit_test.rotary_by in layer.mlp",
    ),
}
HARMLESS = {
    "norm": lambda self, x: x.to(torch.float64) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.bias[0],
    "activation": lambda self, x: F.silu(x[..., :4]) * x[..., 4:],
    "layer norm": lambda self, x: F.layer_norm(x, x.shape[-1:], self.bias[:8], self.bias[:8]),
    "reshape": lambda self, x: x.reshape(-1, 4).contiguous().flatten(),
    "softmax": lambda self, x: x.softmax(-1),
    "operator": lambda self, x: torch.ops.audit_test.rotary(x),
}


def write_attention(x, output):
    output.copy_(x @ x.T @ x)


@pytest.fixture(scope="module", autouse=True)
def operators():
    """Operators as vLLM registers them: without parts that torch knows."""
    library = torch.library.Library("audit_test", "DEF")
    library.define("fused_moe(Tensor x, Tensor weight) -> Tensor")
    library.define("rotary(Tensor x) -> Tensor")
    library.define("rotary_by(Tensor x, Tensor weight) -> Tensor")
    library.define("attention(Tensor x, Tensor(a!) output) -> ()")
    library.impl("fused_moe", lambda x, weight: x @ weight.T, "CPU")
    library.impl("rotary", lambda x: x.flip(-1).clone(), "CPU")
    library.impl("rotary_by", lambda x, weight: x @ weight.T, "CPU")
    library.impl("attention", write_attention, "CPU")
    yield library
    library._destroy()


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(observers, "_NO_PRODUCTS", {"audit_test.rotary", "audit_test.rotary_by"})
    monkeypatch.setattr(observers, "ATTENTION", {"audit_test.attention"})


def layer_with(forward):
    layer = nn.Module()
    layer.mlp = nn.Linear(8, 12)
    layer.mlp.forward = types.MethodType(forward, layer.mlp)
    return layer


def observed(forward, error=ERROR, in_call=False):
    """Run `forward` in the module `layer.mlp` with an observer; return the observer."""
    layer, observer = layer_with(forward), EngineObserver(np.random.default_rng(0))
    with torch.inference_mode():
        x = torch.randn(3, 8)
        expected = layer.mlp(x)
        observer.enter(Part(0, 0, layer, "layer", error))
        with observer.noised_call() if in_call else nullcontext():
            output = layer.mlp(x)
        observer.leave(output)
    assert torch.equal(output, expected)
    return observer


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_an_escape_with_its_module(name):
    forward, escape = PRODUCTS[name]
    assert escape in observed(forward).escapes
    assert observed(forward, error=None).escapes == {}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_multiplies_no_matrices_is_none(name):
    observer = observed(HARMLESS[name])
    assert observer.classified > 0
    assert observer.escapes == {}


@pytest.mark.parametrize("name", ["linear", "matmul", "einsum"])
def test_a_composite_product_in_a_noised_call_is_read_by_its_parts(name):
    """So a call that returns a product without a claim is noticed: it is read as a product without noise."""
    ((followed, _),) = observed(PRODUCTS[name][0], in_call=True).readings
    assert followed.is_product
    assert followed.claims == []


def test_what_an_operator_writes_into_its_argument_is_followed():
    def forward(self, x):
        output = torch.full_like(x, 7.0)
        torch.ops.audit_test.attention(x, output)
        return output

    ((followed, _),) = observed(forward, in_call=True).readings
    assert followed.made_by == "audit_test.attention in layer"
    assert followed.is_product
    assert 7.0 not in followed.clean


@pytest.mark.parametrize(
    ("module", "escapes"), [("vllm.kernels", ["triton.product in layer.mlp"]), ("aqnpipe.noise", [])]
)
def test_a_launch_of_a_triton_kernel_is_an_escape_unless_it_is_our_own(monkeypatch, module, escapes):
    class JITFunction:
        def run(self, x):
            return x.clone()

    run, kernel = JITFunction.run, JITFunction()
    kernel.__name__, kernel.__module__ = "product", module
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.SimpleNamespace(JITFunction=JITFunction))

    def forward(self, x):
        return kernel.run(x.softmax(-1))

    assert list(observed(forward).escapes) == escapes
    assert observed(forward, in_call=True).escapes == {}
    assert JITFunction.run is run


def test_what_a_part_that_is_passed_over_may_read_counts_as_read():
    """So an error before it is compared; nothing inside is observed."""
    observer, module = EngineObserver(np.random.default_rng(0)), nn.Linear(4, 4, bias=False)
    with torch.inference_mode():
        observer.enter(Part(0, None, module, "model", refuses_products=True))
        read = torch.ones(3, 4) @ torch.ones(4, 4)
        observer.pause()
        assert not observer.is_on
        module(read.add_(1))
        observer.go_on()
        observer.leave(None)
    ((followed, used),) = observer.readings
    assert (followed.clean.tolist(), used.tolist()) == ([4.0] * 12, [4.0] * 12)
    assert observer.escapes == {"aten.mm in model, outside the decoder layers": 1}
