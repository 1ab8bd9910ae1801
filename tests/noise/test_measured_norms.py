"""The measured error of norms: it is put on every norm once, and the receipt refuses everything else."""

from contextlib import nullcontext

import pytest
import torch
from measured_figures import NORMS, PRODUCTS, figures_of, measured
from noisy_passes import run
from on_modules import on_modules
from random_models import ARCHITECTURES, random_layer_norm_model_of, random_model_of

import aqnpipe
from aqnpipe.artifacts.parities import is_product
from aqnpipe.config.measured_noise import ErrorFigures, MeasuredError, is_norm
from aqnpipe.config.noise import AdaptiveNoise, LinearDecay, ModuleNoise, NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.errors import ModelError
from aqnpipe.machine import machine
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.machine.norms import NormKernels
from aqnpipe.models.layout import decoder_layers, norms_outside_layers
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.parity.mapping import ModelTaps


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
    operators = [one.name for one in ModelTaps(model).operators if is_product(one.kind) or is_norm(one.kind)]
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
        model(input_ids=ids, labels=ids).loss.backward()
    recorder.add("backward", passes=1)
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
    """Replace the hook behind norms by change(original, self, module, args, output)."""
    original = NormKernels._after
    monkeypatch.setattr(NormKernels, "_after", lambda *call: change(original, *call))


@pytest.mark.parametrize(
    ("name", "place", "nothing"),
    [("input_layernorm", "model.layers.0", "in layer 0"), ("norm", "no layer", "outside the layers")],
)
def test_a_norm_left_out_is_refused(model, ids, monkeypatch, name, place, nothing):
    chosen = {module for path, module in model.named_modules() if path.rpartition(".")[2] == name}

    def left_out(original, self, module, args, output):
        return output if module in chosen else original(self, module, args, output)

    change_norms(monkeypatch, left_out)
    problems = problems_of(model, ids)
    assert f"calls of a norm in {place} had no" in problems
    assert f"the measured error of {name} was put on nothing {nothing}" in problems


def test_a_norm_left_out_in_one_layer_and_pass_is_refused(model, ids, monkeypatch):
    """Its cell has other calls, so only the audit shows it."""
    calls = []

    def left_out(original, self, module, args, output):
        is_chosen = module is model.model.layers[2].input_layernorm
        calls.extend([1] * is_chosen)
        return output if is_chosen and len(calls) == 1 else original(self, module, args, output)

    change_norms(monkeypatch, left_out)
    problems = problems_of(model, ids)
    assert "1 calls of a norm in model.layers.2 had no" in problems
    assert "put on nothing" not in problems


def test_norms_without_the_error_in_later_passes_are_refused(model, ids, monkeypatch):
    """Most of those passes are not audited."""
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    change_norms(monkeypatch, lambda original, *call: call[-1] if len(passes) > 3 else original(*call))
    with on_modules(model, error=measured(model)) as receipt, torch.no_grad():
        model.generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=0)
    assert "calls of a norm in model.layers." in " ".join(receipt.problems())


class Bypass(torch.nn.Module):
    """Runs a norm as a module over prompts, and its code alone over single tokens, where no hook sees it."""

    def __init__(self, name, norm):
        super().__init__()
        self.add_module(name, norm)
        self._call = {True: norm.forward, False: norm}

    def forward(self, states):
        return self._call[states.shape[1] == 1](states)


@pytest.mark.parametrize(
    ("name", "where"), [("post_attention_layernorm", "model.layers.1"), ("norm", "no layer")], ids=["layer", "last"]
)
def test_a_norm_that_is_not_called_in_one_kind_of_pass_is_refused(model, ids, name, where):
    owner, error = model.model if name == "norm" else model.model.layers[1], measured(model)
    setattr(owner, name, Bypass(name, getattr(owner, name)))
    assert f"a norm in {where} was never called" in problems_of(model, ids, error)


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

    def left_out(original, self, module, args, output):
        is_again = torch._C._current_autograd_node() is not None
        return output if is_again else original(self, module, args, output)

    change_norms(monkeypatch, left_out)
    problems = " ".join(trained(model, ids, measured(model)).receipt().problems())
    assert "calls of a norm in model.layers." in problems


