"""One phase of a study on a simulated machine: what has noise, which noise, and that everything is restored.

Right and wrong uses of the machine itself are in tests/noise/test_noisy.py, sabotages in tests/proof.
"""

import math
from dataclasses import replace
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from random_models import random_mixture_of, random_model_of
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

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
from aqnpipe.machine import machine
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import decoder_layers
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

KEY = NoiseKey(seed=0, step=0)
RELATIVE = RelativeGaussian(scale=0.05)
MATMUL = OperatorNoise(error=RELATIVE, phases=("actor_forward", "backward"))
MODULES = ModuleNoise(modules="linear", error=RELATIVE, phases=("actor_forward",))
GENERATION = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def spec_of(noise):
    """`noise` on operators or on modules as all that a phase computes under."""
    return NoiseSpec(module_noise=noise) if isinstance(noise, ModuleNoise) else NoiseSpec(operator_noise=noise)


def recorder_for(noise, phases=("actor_forward",), num_layers=3):
    return ReceiptRecorder(spec_of(noise), expected_phases=phases, num_layers=num_layers, num_norms=7)


def token_ids(seed=1, shape=(8, 16)):
    return torch.randint(2, 64, shape, generator=torch.Generator().manual_seed(seed))


def noised(model, noise, body, key=KEY, phase="actor_forward"):
    """Return what `body` returns in a phase without gradients, and the receipt."""
    recorder = recorder_for(noise, (phase,), len(decoder_layers(model)))
    with torch.no_grad(), phase_noise(model, spec_of(noise), phase, key, recorder):
        result = body()
    return result, recorder.receipt()


def logits(model, noise, key=KEY, phase="actor_forward", ids=None):
    return noised(model, noise, lambda: model(token_ids() if ids is None else ids).logits, key, phase)


def gradients(model, noise, key=KEY):
    """Return gradients by name and the receipt of a training step."""
    recorder = recorder_for(noise, ("actor_forward", "backward"))
    model.zero_grad()
    with phase_noise(model, spec_of(noise), "actor_forward", key, recorder, backward=True):
        model(token_ids(), labels=token_ids(), use_cache=False).loss.backward()
    recorder.count_backward(key.step)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found, recorder.receipt()


def calls_of(receipt, phase="actor_forward"):
    """Return the number of noised calls by operator and layer."""
    return {(cell.operator, cell.layer): cell.calls for cell in receipt.cells if cell.phase == phase}


def noise_with(error, **settings):
    return OperatorNoise(error=error, **{"phases": ("actor_forward",), **settings})


def hook_count(model):
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


# -- forward passes ---------------------------------------------------------------------------------------------------


def test_no_noise_requested_changes_no_bit_and_the_reference_check_finds_no_difference(model):
    with torch.no_grad():
        bare = model(token_ids()).logits
    clean, receipt = logits(model, None)
    assert torch.equal(clean, bare)
    receipt.check()
    (record,) = receipt.phases
    assert record.calls == 0
    assert record.largest_difference == 0.0
    assert record.compared > 0


@pytest.mark.parametrize("operators", ["matmul", "all"])
def test_scale_zero_changes_no_bit(model, operators):
    zero = OperatorNoise(operators=operators, error=RelativeGaussian(scale=0.0))
    assert torch.equal(logits(model, zero)[0], logits(model, None)[0])


def test_same_key_replays_other_keys_do_not(model):
    first, _ = logits(model, MATMUL)
    assert torch.equal(first, logits(model, MATMUL)[0])
    for name in KEY._fields:
        assert not torch.equal(first, logits(model, MATMUL, key=KEY._replace(**{name: 1}))[0])


def test_global_random_state_is_neither_read_nor_used_up(model):
    torch.manual_seed(5)
    first, _ = logits(model, MATMUL)
    state = torch.random.get_rng_state()
    torch.manual_seed(6)
    second, _ = logits(model, MATMUL)
    assert torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({"operators": "matmul"}, {}),
        ({"operators": "all"}, {"_softmax": 1, "silu": 1, "norm": 2}),
    ],
)
def test_every_product_of_every_layer_is_noised_and_measured(model, settings, others):
    _, receipt = logits(model, MATMUL.model_copy(update=settings))
    receipt.check()
    in_layers = {"mm": 7, "bmm": 2, **others}
    assert calls_of(receipt) == {
        **{(name, layer): calls for layer in range(3) for name, calls in in_layers.items()},
        ("mm", None): 1,
    }
    scale, elements = receipt.measured_scale("actor_forward")
    assert abs(scale / 0.05 - 1) < 5 / (2 * elements) ** 0.5


