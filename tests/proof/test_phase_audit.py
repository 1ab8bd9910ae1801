"""The audit of a phase: honest noise passes in every kind of pass, and what a developer could break is refused.

The sabotages of a whole study are in tests/attacks; these are the ones that need a single phase.
"""

import pytest
import torch
from torch import nn

from aqnpipe.config.noise import (
    AdaptiveNoise,
    ConstantSigma,
    FakeQuantization,
    ModuleNoise,
    NoiseSpec,
    OperatorNoise,
    RelativeGaussian,
)
from aqnpipe.errors import ReceiptError
from aqnpipe.machine import machine, modules, quantized
from aqnpipe.machine.machine import Machine, NoiseKey
from aqnpipe.machine.modules import ModuleErrors
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.kernels.gaussian import NoiseStream, add_relative_gaussian_
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.proof import audit

FIVE_PERCENT = RelativeGaussian(scale=0.05)
NOISE = OperatorNoise(error=FIVE_PERCENT, phases=("rollout", "actor_forward", "backward"))
KEY = NoiseKey(seed=3, step=2)
TOKENS = torch.randint(2, 64, (3, 10), generator=torch.Generator().manual_seed(0))
NOT_REQUESTED = "recomputed values are not the requested ones"


def recorder_of(spec, **kwargs):
    return ReceiptRecorder(spec, expected_phases=(), num_layers=3, num_norms=7, **kwargs)


def generate(model, noise=NOISE, modules=None, key=KEY, forwards=40, recorder=None):
    """Read prompts and then tokens one by one; return the receipt."""
    spec = NoiseSpec(operator_noise=noise, module_noise=modules)
    recorder = recorder_of(spec) if recorder is None else recorder
    with torch.no_grad(), phase_noise(model, spec, "rollout", key, recorder):
        cache = model(TOKENS, use_cache=True).past_key_values
        for _ in range(forwards):
            cache = model(TOKENS[:, :1], past_key_values=cache, use_cache=True).past_key_values
    return recorder.receipt()


def step(model, noise=NOISE, key=KEY):
    """Run a forward and a backward pass; return the receipt."""
    spec = NoiseSpec(operator_noise=noise)
    recorder = recorder_of(spec)
    model.zero_grad()
    with phase_noise(model, spec, "actor_forward", key, recorder, backward=True):
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    recorder.count_backward(key.step)
    return recorder.receipt()


