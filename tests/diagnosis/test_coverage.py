"""What a diagnosis says of itself: what it did not test, how often a fault was seen, and what a probability counts."""

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.api import diagnose_model, layer_metrics
from aqnpipe.diagnosis.checks import Bench, Check
from aqnpipe.diagnosis.coverage import untested_parts
from aqnpipe.diagnosis.exact_probes import elements_needed, run_exact
from aqnpipe.diagnosis.probes.elementwise import Norm
from aqnpipe.diagnosis.probes.patterns import ProbeInputs
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.loading import load_model

CONFIG = DiagnosisConfig(exact_repeats=2, intermittent_rate=0.05, miss_probability=0.1)
CPU = torch.device("cpu")


def untested_in(family):
    return {gap.part: gap for gap in run_exact(tiny_model_of(family), CONFIG).untested}


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("gptj", {"ln_1", "inputs of the first layer, of the final norm and of lm_head"}),
        ("granite", {"final norm", "input_layernorm outside a mean square of 1024", "KV cache and decode"}),
        ("olmo", {"final norm", "input_layernorm", "post_attention_layernorm"}),
        ("persimmon", {"q_layernorm", "k_layernorm", "input_layernorm"}),
    ],
)
def test_a_checksum_of_a_weight_is_no_test_of_its_module(family, parts):
    assert parts <= untested_in(family).keys()


def test_nothing_is_named_that_was_tested():
    named = untested_in("qwen2")
    assert not [part for part in named if "norm" in part or "layer" in part or part in ("lm_head", "embedding")]


def test_a_part_that_some_layers_lack_is_named_with_them():
    checks = [Check("activation", 0, "activation", 4, 8, None), Check("activation", 1, "activation", 4, 0, None)]
    gaps = {
        gap.part: gap.layers for gap in untested_parts(checks, 2, torch.float32, ProbeInputs(8, torch.float32, CPU))
    }
    assert gaps["activation outside the probed point"] == (1,)
    assert gaps["KV cache and decode"] == ()


@pytest.mark.parametrize("config", [CONFIG, DiagnosisConfig()])
def test_final_norm_and_lm_head_have_the_values_that_the_probability_of_a_miss_counts(config):
    result = run_exact(tiny_model_of("qwen2"), config)
    for site, probe in (("lm_head", "head"), ("final_norm", "norm_range")):
        counted = [check for check in result.checks if (check.site, check.probe) == (site, probe)]
        assert sum(check.elements_per_channel for check in counted) >= elements_needed(config)
        assert len(counted) >= 6
    assert result.elements_per_channel >= elements_needed(config)


@pytest.mark.parametrize("path", ["lm_head", "model.norm", "model.embed_tokens", "model.layers.1.mlp.up_proj"])
def test_a_fault_of_every_call_was_seen_in_every_compared_call(path):
    model = tiny_model_of("qwen2")
    model.get_submodule(path).register_forward_hook(lambda module, args, output: output * 1.5)
    (fault,) = run_exact(model, CONFIG).faults
    assert fault.rate_per_call == 1.0
    assert fault.calls >= 5


def test_weights_in_memory_have_no_calls(tmp_path):
    tiny_model_of("qwen2").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32", attention="eager")
    model.model.layers[1].mlp.down_proj.weight.data[4, 7] += 1
    (fault,) = run_exact(model, CONFIG, weights=tmp_path).faults
    assert (fault.site, fault.probes) == ("down_proj", ("weights",))
    assert (fault.rate_per_call, fault.calls) == (None, None)


def test_a_deviation_that_is_not_finite_is_no_number():
    model = tiny_model_of("qwen2")
    decoder_layers(model)[1].mlp.up_proj.register_forward_hook(lambda module, args, output: output * torch.nan)
    diagnosed = diagnose_model(model, [], CONFIG, method="exact")
    healthy, broken = layer_metrics(diagnosed)
    assert (healthy.largest_deviation, broken.largest_deviation) == (0.0, None)
    assert broken.sites_probed


def test_elements_probed_are_those_of_modules_that_ran():
    diagnosed = diagnose_model(tiny_model_of("qwen2"), [], CONFIG, method="exact")
    before = [layer.elements_probed for layer in layer_metrics(diagnosed)]
    kept = [check for check in diagnosed.exact.checks if check.probe != "restored"]
    assert len(kept) < len(diagnosed.exact.checks)
    diagnosed.exact.checks[:] = kept
    assert [layer.elements_probed for layer in layer_metrics(diagnosed)] == before


def test_a_norm_that_cuts_the_graph_has_no_gradient_to_compare():
    class Cut(torch.nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.detach())

    bench = Bench(0, torch.float32, CPU, torch.Generator().manual_seed(0))
    assert Norm.of(Cut(8)).gradient("norm", bench) == []
    assert len(Norm.of(torch.nn.LayerNorm(8)).gradient("norm", bench)) == 1
