"""Error models of a user's own: the receipt proves what they claim, and refuses everything else."""

import pytest
import torch
from noisy_passes import run
from on_modules import on_modules

import aqnpipe
from aqnpipe.errors import ConfigError
from aqnpipe.noise.injection import phase_state
from aqnpipe.noise.kernels import own as kernel

GAUSSIAN = {"settings": {"scale": 0.05}}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_product_has_the_error_and_the_receipt_its_size_and_its_source(make_model, ids, own, attention, dtype):
    model = make_model(attn_implementation=attention).to(dtype)
    receipt = run(model, ids, own("gaussian", **GAUSSIAN)).check()
    content = receipt.content
    size, elements = content.measured_scale("evaluation")
    assert size == pytest.approx(0.05, rel=5 / (2 * elements) ** 0.5 + 0.01)
    assert receipt.recomputed_numbers > 1000
    assert {cell.error for cell in content.cells} == {"own"}
    # A number that rounds to itself is not changed; of 16-bit numbers some do.
    assert all(0.9 < cell.changed_elements / cell.elements <= 1 for cell in content.cells)
    assert len(content.operator_noise.error.source_sha256) == 64


def test_the_same_key_gives_the_same_numbers_and_another_seed_others(model, ids, own):
    def logits(seed):
        with aqnpipe.noisy(model, error=own("gaussian", **GAUSSIAN), seed=seed), torch.no_grad():
            return model(input_ids=ids).logits

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_have_it_too_also_where_layers_are_recomputed(make_model, ids, own, use_reentrant):
    gradients = []
    for checkpointed in (False, True):
        model = make_model().train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        with on_modules(model, error=own("gaussian", **GAUSSIAN), backward=True, operators="all") as receipt:
            model(input_ids=ids, labels=ids).loss.backward()
        receipt.check()
        assert receipt.content.measured_scale("backward")[0] == pytest.approx(0.05, rel=0.1)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, replayed) for plain, replayed in zip(*gradients, strict=True))


def test_several_draws_an_absolute_size_and_a_rounding_without_draws(model, ids, own):
    run(model, ids, own("absolute", 0.01, quantity="absolute", draws=2, settings={"scale": 0.01})).check()
    run(model, ids, own("grid", (0.001, 0.01), quantity="absolute", draws=0, settings={"step": 0.01})).check()


def test_an_error_that_hits_few_values_is_proven_by_its_changes(model, ids, own):
    receipt = run(model, ids, own("rare", (0, 0.2), settings={"above": 2.0})).check()
    changed, elements = (
        sum(getattr(cell, part) for cell in receipt.content.cells) for part in ("changed_elements", "elements")
    )
    # P(z > 2) = 0.0228.
    assert changed / elements == pytest.approx(0.0228, rel=0.1)


def test_only_the_layers_asked_for_have_it(model, ids, own):
    receipt = run(model, ids, own("gaussian", **GAUSSIAN), layers=[1], include_lm_head=False).check()
    assert {cell.layer for cell in receipt.content.cells} == {1}


@pytest.mark.parametrize("announced", [0.04, 0.07, (0.07, 0.2), (0.001, 0.04)])
def test_a_size_that_is_not_what_was_announced_is_refused(model, ids, own, announced):
    problems = run(model, ids, own("gaussian", announced, **GAUSSIAN)).problems()
    assert len(problems) == 1
    assert "has a measured relative size of 0.0" in problems[0]
    limits = announced if isinstance(announced, tuple) else (announced,)
    assert problems[0].endswith(f"announced {' to '.join(map(str, limits))}")


def test_an_error_that_changes_nothing_is_refused(model, ids, own):
    problems = run(model, ids, own("large_only", (0, 1), draws=0)).problems()
    assert len(problems) == 1
    assert "large_only changed none of" in problems[0]


# -- sabotage: what the injection does wrong, and what the function does only there ------------------------------------


def test_noise_that_is_not_added_is_refused(model, ids, own, monkeypatch):
    monkeypatch.setattr(phase_state, "apply_error_", lambda tensor, *_: tensor)
    problems = " ".join(run(model, ids, own("gaussian", **GAUSSIAN)).problems())
    assert "the values used have no noise" in problems
    assert "changed none of" in problems


def test_other_settings_than_requested_are_refused(model, ids, own, monkeypatch):
    def apply(tensor, error, source, input_rms=None):
        return kernel.add_own_(tensor, error.model_copy(update={"settings": {"scale": 0.0505}}), source)

    monkeypatch.setattr(phase_state, "apply_error_", apply)
    found = " ".join(run(model, ids, own("gaussian", **GAUSSIAN)).problems())
    assert "of the sampled values are not those of the requested noise" in found
    assert "gaussian, which must be elementwise, without a state" in found


def test_random_numbers_of_another_key_are_refused(model, ids, own, monkeypatch):
    def apply(tensor, error, source, input_rms=None):
        return kernel.add_own_(tensor, error, source._replace(key=source.key + 1))

    monkeypatch.setattr(phase_state, "apply_error_", apply)
    found = " ".join(run(model, ids, own("gaussian", **GAUSSIAN)).problems())
    assert "of the sampled values are not those of the requested noise" in found


def test_a_function_that_keeps_a_state_is_refused(model, ids, own):
    """It passes the trial beforehand, and computes other numbers later."""
    found = " ".join(run(model, ids, own("tires", (0.04, 0.07))).problems())
    assert "tires, which must be elementwise, without a state" in found


@pytest.mark.parametrize("answer", ["cut", "nan", "inf", "3.4e38"])
def test_a_function_that_cannot_be_recomputed_is_refused(model, ids, own, answer):
    """It passes the trial beforehand, which calls it with other shapes."""
    found = " ".join(run(model, ids, own("evades", settings={"answer": answer})).problems())
    assert "100% of the sampled values are not those of the requested noise" in found


def test_numbers_of_its_own_are_refused_also_with_the_tolerance_of_many_draws(model, ids, own):
    """It draws them after the trial; each draw adds to how much of a difference the normals may explain."""
    found = " ".join(run(model, ids, own("restless", draws=8)).problems())
    assert "of the sampled values are not those of the requested noise" in found


def test_a_mistake_in_the_function_is_one_line(model, ids, own):
    with pytest.raises(ConfigError, match="missing 1 required keyword-only argument: 'scale'"):
        run(model, ids, own("gaussian"))
