"""`aqnpipe.noisy` in code that knows nothing of it: right uses pass, and what it asks for is measured."""

import copy
import io
import pickle
import runpy
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, Qwen2Config, T5Config

import aqnpipe
from aqnpipe.config.noise import (
    AbsoluteGaussian,
    MantissaTruncation,
    NoiseSpec,
    OperatorNoise,
    RelativeGaussian,
    SystematicBias,
)
from aqnpipe.errors import ConfigError, ModelError, ReceiptError
from aqnpipe.machine.machine import Machine, NoiseKey
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
TWO_PROCESSES = Path(__file__).parents[2] / "examples" / "fully_sharded.py"
GENERATION = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def trained_step(model, ids, **arguments):
    with aqnpipe.noisy(model, scale=0.05, backward=True, **arguments) as receipt:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return receipt


def counted(receipt, what):
    return receipt.outcomes()[what]


# -- what it does ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_generation_has_noise_and_a_receipt(make_model, ids, attention):
    model = make_model()
    model.set_attn_implementation(attention)
    clean = model(input_ids=ids).logits
    with aqnpipe.noisy(model, scale=0.05, seed=0) as receipt, torch.no_grad():
        noised = model(input_ids=ids).logits
        model.generate(ids, **GENERATION)
    assert receipt.check() is receipt
    assert receipt.passes == 5
    assert receipt.recomputed_numbers > 500
    assert receipt.measured_scale == pytest.approx(0.05, rel=0.01)
    assert receipt.noised == receipt.products
    assert not torch.equal(noised, clean)
    assert torch.equal(model(input_ids=ids).logits, clean)


def test_the_noise_of_results_is_that_of_studies(model, ids):
    spec = NoiseSpec(operator_noise=OperatorNoise(error=RelativeGaussian(scale=0.05), phases=("evaluation",)))
    recorder = ReceiptRecorder(spec, expected_phases=("evaluation",), num_layers=4, num_norms=9)
    with torch.no_grad(), phase_noise(model, spec, "evaluation", NoiseKey(seed=3, step=2), recorder):
        expected = model.generate(ids, **GENERATION, output_logits=True, return_dict_in_generate=True).logits
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05, seed=3, step=2):
        found = model.generate(ids, **GENERATION, output_logits=True, return_dict_in_generate=True).logits
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_seed_and_step_determine_the_noise(model, ids):
    def noised(**key):
        with aqnpipe.noisy(model, scale=0.05, **key), torch.no_grad():
            return model(input_ids=ids).logits

    assert torch.equal(noised(seed=1), noised(seed=1))
    assert not torch.equal(noised(seed=1), noised(seed=2))
    assert not torch.equal(noised(seed=1, step=0), noised(seed=1, step=1))


def test_a_training_loop_shares_one_receipt(model, ids):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    receipt = None
    for _ in range(3):
        with aqnpipe.noisy(model, scale=0.05, seed=0, backward=True, receipt=receipt) as receipt:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    receipt.check()
    assert (receipt.passes, receipt.backward_passes, receipt.next_step) == (3, 3, 3)
    phases = set(receipt.table()["phase"])
    assert phases == {"actor_forward", "backward"}


def test_the_receipt_prints_in_a_few_lines(model, ids):
    text = str(trained_step(model, ids))
    assert text.startswith("requested  relative gaussian scale 0.05, in actor_forward and backward\nmeasured   0.05")
    assert text.endswith("accepted")
    assert len(text.splitlines()) <= 12


@pytest.mark.parametrize(
    "error",
    [AbsoluteGaussian(scale=0.1), SystematicBias(scale=0.1), MantissaTruncation(mantissa_bits=4)],
    ids=lambda error: error.kind,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_errors_are_recomputed_too(make_model, ids, error, dtype):
    model = make_model().to(dtype)
    with torch.no_grad(), aqnpipe.noisy(model, error=error) as receipt:
        model(input_ids=ids)
    assert receipt.check().recomputed_numbers > 200


def test_single_layers(model, ids):
    clean = model(input_ids=ids, output_hidden_states=True).hidden_states
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05, layers=[1], include_lm_head=False) as receipt:
        noised = model(input_ids=ids, output_hidden_states=True).hidden_states
    receipt.check()
    assert torch.equal(noised[1], clean[1])
    assert not torch.equal(noised[2], clean[2])
    assert counted(receipt, "not selected") > 0
    wrong = {cell.path for cell, seen in receipt.cells.items() if seen.recomputed} - {"model.layers.1"}
    assert not wrong


