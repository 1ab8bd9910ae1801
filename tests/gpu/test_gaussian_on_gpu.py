import pytest
import torch
from scipy import stats

from aqnpipe.noise.kernels.gaussian import NoiseStream, add_absolute_gaussian_, add_relative_gaussian_, standard_normal

pytest.importorskip("triton", reason="needs the package triton")

from aqnpipe.noise.kernels.gaussian_cuda import CPU_AGREEMENT, apply_gaussian_

SOURCE = NoiseStream(key=0x1234_5678_9ABC_DEF0, call=7, stream=3)


def test_a_tensor_on_the_gpu_gets_the_noise_of_the_cpu():
    # Through the public functions, which choose the kernel by device; one element more than whole groups.
    difference = standard_normal((1 << 22) + 1, SOURCE, "cuda").cpu() - standard_normal((1 << 22) + 1, SOURCE)
    assert difference.abs().max().item() < CPU_AGREEMENT


@pytest.mark.parametrize("add_", [add_relative_gaussian_, add_absolute_gaussian_])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_rounded_to_nearest_once(dtype, add_):
    y = torch.randn(100_001, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    noised = add_(y.cuda(), 0.05, SOURCE).cpu().double()
    exact = add_(y.double(), 0.05, SOURCE)
    kernels_differ = (0.05 * CPU_AGREEMENT + torch.finfo(torch.float32).eps) * y.double().abs().clamp_min(1)
    assert ((noised - exact).abs() <= 0.5 * torch.finfo(dtype).eps * exact.abs() + kernels_differ).all()


def test_a_transposed_tensor_is_noised_in_memory_order():
    transposed = torch.ones(300, 500, device="cuda").t()
    expected = add_relative_gaussian_(torch.ones(300, 500), 0.05, SOURCE).t()
    torch.testing.assert_close(
        add_relative_gaussian_(transposed, 0.05, SOURCE).cpu(), expected, rtol=0, atol=0.05 * CPU_AGREEMENT
    )


def test_elements_beyond_the_reach_of_32_bits():
    numel, tail = (1 << 31) + 5000, 6024
    # Counters are numbered per element, so the last ones of a large tensor need no large tensor on the CPU.
    large = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    apply_gaussian_(large, 1.0, SOURCE, relative=False)
    first = numel - tail
    assert first % 1024 == 0
    assert (large[first:] != 0).float().mean() > 0.99
    z = large[first:].float().cpu()
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-6
    assert abs(torch.corrcoef(torch.stack([z, large[:tail].float().cpu()]))[0, 1].item()) < 5 / tail**0.5


def test_noise_is_standard_normal():
    n = 1 << 24
    z = standard_normal(n, SOURCE, "cuda").double()
    assert abs(z.mean().item()) < 5 / n**0.5
    assert abs(z.std().item() - 1) < 5 / (2 * n) ** 0.5
    assert abs(z.pow(3).mean().item()) < 5 * (15 / n) ** 0.5
    assert abs(z.pow(4).mean().item() - 3) < 5 * (96 / n) ** 0.5
    neighbours = (z[1:] * z[:-1]).mean().item()
    assert abs(neighbours) < 5 / n**0.5
    assert stats.kstest(z[: 1 << 20].cpu().numpy(), "norm").pvalue > 1e-6


def test_nothing_is_allocated():
    y = torch.ones(1 << 24, dtype=torch.bfloat16, device="cuda")
    add_relative_gaussian_(y, 0.05, SOURCE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_relative_gaussian_(y, 0.05, SOURCE)
    assert torch.cuda.max_memory_allocated() == before


def test_a_captured_graph_repeats_a_key_passed_by_value():
    # Why receipts refuse one.
    y = torch.ones(5001, device="cuda")
    graph, out = capture(lambda: add_relative_gaussian_(y.clone(), 0.05, NoiseStream(11)))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert torch.equal(out, first)


def capture(work):
    """Warm up on a side stream, as CUDA graphs require, then capture; return the graph and its output tensor."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out
