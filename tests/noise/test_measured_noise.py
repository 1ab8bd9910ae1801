"""Noise calibrated to a measured machine: it is what was measured, and its receipt refuses everything else."""

from dataclasses import replace

import pytest
import torch
from measured_figures import NORMS, OPERATORS, OUTSIDE, figures_of, measured
from noisy_passes import run

import aqnpipe
from aqnpipe.config.measured_noise import ErrorFigures, LayerErrors, MeasuredError, OperatorError
from aqnpipe.config.noise import OperatorNoise
from aqnpipe.errors import ConfigError, ModelError
from aqnpipe.machine import machine
from aqnpipe.models.layout import decoder_layers
from aqnpipe.noise.receipts.receipt import Receipt


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("multiple", [1, 16])
def test_every_operator_has_its_own_measured_error(make_model, ids, attention, multiple):
    model = make_model(attn_implementation=attention)
    receipt = run(model, ids, measured(model, multiple)).check()
    cells = {(cell.layer, cell.operator.rpartition(".")[2]): cell for cell in receipt.content.cells}
    wanted = {(layer, name) for layer in range(len(decoder_layers(model))) for name in OPERATORS}
    wanted |= {(None, name) for name in OUTSIDE}
    assert wanted == {place for place, cell in cells.items() if cell.requested}
    assert {cells[place].requested for place in wanted} == {multiple}
    # In units of the measured machine, over all operators.
    size, elements = receipt.content.measured_scale("evaluation")
    assert elements > 1000
    assert size == pytest.approx(multiple, rel=5 / (2 * elements) ** 0.5)


def test_only_the_layers_asked_for_have_it(model, ids):
    receipt = run(model, ids, measured(model), layers=[1], include_lm_head=False).check()
    assert {cell.layer for cell in receipt.content.cells} == {1}
    assert {cell.operator for cell in receipt.content.cells} >= {f"norm.{name}" for name in NORMS}


def test_an_operator_without_a_measured_error_is_not_changed(model, ids):
    nothing = {f"layers.{layer}.o_proj": ErrorFigures() for layer in range(len(decoder_layers(model)))}
    receipt = run(model, ids, measured(model, **nothing)).check()
    assert {cell.requested for cell in receipt.content.cells if cell.operator == "mm.o_proj"} == {0.0}


def test_a_copy_with_another_multiple_has_that_multiple(model, ids):
    """Also a copy of an error that was used before, whose errors by layer are made once."""
    error = measured(model)
    run(model, ids, error).check()
    cells = run(model, ids, error.model_copy(update={"multiple": 16.0})).check().content.cells
    assert {cell.requested for cell in cells if cell.requested} == {16.0}


def test_training_has_it_in_the_forward_pass_and_exact_gradients(model, ids):
    from aqnpipe.config.noise import NoiseSpec
    from aqnpipe.machine.machine import NoiseKey
    from aqnpipe.noise.injection.phase import phase_noise
    from aqnpipe.noise.receipts.recorder import ReceiptRecorder

    noise = OperatorNoise(error=measured(model, 4), phases=("actor_forward",))
    spec = NoiseSpec(operator_noise=noise)
    recorder = ReceiptRecorder(
        spec, expected_phases=("actor_forward",), num_layers=len(decoder_layers(model)), num_norms=0, seed=0
    )
    with phase_noise(model, spec, "actor_forward", NoiseKey(seed=0, step=0), recorder, backward=True):
        model(input_ids=ids, labels=ids).loss.backward()
    recorder.receipt().check()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_checkpointed_layers_replay_it_operator_by_operator(make_model, ids, attention, use_reentrant):
    gradients = []
    for checkpointed in (False, True):
        model = make_model(attn_implementation=attention).train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        with aqnpipe.noisy(model, error=measured(model, 4)) as receipt:
            model(input_ids=ids, labels=ids).loss.backward()
        receipt.check()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, replayed) for plain, replayed in zip(*gradients, strict=True))


# -- sabotage: the receipt must refuse what the injection does wrong ---------------------------------------------------


def problems_of(model, ids, error):
    return " ".join(run(model, ids, error).problems())


def change_applied(monkeypatch, change):
    """Put another error on tensors than the machine claims."""
    apply = machine.apply_error_
    monkeypatch.setattr(machine, "apply_error_", lambda values, *others: apply(values, *change(*others)))


@pytest.mark.parametrize("factor", [0, 0.5, 0.99, 1.01, 4])
def test_another_multiple_is_refused(model, ids, monkeypatch, factor):
    def change(error, *others):
        return error.model_copy(update={"multiple": factor * error.multiple}), *others

    change_applied(monkeypatch, change)
    assert "recomputed values are not the requested ones" in problems_of(model, ids, measured(model))


@pytest.mark.parametrize("figure", list(ErrorFigures.model_fields))
def test_each_figure_is_checked(model, ids, monkeypatch, figure):
    def change(error, *others):
        return error.model_copy(update={"figures": error.figures.model_copy(update={figure: 0.0})}), *others

    change_applied(monkeypatch, change)
    assert "recomputed values are not the requested ones" in problems_of(model, ids, measured(model))