def test_rotary_angles_are_not_noised(model):
    """The rotary embedding multiplies positions by frequencies with `@`; noise there would move every position."""
    seen = []
    handle = model.model.rotary_emb.register_forward_hook(lambda module, args, output: seen.append(output[0].clone()))
    logits(model, MATMUL)
    with torch.no_grad():
        model(token_ids())
    handle.remove()
    assert torch.equal(seen[0], seen[1])


def test_the_error_of_a_sum_is_on_its_product_alone(make_model):
    """With a zero weight the product is 0, so relative noise on it leaves the bias exact."""
    model, seen = make_model(), {}
    projection = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        projection.weight.zero_()
        projection.bias.fill_(3.0)

    def compute(module, args, output):
        ones, zeros, added = torch.ones(6, 5), torch.zeros(4, 6), torch.full((4, 5), 3.0)
        seen["bias"] = output
        seen["sum"] = torch.addmm(added, zeros, ones, beta=2, alpha=7)
        seen["batch"] = torch.baddbmm(added[None], batch1=zeros[None], batch2=ones[None], beta=0.5)
        seen["named"] = torch.addmm(added, mat2=ones, mat1=torch.ones(4, 6), alpha=10, out=torch.empty(4, 5))
        seen["alone"] = torch.addmm(torch.full((4, 5), torch.nan), torch.ones(4, 6), ones, beta=0)

    projection.register_forward_hook(compute)
    logits(model, MATMUL)[1].check()
    for name, exact in {"bias": 3.0, "sum": 6.0, "batch": 1.5}.items():
        assert torch.equal(seen[name], torch.full_like(seen[name], exact))
    for relative in ((seen["named"] - 3) / 60 - 1, seen["alone"] / 6 - 1):
        assert 0.02 < relative.std() < 0.1


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({"include_lm_head": False}, {0: 0.05, 1: 0.05, 2: 0.05}),
        ({"include_lm_head": False, "layers": (1,)}, {1: 0.05}),
        ({"layer_scales": {1: 0.2, 2: 0.0}}, {0: 0.05, 1: 0.2, None: 0.05}),
    ],
)
def test_only_the_chosen_places_are_noised_each_with_its_scale(model, settings, scales):
    _, receipt = logits(model, OperatorNoise(error=RELATIVE, phases=("actor_forward",), **settings))
    receipt.check()
    assert {cell.layer: cell.requested for cell in receipt.cells} == scales


def test_the_share_of_operations_is_counted_from_shapes(make_model):
    model = make_model(num_layers=2)
    noise = noise_with(RELATIVE, layers=(0,), include_lm_head=False)
    _, receipt = noised(model, noise, lambda: model(token_ids(shape=(2, 10)), use_cache=False))
    record = receipt.check().phases[0]
    tokens, hidden, inner, vocabulary, heads, head_dim = 20, 32, 48, 64, 2, 16
    linears = 2 * tokens * (2 * hidden * hidden + 2 * hidden * head_dim + 3 * hidden * inner)
    attention = 2 * 2 * (2 * heads * 10 * 10 * head_dim)
    assert record.noised_flops == linears + attention
    head = 2 * tokens * hidden * vocabulary
    assert record.flops == 2 * (linears + attention) + head
    assert record.noised_share == record.noised_flops / record.flops


def test_noised_softmax_stays_a_distribution(model):
    noise = noise_with(RelativeGaussian(scale=0.3), operators="all")
    found, receipt = noised(model, noise, lambda: model(token_ids(), output_attentions=True).attentions[1])
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]))
    receipt.check()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_inference_mode_has_the_same_noise(make_model, attention):
    model = make_model(attn_implementation=attention)
    noise = noise_with(RELATIVE, attention="fused" if attention == "sdpa" else "decomposed")
    expected, _ = logits(model, noise)
    with torch.inference_mode():
        found, receipt = logits(model, noise)
    assert receipt.check().phases[0].noised_share == 1
    assert torch.equal(found, expected)


# -- backward passes ---------------------------------------------------------------------------------------------------


