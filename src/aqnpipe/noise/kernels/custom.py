"""The error model of a user's own, put on a computed tensor.

Its function gets a copy of the values and normal numbers of the tensor's keys. What it returns is refused in one line
if it breaks the contract (`config.custom_code.ErrorFunction`).
"""

import torch
from torch import Tensor

from aqnpipe.config.custom_code import CustomError, as_config_error, unchanged_function
from aqnpipe.errors import ConfigError
from aqnpipe.noise.kernels.gaussian import NoiseStream, add_absolute_gaussian_
from aqnpipe.seeding import derive_seed

_PROBED_ELEMENTS = 4096
_CLOSE = 1e-5
"""Relative difference of an elementwise function on parts of a tensor, whose vector code may round differently."""


def add_custom_(tensor: Tensor, error: CustomError, source: NoiseStream) -> Tensor:
    """Put a user's own error on `tensor` in place; 16-bit tensors are computed in float32 and rounded once.

    Raises ConfigError if the function's source has changed, or if it raises or returns anything but a finite tensor of
    the same shape and dtype.
    """
    wide = tensor.double() if tensor.dtype == torch.float64 else tensor.float()
    return tensor.copy_(checked_values(error, wide, normals_like(tensor, wide.dtype, error.draws, source)))


def normals_like(tensor: Tensor, dtype: torch.dtype, draws: int, source: NoiseStream) -> Tensor:
    """Return [draws, *tensor.shape] numbers ~ N(0, 1) for the elements of `tensor`, as they lie in memory.

    Draw 0 is keyed by `source`; the key of draw n is derived from it with the stream `own draw`.
    """
    keys = [source.key, *(derive_seed(source.key, "own draw", draw) for draw in range(1, draws))][:draws]
    drawn = [add_absolute_gaussian_(torch.zeros_like(tensor, dtype=dtype), 1.0, source._replace(key=k)) for k in keys]
    return torch.stack(drawn) if drawn else tensor.new_empty((0, *tensor.shape), dtype=dtype)


def checked_values(error: CustomError, values: Tensor, normals: Tensor) -> Tensor:
    """Return what the function of `error` makes of `values`, which stay unchanged; ConfigError if it is not usable."""
    function, shape = error.function, tuple(values.shape)
    call = unchanged_function(function, error.source_sha256 or "")
    # The noise of the model must not be put on the operators that the function itself uses.
    with torch.no_grad(), torch._C.DisableTorchFunction(), as_config_error(function, f"for values of shape {shape}"):
        found = call(values.detach().clone(), normals, **error.settings)
    if not isinstance(found, Tensor):
        raise ConfigError(f"{function}: returned {type(found).__name__}, expected a tensor")
    if (found.shape, found.dtype, found.device) != (values.shape, values.dtype, values.device):
        raise ConfigError(
            f"{function}: returned {_described(found)} for values {_described(values)}, expected the same shape, dtype "
            "and device"
        )
    spoilt = ~torch.isfinite(found) & torch.isfinite(values)
    if spoilt.any():
        example = values[spoilt][0].item()
        raise ConfigError(f"{function}: returned a number that is not finite for the value {example:.6g}")
    return found.detach()


def refuse_unusable(error: CustomError) -> None:
    """Raise ConfigError if the function of `error` breaks its contract on numbers of many sizes, or has no effect.

    An effect need not show here if the announced size may be 0, as of errors that hit few elements.
    """
    error = error.planned()
    function, generator = error.function, torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.linspace(-4, 2, _PROBED_ELEMENTS)
    values = (torch.randn(_PROBED_ELEMENTS, generator=generator) * sizes).reshape(64, -1)
    normals, others = (torch.randn((error.draws, *values.shape), generator=generator) for _ in range(2))
    found = checked_values(error, values, normals)
    if not torch.equal(found, checked_values(error, values, normals)):
        raise ConfigError(f"{function}: returned other numbers for the same values and normals, expected no state")
    parts = zip(values[:, ::3], normals[..., ::3].unbind(1), strict=True)
    alone = torch.stack([checked_values(error, row, drawn) for row, drawn in parts])
    if not torch.allclose(found[:, ::3], alone, rtol=_CLOSE, atol=0.0):
        raise ConfigError(
            f"{function}: returned other numbers for a part of a tensor than for the whole, expected an elementwise "
            "function"
        )
    if error.sizes[0] == 0:
        return
    if torch.equal(found, values):
        raise ConfigError(f"{function}: changed none of {values.numel():,} values, expected an error")
    if error.draws and torch.equal(found, checked_values(error, values, others)):
        raise ConfigError(f"{function}: returned the same for other normals, expected draws: 0 where it uses none")


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