def replace(monkeypatch, owner, name, function):
    """Replace `owner.name` by `function`, which gets the original as its first argument."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))


@pytest.mark.parametrize("operators", ["matmul", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_honest_noise_passes_in_every_kind_of_pass(make_model, operators, dtype):
    model = make_model().to(dtype)
    noise = NOISE.model_copy(update={"operators": operators})
    rollout = generate(model, noise).check().phases[0]
    # 16 of each of 28 products in two whole passes, and single layers drawn at random.
    assert rollout.recomputed > 2 * 16 * 28 + 5 * 16 * 9
    records = {record.phase: record for record in step(model, noise).check().phases}
    # Both factors of 9 products in 3 layers and of the output projection.
    assert records["backward"].recomputed >= 16 * 2 * (9 * 3 + 1)


def test_what_is_audited_depends_on_the_key_and_not_on_the_model_alone(model):
    records = [generate(model, key=NoiseKey(seed=seed, step=0)).phases[0] for seed in range(6)]
    assert len({record.recomputed for record in records}) > 1
    assert generate(model, key=NoiseKey(seed=0, step=0)).phases[0] == records[0]


@pytest.mark.parametrize("noise", [None, NOISE, NOISE.model_copy(update={"operators": "all"})])
def test_an_audit_changes_no_bit(make_model, monkeypatch, noise):
    def computed():
        model = make_model()
        step(model, noise)
        spec = NoiseSpec(operator_noise=noise)
        with torch.no_grad(), phase_noise(model, spec, "rollout", KEY, recorder_of(spec)):
            return [model(TOKENS).logits, *(weight.grad for weight in model.parameters())]

    audited = computed()
    monkeypatch.setattr(audit.Audit, "enter", lambda *_: None)
    assert all(torch.equal(*pair) for pair in zip(audited, computed(), strict=True))


def _clean_where(is_clean):
    """Every product is counted, and those stay exact for which `is_clean(machine, result)`."""

    def on_result(original, self, operator, result, *others):
        exact = result.clone()
        noised = original(self, operator, result, *others)
        return noised.copy_(exact) if is_clean(self, exact) else noised

    return Machine, "_on_result", on_result, NOT_REQUESTED


def _on_some_rows(is_linear):
    """Rows of a matrix, or the heads of one sequence."""

    def on_result(original, self, operator, result, *others):
        exact = result.clone()
        noised = original(self, operator, result, *others)
        if (operator == "mm") == is_linear:
            noised[: len(noised) // 2] = exact[: len(noised) // 2]
        return noised

    return Machine, "_on_result", on_result, NOT_REQUESTED


def _scaled(times):
    def scaled(original, values, error, source):
        original(values, error.model_copy(update={"scale": times * error.scale}), source)

    return machine, "apply_error_", scaled, rf"mm in .*whose error is {times:.2f} times the requested one"


def _keyed(derived):
    return NoiseKey, "derived", derived, NOT_REQUESTED


def _on_a_copy(original, values, *others):
    original(values.clone(), *others)


def _twice(original, *call):
    original(*call)
    original(*call)


SABOTAGES = {
    "key without the step": _keyed(lambda derived, key, *of: derived(key._replace(step=0), *of)),
    "key without the seed": _keyed(lambda derived, key, *of: derived(key._replace(seed=0), *of)),
    "key without the layer": _keyed(lambda derived, key, stream, passed, part: derived(key, stream, passed, 0)),
    "key without the pass": _keyed(lambda derived, key, stream, passed, part: derived(key, stream, 0, part)),
    "key without the phase": _keyed(lambda derived, key, stream, *of: derived(key, "noise", *of)),
    "call": (Machine, "_source", lambda source, *args: source(*args)._replace(call=1), NOT_REQUESTED),
    "decoding clean": _clean_where(lambda self, result: result.shape[-2] == len(TOKENS)),
    "prompt clean": _clean_where(lambda self, result: result.shape[-2] > len(TOKENS)),
    "every second forward clean": _clean_where(lambda self, result: self.places.local.passed % 2 == 1),
    "all but two forwards clean": _clean_where(lambda self, result: self.places.local.passed > 1),
    "one projection clean": _clean_where(
        lambda self, result: self.places.local.here.part == 1 and self.places.local.here.calls == 3
    ),
    "all clean": _clean_where(lambda self, result: True),
    "on a copy": (machine, "apply_error_", _on_a_copy, f"{NOT_REQUESTED}: they have no error"),
    "half": _scaled(0.5),
    "a tenth more": _scaled(1.1),
    "twice": (machine, "apply_error_", _twice, NOT_REQUESTED),
    "some rows of linear modules": _on_some_rows(True),
    "some heads": _on_some_rows(False),
}


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_other_noise_on_results_is_refused(model, monkeypatch, sabotage):
    *replaced, words = SABOTAGES[sabotage]
    replace(monkeypatch, *replaced)
    with pytest.raises(ReceiptError, match=words):
        generate(model).check()


@pytest.mark.parametrize("is_linear", [True, False])
def test_noise_on_some_rows_beside_fused_attention_is_refused(make_model, monkeypatch, is_linear):
    model = make_model(attn_implementation="sdpa")
    replace(monkeypatch, *_on_some_rows(is_linear)[:3])
    with pytest.raises(ReceiptError, match=NOT_REQUESTED):
        generate(model, NOISE.model_copy(update={"attention": "fused"})).check()


def _exchanged(original, *args):
    found = original(*args)
    return found._replace(stream=3 - found.stream)


def _one_factor(only):
    def is_clean(self, result):
        return self._where()[1] and self.places.local.nth == only - 1

    return _clean_where(is_clean)[:3]


@pytest.mark.parametrize(
    "sabotage", [(Machine, "_gradient_source", _exchanged), _one_factor(1), _one_factor(2)], ids=["exchanged", "1", "2"]
)
def test_other_noise_on_the_gradients_of_factors_is_refused(model, monkeypatch, sabotage):
    replace(monkeypatch, *sabotage)
    with pytest.raises(ReceiptError, match=rf"backward: (mm|bmm) in .*{NOT_REQUESTED}"):
        step(model).check()


def test_noise_where_none_was_requested_is_refused(model, monkeypatch):
    """In another layer, and in the backward pass."""
    replace(monkeypatch, machine.Request, "error_at", lambda original, self, part: FIVE_PERCENT)
    with pytest.raises(ReceiptError, match=r" layer 1: noised with relative_gaussian 0\.05, which was not"):
        generate(model, NOISE.model_copy(update={"layers": (0, 2)})).check()
    forward_only = NOISE.model_copy(update={"phases": ("actor_forward",)})
    monkeypatch.undo()
    step(model, forward_only).check()
    monkeypatch.setattr(
        "aqnpipe.noise.injection.phase.Machine",
        lambda request, *others: Machine(request._replace(backward=True), *others),
    )
    with pytest.raises(ReceiptError, match=r"backward \w+ layer 0: noised with relative_gaussian 0\.05"):
        step(model, forward_only).check()


def test_gradients_changed_behind_the_receipt_are_refused(model):
    """The values are changed in place, where no noise on gradients was requested."""
    forward_only = NOISE.model_copy(update={"phases": ("actor_forward",)})
    projection = model.model.layers[1].mlp.up_proj
    mm = torch.library.get_kernel("aten::mm", "CPU").call_boxed
    is_on = []

    def disturbed(keys, first, second):
        found = mm(keys, first, second)
        return add_relative_gaussian_(found, 0.05, NoiseStream(1)) if is_on else found

    library = torch.library.Library("aten", "IMPL")
    projection.register_full_backward_pre_hook(lambda *_: is_on.append(1))
    try:
        library.impl("mm", disturbed, "CPU", with_keyset=True, allow_override=True)
        with pytest.raises(ReceiptError, match=r"backward: mm in .*values are not exact, no noise was requested"):
            step(model, forward_only).check()
    finally:
        library._destroy()


@pytest.mark.parametrize("noise", [None, NOISE.model_copy(update={"layers": (0, 2)})], ids=["no noise", "other layers"])
@pytest.mark.parametrize("how", ["hook", "in place", "another output", "another kernel"])
def test_layers_without_noise_must_be_exact(model, noise, how):
    """Something of an earlier run still changes a layer's products."""
    projection, library = model.model.layers[1].mlp.up_proj, None
    forward = projection.forward
    if how == "hook":
        projection.register_forward_hook(lambda module, args, output: (output.mul_(1 + 1e-3), None)[1])
    elif how == "in place":
        projection.forward = lambda x: forward(x).mul_(1 + 1e-3)
    elif how == "another output":
        projection.forward = lambda x: forward(x) * (1 + 1e-3)
    else:
        mm = torch.library.get_kernel("aten::mm", "CPU").call_boxed
        library = torch.library.Library("aten", "IMPL")
        library.impl("mm", lambda *args: mm(*args).mul_(1 + 1e-3), "CPU", with_keyset=True, allow_override=True)
    try:
        problems = generate(model, noise).problems()
    finally:
        if library is not None:
            library._destroy()
    words = {
        "another output": "up_proj is not the result of its product",
        "another kernel": "values are not exact, no noise was requested",
    }
    found = words.get(how, "up_proj was changed in place behind its product")
    assert any(found in problem for problem in problems), problems


