"""Noise by changed modules, as studies have it: generation, a training loop, and what it refuses."""

import pytest
import torch
from on_modules import on_modules
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from aqnpipe.config.noise import MantissaTruncation
from aqnpipe.errors import ConfigError, ModelError, ReceiptError
from aqnpipe.noise.injection.phase_state import PhaseState


def test_a_generation_has_noise_and_a_receipt(model, ids):
    clean = model(input_ids=ids).logits
    with on_modules(model, scale=0.05, seed=0) as receipt, torch.no_grad():
        noised = model(input_ids=ids).logits
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    assert receipt.check() is receipt
    assert receipt.recomputed_numbers > 1000
    assert not torch.equal(noised, clean)
    assert torch.equal(model(input_ids=ids).logits, clean)


def test_seed_and_step_determine_the_noise(model, ids):
    def noised(**key):
        with on_modules(model, scale=0.05, **key), torch.no_grad():
            return model(input_ids=ids).logits

    assert torch.equal(noised(seed=1), noised(seed=1))
    assert not torch.equal(noised(seed=1), noised(seed=2))
    assert not torch.equal(noised(seed=1, step=0), noised(seed=1, step=1))


def test_a_training_loop_shares_one_receipt(model, ids):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    receipt = None
    for _ in range(3):
        with on_modules(model, scale=0.05, seed=0, backward=True, receipt=receipt) as receipt:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    receipt.check()
    counts = {phase.phase: phase.forwards for phase in receipt.content.phases}
    assert counts == {"actor_forward": 3, "backward": 3}


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_under_gradient_checkpointing_compute_again_with_their_noise(model, ids, reentrant):
    def gradients():
        model.zero_grad()
        with on_modules(model, scale=0.05, backward=True) as receipt:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        receipt.check()
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    model.train()
    stored = gradients()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    again = gradients()
    assert len(stored) == len(again) > 0
    assert all(torch.equal(*pair) for pair in zip(stored, again, strict=True))


def test_a_checkpoint_that_stores_products_is_refused_before_it_runs(model, ids):
    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts})
    with (
        pytest.raises(ModelError, match=r"^model\.layers\.0: gradient_checkpointing_kwargs has a context_fn"),
        on_modules(model, scale=0.05, backward=True),
    ):
        pass


def test_gradients_without_noise_are_refused(model, ids):
    with on_modules(model, scale=0.05, backward=True) as receipt:
        loss = model(input_ids=ids, labels=ids).loss
    with pytest.raises(ReceiptError, match="backward"):
        receipt.check()
    del loss


def trained_step(model, ids, **arguments):
    with on_modules(model, scale=0.05, backward=True, **arguments) as receipt:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return receipt


@pytest.mark.parametrize("trained", ["layers.2.mlp.down_proj", "layers.0.mlp", "layers.1.self_attn.q_proj", "lm_head"])
def test_gradients_of_frozen_weights_are_not_expected(make_model, ids, trained):
    model = make_model(tie_word_embeddings=False)
    for name, weight in model.named_parameters():
        weight.requires_grad_(trained in name)
    assert trained_step(model, ids).check().recomputed_numbers > 0


def test_a_frozen_layer_above_a_trained_one_must_have_noise_on_its_gradients(model, ids, monkeypatch):
    for name, weight in model.named_parameters():
        weight.requires_grad_("layers.0" in name)
    put_error = PhaseState.put_error

    def skipped(self, phase, operator, layer, *args, **kwargs):
        if (phase, layer) != ("backward", 2):
            put_error(self, phase, operator, layer, *args, **kwargs)

    monkeypatch.setattr(PhaseState, "put_error", skipped)
    with pytest.raises(ReceiptError, match=r"backward: noise was requested but never reached layers \[2\]"):
        trained_step(model, ids).check()


def test_a_body_that_never_calls_the_model_is_refused(model):
    with on_modules(model, scale=0.05) as receipt:
        pass
    with pytest.raises(ReceiptError, match="evaluation"):
        receipt.check()


