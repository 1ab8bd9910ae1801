"""The measured error of an operator: values worked out by hand, and what the audit allows; and distributions."""

import numpy as np
import pytest
import torch

from aqnpipe.config.measured_noise import ErrorFigures, OperatorError
from aqnpipe.noise.kernels.error_models import add_measured_, renormalise, root_mean_squares
from aqnpipe.noise.kernels.gaussian import NoiseStream, add_relative_gaussian_, standard_normal
from aqnpipe.proof.comparison import expected_values, measured_size
from aqnpipe.proof.random_numbers import Draws

SOURCE = NoiseStream(5, 3, 0)
EVERYTHING = ErrorFigures(bias=0.01, gain=-0.02, absolute=0.03, per_input=0.04, per_result=0.05)


def test_bias_and_gain_alone_are_exact():
    error = OperatorError(multiple=2, figures=ErrorFigures(bias=0.5, gain=0.25))
    # 2 + 2*(0.5 + 0.25*2) = 4, and -2 + 2*(0.5 - 0.5) = -2.
    assert add_measured_(torch.tensor([2.0, -2.0]), error, SOURCE).tolist() == [4.0, -2.0]


def test_the_random_part_grows_with_the_input_of_its_row_and_with_the_result():
    inputs = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    rows = root_mean_squares(inputs)
    assert rows.tolist() == [[2.5], [0.0]]
    error = OperatorError(multiple=1, figures=ErrorFigures(per_input=0.4, per_result=0.5))
    z = standard_normal(4, SOURCE).reshape(2, 2)
    found = add_measured_(torch.tensor([[0.0, 2.0], [0.0, 2.0]]), error, SOURCE, rows)
    # Row 0: sigma = hypot(0.4*2.5, 0.5*y) = 1 and sqrt(2). Row 1 has no input, so sigma = 0 and 1.
    expected = torch.tensor([[0.0, 2.0], [0.0, 2.0]]) + z * torch.tensor([[1.0, 2**0.5], [0.0, 1.0]])
    torch.testing.assert_close(found, expected)


def test_an_operator_without_an_error_stays_as_it_is():
    clean = torch.randn(4, 4)
    assert torch.equal(add_measured_(clean.clone(), OperatorError(multiple=16, figures=ErrorFigures()), SOURCE), clean)


def test_a_missing_input_is_a_bug_and_no_smaller_error():
    with pytest.raises(ValueError, match="input of its operator"):
        add_measured_(torch.ones(2), OperatorError(multiple=1, figures=EVERYTHING), SOURCE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("multiple", [1.0, 16.0])
def test_every_value_is_within_what_rounding_explains(dtype, multiple):
    generator = torch.Generator().manual_seed(0)
    clean = (torch.randn(512, 96, generator=generator) * torch.exp(2 * torch.randn(512, 1, generator=generator))).to(
        dtype
    )
    inputs = torch.randn(512, 48, generator=generator) * 3
    error = OperatorError(multiple=multiple, figures=EVERYTHING)
    used = add_measured_(clean.clone(), error, SOURCE, root_mean_squares(inputs))
    rows = np.repeat(inputs.double().square().mean(-1).sqrt().numpy(), 96)
    flat = clean.double().numpy().ravel()
    expected, allowed = expected_values(flat, error, dtype, Draws.of(*SOURCE), np.arange(flat.size), rows)
    assert (np.abs(used.double().numpy().ravel() - expected) <= allowed).all()
    # Another multiple, or rows without their input, is not within it.
    for other, other_rows in ((error.model_copy(update={"multiple": 1.01 * multiple}), rows), (error, 1.05 * rows)):
        wrong, _ = expected_values(flat, other, dtype, Draws.of(*SOURCE), np.arange(flat.size), other_rows)
        assert (np.abs(used.double().numpy().ravel() - wrong) > allowed).mean() > 0.02


def test_elements_are_numbered_as_they_lie_in_memory():
    error = OperatorError(multiple=1, figures=ErrorFigures(absolute=0.1))
    plain = add_measured_(torch.zeros(6, 4), error, SOURCE)
    transposed = add_measured_(torch.zeros(6, 4).t(), error, SOURCE)
    assert torch.equal(transposed.t(), plain)


def test_the_size_is_the_root_mean_square_by_hand():
    # mean 0.01 - 0.02*2 = -0.03; sigma^2 = 0.03^2 + (0.04*0.5)^2 + (0.05*2)^2
    by_hand = (0.03**2 + 0.03**2 + 0.02**2 + 0.1**2) ** 0.5
    assert measured_size(EVERYTHING, np.array([2.0]), np.array([0.5])) == pytest.approx(by_hand)


def test_renormalised_noise_is_a_distribution():
    p = torch.softmax(torch.randn(20, 50, generator=torch.Generator().manual_seed(0)), -1)
    noised = renormalise(add_relative_gaussian_(p.clone(), 0.3, NoiseStream(1)), -1)
    assert (noised >= 0).all()
    torch.testing.assert_close(noised.sum(-1), torch.ones(20))


def test_a_row_of_zeros_stays_one():
    """Where everything is masked there is no distribution."""
    noised = renormalise(torch.tensor([[0.0, 0.0], [0.5, -0.1]]), -1)
    assert torch.equal(noised, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
