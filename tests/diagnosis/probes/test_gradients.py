"""Gradients of linears with known operands: healthy ones, and faults in the backward pass alone."""

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.diagnosis.checks import Bench
from aqnpipe.diagnosis.exact_probes import model_checks
from aqnpipe.diagnosis.probes.flow import probe_outer_modules
from aqnpipe.diagnosis.probes.linears import probe_gradients
from aqnpipe.models.layout import decoder_layers, layer_sites, site_module

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def places(model):
    found = set()
    with torch.no_grad():
        for index, layer in enumerate(decoder_layers(model)):
            for name, module in layer_sites(layer).linears.items():
                bench = Bench(index, model.dtype, model.device, torch.Generator().manual_seed(index))
                checks = probe_gradients(name, module, bench)
                assert len({check.site for check in checks}) == 2
                found |= {(check.layer, check.site) for check in checks if check.mismatch}
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "deepseek_v3"])
def test_healthy_gradients_are_exact_and_nothing_remains(family, dtype):
    model = tiny_model_of(family).to(dtype)
    frozen = next(iter(layer_sites(decoder_layers(model)[0]).linears.values()))
    frozen.weight.requires_grad_(False)
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    assert not places(model)
    assert not frozen.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, bias, part):
        context.save_for_backward(x, weight)
        context.part = part
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        of_input = gradient @ weight
        of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        if context.part == "input":
            of_input[..., 3] *= 1.25
        else:
            of_weight[5] = of_weight[5].roll(1)
        return of_input, of_weight, None, None


