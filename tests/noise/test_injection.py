import threading

import pytest
import torch
import torch.nn.functional as F

from aqnpipe.config.noise import OperatorNoise
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.noise.injection import NoiseKey, phase_noise
from aqnpipe.noise.recorder import ReceiptRecorder

KEY = NoiseKey(seed=0, step=0)
MATMUL = OperatorNoise(relative_scale=0.05, phases=("actor_forward", "backward"))


def recorder_for(noise, phases=("actor_forward",), num_layers=3):
    return ReceiptRecorder(
        operator_noise=noise, weight_noise=None, expected_phases=phases, num_layers=num_layers, num_norms=7
    )


def token_ids(seed=1, shape=(8, 16)):
    return torch.randint(2, 64, shape, generator=torch.Generator().manual_seed(seed))


def logits(model, noise, key=KEY, phase="actor_forward", ids=None):
    recorder = recorder_for(noise, phases=(phase,))
    with torch.no_grad(), phase_noise(model, recorder, phase, key):
        output = model(token_ids() if ids is None else ids).logits
    return output, recorder.receipt()


def hook_count(model):
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


def gradients(model, noise, key=KEY):
    recorder = recorder_for(noise, phases=("actor_forward", "backward"))
    model.zero_grad()
    with phase_noise(model, recorder, "actor_forward", key, backward=True):
        loss = model(token_ids(), labels=token_ids()).loss
    loss.backward()
    recorder.count_forward("backward")
    return {name: p.grad.clone() for name, p in model.named_parameters()}, recorder.receipt()


def test_no_noise_asked_changes_no_bit_and_the_witness_says_so(model):
    with torch.no_grad():
        bare = model(token_ids()).logits
    clean, receipt = logits(model, None)
    assert torch.equal(clean, bare)
    receipt.check()
    (record,) = receipt.phases
    assert record.noised_calls == 0
    assert record.witness_difference == 0.0
    assert record.witnessed_elements > 0


@pytest.mark.parametrize("operators", ["matmul", "all"])
def test_scale_zero_changes_no_bit(model, operators):
    zero = OperatorNoise(operators=operators, relative_scale=0.0)
    assert torch.equal(logits(model, zero)[0], logits(model, None)[0])


def test_same_key_replays_other_keys_do_not(model):
    first, _ = logits(model, MATMUL)
    assert torch.equal(first, logits(model, MATMUL)[0])
    for other in (NoiseKey(seed=1, step=0), NoiseKey(seed=0, step=1), NoiseKey(seed=0, step=0, micro_step=1)):
        assert not torch.equal(first, logits(model, MATMUL, key=other)[0])


def test_global_random_state_is_neither_read_nor_used_up(model):
    torch.manual_seed(5)
    first, _ = logits(model, MATMUL)
    state = torch.random.get_rng_state()
    torch.manual_seed(6)
    second, _ = logits(model, MATMUL)
    assert torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(state, torch.random.get_rng_state())


def test_every_matrix_product_of_every_layer_is_noised_and_measured(model):
    _, receipt = logits(model, MATMUL)
    receipt.check()
    calls = {(cell.operator, cell.layer): cell.calls for cell in receipt.cells}
    expected = {("linear", layer): 7 for layer in range(3)} | {("matmul", layer): 2 for layer in range(3)}
    assert calls == {**expected, ("linear", None): 1}
    scale, elements = receipt.measured_scale("actor_forward")
    assert abs(scale / 0.05 - 1) < 5 / (2 * elements) ** 0.5


def test_all_operators_reach_softmax_silu_and_rms_norm(model):
    noise = OperatorNoise(operators="all", relative_scale=0.05)
    _, receipt = logits(model, noise)
    receipt.check()
    calls = {cell.operator: cell.calls for cell in receipt.cells if cell.layer == 1}
    assert calls == {"linear": 7, "matmul": 2, "softmax": 1, "silu": 1, "rms_norm": 2}


def test_rotary_angles_are_not_noised(model):
    """The rotary embedding multiplies positions by frequencies with `@`; noise there would move every position."""
    seen = []
    handle = model.model.rotary_emb.register_forward_hook(lambda module, args, output: seen.append(output[0].clone()))
    logits(model, MATMUL)
    with torch.no_grad():
        model(token_ids())
    handle.remove()
    assert torch.equal(seen[0], seen[1])


def test_linear_noise_comes_before_the_bias(make_model):
    """With a zero weight the product is 0, so relative noise on it leaves the bias exact."""
    model = make_model()
    projection = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        projection.weight.zero_()
        projection.bias.fill_(3.0)
    seen = []
    projection.register_forward_hook(lambda module, args, output: seen.append(output))
    recorder = recorder_for(MATMUL)
    with torch.no_grad(), phase_noise(model, recorder, "actor_forward", KEY):
        model(token_ids())
    assert torch.equal(seen[0], torch.full_like(seen[0], 3.0))


def test_lm_head_can_be_left_out(model):
    noise = OperatorNoise(relative_scale=0.05, include_lm_head=False)
    _, receipt = logits(model, noise)
    receipt.check()
    assert None not in {cell.layer for cell in receipt.cells}


def test_only_the_chosen_layers_are_noised(model):
    noise = OperatorNoise(relative_scale=0.05, layers=(1,), include_lm_head=False)
    _, receipt = logits(model, noise)
    receipt.check()
    assert {cell.layer for cell in receipt.cells} == {1}


def test_backward_noise_changes_gradients_but_not_the_loss(model):
    both, receipt = gradients(model, MATMUL)
    receipt.check()
    forward_only, _ = gradients(model, OperatorNoise(relative_scale=0.05, phases=("actor_forward",)))
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(both[name], forward_only[name])
    scale, elements = receipt.measured_scale("backward")
    assert abs(scale / 0.05 - 1) < 5 / (2 * elements) ** 0.5


