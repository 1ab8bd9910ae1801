"""The measured error of norms: it is put on every norm once, and the receipt refuses everything else."""

from contextlib import nullcontext

import pytest
import torch
from measured_figures import NORMS, PRODUCTS, figures_of, measured
from noisy_passes import run
from random_models import ARCHITECTURES, random_layer_norm_model_of, random_model_of

import aqnpipe
from aqnpipe.artifacts.parities import is_product
from aqnpipe.config.measured_noise import ErrorFigures, MeasuredError, OperatorError, is_norm
from aqnpipe.config.noise import AdaptiveNoise, LinearDecay, ModuleNoise, NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers, norms_outside_layers
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.audit.phase_audit import audited_backward
from aqnpipe.noise.injection import phase_state
from aqnpipe.noise.injection.operator_errors import OperatorErrors
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.parity.mapping import ModelMap


def without_norms(error):
    kept = {name: found for name, found in error.figures.items() if "norm" not in name}
    return error.model_copy(update={"figures": kept})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_without_errors_of_norms_in_the_parity_norms_have_none(make_model, ids, attention):
    model = make_model(attn_implementation=attention)
    cells = run(model, ids, without_norms(measured(model))).check().content.cells
    assert {cell.operator.rpartition(".")[2] for cell in cells} - {"scores"} == {*PRODUCTS, "lm_head"}


def test_the_error_of_a_norm_is_that_of_the_formula(model, ids):
    """On the final norm alone, whose gain is 1: the logits of its error are those of the noised hidden states."""
    nothing = {name: ErrorFigures() for name in figures_of(model)}
    figures = ErrorFigures(bias=0.5, gain=-0.25)
    with torch.no_grad():
        states = model.model(input_ids=ids).last_hidden_state
        expected = model.lm_head(states + 2 * (0.5 - 0.25 * states))
        with aqnpipe.noisy(model, error=measured(model, 2, **{**nothing, "norm": figures})) as receipt:
            found = model(input_ids=ids).logits
    receipt.check()
    assert torch.allclose(found, expected, atol=1e-4)


def test_two_norms_outside_the_layers_have_their_full_names(model, ids):
    model.model.add_module("second_norm", type(model.model.norm)(32))
    names = ["model.norm", "model.second_norm"]
    assert list(norms_outside_layers(model)) == names
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: model.model.second_norm(output))
    figures = {name: ErrorFigures(per_result=0.01 * (1 + number)) for number, name in enumerate(names)}
    error = measured(model, **figures)
    error = error.model_copy(update={"figures": {name: one for name, one in error.figures.items() if name != "norm"}})
    receipt = run(model, ids, error).check()
    assert {f"norm.{name}" for name in names} <= {c.operator for c in receipt.content.cells if c.layer is None}


@pytest.mark.parametrize(
    ("architecture", "num_norms"),
    [("qwen3", 3 * 4 + 1), ("gemma2", 3 * 4 + 1), ("stablelm", 2 * 2 + 1), ("starcoder2", 2 * 2 + 1), ("phi", 2 + 1)],
)
def test_norms_of_other_architectures_have_it(architecture, num_norms):
    """Of heads (Qwen3), behind branches and with a gain above its weight (Gemma 2), LayerNorms, parallel branches."""
    rms = architecture in ARCHITECTURES
    model = random_model_of(architecture) if rms else random_layer_norm_model_of(architecture)
    operators = [one.name for one in ModelMap(model).operators if is_product(one.kind) or is_norm(one.kind)]
    figures = {name: ErrorFigures(bias=0.001, gain=0.01, per_result=0.02) for name in operators}
    ids = torch.randint(5, 45, (2, 7), generator=torch.Generator().manual_seed(0))
    receipt = run(model, ids, MeasuredError(source="machine.json", multiple=4, figures=figures)).check()
    found = {(cell.layer, cell.operator) for cell in receipt.content.cells if cell.operator.startswith("norm.")}
    assert len(found) == num_norms


# -- training ----------------------------------------------------------------------------------------------------------


