"""Noise on a model like vLLM's, and its audit: honest noise passes, and what a developer could break is refused.

It needs no vLLM. The same with the real one is in test_vllm_closed_world.
"""

import functools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from made_up_engine import WIDTH, generate, made_up_engine
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from aqnpipe.config.noise import (
    AbsoluteGaussian,
    AdaptiveNoise,
    CacheNoise,
    ConstantSigma,
    FakeQuantization,
    Fault,
    ModuleNoise,
    OperatorNoise,
    RelativeGaussian,
)
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.vllm.injection import engine_noise
from aqnpipe.machine import machine as machines
from aqnpipe.machine.machine import Machine, NoiseKey
from aqnpipe.machine.modules import ModuleErrors
from aqnpipe.machine.quantized import QuantizedOperands
from aqnpipe.noise.injection import phase as phase_module
from aqnpipe.noise.injection.phase import _RunningPhase
from aqnpipe.noise.kernels.quantization import fake_quantize, round_as_cached
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.receipts.other_checks import cache_error
from aqnpipe.proof.audit import SINGLE_LAYERS, Audit
from aqnpipe.seeding import derive_seed

ERROR = RelativeGaussian(scale=0.05)
KEY = NoiseKey(seed=3, step=2)


def operators(**changes):
    settings = {"error": ERROR, "phases": ("evaluation",), "attention": "fused"}
    return PassNoise(operator_noise=OperatorNoise(**(settings | changes)))


def modules(point, chosen="all"):
    return PassNoise(module_noise=ModuleNoise(modules=chosen, error=ERROR, phases=("evaluation",), point=point))


def run(noise, engine=None, num_forwards=12, key=KEY, sigmas=None, recorder=None):
    """Generate under `noise`; return the logits and the recorder."""
    engine = engine or made_up_engine()
    recorder = recorder or noise.recorder(len(engine.layers), 7)
    with engine_noise(engine, noise, key, recorder, noise.active_faults(), sigmas):
        return generate(engine, num_forwards), recorder


def problems(*args, **kwargs):
    return "; ".join(run(*args, **kwargs)[1].receipt().problems())


def replaced(monkeypatch, owner, name):
    """Decorator: replace `owner.name` by the function, which gets the original as its first argument."""

    def install(function):
        original = getattr(owner, name)

        def through(self, *args, **kwargs):
            return function(functools.partial(original, self), self, *args, **kwargs)

        monkeypatch.setattr(owner, name, through)

    return install


def cached(number_format="fp8", phase="evaluation"):
    return PassNoise(kv_cache=CacheNoise(format=number_format, phases=(phase,)))


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_keys_and_values_in_the_format_of_a_cache_are_proven_in_every_pass_and_layer(number_format):
    logits, recorder = run(cached(number_format))
    receipt = recorder.receipt().check()
    tokens = 23
    # Keys and values of each token have two heads.
    assert {(row.layer, row.calls, row.recomputed, row.elements) for row in receipt.cache_cells} == {
        (layer, 12, 4 * tokens, 4 * tokens) for layer in range(3)
    }
    low, high = {"fp8": (0.02, 0.04), "int8": (0.003, 0.01)}[number_format]
    assert low < cache_error(receipt.cache_cells) < high
    clean, _ = run(PassNoise())
    assert not any(torch.equal(one, other) for one, other in zip(logits, clean, strict=True))


def test_a_cache_in_another_format_in_another_phase_changes_nothing():
    logits, recorder = run(cached(phase="rollout"))
    assert not recorder.receipt().cache_cells
    assert all(torch.equal(one, other) for one, other in zip(logits, run(PassNoise())[0], strict=True))


def test_layers_without_keys_and_values_are_one_line():
    engine = made_up_engine()
    engine.layers[1].attentions[0].kv_sharing_target_layer_name = "layers.0"
    with pytest.raises(ModelError, match=r"kv_cache: layer 1 stores no keys and values; generation\.backend"):
        run(cached(), engine)