def test_backward_noise_changes_gradients_and_is_on_those_of_both_factors(model):
    both, receipt = gradients(model, MATMUL)
    receipt.check()
    forward_only, _ = gradients(model, noise_with(RELATIVE))
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(both[name], forward_only[name])
    scale, elements = receipt.measured_scale("backward")
    assert abs(scale / 0.05 - 1) < 5 / (2 * elements) ** 0.5
    in_layers = {(name, layer): calls for layer in range(3) for name, calls in (("mm", 2 * 7), ("bmm", 2 * 2))}
    assert calls_of(receipt, "backward") == {**in_layers, ("mm", None): 2}


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


@pytest.mark.parametrize("operators", ["matmul", "all"])
@pytest.mark.parametrize(("attention", "kernel"), [("decomposed", "eager"), ("fused", "sdpa")])
def test_gradients_replay_and_checkpointed_layers_compute_again_with_their_noise(
    make_model, operators, attention, kernel
):
    noise = MATMUL.model_copy(update={"operators": operators, "attention": attention})
    results = []
    for reentrant in (None, None, False, True):
        model = make_model(attn_implementation=kernel).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        hooks = hook_count(model)
        found, receipt = gradients(model, noise)
        assert hook_count(model) == hooks
        results.append((found, [(cell.where, cell.calls, cell.elements) for cell in receipt.check().cells]))
    first, cells = results[0]
    if kernel == "sdpa":
        names = {cell.operator for cell in receipt.cells if cell.phase == "backward" and cell.layer == 1}
        assert "_scaled_dot_product_flash_attention_for_cpu_backward" in names
    for found, other in results[1:]:
        assert other == cells
        assert all(torch.equal(gradient, found[name]) for name, gradient in first.items())


@pytest.mark.parametrize("trained", ["layers.2.mlp.down_proj", "layers.0.mlp", "layers.1.self_attn.q_proj", "lm_head"])
def test_gradients_of_frozen_weights_are_not_expected(make_model, trained):
    model = make_model(tie_word_embeddings=False)
    for name, weight in model.named_parameters():
        weight.requires_grad_(trained in name)
    assert gradients(model, MATMUL)[1].check().measured_scale("backward")[1] > 0


def test_a_frozen_layer_above_a_trained_one_must_have_noise_on_its_gradients(model, monkeypatch):
    for name, weight in model.named_parameters():
        weight.requires_grad_("layers.0" in name)
    on_result = machine.Machine._on_result

    def skipped(self, operator, result, *others):
        _, is_gradient, part, *_ = self._where()
        return result if is_gradient and part == 2 else on_result(self, operator, result, *others)

    monkeypatch.setattr(machine.Machine, "_on_result", skipped)
    with pytest.raises(ReceiptError, match=r"backward: noise was requested but never reached layers \[2\]"):
        gradients(model, MATMUL)[1].check()


def test_layers_and_phases_and_ranks_have_independent_noise(model, monkeypatch):
    """Gradients of each layer carry that layer's own numbers, whatever ran in between."""
    apply, seen = machine.apply_error_, {}
    noise = OperatorNoise(error=RELATIVE, phases=("actor_forward", "backward", "reference"))
    for rank in (0, 1):
        for phase in ("actor_forward", "reference"):
            sources = seen[rank, phase] = []
            monkeypatch.setattr(
                machine, "apply_error_", lambda *call, sources=sources: (sources.append(call[2]), apply(*call))
            )
            recorder, key = recorder_for(noise, (phase,)), KEY._replace(rank=rank)
            with phase_noise(model, spec_of(noise), phase, key, recorder, backward=phase == "actor_forward"):
                loss = model(token_ids(), labels=token_ids()).loss
                if phase == "actor_forward":
                    loss.backward()
    every = [source for sources in seen.values() for source in sources]
    assert len(every) == len(set(every))
    # Forward 7 linear modules and 2 products of attention in 3 layers and the head; backward both factors of each.
    assert len(seen[0, "reference"]) == 3 * 9 + 1
    assert len(seen[0, "actor_forward"]) == 3 * (3 * 9 + 1)


def test_each_gradient_has_the_scale_of_its_layer(model):
    """A global layer id, read in backward, would be that of the last forward. Here each cell keeps its own."""
    _, receipt = gradients(model, MATMUL.model_copy(update={"layer_scales": {0: 0.01, 2: 0.3}}))
    receipt.check()
    backward = {cell.layer: cell.requested for cell in receipt.cells if cell.phase == "backward"}
    assert backward == {0: 0.01, 1: 0.05, 2: 0.3, None: 0.05}


