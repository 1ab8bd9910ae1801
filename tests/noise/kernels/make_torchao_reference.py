"""Write torchao_reference.safetensors: inputs and what torchao makes of them in MXFP4 and NVFP4.

Run with `pip install torchao==0.18.0` in an environment of its own: transformers imports torchao wherever it finds it.
"""

from pathlib import Path

import torch
import torchao
from safetensors.torch import save_file
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

PATH = Path(__file__).with_name("torchao_reference.safetensors")


def inputs():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(12, 64, generator=generator)
    sparse = normal * (torch.rand(12, 64, generator=generator) < 0.1)
    sparse[:4] = 0.0
    sparse[1] = -0.0
    return {
        "normal": normal,
        "ties": torch.randint(-32, 33, (12, 64), generator=generator) / 4,
        "scales_of_blocks": normal * torch.exp2(torch.randint(-20, 21, (12, 4), generator=generator)).repeat(1, 16),
        "scales_of_elements": normal * torch.exp2(torch.randint(-20, 21, (12, 64), generator=generator)),
        "sparse": sparse,
        "tiny": normal * 2.0**-105,
        "huge": (normal * 2.0**127).clamp(torch.finfo(torch.bfloat16).min, torch.finfo(torch.bfloat16).max),
    }


def mxfp4(tensor):
    scale, elements = to_mx(tensor, torch.float4_e2m1fn_x2, 32)
    return to_dtype(elements, scale, torch.float4_e2m1fn_x2, 32, tensor.dtype)


def nvfp4(tensor):
    scale = per_tensor_amax_to_scale(tensor.abs().max())
    return NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=scale).dequantize(tensor.dtype)


def main():
    tensors = {}
    for case, values in inputs().items():
        for dtype in (torch.float32, torch.bfloat16):
            tensor = values.to(dtype)
            key = f"{case}.{str(dtype).removeprefix('torch.')}"
            tensors |= {f"{key}.input": tensor, f"{key}.mxfp4": mxfp4(tensor), f"{key}.nvfp4": nvfp4(tensor)}
    save_file(tensors, PATH, metadata={"torchao": torchao.__version__})


if __name__ == "__main__":
    main()