def test_a_cache_that_is_not_rounded_is_refused(monkeypatch):
    sabotages = {
        "nothing is rounded": lambda keys, values, round_: (keys, values),
        "keys alone": lambda keys, values, round_: (round_(keys), values),
        "one token is not": lambda keys, values, round_: (torch.cat([keys[:1], round_(keys[1:])]), round_(values)),
        "read of single tokens is not": lambda keys, values, round_: (
            (keys, values) if len(keys) == 1 else (round_(keys), round_(values))
        ),
        "in another format": lambda keys, values, round_: (
            round_as_cached(keys, "int8"),
            round_as_cached(values, "int8"),
        ),
    }
    for name, sabotage in sabotages.items():

        def rounded(number_format, layer, keys, values, update, sabotage=sabotage):
            return update(*sabotage(keys, values, lambda states: round_as_cached(states, number_format)))

        monkeypatch.setattr(phase_module, "_rounded", rounded)
        _, recorder = run(cached())
        with pytest.raises(ReceiptError, match="keys and values that attention read were not rounded"):
            recorder.receipt().check()
        assert name


FAULT = Fault(type="dead_zone", layer=1, magnitude=0.3, site="q_proj")
HONEST = {
    "clean": PassNoise(),
    "products": operators(),
    "all operators": operators(operators="all", error=AbsoluteGaussian(scale=0.1)),
    "two layers": operators(layers=(0, 2), include_lm_head=False),
    "module inputs": modules("input"),
    "module outputs": modules("output"),
    "rounded operands": operators(error=FakeQuantization(format="fp8", activations=True)),
    "rounded weights of a layer": operators(error=FakeQuantization(format="mxfp4"), layers=(1,), include_lm_head=False),
    "a fault": PassNoise(faults=(FAULT,)),
    "a fault on a layer": PassNoise(faults=(FAULT.model_copy(update={"site": "layer_output"}),)),
    "all together": operators().model_copy(
        update={"module_noise": modules("input").module_noise, "faults": (FAULT,)},
    ),
    "a fault behind module noise": modules("output", ("*.q_proj", "*.input_layernorm")).model_copy(
        update={"faults": (FAULT, FAULT.model_copy(update={"site": "input_layernorm"}))}
    ),
}


def test_projections_of_a_merged_module_have_scales_of_their_own():
    """As in transformers: a merged module in one piece would share one scale, and one projection is far larger."""
    engine = made_up_engine()
    with torch.no_grad():
        engine.layers[0].module.self_attn.qkv_proj.weight[:WIDTH] *= 100
    apart = made_up_engine()
    with torch.no_grad():
        weight = apart.layers[0].module.self_attn.qkv_proj.weight
        weight[:WIDTH] *= 100
        for layer in apart.layers:
            for linear in layer.linears:
                for part in linear.module.weight.split(linear.widths):
                    part.copy_(fake_quantize(part.clone(), "fp8", is_weight=True))
    noise = operators(error=FakeQuantization(format="fp8"), include_lm_head=False)
    torch.testing.assert_close(run(noise, engine)[0], run(PassNoise(), apart)[0])


def test_operands_that_workers_share_are_one_line_and_caches_are_not():
    engine = made_up_engine()
    engine.shards = {engine.layers[0].linears[0].module: Shard(0, WIDTH, 2 * WIDTH)}
    with pytest.raises(ModelError, match="rounding of operands needs whole ones, expected tensor_parallel: 1"):
        run(operators(error=FakeQuantization(format="mxfp4")), engine)
    run(cached(), engine)[1].receipt().check()


def test_operands_that_stay_exact_in_later_passes_are_refused(monkeypatch):
    calls = []

    @replaced(monkeypatch, QuantizedOperands, "of")
    def of(original, self, *args):
        calls.append(None)
        return original(*args) if len(calls) < 200 else None

    noise = operators(error=FakeQuantization(format="fp8", activations=True))
    assert "recomputed values are not the requested ones" in problems(noise, num_forwards=40)
    assert len(calls) > 200


@pytest.mark.parametrize("name", HONEST)
def test_honest_noise_passes(name):
    recorder = run(HONEST[name], num_forwards=40)[1]
    (record,) = recorder.receipt().check().phases
    audit = recorder.state().phases[0]
    assert audit.audited_passes["several tokens"] == 1 <= audit.audited_passes["one token"]
    assert audit.audited_passes[SINGLE_LAYERS] > 1, "beside whole passes single layers, drawn at random"
    assert record.largest_difference == 0
    if name in ("clean", "a fault", "a fault on a layer"):
        assert record.recomputed == 0
        assert record.compared > 500
    else:
        assert record.recomputed > 64 * 2 * 3


