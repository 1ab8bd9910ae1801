"""Every overload of torch's operators in a noised layer: refused by name, or shown by trial to form no product."""

from functools import partial
from itertools import islice

import aten_overloads
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import OperatorNoise, RelativeGaussian
from aqnpipe.noise.measure_arm import measure_arm

E5 = Arm(description="", operator_noise=OperatorNoise(error=RelativeGaussian(scale=0.05), phases=("rollout",)))
PLACE = "model.layers.1.mlp.branch"


class WithBranch(nn.Module):
    """An MLP and beside it a branch: `compute(x, weight)`, x [batch, tokens, 32], weight [32, 32]."""

    def __init__(self, mlp, compute):
        super().__init__()
        self.mlp = mlp
        self.branch = Branch(compute)

    def forward(self, x):
        return self.mlp(x) + self.branch(x)


class Branch(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.eye(32) / 8)

    @torch.no_grad()
    def forward(self, x):
        return self.compute(x, self.weight).expand_as(x)


@pytest.fixture
def model(make_model):
    """A layer without a branch, and one for the branch."""
    return make_model(num_layers=2)


def receipt_with(model, compute):
    layer = model.model.layers[1]
    layer.mlp = WithBranch(layer.mlp, compute)
    with torch.no_grad():
        return measure_arm(model, E5, batch=2, prompt_tokens=4)


def refusals_of(model, compute):
    """Problems of the receipt that name the branch."""
    return [problem for problem in receipt_with(model, compute).problems() if PLACE in problem]


class Announced:
    """An operator that is dispatched but does not compute: it returns its first tensor."""

    def __init__(self, overload):
        self._overload = overload
        # A packet of the same name for which nobody has a formula of its cost: the arguments would not fit it.
        self.overloadpacket = type("Packet", (), {"__name__": overload.overloadpacket.__name__})()

    def __getattr__(self, name):
        return getattr(self._overload, name)

    def __call__(self, x, *rest):
        return x + 0


def announce(overloads, x, weight):
    mode = _get_current_dispatch_mode()
    if mode is not None and x.shape[1] > 1:
        for overload in overloads:
            mode.__torch_dispatch__(Announced(overload), (), (x, x))
    return x


def silent_overloads(make_model):
    """Overloads of two tensors or more whose calls the receipt does not refuse."""
    packets = {}
    for overload in aten_overloads.overloads():
        if aten_overloads.tensor_inputs(overload) >= 2:
            packets.setdefault(overload.overloadpacket.__name__, []).append(overload)
    silent = []
    # One overload of each operator at a time, because messages name the operator alone.
    for number in range(max(map(len, packets.values()))):
        present = {name: overloads[number] for name, overloads in packets.items() if len(overloads) > number}
        named = " ".join(refusals_of(make_model(), partial(announce, tuple(present.values()))))
        silent += [overload for name, overload in present.items() if f" aten.{name} in " not in named]
    return silent


NEVER_RUN = {
    "aten._make_dual.default",
    "aten._nested_view_from_buffer.default",
    "aten._nested_view_from_jagged.default",
    "aten.narrow.Tensor",
    "aten.index.list_Tensor",
}
"""Views and selections: they have no element that is not one of their input's."""


@pytest.fixture(scope="module")
def silent(make_model):
    return silent_overloads(make_model)


def products_among(overloads):
    """Overloads that contract two operands, and the names of those for which no call was found."""
    products, untried = [], set()
    for overload in overloads:
        tried = list(islice(aten_overloads.calls(overload), 2))
        products += [str(overload) for call in tried if aten_overloads.contracts(overload, *call)]
        untried |= set() if tried else {str(overload)}
    return products, untried


def changes_an_argument(overload):
    return overload._schema.is_mutable


@pytest.mark.slow
def test_only_few_operators_are_accepted(silent):
    assert 150 < len(silent) < 400
    assert {"aten.mul.Tensor", "aten.index_add.default", "aten.gather.default"} <= set(map(str, silent))


@pytest.mark.slow
def test_what_is_not_refused_forms_no_product(silent):
    products, untried = products_among(overload for overload in silent if not changes_an_argument(overload))
    assert products == []
    assert {name for name in untried if "hacked_twin" not in name} <= NEVER_RUN


@pytest.mark.slow
def test_what_is_not_refused_forms_no_product_in_place_either(silent):
    products, untried = products_among(filter(changes_an_argument, silent))
    assert products == []
    assert len(untried) < 12  # outputs of several kinds: `out` of bincount, of group norm, of scatter


@pytest.mark.parametrize("name", ["mm.default", "mv.default", "dot.default", "linalg_vecdot.default", "cdist.default"])
def test_a_product_is_recognised_by_trial(name):
    overload = getattr(getattr(torch.ops.aten, name.split(".")[0]), name.split(".")[1])
    assert products_among([overload])[0]


def rows(x):
    return x.reshape(-1, 32)


def back(product, x):
    return product.reshape(x.shape)


