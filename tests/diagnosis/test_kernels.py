"""Kernels observed while a model runs: faults of kernels, of hooks and of patched modules; arithmetic that is none."""

import pytest
import torch
from decoder_families import tiny_model_of
from torch.utils._python_dispatch import TorchDispatchMode

from aqnpipe.diagnosis.capture import inference
from aqnpipe.diagnosis.kernels import observe_kernels
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.sites import layer_sites

ATEN = torch.ops.aten


class Chip(TorchDispatchMode):
    """A device of which some kernels write another result: `change(result, arguments)` by operator."""

    def __init__(self, changes):
        super().__init__()
        self.changes = changes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        change = self.changes.get(func.overloadpacket.__name__)
        return result if change is None else change(result, args)


def observed(model, changes=None):
    layers = [layer_sites(layer) for layer in decoder_layers(model)]
    with inference(model), Chip(changes or {}):
        return observe_kernels(model, layers, seed=0)


def faulty_kernels(model, changes=None):
    return [kernel for kernel in observed(model, changes).kernels if kernel.verdict == "fault"]


def places(model, changes=None):
    return {(check.layer, check.site) for check in observed(model, changes).checks if check.mismatch}


def of_rows(least, factor=1.5):
    return lambda y, args: y * factor if y.dim() == 2 and len(y) >= least else y


# -- faults of kernels -------------------------------------------------------------------------------------------------


def lane(y, args):
    if y.shape[-1] != 48:
        return y
    y = y.clone()
    y[:, 13] *= 1.01
    return y


def test_a_lane_of_a_product_is_a_verdict_on_the_kernels_with_the_layers_as_evidence():
    kernels = faulty_kernels(tiny_model_of("llama"), {"mm": lane})
    forward = [kernel for kernel in kernels if "second" not in kernel.operands and kernel.layers == (0, 1)]
    assert kernels
    assert {kernel.operator for kernel in kernels} == {"mm"}
    assert all(kernel.wrong_channels == (13,) and kernel.wrong_calls == kernel.calls for kernel in kernels)
    assert any("layer 1: up_proj" in kernel.wrong_places for kernel in forward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_product_with_more_than_a_thousand_rows(dtype):
    model = tiny_model_of("llama").to(dtype)
    weight = decoder_layers(model)[1].mlp.down_proj.weight

    def change(y, args):
        own = args[1].untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        return y * 1.5 if own and len(y) >= 1024 else y

    assert places(model, {"mm": change}) == {(1, "down_proj")}


def test_the_gradient_of_the_embedding():
    (kernel,) = faulty_kernels(tiny_model_of("llama"), {"embedding_dense_backward": lambda y, args: y * 1.02})
    assert kernel.wrong_places == ("embedding.embedding_dense_backward_gradient",)


def test_keys_behind_the_first_512(random_model):
    model = random_model(num_layers=1)

    def change(y, args):
        if y.shape[-1] <= 512:
            return y
        y = y.clone()
        y[..., 512:] *= 0.9
        return y

    kernels = faulty_kernels(model, {"bmm": change})
    assert kernels
    assert all("attention_core" in place for kernel in kernels for place in kernel.wrong_places)


CHANGES = {
    "silu": lambda y, args: torch.where((args[0] > -0.2) & (args[0] < -0.1), y * 1.05, y),
    "rsqrt": lambda y, args: y * 1.01,
    "_softmax": lambda y, args: torch.where(y < 0.02, 0.0, y),
    "add": lambda y, args: y.bfloat16().float() if y.dtype == torch.float32 else y,
    "mul": lambda y, args: torch.where((y > 0.1) & (y < 0.11), y * 1.001, y) if y.dtype == torch.float32 else y,
    "mean": lambda y, args: y * 0.999,
    "cat": lambda y, args: y.roll(1, -2) if y.dim() == 4 and y.shape[-2] > 2 else y,
    "embedding": lambda y, args: y.flip(-1),
    "cos": lambda y, args: y * (1 - 1e-5),
    "silu_backward": lambda y, args: y * 1.03,
    "_softmax_backward_data": lambda y, args: y * 1.04,
    "sum": lambda y, args: y * 1.01 if y.is_floating_point() else y,
    "_log_softmax": lambda y, args: y * 1.001,
}


@pytest.mark.parametrize("operator", CHANGES)
def test_kernels_of_every_class(operator):
    kernels = faulty_kernels(tiny_model_of("llama"), {operator: CHANGES[operator]})
    assert {kernel.operator for kernel in kernels} == {operator}


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.01), (torch.bfloat16, 1.5)])
def test_fused_attention_forward_and_backward(dtype, factor):
    model = tiny_model_of("llama").to(dtype)
    model.set_attn_implementation("sdpa")
    forward, backward = (f"_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward"))
    changes = {
        forward: lambda y, args: (y[0] * factor, *y[1:]),
        backward: lambda y, args: (y[0], y[1] * factor, y[2]),
    }
    for operator, change in changes.items():
        assert {kernel.operator for kernel in faulty_kernels(model, {operator: change})} == {operator}


