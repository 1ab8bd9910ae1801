"""Noise on modules like vLLM's, and its audit: honest noise passes, and what a developer could break is refused.

It needs no vLLM. The same with the real one is in test_vllm_closed_world.
"""

import ast
import functools
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from made_up_engine import WIDTH, generate, made_up_engine
from torch import nn

from aqnpipe.config.noise import AbsoluteGaussian, Fault, ModuleNoise, OperatorNoise, RelativeGaussian
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.vllm import audit as audits
from aqnpipe.generation.vllm import injection, state
from aqnpipe.generation.vllm.injection import engine_noise
from aqnpipe.generation.vllm.state import EngineState
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
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
    receipt = run(*args, **kwargs)[1].receipt()
    return "; ".join([*receipt.problems(), *receipt.phases[0].contradictions])


def replaced(monkeypatch, owner, name):
    """Decorator: replace `owner.name` by the function, which gets the original as its first argument."""

    def install(function):
        original = getattr(owner, name)

        def through(self, *args, **kwargs):
            return function(functools.partial(original, self), self, *args, **kwargs)

        monkeypatch.setattr(owner, name, through)

    return install


FAULT = Fault(type="dead_zone", layer=1, magnitude=0.3, site="q_proj")
HONEST = {
    "clean": PassNoise(),
    "products": operators(),
    "all operators": operators(operators="all", error=AbsoluteGaussian(scale=0.1)),
    "two layers": operators(layers=(0, 2), include_lm_head=False),
    "module inputs": modules("input"),
    "module outputs": modules("output"),
    "a fault": PassNoise(faults=(FAULT,)),
    "all together": operators().model_copy(
        update={"module_noise": modules("input").module_noise, "faults": (FAULT,)},
    ),
    "a fault behind module noise": modules("output", ("*.q_proj", "*.input_layernorm")).model_copy(
        update={"faults": (FAULT, FAULT.model_copy(update={"site": "input_layernorm"}))}
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_noise_passes(name):
    recorder = run(HONEST[name], num_forwards=40)[1]
    (record,) = recorder.receipt().check().phases
    audit = recorder.state().phases[0]
    assert audit.classified > 100
    # Three layers and the output projection in the first forward of each kind.
    assert audit.audited_passes["several tokens"] == 4
    assert audit.audited_passes["one token"] > 4, "beside the whole forward single layers, drawn at random"
    if name in ("clean", "a fault"):
        assert record.reference.largest_difference == 0
        assert record.recomputed_numbers == 0
    else:
        assert record.recomputed_numbers > 64 * 2 * 3


def test_every_operator_has_a_line_and_its_size():
    receipt = run(operators(operators="all"), num_forwards=3)[1].receipt().check()
    calls = {cell.operator: cell.calls for cell in receipt.cells if cell.layer == 1}
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    once = dict.fromkeys([*(f"linear.{name}" for name in projections), "scaled_dot_product_attention", "silu"], 3)
    assert calls == once | {"rms_norm": 6}
    assert [cell.operator for cell in receipt.cells if cell.layer is None] == ["linear.lm_head"]
    measured = [(cell.measured / 0.05, cell.measured_elements) for cell in receipt.cells]
    assert all(abs(ratio - 1) < 5 / (2 * count) ** 0.5 for ratio, count in measured)


def test_what_is_audited_depends_on_the_key():
    passes = [run(operators(), num_forwards=40, key=NoiseKey(seed))[1].state().phases[0] for seed in range(6)]
    assert len({tuple(audit.audited_passes.items()) for audit in passes}) > 1


def test_an_audit_changes_no_bit_and_neither_noise_nor_hooks_remain(monkeypatch):
    engine = made_up_engine()
    clean = generate(engine, 4)
    audited = run(operators(), engine, 4)[0]
    assert torch.equal(generate(engine, 4), clean)
    assert not torch.equal(audited, clean)
    monkeypatch.setattr(ReceiptRecorder, "lacks_whole_audit", lambda self, phase, kind: False)
    monkeypatch.setattr(audits, "_EXPECTED_AUDITS", 0)
    monkeypatch.setattr(audits, "_LEAST_SHARE", 0)
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
    @replaced(monkeypatch, EngineState, "seed")
    def seed(original, state, stream, place):
        number, step, forward, place = FIELDS[dropped](state.key, state.forward_index, place)
        return derive_seed(number, "noise" if dropped == "phase" else stream, step, 0, 0, forward, place)

    assert "its random numbers are not those of seed 3, step 2, this forward" in problems(noise)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda source: source._replace(call=1), "random numbers of another call were used again"),
        (lambda source: source._replace(call=source.call + 1), "calls of a layer are numbered"),
        (lambda source: source._replace(stream=8), "its random numbers are those of another stream"),
    ],
    ids=["call stands still", "call begins with 2", "stream"],
)
def test_other_draws_are_refused(monkeypatch, wrong, found):
    @replaced(monkeypatch, EngineState, "put_error")
    def put_error(original, state, operator, layer, error, source, tensor, shard):
        original(operator, layer, error, wrong(source), tensor, shard)

    assert found in problems(operators())


