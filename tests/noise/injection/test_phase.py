import math
import threading

import pytest
import torch
import torch.nn.functional as F

from aqnpipe.config.noise import (
    AbsoluteGaussian,
    FakeQuantization,
    MantissaTruncation,
    ModuleNoise,
    NoiseSpec,
    OperatorNoise,
    RelativeGaussian,
    SystematicBias,
)
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.noise.audit.phase_audit import audited_backward
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
from aqnpipe.noise.kernels.gaussian import add_relative_gaussian_
from aqnpipe.noise.kernels.quantization import fake_quantize
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.sampling import MEASURED_ELEMENTS_PER_CALL, sample, sample_positions

KEY = NoiseKey(seed=0, step=0)
MATMUL = OperatorNoise(error=RelativeGaussian(scale=0.05), phases=("actor_forward", "backward"))


def spec_of(noise):
    """`noise` on operators or on modules as all that a phase computes under."""
    return NoiseSpec(module_noise=noise) if isinstance(noise, ModuleNoise) else NoiseSpec(operator_noise=noise)


def recorder_for(noise, phases=("actor_forward",), num_layers=3):
    return ReceiptRecorder(spec_of(noise), expected_phases=phases, num_layers=num_layers, num_norms=7)


def token_ids(seed=1, shape=(8, 16)):
    return torch.randint(2, 64, shape, generator=torch.Generator().manual_seed(seed))


def logits(model, noise, key=KEY, phase="actor_forward", ids=None):
    recorder = recorder_for(noise, phases=(phase,))
    with torch.no_grad(), phase_noise(model, spec_of(noise), phase, key, recorder):
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
    with phase_noise(model, spec_of(noise), "actor_forward", key, recorder, backward=True):
        loss = model(token_ids(), labels=token_ids()).loss
    with audited_backward(model, recorder):
        loss.backward()
    recorder.count_forward("backward")
    return {name: p.grad.clone() for name, p in model.named_parameters()}, recorder.receipt()


def test_no_noise_requested_changes_no_bit_and_the_reference_check_finds_no_difference(model):
    with torch.no_grad():
        bare = model(token_ids()).logits
    clean, receipt = logits(model, None)
    assert torch.equal(clean, bare)
    receipt.check()
    (record,) = receipt.phases
    assert record.noised_calls == 0
    assert record.reference_check_difference == 0.0
    assert record.reference_checked_elements > 0


@pytest.mark.parametrize("operators", ["matmul", "all"])
def test_scale_zero_changes_no_bit(model, operators):
    zero = OperatorNoise(operators=operators, error=RelativeGaussian(scale=0.0))
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
    noise = OperatorNoise(operators="all", error=RelativeGaussian(scale=0.05))
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
    with torch.no_grad(), phase_noise(model, spec_of(MATMUL), "actor_forward", KEY, recorder):
        model(token_ids())
    assert torch.equal(seen[0], torch.full_like(seen[0], 3.0))


def test_lm_head_can_be_left_out(model):
    noise = OperatorNoise(error=RelativeGaussian(scale=0.05), include_lm_head=False)
    _, receipt = logits(model, noise)
    receipt.check()
    assert None not in {cell.layer for cell in receipt.cells}


def test_only_the_chosen_layers_are_noised(model):
    noise = OperatorNoise(error=RelativeGaussian(scale=0.05), layers=(1,), include_lm_head=False)
    _, receipt = logits(model, noise)
    receipt.check()
    assert {cell.layer for cell in receipt.cells} == {1}


def test_backward_noise_changes_gradients_but_not_the_loss(model):
    both, receipt = gradients(model, MATMUL)
    receipt.check()
    forward_only, _ = gradients(model, OperatorNoise(error=RelativeGaussian(scale=0.05), phases=("actor_forward",)))
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(both[name], forward_only[name])
    scale, elements = receipt.measured_scale("backward")
    assert abs(scale / 0.05 - 1) < 5 / (2 * elements) ** 0.5