def test_two_forwards_before_their_backward_passes_keep_their_own_noise(model):
    """Interleaved graphs: each backward pass belongs to the forward that built it."""
    alone, _ = gradients(model, MATMUL)
    model.zero_grad()
    recorder = recorder_for(MATMUL, ("actor_forward", "backward"))
    with phase_noise(model, spec_of(MATMUL), "actor_forward", KEY, recorder, backward=True):
        first = model(token_ids(), labels=token_ids()).loss
        second = model(token_ids(), labels=token_ids()).loss
        first.backward()
        assert all(torch.equal(p.grad, alone[name]) for name, p in model.named_parameters())
        model.zero_grad()
        second.backward()
        assert any(not torch.equal(p.grad, alone[name]) for name, p in model.named_parameters())


def test_no_noise_tensor_is_kept_for_the_backward_pass(make_model):
    """What autograd saves is as large with noise as without."""

    def saved_bytes(noise):
        model, saved = make_model(), {}

        def pack(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            gradients(model, noise)
        return sum(saved.values())

    assert saved_bytes(MATMUL) <= saved_bytes(None)


@pytest.mark.parametrize("backward", [False, True])
def test_linear_modules_may_have_weight_norm(model, backward):
    for layer in model.model.layers:
        weight_norm(layer.mlp.up_proj)
    (gradients if backward else logits)(model, MATMUL)[1].check()


# -- what a body may do with the model ---------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """A model of one's own around another, as value heads have it; ids may be packed [tokens] or in a dictionary."""

    def __init__(self, inner):
        super().__init__()
        self.lm_head, self.inner, self.config = inner.lm_head, inner, inner.config

    def forward(self, batch=None, **inputs):
        if batch is not None:
            inputs = batch if isinstance(batch, dict) else {"input_ids": batch.reshape(-1, batch.shape[-1])}
        return self.inner(**inputs)

    def generate(self, *args, **kwargs):
        return self.inner.generate(*args, **kwargs)


def adapted(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)).eval()


@pytest.mark.parametrize("wrapped", [lambda model: model, adapted, Wrapper], ids=["model", "peft", "wrapper"])
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("noise", [MATMUL, MODULES], ids=["operators", "modules"])
def test_every_step_of_a_generation_is_a_pass_with_noise_of_its_own(model, wrapped, in_thread, noise):
    outer, found = wrapped(model), []
    ids = token_ids(shape=(2, 5))

    def generate():
        with torch.no_grad():
            found.extend(outer(input_ids=ids).logits[:, -1:] for _ in range(2))
            outer.generate(input_ids=ids, **GENERATION)

    def body():
        thread = Thread(target=generate)
        thread.run() if not in_thread else (thread.start(), thread.join())

    _, receipt = noised(outer, noise, body)
    assert receipt.check().phases[0].passes == 2 + 4
    assert not torch.equal(*found)


@pytest.mark.parametrize("batch_of", [lambda ids: ids[0], lambda ids: {"input_ids": ids}], ids=["packed", "dictionary"])
def test_ids_may_be_packed_or_in_a_dictionary(model, batch_of):
    packed = Wrapper(model)
    noised(packed, MATMUL, lambda: packed(batch_of(token_ids())))[1].check()


def test_two_threads_in_the_model_at_once_are_refused_in_one_line(model):
    found = []

    def call():
        with pytest.raises(ModelError, match="two threads call the model at the same time under noise") as error:
            model(token_ids())
        found.append(error)

    def meanwhile(module, args):
        thread = Thread(target=call)
        thread.start()
        thread.join()

    def body():
        handle = model.model.layers[1].register_forward_pre_hook(meanwhile)
        model(token_ids())
        handle.remove()
        model(token_ids())

    _, receipt = noised(model, MATMUL, body)
    assert len(found) == 1
    # The pass of the first thread was not disturbed.
    assert receipt.check().phases[0].passes == 2


def test_a_replica_of_the_model_is_refused_in_one_line(model):
    def body():
        with pytest.raises(ModelError, match="a replica of Qwen2ForCausalLM"):
            model._replicate_for_data_parallel()(token_ids())
        nn.DataParallel(model)(token_ids())  # without a GPU it calls the model itself

    assert noised(model, MATMUL, body)[1].check().phases[0].passes == 1


