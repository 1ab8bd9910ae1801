"""Applies each error model to a computed tensor."""

import torch
from torch import Tensor

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.measured_noise import OperatorError
from aqnpipe.config.noise import (
    AbsoluteGaussian,
    MantissaTruncation,
    RelativeGaussian,
    SystematicBias,
    TensorError,
)
from aqnpipe.noise.kernels.custom import add_custom_
from aqnpipe.noise.kernels.gaussian import NoiseStream, add_absolute_gaussian_, add_relative_gaussian_
from aqnpipe.noise.kernels.quantization import truncate_mantissa_


def apply_error_(tensor: Tensor, error: TensorError, source: NoiseStream, input_rms: Tensor | None = None) -> Tensor:
    """Put `error` on `tensor` in place; Gaussian errors use the random numbers of `source`.

    `input_rms`: for a measured error, the root mean squares of the operator's input rows [..., 1].
    """
    match error:
        # The most frequent one comes first: to try another pydantic class takes as long as a small product.
        case RelativeGaussian():
            return add_relative_gaussian_(tensor, error.scale, source)
        case OperatorError():
            return add_measured_(tensor, error, source, input_rms)
        case AbsoluteGaussian():
            return add_absolute_gaussian_(tensor, error.scale, source)
        case SystematicBias():
            return tensor.add_(tensor.sign(), alpha=error.scale)
        case MantissaTruncation():
            return truncate_mantissa_(tensor, error.mantissa_bits)
        case CustomError():
            return add_custom_(tensor, error, source)


def renormalise(probabilities: Tensor, dim: int) -> Tensor:
    """Return noised probabilities as a distribution: no negative ones, sum 1 along `dim`; rows of zeros stay."""
    positive = probabilities.clamp_min(0)
    return positive / positive.sum(dim, keepdim=True).clamp_min(torch.finfo(positive.dtype).tiny)


def add_measured_(tensor: Tensor, error: OperatorError, source: NoiseStream, input_rms: Tensor | None = None) -> Tensor:
    """Add a measured error to `tensor` in place; the formula is that of `ErrorFigures`, times the multiple.

    `input_rms` [..., 1] has one root mean square per row of `tensor` [..., width]; only `per_input` needs it. Tensors
    of 16 bits are computed in float32 and rounded once. Raises ValueError if `input_rms` is needed and missing.
    """
    figures = error.figures
    if figures.is_zero:
        return tensor
    if figures.per_input and input_rms is None:
        raise ValueError("a measured error depends on the input of its operator, which is missing; this is a bug")
    wide = tensor.double() if tensor.dtype == torch.float64 else tensor.float()
    # Not a sum of squares, whose small figures would underflow in float32.
    sigma = torch.hypot(wide * figures.per_result, wide.new_full((), figures.absolute))
    if figures.per_input and input_rms is not None:
        sigma = torch.hypot(sigma, input_rms.to(wide.dtype) * figures.per_input)
    # Elements are numbered as they lie in memory, so the numbers need the strides of the tensor.
    noise = add_absolute_gaussian_(torch.zeros_like(tensor, dtype=wide.dtype), 1.0, source).mul_(sigma)
    noise.add_(wide, alpha=figures.gain).add_(figures.bias)
    return tensor.copy_(noise.mul_(error.multiple).add_(wide))


def root_mean_squares(inputs: Tensor) -> Tensor:
    """Return the root mean square of every row of `inputs` [..., width], as [..., 1] in float32."""
    return inputs.detach().float().square().mean(-1, keepdim=True).sqrt()
