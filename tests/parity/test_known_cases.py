"""Differences whose cause is known: parity must find the operator and say what it is."""

from collections import Counter

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.qwen2 import modeling_qwen2

from aqnpipe.artifacts.parities import WITHIN_ROUNDING, ParityFile
from aqnpipe.errors import DataError
from aqnpipe.models.layout import is_rms_norm
from aqnpipe.parity.compare import function_differences, parity_of
from aqnpipe.parity.recorder import sampled_channels

LAYERS = 6
ROPE = {"rope_theta": 500000.0, "rope_type": "default"}


def verdicts_of(parity, verdict):
    """Return how many operators of each kind have this verdict."""
    return dict(Counter(row.kind for row in parity.operators if row.verdict == verdict))


def test_the_same_configuration_twice_is_equal_to_the_last_bit(captured, low):
    parity = parity_of(low, captured(dtype="bfloat16", replay=low))
    assert parity.verdict == "equal"
    assert {row.equal_share for row in parity.operators} == {1.0}
    assert parity.log_probabilities.largest == 0
    assert parity.first_beyond_rounding is None


def test_two_captures_with_the_same_bits_are_equal_without_a_replay(full, captured):
    parity = parity_of(full, captured())
    assert parity.verdict == "equal"
    assert parity.summary == "every operator gives the same bits on both sides."


def test_eager_against_sdpa_in_float32_is_rounding(captured, full):
    parity = parity_of(full, captured(attention="sdpa", replay=full))
    assert parity.verdict == "rounding"
    assert verdicts_of(parity, "rounding") == {"attention": LAYERS}
    assert 0 < parity.log_probabilities.rms < 1e-4


def test_eager_against_sdpa_in_bfloat16_is_another_algorithm_of_attention_alone(captured, low):
    parity = parity_of(low, captured(dtype="bfloat16", attention="sdpa", replay=low))
    assert verdicts_of(parity, "different algorithm") == {"attention": LAYERS}
    assert parity.first_beyond_rounding == "layers.0.attention"
    assert "scores and probabilities rounded" in parity.summary
    assert "attention: eager / sdpa" in parity.settings


def test_float32_against_bfloat16_is_rounding_of_every_operator(captured, full):
    parity = parity_of(full, captured(dtype="bfloat16", replay=full))
    assert parity.verdict == "rounding"
    # One rounding to 8 bits has a relative RMS of about 2^-8 / sqrt(12) per operand.
    sizes = [row.relative_rms for row in parity.operators if row.kind == "gate_proj"]
    assert all(2.0**-10 < size < 2.0**-7 for size in sizes)


@pytest.mark.slow
def test_one_thread_against_two_is_rounding_at_most(captured):
    first = captured(sequences=[list(range(3, 15))], num_decoded=0)
    parity = parity_of(first, captured(threads=2, num_decoded=0, replay=first))
    assert parity.verdict in ("equal", "rounding")
    assert "threads: 1 / 2" in parity.settings


@pytest.mark.slow
def test_batches_of_1_against_32_are_rounding_at_most(captured):
    sequences = [[7 * number + place for place in range(9)] for number in range(32)]
    first = captured(batch_size=1, sequences=sequences)
    parity = parity_of(first, captured(batch_size=32, replay=first))
    assert parity.verdict in ("equal", "rounding")
    assert "batch_size: 1 / 32" in parity.settings


def test_left_against_right_padding_is_rounding_and_padding_is_never_compared(captured):
    sequences = [list(range(3, 15)), list(range(40, 47)), list(range(60, 65))]
    first = captured(padding="left", num_decoded=0, sequences=sequences)
    second = captured(padding="right", num_decoded=0, replay=first)
    parity = parity_of(first, second)
    assert parity.num_rows == 12 + 7 + 5
    assert parity.verdict in ("equal", "rounding")
    assert parity.log_probabilities.num_tokens == 24 - 3
    assert parity.log_probabilities.largest < 1e-3


def hooked(change, path="mlp.up_proj"):
    """Return what changes the output of a module of layer 3."""
    return lambda model: model.model.layers[3].get_submodule(path).register_forward_hook(lambda *call: change(call[2]))


SCALED = hooked(lambda output: output * 1.001)


def test_a_wrong_layer_on_one_side_is_a_fault_of_that_operator(captured, full):
    parity = parity_of(full, captured(change=SCALED, replay=full))
    assert verdicts_of(parity, "fault") == {"up_proj": 1}
    assert parity.first_beyond_rounding == "layers.3.up_proj"
    row = next(row for row in parity.operators if row.name == "layers.3.up_proj")
    assert row.gain == pytest.approx(1e-3, rel=1e-3)
    assert "second side" in row.reason


def test_a_fault_of_decoding_that_no_recorded_token_has_is_named_as_not_compared(captured):
    first = captured(max_rows=8)
    in_decoding = hooked(lambda output: 1.2 * output if output.shape[1] == 1 else output)
    parity = parity_of(first, captured(change=in_decoding, replay=first))
    assert parity.verdict == "not located"
    assert parity.verdict not in WITHIN_ROUNDING
    assert parity.summary.startswith("log-probabilities differ although the recorded operators are equal")
    assert any("No decoded token is among the recorded ones" in note for note in parity.notes)


