"""The table of a receipt: sums add up, sizes have errors, and each refusal names what it is about."""

import numpy as np
import pytest
import torch

from aqnpipe.config.noise import MantissaTruncation, RelativeGaussian
from aqnpipe.errors import ReceiptError
from aqnpipe.noise.receipts.table import Row
from aqnpipe.proof.comparison import compare
from aqnpipe.proof.random_numbers import Draws
from aqnpipe.proof.receipt import MachineReceipt, cell_of
from aqnpipe.proof.recompute import Sampled
from aqnpipe.proof.request import AuditRequest

CELL = cell_of("forward", "layers.0", "mm", torch.float32)


FIVE_PERCENT = RelativeGaussian(scale=0.05)


def request(error=FIVE_PERCENT, backward=False):
    return AuditRequest(error, 0, (0, 0, 0), "forward", None, backward)


def receipt(*phases, **seen):
    made = MachineReceipt(request(backward="backward" in phases), np.random.default_rng(0))
    made.count({("forward", "mm", "noised"): 4})
    known = {"products": 2, "recomputed": 32, "found_expected": 2.0, "requested_squares": 2.0, "found_squares": 2.0}
    made.add(CELL, **known | seen)
    return made


def test_errors_in_words():
    assert request(RelativeGaussian(scale=0.05)).in_words == "relative gaussian scale 0.05"
    assert request(MantissaTruncation(mantissa_bits=4)).in_words == "mantissa truncation mantissa_bits 4"


def test_an_accepted_receipt():
    assert receipt().check().measured_scale == pytest.approx(0.05)
    assert receipt().table().row(0, named=True)["size"] == 1.0


def test_parts_of_a_cell_add_up():
    made, sums = MachineReceipt(request(None), np.random.default_rng(0)), (1.0, 2.0, 3.0)
    named = dict(zip(("found_expected", "requested_squares", "found_squares"), sums, strict=True))
    made.add(CELL, products=1, recomputed=16, wrong=1, largest_deviation=0.5, **named)
    made.add(CELL, products=2, recomputed=16, wrong=0, largest_deviation=0.9, **named)
    (seen,) = made.cells.values()
    assert (seen.products, seen.recomputed, seen.wrong, seen.largest_deviation) == (3, 32, 1, 0.9)
    assert [getattr(seen, name) for name in named] == [2.0, 4.0, 6.0]
    # Slope 1/2; residual 6 - 4/4 = 5 over 31 and 4: sqrt(5 / 31 / 4).
    assert seen.size == 0.5
    assert seen.size_error == pytest.approx((5 / 31 / 4) ** 0.5)


@pytest.mark.parametrize(("scale", "is_hidden"), [(1e-4, True), (0.05, False)])
def test_what_rounding_hides_of_an_error_is_no_other_size(scale, is_hidden):
    """Attention in bfloat16 whose one key has all the weight returns that key's value: 1e-4 of it is lost."""
    rng = np.random.default_rng(0)
    exact = torch.from_numpy(rng.standard_normal(256)).bfloat16().double().numpy()
    sampled = Sampled((np.arange(256),), (1,), exact, np.abs(exact) * 2.0**-8, exact)
    seen = compare(sampled, RelativeGaussian(scale=scale), Draws.of(1, 0, 0), torch.bfloat16)
    made = receipt()
    made.add(cell_of("forward", "layers.0", "_scaled_dot_product_flash_attention", torch.bfloat16), **seen)
    found = list(made.wrong_values("forward"))
    assert Row("forward", **seen).size == pytest.approx(0.0)
    assert bool(found) is not is_hidden


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ({"wrong": 3}, "forward: mm in layers.0 (float32): 3 of 32 recomputed values are not the requested ones"),
        ({"found_expected": 2.4, "found_squares": 2.88}, "the error found is 1.20 times the requested one"),
        (
            {"recomputed": 0, "found_expected": 0.0, "requested_squares": 0.0},
            "no result was recomputed, so nothing is proven",
        ),
    ],
)
def test_what_was_seen_is_refused(seen, message):
    with pytest.raises(ReceiptError) as found:
        receipt(**seen).check()
    assert message in str(found.value)


def test_a_size_that_is_not_well_known_is_no_contradiction():
    assert receipt(found_expected=2.4, found_squares=4.0).problems() == []
    (problem,) = receipt(found_expected=2.4, found_squares=20.0).problems()
    assert "cannot be told from rounding; found 1.20 times the requested one, with a standard error of 0.53" in problem


def test_a_phase_without_noise_escapes_and_graphs_are_refused():
    made = receipt("forward", "backward")
    made.count({("backward", "mm", "gradients"): 3, ("forward", "bmm", "captured"): 2})
    made.note_escape("x.y in layers.1", 2)
    problems = made.problems()
    assert "backward: no product had the requested error, of 3 that were seen" in problems
    assert "2 calls of x.y in layers.1 had no error" in problems
    assert any("captured into a CUDA graph" in problem for problem in problems)
    assert "backward: no product had the requested error, of 3 that were seen" not in made.forward_problems()


def test_a_receipt_is_ten_lines_and_a_notebook_has_its_table_too():
    made = receipt()
    for number in range(9):
        made.add(cell_of("forward", "layers.0", f"operator{number}", torch.float32), products=1)
    lines = str(made).splitlines()
    assert len(lines) <= 11
    assert lines[0] == "requested  relative gaussian scale 0.05, in forward"
    assert lines[-2:] == ["           and 4 more operators, in table()", "accepted"]
    assert repr(made) == str(made)
    assert "operator8" in made._repr_html_()
    made.note("a <b>problem</b>")
    assert "INVALID    a &lt;b&gt;problem" in made._repr_html_()


def test_receipts_of_processes_add_up():
    total = MachineReceipt(receipt().requested, np.random.default_rng(0))
    for _ in range(2):
        part = receipt(wrong=1)
        part.note_escape("x.y", 2)
        part.forward.passes += 3
        total.include(part.rows.values())
    assert (total.passes, total.noised, total.recomputed_numbers) == (6, 8, 64)
    assert {row.operator: row.escaped for row in total.rows.values() if row.escaped} == {"x.y": 4}
    assert [row.wrong for row in total.cells.values()] == [2]
