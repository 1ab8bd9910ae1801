"""What an error leaves of a distribution."""

import torch

from aqnpipe.noise.kernels.error_models import renormalise
from aqnpipe.noise.kernels.gaussian import add_relative_gaussian_
from aqnpipe.noise.kernels.stream import NoiseStream


def test_renormalised_noise_is_a_distribution():
    p = torch.softmax(torch.randn(20, 50, generator=torch.Generator().manual_seed(0)), -1)
    noised = renormalise(add_relative_gaussian_(p.clone(), 0.3, NoiseStream(1)), -1)
    assert (noised >= 0).all()
    torch.testing.assert_close(noised.sum(-1), torch.ones(20))


def test_a_row_of_zeros_stays_one():
    """Where everything is masked there is no distribution."""
    noised = renormalise(torch.tensor([[0.0, 0.0], [0.5, -0.1]]), -1)
    assert torch.equal(noised, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