@pytest.mark.parametrize("noise", [MATMUL, MODULES], ids=["operators", "modules"])
def test_parts_called_outside_a_call_of_the_model_have_noise(model, noise):
    hidden, seen = torch.ones(1, 2, 32), []

    def body():
        model(token_ids())
        for part in (model.lm_head, model.model.layers[0].mlp):
            seen.extend((part(hidden), part(hidden)))
        seen.extend((model.model(token_ids())[0], model.forward(token_ids()).logits))
        model(token_ids())

    _, receipt = noised(model, noise, body)
    receipt.check()
    with torch.no_grad():
        exact = [model.lm_head(hidden), model.model.layers[0].mlp(hidden), model.model(token_ids())[0]]
    assert not torch.equal(seen[0], seen[1])
    for found, clean in zip((seen[1], seen[3], seen[4]), exact, strict=True):
        assert 0.01 < ((found - clean).norm() / clean.norm()) < 0.5


def new_layer(model):
    torch.manual_seed(0)
    return type(model.model.layers[1])(model.config, 1).eval()


REPLACEMENTS = {
    "layer": lambda model: model.model.layers.__setitem__(1, new_layer(model)),
    "list": lambda model: setattr(model.model, "layers", nn.ModuleList(new_layer(model) for _ in model.model.layers)),
    "linear": lambda model: setattr(model.model.layers[1].mlp, "up_proj", nn.Linear(32, 48, bias=False)),
    "head": lambda model: setattr(model, "lm_head", nn.Linear(32, 64, bias=False)),
    "backbone": lambda model: setattr(model, "model", type(model.model)(model.config).eval()),
    "appended": lambda model: model.model.layers.append(new_layer(model)),
}


@pytest.mark.parametrize("replaced", REPLACEMENTS)
def test_modules_replaced_in_the_body_have_noise(model, replaced):
    seen = []

    def body():
        model(token_ids(), use_cache=False)
        REPLACEMENTS[replaced](model)
        # An appended one is not called: the model of transformers has as many layers as its configuration says.
        seen.extend(model(token_ids(), use_cache=False).logits for _ in range(2))

    _, receipt = noised(model, MATMUL, body)
    assert sum(cell.calls for cell in receipt.check().cells) == 3 * (3 * 9 + 1)
    with torch.no_grad():
        clean = model(token_ids(), use_cache=False).logits
    assert not torch.equal(*seen)
    assert not torch.equal(seen[0], clean)


def test_products_around_the_layers_have_noise_unless_layers_are_named(model):
    weight, seen, passes = torch.randn(32, 32) / 6, [], []

    def compute(module, args, output):
        passes.append(output)
        if len(passes) % 12 > 1:
            # Behind the first pass, which is audited as a whole.
            seen.append((output @ weight) / torch.mul(output[..., None], weight).sum(-2) - 1)

    model.model.norm.register_forward_hook(compute)
    _, receipt = noised(model, MATMUL, lambda: [model(token_ids(shape=(2, 6))) for _ in range(12)])
    assert receipt.check().phases[0].noised_share == 1
    assert torch.stack(seen).std() == pytest.approx(0.05, rel=0.05)
    seen.clear()
    in_layers = noise_with(RELATIVE, layers=(0, 1, 2), include_lm_head=False)
    noised(model, in_layers, lambda: [model(token_ids(shape=(2, 6))) for _ in range(12)])[1].check()
    assert torch.stack(seen).std() < 1e-3


def test_what_computes_later_or_less_is_noised_and_counted(model):
    """A product that begins with a later pass, and adapters that are off in some, as under PEFT's `disable_adapter`."""

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.low, self.up = base, nn.Linear(32, 4, bias=False), nn.Linear(4, base.out_features)
            self.passes = 0

        def forward(self, hidden):
            self.passes += 1
            if self.passes > 10:
                hidden = hidden @ torch.eye(32)
            return self.base(hidden) + (0 if self.passes % 2 else self.up(self.low(hidden)))

    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    _, receipt = noised(model, MATMUL, lambda: [model(token_ids(shape=(2, 4))) for _ in range(20)])
    calls = calls_of(receipt.check())
    assert (calls["mm", 1], calls["bmm", 1]) == (20 * 7 + 10 * 2 + 10, 20 * 2)


