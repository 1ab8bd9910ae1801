"""Faults that look random: of another type where a second run shows the same, noise or spikes where it does not."""

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis import exact_probes
from aqnpipe.diagnosis.exact_probes import run_exact
from aqnpipe.models.layout import decoder_layers

CONFIG = DiagnosisConfig(exact_repeats=2, intermittent_rate=0.05, miss_probability=0.1)
SOFTMAX = torch.nn.functional.softmax


def types(model):
    return {(fault.layer, fault.site, fault.type) for fault in run_exact(model, CONFIG).faults}


def wrong_entry(output):
    """One of the entries of a table of exponentials is wrong."""
    return torch.where((output > 0.1) & (output < 0.11), output * 1.05, output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_entry_of_a_table_is_no_spike(monkeypatch, dtype):
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda *args, **own: wrong_entry(SOFTMAX(*args, **own)))
    found = types(tiny_model_of("llama").to(dtype))
    assert (None, "attention_core", "other") in found
    assert {kind for _, _, kind in found} == {"other"}


def rows_rolled(output):
    return output.roll(1, -1)


def random_rows(output):
    return output * (1 + 0.1 * torch.randn(output.shape)).to(output.dtype)


def in_some_calls(output):
    return rows_rolled(output) if torch.rand(()) < 0.5 else output


@pytest.mark.parametrize(
    ("change", "kind"), [(rows_rolled, {"other"}), (random_rows, {"noise"}), (in_some_calls, {"noise", "spike"})]
)
@pytest.mark.parametrize("path", ["model.layers.1.mlp.gate", "lm_head"])
def test_what_a_second_run_shows_decides(path, change, kind):
    """The hook sees few rows only, which none of the probes that refine a fault have."""
    model = tiny_model_of("mixtral")
    torch.manual_seed(0)

    def damaged(module, args, output):
        first = output[0] if isinstance(output, tuple) else output
        if first[..., 0].numel() > 8:
            return output
        return (change(first), *output[1:]) if isinstance(output, tuple) else change(first)

    model.get_submodule(path).register_forward_hook(damaged)
    ((layer, _, found),) = types(model)
    assert layer == (None if path == "lm_head" else 1)
    assert found in kind


def test_parts_run_again_only_for_what_looks_random(monkeypatch):
    calls = []
    own = exact_probes.probe_sequences
    monkeypatch.setattr(exact_probes, "probe_sequences", lambda *args: calls.append(1) or own(*args))
    assert types(tiny_model_of("llama")) == set()
    assert len(calls) == 1
    model = tiny_model_of("llama")
    decoder_layers(model)[1].mlp.up_proj.register_forward_hook(lambda module, args, output: output * 1.5)
    assert types(model) == {(1, "up_proj", "gain")}
    assert len(calls) == 2
