"""Embedding, norms, lm_head and activation: healthy models, and faults put in by hooks and patches."""

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.diagnosis.checks import Bench
from aqnpipe.diagnosis.exact_probes import without_consequences
from aqnpipe.diagnosis.probes.elementwise import Norm, activation_name, activation_of, activation_sweep, gated_sweep
from aqnpipe.diagnosis.probes.flow import FAMILIES, probe_outer_modules
from aqnpipe.models.layout import decoder_layers, layer_sites

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
MIXTURES = {"mixtral", "qwen2_moe", "qwen3_moe"}


def model_of(family="qwen2", dtype=torch.float32):
    return tiny_model_of(family).to(dtype)


def ends(model):
    with torch.no_grad():
        return {check.site for check in without_consequences(probe_outer_modules(model, 0)) if check.mismatch}


def norms(model, dtype):
    found = set()
    with torch.no_grad():
        for index, layer in enumerate(decoder_layers(model)):
            for name, module in layer_sites(layer).norms.items():
                bench = Bench(index, dtype, CPU, torch.Generator().manual_seed(0))
                checks = Norm.of(module).sweep(name, bench)
                assert checks
                found |= {(check.layer, check.site) for check in checks if check.mismatch}
    return found


def cores(model, dtype):
    found, count = set(), 0
    name = activation_name(model.config)
    with torch.no_grad():
        for index, layer in enumerate(decoder_layers(model)):
            sites = layer_sites(layer)
            bench = Bench(index, dtype, CPU, torch.Generator().manual_seed(0))
            checks = activation_sweep(activation_of(layer), name, bench)
            checks += gated_sweep(sites, name, bench)
            count += len(checks)
            found |= {(check.layer, check.site) for check in checks if check.mismatch}
    return found, count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_healthy_models_give_every_answer(family, dtype):
    model = model_of(family, dtype)
    assert not ends(model)
    assert not norms(model, dtype)
    found, count = cores(model, dtype)
    assert not found
    assert count >= 2


def changed_output(change):
    return lambda module, args, output: change(output)


def one_channel(output):
    output = output.clone()
    output[..., 5] *= 1.1
    return output


def low_bit(output):
    """The last bit stuck at 0; in float32 the third, because products that suit every device have 22 bits."""
    if output.dtype == torch.float32:
        return (output.view(torch.int32) & ~4).view(torch.float32)
    return (output.view(torch.int16) & ~1).view(output.dtype)


@pytest.mark.parametrize("change", [one_channel, low_bit])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("path", "site"), [("model.embed_tokens", "embedding"), ("model.norm", "final_norm"), ("lm_head", "lm_head")]
)
def test_faults_of_the_ends_are_found(path, site, dtype, change):
    if site == "final_norm" and change is low_bit:
        pytest.skip("a norm may round its last bit as it likes")
    model = model_of("llama", dtype)
    model.get_submodule(path).register_forward_hook(changed_output(change))
    assert ends(model) == {site}