@pytest.mark.parametrize("architecture", ["gemma2", "qwen2_moe"])
def test_a_generation_of_other_architectures(architecture):
    """Experts are called in an order that changes from token to token."""
    model = random_model_of(architecture) if architecture == "gemma2" else random_mixture_of(architecture)
    body = lambda: model.generate(token_ids(shape=(2, 6)) % 40 + 2, **(GENERATION | {"max_new_tokens": 12}))  # noqa: E731
    _, receipt = noised(model, MATMUL, body)
    assert receipt.check().phases[0].noised_share == 1


def die_once(model):
    """Let the next call of a layer end in an exception, as one without enough memory does."""

    def die(module, args):
        handle.remove()
        raise torch.OutOfMemoryError("simulated")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(die)


@pytest.mark.parametrize("escapes", [False, True])
def test_a_forward_that_died_disturbs_no_other_and_is_no_audit_of_the_whole(model, escapes):
    if escapes:
        model.model.norm.register_forward_hook(lambda module, args, output: output + 0 * output.cumprod(-1))

    def body():
        die_once(model)
        with pytest.raises(torch.OutOfMemoryError):
            model(token_ids())
        model(token_ids())

    _, receipt = noised(model, MATMUL, body)
    assert receipt.phases[0].noised_share == 1
    found = [problem for problem in receipt.problems() if "calls of aten.cumprod in no layer" in problem]
    assert receipt.problems() == found
    assert len(found) == escapes


def test_everything_is_removed_also_after_an_exception(model):
    before, bare = hook_count(model), logits(model, None)[0]
    for module in (model, model.model.layers[1]):
        handle = module.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(model, MATMUL)
        handle.remove()
        assert hook_count(model) == before
        a = torch.randn(8, 8)
        assert torch.equal(a @ a, torch.matmul(a, a))
        assert torch.equal(logits(model, None)[0], bare)


def test_a_model_without_layers_or_norms_is_refused():
    with pytest.raises(ModelError, match="no decoder layers found"):
        phase_noise(torch.nn.Linear(2, 2), spec_of(MATMUL), "rollout", KEY, recorder_for(MATMUL)).__enter__()


# -- what the receipt refuses ------------------------------------------------------------------------------------------


def test_a_phase_that_never_ran_or_never_called_the_model_is_refused(model):
    with pytest.raises(ReceiptError, match="phase actor_forward never ran"):
        noised(model, MATMUL, lambda: None)[1].check()
    recorder = recorder_for(None, phases=("actor_forward", "rollout"))
    with torch.no_grad(), phase_noise(model, spec_of(None), "actor_forward", KEY, recorder):
        model(token_ids())
    with pytest.raises(ReceiptError, match="phase rollout never ran"):
        recorder.receipt().check()


def test_gradients_without_noise_are_refused(model):
    recorder = recorder_for(MATMUL, ("actor_forward", "backward"))
    with phase_noise(model, spec_of(MATMUL), "actor_forward", KEY, recorder, backward=True):
        loss = model(token_ids(), labels=token_ids()).loss
    loss.backward()
    recorder.count_backward(0)
    with pytest.raises(ReceiptError, match=r"backward: noise was requested but never reached layers \[0, 1, 2\]"):
        recorder.receipt().check()


def test_a_product_that_escapes_in_a_later_pass_is_refused(model):
    """The first passes are audited as a whole and see none; single layers of later passes are drawn."""
    layer, passes = model.model.layers[1], []

    def escape(module, args, output):
        passes.append(output)
        return output + 0 * (output[..., None] * module.up_proj.weight[0, 0]).cumprod(-1)[..., 0] * (len(passes) > 5)

    def escape_later(module, args, output):
        return escape(module, args, output) if len(passes) > 5 else passes.append(output)

    layer.mlp.register_forward_hook(escape_later)
    _, receipt = noised(model, MATMUL, lambda: [model(token_ids(shape=(1, 4))) for _ in range(90)])
    with pytest.raises(ReceiptError, match=r"actor_forward: \d+ calls of aten.cumprod in model.layers.1 had no"):
        receipt.check()


