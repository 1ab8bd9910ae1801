import itertools
import math
from contextlib import ExitStack, contextmanager

import pytest
import torch

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.config.noise import Fault
from aqnpipe.diagnosis.exact_probes import run_exact, tokens_needed
from aqnpipe.diagnosis.probes import layers, linears
from aqnpipe.diagnosis.verdict import judge
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers, layer_sites, site_module
from aqnpipe.noise.injection.faults import faulty_channels, simulated_faults

CONFIG = DiagnosisConfig()
ARCHITECTURES = ["qwen2", "llama", "qwen3", "gemma2"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TYPES = ["dead_zone", "saturation", "noise", "bias", "spike"]


def found_in(model, *faults, config=CONFIG):
    with simulated_faults(model, faults):
        return run_exact(model, config)


def places(result):
    return [(fault.layer, fault.site, fault.type) for fault in result.faults]


@contextmanager
def hooked(module, hook, *, before=False):
    """A fault that no simulator knows: any function of a module's output, or of its input."""
    handle = module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("dtype", [*DTYPES[:2], pytest.param(DTYPES[2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_healthy_models_are_exact_at_every_site(random_model, architecture, dtype):
    result = run_exact(random_model(architecture, dtype, num_layers=2), CONFIG)
    assert all(check.mismatch is None for check in result.checks)
    assert (result.faults, result.reordered) == ((), ())
    assert not [untested for untested in result.untested if untested.layers]
    assert result.forward_equivalents <= 25
    assert (1 - CONFIG.intermittent_rate) ** result.elements_per_channel <= CONFIG.miss_probability


@pytest.mark.parametrize(("seed", "attention"), [(1, "eager"), (2, "sdpa")])
def test_healthy_models_stay_healthy_over_seeds_and_kernels(random_model, seed, attention):
    result = run_exact(random_model("qwen2", seed=seed, attn_implementation=attention), CONFIG)
    assert judge(result, None, CONFIG).verdict == "healthy"


@pytest.mark.parametrize(
    ("architecture", "dtype", "shift"),
    [
        ("qwen2", torch.float32, 0),
        *(
            pytest.param(*others, marks=pytest.mark.slow)
            for others in (
                ("llama", torch.bfloat16, 1),
                ("qwen3", torch.float16, 2),
                ("gemma2", torch.float32, 3),
                ("qwen2", torch.bfloat16, 4),
            )
        ),
    ],
)
def test_single_channels_are_located_with_every_type_at_every_kind_of_site(random_model, architecture, dtype, shift):
    """A type per layer and another site for each: over the five shifts, every type is at every site."""
    sites = ("layer_output", "attention_output", "mlp_output", "k_proj", "post_attention_layernorm")
    faults = [
        # a spike on one channel is a matter of luck at 0.3 %; at 1 % it escapes with odds of 1e-10
        Fault(
            type=kind,
            layer=layer,
            magnitude=1.0 if kind == "spike" else 0.05,
            sparsity=1e-9,
            site=sites[(layer + shift) % 5],
            seed=layer + shift,
        )
        for layer, kind in enumerate(TYPES)
    ]
    result = found_in(random_model(architecture, dtype, num_layers=5), *faults)
    assert places(result) == [(fault.layer, fault.site, fault.type) for fault in faults]
    for fault, found in zip(faults, result.faults, strict=True):
        channel = faulty_channels(found.num_channels, fault.sparsity, fault.seed).nonzero().item()
        assert found.faulty_channel_indices == (channel,)


@pytest.mark.parametrize(
    "architecture",
    ["qwen2", "gemma2", *(pytest.param(other, marks=pytest.mark.slow) for other in ("llama", "qwen3"))],
)
def test_every_site_of_every_architecture_is_told_from_its_neighbours(random_model, architecture):
    """Each site in one of six layers, so that two or three distant sites share a layer."""
    model = random_model(architecture, num_layers=6)
    faults = [
        Fault(type="saturation", layer=index % 6, magnitude=0.01, sparsity=0.05, site=site, seed=2)
        for index, site in enumerate(layer_sites(decoder_layers(model)[0]).modules)
    ]
    assert sorted(places(found_in(model, *faults))) == sorted((f.layer, f.site, f.type) for f in faults)


@pytest.mark.slow
def test_a_random_fault_of_a_norm_of_heads_is_not_one_of_the_rotation_too(random_model):
    cases = list(itertools.product(["q_norm", "k_norm"], ["noise", "spike"]))
    faults = [Fault(type=kind, layer=i, site=site, magnitude=0.3, sparsity=1.0) for i, (site, kind) in enumerate(cases)]
    found = found_in(random_model("qwen3", torch.float16, num_layers=4), *faults)
    assert places(found) == [(layer, *case) for layer, case in enumerate(cases)]


def test_simultaneous_faults_are_all_reported(random_model):
    faults = [
        Fault(type="saturation", layer=0, magnitude=0.3, sparsity=0.1, site="o_proj"),
        Fault(type="noise", layer=0, magnitude=0.1, sparsity=0.02, site="attention_output"),
        Fault(type="bias", layer=0, magnitude=0.1, site="layer_output"),
        Fault(type="spike", layer=2, magnitude=1.0, sparsity=0.1, site="mlp_output"),
        Fault(type="dead_zone", layer=2, magnitude=0.02, site="down_proj"),
    ]
    found = found_in(random_model("qwen3", torch.bfloat16), *faults)
    assert sorted(places(found)) == sorted((fault.layer, fault.site, fault.type) for fault in faults)


def test_magnitudes_lie_between_their_bounds(random_model):
    """Every size at an output of a layer or block, and at a linear of another layer."""
    sizes = [("dead_zone", 0.3), ("dead_zone", 0.001), ("saturation", 0.3), ("saturation", 1e-4)]
    sizes += [("bias", 0.01), ("noise", 0.2)]
    outputs, linears = ("layer_output", "mlp_output", "attention_output"), ("up_proj", "v_proj", "gate_proj")
    faults = {}
    for index, (kind, magnitude) in enumerate(sizes):
        for layer, site in ((index, outputs[index % 3]), ((index + 3) % 6, linears[index % 3])):
            faults[layer, site] = Fault(type=kind, layer=layer, magnitude=magnitude, site=site)
    result = found_in(random_model(num_layers=6), *faults.values())
    assert {(fault.layer, fault.site) for fault in result.faults} == set(faults)
    for found in result.faults:
        fault = faults[found.layer, found.site]
        # the noise bounds are a 95 % interval of a fixed draw, widened to five standard errors
        slack = 0.05 if fault.type == "noise" else 1e-5
        assert found.magnitude_low * (1 - slack) <= fault.magnitude <= found.magnitude_high * (1 + slack)
        assert found.magnitude == pytest.approx(fault.magnitude, rel=0.05)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_cached_thresholds_are_told_from_dynamic_ones(random_model, first):
    """Four types at each of three sites; `first` exchanges the thresholds."""
    kinds, sites = ["dead_zone", "saturation", "noise", "bias"], ["layer_output", "v_proj", "input_layernorm"]
    thresholds = ["dynamic", "cached"]
    faults = {
        (layer, site): Fault(
            type=kinds[(layer + index) % 4],
            layer=layer,
            magnitude=0.2,
            sparsity=0.05,
            site=site,
            threshold=thresholds[(layer + index + first) % 2],
            seed=layer,  # other channels in every layer, or they were the device's
        )
        for layer in range(4)
        for index, site in enumerate(sites)
    }
    result = found_in(random_model(num_layers=4), *faults.values())
    assert {(fault.layer, fault.site) for fault in result.faults} == set(faults)
    for found in result.faults:
        fault = faults[found.layer, found.site]
        assert (found.type, found.threshold) == (fault.type, fault.threshold)
        assert (found.magnitude is None) == (fault.threshold == "cached")


def test_spike_rates_have_an_interval_that_covers_them(random_model):
    (fault,) = found_in(random_model(), Fault(type="spike", layer=1, magnitude=0.5, sparsity=0.2)).faults
    assert fault.magnitude_low <= 0.5 <= fault.magnitude_high


def test_integer_probe_catches_sums_in_too_few_bits(random_model):
    """A kernel that loses the last bits of large sums is right about single products."""
    model = random_model()

    def lose_bits(module, args, output):
        is_sum = (args[0] != 0).sum(-1, keepdim=True) > 1
        return torch.where(is_sum & (output.abs() < 2**20), output.bfloat16().float(), output)

    with hooked(site_module(model, 1, "up_proj"), lose_bits):
        (fault,) = run_exact(model, CONFIG).faults
    assert (fault.layer, fault.site) == (1, "up_proj")
    assert "integer" in fault.probes


def test_a_window_of_values_is_caught_by_full_mantissas(random_model):
    model = random_model()

    def lose_a_window(module, args, output):
        return torch.where((output.abs() > 0.26) & (output.abs() < 0.45), torch.zeros_like(output), output)

    with hooked(site_module(model, 2, "gate_proj"), lose_a_window):
        (fault,) = run_exact(model, CONFIG).faults
    assert (fault.layer, fault.site) == (2, "gate_proj")
    assert "linear" in fault.probes


def test_monomial_probe_catches_what_depends_on_values_that_no_pattern_has(random_model):
    model = random_model()

    def lose_ordinary_sums(module, args, output):
        # sums of many terms that are no integers, which only real inputs and weights have
        is_ordinary = ((module.weight != 0).sum(1) > 8) & (output != output.round())
        return torch.where(is_ordinary & (output.abs() < 0.1), torch.zeros_like(output), output)

    with hooked(site_module(model, 2, "gate_proj"), lose_ordinary_sums):
        (fault,) = run_exact(model, CONFIG).faults
    assert (fault.layer, fault.site, fault.probes) == (2, "gate_proj", ("monomial",))


def test_faults_between_the_linears_have_their_own_place(random_model):
    model = random_model(num_layers=2)

    def halve_a_channel(module, args):
        channel = torch.ones(args[0].shape[-1])
        channel[5] = 0.5
        return (args[0] * channel,)

    with (
        hooked(site_module(model, 0, "o_proj"), halve_a_channel, before=True),
        hooked(site_module(model, 1, "down_proj"), halve_a_channel, before=True),
    ):
        found = run_exact(model, CONFIG).faults
    assert {(fault.layer, fault.type) for fault in found} == {(0, "gain"), (1, "gain")}
    assert {(0, "attention_core"), (1, "mlp_core")} <= {(fault.layer, fault.site) for fault in found}


def test_repeat_probe_catches_noise_that_only_real_inputs_show(random_model):
    model = random_model()

    def noise_on_ordinary_values(module, args, output):
        quiet = output.abs().max() > 100
        return output if quiet else output + 1e-3 * torch.randn(output.shape)

    torch.manual_seed(0)
    with hooked(site_module(model, 0, "layer_output"), noise_on_ordinary_values):
        (fault,) = run_exact(model, CONFIG).faults
    assert (fault.layer, fault.site, fault.type) == (0, "layer_output", "noise")
    assert "repeat" in fault.probes
    assert "identity" not in fault.probes


def test_other_ways_to_fail_have_names_too(random_model):
    model = random_model()
    ways = {"stuck": lambda x: torch.full_like(x, 3.0), "gain": lambda x: x * 1.5, "other": torch.square}

    def damaging(channel, change):
        def run(module, args, output):
            output = output.clone()
            output[..., channel] = change(output[..., channel])
            return output

        return run

    with ExitStack() as hooks:
        for layer, change in enumerate(ways.values()):
            hooks.enter_context(hooked(site_module(model, layer, "layer_output"), damaging(7 + layer, change)))
        found = run_exact(model, CONFIG)
    assert places(found) == [(layer, "layer_output", kind) for layer, kind in enumerate(ways)]
    assert [fault.faulty_channel_indices for fault in found.faults] == [(7,), (8,), (9,)]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at_call", [1, 4, 8, 12])
def test_weights_state_and_hooks_are_restored_on_every_way_out(random_model, stop, at_call):
    model = random_model().train()
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    calls = []

    def interrupt(module, args, output):
        calls.append(1)
        if len(calls) == at_call:
            raise stop

    with hooked(site_module(model, 1, "o_proj"), interrupt), pytest.raises(stop):
        run_exact(model, CONFIG)
    assert model.training
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_test_weights_take_no_more_memory_than_one_layer(random_model, monkeypatch):
    model, sizes = random_model(), []
    own = layers.substituted

    def weighed(replacements):
        pairs = list(replacements)
        sizes.append(sum(tensor.numel() for _, tensor in pairs))
        return own(pairs)

    monkeypatch.setattr(layers, "substituted", weighed)
    monkeypatch.setattr(linears, "substituted", weighed)
    run_exact(model, CONFIG)
    assert 0 < max(sizes) <= sum(parameter.numel() for parameter in decoder_layers(model)[0].parameters())


def test_cost_counts_what_the_linears_really_compute(random_model):
    model, operations = random_model(num_layers=4), []
    linears = [m for m in decoder_layers(model).modules() if isinstance(m, torch.nn.Linear)]
    for linear in linears:
        linear.register_forward_hook(lambda m, args, output: operations.append(output.numel() * m.in_features))
    result = run_exact(model, CONFIG)
    unit = result.num_tokens * sum(linear.weight.numel() for linear in linears)
    assert result.forward_equivalents == pytest.approx(sum(operations) / unit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rate", "miss"), [(0.003, 0.001), (0.01, 0.05), (0.0005, 0.001)])
def test_enough_tokens_for_the_stated_miss_probability(dtype, rate, miss):
    config = DiagnosisConfig(intermittent_rate=rate, miss_probability=miss)
    seen = tokens_needed(config, dtype) * (config.exact_repeats + 1)
    assert seen * math.log(1 - rate) <= math.log(miss)


def test_a_model_whose_layers_are_not_understood_is_refused():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

    with pytest.raises(ModelError, match="no module named self_attn"):
        run_exact(Odd(), CONFIG)


def test_same_model_same_answer(random_model):
    fault = Fault(type="noise", layer=1, magnitude=0.1, sparsity=0.1)
    first, second = (found_in(random_model(num_layers=2), fault).faults for _ in range(2))
    assert first == second
    assert first
