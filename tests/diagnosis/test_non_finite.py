"""A layer that outputs NaN is a fault of the machine, unless its weights or the range of float16 explain it."""

import math

import pytest
import torch

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.api import diagnose_model
from aqnpipe.errors import ModelError

CONFIG = DiagnosisConfig(num_prompts=1)
LENGTH = 24
"""Tokens of the first prompt."""


@pytest.fixture
def prompts(prompt_ids):
    return [ids % 50 for ids in prompt_ids[:1]]


def with_nan(model, layer=1, only_text=False):
    """Make channel 5 of the MLP NaN; with `only_text` only for the length of the prompt, which no probe has."""

    def hook(_module, _args, output):
        if not only_text or output.shape[1] == LENGTH:
            output[..., 5] = math.nan
        return output

    model.model.layers[layer].mlp.register_forward_hook(hook)
    return model


def test_exact_probes_name_the_site_of_nan(random_model, prompts):
    found = diagnose_model(with_nan(random_model()), prompts, CONFIG)
    assert found.verdict.verdict == "fault"
    assert {fault.layer for fault in found.verdict.faults} == {1}
    assert "NaN or infinity" in found.verdict.reason
    assert found.table is None
    assert found.unscanned.layer == 1


def test_nan_that_only_texts_show_is_a_fault_of_its_layer(random_model, prompts):
    found = diagnose_model(with_nan(random_model(), only_text=True), prompts, CONFIG).verdict
    assert (found.verdict, found.layer, found.site) == ("fault", 1, "layer")
    assert found.method == "all"


def test_in_float16_it_may_be_overflow(random_model, prompts):
    model = with_nan(random_model(dtype=torch.float16), only_text=True)
    found = diagnose_model(model, prompts, CONFIG).verdict
    assert found.verdict == "abstain"
    assert "float16" in found.reason


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("all", r"layer 1 .* its weights are not finite"),
        ("exact", r"layers\.1\.mlp\.down_proj\.weight has NaN or infinity"),
    ],
)
@pytest.mark.parametrize("has_file", [False, True])
def test_weights_that_are_not_finite_are_no_fault_of_the_machine(
    random_model, prompts, tmp_path, method, message, has_file
):
    model = random_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        diagnose_model(model, prompts, CONFIG, method=method, weights=tmp_path if has_file else None)


@pytest.mark.parametrize("method", ["all", "exact"])
def test_a_weight_that_became_nan_in_memory_is_a_fault(random_model, prompts, tmp_path, method):
    model = random_model()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[2, 0] = math.nan
    verdict = diagnose_model(model, prompts, CONFIG, method=method, weights=tmp_path).verdict
    assert [(fault.layer, fault.site, fault.faulty_channel_indices) for fault in verdict.faults] == [
        (1, "down_proj", (2,))
    ]


@pytest.mark.parametrize("method", ["all", "exact"])
def test_nan_of_the_embedding_is_no_fault_of_the_first_layer(random_model, prompts, method):
    model = random_model()
    model.model.embed_tokens.register_forward_hook(lambda m, a, out: out * math.nan if out.shape[1] > 1 else out)
    found = diagnose_model(model, prompts, CONFIG, method=method).verdict
    assert (found.verdict, found.layer, found.site, len(found.faults)) == ("fault", None, "embedding", 1)