@torch.jit.script
def scripted(x, weight):
    return torch.einsum("bti,io->bto", x, weight)


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return torch.ops.aten.mm(rows(x), weight).view(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@torch.library.custom_op("aqnpipe_tests::product", mutates_args=())
def custom(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.unsqueeze(-2) * weight).sum(-1)


def recurrent(kind):
    def compute(x, weight):
        torch.manual_seed(0)
        output = kind(32, 32, batch_first=True)(x)
        return output[0]

    return compute


def attention_of(kernel):
    return lambda x, w: kernel(*(x.view(x.shape[0], -1, 4, 8).transpose(1, 2) for _ in range(3)))


def by_attention(x, w):
    heads = x.view(x.shape[0], -1, 4, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)


def by_flash_attention(x, w):
    heads = x.view(x.shape[0], -1, 4, 8).transpose(1, 2)
    attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)[0]
    return attended.transpose(1, 2).reshape(x.shape)


def by_fast_fourier_transform(x, w):
    return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w[0]), n=32)


def by_grouped_product(x, w):
    ends = torch.tensor([4, rows(x).shape[0]], dtype=torch.int32)
    return back(torch._grouped_mm(rows(x).bfloat16(), w.bfloat16().repeat(2, 1, 1), offs=ends).float(), x)


def by_integers(x, w):
    quantised = [(part * 8).to(torch.int8) for part in (rows(x), w)]
    return back(torch._int_mm(*quantised).float() / 64, x)


def by_int8_weights(x, w):
    return back(torch.ops.aten._weight_int8pack_mm(rows(x), w.to(torch.int8), torch.ones(32)), x)


def by_quantised_linear(x, w):
    return torch.ops.quantized.linear_dynamic(
        x, torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(w.detach(), 0.1, 0, torch.qint8), None)
    )