def _twice(original, self, module, args, output):
    return original(self, module, args, original(self, module, args, output))


def _on_the_input(original, self, module, args, output):
    return original(self, module, args, args[0])


def _on_a_copy(original, self, module, args, output):
    original(self, module, args, output)
    return output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_twice, "a norm in model.layers.0 has its error 2 times"),
        (_on_the_input, "a norm in model.layers.0 has an error that is not on its result"),
        (
            _on_a_copy,
            "a norm in model.layers.0 has an error that is not on its result, or that the program does not use",
        ),
    ],
)
def test_an_error_that_is_not_that_of_the_norm_is_refused(model, ids, monkeypatch, change, words):
    change_norms(monkeypatch, change)
    assert words in problems_of(model, ids)


def test_a_hook_that_takes_the_noise_off_again_is_refused(model, ids):
    norm = model.model.layers[1].input_layernorm
    with on_modules(model, error=measured(model)) as receipt, torch.no_grad():
        clean = type(norm).forward
        norm.register_forward_hook(lambda module, args, output: clean(module, args[0]))
        model(input_ids=ids)
    assert "a norm in model.layers.1 has an error that is not on its result" in " ".join(receipt.problems())


def test_the_error_of_another_norm_is_refused(model, ids, monkeypatch):
    swapped, measured_name = dict(zip(NORMS, reversed(NORMS), strict=True)), machine.measured_name

    def wrong(called, errors, places, here):
        name, error = measured_name(called, errors, places, here)
        found = swapped.get(name.partition(".")[2])
        return (f"norm.{found}", errors.operators[found]) if found else (name, error)

    monkeypatch.setattr(machine, "measured_name", wrong)
    assert "norm.post_attention_layernorm in model.layers.0 (float32): " in problems_of(model, ids)


@pytest.mark.parametrize("wrong", ["another layer", 0.5, 0.99, 4])
def test_another_error_on_norms_is_refused(model, ids, monkeypatch, wrong):
    error = measured(model)
    of_norms = {figures: name for name, figures in error.figures.items() if "norm" in name}
    apply = machine.apply_error_

    def other(values, one, *others):
        if one.figures in of_norms and wrong == "another layer":
            one = one.model_copy(
                update={"figures": error.figures[of_norms[one.figures].replace("layers.0", "layers.1")]}
            )
        elif one.figures in of_norms:
            one = one.model_copy(update={"multiple": wrong * one.multiple})
        return apply(values, one, *others)

    monkeypatch.setattr(machine, "apply_error_", other)
    problems = problems_of(model, ids, error)
    assert "norm.input_layernorm in model.layers.0 (float32): " in problems
    assert "recomputed values are not the requested ones" in problems
    assert "mm." not in problems


def test_noise_on_one_of_two_rows_of_a_norm_is_refused(model, ids, monkeypatch):
    on_result = machine.Machine._on_result

    def in_part(self, operator, result, *others):
        exact = result.clone()
        noised = on_result(self, operator, result, *others)
        if operator == "norm":
            noised[0] = exact[0]
        return noised

    monkeypatch.setattr(machine.Machine, "_on_result", in_part)
    problems = problems_of(model, ids)
    assert "norm.input_layernorm in model.layers.0 (float32): " in problems
    assert "mm." not in problems


def test_a_norm_that_the_parity_lacks_is_refused(model, ids):
    figures = figures_of(model)
    del figures["layers.1.input_layernorm"]
    error = measured(model).model_copy(update={"figures": figures})
    with pytest.raises(ModelError, match="layer 1: the parity of the measured error has no operator input_layernorm"):
        run(model, ids, error)