def trained(model, ids, error):
    """Return the recorder of a training step whose backward pass was audited, and the gradients."""
    spec = NoiseSpec(operator_noise=OperatorNoise(error=error, phases=("actor_forward",)))
    recorder = ReceiptRecorder(
        spec, expected_phases=("actor_forward",), num_layers=len(decoder_layers(model)), num_norms=0, seed=0
    )
    with phase_noise(model, spec, "actor_forward", NoiseKey(seed=0, step=0), recorder, backward=True):
        loss = model(input_ids=ids, labels=ids).loss
    with audited_backward(model, recorder):
        loss.backward()
    recorder.count_forward("backward")
    return recorder


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_gradients_pass_straight_through_the_error_of_a_norm(make_model, ids, use_reentrant):
    """An error of the factor 1.5 changes what follows the norm, and the gradient passes through it unchanged."""

    def prepared():
        model = make_model().train()
        if use_reentrant is not None:
            settings = {"use_reentrant": use_reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        return model

    model, reference = prepared(), prepared()
    nothing = {name: ErrorFigures() for name in figures_of(model)}
    place = "layers.1.post_attention_layernorm"
    recorder = trained(model, ids, measured(model, 1, **{**nothing, place: ErrorFigures(gain=0.5)}))
    recorder.receipt().check()
    norm = reference.model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda module, args, output: output + (0.5 * output).detach())
    reference(input_ids=ids, labels=ids).loss.backward()
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5), name
    # With the derivative of the factor itself, the gradient of this norm's weight is 1.5 times as large.
    derived = prepared()
    derived.model.layers[1].post_attention_layernorm.register_forward_hook(lambda module, args, output: 1.5 * output)
    derived(input_ids=ids, labels=ids).loss.backward()
    one, other = (each.model.layers[1].post_attention_layernorm.weight.grad for each in (model, derived))
    assert torch.allclose(other, 1.5 * one, rtol=1e-3, atol=1e-6)
    assert other.abs().max() > 1e-4


# -- sabotage: the receipt must refuse what the injection does wrong ---------------------------------------------------


def problems_of(model, ids, error=None):
    return " ".join(run(model, ids, measured(model) if error is None else error).problems())


def change_norms(monkeypatch, change):
    """Replace the hook behind norms by change(original, self, name, module, args, output)."""
    original = OperatorErrors.after_measured_norm
    monkeypatch.setattr(OperatorErrors, "after_measured_norm", lambda *found: change(original, *found))


@pytest.mark.parametrize(
    ("name", "place"), [("input_layernorm", "in layer 0"), ("norm", "outside the layers"), ("q_norm", None)]
)
def test_a_norm_left_out_is_refused(model, ids, monkeypatch, name, place):
    def left_out(original, self, found, *call):
        if found != name:
            original(self, found, *call)

    change_norms(monkeypatch, left_out)
    problems = problems_of(model, ids)
    if place is None:
        assert not problems
    else:
        assert ("norm model.norm: " if name == "norm" else f"norm {name} of model") in problems
        assert "no measured error was put on its result" in problems
        assert f"the measured error of {name} was put on nothing {place}" in problems


def test_a_norm_left_out_in_one_layer_and_pass_is_refused(model, ids, monkeypatch):
    """Its cell has other calls, so only the values show it."""

    def left_out(original, self, found, module, *call):
        if module is not model.model.layers[2].input_layernorm or self._state.forward_index:
            original(self, found, module, *call)

    change_norms(monkeypatch, left_out)
    problems = problems_of(model, ids)
    assert "norm input_layernorm of model.layers.2: no measured error was put on its result" in problems
    assert "put on nothing" not in problems


class Bypass(torch.nn.Module):
    """Runs a norm as a module over prompts, and its code alone over single tokens, where no hook sees it."""

    def __init__(self, name, norm):
        super().__init__()
        self.add_module(name, norm)
        self._call = {True: norm.forward, False: norm}

    def forward(self, states):
        return self._call[states.shape[1] == 1](states)


