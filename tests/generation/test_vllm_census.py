"""The census of vLLM's operations, on plain modules: it needs no vLLM."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aqnpipe.generation.vllm import census as censuses
from aqnpipe.generation.vllm.census import EngineCensus

FORWARDS = {
    "linear": (lambda self, x: F.linear(x, self.weight, self.bias), "aten.addmm in layer.mlp"),
    "matmul": (lambda self, x: x @ self.weight.T, "aten.mm in layer.mlp"),
    "einsum": (lambda self, x: torch.einsum("ti,oi->to", x, self.weight), "aten.bmm in layer.mlp"),
    "sum": (lambda self, x: (x[:, None] * self.weight).sum(-1), "aten.mul on a weight matrix in layer.mlp"),
    "packet": (lambda self, x: torch.ops.aten.mv(self.weight, x[0]), "aten.mv in layer.mlp"),
    "operator": (lambda self, x: torch.ops.census_test.fused_moe(x, self.weight), "census_test.fused_moe in layer.mlp"),
}
HARMLESS = {
    "norm": lambda self, x: x.to(torch.float64) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.bias[0],
    "activation": lambda self, x: F.silu(x[..., :4]) * x[..., 4:],
    "layer norm": lambda self, x: F.layer_norm(x, x.shape[-1:], self.bias[:8], self.bias[:8]),
    "reshape": lambda self, x: x.reshape(-1, 4).contiguous().flatten(),
    "softmax": lambda self, x: x.softmax(-1),
    "operator": lambda self, x: torch.ops.census_test.rotary(x),
}


@pytest.fixture(scope="module", autouse=True)
def operators():
    """Operators as vLLM registers them: without parts that torch knows."""
    library = torch.library.Library("census_test", "DEF")
    library.define("fused_moe(Tensor x, Tensor weight) -> Tensor")
    library.define("rotary(Tensor x) -> Tensor")
    library.define("rotary_by(Tensor x, Tensor weight) -> Tensor")
    library.impl("fused_moe", lambda x, weight: x @ weight.T, "CPU")
    library.impl("rotary", lambda x: x.flip(-1).clone(), "CPU")
    library.impl("rotary_by", lambda x, weight: x @ weight.T, "CPU")
    yield library
    library._destroy()


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(censuses, "_NO_PRODUCTS", {"census_test.rotary", "census_test.rotary_by"})


def classified(forward, accounted=False):
    """Run `forward` in the module `layer.mlp`; return what was classified and what escaped."""
    layer = nn.Module()
    layer.mlp = nn.Linear(8, 12)
    layer.mlp.forward = types.MethodType(forward, layer.mlp)
    census = EngineCensus()
    with torch.inference_mode():
        x = torch.randn(3, 8)
        expected = layer.mlp(x)
        census.start(layer, "layer")
        try:
            if accounted:
                with census.accounted():
                    output = layer.mlp(x)
            else:
                output = layer.mlp(x)
        finally:
            census.stop()
        layer.mlp(x)  # not classified any more
    assert torch.equal(output, expected)
    return census.take()


@pytest.mark.parametrize("name", FORWARDS)
def test_a_product_is_an_escape_with_its_module(name):
    forward, escape = FORWARDS[name]
    assert escape in classified(forward)[1]


@pytest.mark.parametrize("name", FORWARDS)
def test_a_noised_product_is_none(name):
    assert classified(FORWARDS[name][0], accounted=True) == (0, {})


@pytest.mark.parametrize("name", HARMLESS)
def test_what_multiplies_no_matrices_is_none(name):
    number, escapes = classified(HARMLESS[name])
    assert number > 0
    assert escapes == {}


def test_a_known_operator_that_reads_a_weight_matrix_is_an_escape():
    def forward(self, x):
        return torch.ops.census_test.rotary_by(x, self.weight)

    assert list(classified(forward)[1]) == ["census_test.rotary_by in layer.mlp"]


def test_counts_are_taken_once():
    census = EngineCensus()
    layer = nn.Linear(4, 4)
    with torch.inference_mode():
        for _ in range(2):
            census.start(layer, "layer")
            layer(torch.ones(1, 4))
            census.stop()
            census.stop()
            number, escapes = census.take()
            assert number > 0
            assert list(escapes.values()) == [1]
    assert census.take() == (0, {})


@pytest.mark.parametrize(
    ("module", "escapes"), [("vllm.kernels", {"triton.product in layer": 1}), ("aqnpipe.noise", {})]
)
def test_a_launch_of_a_triton_kernel_is_an_escape_unless_it_is_our_own(monkeypatch, module, escapes):
    class JITFunction:
        def run(self, *args):
            return sum(args)

    run = JITFunction.run
    kernel = JITFunction()
    kernel.__name__, kernel.__module__ = "product", module
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.SimpleNamespace(JITFunction=JITFunction))
    census = EngineCensus()
    census.start(nn.Linear(4, 4), "layer")
    assert kernel.run(1, 2) == 3
    with census.accounted():
        assert kernel.run(1, 2) == 3
    census.stop()
    assert JITFunction.run is run
    assert census.take()[1] == escapes
