"""The GPU kernel against the CPU kernel: on the GPU where there is one, else in Triton's interpreter on CPU tensors."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

from aqnpipe.errors import AqnpipeError
from aqnpipe.noise.kernels.gaussian import NoiseStream, add_absolute_gaussian_, add_relative_gaussian_, standard_normal

triton = pytest.importorskip("triton", reason="needs the package triton")
tl = pytest.importorskip("triton.language")

from aqnpipe.noise.kernels.gaussian_cuda import (  # noqa: E402
    CPU_AGREEMENT,
    apply_gaussian_,
    philox,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOURCE = NoiseStream(key=0x1234_5678_9ABC_DEF0, call=7, stream=3)
EXTREME = NoiseStream(key=2**63 - 1, call=2**32 - 1, stream=2**32 - 1)


def normals(numel: int, source: NoiseStream) -> torch.Tensor:
    z = torch.zeros(numel, device=DEVICE)
    apply_gaussian_(z, 1.0, source, relative=False)
    return z.cpu()


def values(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@triton.jit(do_not_specialize=["key", "call", "stream"])
def store_words(out, key, call, stream):
    counter = tl.arange(0, 256)
    w0, w1, w2, w3 = philox(counter.to(tl.uint32), key, call, stream)
    tl.store(out + counter, w0.to(tl.int64))
    tl.store(out + 256 + counter, w1.to(tl.int64))
    tl.store(out + 512 + counter, w2.to(tl.int64))
    tl.store(out + 768 + counter, w3.to(tl.int64))


def philox4x32_7(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """The published definition in Python's own integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(7):
        product_0, product_1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            product_1 >> 32 ^ c1 ^ k0,
            product_1 & 0xFFFFFFFF,
            product_0 >> 32 ^ c3 ^ k1,
            product_0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def test_reference_philox_gives_the_published_answers():
    # The known-answer vectors of Random123 for philox4x32 with 7 rounds.
    assert philox4x32_7((0, 0, 0, 0), (0, 0)) == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    ones = 0xFFFFFFFF
    assert philox4x32_7((ones,) * 4, (ones,) * 2) == (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)


@pytest.mark.parametrize("source", [NoiseStream(0), SOURCE, EXTREME])
def test_random_words_are_philox_bit_for_bit(source):
    out = torch.zeros(1024, dtype=torch.int64, device=DEVICE)
    store_words[(1,)](out, source.key, source.call, source.stream)
    key = source.key & 0xFFFFFFFF, source.key >> 32
    expected = [philox4x32_7((counter, source.call, source.stream, 0), key) for counter in range(256)]
    assert out.view(4, 256).t().tolist() == [list(words) for words in expected]


@pytest.mark.parametrize("source", [NoiseStream(0), SOURCE, EXTREME])
def test_normals_are_those_of_the_cpu_kernel(source):
    difference = normals(100_000, source) - standard_normal(100_000, source)
    assert difference.abs().max().item() < CPU_AGREEMENT


@pytest.mark.parametrize("numel", [0, 1, 255, 1023, 1024, 1025, 4096, 5001])
def test_every_element_and_no_other_is_noised(numel):
    whole = torch.ones(numel + 2000, device=DEVICE)
    apply_gaussian_(whole[1000 : 1000 + numel], 0.05, SOURCE, relative=True)
    expected = torch.ones(numel + 2000)
    add_relative_gaussian_(expected[1000 : 1000 + numel], 0.05, SOURCE)
    torch.testing.assert_close(whole.cpu(), expected, rtol=0, atol=0.05 * CPU_AGREEMENT)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_computed_wide_and_rounded_once(dtype, relative):
    y, add_ = values(3000, dtype), add_relative_gaussian_ if relative else add_absolute_gaussian_
    noised = y.clone().to(DEVICE)
    apply_gaussian_(noised, 0.05, SOURCE, relative=relative)
    exact = add_(y.double(), 0.05, SOURCE)
    # Half a unit in the last place is rounding to nearest; Triton's interpreter truncates bfloat16.
    units = 1.0 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0.5
    kernels_differ = (0.05 * CPU_AGREEMENT + torch.finfo(torch.float32).eps) * y.double().abs().clamp_min(1)
    bound = units * torch.finfo(dtype).eps * exact.abs() + kernels_differ
    assert noised.dtype == dtype
    assert ((noised.cpu().double() - exact).abs() <= bound).all()


def test_zero_scale_changes_no_bit():
    y = values(3000, torch.bfloat16).to(DEVICE)
    noised = y.clone()
    apply_gaussian_(noised, 0.0, SOURCE, relative=True)
    assert torch.equal(noised, y)


def test_key_call_and_stream_each_give_other_numbers():
    sources = [SOURCE, NoiseStream(SOURCE.key + 1, 7, 3), NoiseStream(SOURCE.key, 8, 3), NoiseStream(SOURCE.key, 7, 4)]
    correlations = torch.corrcoef(torch.stack([normals(50_000, source) for source in sources]))
    assert (correlations - torch.eye(4)).abs().max().item() < 5 / 50_000**0.5


def test_wrong_tensors_are_refused():
    with pytest.raises(AqnpipeError, match=r"found torch\.int32, expected one of torch\.float64"):
        apply_gaussian_(torch.zeros(4, dtype=torch.int32, device=DEVICE), 0.05, SOURCE, relative=True)
    with pytest.raises(ValueError, match="flat contiguous"):
        apply_gaussian_(torch.zeros(4, 4, device=DEVICE), 0.05, SOURCE, relative=True)
    with pytest.raises(ValueError, match="flat contiguous"):
        apply_gaussian_(torch.zeros(8, device=DEVICE)[::2], 0.05, SOURCE, relative=True)


def test_a_missing_triton_is_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "aqnpipe.noise.kernels.gaussian_cuda")
    with pytest.raises(AqnpipeError, match="needs the package triton, which is not installed"):
        importlib.import_module("aqnpipe.noise.kernels.gaussian_cuda")


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from aqnpipe.noise.kernels.gaussian_cuda import _apply_kernel

for capability in (80, 90):
    for dtype, relative in (("bf16", True), ("fp64", False)):
        types = {"values": "*" + dtype, "numel": "i32", "scale": "fp32", "key": "i64", "call": "i32", "stream": "i32"}
        constants = {"RELATIVE": relative, "GROUPS": 4}
        source = ASTSource(
            _apply_kernel,
            types | dict.fromkeys(constants, "constexpr"),
            constants,
            {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
        )
        ptx = compile(source, GPUTarget("cuda", capability, 32), {"num_warps": 4}).asm["ptx"]
        print(capability, dtype, "ld.global.v4.b32" in ptx or "ld.global.v2.b64" in ptx, ".local" in ptx)
"""


def test_kernel_compiles_for_a100_and_h100_with_16_byte_loads(tmp_path):
    # Compiles machine code without a GPU; passing in the interpreter does not show that the compiler accepts a kernel.
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    expected = [f"{capability} {dtype} True False" for capability in (80, 90) for dtype in ("bf16", "fp64")]
    assert done.stdout.splitlines() == expected, done.stderr