@pytest.mark.parametrize("name", ["post_attention_layernorm", "norm"])
def test_a_norm_that_is_not_called_in_one_kind_of_pass_is_refused(model, ids, name):
    owner = model.model if name == "norm" else model.model.layers[1]
    error = measured(model)
    setattr(owner, name, Bypass(name, getattr(owner, name)))
    found = "norm model.norm.norm: it" if name == "norm" else f"norm {name} of model.layers.1: it"
    assert f"{found} was never called" in problems_of(model, ids, error)


def test_norms_without_the_error_in_later_passes_are_named(model, ids, monkeypatch):
    """Attention then runs as a copy, in passes of which most are not audited."""

    def left_out(original, self, *call):
        if self._state.forward_index < 3:
            original(self, *call)

    change_norms(monkeypatch, left_out)
    problems = problems_of(model, ids)
    assert "calls of norms escaped the noise" in problems
    assert "matmul escaped" not in problems


def test_norms_without_a_weight_are_refused(model, ids):
    """Nothing measures them, as those of OLMo 1, so they would silently have no error."""
    error = measured(model)
    model.model.layers[1].post_attention_layernorm = torch.nn.LayerNorm(32, elementwise_affine=False)
    with pytest.raises(ModelError, match=r"1 norms have no weight \(model.layers.1.post_attention_layernorm, "):
        run(model, ids, error)


def test_a_norm_shared_by_two_layers_has_the_error_of_each(model, ids):
    first, second = model.model.layers[:2]
    second.post_attention_layernorm = first.post_attention_layernorm
    run(model, ids, measured(model)).check()


def test_the_last_norm_may_be_called_twice_and_within_a_layer(model, ids):
    """Its calls have different random numbers, and the layer goes on with its own."""
    norm, mlp = model.model.norm, model.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda module, args: (norm(args[0]),))
    run(model, ids, measured(model)).check()


@pytest.mark.parametrize("point", ["input", "output"])
def test_measured_norms_may_have_module_noise_too(model, ids, point):
    modules = ModuleNoise(modules="minimal", point=point, error=RelativeGaussian(scale=0.05))
    passed_rollout(model, ids, NoiseSpec(operator_noise=rollout_noise(model), module_noise=modules))


def test_measured_norms_may_have_aqn_on_hidden_states_too(model, ids):
    schedule = LinearDecay(sigma_start=0.05, sigma_end=0.05)
    aqn = AdaptiveNoise(schedule=schedule, targets="hidden_states")
    passed_rollout(model, ids, NoiseSpec(operator_noise=rollout_noise(model), aqn=aqn))


def rollout_noise(model):
    return OperatorNoise(error=measured(model), phases=("rollout",))


def passed_rollout(model, ids, spec):
    """Run a rollout under `spec` and check its receipt."""
    aqn = spec.aqn
    recorder = ReceiptRecorder(
        spec, expected_phases=("rollout",), num_layers=3, num_norms=7, num_steps=1, num_epochs=1, seed=0
    )
    factors = target_factors(model, aqn, None) if aqn is not None else None
    with (
        noised_rollout(model, aqn, factors, recorder, sigma=0.05, seed=0, step=0) if aqn else nullcontext() as sigmas,
        phase_noise(model, spec, "rollout", NoiseKey(seed=0, step=0), recorder, hidden_sigmas=sigmas),
        torch.no_grad(),
    ):
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    recorder.receipt().check()


def test_a_norm_left_out_in_a_recomputation_is_refused(make_model, ids, monkeypatch):
    model = make_model().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def left_out(original, self, *call):
        if not self._state.recomputing:
            original(self, *call)

    change_norms(monkeypatch, left_out)
    problems = " ".join(trained(model, ids, measured(model)).receipt().problems())
    assert "no measured error was put on its result" in problems


def test_noise_put_twice_on_a_norm_is_refused(model, ids, monkeypatch):
    def twice(original, *call):
        original(*call)
        original(*call)

    change_norms(monkeypatch, twice)
    assert "norm.input_layernorm layer 0: noised more than once" in problems_of(model, ids)