@pytest.mark.parametrize("part", ["input", "weight"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_of_the_backward_pass_alone_is_found(dtype, part):
    model = tiny_model_of("llama").to(dtype)
    module = layer_sites(decoder_layers(model)[1]).linears["up_proj"]
    module.forward = lambda x: WrongBackward.apply(x, module.weight, module.bias, part)
    assert places(model) == {(1, f"up_proj.{part}_gradient")}


class LowestBitLost(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        bits = torch.int32 if gradient.dtype == torch.float32 else torch.int16
        return (gradient.contiguous().view(bits) & ~1).view(gradient.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_mantissa_bit_of_a_gradient_is_probed(dtype):
    model = tiny_model_of("llama").to(dtype)
    module = layer_sites(decoder_layers(model)[1]).linears["o_proj"]
    module.register_forward_pre_hook(lambda m, args: (LowestBitLost.apply(args[0]),))
    assert places(model) == {(1, "o_proj.input_gradient")}
    model = tiny_model_of("llama").to(dtype)
    module = layer_sites(decoder_layers(model)[1]).linears["o_proj"]
    module.forward = lambda x: torch.nn.functional.linear(x, LowestBitLost.apply(module.weight))
    assert places(model) == {(1, "o_proj.weight_gradient")}


def in_bfloat16(a, b, every):
    """Return a @ b in an accumulator that is rounded to bfloat16 after `every` products."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for start in range(0, a.shape[1], every):
        part = a[:, start : start + every].double() @ b[start : start + every].double()
        total = (total + part).bfloat16().double()
    return total.to(a.dtype)


class NarrowBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, part, every):
        context.save_for_backward(x, weight)
        context.part, context.every = part, every
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        rows, columns = gradient.flatten(0, -2), x.flatten(0, -2)
        of_input, of_weight = rows @ weight, rows.T @ columns
        if context.part == "input":
            of_input = in_bfloat16(rows, weight, context.every)
        else:
            of_weight = in_bfloat16(rows.T, columns, context.every)
        return of_input.reshape(x.shape), of_weight, None, None


@pytest.mark.parametrize("part", ["input", "weight"])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_accumulator_of_the_backward_pass_is_found(dtype, every, part):
    model = tiny_model_of("llama").to(dtype)
    module = layer_sites(decoder_layers(model)[1]).linears["up_proj"]
    module.forward = lambda x: NarrowBackward.apply(x, module.weight, part, every)
    assert places(model) == {(1, f"up_proj.{part}_gradient")}


@pytest.mark.parametrize(("wrong", "found"), [(range(1, 2), {0, 1}), (range(512, 4096), {1})])
def test_a_backward_kernel_that_is_wrong_for_some_numbers_of_tokens_is_found(wrong, found):
    model = tiny_model_of("qwen2")
    layers = [layer_sites(layer) for layer in decoder_layers(model)]

    def damaged(module, of_input, of_output):
        return (of_input[0] * (1.5 if len(of_input[0]) in wrong else 1.0),)

    for sites in layers:
        sites.linears["up_proj"].register_full_backward_hook(damaged)
    with torch.no_grad():
        parts, _ = model_checks(model, layers, 1)  # by the seed, layer 1 has many tokens
    checks = [check for part in parts for check in part.checks if check.mismatch]
    assert {(check.layer, check.site) for check in checks} == {(layer, "up_proj.input_gradient") for layer in found}


class SplitBackward(NarrowBackward):
    @staticmethod
    def backward(context, gradient):
        """Sums of four parts, which a healthy kernel may round to the dtype."""
        x, weight = context.saved_tensors
        rows, columns = gradient.flatten(0, -2), x.flatten(0, -2)
        return split(rows, weight).reshape(x.shape), split(rows.T, columns), None, None


def split(a, b):
    size = -(-a.shape[1] // 4)
    parts = [a[:, k * size :][:, :size].float() @ b[k * size :][:size].float() for k in (2, 0, 3, 1)]
    return sum(part.to(a.dtype).float() for part in parts).to(a.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_sums_with_rounded_parts_are_healthy(dtype):
    model = tiny_model_of("llama").to(dtype)
    for layer in decoder_layers(model):
        for module in layer_sites(layer).linears.values():
            module.forward = lambda x, m=module: SplitBackward.apply(x, m.weight, None, None)
    assert not places(model)


def test_a_module_that_cuts_the_graph_has_no_check_of_its_gradients():
    model = tiny_model_of("llama")
    module = layer_sites(decoder_layers(model)[0]).linears["up_proj"]
    module.register_forward_pre_hook(lambda m, args: (args[0].detach(),))
    bench = Bench(0, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert {check.site for check in probe_gradients("up_proj", module, bench)} == {"up_proj.weight_gradient"}
    module.register_forward_hook(lambda m, args, output: output.detach())
    assert probe_gradients("up_proj", module, bench) == []


def detached(module, args, output):
    return output.detach()


def gaps_of(model):
    with torch.no_grad():
        parts, untested = model_checks(model, [layer_sites(layer) for layer in decoder_layers(model)], 0)
    checks = [check for part in parts for check in part.checks]
    return {check.site for check in checks if check.probe == "backward" and check.layer == 1}, untested


def test_a_norm_and_an_activation_that_cut_the_graph_are_named_as_untested():
    model = tiny_model_of("llama")
    site_module(model, 1, "input_layernorm").register_forward_hook(detached)
    decoder_layers(model)[1].mlp.act_fn.register_forward_hook(detached)
    probed, untested = gaps_of(model)
    missing = {gap.part: (gap.layers, gap.reason) for gap in untested if gap.layers}
    reason = ((1,), "the module has no gradient")
    assert missing == {"gradients of input_layernorm": reason, "gradients of activation": reason}
    assert "post_attention_layernorm.input_gradient" in probed
    assert not {"input_layernorm.input_gradient", "activation.input_gradient"} & probed


@pytest.mark.parametrize(("family", "named"), [("llama", False), ("mixtral", True)])
def test_gradients_that_no_probe_computes_are_named(family, named):
    _, untested = gaps_of(tiny_model_of(family))
    (part,) = (gap.part for gap in untested if gap.reason == "no probe differentiates them")
    parts = set(part.removeprefix("gradients of ").split(", "))
    assert {"gains", "lm_head"} <= parts
    assert "embedding" not in parts, "its gradient is compared"
    assert ("experts" in part) == named


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_the_final_norm_is_probed(dtype):
    model = tiny_model_of("llama").to(dtype)
    with torch.no_grad():
        assert not [check for check in probe_outer_modules(model, 0) if check.mismatch]
        model.model.norm.register_full_backward_hook(lambda module, gradients, given: (gradients[0] * 1.05,))
        wrong = [check.site for check in probe_outer_modules(model, 0) if check.mismatch]
    assert wrong == ["final_norm.input_gradient"]


@pytest.mark.parametrize(("family", "named"), [("gpt2", "wpe"), ("opt", "embed_positions"), ("llama", None)])
def test_learned_positions_are_named_as_untested(family, named):
    _, untested = gaps_of(tiny_model_of(family))
    found = [gap.part.rsplit(".", 1)[-1] for gap in untested if gap.reason == "no probe reads its rows"]
    assert found == ([] if named is None else [named])
