"""Every overload of torch's operators in a noised layer: noised, refused by name, or shown to form no product."""

from functools import partial
from itertools import islice

import aten_overloads
import pytest
import torch
import torch.nn.functional as F
from on_modules import on_modules
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from aqnpipe.proof.operations import is_of_losses
from aqnpipe.proof.recompute import RECOMPUTED, UNPROVEN

PLACE = "model.layers.1"


class Branch(nn.Module):
    """An MLP and beside it `compute(x, weight)`, x [batch, tokens, 32], weight [32, 32]; its results are kept."""

    def __init__(self, mlp, compute):
        super().__init__()
        self.mlp = mlp
        self.compute = compute
        self.weight = nn.Parameter(torch.eye(32) / 8 + 0.01)
        self.seen = []

    @torch.no_grad()
    def forward(self, x):
        self.seen.append((x.clone(), self.compute(x, self.weight)))
        return self.mlp(x) + self.seen[-1][1].expand_as(x)


@pytest.fixture
def model(make_model):
    """A layer without a branch, and one for the branch."""
    return make_model(num_layers=2)


def receipt_with(model, compute, ids=None, **settings):
    """Return the receipt of a model with a branch, and whether the results of the branch are exact."""
    layer = model.model.layers[1]
    layer.mlp = branch = Branch(layer.mlp, compute)
    ids = torch.arange(2, 10).reshape(2, 4) if ids is None else ids
    with torch.no_grad(), on_modules(model, 0.05, **settings) as receipt:
        model(ids)
    ((x, found),) = branch.seen
    exact = branch.compute(x, branch.weight.detach())
    return receipt, torch.allclose(found, exact, rtol=1e-5, atol=1e-7)


def refusals_of(model, compute):
    """Problems of the receipt that name the layer of the branch."""
    return [problem for problem in receipt_with(model, compute)[0].problems() if PLACE in problem]


class Announced(torch._ops.OpOverload):
    """An operator that is dispatched but does not compute: it returns its first tensor."""

    def __init__(self, overload):
        self.__dict__ |= vars(overload)
        # A packet of the same name for which nobody has a formula of its cost: the arguments would not fit it.
        self._overloadpacket = type("Packet", (), {"__name__": overload.overloadpacket.__name__})()

    def decompose(self, *args, **kwargs):
        return NotImplemented

    def __call__(self, x, *rest):
        return x + 0


def announce(overloads, x, weight):
    mode = _get_current_dispatch_mode()
    if mode is not None and x.shape[1] > 1:
        for overload in overloads:
            mode.__torch_dispatch__(Announced(overload), (), (x, x))
    return x


def silent_overloads(make_model):
    """Overloads of two tensors or more, known neither as products nor as losses, that the receipt does not refuse."""
    packets = {}
    for overload in aten_overloads.overloads():
        name = overload.overloadpacket.__name__.removesuffix("_")
        is_listed = name in {*RECOMPUTED, *UNPROVEN} or is_of_losses(overload.overloadpacket.__name__)
        is_dispatched = torch._C._dispatch_has_kernel(overload.name())
        if is_dispatched and not is_listed and aten_overloads.tensor_inputs(overload) >= 2:
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


@torch.jit.script
def scripted_mm(x, weight):
    return torch.mm(x.reshape(-1, 32), weight).view(x.shape)


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


def by_integers(x, w, **settings):
    quantised = [(part * 8).to(torch.int8) for part in (rows(x), w)]
    return back(torch._int_mm(*quantised, **settings).float() / 64, x)


def by_small_numbers(x, w):
    parts = (rows(x).to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).T)
    return back(torch._scaled_mm(*parts, torch.ones(()), torch.ones(()), out_dtype=torch.bfloat16).float(), x)


SPARSE = (torch.eye(32) / 8).to_sparse()


def by_int8_weights(x, w):
    return back(torch.ops.aten._weight_int8pack_mm(rows(x), w.to(torch.int8), torch.ones(32)), x)


def by_quantised_linear(x, w):
    return torch.ops.quantized.linear_dynamic(
        x, torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(w.detach(), 0.1, 0, torch.qint8), None)
    )


