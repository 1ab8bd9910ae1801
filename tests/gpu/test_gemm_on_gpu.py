import pytest
import torch

from aqnpipe.noise.kernels.gaussian import NoiseStream, add_relative_gaussian_

pytest.importorskip("triton", reason="needs the package triton")

import gemm_cuda
from gemm_cuda import matmul_with_relative_error

SOURCE = NoiseStream(key=0x1234_5678_9ABC_DEF0, call=7, stream=3)


def products(m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands in bfloat16 and their noisy product in float64, noised by the separate kernel."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    a = torch.randn(m, k, device="cuda", generator=generator).bfloat16()
    b = torch.randn(n, k, device="cuda", generator=generator).bfloat16().t()
    return a, b, add_relative_gaussian_(a.double() @ b.double(), 0.05, SOURCE)


def assert_within_rounding(noised: torch.Tensor, a: torch.Tensor, b: torch.Tensor, expected: torch.Tensor) -> None:
    accumulation = a.shape[1] * torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs())
    bound = 0.5 * torch.finfo(torch.bfloat16).eps * expected.abs() + accumulation
    assert ((noised.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("shape", [(1, 1536, 8960), (37, 1536, 256), (515, 8960, 1536), (300, 1000, 77)])
def test_tuned_product_carries_the_noise_of_the_separate_kernel(shape):
    a, b, expected = products(*shape)
    assert_within_rounding(matmul_with_relative_error(a, b, 0.05, SOURCE), a, b, expected)


@pytest.mark.parametrize("config", gemm_cuda.CONFIGS, ids=str)
def test_each_tile_gives_the_product(config, monkeypatch):
    monkeypatch.setattr(gemm_cuda._matmul_kernel, "configs", [config])
    a, b, expected = products(300, 1000, 264)
    assert_within_rounding(matmul_with_relative_error(a, b, 0.05, SOURCE), a, b, expected)
