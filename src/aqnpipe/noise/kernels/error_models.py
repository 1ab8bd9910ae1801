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
from aqnpipe.noise.kernels.gaussian import add_absolute_gaussian_, add_relative_gaussian_
from aqnpipe.noise.kernels.measured import add_measured_
from aqnpipe.noise.kernels.quantization import truncate_mantissa_
from aqnpipe.noise.kernels.stream import NoiseStream


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
