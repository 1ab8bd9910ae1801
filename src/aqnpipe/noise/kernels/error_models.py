"""Applies each error model to a computed tensor."""

from torch import Tensor

from aqnpipe.config.noise import (
    AbsoluteGaussian,
    MantissaTruncation,
    OutputErrorModel,
    RelativeGaussian,
    SystematicBias,
)
from aqnpipe.noise.kernels.gaussian import add_absolute_gaussian_, add_relative_gaussian_
from aqnpipe.noise.kernels.quantization import truncate_mantissa_
from aqnpipe.noise.kernels.stream import NoiseStream


def apply_error_(tensor: Tensor, error: OutputErrorModel, source: NoiseStream) -> Tensor:
    """Put `error` on `tensor` in place; Gaussian errors use the random numbers of `source`."""
    match error:
        case RelativeGaussian():
            return add_relative_gaussian_(tensor, error.scale, source)
        case AbsoluteGaussian():
            return add_absolute_gaussian_(tensor, error.scale, source)
        case SystematicBias():
            return tensor.add_(tensor.sign(), alpha=error.scale)
        case MantissaTruncation():
            return truncate_mantissa_(tensor, error.mantissa_bits)