def test_the_key_must_be_that_of_the_run(model):
    spec = NoiseSpec(operator_noise=NOISE)
    recorder = recorder_of(spec, seed=3)
    recorder.begin_step(5)
    with pytest.raises(ReceiptError, match="rollout: the noise is keyed by step 2 at step 5"):
        generate(model, recorder=recorder).check()
    recorder = recorder_of(spec, seed=4)
    with pytest.raises(ReceiptError, match="rollout: the noise is keyed by seed 3, requested 4"):
        generate(model, recorder=recorder).check()


def test_a_key_may_occur_only_once(model):
    recorder = recorder_of(NoiseSpec(operator_noise=NOISE))
    generate(model, recorder=recorder).check()
    with pytest.raises(ReceiptError, match="rollout: the key of its noise is used twice"):
        generate(model, recorder=recorder).check()


def test_a_softmax_without_noise_is_refused_where_all_operators_have_it(model, monkeypatch):
    def left_out(original, self, operator, result, *others):
        return result if operator == "_softmax" else original(self, operator, result, *others)

    replace(monkeypatch, Machine, "_on_result", left_out)
    with pytest.raises(ReceiptError, match=rf"_softmax in model\.layers\.0 .*{NOT_REQUESTED}"):
        generate(model, NOISE.model_copy(update={"operators": "all"})).check()


@pytest.mark.parametrize("wrong", ["clean", "scale", pytest.param("call", marks=pytest.mark.slow)])
def test_weights_that_are_not_quantized_as_requested_are_refused(make_model, monkeypatch, wrong):
    """The operands are recorded, and the product is computed with other ones."""
    model = make_model(intermediate_size=64)
    noise = OperatorNoise(error=FakeQuantization(format="mxfp4"), phases=("rollout",))
    generate(model, noise).check()
    wrongs = {
        "clean": lambda original, error, tensor, *others, **kind: tensor,
        "scale": lambda original, error, tensor, *others, **kind: original(error, tensor, *others, **kind) * 1.01,
        "call": lambda original, error, tensor, *others, **kind: original(
            error.model_copy(update={"format": "nvfp4"}), tensor, *others, **kind
        ),
    }
    replace(monkeypatch, quantized, "_rounded", wrongs[wrong])
    with pytest.raises(ReceiptError, match=rf"mm in .*{NOT_REQUESTED}"):
        generate(model, noise).check()


# -- modules and hidden states -----------------------------------------------------------------------------------------