NOISED = {
    "mv": lambda x, w: torch.stack([torch.mv(w, row) for row in rows(x)]).view(x.shape),
    "dot": lambda x, w: torch.stack([torch.dot(row, w[0]) for row in rows(x)]).view(*x.shape[:2], 1),
    "vdot": lambda x, w: torch.vdot(x.flatten()[:32], w[0]).view(1, 1, 1),
    "addmv": lambda x, w: torch.addmv(x[0, 0], w, x[0, 0]),
    "addbmm": lambda x, w: torch.addbmm(x[0], x, w.expand(x.shape[0], 32, 32)),
    "inner": lambda x, w: torch.inner(x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([2], [1])),
    "chain_matmul": lambda x, w: back(torch.linalg.multi_dot([rows(x), w, w]), x),
    "linalg.matmul": lambda x, w: torch.linalg.matmul(x, w),
    "linalg.matrix_power": lambda x, w: torch.linalg.matrix_power(w, 3)[: x.shape[1]],
    "conv1d": lambda x, w: F.conv1d(x.transpose(1, 2), w.unsqueeze(-1)).transpose(1, 2),
    "depthwise conv1d": lambda x, w: F.conv1d(x.transpose(1, 2), w[:, None, :1], groups=32).transpose(1, 2),
    "conv2d": lambda x, w: F.conv2d(x.transpose(1, 2).unsqueeze(-1), w[..., None, None]).squeeze(-1).transpose(1, 2),
    "GRU": recurrent(nn.GRU),
    "RNN": recurrent(nn.RNN),
    "attention": by_attention,
    "flash attention": by_flash_attention,
    "grouped product": lambda x, w: (
        torch.ops.aten._grouped_mm(
            rows(x).bfloat16(), w.bfloat16()[None], offs=torch.tensor([rows(x).shape[0]], dtype=torch.int32)
        )
        .float()
        .view(x.shape)
    ),
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
    "scripted mm": scripted_mm,
    "products of activations": lambda x, w: torch.bmm(torch.bmm(x, x.transpose(1, 2)), x),
    "cast": lambda x, w: F.linear(x.double(), w.double()).float(),
    "selected rows": lambda x, w: F.linear(x, w[torch.arange(32)]),
    "operands by name": lambda x, w: back(torch.addmm(mat2=w, mat1=rows(x), input=rows(x), alpha=0.5), x),
    "einsum of a list": lambda x, w: torch.einsum("btd,de->bte", [x, w]),
    "weight with a gain": lambda x, w: F.linear(x, w * w.diagonal()[:, None]),
    "weight of two others": lambda x, w: F.linear(x, w + w[:, :2] @ w[:2]),
}

REFUSED = {
    "outer": lambda x, w: torch.outer(x[0, 0], w[0])[: x.shape[1]],
    "addr": lambda x, w: torch.addr(torch.zeros(32, 32), x[0, 0], w[0])[: x.shape[1]],
    "linalg.vecdot": lambda x, w: torch.linalg.vecdot(x, w[: x.shape[1]]).unsqueeze(-1),
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
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x.transpose(1, 2), w.unsqueeze(-1)).transpose(1, 2),
    "LSTM": recurrent(nn.LSTM),
    "sparse.mm": lambda x, w: back(torch.sparse.mm(w.to_sparse(), rows(x).T).T, x),
    "sparse addmm": lambda x, w: back(
        torch.sparse.addmm(torch.zeros(32, rows(x).shape[0]), w.to_sparse(), rows(x).T).T, x
    ),
    "sparse CSR": lambda x, w: back((w.to_sparse_csr() @ rows(x).T).T, x),
    "embedding_bag": lambda x, w: F.embedding_bag(
        torch.arange(32).expand(rows(x).shape[0], 32), w, per_sample_weights=rows(x), mode="sum"
    ).view(x.shape),
    "integers": by_integers,
    "int8 weights": by_int8_weights,
    "dynamic quantisation": by_quantised_linear,
    "fast Fourier transform": by_fast_fourier_transform,
    "custom operator": custom,
    "sum of products": lambda x, w: (x.unsqueeze(-2) * w).sum(-1),
    "sum of products with a copy": lambda x, w: (x.unsqueeze(-2) * w.clone().t().contiguous()).sum(-1),
    "sum of addcmul": lambda x, w: torch.addcmul(torch.zeros(()), x.unsqueeze(-2), w).sum(-1),
    "sum of foreach products": lambda x, w: torch._foreach_mul([x.unsqueeze(-2)], [w])[0].sum(-1),
    "sum of losses": lambda x, w: F.mse_loss(
        x.unsqueeze(-2).expand(-1, -1, 32, 32), w.expand(*x.shape[:2], 32, 32), reduction="none"
    ).sum(-1),
    "sum of squared differences": lambda x, w: (x.unsqueeze(-2) - w).square().sum(-1),
    "outer product by hand": lambda x, w: x[:, :, :1] * w[0],
    "cumulative sum of products": lambda x, w: (x.unsqueeze(-2) * w).cumsum(-1)[..., -1],
    "index_add of products": lambda x, w: torch.zeros(x.shape[1], 32).index_add(
        0, torch.zeros(32, dtype=torch.long), w * x[0, 0].unsqueeze(-1)
    ),
    "sparse weight": lambda x, w: back((SPARSE @ rows(x).T).T, x),
    "sparse weight by a vector": lambda x, w: SPARSE @ x[0, 0],
    "integers into an output": lambda x, w: by_integers(x, w, out=torch.empty(rows(x).shape, dtype=torch.int32)),
    "8-bit floating-point numbers": by_small_numbers,
    "complex numbers": lambda x, w: back((rows(x).to(torch.complex64) @ w.to(torch.complex64)).real, x),
    "sum of interpolations": lambda x, w: torch.lerp(torch.zeros(()), w, x.unsqueeze(-2)).sum(-1),
    "sum of squared sums": lambda x, w: (x.unsqueeze(-2) + w).square().sum(-1),
    "weight plus zero": lambda x, w: (x.unsqueeze(-2) * (w + 0)).sum(-1),
    "sum of two weights": lambda x, w: (x.unsqueeze(-2) * (w + w)).sum(-1),
    "weight with a scale": lambda x, w: ((x * w[0]).unsqueeze(-1) * (w * w[0])).sum(-2),
    "einsum without a sum": lambda x, w: torch.einsum("btd,de->btde", x, w).sum(2),
    "trapezoid": lambda x, w: torch.trapezoid(x.unsqueeze(-2), w),
    "every row of a weight looked up": lambda x, w: (x.unsqueeze(-2) * F.embedding(torch.arange(32), w)).sum(-1),
    "norm of activations by the operator of weight norm": lambda x, w: torch._weight_norm(
        x[0], torch.ones(x.shape[1], 1)
    ),
}