def test_every_operator_has_a_line_and_its_size():
    receipt = run(operators(operators="all"), num_forwards=3)[1].receipt().check()
    calls = {cell.operator: cell.calls for cell in receipt.cells if cell.layer == 1}
    # qkv_proj, o_proj, gate_up_proj and down_proj.
    assert calls == {"mm": 3 * 4, "attention": 3, "silu": 3, "norm": 3 * 2}
    assert [cell.operator for cell in receipt.cells if cell.layer is None] == ["mm"]
    measured = [(cell.measured / 0.05, cell.measured_elements) for cell in receipt.cells]
    assert all(abs(ratio - 1) < 5 / (2 * count) ** 0.5 for ratio, count in measured)


def test_what_pads_the_vocabulary_has_no_noise():
    receipt = run(operators(), num_forwards=3)[1].receipt().check()
    (cell,) = [cell for cell in receipt.cells if cell.layer is None]
    # 12 tokens and twice one; 20 of 24 columns.
    assert cell.elements == 14 * 20


def test_what_is_audited_depends_on_the_key():
    passes = [run(operators(), num_forwards=40, key=NoiseKey(seed))[1].state().phases[0] for seed in range(6)]
    assert len({tuple(audit.audited_passes.items()) for audit in passes}) > 1


def test_an_audit_changes_no_bit_and_neither_noise_nor_hooks_remain(monkeypatch):
    engine = made_up_engine()
    clean = generate(engine, 4)
    audited = run(operators(), engine, 4)[0]
    assert torch.equal(generate(engine, 4), clean)
    assert not torch.equal(audited, clean)
    monkeypatch.setattr(Audit, "_observe", lambda *_: None)
    assert torch.equal(run(operators(), engine, 4)[0], audited)


FIELDS = {
    "step": lambda key, forward, place: (key.seed, 0, forward, place),
    "seed": lambda key, forward, place: (0, key.step, forward, place),
    "forward": lambda key, forward, place: (key.seed, key.step, 0, place),
    "layer": lambda key, forward, place: (key.seed, key.step, forward, 0),
    "phase": lambda key, forward, place: (key.seed, key.step, forward, place),
}


@pytest.mark.parametrize("noise", [operators(), modules("output")], ids=["operators", "modules"])
@pytest.mark.parametrize("dropped", FIELDS)
def test_a_key_without_one_of_its_fields_is_refused(monkeypatch, dropped, noise):
    @replaced(monkeypatch, NoiseKey, "derived")
    def derived(original, key, stream, forward, place):
        number, step, forward, place = FIELDS[dropped](key, forward, place)
        return derive_seed(number, "noise" if dropped == "phase" else stream, step, 0, 0, forward, place)

    assert "recomputed values are not the requested ones" in problems(noise)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda source: source._replace(call=1),
        lambda source: source._replace(call=source.call + 1),
        lambda source: source._replace(stream=8),
    ],
    ids=["call stands still", "call begins with 2", "stream"],
)
def test_other_draws_are_refused(monkeypatch, wrong):
    @replaced(monkeypatch, Machine, "_source")
    def source(original, machine, here):
        return wrong(original(here))

    assert "recomputed values are not the requested ones" in problems(operators())