def test_backward_noise_is_on_both_operands_of_every_product(model):
    _, receipt = gradients(model, MATMUL)
    calls = {cell.operator: cell.calls for cell in receipt.cells if cell.phase == "backward" and cell.layer == 2}
    assert calls == {"linear.gradient_0": 7, "linear.gradient_1": 7, "matmul.gradient_0": 2, "matmul.gradient_1": 2}


def test_forward_noise_gradient_is_straight_through(make_model):
    """With noise in the last product only, every gradient before it comes from the clean formula."""
    model = make_model(num_layers=1, tie_word_embeddings=False)
    head_only = OperatorNoise(error=RelativeGaussian(scale=0.3), phases=("actor_forward",), layers=())
    seen = {}
    for name, noise in (("clean", None), ("noised", head_only)):
        model.zero_grad()
        recorder = recorder_for(noise, num_layers=1)
        with phase_noise(model, spec_of(noise), "actor_forward", KEY, recorder):
            # A loss that is linear in the logits: its gradient does not depend on their values.
            (model(token_ids()).logits * 2).sum().backward()
        seen[name] = {key: p.grad.clone() for key, p in model.named_parameters()}
    assert all(torch.equal(gradient, seen["noised"][key]) for key, gradient in seen["clean"].items())


def test_gradients_replay(model):
    first, _ = gradients(model, MATMUL)
    second, _ = gradients(model, MATMUL)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gradient_checkpointing_recomputes_with_the_same_noise(make_model):
    """Checkpointed layers run again inside the backward pass; other noise there would give other gradients."""
    plain, checkpointed = make_model(), make_model()
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    noise = OperatorNoise(error=RelativeGaussian(scale=0.05), phases=("actor_forward",))
    results = []
    for network in (plain, checkpointed):
        network.train()
        recorder = recorder_for(noise)
        with phase_noise(network, spec_of(noise), "actor_forward", KEY, recorder):
            # The backward pass belongs inside: that is where the layers are computed again.
            network(token_ids(), labels=token_ids(), use_cache=False).loss.backward()
        results.append({name: p.grad for name, p in network.named_parameters()})
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name], rtol=1e-4, atol=1e-6)


def test_everything_is_removed_also_after_an_exception(model):
    before, bare = hook_count(model), logits(model, None)[0]
    recorder = recorder_for(MATMUL)
    with pytest.raises(RuntimeError, match="boom"), phase_noise(model, spec_of(MATMUL), "actor_forward", KEY, recorder):
        model(token_ids())
        raise RuntimeError("boom")
    assert hook_count(model) == before
    assert torch.equal(logits(model, None)[0], bare)


def test_an_exception_inside_the_model_leaves_no_mode_behind(model):
    recorder = recorder_for(MATMUL)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), phase_noise(model, spec_of(MATMUL), "actor_forward", KEY, recorder):
        model(token_ids())
    handle.remove()
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    assert torch.equal(a @ b, torch.matmul(a, b))
    logits(model, None)[1].check()


def test_nesting_is_refused(model):
    recorder = recorder_for(MATMUL)
    with phase_noise(model, spec_of(MATMUL), "actor_forward", KEY, recorder):
        with (
            pytest.raises(ModelError, match="do not nest"),
            phase_noise(model, spec_of(MATMUL), "rollout", KEY, recorder),
        ):
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
    monkeypatch.setattr(
        "aqnpipe.noise.kernels.error_models.add_relative_gaussian_", lambda tensor, scale, source: tensor
    )
    _, receipt = logits(model, MATMUL)
    with pytest.raises(ReceiptError, match=r"linear layer 0: the values used have no noise"):
        receipt.check()


def test_noise_at_half_the_scale_is_refused(model, monkeypatch):
    def half(tensor, scale, source):
        return add_relative_gaussian_(tensor, scale / 2, source)

    monkeypatch.setattr("aqnpipe.noise.kernels.error_models.add_relative_gaussian_", half)
    _, receipt = logits(model, MATMUL)
    with pytest.raises(
        ReceiptError, match=r"linear layer 0: \d+% of the sampled values are not those of the requested noise"
    ):
        receipt.check()