def half_of(tensor):
    return tensor[..., : tensor.shape[-1] // 2]


WRONG_VALUES = {
    "another size": (
        lambda put, error, tensor, shard: put(RelativeGaussian(scale=0.1), tensor, shard),
        "noised with RelativeGaussian",
    ),
    "another layer": (lambda put, error, tensor, shard: put(error, tensor, shard, layer=7), "computed in layer"),
    "a copy": (lambda put, error, tensor, shard: put(error, tensor.clone(), shard), "escaped the noise"),
    "half of it": (lambda put, error, tensor, shard: put(error, half_of(tensor), shard), "noised in part"),
    "twice": (
        lambda put, error, tensor, shard: (put(error, tensor, shard), put(error, tensor, shard)),
        "noised more than once",
    ),
    "none": (lambda put, error, tensor, shard: None, "escaped the noise"),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_noise_that_is_not_on_all_values_once_is_refused(monkeypatch, name):
    change, found = WRONG_VALUES[name]

    @replaced(monkeypatch, EngineState, "put_error")
    def put_error(original, state, operator, layer, error, source, tensor, shard):
        if operator not in ("linear.down_proj", "linear.lm_head") or state.forward_index % 2 == 0:
            return original(operator, layer, error, source, tensor, shard)

        def put(error, tensor, shard, layer=layer):
            original(operator, layer, error, source, tensor, shard)

        return change(put, error, tensor, shard)

    assert found in problems(operators())


@pytest.mark.parametrize(
    ("faults", "found"),
    [((), "linear.q_proj layer 1: noised in part"), ((FAULT,), "calls of a layer are numbered [1, 3, 4, 5]")],
    ids=["views of one product", "copies of one product"],
)
def test_one_projection_of_a_merged_module_without_noise_is_refused(monkeypatch, faults, found):
    @replaced(monkeypatch, EngineState, "put_error")
    def put_error(original, state, operator, layer, error, source, tensor, shard):
        if (operator, layer) != ("linear.k_proj", 1):
            original(operator, layer, error, source, tensor, shard)

    assert found in problems(operators().model_copy(update={"faults": faults}))


@pytest.mark.parametrize(
    "is_clean",
    [
        lambda state: state.forward_index > 0,
        lambda state: state.forward_index == 0,
        lambda state: state.place.layer == 1 and state.place.calls == 3,
    ],
    ids=["decoding clean", "prompt clean", "one projection clean"],
)
@pytest.mark.parametrize("seen", [True, False])
def test_calls_that_are_counted_but_clean_are_refused(monkeypatch, is_clean, seen):
    @replaced(monkeypatch, EngineState, "put_error")
    def put_error(original, state, operator, layer, error, source, tensor, shard):
        with torch._C._DisableTorchDispatch():
            before = tensor.clone()
        original(operator, layer, error, source, tensor, shard)
        if is_clean(state):
            with nullcontext() if seen else torch._C._DisableTorchDispatch():
                tensor.copy_(before)

    found = (
        "(overwritten by aten.copy_): the noised values were never used" if seen else "the values used have no noise"
    )
    assert found in problems(operators())


def test_other_values_are_refused(monkeypatch):
    original = state.apply_error_
    monkeypatch.setattr(
        state, "apply_error_", lambda tensor, error, source: original(tensor, RelativeGaussian(scale=0.052), source)
    )
    assert "of the sampled values are not those of the requested noise (relative_gaussian)" in problems(operators())


@pytest.mark.parametrize("point", ["input", "output"])
def test_module_noise_on_some_modules_only_is_refused(monkeypatch, point):
    @replaced(monkeypatch, injection._EngineInjection, "_noised_module")
    def noised_module(original, injection, name, ordinal, error, shard, tensor):
        noised = original(name, ordinal, error, shard, tensor)
        return tensor if ordinal % 2 else noised

    found = problems(modules(point))
    assert f"module layers.0.self_attn.k_proj: its {point} has no noise" in found
    assert "module.k_proj layer 0" not in found.split("its")[0]


def changed_linear(linear, change):
    linear.forward = lambda x: (change(type(linear).forward(linear, x)[0], x, linear.weight), None)


BESIDE = {
    "a product": (lambda out, x, weight: F.linear(x, weight), "aten.mm in layers.1.mlp.down_proj escaped the noise"),
    "a product by mv": (
        lambda out, x, weight: out + 0 * torch.mv(weight, x[0])[0],
        "aten.mv in layers.1.mlp.down_proj",
    ),
    "a product as a sum": (
        lambda out, x, weight: out + 0 * (x[:, None] * weight).sum(-1),
        "aten.mul on a weight matrix in layers.1.mlp.down_proj",
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_product_beside_the_noise_is_refused(name):
    engine, (change, found) = made_up_engine(), BESIDE[name]
    changed_linear(engine.layers[1].module.mlp.down_proj, change)
    assert found in problems(operators(), engine)
    assert not problems(operators(layers=(0, 2)), engine)


@pytest.mark.parametrize("noise", [PassNoise(), operators(layers=(0, 2))], ids=["clean", "layers beside"])
def test_an_unrecorded_change_is_refused(noise):
    engine = made_up_engine()
    changed_linear(engine.layers[1].module.mlp.down_proj, lambda out, x, weight: out.mul_(1.001))
    assert "differ from plain torch" in problems(noise, engine)


@pytest.mark.parametrize("copied", [lambda out: out, torch.clone], ids=["itself", "a copy"])
def test_a_change_of_a_product_unseen_by_torch_is_refused(copied):
    def change(out, x, weight):
        used = copied(out)
        with torch._C._DisableTorchDispatch():
            return used.mul_(1.001)

    engine = made_up_engine()
    changed_linear(engine.layers[1].module.mlp.down_proj, change)
    assert "aten.mm in layers.1: its values were changed, no noise was requested" in problems(PassNoise(), engine)


def test_a_product_with_a_weight_outside_the_layers_is_refused():
    class Projected(nn.Module):
        def __init__(self, embedding):
            super().__init__()
            self.embedding, self.projection = embedding, nn.Linear(WIDTH, WIDTH)

        def forward(self, ids):
            return self.projection(self.embedding(ids))

    engine = made_up_engine()
    engine.model.embed_tokens = Projected(engine.model.embed_tokens)
    found = problems(operators(), engine)
    assert "aten.addmm in embed_tokens.projection, outside the decoder layers escaped the noise" in found
    assert not problems(operators(layers=(0, 1, 2)), engine)


def test_a_layer_that_runs_twice_is_refused():
    engine = made_up_engine()
    layer = engine.layers[1].module
    engine.model.layers.append(layer)
    assert "layers.1 ran again in the same forward pass" in problems(operators(), engine)


def test_an_operator_that_the_noise_does_not_reach_is_refused_in_later_forwards():
    """Beside the audit, every forward is asked whether all operators had their noise."""
    engine = made_up_engine()
    mlp, calls = engine.layers[1].module.mlp, []

    def forward(x):
        calls.append(x)
        return type(mlp).forward(mlp, x) if len(calls) < 30 else x

    mlp.forward = forward
    found = problems(operators(), engine, num_forwards=31)
    assert "calls of linear.down_proj in layers.1 escaped the noise" in found


SIGMAS = {0: 0.1, 2: 0.2}


def hidden_problems(monkeypatch=None, returned=None, sigmas=SIGMAS):
    if returned is not None:

        @replaced(monkeypatch, EngineState, "noised_hidden")
        def noised_hidden(original, state, layer, sigma, hidden):
            return returned(layer, hidden, functools.partial(original, layer, sigma, hidden))

    recorder = run(PassNoise(faults=(Fault(type="bias", layer=2, magnitude=0.1),)), sigmas=sigmas)[1]
    audit = recorder.state().phases[0]
    return "; ".join(audit.contradictions), audit.recomputed_numbers


def test_noise_on_hidden_states_passes():
    contradictions, numbers = hidden_problems()
    assert not contradictions
    assert numbers >= 2 * 2 * 16


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda layer, hidden, noised: hidden, "AQN: the hidden states of layer 0 have no noise"),
        (lambda layer, hidden, noised: (noised(), hidden)[1], "AQN: the hidden states of layer 0 have no noise"),
        (lambda layer, hidden, noised: (noised(), hidden)[1], "aten.clone: the noised values were never used"),
        (lambda layer, hidden, noised: noised().mul(1.0), "AQN: the hidden states of layer 0 have no noise"),
        (
            lambda layer, hidden, noised: hidden if layer else noised(),
            "AQN: the hidden states of layer 2 have no noise",
        ),
    ],
    ids=["none", "thrown away", "never read", "a copy", "none before the fault"],
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


def test_an_exception_ends_the_observation():
    engine = made_up_engine()
    noise = operators()
    recorder = noise.recorder(3, 7)
    engine.layers[1].module.mlp.down_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), engine_noise(engine, noise, KEY, recorder, noise.active_faults()):
        generate(engine, 1)
    assert recorder.lacks_whole_audit("evaluation", "several tokens")
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_the_audit_shares_no_code_with_the_injection():
    shared = ("aqnpipe.noise.kernels", "aqnpipe.seeding", "aqnpipe.machine", "aqnpipe.generation.vllm.state")
    for name in ("audit", "observer", "judgement", "claim"):
        tree = ast.parse(Path(audits.__file__).with_name(f"{name}.py").read_text())
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert "aqnpipe.noise.audit.random_numbers" in imported or name == "observer"
        assert not [each for each in imported if each.startswith(shared)]