def test_backward_noise_is_on_both_operands_of_every_product(model):
    _, receipt = gradients(model, MATMUL)
    calls = {cell.operator: cell.calls for cell in receipt.cells if cell.phase == "backward" and cell.layer == 2}
    assert calls == {"linear.gradient_0": 7, "linear.gradient_1": 7, "matmul.gradient_0": 2, "matmul.gradient_1": 2}


def test_forward_noise_gradient_is_straight_through(make_model):
    """One linear: dL/dw must be computed from the clean forward formula, whatever the noise on y was."""
    weight = torch.randn(4, 3, requires_grad=True)
    x = torch.randn(2, 3)
    expected = torch.autograd.grad((F.linear(x, weight) * 2).sum(), weight)[0]
    from aqnpipe.noise.operators import RelativeError

    noised = RelativeError.apply(F.linear(x, weight), lambda y: y.mul_(1.3))
    assert torch.equal(torch.autograd.grad((noised * 2).sum(), weight)[0], expected)


def test_gradients_replay(model):
    first, _ = gradients(model, MATMUL)
    second, _ = gradients(model, MATMUL)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gradient_checkpointing_recomputes_with_the_same_noise(make_model):
    """Checkpointed layers run again inside the backward pass; other noise there would give other gradients."""
    plain, checkpointed = make_model(), make_model()
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    noise = OperatorNoise(relative_scale=0.05, phases=("actor_forward",))
    results = []
    for network in (plain, checkpointed):
        network.train()
        recorder = recorder_for(noise)
        with phase_noise(network, recorder, "actor_forward", KEY):
            # The backward pass belongs inside: that is where the layers are computed again.
            network(token_ids(), labels=token_ids(), use_cache=False).loss.backward()
        results.append({name: p.grad for name, p in network.named_parameters()})
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name], rtol=1e-4, atol=1e-6)


def test_everything_is_removed_also_after_an_exception(model):
    before, bare = hook_count(model), logits(model, None)[0]
    recorder = recorder_for(MATMUL)
    with pytest.raises(RuntimeError, match="boom"), phase_noise(model, recorder, "actor_forward", KEY):
        model(token_ids())
        raise RuntimeError("boom")
    assert hook_count(model) == before
    assert torch.equal(logits(model, None)[0], bare)


def test_an_exception_inside_the_model_leaves_no_mode_behind(model):
    recorder = recorder_for(MATMUL)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), phase_noise(model, recorder, "actor_forward", KEY):
        model(token_ids())
    handle.remove()
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    assert torch.equal(a @ b, torch.matmul(a, b))
    logits(model, None)[1].check()


def test_nesting_is_refused(model):
    recorder = recorder_for(MATMUL)
    with phase_noise(model, recorder, "actor_forward", KEY):
        with pytest.raises(ModelError, match="do not nest"), phase_noise(model, recorder, "rollout", KEY):
            pass
        with torch.no_grad():
            model(token_ids())
    recorder.receipt().check()


def test_other_threads_see_no_noise(model):
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    bare = a @ b
    results = []

    def product_during_a_forward(*_):
        thread = threading.Thread(target=lambda: results.append(a @ b))
        thread.start()
        thread.join()

    handle = model.model.layers[1].register_forward_pre_hook(product_during_a_forward)
    logits(model, MATMUL)
    handle.remove()
    assert torch.equal(results[0], bare)


def test_sdpa_escapes_are_refused(make_model):
    model = make_model(attn_implementation="sdpa")
    _, receipt = logits(model, MATMUL)
    with pytest.raises(ReceiptError, match="scaled_dot_product_attention escaped"):
        receipt.check()


# The sabotages below are what fooled earlier experiments; each must fail on the receipt.


def test_noise_disabled_by_hand_is_refused(model, monkeypatch):
    monkeypatch.setattr("aqnpipe.noise.injection.add_relative_error_", lambda output, scale, generator: output)
    _, receipt = logits(model, MATMUL)
    with pytest.raises(ReceiptError, match=r"measured scale 0, asked 0\.05"):
        receipt.check()


def test_noise_at_half_the_scale_is_refused(model, monkeypatch):
    from aqnpipe.noise import operators

    monkeypatch.setattr(
        "aqnpipe.noise.injection.add_relative_error_",
        lambda output, scale, generator: operators.add_relative_error_(output, scale / 2, generator),
    )
    _, receipt = logits(model, MATMUL)
    with pytest.raises(ReceiptError, match=r"the witness saw scale 0\.02"):
        receipt.check()


def test_a_mode_that_is_never_activated_is_refused(model, monkeypatch):
    monkeypatch.setattr("aqnpipe.noise.injection._OperatorMode.activate", lambda self: None)
    _, receipt = logits(model, MATMUL)
    with pytest.raises(ReceiptError, match=r"never reached layers \[0, 1, 2\]"):
        receipt.check()


def test_noise_left_on_by_somebody_else_is_refused(model):
    """A patched F.linear, as in the original experiments, where no noise was asked."""
    layer = model.model.layers[0].self_attn.q_proj
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias) * 1.0001
    _, receipt = logits(model, None)
    with pytest.raises(ReceiptError, match="differ from bare torch"):
        receipt.check()


def test_a_phase_that_never_ran_is_refused(model):
    recorder = recorder_for(None, phases=("actor_forward", "rollout"))
    with torch.no_grad(), phase_noise(model, recorder, "actor_forward", KEY):
        model(token_ids())
    with pytest.raises(ReceiptError, match="phase rollout never ran"):
        recorder.receipt().check()
