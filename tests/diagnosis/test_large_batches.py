"""Faults that need a large batch, a long sequence or a backward pass, and devices that are right there."""

import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
from random_models import random_model_of

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.exact_probes import run_exact
from aqnpipe.models.layout import decoder_layers

CONFIG = DiagnosisConfig(exact_repeats=2, intermittent_rate=0.05, miss_probability=0.1)
DTYPES = [torch.float32, torch.bfloat16]
LAYER = 1


def found_in(model):
    return {(fault.scope, fault.layers, fault.site) for fault in run_exact(model, CONFIG).faults}


def model_of(architecture="qwen2", dtype=torch.float32, attention="eager"):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 1024}
    return random_model_of(architecture, dtype, num_layers=2, attn_implementation=attention, **sizes)


def some_channels(values):
    values = values.clone()
    values[..., 3:5] *= 1.5
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("path", "site"),
    [
        ("mlp.down_proj", "down_proj"),
        ("self_attn.k_proj", "k_proj"),
        ("post_attention_layernorm", "post_attention_layernorm"),
        ("mlp", "mlp_output"),
        ("self_attn", "attention_output"),
        ("", "layer_output"),
    ],
)
def test_a_fault_of_a_thousand_rows_in_one_layer(path, site, dtype):
    model = model_of(dtype=dtype)

    def wrong(module, args, output, least):
        tensor = output[0] if isinstance(output, tuple) else output
        changed = some_channels(tensor) if tensor.numel() // tensor.shape[-1] >= least else tensor
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    module = decoder_layers(model)[LAYER].get_submodule(path)
    handle = module.register_forward_hook(lambda *call: wrong(*call, least=1024))
    assert found_in(model) == {("layer", (LAYER,), site)}
    handle.remove()
    module.register_forward_hook(lambda *call: wrong(*call, least=10**9))
    assert found_in(model) == set()


@pytest.mark.parametrize(
    ("path", "site"), [("model.embed_tokens", "embedding"), ("model.norm", "final_norm"), ("lm_head", "lm_head")]
)
def test_a_fault_of_a_thousand_rows_at_the_ends(path, site):
    model = model_of(dtype=torch.bfloat16)

    def wrong(module, args, output):
        return some_channels(output) if output[..., 0].numel() >= 1024 else output

    model.get_submodule(path).register_forward_hook(wrong)
    assert found_in(model) == {("model", (), site)}


def keys_beyond_512(kernel, module, q, k, v, mask, **kwargs):
    late = torch.arange(k.shape[2]) >= 512
    return kernel(module, q, k, torch.where(late.unsqueeze(-1), 1.25 * v, v), mask, **kwargs)


def queries_beyond_512(kernel, module, q, k, v, mask, **kwargs):
    output, weights = kernel(module, q, k, v, mask, **kwargs)
    late = torch.arange(q.shape[2]) >= 512
    return torch.where(late.reshape(-1, 1, 1), 1.25 * output, output), weights


def keys_by_512_and_the_rest(kernel, module, q, k, v, mask, **kwargs):
    """Blocks of keys with their own maximum and sum, as fused kernels add them: healthy."""
    groups, scaling = q.shape[1] // k.shape[1], kwargs["scaling"]
    keys, values = (own.repeat_interleave(groups, 1).float() for own in (k, v))
    scores = q.float() @ keys.transpose(2, 3) * scaling
    scores = scores if mask is None else scores + mask.float()
    top = scores.amax(-1, keepdim=True)
    powers = (scores - top).exp()
    parts = [powers[..., own].to(q.dtype).float() @ values[:, :, own] for own in (slice(512), slice(512, None))]
    return (sum(parts) / powers.sum(-1, keepdim=True)).to(q.dtype).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [keys_beyond_512, queries_beyond_512, keys_by_512_and_the_rest])
def test_attention_beyond_512_positions(monkeypatch, change, dtype):
    model = model_of("llama", dtype)
    file = sys.modules[type(model).__module__]
    own = file.eager_attention_forward

    def kernel(module, *args, **kwargs):
        healthy = module.layer_idx != LAYER
        return own(module, *args, **kwargs) if healthy else change(own, module, *args, **kwargs)

    monkeypatch.setattr(file, "eager_attention_forward", kernel)
    wanted = set() if change is keys_by_512_and_the_rest else {("layer", (LAYER,), "attention_core")}
    assert found_in(model) == wanted


def test_a_table_of_angles_that_is_wrong_from_position_512():
    model = model_of("llama")

    def wrong(module, args, kwargs, output):
        cos, sin = output
        return cos, torch.where(kwargs["position_ids"].unsqueeze(-1) >= 512, 1.25 * sin, sin)

    model.model.rotary_emb.register_forward_hook(wrong, with_kwargs=True)
    assert found_in(model) == {("model", (), "rotary_table")}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_that_is_wrong_from_position_512(monkeypatch, dtype):
    model = model_of("qwen3", dtype)
    file = sys.modules[type(model).__module__]
    own = file.apply_rotary_pos_emb

    def unrotated_late(q, k, cos, sin, *args):
        late = (torch.arange(cos.shape[1]) >= 512).unsqueeze(-1)
        return own(q, k, torch.where(late, 1.0, cos).to(cos.dtype), torch.where(late, 0.0, sin).to(sin.dtype), *args)

    monkeypatch.setattr(file, "apply_rotary_pos_emb", unrotated_late)
    assert found_in(model) == {("device", (0, 1), "rotary")}


@contextmanager
def gradients_of_embeddings(change):
    """Let `change` compute the gradient of every embedding: (own kernel, gradient, tokens, number of rows)."""
    library = torch.library.Library("aten", "IMPL")
    own = torch.library.get_kernel("aten::embedding_dense_backward", "CPU").call_boxed

    def kernel(keys, gradient, ids, num_rows, *rest):
        return change(lambda *args: own(keys, *args, *rest), gradient, ids, num_rows)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("embedding_dense_backward", kernel, "CPU", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def last_token_wins(own, gradient, ids, num_rows):
    """Updates of one row at the same time, of which the last one overwrites the others."""
    result = torch.zeros(num_rows, gradient.shape[-1], dtype=gradient.dtype)
    return result.index_put_((ids.flatten(),), gradient.flatten(0, -2))


def one_channel_large(own, gradient, ids, num_rows):
    return some_channels(own(gradient, ids, num_rows))


def next_row(own, gradient, ids, num_rows):
    return own(gradient, (ids + 1) % num_rows, num_rows)


def added_backwards(own, gradient, ids, num_rows):
    """Another order of summation, in the format of the model: healthy."""
    return own(gradient.flatten(0, -2).flip(0), ids.flatten().flip(0), num_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [last_token_wins, one_channel_large, next_row, added_backwards])
def test_gradients_of_the_embedding(change, dtype):
    model = model_of("gemma2" if dtype == torch.float32 else "qwen2", dtype)
    with gradients_of_embeddings(change):
        wanted = set() if change is added_backwards else {("model", (), "embedding.weight_gradient")}
        assert found_in(model) == wanted
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_an_embedding_that_cuts_the_graph_is_named():
    model = model_of()
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.detach())
    result = run_exact(model, CONFIG)
    assert result.faults == ()
    assert "gradient of the embedding" in {gap.part for gap in result.untested}