def test_experts():
    kernels = faulty_kernels(tiny_model_of("mixtral"), {"_grouped_mm": lambda y, args: y * 1.05})
    assert {kernel.operator for kernel in kernels} == {"_grouped_mm"}


def test_numbers_that_are_not_finite():
    def change(y, args):
        y = y.clone()
        y[-1, 3] = torch.nan
        return y

    assert (0, "q_proj") in places(tiny_model_of("llama"), {"mm": change})


def test_a_kernel_that_does_not_repeat():
    calls = []

    def change(y, args):
        calls.append(1)
        return y * 1.01 if len(calls) % 50 == 0 else y

    assert {kernel.operator for kernel in faulty_kernels(tiny_model_of("llama"), {"mul": change})} == {"mul"}


# -- what modules read and return --------------------------------------------------------------------------------------


def replaced(module, args, output):
    first = output[0] if isinstance(output, tuple) else output
    return (first * 1.001, *output[1:]) if isinstance(output, tuple) else first * 1.001


def in_place(module, args, output):
    (output[0] if isinstance(output, tuple) else output).mul_(1.001)


SITES = {"": "layer_output", "self_attn": "attention_output", "mlp": "mlp_output", "mlp.act_fn": "activation"}


@pytest.mark.parametrize("hook", [replaced, in_place])
@pytest.mark.parametrize("path", ["", "self_attn", "mlp", "mlp.act_fn", "mlp.up_proj", "input_layernorm"])
def test_a_hook_on_the_output_of_a_module(path, hook):
    model = tiny_model_of("llama")
    decoder_layers(model)[1].get_submodule(path).register_forward_hook(hook)
    with torch.no_grad():
        assert places(model) == {(1, SITES.get(path, path.rsplit(".", 1)[-1]))}


def test_a_hook_of_all_modules():
    model = tiny_model_of("llama")
    own = decoder_layers(model)[0].mlp.down_proj

    def hook(module, args, output):
        return output * 1.01 if module is own else None

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        assert places(model) == {(0, "down_proj")}
    finally:
        handle.remove()


def test_a_hook_on_the_input_of_a_module():
    model = tiny_model_of("llama")
    decoder_layers(model)[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] * 1.01,))
    assert places(model) == {(1, "mlp_input")}


@pytest.mark.parametrize("path", ["mlp", "mlp.down_proj", "self_attn", ""])
def test_another_forward_on_a_module(path):
    model = tiny_model_of("llama")
    module = decoder_layers(model)[1].get_submodule(path)
    own = module.forward

    def forward(*args, **kwargs):
        return replaced(module, args, own(*args, **kwargs))

    module.forward = forward
    assert places(model) == {(1, SITES.get(path, path.rsplit(".", 1)[-1]))}


