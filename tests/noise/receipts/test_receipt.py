"""Receipts that were edited, or that record a faulty run, are refused; correct ones pass."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from aqnpipe.config.noise import FakeQuantization, ModuleNoise, NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.errors import ReceiptError
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.kernels import error_models
from aqnpipe.noise.receipts.operator_checks import mean_problems, size_problems
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import Row
from aqnpipe.proof import comparison

NOISE = OperatorNoise(error=RelativeGaussian(scale=0.05), phases=("rollout",))


def receipt_of(model, operator_noise=NOISE, module_noise=None, forwards=4):
    spec = NoiseSpec(operator_noise=operator_noise, module_noise=module_noise)
    recorder = ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=3, num_norms=7)
    with torch.no_grad(), phase_noise(model, spec, "rollout", NoiseKey(seed=0, step=0), recorder):
        for index in range(forwards):
            model(torch.randint(2, 64, (4, 12), generator=torch.Generator().manual_seed(index)), use_cache=False)
    return recorder.receipt()


def with_cell(receipt, index=0, **changes):
    changed = receipt.cells[index]
    return with_rows(receipt, [replace(row, **changes) if row is changed else row for row in receipt.rows])


def with_phase(receipt, **changes):
    """Columns of the only phase that are others, in all of its rows together."""
    cleared = {name: type(value)() for name, value in changes.items()}
    return with_rows(receipt, [*(replace(row, **cleared) for row in receipt.rows), Row("rollout", **changes)])


def with_rows(receipt, rows):
    return receipt.model_copy(update={"rows": tuple(rows)})


def ratios(measured, rounding=0.0, count=1000):
    """Sums of errors with this root mean square, and of what rounding adds."""
    return {"measured_elements": count, "squares": count * measured**2, "rounding_squares": count * rounding**2}


@pytest.fixture
def honest(model):
    return receipt_of(model).check()


def test_a_receipt_is_shown_in_a_line_per_phase(honest):
    shown = str(honest).splitlines()
    assert shown[0] == "requested     relative_gaussian 0.05 in rollout"
    assert shown[1].startswith("rollout       4 runs, 112 calls with an error of size 0.0")
    assert shown[2:] == ["accepted"]
    refused = str(with_phase(honest, compared=0)).splitlines()
    assert refused[2:] == ["INVALID       rollout: no operator output was compared with plain torch"]


def test_a_receipt_of_a_study_has_the_same_table_and_a_notebook_view(honest):
    table = honest.table()
    assert table.columns[:5] == ["phase", "step", "layer", "operator", "passes"]
    assert {"calls", "measured_elements", "squares"} <= set(table.columns)
    assert len(table) == len(honest.rows)
    assert table["calls"].sum() == sum(cell.calls for cell in honest.cells)
    assert honest._repr_html_().startswith("<pre>requested")


def test_a_receipt_survives_its_file(honest):
    assert Receipt.model_validate_json(honest.model_dump_json()) == honest


@pytest.mark.parametrize(
    ("mean", "rounding", "accepted"),
    [
        # Of 10,000 elements with a size of 0.05, chance explains 11.26 * 0.05 / 100 = 0.00563.
        (0.0055, 0.0, True),
        (-0.0055, 0.0, True),
        (0.0058, 0.0, False),
        (-0.0058, 0.0, False),
        (math.nan, 0.0, False),
        # Rounding of this size may leave a mean of 0.0003.
        (0.0058, 0.03, True),
        (0.0061, 0.03, False),
    ],
)
def test_errors_have_no_mean_beyond_what_chance_and_rounding_explain(honest, mean, rounding, accepted):
    count = 10_000
    receipt = with_cell(honest, error_sum=mean * count, **ratios(0.05, rounding, count))
    assert [problem for problem in receipt.problems() if "has a mean" in problem] == receipt.problems()
    assert (receipt.problems() == []) is accepted


def test_chance_alone_is_no_mean_of_errors():
    """All elements of small tensors, drawn with replacement and seen twice, as under checkpointing."""
    random = np.random.default_rng(0)
    for count in (64, 256):
        errors = 0.05 * random.standard_normal((20_000, count))
        drawn = np.take_along_axis(errors, random.integers(0, count, (20_000, 2 * count)), axis=1)
        for seen in drawn:
            sums = {"error_sum": float(seen.sum()), "squares": float(np.square(seen).sum())}
            cell = Row("rollout", error=RelativeGaussian(scale=0.05), calls=1, measured_elements=2 * count, **sums)
            assert mean_problems([cell]) == []


def test_a_mean_in_the_definition_of_the_noise_is_refused_though_the_audit_agrees_with_it(model, monkeypatch):
    """Kernel and audit have the same definition: if it has a mean, each number is the expected one."""
    kernel, expected = error_models.add_relative_gaussian_, comparison.normals

    def shifted_kernel(tensor, scale, source):
        clean = tensor.clone()
        return kernel(tensor, scale, source).add_(clean, alpha=0.4 * scale)

    def shifted_numbers(elements, draws):
        numbers, error = expected(elements, draws)
        return numbers + 0.4, error

    monkeypatch.setattr(error_models, "add_relative_gaussian_", shifted_kernel)
    monkeypatch.setattr(comparison, "normals", shifted_numbers)
    (problem,) = receipt_of(model, forwards=24).problems()
    assert problem.startswith("rollout: the error has a mean of 0.0")


@pytest.mark.parametrize(
    ("measured", "rounding", "accepted"),
    [
        (0.02, None, False),
        (0.026, None, True),
        # Half a step of the format is 0.01: at least 0.04 must be left, and more than half of that is found.
        (0.021, 0.01 / math.sqrt(3), True),
        (0.019, 0.01 / math.sqrt(3), False),
        (0.0, 0.051 / math.sqrt(3), True),
    ],
)
def test_noise_may_lose_what_rounding_explains(honest, measured, rounding, accepted):
    receipt = with_cell(honest, **ratios(measured, rounding or 0.0))
    assert (receipt.problems() == []) == accepted
    if not accepted:
        with pytest.raises(ReceiptError, match=rf"measured scale {measured}, requested 0\.05, of which rounding"):
            receipt.check()


def test_a_contradiction_is_refused_in_its_own_words(honest):
    found = {"mm in model.layers.1: wrong": 3, "AQN: no noise": 1}
    with pytest.raises(ReceiptError, match=r"rollout: mm in model.layers.1: wrong \(3 times\); rol"):
        with_phase(honest, contradictions=found).check()


def test_many_contradictions_are_counted(honest):
    with pytest.raises(ReceiptError, match="rollout: 12 more contradictions"):
        with_phase(honest, contradictions={f"mm in layer {layer}": 1 for layer in range(20)}).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audited_passes": {}}, "rollout: it ran 4 times and was never audited"),
        ({"recomputed": 0}, "rollout: no number of its noise was recomputed"),
    ],
)
def test_a_phase_without_an_audit_is_refused(honest, changes, message):
    with pytest.raises(ReceiptError, match=message):
        with_phase(honest, **changes).check()


def test_a_cell_that_requests_something_else_is_refused(honest):
    """The receipt's specification is the request, not the cell's own error."""
    with pytest.raises(ReceiptError, match=r"noised with relative_gaussian 0\.1, which was not requested"):
        with_cell(honest, error=RelativeGaussian(scale=0.1)).check()


def test_a_cell_without_measurements_is_refused(honest):
    with pytest.raises(ReceiptError, match="noised calls but nothing measured"):
        with_cell(honest, **ratios(0.0, count=0)).check()


def test_a_layer_without_its_products_is_refused(honest):
    rows = [row for row in honest.rows if (row.operator, row.layer) != ("bmm", 1)]
    with pytest.raises(ReceiptError, match=r"no product of attention was noised in layers \[1\]"):
        with_rows(honest, rows).check()


def test_operator_noise_beside_module_noise_alone_is_refused(model):
    """Module noise requested in a phase does not permit operator noise in it."""
    modules = ModuleNoise(modules="linear", error=RelativeGaussian(scale=0.05))
    receipt = receipt_of(model, operator_noise=NOISE, module_noise=modules).check()
    for requested in ("operator_noise", "module_noise"):
        with pytest.raises(ReceiptError, match=r"noised with relative_gaussian 0\.05, which was not requested"):
            receipt.model_copy(update={requested: None}).check()


def test_a_reference_check_without_elements_is_refused(honest):
    with pytest.raises(ReceiptError, match="no operator output was compared"):
        with_phase(honest, compared=0).check()


def test_no_noise_requested_and_none_measured_passes(model):
    receipt = receipt_of(model, operator_noise=None).check()
    assert receipt.cells == ()
    assert receipt.phases[0].noised_share == 0.0


def test_honest_runs_are_never_refused(make_model):
    model, spec = make_model(), NoiseSpec(operator_noise=NOISE)
    for seed in range(40):
        recorder = ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=3, num_norms=7)
        with torch.no_grad(), phase_noise(model, spec, "rollout", NoiseKey(seed=seed, step=0), recorder):
            model(torch.randint(2, 64, (2, 8), generator=torch.Generator().manual_seed(seed)), use_cache=False)
        assert 0 < recorder.receipt().check().phases[0].largest_deviation < 0.5


@pytest.mark.parametrize("requested", ["operator_noise", "module_noise"])
def test_noise_for_a_phase_that_the_run_does_not_have_is_refused(model, requested):
    """Noise on the reference alone, in a training without a reference, would never be applied."""
    error = RelativeGaussian(scale=0.05)
    noise = {
        "operator_noise": OperatorNoise(error=error, phases=("reference",)),
        "module_noise": ModuleNoise(modules="linear", error=error, phases=("reference",)),
    }
    receipt = receipt_of(model, **{"operator_noise": None, requested: noise[requested]})
    with pytest.raises(ReceiptError, match="noise was requested in reference alone, which never ran"):
        receipt.check()


def test_operations_without_noise_are_refused_where_all_were_to_have_it(honest, model):
    (record,) = honest.phases
    assert record.noised_flops == record.flops
    with pytest.raises(ReceiptError, match=r"\d+ of \d+ operations of its forward passes had no noise"):
        with_phase(honest, noised_flops=record.noised_flops - record.noised_flops // 500).check()
    part = receipt_of(model, NOISE.model_copy(update={"include_lm_head": False}))
    assert part.check().phases[0].noised_share < 1


@pytest.mark.parametrize(("phase", "zeros", "problems"), [("backward", 16, 0), ("backward", 0, 1), ("rollout", 16, 1)])
def test_gradients_that_are_zero_as_they_should_be_have_no_size(phase, zeros, problems):
    error = RelativeGaussian(scale=0.05)
    cell = Row(phase, None, 1, "_softmax_backward_data", error, zeros=zeros, calls=4, elements=64)
    assert len(size_problems(cell)) == problems


@pytest.mark.parametrize(("size", "problems"), [(0.0, 1), (0.1, 0), (1.0, 1)])
def test_a_quantization_changes_results_and_by_less_than_their_size(size, problems):
    error = FakeQuantization(format="mxfp4")
    cell = Row("rollout", None, 1, "mm", error=error, calls=4, measured_elements=64, squares=64 * size**2)
    assert len(size_problems(cell)) == problems


@pytest.mark.parametrize("others_are_zero", [True, False])
def test_noise_on_gradients_that_are_all_zero_has_no_size(honest, others_are_zero):
    cell = replace(honest.cells[0], phase="backward")
    zero = replace(cell, **ratios(0.0, count=0), zeros=16)
    receipt = with_rows(honest, (zero, zero if others_are_zero else cell))
    assert (
        "backward noise has no size: all results that were recomputed are zero" in receipt.problems()
    ) == others_are_zero


@pytest.mark.parametrize(
    ("kernel", "requested", "found"),
    [("eager", "fused", "decomposed"), ("sdpa", "decomposed", "fused"), ("eager", "decomposed", None)],
)
def test_attention_of_another_form_than_requested_is_refused(make_model, kernel, requested, found):
    model = make_model(attn_implementation=kernel)
    problems = receipt_of(model, NOISE.model_copy(update={"attention": requested})).problems()
    assert any(f"expected {found}" in problem for problem in problems) == (found is not None), problems
    assert bool(problems) == (found is not None)


def test_sdpa_attention_that_torch_computes_as_two_products_has_the_noise(make_model):
    model = make_model(attn_implementation="sdpa")
    with sdpa_kernel(SDPBackend.MATH):
        receipt = receipt_of(model, NOISE.model_copy(update={"attention": "fused"})).check()
    assert {cell.operator for cell in receipt.cells} == {"mm", "bmm"}