@pytest.mark.parametrize(("attention", "requested"), [("sdpa", "decomposed")])
def test_attention_by_another_kernel_than_requested_is_refused(make_model, attention, requested):
    model = make_model(attn_implementation=attention)
    _, receipt = logits(model, noise_with(RELATIVE, attention=requested))
    with pytest.raises(ReceiptError, match=r"no product of attention was noised in layers \[0, 1, 2\]"):
        receipt.check()


def test_noise_left_by_another_patch_is_refused(model):
    """A patched linear module, as in the original experiments, where no noise was requested."""
    layer = model.model.layers[0].self_attn.q_proj
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias) * 1.0001
    with pytest.raises(ReceiptError, match="q_proj is not the result of its product"):
        logits(model, None)[1].check()


# -- other errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [AbsoluteGaussian(scale=0.01), SystematicBias(scale=0.01), MantissaTruncation(mantissa_bits=7)],
    ids=lambda error: error.kind,
)
def test_every_error_model_is_added_and_measured(model, error):
    found, receipt = logits(model, noise_with(error))
    receipt.check()
    assert not torch.equal(found, logits(model, None)[0])
    calls = calls_of(receipt)
    assert (calls["mm", 1], calls["bmm", 1]) == (7, 2)


def test_the_bias_is_the_formula_on_the_product_alone(make_model):
    model = make_model(num_layers=1)
    projection, seen = model.model.layers[0].self_attn.q_proj, []
    projection.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    logits(model, noise_with(SystematicBias(scale=0.25)))
    ((inputs, output),) = seen
    product = inputs @ projection.weight.T
    torch.testing.assert_close(output, product + 0.25 * product.sign() + projection.bias)


@pytest.mark.parametrize("bias", [0.1, 3.0, 100.0])
def test_rounding_of_biases_is_not_taken_for_noise(model, bias):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=bias, generator=torch.Generator().manual_seed(0))
    _, receipt = logits(model, noise_with(RelativeGaussian(scale=1e-4)))
    assert receipt.check().measured_scale("actor_forward")[0] == pytest.approx(1e-4, rel=0.05)


@pytest.mark.parametrize(("scale", "is_lost"), [(1e-5, True), (1e-4, True), (0.05, False)])
def test_an_error_below_the_resolution_of_the_format_is_lost_and_no_mistake(make_model, scale, is_lost):
    """1e-5 of a bfloat16 is rounded away: this is what the format does to such an error."""
    model = make_model().to(torch.bfloat16)
    found, receipt = logits(model, noise_with(RelativeGaussian(scale=scale)))
    receipt.check()
    assert torch.equal(found, logits(model, None)[0]) == is_lost
    assert all(cell.is_lost == is_lost for cell in receipt.cells)
    # Half the spacing of bfloat16 is 2^-9 to 2^-8 of a number.
    assert all(2**-9 < math.sqrt(3) * cell.rounding < 2**-8 for cell in receipt.cells)


def test_an_error_that_float32_keeps_is_refused_if_it_is_too_small(make_model):
    _, receipt = logits(make_model(), noise_with(RelativeGaussian(scale=1e-5)))
    receipt.check()
    assert {cell.rounding for cell in receipt.cells} == {None}
    rows = tuple(replace(row, squares=0.0) for row in receipt.rows)
    with pytest.raises(ReceiptError, match="measured scale 0, requested 1e-05, of which rounding"):
        receipt.model_copy(update={"rows": rows}).check()


