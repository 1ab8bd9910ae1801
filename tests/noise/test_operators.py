import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from aqnpipe.noise.operators import GradientError, RelativeError, add_relative_error_, noised_functions, renormalise
from aqnpipe.seeding import keyed_generator


def generator(*counters: int) -> torch.Generator:
    return keyed_generator("cpu", 0, "test", *counters)


def test_error_is_the_formula_with_the_generators_own_numbers():
    y = torch.tensor([2.0, -4.0, 0.0, 8.0] * 8)
    z = torch.empty_like(y).normal_(generator=generator())
    expected = y + 0.05 * y * z
    torch.testing.assert_close(add_relative_error_(y.clone(), 0.05, generator()), expected)


def test_large_tensors_are_noised_in_every_element_and_replay():
    y = torch.ones(3, 50_000)
    noised = add_relative_error_(y.clone(), 0.05, generator())
    assert (noised != 1).float().mean() > 0.999
    assert torch.equal(noised, add_relative_error_(y.clone(), 0.05, generator()))
    first, second = noised.view(-1)[:65536] - 1, noised.view(-1)[65536 : 2 * 65536] - 1
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 5 / 65536**0.5


def test_tensors_that_are_not_contiguous_are_noised_too():
    y = torch.ones(50, 40).t()
    assert (add_relative_error_(y, 0.05, generator()) != 1).all()
    assert abs((y - 1).std().item() / 0.05 - 1) < 5 / 4000**0.5


def test_error_is_gaussian_with_the_asked_scale():
    n = 100_000
    y = torch.full((n,), 3.0, dtype=torch.float64)
    z = (add_relative_error_(y.clone(), 0.05, generator()) - y) / (0.05 * y)
    assert abs(z.mean().item()) < 5 / math.sqrt(n)
    assert abs(z.std().item() - 1) < 5 / math.sqrt(2 * n)
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-6


def test_low_precision_gets_the_error_in_float32_and_one_rounding():
    y = torch.randn(4096, generator=generator(1)).to(torch.bfloat16)
    noised = add_relative_error_(y.clone(), 0.05, generator())
    factor = 1 + 0.05 * torch.empty(4096).normal_(generator=generator())
    assert torch.equal(noised, (factor * y.float()).to(torch.bfloat16))


def test_zero_scale_changes_no_bit():
    y = torch.randn(1000, generator=generator(1))
    assert torch.equal(add_relative_error_(y.clone(), 0.0, generator()), y)


def test_forward_error_leaves_the_gradient_alone():
    x = torch.randn(5, requires_grad=True)
    RelativeError.apply(x * 3, lambda y: y.mul_(7)).sum().backward()
    assert torch.equal(x.grad, torch.full((5,), 3.0))


def test_gradient_error_leaves_the_forward_alone_and_changes_the_gradient():
    x = torch.randn(5, requires_grad=True)
    y = GradientError.apply(x, lambda gradient: gradient.mul_(2))
    assert torch.equal(y, x)
    (y * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((5,), 6.0))


def test_renormalised_noise_is_a_distribution():
    p = torch.softmax(torch.randn(20, 50, generator=generator()), -1)
    noised = renormalise(add_relative_error_(p.clone(), 0.3, generator(1)), -1)
    assert (noised >= 0).all()
    torch.testing.assert_close(noised.sum(-1), torch.ones(20))


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
    from torch.overrides import TorchFunctionMode

    seen = []

    class Spy(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Spy():
        call(torch.ones(3, 3), torch.ones(3, 3))
    assert [noised_functions("matmul")[f] for f in seen if f in noised_functions("matmul")] == [operator]


def test_all_holds_matmul_and_the_activations():
    assert set(noised_functions("matmul").values()) == {"linear", "matmul", "bmm"}
    extra = set(noised_functions("all").values()) - set(noised_functions("matmul").values())
    assert extra == {"softmax", "silu", "gelu", "layer_norm"}
