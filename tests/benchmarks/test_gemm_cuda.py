"""The noisy product against torch's product: on the GPU where there is one, else in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from aqnpipe.errors import AqnpipeError
from aqnpipe.noise.kernels.gaussian import NoiseStream, add_relative_gaussian_

triton = pytest.importorskip("triton", reason="needs the package triton")

import gemm_cuda  # noqa: E402
from gemm_cuda import matmul_with_relative_error  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from aqnpipe.noise.kernels.gaussian_cuda import CPU_AGREEMENT, apply_gaussian_  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOURCE = NoiseStream(key=0x1234_5678_9ABC_DEF0, call=7, stream=3)
SCALE = 0.5
SHAPES = [(1, 1, 1), (33, 50, 45), (7, 16, 257)]
"""(m, k, n), none a multiple of the tile in all directions."""


@pytest.fixture(autouse=True)
def _one_small_tile(monkeypatch):
    """Nothing to tune, several programs on small shapes; and a product of bfloat16, which the interpreter has not."""
    monkeypatch.setattr(gemm_cuda._matmul_kernel, "configs", [gemm_cuda._config(16, 32, 16, num_stages=2, num_warps=4)])
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, *rest):
        return create_dot(self, *(_widened(operand) for operand in (a, b)), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def _widened(operand: interpreter.TensorHandle) -> interpreter.TensorHandle:
    if operand.dtype.scalar != triton.language.bfloat16:
        return operand
    # The interpreter keeps bfloat16 as the upper half of a float32.
    return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)


def operands(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator).to(dtype)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    return a.to(DEVICE), weight.to(DEVICE).t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_product_carries_the_noise_of_the_finished_tensor_and_one_rounding(shape, dtype):
    a, b = operands(*shape, dtype)
    noised = matmul_with_relative_error(a, b, SCALE, SOURCE)
    exact = a.cpu().double() @ b.cpu().double()
    expected = add_relative_gaussian_(exact.clone(), SCALE, SOURCE)
    # Half a unit in the last place is rounding to nearest; Triton's interpreter truncates bfloat16.
    units = 1.0 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0.5
    accumulation = shape[1] * torch.finfo(torch.float32).eps * (a.cpu().double().abs() @ b.cpu().double().abs())
    noise = SCALE * CPU_AGREEMENT * exact.abs()
    bound = units * torch.finfo(dtype).eps * expected.abs() + 4 * accumulation + noise + torch.finfo(dtype).tiny
    assert noised.dtype == dtype
    assert ((noised.cpu().double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_both_routes_draw_the_same_normals(shape):
    m, k, n = shape
    ones = torch.ones(m, k, device=DEVICE), torch.full((k, n), 1 / k, device=DEVICE)
    one_pass = matmul_with_relative_error(*ones, SCALE, SOURCE)
    finished = matmul_with_relative_error(*ones, 0.0, SOURCE)
    apply_gaussian_(finished.view(-1), SCALE, SOURCE, relative=True)
    torch.testing.assert_close(one_pass, finished, rtol=1e-6, atol=1e-6)


def test_zero_scale_is_the_clean_product():
    a, b = (torch.arange(-6.0, 6.0, device=DEVICE).view(3, 4), torch.arange(8.0, device=DEVICE).view(4, 2))
    # Small integers: exact in any order of summation.
    assert torch.equal(matmul_with_relative_error(a, b, 0.0, SOURCE), a @ b)


def test_rows_and_columns_of_any_stride():
    a, b = operands(20, 24, 40)
    expected = matmul_with_relative_error(a, b, SCALE, SOURCE)
    assert torch.equal(matmul_with_relative_error(a.t().contiguous().t(), b.contiguous(), SCALE, SOURCE), expected)
    spread = torch.zeros(40, 48, device=DEVICE)
    spread[::2, ::2] = a
    assert torch.equal(matmul_with_relative_error(spread[::2, ::2], b, SCALE, SOURCE), expected)


def test_an_empty_product_is_empty():
    assert matmul_with_relative_error(*operands(0, 4, 3), SCALE, SOURCE).shape == (0, 3)


def test_wrong_operands_are_refused():
    a, b = operands(4, 5, 6)
    with pytest.raises(ValueError, match=r"cannot multiply \(4, 5\) on \w+(:0)? and \(6, 5\)"):
        matmul_with_relative_error(a, b.t(), SCALE, SOURCE)
    with pytest.raises(AqnpipeError, match=r"noisy product of torch\.float32 and torch\.float16"):
        matmul_with_relative_error(a, b.half(), SCALE, SOURCE)
    huge = torch.empty(1, 1, device=DEVICE).expand(1 << 16, 1)
    with pytest.raises(ValueError, match="2\\^32 or more cannot be numbered"):
        matmul_with_relative_error(huge, huge.t(), SCALE, SOURCE)


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gemm_cuda import CONFIGS, _matmul_kernel

tile = CONFIGS[3]
kernel = _matmul_kernel.fn
for capability, n in ((80, "i32"), (90, "constexpr")):
    types = {name: "i32" for name in kernel.arg_names}
    types |= {"a": "*bf16", "b": "*bf16", "out": "*bf16", "scale": "fp32", "key": "i64", "n": n}
    constants = {"stride_ak": 1, "stride_bk": 1} | tile.kwargs
    types |= dict.fromkeys(constants, "constexpr")
    divisible = [i for i, name in enumerate(kernel.arg_names) if types[name] in ("*bf16", "i32")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in divisible}
    # A single column reaches a kernel as a constant.
    source = ASTSource(kernel, types, constants | ({"n": 1} if n == "constexpr" else {}), aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = compile(source, GPUTarget("cuda", capability, 32), options)
    print(capability, "mma" in compiled.asm["ptx"], compiled.metadata.shared <= 163 * 1024)
"""


def test_kernel_compiles_for_a100_and_h100_with_tensor_cores(tmp_path):
    # Compiles machine code without a GPU; passing in the interpreter does not show that the compiler accepts a kernel.
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment = os.environ | settings | {"PYTHONPATH": str(Path(gemm_cuda.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["80 True True", "90 True True"], done.stderr