def dead(output):
    return torch.cat([torch.zeros_like(output[..., :3]), output[..., 3:]], -1)


def in_sequences(change):
    return lambda module, args, output: change(output) if output.shape[1] > 1 else output


def of_single_tokens(change):
    return lambda module, args, output: change(output) if output.shape[1] == 1 else output


def of_one_sequence(change):
    return lambda module, args, output: change(output) if len(output) == 1 else output


@pytest.mark.parametrize(
    ("path", "hook", "site"),
    [
        ("lm_head", in_sequences(lambda output: output * torch.nan), "lm_head"),
        ("lm_head", of_single_tokens(dead), "lm_head"),
        ("model.embed_tokens", in_sequences(lambda output: output.roll(1, 1)), "embedding"),
        ("model.embed_tokens", in_sequences(lambda output: output * torch.nan), "embedding"),
        ("model.norm", of_single_tokens(lambda output: output * 0), "final_norm"),
        ("model.norm", of_one_sequence(lambda output: output * torch.nan), "final_norm"),
    ],
)
def test_a_fault_of_an_end_that_only_some_calls_show(path, hook, site):
    model = tiny_model_of("qwen2").bfloat16()
    model.get_submodule(path).register_forward_hook(hook)
    assert places(model) == {(-1, site)}


def test_one_wrong_layer_for_one_sequence():
    model = tiny_model_of("llama")
    decoder_layers(model)[1].register_forward_hook(of_one_sequence(lambda output: output * 1.1))
    assert places(model) == {(1, "layer_output")}


@pytest.mark.parametrize("family", ["gpt2", "granite"])
@pytest.mark.parametrize("place", ["first_layer_input", "final_norm_input", "lm_head_input"])
def test_what_comes_between_the_ends_and_the_layers(family, place):
    model = tiny_model_of(family)
    norm = model.transformer.ln_f if family == "gpt2" else model.model.norm
    reader = {"first_layer_input": decoder_layers(model)[0], "final_norm_input": norm, "lm_head_input": model.lm_head}
    reader[place].register_forward_pre_hook(lambda module, args: (args[0] * 1.001, *args[1:]))
    assert places(model) == {(-1, place)}


def test_what_comes_between_two_layers():
    model = tiny_model_of("llama")
    decoder_layers(model)[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.001, *args[1:]))
    assert places(model) == {(0, "layer_output")}


def one_channel_lost(module, args, kwargs):
    if args:
        return (torch.cat([args[0][..., :5], 0 * args[0][..., 5:6], args[0][..., 6:]], -1), *args[1:]), kwargs
    (lost,), _ = one_channel_lost(module, (kwargs["hidden_states"],), {})
    return args, kwargs | {"hidden_states": lost}


@pytest.mark.parametrize("block", ["attention", "mlp"])
@pytest.mark.parametrize("family", ["olmo2", "gpt2"])
def test_a_channel_that_is_lost_on_the_way_into_a_block(family, block):
    model = tiny_model_of(family)
    module = getattr(layer_sites(decoder_layers(model)[1]), block)
    module.register_forward_pre_hook(one_channel_lost, with_kwargs=True)
    assert places(model) == {(1, f"{block}_input")}


@pytest.mark.parametrize("family", ["cohere", "gemma2"])
def test_logits_that_the_model_changes_behind_lm_head(family):
    model = tiny_model_of(family).bfloat16()

    def damaged(module, args, kwargs, output):
        output.logits = output.logits * 1.05
        return output

    model.register_forward_hook(damaged, with_kwargs=True)
    assert places(model) == {(-1, "lm_head")}


def test_one_head_of_a_norm_of_heads():
    model = tiny_model_of("qwen3").to(torch.float16)

    def damaged(module, args, output):
        return torch.cat([output[..., :1, :], 1.05 * output[..., 1:, :]], -2)

    decoder_layers(model)[1].self_attn.q_norm.register_forward_hook(damaged)
    assert places(model) == {(1, "q_norm")}