def test_a_wrong_layer_is_found_without_a_replay_too(captured, full):
    parity = parity_of(full, captured(change=SCALED))
    assert not parity.same_inputs
    assert verdicts_of(parity, "fault") == {"up_proj": 1}
    assert parity.operators[0].equal_share is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_channel_that_is_not_finite_is_a_fault_and_a_file_can_hold_it(captured, full, value):
    channel = next(number for number in range(320) if number not in sampled_channels(320))
    overflow = hooked(lambda output: output.index_fill(-1, torch.tensor([channel]), value))
    parity = parity_of(full, captured(change=overflow, replay=full))
    assert verdicts_of(parity, "fault") == {"up_proj": 1}
    assert "the second side has values that are not finite" in parity.summary
    again = ParityFile.model_validate_json(parity.model_dump_json())
    assert again.log_probabilities.rms == 1e308


@pytest.mark.parametrize(
    ("path", "width", "dtype"),
    [("mlp.up_proj", 320, "float32"), ("mlp.up_proj", 320, "bfloat16"), ("post_attention_layernorm", 128, "float32")],
)
def test_a_dead_channel_that_is_not_sampled_is_a_fault(captured, full, low, path, width, dtype):
    first = full if dtype == "float32" else low
    channel = next(number for number in range(width) if number not in sampled_channels(width))
    dead = hooked(lambda output: output.index_fill(-1, torch.tensor([channel]), 0.0), path)
    parity = parity_of(first, captured(change=dead, replay=first, dtype=dtype))
    assert verdicts_of(parity, "fault") == {path.rsplit(".")[-1]: 1}


def test_tokens_whose_results_are_zero_hide_no_other_token(captured):
    def blank(model):
        with torch.no_grad():
            model.model.embed_tokens.weight[3] = 0

    sequences = [[3, 5, 6, 7], [8, 3, 9, 10]]
    first = captured(change=blank, sequences=sequences)

    def other_settings(model):
        blank(model)
        model.model.layers[0].input_layernorm.variance_epsilon *= 10

    parity = parity_of(first, captured(change=other_settings, replay=first))
    assert verdicts_of(parity, "fault") == {"input_layernorm": 1}
    assert all(row.bound_share < 1 for row in parity.operators if row.verdict != "fault")


def test_what_computes_between_two_operators_is_a_fault_of_the_second(captured, full):
    def plant(model):
        attention = model.model.layers[2].self_attn
        attention.register_forward_hook(lambda module, args, output: (output[0] * 1.5, *output[1:]))

    parity = parity_of(full, captured(change=plant))
    assert verdicts_of(parity, "fault") == {"attention_residual": 1}
    assert "not what the operator before it returned" in parity.summary


def test_a_cache_that_changes_values_is_a_fault_without_a_replay_too(captured, full, monkeypatch):
    original = DynamicCache.update

    def scaled(self, keys, values, layer_idx, *args, **kwargs):
        return original(self, keys, 1.5 * values if layer_idx == 2 else values, layer_idx, *args, **kwargs)

    monkeypatch.setattr(DynamicCache, "update", scaled)
    parity = parity_of(full, captured())
    assert verdicts_of(parity, "fault") == {"attention": 1}
    assert parity.first_beyond_rounding == "layers.2.attention"


def test_stale_weights_are_said_as_such(captured, full):
    def train(model):
        with torch.no_grad():
            model.model.layers[1].self_attn.o_proj.weight += 0.01

    parity = parity_of(full, captured(change=train, replay=full))
    assert parity.verdict == "stale weights"
    assert "model.layers.1.self_attn.o_proj.weight" in parity.summary
    assert verdicts_of(parity, "fault") == {"o_proj": 1}