# -- right uses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_under_gradient_checkpointing_compute_again_with_their_noise(model, ids, reentrant):
    def gradients():
        model.zero_grad()
        trained_step(model, ids).check()
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    model.train()
    stored = gradients()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    again = gradients()
    assert len(stored) == len(again) > 0
    assert all(torch.equal(*pair) for pair in zip(stored, again, strict=True))


def test_a_checkpoint_of_ones_own_computes_again_with_its_noise(model, ids):
    stored = trained_step(model, ids).check()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    layer = model.model.layers[1]

    class Checkpointed(type(layer)):
        def __call__(self, *args, **kwargs):
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)

    layer.__class__ = Checkpointed
    model.zero_grad()
    again = trained_step(model, ids).check()
    assert again.noised > stored.noised
    assert all(torch.equal(one, weight.grad) for one, weight in zip(gradients, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "product",
    [
        lambda x, weight: x @ weight,
        lambda x, weight: torch.einsum("bsh,ho->bso", x, weight),
        lambda x, weight: torch.tensordot(x, weight, dims=([2], [1])),
        lambda x, weight: torch.addmm(x[0], x[0], weight, alpha=0.5, beta=2.0),
        lambda x, weight: torch.mv(weight, x[0, 0]),
        lambda x, weight: torch.ops.aten.linear(x, weight),
        lambda x, weight: torch.mm(x[0], weight, out=torch.empty(x.shape[1], 32)),
        lambda x, weight: torch.baddbmm(x, x, weight.expand(x.shape[0], -1, -1)),
        lambda x, weight: x[0].clone().addmm_(x[0], weight),
        lambda x, weight: torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, :, None], bias=weight[0], padding=1),
        lambda x, weight: torch.dot(x[0, 0], x[0, 1]),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("where", ["layer", "outside"])
def test_a_product_in_any_spelling_has_noise(make_model, ids, product, inference, where):
    model = make_model()
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) / 6
    noised = []

    def compute(module, args, output):
        noised.append(product(output, weight))

    module = model.model.layers[1].mlp if where == "layer" else model.model.norm
    module.register_forward_hook(compute)
    with torch.inference_mode(inference), torch.no_grad(), aqnpipe.noisy(model, scale=0.05) as receipt:
        model(input_ids=ids)
    assert receipt.check().noised == receipt.products
    assert receipt.measured_scale == pytest.approx(0.05, rel=0.01)


def test_products_outside_have_none_where_layers_are_named(make_model, ids):
    model = make_model()
    weight = torch.eye(32)
    model.model.norm.register_forward_hook(lambda module, args, output: output @ weight)
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05, layers=[0, 1, 2]) as receipt:
        model(input_ids=ids)
    assert counted(receipt.check(), "not selected") >= 1


def test_rotary_angles_have_no_noise(model, ids):
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05) as receipt:
        model(input_ids=ids)
    assert set(receipt.check().without_error()) <= {"outer products"}


def adapted(model, **settings):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], **settings))


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"])
def test_adapters_on_a_part_of_the_layers(model, ids, settings):
    outer = adapted(model, **settings)
    with aqnpipe.noisy(outer, scale=0.05, backward=True) as receipt:
        outer(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            outer.eval().generate(input_ids=ids, **GENERATION)
    receipt.check()
    assert receipt.passes == 5


@pytest.mark.parametrize("trained", ["layers.2.mlp.down_proj", "layers.0.mlp", "layers.1.self_attn.q_proj", "lm_head"])
def test_gradients_of_frozen_weights_are_not_expected(make_model, ids, trained):
    model = make_model(tie_word_embeddings=False)
    for name, weight in model.named_parameters():
        weight.requires_grad_(trained in name)
    assert trained_step(model, ids).check().recomputed_numbers > 0


def first_micro_batch_without_gradient(model, loss):
    with torch.no_grad():
        loss()
    for _ in range(2):
        loss().backward()


def train_called_inside(model, loss):
    model.eval()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    loss(use_cache=False).backward()


def several_backward_passes(model, loss):
    once = loss()
    once.backward(retain_graph=True)
    once.backward()
    (loss() + loss()).backward()


def several_forward_passes(model, loss, order=1):
    with torch.no_grad():
        loss()
    for one in [loss() for _ in range(2)][::order]:
        one.backward()


TRAININGS = {
    "a first micro-batch without gradient": first_micro_batch_without_gradient,
    "train called inside": train_called_inside,
    "autograd.grad": lambda model, loss: torch.autograd.grad(loss(), model.lm_head.weight),
    "several backward passes": several_backward_passes,
    "several forward passes": several_forward_passes,
    "several forward passes, backwards": lambda model, loss: several_forward_passes(model, loss, -1),
}


@pytest.mark.parametrize("training", TRAININGS)
def test_gradients_in_any_order_have_noise(model, ids, training):
    with aqnpipe.noisy(model, scale=0.05, backward=True) as receipt:
        TRAININGS[training](model, lambda **settings: model(input_ids=ids, labels=ids, **settings).loss)
    receipt.check()


def test_a_head_in_chunks_outside_the_model(model, ids):
    with aqnpipe.noisy(model, scale=0.05, backward=True) as receipt:
        hidden = model.model(input_ids=ids).last_hidden_state
        logits = torch.cat([chunk @ model.lm_head.weight.T for chunk in hidden.split(4, 1)], 1)
        logits.logsumexp(-1).sum().backward()
    assert receipt.check().noised == receipt.products
    outside = [seen.recomputed for cell, seen in receipt.cells.items() if cell.path == "no layer"]
    assert sum(outside) > 0


def test_a_layer_that_runs_twice_has_other_noise(model, ids):
    layer, seen = model.model.layers[1], []

    def run_again(module, args, kwargs):
        seen.extend(layer.mlp(torch.ones(1, 2, 32)) for _ in range(2))
        return (layer(*args, **kwargs),), kwargs

    model.model.layers[2].register_forward_pre_hook(run_again, with_kwargs=True)
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05) as receipt:
        model(input_ids=ids, use_cache=False)
    receipt.check()
    assert not torch.equal(*seen)