@pytest.mark.parametrize("bias", [0.1, 3.0, 100.0])
def test_rounding_of_biases_is_not_taken_for_noise(model, bias):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=bias, generator=torch.Generator().manual_seed(0))
    faint = OperatorNoise(operators="matmul", error=RelativeGaussian(scale=1e-4))
    recorder = recorder_for(faint)
    # Each step compares another eighth of the modules.
    for step in range(8):
        with (
            torch.no_grad(),
            phase_noise(model, spec_of(faint), "actor_forward", NoiseKey(seed=0, step=step), recorder),
        ):
            model(token_ids())
    assert recorder.receipt().check().phases[0].reference_check_scale == pytest.approx(1e-4, rel=0.05)


def test_the_first_forward_of_a_single_token_is_compared_in_full_however_many_came_before(model):
    def checked_elements(lengths):
        recorder = recorder_for(MATMUL)
        with torch.no_grad(), phase_noise(model, spec_of(MATMUL), "actor_forward", KEY, recorder):
            for length in lengths:
                model(token_ids(shape=(8, length)))
        return recorder.receipt().check().phases[0].reference_checked_elements

    # Up to 64 outputs of each of the 22 linear modules.
    several, one = 22 * 64, sum(min(64, 8 * m.out_features) for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert checked_elements([16]) == several
    assert checked_elements([1]) == one
    assert checked_elements([16, 16, 16, 1, 1, 16]) >= several + one


def test_a_mode_that_is_never_activated_is_refused(model, monkeypatch):
    monkeypatch.setattr("aqnpipe.noise.injection.operator_watch._OperatorMode.activate", lambda self: None)
    _, receipt = logits(model, MATMUL)
    with pytest.raises(ReceiptError, match=r"no matmul or bmm or baddbmm was noised in layers \[0, 1, 2\]"):
        receipt.check()
    _, receipt = gradients(model, MATMUL)
    with pytest.raises(ReceiptError, match=r"never reached layers \[0, 1, 2\]"):
        receipt.check()


def test_noise_left_by_another_patch_is_refused(model):
    """A patched F.linear, as in the original experiments, where no noise was requested."""
    layer = model.model.layers[0].self_attn.q_proj
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias) * 1.0001
    _, receipt = logits(model, None)
    with pytest.raises(ReceiptError, match="differ from plain torch"):
        receipt.check()


def test_a_phase_that_never_ran_is_refused(model):
    recorder = recorder_for(None, phases=("actor_forward", "rollout"))
    with torch.no_grad(), phase_noise(model, spec_of(None), "actor_forward", KEY, recorder):
        model(token_ids())
    with pytest.raises(ReceiptError, match="phase rollout never ran"):
        recorder.receipt().check()


# -- other errors ------------------------------------------------------------------------------------------------------


def noise_with(error, **settings):
    return OperatorNoise(error=error, **{"phases": ("actor_forward",), **settings})


@pytest.mark.parametrize(
    "error",
    [AbsoluteGaussian(scale=0.01), SystematicBias(scale=0.01), MantissaTruncation(mantissa_bits=7)],
    ids=lambda error: error.kind,
)
def test_every_error_model_is_added_and_measured(model, error):
    noised, receipt = logits(model, noise_with(error))
    receipt.check()
    assert not torch.equal(noised, logits(model, None)[0])
    calls = {(cell.operator, cell.layer): cell.calls for cell in receipt.cells}
    assert calls[("linear", 1)] == 7
    assert calls[("matmul", 1)] == 2


def test_the_bias_is_the_formula_on_the_product_alone(make_model):
    model = make_model(num_layers=1)
    projection = model.model.layers[0].self_attn.q_proj
    seen = []
    projection.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    noise = noise_with(SystematicBias(scale=0.25))
    recorder = recorder_for(noise, num_layers=1)
    with torch.no_grad(), phase_noise(model, spec_of(noise), "actor_forward", KEY, recorder):
        model(token_ids())
    ((inputs, output),) = seen
    product = inputs @ projection.weight.T
    torch.testing.assert_close(output, product + 0.25 * product.sign() + projection.bias)


