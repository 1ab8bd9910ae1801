"""Error models of a user's own, in `aqnpipe.noisy` and in phases: the receipt proves what they claim."""

from functools import partial

import pytest
import torch
from on_modules import on_modules

import aqnpipe
from aqnpipe.errors import ConfigError, ReceiptError
from aqnpipe.machine import machine
from aqnpipe.noise.kernels import custom as kernel

GAUSSIAN = {"settings": {"scale": 0.05}}


def run_in(context, model, ids, error, **settings):
    """Return the receipt of a forward and a short generation with `error`, not checked."""
    with context(model, error=error, **settings) as receipt, torch.no_grad():
        model(input_ids=ids)
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    return receipt


run_phase = partial(run_in, on_modules)


@pytest.fixture(params=[aqnpipe.noisy, on_modules], ids=["noisy", "phase"])
def context(request):
    """Each way to have noise."""
    return request.param


@pytest.fixture
def run(context):
    """Function (model, ids, error, settings) -> receipt."""
    return partial(run_in, context)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_product_has_the_error(make_model, ids, own, run, attention, dtype):
    model = make_model(attn_implementation=attention).to(dtype)
    assert run(model, ids, own("gaussian", **GAUSSIAN)).check().recomputed_numbers > 1000


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_receipt_of_a_phase_has_its_size_and_its_source(make_model, ids, own, attention, dtype):
    model = make_model(attn_implementation=attention).to(dtype)
    content = run_phase(model, ids, own("gaussian", **GAUSSIAN)).check().content
    size, elements = content.measured_scale("evaluation")
    assert size == pytest.approx(0.05, rel=5 / (2 * elements) ** 0.5 + 0.01)
    assert {cell.kind for cell in content.cells} == {"own"}
    # A number that rounds to itself is not changed; of 16-bit numbers some do.
    assert all(0.9 < cell.changed / cell.elements <= 1 for cell in content.cells)
    assert len(content.operator_noise.error.source_sha256) == 64


def test_the_same_key_gives_the_same_numbers_and_another_seed_others(model, ids, own, context):
    def logits(seed):
        with context(model, error=own("gaussian", **GAUSSIAN), seed=seed), torch.no_grad():
            return model(input_ids=ids).logits

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_gradients_have_it_too_also_where_layers_are_recomputed(make_model, ids, own, context):
    gradients = []
    for reentrant in (None, False, True):
        model = make_model(attn_implementation="eager").train()
        model.enable_input_require_grads()
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with context(model, error=own("gaussian", **GAUSSIAN), backward=True, operators="all") as receipt:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        receipt.check()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(plain, replayed) for plain, replayed in zip(gradients[0], others, strict=True))


def test_the_operators_of_the_function_itself_are_exact(model, ids, own):
    noised = [
        run_in(aqnpipe.noisy, model, ids, own(name, **GAUSSIAN)).check().noised for name in ("by_product", "gaussian")
    ]
    assert noised[0] == noised[1]


def test_several_draws_an_absolute_size_and_a_rounding_without_draws(model, ids, own, run):
    run(model, ids, own("absolute", 0.01, quantity="absolute", draws=2, settings={"scale": 0.01})).check()
    run(model, ids, own("grid", (0.001, 0.01), quantity="absolute", draws=0, settings={"step": 0.01})).check()


def test_an_error_that_hits_few_values_is_right(model, ids, own, run):
    with torch.inference_mode():
        run(model, ids, own("rare", (0, 0.2), settings={"above": 2.0})).check()
        run(model, ids, own("rare", (0, 0.2), settings={"above": 3.5})).check()


def test_an_error_that_hits_few_values_is_proven_by_its_changes(model, ids, own):
    cells = run_phase(model, ids, own("rare", (0, 0.2), settings={"above": 2.0})).check().content.cells
    changed, elements = (sum(getattr(cell, part) for cell in cells) for part in ("changed", "elements"))
    # P(z > 2) = 0.0228.
    assert changed / elements == pytest.approx(0.0228, rel=0.1)


def test_only_the_layers_asked_for_have_it(model, ids, own):
    receipt = run_phase(model, ids, own("gaussian", **GAUSSIAN), layers=[1], include_lm_head=False).check()
    assert {cell.layer for cell in receipt.content.cells} == {1}


@pytest.mark.parametrize("announced", [0.035, 0.07, (0.07, 0.2), (0.001, 0.035)])
def test_a_size_that_is_not_what_was_announced_is_refused(model, ids, own, run, announced):
    (problem,) = run(model, ids, own("gaussian", announced, **GAUSSIAN)).problems()
    assert "has a measured relative size of 0.0" in problem
    limits = announced if isinstance(announced, tuple) else (announced,)
    assert problem.endswith(f"announced {' to '.join(map(str, limits))}")


def test_an_error_that_changes_nothing_is_refused(model, ids, own, run):
    (problem,) = run(model, ids, own("large_only", (0, 1), draws=0)).problems()
    assert "large_only changed no" in problem


# -- sabotage: what the machine does wrong, and what the function does only there --------------------------------------


def changed(change):
    return lambda tensor, error, source: kernel.add_custom_(tensor, *change(error, source))


SABOTAGES = {
    "not added": lambda tensor, *_: tensor,
    "other settings": changed(lambda error, source: (error.model_copy(update={"settings": {"scale": 0.0505}}), source)),
    "another key": changed(lambda error, source: (error, source._replace(key=source.key + 1))),
}


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_another_error_is_refused(model, ids, own, run, monkeypatch, sabotage):
    monkeypatch.setattr(machine, "apply_error_", SABOTAGES[sabotage])
    with pytest.raises(ReceiptError, match="recomputed values are not the requested ones"):
        run(model, ids, own("gaussian", **GAUSSIAN)).check()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda own: own("tires", (0.04, 0.07)),
        lambda own: own("restless", draws=8),
        *(lambda own, answer=answer: own("evades", settings={"answer": answer}) for answer in ("cut", "nan", "3.4e38")),
    ],
    ids=["tires", "restless", "cut", "nan", "large"],
)
def test_a_function_that_computes_something_else_later_is_refused(model, ids, own, run, wrong):
    """It passes the trial beforehand."""
    with pytest.raises(ReceiptError, match="recomputed values are not the requested ones"):
        run(model, ids, wrong(own)).check()


def test_a_mistake_in_the_function_is_one_line(model, ids, own, run):
    with pytest.raises(ConfigError, match="missing 1 required keyword-only argument: 'scale'"):
        run(model, ids, own("gaussian"))