def new_layer(model):
    torch.manual_seed(0)
    return type(model.model.layers[1])(model.config, 1).eval()


@pytest.mark.parametrize(
    "replace",
    [
        lambda model: model.model.layers.__setitem__(1, new_layer(model)),
        lambda model: setattr(model.model.layers[1].mlp, "up_proj", nn.Linear(32, 48, bias=False)),
        lambda model: setattr(model, "lm_head", nn.Linear(32, 64, bias=False)),
    ],
    ids=["layer", "linear", "head"],
)
def test_modules_replaced_in_the_body_have_noise(model, ids, replace):
    with aqnpipe.noisy(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
        replace(model)
        for _ in range(20):
            model(input_ids=ids)
    assert receipt.check().noised == receipt.products


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_noise_in_the_body_and_none_after_it(model, ids, copied):
    clean = model(input_ids=ids).logits
    with aqnpipe.noisy(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
        other = copied(model)
        assert not torch.equal(other(input_ids=ids).logits, clean)
        torch.save(model, io.BytesIO())
    assert receipt.check().noised == receipt.products
    assert torch.equal(other(input_ids=ids).logits, clean)


def test_threads_have_noise_of_their_own(model, ids, monkeypatch):
    # torch has one flag for all threads, which is as it was only if they end in order; later tests read it.
    monkeypatch.setattr("torch.utils._python_dispatch._is_in_torch_dispatch_mode", False)
    found = []

    def generate():
        with torch.no_grad():
            found.append(model(input_ids=ids).logits)

    with aqnpipe.noisy(model, scale=0.05) as receipt:
        generate()
        threads = [Thread(target=generate) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert receipt.check().passes == 4
    assert len({logits.sum().item() for logits in found}) == 4


def test_compiled_models_and_functions_run_eagerly_in_the_body(make_model, ids):
    model = make_model()
    compiled = torch.compile(lambda x: x @ x.T, backend="aot_eager")
    x = torch.randn(8, 8)
    clean = compiled(x)
    model.compile(backend="aot_eager")
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05) as receipt:
        model(input_ids=ids)
        assert not torch.equal(compiled(x), clean)
    assert receipt.check().noised == receipt.products
    assert torch.equal(compiled(x), clean)


def test_a_classifier_and_a_model_without_layers(ids):
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    for model, inputs in (
        (AutoModelForSequenceClassification.from_config(config).eval(), {"input_ids": ids}),
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), {"input": torch.randn(3, 4)}),
        (nn.Linear(4, 2), {"input": torch.randn(3, 4)}),
    ):
        with torch.no_grad(), aqnpipe.noisy(model, scale=0.05) as receipt:
            model(**inputs)
        assert receipt.check().noised > 0


@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_operations_that_are_no_products_are_accepted(make_model, ids, precision):
    model = make_model()
    weight = nn.Parameter(torch.randn(32, 32) / 6)
    model.model.register_parameter("extra", weight)
    model.model.norm.register_forward_hook(
        lambda module, args, output: output + 0 * ((output * weight[0]).softmax(-1).cumsum(1) + weight.T.norm()).sum()
    )
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")
    with torch.no_grad(), autocast, aqnpipe.noisy(model, scale=0.05) as receipt:
        model(input_ids=ids)
    receipt.check()


