"""Embedding, final norm, lm_head and what stands between them, inside sequences of a model."""

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.diagnosis.checks import compare
from aqnpipe.diagnosis.exact_probes import without_consequences
from aqnpipe.diagnosis.probes.flow import HANDOFFS
from aqnpipe.diagnosis.probes.sequences import probe_sequences
from aqnpipe.models.layout import decoder_layers, layer_sites

NAN = float("nan")


def probed(model):
    untested = {}
    with torch.no_grad():
        checks = probe_sequences(model, [layer_sites(layer) for layer in decoder_layers(model)], 0, untested)
    wrong = {(check.layer, check.site) for check in without_consequences(checks) if check.mismatch}
    return wrong, untested, checks


def dead(output):
    return torch.cat([torch.zeros_like(output[..., :3]), output[..., 3:]], -1)


def in_sequences(change):
    return lambda module, args, output: change(output) if output.shape[1] > 1 else output


def of_single_tokens(change):
    return lambda module, args, output: change(output) if output.shape[1] == 1 else output


def of_one_sequence(change):
    return lambda module, args, output: change(output) if len(output) == 1 else output


FAULTS = [
    ("lm_head", in_sequences(lambda output: output * NAN), "lm_head"),
    ("lm_head", in_sequences(dead), "lm_head"),
    ("lm_head", of_single_tokens(dead), "lm_head"),
    ("model.embed_tokens", in_sequences(lambda output: output.roll(1, 1)), "embedding"),
    ("model.embed_tokens", in_sequences(lambda output: output * NAN), "embedding"),
    ("model.norm", in_sequences(lambda output: output * 0), "final_norm"),
    ("model.norm", of_single_tokens(lambda output: output * 0), "final_norm"),
    ("model.norm", of_one_sequence(lambda output: output * NAN), "final_norm"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("path", "hook", "site"), FAULTS)
def test_a_fault_of_an_end_that_only_sequences_show_is_found(dtype, path, hook, site):
    model = tiny_model_of("qwen2").to(dtype)
    model.get_submodule(path).register_forward_hook(hook)
    assert probed(model)[0] == {(-1, site)}


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "llama"])
@pytest.mark.parametrize("place", ["first_layer_input", "final_norm_input", "lm_head_input"])
def test_what_comes_between_the_ends_and_the_layers_is_compared(family, place):
    model = tiny_model_of(family)
    norm = model.transformer.ln_f if family == "gpt2" else model.model.norm
    reader = {"first_layer_input": decoder_layers(model)[0], "final_norm_input": norm, "lm_head_input": model.lm_head}
    reader[place].register_forward_pre_hook(lambda module, args: (args[0] * 1.001, *args[1:]))
    assert probed(model)[0] == {(-1, place)}


def test_nan_of_a_model_type_on_which_nothing_was_tried_is_a_fault():
    model = tiny_model_of("granite")
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * NAN,))
    assert probed(model)[0] == {(-1, "final_norm")}


def test_one_wrong_layer_for_one_sequence_is_found():
    model = tiny_model_of("llama")
    decoder_layers(model)[1].register_forward_hook(of_one_sequence(lambda output: output * 1.1))
    assert probed(model)[0] == {(1, "layer_output")}


def tied_opt(**settings):
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    config = OPTConfig(**sizes, max_position_embeddings=64, pad_token_id=1, **settings)
    return OPTForCausalLM._from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_projections_beside_the_layers_are_named_and_not_called_faulty(dtype):
    wrong, untested, _ = probed(tied_opt(word_embed_proj_dim=16).to(dtype))
    assert wrong == set()
    assert untested[HANDOFFS] == "other matrices stand between them"
    wrong, untested, _ = probed(tied_opt(word_embed_proj_dim=32).to(dtype))
    assert wrong == set()
    assert HANDOFFS not in untested


@pytest.mark.parametrize("family", ["granite", "gptj", "nemotron"])
def test_other_model_types_are_healthy_and_the_ways_between_their_ends_named(family):
    wrong, untested, _ = probed(tiny_model_of(family))
    assert wrong == set()
    assert HANDOFFS in untested


def test_the_weight_of_lm_head_is_put_back_also_if_it_is_tied_and_the_model_fails():
    model = tied_opt()
    before = model.lm_head.weight.detach().clone()
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    probed(model)

    def fail(module, args, output):
        raise KeyboardInterrupt

    model.lm_head.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        probed(model)
    assert torch.equal(model.lm_head.weight, before)


def test_two_nan_say_nothing_and_do_not_count_as_compared():
    """A device whose numbers are all NaN agreed with itself."""
    known, broken = torch.ones(4, 2), torch.ones(4, 2)
    known[1], broken[1] = NAN, NAN
    assert compare("chain", 0, "layer_output", known, broken).elements_per_channel == 3
    nothing = compare("chain", 0, "layer_output", known * NAN, broken * NAN)
    assert (nothing.mismatch, nothing.elements_per_channel, nothing.calls) == (None, 0, 0)
    assert compare("chain", 0, "layer_output", known, known * NAN).mismatch is not None