def test_a_wrong_rope_theta_is_a_fault_of_the_rotations_alone(captured, full, edited):
    parity = parity_of(full, captured(folder=edited(rope_parameters=ROPE), replay=full))
    assert verdicts_of(parity, "fault") == {"rotary_q": LAYERS, "rotary_k": LAYERS}
    assert parity.first_beyond_rounding == "layers.0.rotary_q"
    assert any(setting.startswith("config.rope_parameters") for setting in parity.settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_replay_another_setting_of_the_model_is_another_function(captured, full, low, edited, dtype):
    """Each side's operators are right for its own settings, so no operator shows it."""
    first = {"float32": full, "bfloat16": low}[dtype]
    parity = parity_of(first, captured(folder=edited(rope_parameters=ROPE), dtype=dtype))
    assert parity.verdict == "different function"
    assert parity.verdict not in WITHIN_ROUNDING
    assert parity.summary.startswith("the two sides do not compute the same function: ")
    assert "'rope_theta': 500000.0" in parity.summary
    assert f"differ by {parity.log_probabilities.rms:.2g} nats" in parity.summary


def test_settings_that_decide_no_value_are_no_other_function(captured, full, edited):
    """Names, tokens, training, and a default that one file says."""
    left_out = "rms_norm_eps" if full.identity.config["rms_norm_eps"] == 1e-6 else "initializer_range"
    changes = {"initializer_range": 0.5, "attention_dropout": 0.1, "pad_token_id": 3, "use_cache": False}
    folder = edited(**changes | {left_out: None})
    parity = parity_of(full, captured(folder=folder, attention="sdpa"))
    assert parity.verdict == "rounding"
    assert parity.log_probabilities.rms < 1e-4
    assert "for the input that it has on its side" in parity.summary


def test_a_config_of_a_capture_that_transformers_cannot_read_is_one_line(full):
    """Captures come from other sites; a family that is unknown here is compared as it stands."""
    identity, config = full.identity, full.identity.config
    broken = identity.model_copy(update={"config": {**config, "hidden_act": ["silu"]}})
    with pytest.raises(DataError, match=r"config\.json that transformers cannot read: .*hidden_act"):
        function_differences(identity, broken)
    first, second = (
        identity.model_copy(update={"config": {"model_type": "of_tomorrow", "theta": theta, "pad_token_id": theta}})
        for theta in (1, 2)
    )
    assert function_differences(first, second) == ("theta: 1 / 2",)
    assert function_differences(first, first) == ()


def test_the_cast_of_rms_norms_is_named(captured, low):
    class CastAfter(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

        def forward(self, x):
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return (wide * self.weight.float()).to(x.dtype)

    class Qwen2RMSNorm(CastAfter):
        pass

    def change(model):
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if is_rms_norm(child):
                    setattr(parent, name, Qwen2RMSNorm(child))

    parity = parity_of(low, captured(dtype="bfloat16", change=change, replay=low))
    kinds = {"input_layernorm": LAYERS, "post_attention_layernorm": LAYERS, "norm": 1}
    assert verdicts_of(parity, "different algorithm") == kinds
    row = next(row for row in parity.operators if row.kind == "norm")
    assert (row.first_algorithm, row.second_algorithm) == ("cast before the weight", "cast after the weight")
    assert 0.5 < row.equal_share < 0.95


def test_rotations_in_float32_are_named(captured, low, monkeypatch):
    original = modeling_qwen2.apply_rotary_pos_emb

    def wide(q, k, cos, sin, unsqueeze_dim=1):
        q_wide, k_wide = original(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim)
        return q_wide.to(q.dtype), k_wide.to(k.dtype)

    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", wide)
    parity = parity_of(low, captured(dtype="bfloat16", replay=low))
    assert verdicts_of(parity, "different algorithm") == {"rotary_q": LAYERS, "rotary_k": LAYERS}
    row = next(row for row in parity.operators if row.kind == "rotary_q")
    assert row.second_algorithm == "cos and sin rounded, products in float32"


def test_an_output_projection_in_float32_is_named(captured, low):
    def change(model):
        head = model.lm_head
        head.forward = lambda x: nn.functional.linear(x.float(), head.weight.float())

    parity = parity_of(low, captured(dtype="bfloat16", change=change, replay=low))
    assert verdicts_of(parity, "different algorithm") == {"lm_head": 1}
    assert "the second side keeps the result in float32" in parity.summary


def test_a_residual_stream_in_float32_is_named(captured, low, monkeypatch):
    def forward(self, hidden_states, **kwargs):
        low_precision = self.mlp.down_proj.weight.dtype
        residual = hidden_states.float()
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(residual).to(low_precision), **kwargs)
        residual = residual + attended.float()
        return residual + self.mlp(self.post_attention_layernorm(residual).to(low_precision)).float()

    monkeypatch.setattr(modeling_qwen2.Qwen2DecoderLayer, "forward", forward)

    def last_norm_in_low_precision(model):
        model.model.norm.register_forward_pre_hook(lambda module, args: (args[0].to(torch.bfloat16),))

    second = captured(dtype="bfloat16", change=last_norm_in_low_precision, replay=low)
    kinds = verdicts_of(parity_of(low, second), "different algorithm")
    assert kinds["attention_residual"] == kinds["mlp_residual"] == LAYERS


def test_verdicts_are_counted_over_all_operators(full):
    kinds = Counter(full.operators["kind"])
    assert kinds["q_proj"] == kinds["attention"] == LAYERS
    assert kinds["lm_head"] == 1


def test_a_replay_with_a_window_that_is_shorter_than_the_sequences(captured, edited):
    """Keys that were replaced stay in the cache, of which decoded tokens see the last ones."""
    kinds = ["sliding_attention"] * LAYERS
    settings = {"folder": edited(use_sliding_window=True, sliding_window=5, layer_types=kinds), "num_decoded": 4}
    first = captured(**settings)
    assert parity_of(first, captured(**settings, replay=first)).verdict == "equal"
    low = parity_of(first, captured(**settings, replay=first, dtype="bfloat16"))
    assert low.verdict == "rounding"
    assert all(row.bound_share < 1 for row in low.operators)