def test_operations_of_other_models_are_no_products():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2),
        nn.ReflectionPad2d(1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip
    with aqnpipe.noisy(model, scale=0.05, backward=True) as receipt:
        nn.functional.smooth_l1_loss(model(torch.randn(2, 3, 8, 8)), torch.zeros(2, 2)).backward()
    assert receipt.check().noised == receipt.products


def test_the_gradient_of_a_single_row_has_noise():
    layer, x, gradient = nn.Linear(16, 16, bias=False), torch.randn(1, 16), torch.randn(1, 16)
    with aqnpipe.noisy(nn.Sequential(layer), scale=0.05, backward=True) as receipt:
        layer(x).backward(gradient)
    assert receipt.products == receipt.noised
    assert (layer.weight.grad / (gradient.T @ x) - 1).std() == pytest.approx(0.05, rel=0.3)


def test_dropout_of_attention(make_model, ids):
    model = make_model(attention_dropout=0.1).train()
    model.set_attn_implementation("sdpa")
    with aqnpipe.noisy(model, scale=0.05, backward=True) as receipt:
        model(input_ids=ids, labels=ids).loss.backward()
    receipt.check()


def test_attention_of_higher_order(make_model, ids):
    model = make_model()
    model.set_attn_implementation("flex_attention")
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05) as receipt:
        model(input_ids=ids)
    assert receipt.check().noised == receipt.products


def test_an_encoder_and_decoder_with_a_position_bias():
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model, ids = AutoModelForSeq2SeqLM.from_config(config).eval(), torch.arange(2, 12)[None]
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05) as receipt:
        model.generate(ids, max_new_tokens=3)
    receipt.check()


@pytest.mark.parametrize("example", [path for path in EXAMPLES if path != TWO_PROCESSES], ids=lambda path: path.stem)
def test_an_example_runs_as_it_stands(example, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    assert "recomputed" in capfd.readouterr().out


@pytest.mark.slow
def test_an_example_with_two_processes_runs_as_it_stands(tmp_path):
    done = subprocess.run([sys.executable, TWO_PROCESSES], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "recomputed" in done.stdout


# -- wrong uses --------------------------------------------------------------------------------------------------------


def test_gradients_without_a_backward_pass_are_refused(model, ids):
    with aqnpipe.noisy(model, scale=0.05, backward=True) as receipt:
        model(input_ids=ids, labels=ids)
    with pytest.raises(ReceiptError, match="backward: no product had the requested error"):
        receipt.check()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda model: None, "evaluation: no product had the requested error, of 0 that were seen"),
        (lambda model: model.lm_head(torch.ones(1, 2, 32)), "no product had the requested error, of 1 that were seen"),
    ],
)
def test_layers_that_never_compute_are_refused(model, body, words):
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05, layers=[0], include_lm_head=False) as receipt:
        body(model)
    with pytest.raises(ReceiptError, match=words):
        receipt.check()


SABOTAGES = {
    "a part of the products": lambda machine, source, result: source if result.numel() % 3 else None,
    "other random numbers": lambda machine, source, result: source._replace(stream=source.stream + 7),
    "the same numbers again": lambda machine, source, result: source._replace(call=1),
}


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_other_noise_than_requested_is_refused(model, ids, monkeypatch, sabotage):
    source_of = Machine._source

    def wrong(self, here):
        source = source_of(self, here)
        return SABOTAGES[sabotage](self, source, torch.empty(here.calls)) or source._replace(key=source.key ^ 1)

    monkeypatch.setattr(Machine, "_source", wrong)
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05) as receipt:
        model(input_ids=ids)
    with pytest.raises(ReceiptError, match="recomputed values are not the requested ones"):
        receipt.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("actual", [0.0, 0.06])
def test_noise_of_another_size_is_refused(make_model, ids, monkeypatch, dtype, actual):
    model = make_model().to(dtype)
    apply = aqnpipe.machine.machine.apply_error_
    monkeypatch.setattr(
        "aqnpipe.machine.machine.apply_error_",
        lambda values, error, source: apply(values, error.model_copy(update={"scale": actual}), source),
    )
    with aqnpipe.noisy(model, scale=0.05, backward=True) as receipt:
        model(input_ids=ids, labels=ids).loss.backward()
    problems = receipt.problems()
    assert any(problem.startswith("backward: mm") for problem in problems)
    assert any(problem.startswith("actor_forward: mm") for problem in problems)