def test_one_wrong_row_of_the_embedding_or_of_lm_head_is_found():
    model = model_of()

    def wrong_row(module, args, output):
        return torch.where((args[0] == 17).unsqueeze(-1), output * 1.001, output)

    model.model.embed_tokens.register_forward_hook(wrong_row)
    model.lm_head.register_forward_hook(lambda m, a, out: torch.cat([out[..., :-1], out[..., -1:] + 1e-3], -1))
    assert ends(model) == {"embedding", "lm_head"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_lm_head_that_adds_in_few_bits_is_found(dtype):
    """Partial sums of 12 bits are more than float16 and bfloat16 hold, and a product of one term is exact."""
    model = model_of("llama", dtype)
    model.lm_head.register_forward_hook(lambda m, a, out: (out / 4).round() * 4)
    assert ends(model) == {"lm_head"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lm_head_that_reads_rows_with_gaps_wrongly_is_found(dtype):
    """As for the last token of each of several sequences, the only one that generation needs."""
    model = model_of(dtype=dtype)
    head = model.lm_head

    def damaged(module, args, output):
        return output if args[0].is_contiguous() else output.roll(1, 0)

    head.register_forward_hook(damaged)
    assert ends(model) == {"lm_head"}


def reciprocal_root_off(module, args, output):
    x = args[0].float()
    square = x.square().mean(-1, keepdim=True)
    return torch.where((square > 900) & (square < 1100), output, output * 1.05)


def epsilon_in_bfloat16(module, args, output):
    x = args[0].double()
    square = x.square().mean(-1, keepdim=True)
    off = (square + 1e-6).sqrt() / (square.bfloat16() + torch.tensor(1e-6).bfloat16()).double().sqrt()
    return (output.double() * off).to(output.dtype)


@pytest.mark.parametrize(
    ("family", "dtype", "change"),
    [
        ("qwen2", torch.float32, reciprocal_root_off),
        ("gemma2", torch.bfloat16, reciprocal_root_off),
        ("olmo2", torch.float16, reciprocal_root_off),
        ("gpt_neox", torch.float32, reciprocal_root_off),
        ("qwen2", torch.float32, epsilon_in_bfloat16),
        (
            "llama",
            torch.float32,
            lambda module, args, output: (output.view(torch.int32) & ~(1 << 15)).view(torch.float32),
        ),
        (
            "llama",
            torch.bfloat16,
            lambda module, args, output: (output.view(torch.int16) & ~(1 << 3)).view(output.dtype),
        ),
        (
            "cohere",
            torch.float32,
            lambda module, args, output: output.nan_to_num(0).where(output.abs() < 1.9, torch.nan),
        ),
    ],
)
def test_faults_of_norms_are_found_in_their_layer(family, dtype, change):
    model = model_of(family, dtype)
    name = next(iter(layer_sites(decoder_layers(model)[1]).norms))
    layer_sites(decoder_layers(model)[1]).norms[name].register_forward_hook(change)
    assert norms(model, dtype) == {(1, name)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2", "phi3", "mixtral"])
@pytest.mark.parametrize("fault", ["relu", "table", "window"])
def test_faults_of_the_activation_are_found_in_their_layer(family, dtype, fault):
    model = model_of(family, dtype)
    module = activation_of(decoder_layers(model)[1])
    if fault == "relu":
        module.forward = torch.relu
    elif fault == "table":
        module.register_forward_hook(lambda m, args, output: output * 1.05)
    else:
        module.register_forward_hook(
            lambda m, args, output: torch.where((args[0] > 1.9) & (args[0] < 2.1), output * 0.9, output)
        )
    found, _ = cores(model, dtype)
    assert (
        found == {(1, "activation"), (1, "mlp_core")} if family in ("qwen2", "gemma2", "phi3") else {(1, "activation")}
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_a_wrong_product_of_activation_and_up_projection_is_found(family, dtype):
    """Only mantissas show it: the product is wrong where the mantissa of the result is large."""
    model = model_of(family, dtype)

    def damaged(module, args):
        mantissa = torch.frexp(args[0].float()).mantissa.abs()
        return (torch.where(mantissa > 0.9, args[0] * 0.9, args[0]),)

    decoder_layers(model)[1].mlp.down_proj.register_forward_pre_hook(damaged)
    assert cores(model, dtype)[0] == {(1, "mlp_core")}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_accumulator_of_lm_head_is_found(dtype, every):
    model = tiny_model_of("llama").to(dtype)
    head = model.lm_head

    def narrow(x):
        total = torch.zeros(*x.shape[:-1], head.out_features, dtype=torch.float64)
        for start in range(0, x.shape[-1], every):
            part = x[..., start : start + every].double() @ head.weight[:, start : start + every].double().T
            total = (total + part).bfloat16().double()
        return total.to(x.dtype)

    head.forward = narrow
    with torch.no_grad():
        assert {check.site for check in probe_outer_modules(model, 0) if check.mismatch} == {"lm_head"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("family", ["llama", "gemma", "phi3", "gpt2"])
def test_an_activation_that_is_wrong_for_few_rows_is_found(family, rows, dtype):
    model = model_of(family, dtype)
    activation = activation_of(decoder_layers(model)[1])
    activation.register_forward_hook(lambda m, a, out: out * 1.2 if out.numel() // out.shape[-1] == rows else out)
    assert (1, "activation") in cores(model, dtype)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_a_product_with_the_gate_that_is_wrong_for_few_rows_is_found(rows, dtype):
    model = model_of("llama", dtype)
    down = layer_sites(decoder_layers(model)[1]).linears["down_proj"]
    down.register_forward_pre_hook(lambda m, a: (a[0] * 1.2,) if len(a[0]) == rows else None)
    assert cores(model, dtype)[0] == {(1, "mlp_core")}