def test_a_product_without_noise_is_named(model, ids):
    mlp = model.model.layers[1].mlp
    escaped = torch.ones(model.config.hidden_size)
    mlp.register_forward_pre_hook(
        lambda module, args: (args[0] + 0 * torch.mv(mlp.down_proj.weight, mlp.up_proj.weight @ escaped),)
    )
    with on_modules(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
    with pytest.raises(ReceiptError, match=r"aten\.mv in model\.layers\.1\.mlp escaped"):
        receipt.check()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_inference_mode_is_accepted_and_changes_no_noise(make_model, ids, attention):
    model = make_model()
    model.set_attn_implementation(attention)
    with torch.no_grad(), on_modules(model, scale=0.05) as receipt:
        expected = model(input_ids=ids).logits
    receipt.check()
    with torch.inference_mode(), on_modules(model, scale=0.05) as receipt:
        noised = model(input_ids=ids).logits
    assert receipt.check().content.phases[0].noised_share == 1
    assert torch.equal(noised, expected)


@pytest.mark.parametrize("product", ["linear", "tensordot", "mv"])
def test_a_product_without_noise_is_named_in_inference_mode_too(model, ids, product):
    mlp = model.model.layers[1].mlp
    weight = mlp.up_proj.weight
    compute = {
        "linear": lambda x: torch.ops.aten.linear(x, weight),
        "tensordot": lambda x: torch.tensordot(x, weight, dims=([2], [1])),
        "mv": lambda x: torch.mv(weight, x[0, 0]),
    }[product]
    mlp.register_forward_pre_hook(lambda module, args: (args[0] + 0 * compute(args[0]).sum(),))
    with torch.inference_mode(), on_modules(model, scale=0.05) as receipt:
        model(input_ids=ids)
    with pytest.raises(ReceiptError, match=r"aten\.\w+ in model\.layers\.1\.mlp escaped"):
        receipt.check()


def around_layers(model, compute):
    """Let `compute(hidden, weight)` run on what reaches the output projection; its result changes nothing."""
    weight = torch.nn.Parameter(torch.randn(32, 32) / 6)
    model.model.register_parameter("extra", weight)
    model.model.norm.register_forward_hook(lambda module, args, output: output + 0 * compute(output, weight).sum())


@pytest.mark.parametrize(
    ("operation", "compute"),
    [
        ("aten.mm", lambda hidden, weight: hidden @ weight),
        ("aten.mm", lambda hidden, weight: hidden.double() @ weight.double()),
        ("aten.mm", lambda hidden, weight: hidden @ torch.eye(32)),
        ("aten.bmm", lambda hidden, weight: hidden @ hidden.transpose(1, 2)),
        ("aten.mv", lambda hidden, weight: torch.mv(weight, hidden[0, 0])),
        ("aten.mv", lambda hidden, weight: torch.mv(weight.bfloat16(), hidden[0, 0].bfloat16())),
    ],
)
def test_a_product_outside_the_layers_is_refused_unless_layers_are_named(make_model, ids, operation, compute):
    model = make_model()
    around_layers(model, compute)
    with torch.no_grad(), on_modules(model, scale=0.05) as receipt:
        model(input_ids=ids)
    with pytest.raises(ReceiptError, match=rf"calls of {operation} in model\.norm, outside the decoder layers"):
        receipt.check()
    with torch.no_grad(), on_modules(model, scale=0.05, layers=[0, 1, 2]) as receipt:
        model(input_ids=ids)
    assert receipt.check().content.phases[0].noised_share <= 1


@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_operations_outside_the_layers_that_are_no_products_are_accepted(make_model, ids, precision):
    model = make_model()
    around_layers(model, lambda hidden, weight: (hidden * weight[0]).softmax(-1).cumsum(1) + weight.T.norm())
    is_low = precision == "autocast"
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_low)
    with torch.no_grad(), autocast, on_modules(model, scale=0.05) as receipt:
        model(input_ids=ids)
    assert receipt.check().content.phases[0].noised_share == 1


def test_a_product_around_the_layers_that_begins_with_a_later_pass_is_refused(make_model, ids):
    model, passes = make_model(), []

    def later(hidden, weight):
        passes.append(hidden)
        return hidden @ weight if len(passes) > 1 else hidden

    around_layers(model, later)
    with torch.no_grad(), on_modules(model, scale=0.05) as receipt:
        for _ in range(12):
            model(input_ids=ids)
    with pytest.raises(ReceiptError, match=r"aten\.mm in model\.norm, outside the decoder layers"):
        receipt.check()


def test_passes_observed_around_the_layers_alone_are_accepted(make_model, ids):
    model = make_model()
    around_layers(model, lambda hidden, weight: hidden @ weight)
    # Made by a product around the layers, and changed by a layer.
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output @ torch.eye(32))
    model.model.layers[0].register_forward_pre_hook(lambda module, args: (args[0].mul_(2), *args[1:]))
    with torch.no_grad(), on_modules(model, scale=0.05, layers=[0, 2], include_lm_head=False) as receipt:
        for _ in range(12):
            model(input_ids=ids)
    assert receipt.check().content.phases[0].forwards == 12


def test_a_product_of_integers_is_refused_by_layer(model, ids):
    def quantized(module, args, output):
        product = (output * 8).int() @ torch.ones(32, 32, dtype=torch.int32)
        return output + 0 * product

    model.model.layers[1].mlp.register_forward_hook(quantized)
    with torch.no_grad(), on_modules(model, scale=0.05) as receipt:
        model(input_ids=ids)
    with pytest.raises(ReceiptError, match="1 calls of matmul of integers in layer 1 escaped"):
        receipt.check()


def test_integers_may_be_multiplied_one_by_one(model, ids):
    def masked(module, args, output):
        places = torch.arange(output.shape[1])
        return output + 0 * torch.einsum("i,j->ij", places, places).sum()

    model.model.layers[1].mlp.register_forward_hook(masked)
    with torch.no_grad(), on_modules(model, scale=0.05) as receipt:
        model(input_ids=ids)
    receipt.check()