@pytest.mark.parametrize("number_format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(("weights", "activations"), [(True, False), (False, True), (True, True)])
def test_linear_modules_with_quantized_operands(make_model, number_format, weights, activations):
    """Values and gradients by hand are in tests/noise/test_noisy_quantized.py."""
    model = make_model(intermediate_size=64)
    error = FakeQuantization(format=number_format, weights=weights, activations=activations)
    _, receipt = gradients(model, noise_with(error))
    receipt.check()
    assert {cell.operator for cell in receipt.cells} == {"mm"}
    # Both operands of 7 products, or one of them.
    assert {cell.calls for cell in receipt.cells if cell.layer == 1} == {7 * (weights + activations)}


# -- modules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["input", "output"])
@pytest.mark.parametrize(("scope", "count"), [("minimal", 7), ("mlp", 10), ("linear", 22), ("all", 29)])
def test_module_noise_reaches_every_module_of_its_scope(model, scope, count, point):
    noise = ModuleNoise(modules=scope, point=point, error=RELATIVE)
    found, receipt = logits(model, noise, phase="rollout")
    receipt.check()
    assert receipt.num_noised_modules == len(receipt.phases[0].modules) == count
    assert receipt.phases[0].recomputed >= 16 * count
    assert not torch.equal(found, logits(model, None)[0])
    assert torch.equal(found, logits(model, noise, phase="rollout")[0])


@pytest.mark.parametrize("scope", ["minimal", "linear"])
@pytest.mark.parametrize(
    ("scale", "changes", "is_lost"),
    [(1e-5, False, True), (1e-4, False, True), (1e-3, True, None), (0.05, True, False)],
)
def test_module_noise_that_bfloat16_swallows_is_lost_and_no_mistake(make_model, scope, scale, changes, is_lost):
    """The published arms E2 to E4 are of such sizes. Of 1e-3 rounding leaves a part, in some modules."""
    model = make_model().to(torch.bfloat16)
    noise = ModuleNoise(modules=scope, point="output", error=RelativeGaussian(scale=scale))
    found, receipt = logits(model, noise, phase="rollout")
    receipt.check()
    assert torch.equal(found, logits(model, None)[0]) != changes
    assert is_lost is None or all(cell.is_lost == is_lost for cell in receipt.cells)
    assert receipt.num_noised_modules == {"minimal": 7, "linear": 22}[scope]


def test_input_noise_is_on_what_the_module_gets(model):
    projection, seen = model.model.layers[1].mlp.down_proj, []
    noise = ModuleNoise(modules=("*.layers.1.mlp.down_proj",), error=SystematicBias(scale=0.5))

    def body():
        projection.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
        model(token_ids())

    noised(model, noise, body, phase="rollout")[1].check()
    ((inputs, output),) = seen
    assert (inputs[inputs != 0].abs() > 0.49).all()
    assert torch.equal(output, F.linear(inputs, projection.weight))


def test_modules_noised_twice_in_one_forward_get_fresh_noise(model):
    """A module that is shared between two places must not repeat its noise."""
    model.model.layers[1].mlp = model.model.layers[0].mlp
    noise = ModuleNoise(modules=("*.layers.0.mlp.act_fn",), point="output", error=AbsoluteGaussian(scale=1.0))
    activation, seen = model.model.layers[0].mlp.act_fn, []

    def body():
        activation.register_forward_hook(lambda module, args, output: seen.append(output - F.silu(args[0])))
        model(token_ids())

    noised(model, noise, body, phase="rollout")[1].check()
    assert len(seen) == 2
    assert abs(torch.corrcoef(torch.stack([s.flatten() for s in seen]))[0, 1].item()) < 5 / seen[0].numel() ** 0.5


def test_a_module_that_was_skipped_is_refused(model):
    noise = ModuleNoise(modules="linear", error=RELATIVE)
    _, receipt = noised(model, noise, lambda: model.model(token_ids()), phase="rollout")  # without lm_head
    with pytest.raises(ReceiptError, match="module noise reached 21 of 22 modules"):
        receipt.check()


def test_a_pattern_that_matches_nothing_is_refused(model):
    noise = ModuleNoise(modules=("*.q_proj", "*.w_proj"), error=RELATIVE)
    with pytest.raises(ModelError, match=r"pattern '\*\.w_proj' matches none of \d+ modules"):
        logits(model, noise, phase="rollout")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "noise",
    [OperatorNoise(error=RELATIVE, phases=("actor_forward",)), MODULES.model_copy(update={"modules": "all"})],
    ids=["operators", "modules"],
)
def test_checkpointed_layers_of_two_passes_compute_again_with_their_noise(make_model, noise, reverse):
    """The second pass is not observed, and may be the first whose layers compute again."""
    results = []
    for reentrant in (None, False, True):
        model = make_model().train()
        model.enable_input_require_grads()
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        recorder = recorder_for(noise)
        with phase_noise(model, spec_of(noise), "actor_forward", KEY, recorder, backward=True):
            losses = [model(token_ids(seed), labels=token_ids(seed), use_cache=False).loss for seed in (1, 2)]
            for loss in reversed(losses) if reverse else losses:
                loss.backward()
        recorder.receipt().check()
        results.append({name: p.grad for name, p in model.named_parameters()})
    for other in results[1:]:
        assert all(torch.equal(gradient, other[name]) for name, gradient in results[0].items())