def test_noise_that_stops_is_refused(model, ids, monkeypatch):
    """It is off from the second pass on: single parts of later passes are audited."""
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05) as receipt:
        model(input_ids=ids)
        monkeypatch.setattr("aqnpipe.machine.machine.apply_error_", lambda *args: None)
        for _ in range(30):
            model(input_ids=ids)
    with pytest.raises(ReceiptError, match="are not the requested ones"):
        receipt.check()


@torch.library.custom_op("aqnpipe_test::product", mutates_args=())
def product_of_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() @ x.detach().numpy().swapaxes(-1, -2))


def embedding_bag(x, weight):
    return nn.functional.embedding_bag(torch.arange(32)[None], weight, mode="sum", per_sample_weights=x[0, :1])


UNSEEN = {
    r"aqnpipe_test\.product in model\.layers\.1 had no": lambda x, weight, mlp: product_of_numpy(x),
    r"aten\.mul on a weight matrix in model\.layers\.1 had no": lambda x, weight, mlp: (
        x[..., None, :] * mlp.up_proj.weight
    ).sum(-1),
    "calls of mm multiplied integers": lambda x, weight, mlp: (x * 8).int() @ torch.ones(32, 32, dtype=torch.int32),
    "aten._embedding_bag.* had no": lambda x, weight, mlp: embedding_bag(x, weight),
    "aten._foreach_mul.* had no": lambda x, weight, mlp: sum(torch._foreach_mul(list(weight), [x[0, 0, 0]] * 32)),
    "aten._fft_r2c.* had no": lambda x, weight, mlp: torch.fft.rfft(x[0]).abs(),
}


@pytest.mark.parametrize("words", UNSEEN)
def test_products_in_operators_that_cannot_have_noise_are_refused_by_name(model, ids, words):
    weight = torch.randn(32, 32)
    model.model.layers[1].mlp.register_forward_hook(
        lambda mlp, args, output: output + 0 * UNSEEN[words](output, weight, mlp).sum()
    )
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05) as receipt:
        model(input_ids=ids)
    with pytest.raises(ReceiptError, match=words):
        receipt.check()
    assert not [problem for problem in receipt.problems() if "recomputed" in problem]


def test_a_checkpoint_that_stores_products_is_refused_before_it_runs(model, ids):
    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts})
    with pytest.raises(ModelError, match="gradient_checkpointing_kwargs has a context_fn"), aqnpipe.noisy(model, 0.05):
        pass


def test_machines_do_not_nest(model):
    with (
        aqnpipe.noisy(model, scale=0.05),
        pytest.raises(ModelError, match="machines do not nest"),
        aqnpipe.noisy(model, scale=0.05),
    ):
        pass
    with aqnpipe.noisy(model, scale=0.05):
        pass


def test_a_forked_process_may_not_call_the_model(model, ids, monkeypatch):
    with aqnpipe.noisy(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
        with monkeypatch.context() as forked:
            forked.setattr("os.getpid", lambda: -1)
            with pytest.raises(ModelError, match="is called in a forked process on a simulated machine"):
                model(input_ids=ids)
        model(input_ids=ids)
    receipt.check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected exactly one of the two"),
        ({"scale": 0.05, "error": MantissaTruncation(mantissa_bits=4)}, "expected exactly one of the two"),
        ({"scale": 0.0}, "scale is 0.0, expected a number above 0"),
        ({"scale": 1.5}, "scale is 1.5"),
    ],
)
def test_contradicting_arguments_are_refused(model, arguments, message):
    with pytest.raises(ConfigError, match=message), aqnpipe.noisy(model, **arguments):
        pass


def test_a_receipt_of_other_noise_is_refused(model, ids):
    with aqnpipe.noisy(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
    with (
        pytest.raises(ConfigError, match="of another model, noise or seed"),
        aqnpipe.noisy(model, 0.1, receipt=receipt),
    ):
        pass


def test_noise_that_cannot_be_told_from_rounding_is_refused(make_model, ids):
    model = make_model().bfloat16()
    with torch.no_grad(), aqnpipe.noisy(model, scale=1e-4) as receipt:
        model(input_ids=ids)
    with pytest.raises(ReceiptError, match=r"bfloat16\): (an error of this size cannot be told|.*times the requested)"):
        receipt.check()


def test_a_backward_pass_behind_the_context_is_refused(model, ids):
    receipt = None
    for inside in (True, False):
        with aqnpipe.noisy(model, scale=0.05, backward=True, receipt=receipt) as receipt:
            loss = model(input_ids=ids, labels=ids).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    with pytest.raises(ReceiptError, match="a context ended without a backward pass"):
        receipt.check()