@pytest.mark.parametrize("backward", [False, True])
def test_linear_modules_may_have_weight_norm(model, ids, backward):
    for layer in model.model.layers:
        weight_norm(layer.mlp.up_proj)
    with torch.set_grad_enabled(backward), on_modules(model, scale=0.05, backward=backward) as receipt:
        loss = model(input_ids=ids, labels=ids).loss
        if backward:
            loss.backward()
    receipt.check()


def test_offloaded_weights_are_refused_in_one_line(model, ids):
    linear = model.model.layers[1].mlp.up_proj
    weight, absent = linear.weight, torch.nn.Parameter(linear.weight.to("meta"))

    def forward(x):
        linear.weight = weight
        output = torch.nn.Linear.forward(linear, x)
        linear.weight = absent
        return output

    linear.weight, linear.forward = absent, forward
    with torch.no_grad(), on_modules(model, scale=0.05) as receipt:
        model(input_ids=ids)
    with pytest.raises(ReceiptError, match="linear modules with offloaded weights cannot be computed again"):
        receipt.check()


def test_a_norm_of_activations_by_the_operator_of_weight_norm_is_refused(model, ids):
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: torch._weight_norm(output[0], torch.ones(output.shape[1], 1)).expand_as(output)
    )
    with torch.no_grad(), on_modules(model, scale=0.05) as receipt:
        model(input_ids=ids)
    with pytest.raises(ReceiptError, match=r"aten\._weight_norm_interface in model\.layers\.1\.mlp escaped"):
        receipt.check()


def die_once(model):
    """Let the next call of a layer end in an exception, as one without enough memory does."""

    def die(module, args):
        handle.remove()
        raise torch.OutOfMemoryError("simulated")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(die)


def forward_again(model, ids):
    die_once(model)
    with on_modules(model, scale=0.05) as receipt, torch.no_grad():
        with pytest.raises(torch.OutOfMemoryError):
            model(input_ids=ids)
        model(input_ids=ids[:1])
    return receipt


def test_a_forward_after_one_that_died_is_accepted(model, ids):
    receipt = forward_again(model, ids)
    assert receipt.check().content.phases[0].noised_share == 1


def test_a_forward_that_died_is_no_audit_of_the_whole(make_model, ids):
    model = make_model()
    around_layers(model, lambda hidden, weight: hidden @ weight)
    with pytest.raises(ReceiptError, match=r"aten\.mm in model\.norm, outside the decoder layers"):
        forward_again(model, ids).check()


def test_a_layer_that_runs_twice_in_a_forward_is_named(model, ids):
    layer = model.model.layers[1]

    def run_again(module, args, kwargs):
        return (layer(*args, **kwargs),), kwargs

    model.model.layers[2].register_forward_pre_hook(run_again, with_kwargs=True)
    with torch.no_grad(), on_modules(model, scale=0.05) as receipt:
        model(input_ids=ids, use_cache=False)
    assert "model.layers.1 ran again in the same forward pass" in receipt.problems()[0]


def test_a_checkpoint_of_ones_own_is_named(model, ids):
    layer = model.model.layers[1]

    class Checkpointed(type(layer)):
        def __call__(self, *args, **kwargs):
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)

    layer.__class__ = Checkpointed
    problems = trained_step(model, ids).problems()
    assert any("layer 1 was computed again by a backward pass" in problem for problem in problems)


@pytest.mark.parametrize("shape", [(1, 1, 32), (32, 1)])
def test_one_scale_per_channel_is_no_matrix(make_model, ids, shape):
    model = make_model()
    mlp = model.model.layers[1].mlp
    mlp.register_parameter("gain", torch.nn.Parameter(torch.ones(shape)))
    mlp.register_forward_hook(lambda module, args, output: output * module.gain.view(32))
    with torch.no_grad(), on_modules(model, scale=0.05) as receipt:
        model(input_ids=ids)
    receipt.check()


def test_other_errors_and_single_layers(model, ids):
    clean = model(input_ids=ids, output_hidden_states=True).hidden_states
    truncation = MantissaTruncation(mantissa_bits=4)
    with torch.no_grad(), on_modules(model, error=truncation, layers=[1], include_lm_head=False) as receipt:
        noised = model(input_ids=ids, output_hidden_states=True).hidden_states
    receipt.check()
    assert torch.equal(noised[1], clean[1])
    assert not torch.equal(noised[2], clean[2])


def test_a_receipt_of_other_noise_is_refused(model, ids):
    with on_modules(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
    with (
        pytest.raises(ConfigError, match="of another model, noise or seed"),
        on_modules(model, 0.1, receipt=receipt),
    ):
        pass


def test_a_model_without_decoder_layers_is_refused_in_one_line():
    with pytest.raises(ModelError, match="no decoder layers found"), on_modules(torch.nn.Linear(2, 2), scale=0.05):
        pass