def test_a_mantissa_bit_of_the_residual_sum():
    def stuck(y, args):
        return (y.view(torch.int32) & ~1).view(torch.float32) if y.dtype == torch.float32 and y.dim() == 3 else y

    assert {(0, "layer_output"), (1, "layer_output")} <= places(tiny_model_of("llama"), {"add": stuck})


@pytest.mark.parametrize(("family", "part"), [("dots1", "shared_experts"), ("mixtral", "experts")])
def test_a_term_that_is_lost_from_the_sum_over_experts(family, part):
    model = tiny_model_of(family)
    block = layer_sites(decoder_layers(model)[1]).mlp
    kept = {}
    getattr(block, part).register_forward_hook(lambda m, a, out: kept.update(lost=out))

    def without(module, args, output):
        lost = kept["lost"].reshape(output.shape)
        return output - torch.cat([0 * lost[..., :3], lost[..., 3:4], 0 * lost[..., 4:]], -1)

    block.register_forward_hook(without)
    assert places(model) == {(1, "mlp_output")}


def test_a_number_that_is_not_finite_where_every_kernel_is_right(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x, inplace=False: torch.log(x - x.amax() - 1))
    assert (0, "activation") in places(tiny_model_of("llama"))


# -- what is no fault --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype", "attention"),
    [
        ("llama", torch.bfloat16, "eager"),
        ("gemma2", torch.float16, "eager"),
        ("gpt2", torch.float32, "sdpa"),
        pytest.param("mixtral", torch.bfloat16, "sdpa", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", torch.float32, "eager", marks=pytest.mark.slow),
        pytest.param("gemma3_text", torch.bfloat16, "sdpa", marks=pytest.mark.slow),
    ],
)
def test_healthy_models_of_any_family(family, dtype, attention):
    model = tiny_model_of(family).to(dtype)
    model.set_attn_implementation(attention)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = observed(model)
    assert [check for check in found.checks if check.mismatch] == []
    assert {kernel.verdict for kernel in found.kernels} == {"healthy"}
    assert found.unchecked == ()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_sums_in_another_order_in_every_call_are_healthy_and_named():
    def change(y, args):
        left, right = args[-2:]
        order = torch.randperm(left.shape[1])
        parts = [left[:, part] @ right[part] for part in order.chunk(4)]
        return sum(parts).to(y.dtype) if len(args) == 2 else y

    found = observed(tiny_model_of("llama"), {"mm": change})
    assert {kernel.verdict for kernel in found.kernels} == {"healthy"}
    assert {"q_proj", "down_proj"} <= set(found.reordered)


def test_hooks_that_only_look_and_a_forward_of_its_own_that_computes_the_same():
    model = tiny_model_of("llama")
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda m, args, output: seen.append(m))
    mlp = decoder_layers(model)[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert places(model) == set()
    assert seen


def test_frozen_weights_stay_frozen():
    model = tiny_model_of("llama").requires_grad_(False)
    assert places(model) == set()
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_projections_beside_the_layers_are_healthy():
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    config = OPTConfig(**sizes, max_position_embeddings=64, pad_token_id=1, word_embed_proj_dim=16)
    model = OPTForCausalLM._from_config(config, attn_implementation="eager").half().eval()
    assert places(model) == set()


def added_in_place(block, hidden_states):
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, shares, chosen = block.gate(flat)
    output = block.experts(flat, chosen, shares)
    output += torch.sigmoid(block.shared_expert_gate(flat)) * block.shared_expert(flat)
    return output.reshape(hidden_states.shape)


def test_a_sum_over_experts_that_is_made_in_place_is_healthy(monkeypatch):
    model = tiny_model_of("qwen2_moe")
    monkeypatch.setattr(type(layer_sites(decoder_layers(model)[1]).mlp), "forward", added_in_place)
    assert places(model) == set()
