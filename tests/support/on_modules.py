"""Noise by changed modules with the arguments of `aqnpipe.noisy`, for tests of what studies use."""

from aqnpipe.errors import ConfigError
from aqnpipe.noise.noisy_modules import noisy_modules


def on_modules(
    model,
    scale=None,
    *,
    error=None,
    seed=0,
    step=None,
    operators="matmul",
    layers=None,
    include_lm_head=True,
    backward=False,
    receipt=None,
):
    """Put noise on a decoder of transformers by its modules, as studies do."""
    if (scale is None) == (error is None):
        raise ConfigError("expected exactly one of the two")
    return noisy_modules(model, scale, error, seed, step, operators, layers, include_lm_head, backward, receipt)