def test_the_error_of_another_norm_is_refused(model, ids, monkeypatch):
    swapped = dict(zip(NORMS, reversed(NORMS), strict=True))
    change_norms(monkeypatch, lambda original, self, name, *call: original(self, swapped.get(name, name), *call))
    assert "norm.input_layernorm layer 0: put on the result of post_attention_layernorm" in problems_of(model, ids)


def test_the_error_of_the_norm_of_another_layer_is_refused(model, ids, monkeypatch):
    error = measured(model)
    found = OperatorErrors._measured_error

    def wrong(self, errors, name):
        is_norm_of_first = self._state.place.layer == 0 and name in NORMS
        return found(self, error.in_layer(1) if is_norm_of_first else errors, name)

    monkeypatch.setattr(OperatorErrors, "_measured_error", wrong)
    assert "norm.input_layernorm layer 0: noised with OperatorError" in problems_of(model, ids, error)


@pytest.mark.parametrize("factor", [0.5, 0.99, 4])
def test_another_multiple_on_norms_is_refused(model, ids, monkeypatch, factor):
    error = measured(model)
    of_norms = [figures for name, figures in error.figures.items() if "norm" in name]
    original = phase_state.apply_error_

    def apply(tensor, one, source, input_rms=None):
        if isinstance(one, OperatorError) and one.figures in of_norms:
            one = one.model_copy(update={"multiple": factor * one.multiple})
        return original(tensor, one, source, input_rms)

    monkeypatch.setattr(phase_state, "apply_error_", apply)
    problems = problems_of(model, ids, error)
    assert "norm.input_layernorm layer 0: " in problems
    assert "not those of the requested noise (measured)" in problems
    assert "linear." not in problems


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("error", "operators", "found"),
    [
        ("measured", ("norm.",), "norm.input_layernorm layer 0"),
        ("measured", ("matmul.attention", "scaled_dot_product_attention.attention"), "attention layer 0"),
        ("relative", ("matmul", "scaled_dot_product_attention"), " layer 0"),
    ],
)
def test_noise_on_one_of_two_rows_is_refused(make_model, ids, monkeypatch, attention, error, operators, found):
    model = make_model(attn_implementation=attention)
    put_error = phase_state.PhaseState.put_error

    def on_first_row(self, phase, operator, layer, error, source, tensor, **settings):
        partial = tensor[:1] if operator.startswith(operators) else tensor
        return put_error(self, phase, operator, layer, error, source, partial, **settings)

    monkeypatch.setattr(phase_state.PhaseState, "put_error", on_first_row)
    problems = problems_of(model, ids, measured(model) if error == "measured" else RelativeGaussian(scale=0.05))
    assert f"{found}: noised in part, 32 of 64 sampled values have no noise" in problems


def test_noise_on_a_copy_that_nothing_reads_is_refused(model, ids, monkeypatch):
    def copied(original, self, name, module, args, output):
        original(self, name, module, args, output.clone())

    change_norms(monkeypatch, copied)
    assert "no measured error was put on its result" in problems_of(model, ids)


def test_noise_on_the_input_of_a_norm_is_refused(model, ids, monkeypatch):
    def on_input(original, self, name, module, args, output):
        original(self, name, module, args, args[0])

    change_norms(monkeypatch, on_input)
    assert "no measured error was put on its result" in problems_of(model, ids)


def test_a_hook_that_takes_the_noise_off_again_is_refused(model, ids):
    norm = model.model.layers[1].input_layernorm
    with aqnpipe.noisy(model, error=measured(model)) as receipt, torch.no_grad():
        clean = type(norm).forward
        handle = norm.register_forward_hook(lambda module, args, output: clean(module, args[0]))
        model(input_ids=ids)
        handle.remove()
    assert "the noised values were never used" in " ".join(receipt.problems())


def test_a_norm_that_the_parity_lacks_is_refused(model, ids):
    figures = figures_of(model)
    del figures["layers.1.input_layernorm"]
    error = measured(model).model_copy(update={"figures": figures})
    with pytest.raises(ModelError, match="layer 1: the parity of the measured error has no operator input_layernorm"):
        run(model, ids, error)