@pytest.mark.parametrize(("scale", "is_lost"), [(1e-5, True), (1e-4, True), (0.05, False)])
def test_an_error_below_the_resolution_of_the_format_is_lost_and_no_mistake(make_model, scale, is_lost):
    """1e-5 of a bfloat16 is rounded away: this is what the format does to such an error."""
    model = make_model().to(torch.bfloat16)
    noised, receipt = logits(model, noise_with(RelativeGaussian(scale=scale)))
    receipt.check()
    assert torch.equal(noised, logits(model, None)[0]) == is_lost
    assert all(cell.is_lost == is_lost for cell in receipt.cells)
    # Half the spacing of bfloat16 is 2^-9 to 2^-8 of a number.
    assert all(2**-9 < math.sqrt(3) * cell.rounding < 2**-8 for cell in receipt.cells)


def test_an_error_that_float32_keeps_is_refused_if_it_is_too_small(make_model):
    _, receipt = logits(make_model(), noise_with(RelativeGaussian(scale=1e-5)))
    receipt.check()
    assert {cell.rounding for cell in receipt.cells} == {None}
    cells = tuple(cell.model_copy(update={"measured": 0.0}) for cell in receipt.cells)
    with pytest.raises(ReceiptError, match="measured scale 0, requested 1e-05, of which rounding"):
        receipt.model_copy(update={"cells": cells}).check()


