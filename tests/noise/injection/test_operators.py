import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from aqnpipe.config.noise import OperatorNoise, RelativeGaussian
from aqnpipe.noise.injection.operators import GradientError, escaping_functions, noised_functions

MATMUL = OperatorNoise(error=RelativeGaussian(scale=0.05))
ALL = OperatorNoise(operators="all", error=RelativeGaussian(scale=0.05))


def test_gradient_error_leaves_the_forward_alone_and_changes_the_gradient():
    x = torch.randn(5, requires_grad=True)
    (y,) = GradientError.apply(lambda _position, gradient: gradient.mul_(2), x)
    assert torch.equal(y, x)
    (y * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((5,), 6.0))


def test_each_operand_gets_its_own_error():
    a, b = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    first, second = GradientError.apply(lambda position, gradient: gradient.mul_(10**position), a, b)
    (first @ second).sum().backward()
    ones = torch.ones(3, 3)
    torch.testing.assert_close(a.grad, ones @ b.detach().T)
    torch.testing.assert_close(b.grad, 10 * (a.detach().T @ ones))


@pytest.mark.parametrize(
    ("call", "operator"),
    [
        (lambda a, b: a @ b, "matmul"),
        (torch.matmul, "matmul"),
        (torch.mm, "matmul"),
        (lambda a, b: a.mm(b), "matmul"),
        (lambda a, b: torch.einsum("ij,jk->ik", a, b), "matmul"),
        (F.linear, "linear"),
        (lambda a, b: torch.bmm(a[None], b[None]), "bmm"),
    ],
)
def test_every_spelling_of_a_matrix_product_is_seen(call, operator):
    """Records which functions torch hands to a mode for each spelling; each must be in the matmul set."""
    seen = []

    class Spy(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Spy():
        call(torch.ones(3, 3), torch.ones(3, 3))
    assert [noised_functions(MATMUL)[f] for f in seen if f in noised_functions(MATMUL)] == [operator]


def test_all_holds_matmul_and_the_activations():
    assert set(noised_functions(MATMUL).values()) == {"linear", "matmul", "bmm", "addmm", "baddbmm", "grouped_mm"}
    extra = set(noised_functions(ALL).values()) - set(noised_functions(MATMUL).values())
    assert extra == {"softmax", "silu", "gelu", "layer_norm"}


def test_fused_attention_is_an_operator_only_by_choice():
    fused = OperatorNoise(error=RelativeGaussian(scale=0.05), attention="fused")
    sdpa = F.scaled_dot_product_attention
    assert noised_functions(fused)[sdpa] == "scaled_dot_product_attention"
    assert sdpa not in escaping_functions(fused)
    assert sdpa in escaping_functions(MATMUL)
    assert not noised_functions(MATMUL).keys() & escaping_functions(MATMUL).keys()