def hidden_states_receipt(model):
    """Return the receipt of a rollout with AQN on hidden states."""
    aqn = AdaptiveNoise(schedule=ConstantSigma(sigma=0.1), targets="hidden_states")
    spec = NoiseSpec(aqn=aqn)
    recorder = recorder_of(spec, num_steps=1, num_epochs=1)
    factors, key = target_factors(model, aqn, None), NoiseKey(seed=0, step=0)
    with (
        torch.no_grad(),
        noised_rollout(model, aqn, factors, recorder, sigma=0.1, seed=0, step=0) as sigmas,
        phase_noise(model, spec, "rollout", key, recorder, hidden_sigmas=sigmas),
    ):
        cache = model(TOKENS, use_cache=True).past_key_values
        model(TOKENS[:, :1], past_key_values=cache, use_cache=True)
    return recorder.receipt()


def test_noise_on_hidden_states_passes(model):
    assert hidden_states_receipt(model).check().phases[0].recomputed >= 2 * 3 * 16


UNSEEN = ("input", "its result unused")

PUT = {
    "one left out": (lambda put, self, place, exact: exact if place % 2 else put(self, place, exact), "no noise"),
    "decoding left out": (
        lambda put, self, place, exact: exact if exact.shape[1] == 1 else put(self, place, exact),
        "no noise",
    ),
    "its result unused": (
        lambda put, self, place, exact: (put(self, place, exact), exact + 0)[1],
        "noise, and the program goes on with other values",
    ),
    "twice": (lambda put, self, place, exact: put(self, place, put(self, place, exact)), "noise 2 times"),
}


@pytest.mark.parametrize(
    ("where", "wrong"),
    # What a module makes of its input is not followed.
    [(where, wrong) for where in ("hidden states", "output", "input") for wrong in PUT if (where, wrong) != UNSEEN],
)
def test_module_noise_that_is_left_out_or_unused_or_doubled_is_refused(model, monkeypatch, where, wrong):
    sabotage, words = PUT[wrong]
    replace(monkeypatch, ModuleErrors, "put", sabotage)
    if where == "hidden states":
        with pytest.raises(ReceiptError, match=rf"AQN: the hidden states of layer \d: aqn.hidden has {words}"):
            hidden_states_receipt(model).check()
        return
    noise = ModuleNoise(modules="linear", error=FIVE_PERCENT, phases=("rollout",), point=where)
    with pytest.raises(ReceiptError, match=rf"module model.layers.\d.*: module.\w+ has {words}"):
        generate(model, noise=None, modules=noise, forwards=3).check()


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        *((where, wrong) for where in ("hidden states", "modules") for wrong in ("clean", "in part", "scale", "call")),
        ("hidden states", "place"),
    ],
)
def test_another_error_on_modules_is_refused(model, monkeypatch, where, wrong):
    def kernel(original, self, exact, place):
        values = original(self, exact, 1 - place % 2 if wrong == "place" else place)
        if wrong == "clean":
            return values.copy_(exact)
        if wrong == "in part":
            values[:1] = exact[:1]
        return values

    def apply(original, values, error, source):
        error = error.model_copy(update={"scale": 1.1 * error.scale}) if wrong == "scale" else error
        return original(values, error, source._replace(call=9) if wrong == "call" else source)

    if wrong in ("scale", "call"):
        replace(monkeypatch, modules, "apply_error_", apply)
    else:
        replace(monkeypatch, ModuleErrors, "_kernel", kernel)
    if where == "modules":
        noise = ModuleNoise(modules="linear", error=FIVE_PERCENT, phases=("rollout",))
        receipt = generate(model, noise=None, modules=noise, forwards=3)
    else:
        receipt = hidden_states_receipt(model)
    with pytest.raises(ReceiptError, match=NOT_REQUESTED):
        receipt.check()


def test_more_modules_than_requested_are_refused(model):
    few = NoiseSpec(module_noise=ModuleNoise(modules=("*.q_proj",), error=FIVE_PERCENT, phases=("rollout",)))
    many = NoiseSpec(module_noise=ModuleNoise(modules="linear", error=FIVE_PERCENT, phases=("rollout",)))
    recorder = recorder_of(few)
    with torch.no_grad(), phase_noise(model, many, "rollout", KEY, recorder):
        model(TOKENS)
    assert any("a module had an error that was not requested" in problem for problem in recorder.receipt().problems())


def test_a_product_with_a_weight_outside_the_layers_has_noise(make_model):
    class Projected(nn.Module):
        def __init__(self, embedding):
            super().__init__()
            self.embedding, self.projection = embedding, nn.Linear(32, 32)
            self.weight = embedding.weight

        def forward(self, ids):
            return self.projection(self.embedding(ids))

    model = make_model()
    model.model.embed_tokens = Projected(model.model.embed_tokens)
    calls = {(cell.operator, cell.layer): cell.calls for cell in generate(model, forwards=3).check().cells}
    assert calls["mm", None] == 2 * 4
    generate(model, noise=NOISE.model_copy(update={"layers": (0, 1, 2)})).check()