@pytest.mark.parametrize("number_format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(("weights", "activations"), [(True, False), (False, True), (True, True)])
def test_quantized_linears_compute_with_quantized_operands(make_model, number_format, weights, activations):
    model = make_model(intermediate_size=64, num_layers=1)
    error = FakeQuantization(format=number_format, weights=weights, activations=activations)
    projection = model.model.layers[0].mlp.down_proj
    seen = []
    projection.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    noise = noise_with(error)
    recorder = recorder_for(noise, num_layers=1)
    with phase_noise(model, spec_of(noise), "actor_forward", KEY, recorder):
        model(token_ids())
    recorder.receipt().check()
    ((inputs, output),) = seen
    used = fake_quantize(inputs, number_format) if activations else inputs
    weight = fake_quantize(projection.weight, number_format) if weights else projection.weight
    assert torch.equal(output, F.linear(used, weight))
    output.sum().backward()
    gradient = fake_quantize(inputs, number_format) if activations else inputs
    torch.testing.assert_close(projection.weight.grad, gradient.detach().sum((0, 1)).expand_as(projection.weight))


def test_weights_are_quantized_once_per_rollout(make_model):
    model = make_model(intermediate_size=64)
    noise = noise_with(FakeQuantization(format="mxfp4"), phases=("rollout",))
    recorder = recorder_for(noise, phases=("rollout",))
    with torch.no_grad(), phase_noise(model, spec_of(noise), "rollout", KEY, recorder):
        for _ in range(3):
            model(token_ids(), use_cache=False)
    receipt = recorder.receipt().check()
    assert {cell.calls for cell in receipt.cells if cell.layer is not None} == {7}


def test_layers_can_have_their_own_scale(model):
    noise = noise_with(RelativeGaussian(scale=0.05), layer_scales={1: 0.2, 2: 0.0})
    _, receipt = logits(model, noise)
    receipt.check()
    assert {cell.layer: cell.requested for cell in receipt.cells} == {0: 0.05, 1: 0.2, None: 0.05}


def test_fused_attention_is_noised_as_one_operator(make_model):
    model = make_model(attn_implementation="sdpa")
    noise = noise_with(RelativeGaussian(scale=0.05), attention="fused", phases=("actor_forward", "backward"))
    _, receipt = gradients(model, noise)
    receipt.check()
    calls = {cell.operator: cell.calls for cell in receipt.cells if cell.layer == 1 and cell.phase == "actor_forward"}
    assert calls == {"linear": 7, "scaled_dot_product_attention": 1}
    backward = {cell.operator for cell in receipt.cells if cell.layer == 1 and cell.phase == "backward"}
    assert {f"scaled_dot_product_attention.gradient_{operand}" for operand in range(3)} <= backward


def test_fused_attention_that_was_requested_but_never_called_is_refused(model):
    _, receipt = logits(model, noise_with(RelativeGaussian(scale=0.05), attention="fused"))
    with pytest.raises(ReceiptError, match=r"no scaled_dot_product_attention was noised in layers \[0, 1, 2\]"):
        receipt.check()


# -- modules -----------------------------------------------------------------------------------------------------------


def module_logits(model, noise, key=KEY):
    recorder = recorder_for(noise, phases=("rollout",))
    with torch.no_grad(), phase_noise(model, spec_of(noise), "rollout", key, recorder):
        output = model(token_ids()).logits
    return output, recorder.receipt()


@pytest.mark.parametrize("point", ["input", "output"])
@pytest.mark.parametrize(("scope", "count"), [("minimal", 7), ("mlp", 10), ("linear", 22), ("all", 29)])
def test_module_noise_reaches_every_module_of_its_scope(model, scope, count, point):
    noise = ModuleNoise(modules=scope, point=point, error=RelativeGaussian(scale=0.05))
    noised, receipt = module_logits(model, noise)
    receipt.check()
    assert receipt.num_noised_modules == receipt.phases[0].modules_noised == count
    assert not torch.equal(noised, logits(model, None)[0])
    assert torch.equal(noised, module_logits(model, noise)[0])


def test_input_noise_is_on_what_the_module_gets(model):
    seen = []
    projection = model.model.layers[1].mlp.down_proj
    noise = ModuleNoise(modules=("*.layers.1.mlp.down_proj",), error=SystematicBias(scale=0.5))
    recorder = recorder_for(noise, phases=("rollout",))
    with torch.no_grad(), phase_noise(model, spec_of(noise), "rollout", KEY, recorder):
        projection.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
        model(token_ids())
    recorder.receipt().check()
    ((inputs, output),) = seen
    assert (inputs[inputs != 0].abs() > 0.49).all()
    assert torch.equal(output, projection(inputs))


def test_modules_noised_twice_in_one_forward_get_fresh_noise(model):
    """A module that is shared between two places must not repeat its noise."""
    model.model.layers[1].mlp = model.model.layers[0].mlp
    noise = ModuleNoise(modules=("*.layers.0.mlp.act_fn",), point="output", error=AbsoluteGaussian(scale=1.0))
    seen = []
    recorder = recorder_for(noise, phases=("rollout",))
    bare = model.model.layers[0].mlp.act_fn.forward
    with torch.no_grad(), phase_noise(model, spec_of(noise), "rollout", KEY, recorder):
        model.model.layers[0].mlp.act_fn.register_forward_hook(
            lambda module, args, output: seen.append(output - bare(args[0]))
        )
        model(token_ids())
    assert abs(torch.corrcoef(torch.stack([s.flatten() for s in seen]))[0, 1].item()) < 5 / seen[0].numel() ** 0.5


def test_a_module_that_was_skipped_is_refused(model):
    noise = ModuleNoise(modules="linear", error=RelativeGaussian(scale=0.05))
    recorder = recorder_for(noise, phases=("rollout",))
    with torch.no_grad(), phase_noise(model, spec_of(noise), "rollout", KEY, recorder):
        model.model(token_ids())  # without lm_head
    with pytest.raises(ReceiptError, match="module noise reached 21 of 22 modules"):
        recorder.receipt().check()


def test_a_pattern_that_matches_nothing_is_refused(model):
    noise = ModuleNoise(modules=("*.q_proj", "*.w_proj"), error=RelativeGaussian(scale=0.05))
    with pytest.raises(ModelError, match=r"pattern '\*\.w_proj' matches none of \d+ modules"):
        module_logits(model, noise)


# -- semantics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operators", ["matmul", "all"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize(("attention", "kernel"), [("decomposed", "eager"), ("fused", "sdpa")])
def test_checkpointed_layers_replay_forward_and_backward_noise(
    make_model, operators, use_reentrant, backward_inside, attention, kernel
):
    """Also if the backward pass comes after the phase: the recomputation registers its hooks again and counts once."""
    noise = OperatorNoise(
        operators=operators,
        error=RelativeGaussian(scale=0.05),
        phases=("actor_forward", "backward"),
        attention=attention,
    )
    results, receipts = [], []
    for checkpointed in (False, True):
        model = make_model(attn_implementation=kernel).train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        hooks = hook_count(model)
        recorder = recorder_for(noise, phases=("actor_forward", "backward"))
        with phase_noise(model, spec_of(noise), "actor_forward", KEY, recorder, backward=True):
            loss = model(token_ids(), labels=token_ids(), use_cache=False).loss
            if backward_inside:
                with audited_backward(model, recorder):
                    loss.backward()
        if not backward_inside:
            with audited_backward(model, recorder):
                loss.backward()
        recorder.count_forward("backward")
        assert hook_count(model) == hooks
        results.append({name: p.grad for name, p in model.named_parameters()})
        receipts.append(recorder.receipt().check())
    calls = [[(cell.where, cell.calls, cell.elements) for cell in receipt.cells] for receipt in receipts]
    assert calls[0] == calls[1]
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name


def test_a_checkpointed_layer_under_module_noise_replays_too(make_model):
    noise = ModuleNoise(modules="all", error=RelativeGaussian(scale=0.05), phases=("actor_forward",))
    results = []
    for checkpointed in (False, True):
        model = make_model().train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        recorder = recorder_for(noise, phases=())
        with phase_noise(model, spec_of(noise), "actor_forward", KEY, recorder):
            loss = model(token_ids(), labels=token_ids(), use_cache=False).loss
        loss.backward()
        recorder.receipt().check()
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradient, results[1][name]) for name, gradient in results[0].items())