@pytest.mark.parametrize("name", NOISED)
def test_a_product_in_any_spelling_is_noised(model, name):
    receipt, is_exact = receipt_with(model, NOISED[name])
    record = receipt.check().content.phases[0]
    assert not is_exact
    assert record.noised_flops == record.flops
    calls = [sum(cell.calls for cell in receipt.content.cells if cell.layer == layer) for layer in (0, 1)]
    assert calls[1] > calls[0]


@pytest.mark.parametrize("name", REFUSED)
def test_a_product_without_noise_is_refused_by_name(model, name):
    problems = receipt_with(model, REFUSED[name])[0].problems()
    assert any(PLACE in problem or "layer 1" in problem or "of integers" in problem for problem in problems), problems


GAINS = nn.Parameter(torch.ones(32, 1))

HARMLESS = {
    "bias of every token": lambda x, w: x + w[: x.shape[1]],
    "lookup": lambda x, w: F.embedding(torch.zeros(x.shape[:2], dtype=torch.long), w),
    "looked-up bias and a mask": lambda x, w: F.embedding(torch.arange(4), w)[None] + torch.zeros(x.shape[0], 1, 1),
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "dropout by hand": lambda x, w: x * torch.empty_like(x).bernoulli_(0.5),
    "gated": lambda x, w: F.silu(x) * x,
    "normalised": lambda x, w: F.layer_norm(x, (32,)),
    "integers one by one": lambda x, w: x + 0 * torch.einsum("i,j->ij", torch.arange(4), torch.arange(4)).sum(),
    "one scale per channel": lambda x, w: x * GAINS.view(32),
    "einsums without a sum": lambda x, w: (
        torch.einsum("btd->tbd", x).transpose(0, 1) + 0 * torch.einsum("ij->ji", w)[0]
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_product_is_accepted(model, name):
    receipt_with(model, HARMLESS[name])[0].check()


def test_layers_without_noise_may_compute_anything(model):
    ways = (REFUSED["sum of products"], NOISED["mv"])
    for compute in ways:
        receipt, is_exact = receipt_with(model, compute, layers=[0], include_lm_head=False)
        receipt.check()
        assert is_exact


def test_a_product_of_the_forward_that_reads_one_token_is_seen(model):
    def on_one_token(x, weight):
        return REFUSED["sum of products"](x, weight) if x.shape[1] == 1 else x

    layer = model.model.layers[1]
    layer.mlp = Branch(layer.mlp, on_one_token)
    with torch.no_grad(), on_modules(model, 0.05) as receipt:
        cache = model(torch.arange(2, 10).reshape(2, 4), use_cache=True).past_key_values
        model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    assert any(f"aten.mul on a weight matrix in {PLACE}" in problem for problem in receipt.problems())


def by_numpy(x, w):
    return back(torch.from_numpy(rows(x).numpy() @ w.detach().numpy()), x)


OUT_OF_REACH = {
    "weight as numpy array": by_numpy,
    "table that is no parameter": lambda x, w: (x.unsqueeze(-2) * torch.eye(32)).sum(-1),
}


@pytest.mark.xfail(strict=True, reason="element-wise with a tensor that is no parameter, or outside torch")
@pytest.mark.parametrize("name", OUT_OF_REACH)
def test_a_product_with_a_copy_of_a_weight_is_refused(model, name):
    assert refusals_of(model, OUT_OF_REACH[name])
