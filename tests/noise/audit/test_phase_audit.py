"""The audit of a phase: honest noise passes in every kind of pass, and what a developer could break is refused.

The sabotages of a whole study are in tests/attacks; these are the ones that need a single phase.
"""

import functools

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
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.audit.phase_audit import audited_backward
from aqnpipe.noise.injection.fault_injection import FaultInjection
from aqnpipe.noise.injection.operator_errors import OperatorErrors
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
from aqnpipe.noise.injection.phase_state import PhaseState
from aqnpipe.noise.injection.quantized_operands import QuantizedOperands
from aqnpipe.noise.kernels.gaussian import add_relative_gaussian_
from aqnpipe.noise.kernels.stream import NoiseStream
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

FIVE_PERCENT = RelativeGaussian(scale=0.05)
NOISE = OperatorNoise(error=FIVE_PERCENT, phases=("rollout", "actor_forward", "backward"))
KEY = NoiseKey(seed=3, step=2)
TOKENS = torch.randint(2, 64, (3, 10), generator=torch.Generator().manual_seed(0))


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


def step(model, noise=NOISE, recorder=None, key=KEY):
    """Run a forward and a backward pass; return the receipt."""
    spec = NoiseSpec(operator_noise=noise)
    recorder = recorder_of(spec) if recorder is None else recorder
    model.zero_grad()
    with phase_noise(model, spec, "actor_forward", key, recorder, backward=True):
        loss = model(TOKENS, labels=TOKENS, use_cache=False).loss
    with audited_backward(model, recorder):
        loss.backward()
    recorder.count_forward("backward")
    return recorder.receipt()


def replaced(monkeypatch, owner, name):
    """Decorator: replace `owner.name` by the function, which gets the original as its first argument."""

    def install(function):
        monkeypatch.setattr(owner, name, functools.partialmethod(_through, function, getattr(owner, name)))

    return install


def _through(self, function, original, *args, **kwargs):
    return function(functools.partial(original, self), self, *args, **kwargs)