def test_ranks_phases_layers_and_calls_have_independent_noise(model):
    """The stale-layer trap: gradients of each layer carry that layer's own numbers, whatever ran in between."""
    seen = {}

    def collect(key, phase):
        def spy(tensor, scale, source):
            seen.setdefault((key.rank, phase), []).append(source)
            return add_relative_gaussian_(tensor, scale, source)

        return spy

    for rank in (0, 1):
        for phase in ("actor_forward", "reference"):
            key = NoiseKey(seed=0, step=0, rank=rank)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("aqnpipe.noise.kernels.error_models.add_relative_gaussian_", collect(key, phase))
                noise = OperatorNoise(
                    error=RelativeGaussian(scale=0.05), phases=("actor_forward", "backward", "reference")
                )
                recorder = recorder_for(noise, phases=(phase,))
                with phase_noise(model, spec_of(noise), phase, key, recorder, backward=phase == "actor_forward"):
                    loss = model(token_ids(), labels=token_ids()).loss
                if phase == "actor_forward":
                    loss.backward()
    every = [source for sources in seen.values() for source in sources]
    assert len(every) == len(set(every))
    # Forward 7 linear + 2 matmul in 3 layers and the head; backward both operands of each.
    assert len(seen[0, "reference"]) == 3 * 9 + 1
    assert len(seen[0, "actor_forward"]) == 3 * (3 * 9 + 1)


def test_a_stale_layer_in_the_backward_pass_is_impossible(model):
    """A global layer id, read in backward, would be that of the last forward. Here each cell keeps its own."""
    noise = OperatorNoise(
        error=RelativeGaussian(scale=0.05), phases=("actor_forward", "backward"), layer_scales={0: 0.01, 2: 0.3}
    )
    _, receipt = gradients(model, noise)
    receipt.check()
    backward = {cell.layer: cell.requested for cell in receipt.cells if cell.phase == "backward"}
    assert backward == {0: 0.01, 1: 0.05, 2: 0.3, None: 0.05}


def test_two_forwards_before_their_backward_passes_keep_their_own_noise(model):
    """Interleaved graphs: each backward pass belongs to the forward that built it."""
    alone, _ = gradients(model, MATMUL)
    model.zero_grad()
    recorder = recorder_for(MATMUL, phases=("actor_forward", "backward"))
    with phase_noise(model, spec_of(MATMUL), "actor_forward", KEY, recorder, backward=True):
        first = model(token_ids(), labels=token_ids()).loss
        second = model(token_ids(), labels=token_ids()).loss
    first.backward()
    assert all(torch.equal(p.grad, alone[name]) for name, p in model.named_parameters())
    model.zero_grad()
    second.backward()
    assert any(not torch.equal(p.grad, alone[name]) for name, p in model.named_parameters())