PRODUCTS = {
    "mv": lambda x, w: torch.stack([torch.mv(w, row) for row in rows(x)]).view(x.shape),
    "dot": lambda x, w: torch.stack([torch.dot(row, w[0]) for row in rows(x)]).view(*x.shape[:2], 1),
    "vdot": lambda x, w: torch.vdot(x.flatten()[:32], w[0]).view(1, 1, 1),
    "addmv": lambda x, w: torch.addmv(x[0, 0], w, x[0, 0]),
    "addbmm": lambda x, w: torch.addbmm(x[0], x, w.expand(x.shape[0], 32, 32)),
    "outer": lambda x, w: torch.outer(x[0, 0], w[0])[: x.shape[1]],
    "addr": lambda x, w: torch.addr(torch.zeros(32, 32), x[0, 0], w[0])[: x.shape[1]],
    "inner": lambda x, w: torch.inner(x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([2], [1])),
    "chain_matmul": lambda x, w: back(torch.linalg.multi_dot([rows(x), w, w]), x),
    "linalg.vecdot": lambda x, w: torch.linalg.vecdot(x, w[: x.shape[1]]).unsqueeze(-1),
    "linalg.matmul": lambda x, w: torch.linalg.matmul(x, w),
    "linalg.matrix_power": lambda x, w: torch.linalg.matrix_power(w, 3)[: x.shape[1]],
    "linalg.matrix_exp": lambda x, w: torch.linalg.matrix_exp(w)[: x.shape[1]],
    "linalg.solve": lambda x, w: back(torch.linalg.solve(w, rows(x).T).T, x),
    "linalg.solve_triangular": lambda x, w: back(torch.linalg.solve_triangular(w, rows(x).T, upper=True).T, x),
    "linalg.inv": lambda x, w: torch.linalg.inv(w)[: x.shape[1]],
    "cosine_similarity": lambda x, w: F.cosine_similarity(x.unsqueeze(-2), w, dim=-1),
    "pairwise_distance": lambda x, w: F.pairwise_distance(x.unsqueeze(-2), w),
    "cdist": lambda x, w: torch.cdist(x, w.expand(x.shape[0], 32, 32)),
    "cov": lambda x, w: torch.cov(w)[: x.shape[1]],
    "corrcoef": lambda x, w: torch.corrcoef(w)[: x.shape[1]],
    "bilinear": lambda x, w: F.bilinear(x, x, w.expand(32, 32, 32)),
    "kron": lambda x, w: torch.kron(x[0], w)[: x.shape[1], :32],
    "conv1d": lambda x, w: F.conv1d(x.transpose(1, 2), w.unsqueeze(-1)).transpose(1, 2),
    "depthwise conv1d": lambda x, w: F.conv1d(x.transpose(1, 2), w[:, None, :1], groups=32).transpose(1, 2),
    "conv2d": lambda x, w: F.conv2d(x.transpose(1, 2).unsqueeze(-1), w[..., None, None]).squeeze(-1).transpose(1, 2),
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x.transpose(1, 2), w.unsqueeze(-1)).transpose(1, 2),
    "LSTM": recurrent(nn.LSTM),
    "GRU": recurrent(nn.GRU),
    "RNN": recurrent(nn.RNN),
    "sparse.mm": lambda x, w: back(torch.sparse.mm(w.to_sparse(), rows(x).T).T, x),
    "sparse addmm": lambda x, w: back(
        torch.sparse.addmm(torch.zeros(32, rows(x).shape[0]), w.to_sparse(), rows(x).T).T, x
    ),
    "sparse CSR": lambda x, w: back((w.to_sparse_csr() @ rows(x).T).T, x),
    "embedding_bag": lambda x, w: F.embedding_bag(
        torch.arange(32).expand(rows(x).shape[0], 32), w, per_sample_weights=rows(x), mode="sum"
    ).view(x.shape),
    "attention": by_attention,
    "flash attention": by_flash_attention,
    "grouped product": lambda x, w: (
        torch.ops.aten._grouped_mm(
            rows(x).bfloat16(), w.bfloat16()[None], offs=torch.tensor([rows(x).shape[0]], dtype=torch.int32)
        )
        .float()
        .view(x.shape)
    ),
    "integers": by_integers,
    "int8 weights": by_int8_weights,
    "dynamic quantisation": by_quantised_linear,
    "fast Fourier transform": by_fast_fourier_transform,
    "torch.ops.aten.mm": lambda x, w: back(torch.ops.aten.mm(rows(x), w), x),
    "torch.ops.aten.matmul": lambda x, w: torch.ops.aten.matmul(x, w),
    "torch.ops.aten.linear": lambda x, w: torch.ops.aten.linear(x, w),
    "torch.ops.aten.einsum": lambda x, w: torch.ops.aten.einsum("bti,io->bto", [x, w]),
    "torch._C._VariableFunctions": lambda x, w: back(torch._C._VariableFunctions.mm(rows(x), w), x),
    "torch._C._nn.linear": lambda x, w: torch._C._nn.linear(x, w),
    "mm into an output": lambda x, w: back(torch.mm(rows(x), w, out=torch.empty(rows(x).shape)), x),
    "addmm in place": lambda x, w: back(torch.zeros(rows(x).shape).addmm_(rows(x), w), x),
    "scripted": scripted,
    "vmap": lambda x, w: torch.vmap(lambda row: torch.mv(w, row))(rows(x)).view(x.shape),
    "autograd function": OwnProduct.apply,
    "custom operator": custom,
    "sum of products": lambda x, w: (x.unsqueeze(-2) * w).sum(-1),
    "sum of products with a copy": lambda x, w: (x.unsqueeze(-2) * w.clone().t().contiguous()).sum(-1),
    "sum of addcmul": lambda x, w: torch.addcmul(torch.zeros(()), x.unsqueeze(-2), w).sum(-1),
    "sum of foreach products": lambda x, w: torch._foreach_mul([x.unsqueeze(-2)], [w])[0].sum(-1),
    "sum of squared differences": lambda x, w: (x.unsqueeze(-2) - w).square().sum(-1),
    "outer product by hand": lambda x, w: x[:, :, :1] * w[0],
    "cumulative sum of products": lambda x, w: (x.unsqueeze(-2) * w).cumsum(-1)[..., -1],
    "index_add of products": lambda x, w: torch.zeros(x.shape[1], 32).index_add(
        0, torch.zeros(32, dtype=torch.long), w * x[0, 0].unsqueeze(-1)
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_noised_or_refused_by_name(model, name):
    receipt = receipt_with(model, PRODUCTS[name])
    refused = [problem for problem in receipt.problems() if PLACE in problem or "attention" in problem]
    noised = {cell.operator: cell.calls for cell in receipt.cells if cell.layer == 1 and cell.phase == "rollout"}
    usual = {cell.operator: cell.calls for cell in receipt.cells if cell.layer == 0 and cell.phase == "rollout"}
    assert refused or noised != usual


def by_numpy(x, w):
    return back(torch.from_numpy(rows(x).numpy() @ w.detach().numpy()), x)


class Buffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.eye(32) / 8)

    def forward(self, x):
        return (x.unsqueeze(-2) * self.table).sum(-1)


COMPUTED_WEIGHTS = {
    "weight plus zero": lambda x, w: (x.unsqueeze(-2) * (w + 0)).sum(-1),
    "sum of two weights": lambda x, w: (x.unsqueeze(-2) * (w + w)).sum(-1),
    "trapezoid": lambda x, w: torch.trapezoid(x.unsqueeze(-2), w),
    "every row of a weight looked up": lambda x, w: (x.unsqueeze(-2) * F.embedding(torch.arange(32), w)).sum(-1),
}

OUT_OF_REACH = {
    "weight as numpy array": by_numpy,
    "buffer": lambda x, w: Buffer()(x),
}


@pytest.mark.parametrize("name", COMPUTED_WEIGHTS)
def test_a_product_with_something_computed_from_weights_is_refused(model, name):
    assert refusals_of(model, COMPUTED_WEIGHTS[name])


@pytest.mark.xfail(strict=True, reason="element-wise with a tensor that is no parameter, or outside torch")
@pytest.mark.parametrize("name", OUT_OF_REACH)
def test_a_product_with_a_copy_of_a_weight_is_refused(model, name):
    assert refusals_of(model, OUT_OF_REACH[name])