@pytest.mark.parametrize("operators", ["matmul", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_honest_noise_passes_in_every_kind_of_pass(make_model, operators, dtype):
    model = make_model().to(dtype)
    noise = NOISE.model_copy(update={"operators": operators})
    recorder = recorder_of(NoiseSpec(operator_noise=noise))
    rollout = generate(model, noise, recorder=recorder).check().phases[0]
    assert recorder.state().phases[0].audit.classified > 500
    assert rollout.audited_passes["several tokens"] == 4
    assert rollout.audited_passes["one token"] > 4 + 5, "beside the whole forward single layers, drawn at random"
    assert rollout.recomputed_numbers > 64 * 9 * 3
    records = {record.phase: record for record in step(model, noise).check().phases}
    # Both operands of 9 products in 3 layers and of the output projection.
    assert records["backward"].recomputed_numbers > 0.5 * 64 * 2 * (9 * 3 + 1)


def test_what_is_audited_depends_on_the_key_and_not_on_the_model_alone(model):
    records = [generate(model, key=NoiseKey(seed=seed, step=0)).phases[0] for seed in range(6)]
    assert len({tuple(record.audited_passes.items()) for record in records}) > 1
    assert generate(model, key=NoiseKey(seed=0, step=0)).phases[0] == records[0]


def test_an_audit_changes_no_bit(model, monkeypatch):
    def logits():
        with (
            torch.no_grad(),
            phase_noise(model, NoiseSpec(operator_noise=NOISE), "rollout", KEY, recorder_of(NoiseSpec())),
        ):
            return model(TOKENS).logits

    audited = logits()
    monkeypatch.setattr(ReceiptRecorder, "lacks_whole_audit", lambda self, phase, kind: False)
    monkeypatch.setattr("aqnpipe.noise.audit.phase_audit._EXPECTED_AUDITS", 0)
    monkeypatch.setattr("aqnpipe.noise.audit.phase_audit._LEAST_SHARE", 0)
    assert torch.equal(audited, logits())


KEY_FAULTS = {
    "step": lambda key, place: (key.seed, 0, key.micro_step, key.rank, place),
    "seed": lambda key, place: (0, key.step, key.micro_step, key.rank, place),
    "layer": lambda key, place: (key.seed, key.step, key.micro_step, key.rank, 0),
}


@pytest.mark.parametrize("dropped", [*KEY_FAULTS, "forward", "phase"])
def test_a_key_without_one_of_its_fields_is_refused(model, monkeypatch, dropped):
    from aqnpipe.seeding import derive_seed

    @replaced(monkeypatch, PhaseState, "seed")
    def seed(original, state, stream, place):
        forward = 0 if dropped == "forward" else state.forward_index
        stream = "noise" if dropped == "phase" else stream
        fields = KEY_FAULTS.get(dropped, lambda key, place: (key.seed, key.step, key.micro_step, key.rank, place))
        number, step, micro_step, rank, place = fields(state.key, place)
        return derive_seed(number, stream, step, micro_step, rank, forward, place)

    with pytest.raises(ReceiptError, match="its random numbers are not those of seed 3, step 2, this forward"):
        generate(model).check()


def test_a_call_number_that_stands_still_is_refused(model, monkeypatch):
    @replaced(monkeypatch, OperatorErrors, "_noise_output")
    def noise_output(original, errors, operator, error, output):
        errors._state.place.calls = 0
        original(operator, error, output)

    with pytest.raises(ReceiptError, match="random numbers of another call were used again"):
        generate(model).check()


@pytest.mark.parametrize(
    "clean_calls",
    [
        lambda state: state.reads_one_token,
        lambda state: not state.reads_one_token,
        lambda state: state.forward_index % 2 == 1,
        lambda state: state.forward_index > 1,
        lambda state: state.place.layer == 1 and state.place.calls == 3,
    ],
    ids=["decoding clean", "prompt clean", "every second forward clean", "first forwards only", "one projection clean"],
)
def test_calls_that_are_counted_but_clean_are_refused(model, monkeypatch, clean_calls):
    @replaced(monkeypatch, PhaseState, "put_error")
    def put_error(original, state, phase, operator, layer, error, source, tensor, **kwargs):
        before = tensor.detach().clone()
        original(phase, operator, layer, error, source, tensor, **kwargs)
        if clean_calls(state):
            tensor.detach().copy_(before)

    with pytest.raises(ReceiptError, match=r"overwritten by aten.copy_\): the noised values were never used"):
        generate(model).check()


def test_noise_on_a_copy_is_refused(model, monkeypatch):
    @replaced(monkeypatch, PhaseState, "put_error")
    def put_error(original, state, phase, operator, layer, error, source, tensor, **kwargs):
        original(phase, operator, layer, error, source, tensor.detach().clone(), **kwargs)

    with pytest.raises(ReceiptError, match="escaped the noise"):
        generate(model).check()


@pytest.mark.parametrize("only", ["gradient_0", "gradient_1"])
def test_noise_on_the_gradient_of_one_operand_only_is_refused(model, monkeypatch, only):
    @replaced(monkeypatch, PhaseState, "put_error")
    def put_error(original, state, phase, operator, layer, error, source, tensor, **kwargs):
        if phase != "backward" or operator.endswith(only):
            original(phase, operator, layer, error, source, tensor, **kwargs)

    with pytest.raises(ReceiptError, match=r"backward: \d+ calls of aten.(mm|bmm) .*escaped the noise"):
        step(model).check()


def test_backward_noise_where_none_was_requested_is_refused(model, monkeypatch):
    """The values are changed in place behind the recorder's back."""
    quiet = NOISE.model_copy(update={"phases": ("actor_forward",)})
    spec = NoiseSpec(operator_noise=quiet)
    recorder = recorder_of(spec)
    weight = model.model.layers[1].mlp.up_proj.weight

    def disturb(gradient):
        add_relative_gaussian_(gradient, 0.05, NoiseStream(1))

    with phase_noise(model, spec, "actor_forward", KEY, recorder, backward=True):
        loss = model(TOKENS, labels=TOKENS, use_cache=False).loss
    handle = weight.register_hook(disturb)
    with audited_backward(model, recorder):
        loss.backward()
    handle.remove()
    recorder.count_forward("backward")
    with pytest.raises(ReceiptError, match=r"backward: aten.mm .*changed, no noise was requested"):
        recorder.receipt().check()


def test_an_unrecorded_change_in_a_clean_phase_is_refused(model):
    """Something of an earlier run still changes a layer's products in place."""

    def disturb(module, args, output):
        add_relative_gaussian_(output, 1e-3, NoiseStream(1))

    handle = model.model.layers[1].mlp.up_proj.register_forward_hook(disturb)
    with pytest.raises(ReceiptError, match=r"changed, no noise was requested|differ from plain torch"):
        generate(model, noise=None).check()
    handle.remove()


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


@pytest.mark.parametrize("point", ["input", "output"])
def test_module_noise_on_some_modules_only_is_refused(model, monkeypatch, point):
    from aqnpipe.noise.injection.module_errors import ModuleErrors

    @replaced(monkeypatch, ModuleErrors, "_noised")
    def noised(original, errors, name, ordinal, shard, tensor):
        changed = original(name, ordinal, shard, tensor)
        return tensor if ordinal % 2 else changed

    modules = ModuleNoise(modules="linear", error=FIVE_PERCENT, phases=("rollout",), point=point)
    with pytest.raises(ReceiptError, match=rf"module model.layers.\d.*: its {point} has no noise"):
        generate(model, noise=None, modules=modules).check()


def test_a_product_with_a_weight_outside_the_layers_is_refused(make_model):
    class Projected(nn.Module):
        def __init__(self, embedding):
            super().__init__()
            self.embedding, self.projection = embedding, nn.Linear(32, 32)
            self.weight = embedding.weight

        def forward(self, ids):
            return self.projection(self.embedding(ids))

    model = make_model()
    model.model.embed_tokens = Projected(model.model.embed_tokens)
    match = r"aten.(addmm|mm) in model.embed_tokens.projection, outside the decoder layers escaped the noise"
    with pytest.raises(ReceiptError, match=match):
        generate(model).check()
    generate(model, noise=NOISE.model_copy(update={"layers": (0, 1, 2)})).check()


def test_streams_of_the_operands_exchanged_are_refused(model, monkeypatch):
    @replaced(monkeypatch, PhaseState, "put_error")
    def put_error(original, state, phase, operator, layer, error, source, tensor, **kwargs):
        if phase == "backward":
            source = source._replace(stream=3 - source.stream)
        original(phase, operator, layer, error, source, tensor, **kwargs)

    with pytest.raises(ReceiptError, match="its random numbers are those of another stream"):
        step(model).check()


def test_a_softmax_without_noise_is_refused_where_all_operators_have_it(model, monkeypatch):
    from aqnpipe.noise.injection import operators

    names = {"softmax"}
    table = {function: name for function, name in operators._ELEMENTWISE.items() if name not in names}
    monkeypatch.setattr(operators, "_ELEMENTWISE", table)
    with pytest.raises(ReceiptError, match=r"aten\._softmax in model\.layers\.0\.self_attn escaped the noise"):
        generate(model, NOISE.model_copy(update={"operators": "all"})).check()


def hidden_states_receipt(model, monkeypatch=None, returned=None):
    """Return the receipt of a rollout with AQN on hidden states; `returned` changes what the injection returns."""
    aqn = AdaptiveNoise(schedule=ConstantSigma(sigma=0.1), targets="hidden_states")
    spec = NoiseSpec(aqn=aqn)
    recorder = recorder_of(spec, num_steps=1, num_epochs=1)
    if returned is not None:

        @replaced(monkeypatch, FaultInjection, "_noised")
        def noised(original, injection, layer, sigma, hidden):
            return returned(layer, hidden, original(layer, sigma, hidden))

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
    record = hidden_states_receipt(model).check().phases[0]
    assert record.recomputed_numbers >= 2 * 3 * 64


@pytest.mark.parametrize(
    "returned",
    [
        lambda layer, hidden, noised: hidden if layer == 1 else noised,
        lambda layer, hidden, noised: noised if hidden.shape[1] > 1 else hidden,
        lambda layer, hidden, noised: hidden + 0.1 * hidden.std() * torch.randn_like(hidden),
    ],
    ids=["one layer clean", "decoding clean", "other noise"],
)
def test_hidden_states_that_continue_without_the_noise_are_refused(model, monkeypatch, returned):
    with pytest.raises(ReceiptError, match=r"AQN: the hidden states of layer \d have no noise"):
        hidden_states_receipt(model, monkeypatch, returned).check()


def test_a_quantization_that_the_products_do_not_use_is_refused(make_model, monkeypatch):
    """The operands are quantized and recorded, and the product is computed with the original ones."""
    model = make_model(intermediate_size=64)
    noise = OperatorNoise(error=FakeQuantization(format="mxfp4"), phases=("rollout",))
    generate(model, noise).check()

    @replaced(monkeypatch, QuantizedOperands, "_rounded")
    def rounded(original, operands, operand, error, factor):
        original(operand, error, factor)
        return factor.tensor

    with pytest.raises(ReceiptError, match="outputs do not differ from plain torch, fake_quantization was requested"):
        generate(model, noise).check()


def test_layers_without_noise_must_equal_plain_torch_beside_layers_with_noise(model):
    def disturb(module, args, output):
        return output * (1 + 1e-3)

    noise = NOISE.model_copy(update={"layers": (0, 2)})
    generate(model, noise).check()
    projection = model.model.layers[1].mlp.up_proj
    forward = projection.forward
    projection.forward = lambda x: disturb(projection, x, forward(x))
    try:
        with pytest.raises(ReceiptError, match=r"operators differ from plain torch by .*, no noise was requested"):
            generate(model, noise).check()
    finally:
        del projection.forward