def test_numbers_of_another_key_are_refused(model, ids, monkeypatch):
    change_applied(monkeypatch, lambda error, source, *others: (error, source._replace(call=9), *others))
    assert "recomputed values are not the requested ones" in problems_of(model, ids, measured(model))


def test_a_wrong_size_of_the_input_is_refused(model, ids, monkeypatch):
    monkeypatch.setattr(machine, "root_mean_squares", lambda inputs: torch.ones(*inputs.shape[:-1], 1))
    assert "mm.q_proj in model.layers.0 (float32): " in problems_of(model, ids, measured(model))


def test_the_figures_of_another_layer_are_refused(model, ids, monkeypatch):
    error = measured(model)
    error_at = machine.Request.error_at
    monkeypatch.setattr(
        machine.Request, "error_at", lambda self, part: error.in_layer(1) if part == 0 else error_at(self, part)
    )
    found = problems_of(model, ids, error)
    assert "mm.q_proj in model.layers.0 (float32): " in found
    assert "model.layers.1" not in found


@pytest.mark.parametrize(
    ("one", "other", "operator"), [("q_proj", "o_proj", "mm"), ("scores", "attention", "bmm")], ids=["linear", "eager"]
)
def test_the_figures_of_another_operator_are_refused(make_model, ids, monkeypatch, one, other, operator):
    model, measured_name = make_model(attn_implementation="eager"), machine.measured_name

    def swapped(called, errors, places, here):
        name, error = measured_name(called, errors, places, here)
        found = {one: other, other: one}.get(name.partition(".")[2])
        return (f"{called}.{found}", errors.operators[found]) if found else (name, error)

    monkeypatch.setattr(machine, "measured_name", swapped)
    found = problems_of(model, ids, measured(model))
    assert f"{operator}.{other} in model.layers.0 (float32): " in found
    assert "gate_proj" not in found


def test_an_operator_left_out_is_refused(model, ids, monkeypatch):
    on_result = machine.Machine._on_result

    def skip(self, operator, result, *others):
        is_skipped = self.places.local.names[-1:] == ["up_proj"]
        return result if is_skipped else on_result(self, operator, result, *others)

    monkeypatch.setattr(machine.Machine, "_on_result", skip)
    found = problems_of(model, ids, measured(model))
    assert "the measured error of up_proj was put on nothing in layer 0" in found


def test_an_edited_receipt_is_refused(model, ids):
    receipt = run(model, ids, measured(model, 4)).content

    def problems(change):
        rows = tuple(change(row) if row.error else row for row in receipt.rows)
        return " ".join(Receipt(**{**dict(receipt), "rows": rows}).problems())

    assert not problems(lambda cell: cell)
    assert "noised with measured 8" in problems(
        lambda cell: replace(cell, error=cell.error.model_copy(update={"multiple": 8.0}))
    )
    assert "of which rounding to the number format explains" in problems(
        lambda cell: replace(cell, squares=1.9**2 * cell.measured_elements)
    )


# -- what is refused before anything runs ------------------------------------------------------------------------------


def test_operators_and_phases_that_no_parity_measures_are_refused(model):
    with pytest.raises(ValueError, match="expected operators: matmul"):
        OperatorNoise(error=measured(model), operators="all", phases=("rollout",))
    with pytest.raises(ValueError, match="measures forward passes only"):
        OperatorNoise(error=measured(model))
    with pytest.raises(ConfigError, match="forward passes"), aqnpipe.noisy(model, error=measured(model), backward=True):
        pass


def test_figures_of_no_operator_are_refused(model, ids):
    with pytest.raises(ModelError, match="the parity of the measured error has no operator"):
        run(model, ids, MeasuredError(source="machine.json", figures={}))


def test_layers_without_any_measured_error_are_refused(model, ids):
    nothing = {f"layers.1.{name}": ErrorFigures() for name in OPERATORS}
    receipt = run(model, ids, measured(model, **nothing), layers=[1], include_lm_head=False)
    assert receipt.problems() == [
        "evaluation: the measured error is zero in all requested layers, expected layers in which the machine has an "
        "error"
    ]
    run(model, ids, measured(model, **nothing), layers=[0, 1], include_lm_head=False).check()


def test_an_operator_that_the_parity_lacks_is_refused(model, ids):
    figures = figures_of(model)
    del figures["layers.0.gate_proj"]
    error = MeasuredError(source="machine.json", figures=figures)
    with pytest.raises(ModelError, match="layer 0: the parity of the measured error has no operator gate_proj"):
        run(model, ids, error)


def test_errors_are_by_layer_and_the_scores_have_none(model):
    error = measured(model, 2)
    found = error.in_layer(0)
    assert isinstance(found, LayerErrors)
    assert found.operators["scores"] == OperatorError(multiple=2, figures=ErrorFigures())
    assert found.operators["q_proj"].figures == error.figures["layers.0.q_proj"]
    assert set(error.in_layer(None).operators) == {"lm_head", "norm"}
