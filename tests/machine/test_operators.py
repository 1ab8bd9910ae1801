"""Replaced kernels: every product passes, once, and everything is as before afterwards."""

import pytest
import torch
import torch.nn.functional as F

from aqnpipe.machine import operators
from aqnpipe.machine.operators import Registration

X = torch.arange(12.0).reshape(3, 4)
W = torch.arange(8.0).reshape(4, 2)

CALLS = {
    "mm": (lambda: X @ W, ["mm"]),
    "matmul in 3 dimensions": (lambda: X[None] @ W, ["mm"]),
    "linear with bias": (lambda: F.linear(X, W.T, torch.ones(2)), ["mm"]),
    "bmm": (lambda: torch.bmm(X[None], W[None]), ["bmm"]),
    "einsum": (lambda: torch.einsum("ij,jk->ik", X, W), ["bmm"]),
    "addmm": (lambda: torch.addmm(torch.ones(3, 2), X, W, beta=2, alpha=3), ["mm"]),
    "addmm of a column": (lambda: torch.addmm(torch.ones(3, 1), X, W), ["mm"]),
    "addmm without the added": (lambda: torch.addmm(torch.full((3, 2), float("nan")), X, W, beta=0), ["mm"]),
    "addmm_": (lambda: torch.ones(3, 2).addmm_(X, W), ["mm"]),
    "mm into": (lambda: torch.mm(X, W, out=torch.empty(3, 2)), ["mm"]),
    "mm into another shape": (lambda: torch.mm(X, W, out=torch.empty(0)), ["mm"]),
    "baddbmm": (lambda: torch.baddbmm(torch.ones(1, 3, 2), X[None], W[None]), ["bmm"]),
    "addbmm": (lambda: torch.addbmm(torch.ones(3, 2), X[None].repeat(2, 1, 1), W[None].repeat(2, 1, 1)), ["bmm"]),
    "mv": (lambda: torch.mv(X, X[0]), ["mv"]),
    "addmv": (lambda: torch.addmv(torch.ones(3), X, X[0]), ["mv"]),
    "dot": (lambda: torch.dot(X[0], X[1]), ["dot"]),
    "vdot": (lambda: torch.vdot(X[0], X[1]), ["vdot"]),
    "convolution": (lambda: F.conv1d(X[None], torch.ones(5, 3, 2), torch.ones(5)), ["convolution"]),
    "attention": (
        lambda: F.scaled_dot_product_attention(X[None, None], X[None, None], X[None, None]),
        ["_scaled_dot_product_flash_attention_for_cpu"],
    ),
    "grouped_mm": (
        lambda: torch._grouped_mm(
            torch.ones(4, 16, dtype=torch.bfloat16),
            torch.ones(2, 16, 8, dtype=torch.bfloat16),
            offs=torch.tensor([2, 4], dtype=torch.int32),
        ),
        ["_grouped_mm"],
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_product_passes_once_and_changes_no_value(call):
    compute, expected_operators = CALLS[call]
    expected, seen = compute(), []
    registration = Registration(lambda operator, result, num_terms, factors: seen.append(operator) or result)
    try:
        found = compute()
    finally:
        registration.close()
    assert seen == expected_operators
    assert torch.allclose(found, expected)
    compute()
    assert seen == expected_operators


@pytest.mark.parametrize("call", CALLS)
def test_what_the_function_returns_is_used(call):
    compute, _ = CALLS[call]
    expected = compute()
    registration = Registration(lambda operator, result, num_terms, factors: result.mul_(2))
    try:
        found = compute()
    finally:
        registration.close()
    assert not torch.allclose(found, expected)


def test_the_gradient_of_attention_is_that_of_its_exact_output():
    def gradients():
        operands = [
            torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3)
        ]
        F.scaled_dot_product_attention(*operands, is_causal=True).sum().backward()
        return [operand.grad for operand in operands]

    expected = gradients()

    def double_outputs(operator, result, num_terms, factors):
        return result if operator.endswith("backward") else result.mul_(2)

    registration = Registration(double_outputs)
    try:
        found = gradients()
    finally:
        registration.close()
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(expected, found, strict=True))


def test_a_backend_without_the_product_of_its_sum_has_the_sum(monkeypatch):
    kernel = operators._kernel
    monkeypatch.setattr(operators, "_kernel", lambda name, backend: None if name == "mm" else kernel(name, backend))
    expected, seen = torch.addmm(torch.ones(2), X, W, alpha=3), []
    registration = Registration(lambda operator, result, num_terms, factors: seen.append(operator) or result)
    try:
        assert torch.equal(torch.addmm(torch.ones(2), X, W, alpha=3), expected)
    finally:
        registration.close()
    assert seen == ["mm"]