def half_of(tensor):
    return tensor[..., : tensor.shape[-1] // 2]


WRONG_VALUES = {
    "another size": lambda put, tensor: put(tensor, RelativeGaussian(scale=0.052)),
    "a copy": lambda put, tensor: put(tensor.clone(), ERROR),
    "half of it": lambda put, tensor: put(half_of(tensor), ERROR),
    "twice": lambda put, tensor: (put(tensor, ERROR), put(tensor, ERROR)),
    "none": lambda put, tensor: None,
}


@pytest.mark.parametrize("is_at", ["everywhere", "the prompt", "decoding"])
@pytest.mark.parametrize("name", WRONG_VALUES)
def test_noise_that_is_not_on_all_values_once_is_refused(monkeypatch, name, is_at):
    original = machines.apply_error_

    def apply_error(tensor, error, source):
        if is_at == "everywhere" or (is_at == "the prompt") == (len(tensor) > 1):
            WRONG_VALUES[name](lambda values, changed: original(values, changed, source), tensor)
        else:
            original(tensor, error, source)

    monkeypatch.setattr(machines, "apply_error_", apply_error)
    assert "recomputed values are not the requested ones" in problems(operators())


@pytest.mark.parametrize("point", ["input", "output"])
def test_module_noise_on_some_modules_only_is_refused(monkeypatch, point):
    @replaced(monkeypatch, ModuleErrors, "put")
    def put(original, errors, place, exact):
        return exact if place % 2 else original(place, exact)

    found = problems(modules(point))
    assert "module layers.0.self_attn.k_proj: module.k_proj has no noise" in found
    assert "module layers.0.self_attn.v_proj: module.v_proj has no noise" not in found


def changed_linear(linear, change):
    linear.forward = lambda x: (change(type(linear).forward(linear, x)[0], x, linear.weight), None)


NOT_ITS_PRODUCT = "the output of layers.1.mlp.down_proj is not the result of its product"
BESIDE = {
    "a product by mv": (lambda out, x, weight: out + 0 * torch.mv(weight, x[0])[0], NOT_ITS_PRODUCT),
    "a product as a sum": (
        lambda out, x, weight: out + 0 * (x[:, None] * weight).sum(-1),
        "aten.mul on a weight matrix in layers.1",
    ),
    "a change in place": (
        lambda out, x, weight: out.mul_(1.001),
        "the output of layers.1.mlp.down_proj was changed in place behind its product",
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_computed_beside_a_product_is_refused(name):
    engine, (change, found) = made_up_engine(), BESIDE[name]
    changed_linear(engine.layers[1].module.mlp.down_proj, change)
    assert found in problems(operators(), engine)


@pytest.mark.parametrize("noise", [PassNoise(), operators(layers=(0, 2))], ids=["clean", "layers beside"])
@pytest.mark.parametrize("copied", [lambda out: out, torch.clone], ids=["itself", "a copy"])
@pytest.mark.parametrize("seen", [True, False])
def test_an_unrecorded_change_is_refused_where_no_noise_was_requested(noise, copied, seen):
    def change(out, x, weight):
        used = copied(out)
        if seen:
            return used.mul_(1.001)
        with torch._C._DisableTorchDispatch():
            return used.mul_(1.001)

    engine = made_up_engine()
    changed_linear(engine.layers[1].module.mlp.down_proj, change)
    assert "the output of layers.1.mlp.down_proj" in problems(noise, engine)


@pytest.fixture
def own_operators():
    """Operators as vLLM registers them: without parts that torch knows."""
    library = torch.library.Library("engine_test", "DEF")
    library.define("fused_mlp(Tensor x, Tensor weight) -> Tensor")
    library.define("rotary(Tensor x) -> Tensor")
    library.impl("fused_mlp", lambda x, weight: x @ weight[: x.shape[-1], :].T, "CPU")
    library.impl("rotary", lambda x: x.flip(-1).clone(), "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("is_later", [False, True])
def test_an_operator_that_is_not_known_is_refused_by_name(own_operators, is_later):
    engine = made_up_engine()
    mlp, calls = engine.layers[1].module.mlp, []

    def forward(x):
        calls.append(x)
        is_changed = not is_later or len(calls) > 4
        return torch.ops.engine_test.fused_mlp(x, mlp.gate_up_proj.weight) if is_changed else type(mlp).forward(mlp, x)

    mlp.forward = forward
    assert "engine_test.fused_mlp in layers.1 had no" in problems(operators(), engine, num_forwards=40)
    calls.clear()
    assert not problems(operators(layers=(0, 2)), engine)


def test_an_operator_that_is_known_to_multiply_nothing_passes(own_operators, monkeypatch):
    engine = made_up_engine()
    attention = engine.layers[1].module.self_attn
    attention.forward = lambda x: torch.ops.engine_test.rotary(type(attention).forward(attention, x))
    assert "engine_test.rotary in layers.1 had no" in problems(operators(), engine)
    monkeypatch.setattr("aqnpipe.proof.operations.NO_PRODUCTS_OF_VLLM", {"engine_test.rotary"})
    assert not problems(operators(), engine)


def test_attention_that_is_left_without_its_noise_is_refused(monkeypatch):
    engine = made_up_engine()
    attention = engine.layers[1].attentions[0]
    kept = []
    attention.register_forward_hook(lambda module, args, output: kept.append(output.clone()))
    with engine_noise(engine, noise := operators(), KEY, recorder := noise.recorder(3, 7), noise.active_faults()):
        # Behind the hook that has put the noise on it.
        attention.register_forward_hook(lambda module, args, output: kept[-1])
        generate(engine, 2)
    found = "; ".join(recorder.receipt().problems())
    assert "attention in layers.1 has an error that is not on its result, or that the program does not use" in found


ELSEWHERE = {
    "a product in the place of a module": lambda engine: changed_linear(
        engine.layers[1].module.mlp.down_proj, lambda out, x, weight: F.linear(x, weight)
    ),
    "a layer that runs twice": lambda engine: engine.model.layers.append(engine.layers[1].module),
    "a projection of the embedding": lambda engine: setattr(
        engine.model, "embed_tokens", nn.Sequential(engine.model.embed_tokens, nn.Linear(WIDTH, WIDTH))
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_product_has_noise_wherever_it_is_computed(name):
    """An engine of another version may compute products elsewhere; the kernels of torch have the noise."""
    engine = made_up_engine()
    ELSEWHERE[name](engine)
    assert not problems(operators(), engine)


@pytest.mark.parametrize(
    ("module", "escapes"), [("vllm.kernels", "triton.product in layers.1 had no"), ("aqnpipe.noise", "")]
)
def test_a_launch_of_a_triton_kernel_is_refused_unless_it_is_our_own(monkeypatch, module, escapes):
    class JITFunction:
        def run(self, x):
            return x.clone()

    launched, kernel = JITFunction.run, JITFunction()
    kernel.__name__, kernel.__module__ = "product", module
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.SimpleNamespace(JITFunction=JITFunction))
    engine = made_up_engine()
    mlp = engine.layers[1].module.mlp
    mlp.forward = lambda x: kernel.run(type(mlp).forward(mlp, x))
    found = problems(operators(), engine)
    assert escapes in found if escapes else not found
    assert not problems(operators(layers=(0, 2)), engine)
    assert JITFunction.run is launched


SIGMAS = {0: 0.1, 2: 0.2}


def hidden_problems(monkeypatch=None, returned=None, sigmas=SIGMAS):
    if returned is not None:

        @replaced(monkeypatch, _RunningPhase, "noised_hidden")
        def noised_hidden(original, phase, layer, sigma, hidden):
            return returned(layer, hidden, functools.partial(original, layer, sigma, hidden))

    aqn = AdaptiveNoise(schedule=ConstantSigma(sigma=0.1), targets="hidden_states")
    recorder = run(PassNoise(aqn=aqn, faults=(Fault(type="bias", layer=2, magnitude=0.1),)), sigmas=sigmas)[1]
    found = [line for line in recorder.receipt().problems() if "AQN: the hidden states" in line]
    return "; ".join(found), recorder.state().phases[0].recomputed


def test_noise_on_hidden_states_passes():
    found, numbers = hidden_problems()
    assert not found
    assert numbers >= 2 * 2 * 16


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda layer, hidden, noised: hidden, "AQN: the hidden states of layer 0: aqn.hidden has no noise"),
        (
            lambda layer, hidden, noised: (noised(), hidden)[1],
            "AQN: the hidden states of layer 0: aqn.hidden has noise, and the program goes on with other values",
        ),
        (
            lambda layer, hidden, noised: noised().mul(1.0),
            "AQN: the hidden states of layer 0: aqn.hidden has noise, and the program goes on with other values",
        ),
        (
            lambda layer, hidden, noised: hidden if layer else noised(),
            "AQN: the hidden states of layer 2: aqn.hidden has no noise",
        ),
    ],
    ids=["none", "thrown away", "a copy", "none before the fault"],
)
def test_hidden_states_that_continue_without_the_noise_are_refused(monkeypatch, returned, found):
    assert found in hidden_problems(monkeypatch, returned)[0]


def test_a_key_is_that_of_the_run_and_occurs_once():
    noise = operators()
    recorder = noise.model_copy(update={"noise_seed": 4}).recorder(3, 7)
    assert "the noise is keyed by seed 3, requested 4" in problems(noise, recorder=recorder)
    recorder = noise.recorder(3, 7)
    assert not problems(noise, recorder=recorder)
    assert "the key of its noise is used twice" in problems(noise, recorder=recorder)


def test_contexts_do_not_nest():
    engine, noise = made_up_engine(), operators()
    with engine_noise(engine, noise, KEY, noise.recorder(3, 7), noise.active_faults()):
        second = engine_noise(engine, noise, KEY, noise.recorder(3, 7), noise.active_faults())
        with pytest.raises(ModelError, match="machines do not nest"), second:
            pass


def test_an_exception_ends_the_observation():
    engine = made_up_engine()
    noise = operators()
    recorder = noise.recorder(3, 7)
    failing = engine.layers[1].module.mlp.down_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), engine_noise(engine, noise, KEY, recorder, noise.active_faults()):
        generate(engine, 1)
    assert not recorder.seen("evaluation", "audited_whole").audited_whole
    assert _get_current_dispatch_mode() is None
    failing.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in engine.model.modules())