def test_a_compiled_model_is_refused(model):
    model.model.layers[1].compile()
    with (
        pytest.raises(ModelError, match="compiled"),
        phase_noise(model, spec_of(MATMUL), "rollout", KEY, recorder_for(MATMUL)),
    ):
        pass


def test_compiling_a_model_under_noise_is_refused_or_keeps_the_noise(model):
    """torch.compile inside the phase: the compiler must fall back to the noised model, or stop."""
    noised, _ = logits(model, MATMUL)
    recorder = recorder_for(MATMUL)
    with torch.no_grad(), phase_noise(model, spec_of(MATMUL), "actor_forward", KEY, recorder):
        compiled = torch.compile(model, backend="eager")(token_ids()).logits
    recorder.receipt().check()
    assert torch.equal(compiled, noised)


def test_no_noise_tensor_is_kept_for_the_backward_pass(make_model):
    """What autograd saves is as large with noise as without."""

    def saved_bytes(noise):
        model, saved = make_model(), {}

        def pack(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        recorder = recorder_for(noise, phases=("actor_forward",))
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            phase_noise(model, spec_of(noise), "actor_forward", KEY, recorder, backward=True),
        ):
            model(token_ids(), labels=token_ids(), use_cache=False).loss.backward()
        return sum(saved.values())

    assert saved_bytes(MATMUL) <= saved_bytes(None)


def test_the_share_of_operations_is_counted_from_shapes(make_model):
    model = make_model(num_layers=2)
    noise = noise_with(RelativeGaussian(scale=0.05), layers=(0,), include_lm_head=False)
    recorder = recorder_for(noise, num_layers=2)
    with torch.no_grad(), phase_noise(model, spec_of(noise), "actor_forward", KEY, recorder):
        model(token_ids(shape=(2, 10)), use_cache=False)
    record = recorder.receipt().check().phases[0]
    tokens, hidden, inner, vocabulary, heads, head_dim = 20, 32, 48, 64, 2, 16
    linears = 2 * tokens * (2 * hidden * hidden + 2 * hidden * head_dim + 3 * hidden * inner)
    attention = 2 * 2 * (2 * heads * 10 * 10 * head_dim)
    assert record.noised_flops == linears + attention
    head = 2 * tokens * hidden * vocabulary
    assert record.forward_flops == 2 * (linears + attention) + head
    assert record.noised_share == record.noised_flops / record.forward_flops


def test_noised_softmax_stays_a_distribution(model):
    seen = []
    attention = model.model.layers[1].self_attn
    noise = noise_with(RelativeGaussian(scale=0.3), operators="all")
    recorder = recorder_for(noise)
    attention.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    with torch.no_grad(), phase_noise(model, spec_of(noise), "actor_forward", KEY, recorder):
        model(token_ids(), output_attentions=True)
    (weights,) = seen
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    recorder.receipt().check()


def test_a_model_without_layers_or_norms_is_refused():
    with pytest.raises(ModelError, match="no decoder layers found"):
        phase_noise(torch.nn.Linear(2, 2), spec_of(MATMUL), "rollout", KEY, recorder_for(MATMUL)).__enter__()


@pytest.mark.parametrize("num_tokens", [45, 60, 64, 90])
def test_measured_elements_are_spread_over_rows_whatever_the_shape(num_tokens):
    """Gradients of attention weights are zero in the rows of prompts; a regular step through them met no others."""
    weights = torch.zeros(32, 4, num_tokens, num_tokens)
    weights[:, :, -25:] = 1.0
    share, count = 25 / num_tokens, MEASURED_ELEMENTS_PER_CALL
    measured = sample(weights)
    assert measured.numel() == count
    assert abs(measured.mean().item() - share) < 4 * (share * (1 - share) / count) ** 0.5
    positions = sample_positions(weights.numel(), weights.device)
    assert (positions.diff() > 0).all()
    assert positions[0] >= 0
    assert positions[-1] < weights.numel()
