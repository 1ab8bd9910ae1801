"""`aqnpipe.noisy` with an error of a user's own: the receipt proves what it claims, and refuses everything else."""

import pytest
import torch

import aqnpipe
from aqnpipe.errors import ConfigError, ReceiptError
from aqnpipe.machine import machine
from aqnpipe.noise.kernels import own as kernel

GAUSSIAN = {"settings": {"scale": 0.05}}


def run(model, ids, error, **settings):
    """Return the receipt of a forward and a short generation with `error`, not checked."""
    with aqnpipe.noisy(model, error=error, **settings) as receipt, torch.no_grad():
        model(input_ids=ids)
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    return receipt


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_product_has_the_error(make_model, ids, own, attention, dtype):
    model = make_model(attn_implementation=attention).to(dtype)
    receipt = run(model, ids, own("gaussian", **GAUSSIAN)).check()
    assert receipt.noised == receipt.products - sum(receipt.without_error().values()) > 0
    assert receipt.recomputed_numbers > 1000


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_have_it_too_also_where_layers_are_recomputed(make_model, ids, own, use_reentrant):
    gradients = []
    for checkpointed in (False, True):
        model = make_model(attn_implementation="eager").train()
        model.enable_input_require_grads()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        with aqnpipe.noisy(model, error=own("gaussian", **GAUSSIAN), backward=True, operators="all") as receipt:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        receipt.check()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, replayed) for plain, replayed in zip(*gradients, strict=True))


def test_the_operators_of_the_function_itself_are_exact(model, ids, own):
    receipt = run(model, ids, own("by_product", **GAUSSIAN)).check()
    assert receipt.noised == run(model, ids, own("gaussian", **GAUSSIAN)).check().noised


def test_several_draws_an_absolute_size_and_a_rounding_without_draws(model, ids, own):
    run(model, ids, own("absolute", 0.01, quantity="absolute", draws=2, settings={"scale": 0.01})).check()
    run(model, ids, own("grid", (0.001, 0.01), quantity="absolute", draws=0, settings={"step": 0.01})).check()


def test_an_error_that_hits_few_values_is_right(model, ids, own):
    with torch.inference_mode():
        run(model, ids, own("rare", (0, 0.2), settings={"above": 2.0})).check()
        run(model, ids, own("rare", (0, 0.2), settings={"above": 3.5})).check()


@pytest.mark.parametrize("announced", [0.035, 0.07, (0.07, 0.2), (0.001, 0.035)])
def test_a_size_that_is_not_what_was_announced_is_refused(model, ids, own, announced):
    (problem,) = run(model, ids, own("gaussian", announced, **GAUSSIAN)).problems()
    assert "has a measured relative size of 0.0" in problem
    limits = announced if isinstance(announced, tuple) else (announced,)
    assert problem.endswith(f"announced {' to '.join(map(str, limits))}")


def test_an_error_that_changes_nothing_is_refused(model, ids, own):
    (problem,) = run(model, ids, own("large_only", (0, 1), draws=0)).problems()
    assert problem.endswith("large_only changed no value")


# -- sabotage: what the machine does wrong, and what the function does only there --------------------------------------


def changed(change):
    return lambda tensor, error, source: kernel.add_own_(tensor, *change(error, source))


SABOTAGES = {
    "not added": lambda tensor, *_: tensor,
    "other settings": changed(lambda error, source: (error.model_copy(update={"settings": {"scale": 0.0505}}), source)),
    "another key": changed(lambda error, source: (error, source._replace(key=source.key + 1))),
}


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_another_error_is_refused(model, ids, own, monkeypatch, sabotage):
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
def test_a_function_that_computes_something_else_later_is_refused(model, ids, own, wrong):
    """It passes the trial beforehand."""
    with pytest.raises(ReceiptError, match="recomputed values are not the requested ones"):
        run(model, ids, wrong(own)).check()


def test_a_mistake_in_the_function_is_one_line(model, ids, own):
    with pytest.raises(ConfigError, match="missing 1 required keyword-only argument: 'scale'"):
        run(model, ids, own("gaussian"))
