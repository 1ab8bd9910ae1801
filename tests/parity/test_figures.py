"""The figures of an operator's error: those of made-up errors are found again, and they give the error's size."""

import pytest
import torch

from aqnpipe.config.measured_noise import ErrorFigures
from aqnpipe.parity.compare import parity_of
from aqnpipe.parity.figures import error_figures


def made_up(figures, rows=400, channels=64, seed=0):
    """Results, errors by the formula, and sizes of inputs; one row in ten is a hundred times larger."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.exp(torch.randn(rows, generator=generator, dtype=torch.float64)) * (
        1 + 99 * (torch.arange(rows) % 10 == 0)
    )
    y = x[:, None] ** 0.5 * torch.randn(rows, channels, generator=generator, dtype=torch.float64)
    sigma = (figures.absolute**2 + (figures.per_input * x[:, None]) ** 2 + (figures.per_result * y) ** 2).sqrt()
    z = torch.randn(rows, channels, generator=generator, dtype=torch.float64)
    return y, figures.bias + figures.gain * y + sigma * z, x


@pytest.mark.parametrize(
    "figures",
    [
        ErrorFigures(absolute=0.01),
        ErrorFigures(per_input=0.001),
        ErrorFigures(per_result=0.02),
        ErrorFigures(absolute=0.02, per_input=0.01, per_result=0.05),
    ],
    ids=["absolute", "per input", "per result", "all three"],
)
def test_the_figures_of_a_made_up_error_are_found(figures):
    y, error, x = made_up(figures)
    found, rms = error_figures(y, error, x)
    size = float(error.square().mean().sqrt())
    for name in ("absolute", "per_input", "per_result"):
        wanted, got = getattr(figures, name), getattr(found, name)
        assert got == pytest.approx(wanted, rel=0.1) if wanted else got < 0.1 * max(figures.model_dump().values())
    assert rms == pytest.approx(size, rel=0.1)


def test_bias_and_gain_are_those_of_a_line_by_hand():
    y = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    found, rms = error_figures(y, 0.5 - 0.1 * y, None)
    assert (found.bias, found.gain) == pytest.approx((0.5, -0.1))
    assert found.absolute == pytest.approx(0, abs=1e-8)
    # errors 0.5, 0.4, 0.3, 0.2
    assert rms == pytest.approx(((0.25 + 0.16 + 0.09 + 0.04) / 4) ** 0.5)


def test_equal_results_have_no_error():
    assert error_figures(torch.randn(4, 4), torch.zeros(4, 4), torch.ones(4)) == (ErrorFigures(), 0.0)


def test_without_an_input_the_error_does_not_depend_on_it():
    y, error, _ = made_up(ErrorFigures(per_input=0.01))
    found, _ = error_figures(y, error, None)
    assert found.per_input == 0.0


def test_inputs_of_one_size_do_not_break_the_fit():
    y, error, _ = made_up(ErrorFigures(absolute=0.01))
    found, _ = error_figures(y, error, torch.full((len(y),), 2.0))
    assert found.absolute**2 + (2 * found.per_input) ** 2 == pytest.approx(1e-4, rel=0.1)


def test_bfloat16_rounds_every_product_and_its_figures_say_how(captured, full):
    parity = parity_of(full, captured(dtype="bfloat16", replay=full))
    products = [row for row in parity.operators if row.is_product]
    assert len(products) == 6 * 8 + 1
    for row in products:
        # Rounding to 8 bits is uniform within 2^-9 to 2^-8 of a result, by its place in the binade.
        assert 2.0**-10 / 3**0.5 < row.figures.per_result < 2.0**-8
        assert row.figures_rms == pytest.approx(row.relative_rms, rel=0.15)


def test_norms_have_figures_that_do_not_depend_on_the_size_of_their_input(captured, full):
    parity = parity_of(full, captured(dtype="bfloat16", replay=full))
    norms = [row for row in parity.operators if row.is_norm]
    assert len(norms) == 6 * 2 + 1
    for row in norms:
        assert row.figures.per_input == 0.0
        # Its weight, the normalised values and the result are rounded: sqrt(3) of one rounding at most.
        assert 2.0**-10 / 3**0.5 < row.figures.per_result < 2.0**-8
        assert row.figures_rms == pytest.approx(row.relative_rms, rel=0.15)
    assert {row.figures for row in parity.operators if not row.is_norm and not row.is_product} == {None}


def test_without_the_same_inputs_there_are_no_figures(captured, full):
    parity = parity_of(full, captured(dtype="bfloat16"))
    assert not parity.same_inputs
    assert {row.figures for row in parity.operators} == {None}


def test_norms_activations_and_sums_are_no_products(captured, full):
    parity = parity_of(full, captured(attention="sdpa", replay=full))
    assert {row.kind for row in parity.operators if not row.is_product} == {
        *("embed_tokens", "input_layernorm", "post_attention_layernorm", "norm", "rotary_q", "rotary_k"),
        *("activation", "attention_residual", "mlp_residual"),
    }
