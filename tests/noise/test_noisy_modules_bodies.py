"""What code in a `noisy` context may do with the model: call it in any right way, and nothing that loses the noise."""

import copy
import io
import pickle
from threading import Thread

import pytest
import torch
from on_modules import on_modules
from peft import LoraConfig, get_peft_model
from torch import nn

from aqnpipe.config.noise import ModuleNoise, NoiseSpec, RelativeGaussian
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.models.layout import decoder_layers
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

GENERATION = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


class Wrapper(nn.Module):
    """A model of one's own around another, as value heads have it."""

    def __init__(self, inner):
        super().__init__()
        self.lm_head, self.inner, self.config = inner.lm_head, inner, inner.config

    def forward(self, **inputs):
        return self.inner(**inputs)

    def generate(self, *args, **kwargs):
        return self.inner.generate(*args, **kwargs)


def adapted(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)).eval()


@pytest.mark.parametrize("wrapped", [lambda model: model, adapted, Wrapper], ids=["model", "peft", "wrapper"])
def test_every_step_of_a_generation_is_a_pass_with_noise_of_its_own(model, ids, wrapped):
    outer = wrapped(model)
    linear = decoder_layers(model)[0].self_attn.v_proj
    noise = []

    def note(module, args, output):
        exact = torch._C._nn.linear(args[0], module.weight, module.bias)
        noise.append((output / exact - 1)[0, -1].clone())

    with on_modules(outer, scale=0.3, seed=0) as receipt, torch.no_grad():
        handle = linear.register_forward_hook(note)
        outer(input_ids=ids)
        outer.generate(input_ids=ids, **GENERATION)
        handle.remove()
    assert receipt.check().content.phases[0].forwards == len(noise) == 5
    assert not any(torch.allclose(one, other) for i, one in enumerate(noise) for other in noise[:i])


def test_a_generation_behind_adapters_alone_is_a_right_run(model, ids):
    outer = adapted(model)
    with on_modules(outer, scale=0.05) as receipt, torch.no_grad():
        outer.generate(input_ids=ids, **GENERATION)
    assert receipt.check().content.phases[0].forwards == 4


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda model, ids: model.forward(input_ids=ids), "layer 0"),
        (lambda model, ids: model.model(input_ids=ids), "layer 0"),
        (lambda model, ids: model.lm_head(torch.ones(1, 2, model.config.hidden_size)), "the output projection"),
    ],
    ids=["forward", "backbone", "head"],
)
@pytest.mark.parametrize("first", [True, False])
def test_layers_outside_a_call_of_the_model_are_refused(model, ids, call, what, first):
    with on_modules(model, scale=0.05) as receipt, torch.no_grad():
        if not first:
            model(input_ids=ids)
        call(model, ids)
        model(input_ids=ids)
    with pytest.raises(ReceiptError, match=f"evaluation: {what} ran outside a call of Qwen2ForCausalLM, with noise"):
        receipt.check()


def test_a_head_without_noise_may_be_called_alone(model, ids):
    with on_modules(model, scale=0.05, include_lm_head=False) as receipt, torch.no_grad():
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
        assert torch.isfinite(model.lm_head(hidden[1])).all()
    receipt.check()


def test_a_module_with_noise_outside_a_call_of_the_model_is_refused(model, ids):
    spec = NoiseSpec(module_noise=ModuleNoise(modules=("model.norm",), error=RelativeGaussian(scale=0.05)))

    def receipt(calls_norm):
        recorder = ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=4, num_norms=9)
        with torch.no_grad(), phase_noise(model, spec, "rollout", NoiseKey(seed=0, step=0), recorder):
            model(input_ids=ids)
            if calls_norm:
                model.model.norm(torch.ones(1, 2, model.config.hidden_size))
        return recorder.receipt()

    assert not [line for line in receipt(False).problems() if "outside" in line]
    assert any("module model.norm ran outside a call" in line for line in receipt(True).problems())


def test_a_pass_that_dies_ends_there(model, ids):
    def fail(module, args):
        handle.remove()
        raise torch.OutOfMemoryError("simulated")

    with on_modules(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
        handle = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            model(input_ids=ids)
        model.lm_head(torch.ones(1, 2, model.config.hidden_size))
    with pytest.raises(ReceiptError, match="the output projection ran outside"):
        receipt.check()


def new_layer(model):
    torch.manual_seed(0)
    return type(model.model.layers[1])(model.config, 1).eval()


REPLACEMENTS = {
    "layer": lambda model: model.model.layers.__setitem__(1, new_layer(model)),
    "list": lambda model: setattr(model.model, "layers", nn.ModuleList(new_layer(model) for _ in model.model.layers)),
    "linear": lambda model: setattr(model.model.layers[1].mlp, "up_proj", nn.Linear(32, 64, bias=False)),
    "head": lambda model: setattr(model, "lm_head", nn.Linear(32, 64, bias=False)),
    "backbone": lambda model: setattr(model, "model", type(model.model)(model.config).eval()),
    "appended": lambda model: model.model.layers.append(new_layer(model)),
}


@pytest.mark.parametrize("replaced", REPLACEMENTS)
def test_a_module_replaced_in_the_body_is_refused_by_the_next_pass(model, ids, replaced):
    with on_modules(model, scale=0.05), torch.no_grad():
        model(input_ids=ids)
        REPLACEMENTS[replaced](model)
        with pytest.raises(ModelError, match="was replaced, added or removed while noise is installed"):
            model(input_ids=ids)


def test_a_replaced_layer_is_named(model, ids):
    with on_modules(model, scale=0.05), torch.no_grad():
        REPLACEMENTS["layer"](model)
        with pytest.raises(ModelError, match=r"Qwen2ForCausalLM: model\.layers\.1 was replaced"):
            model(input_ids=ids)


def test_modules_outside_the_layers_may_change_in_the_body(model, ids):
    with on_modules(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
        model.critic = nn.Linear(32, 1)
        model(input_ids=ids)
    receipt.check()


def test_a_layer_may_be_replaced_between_contexts(model, ids):
    receipt = None
    for _ in range(2):
        with on_modules(model, scale=0.05, receipt=receipt) as receipt, torch.no_grad():
            model(input_ids=ids)
        REPLACEMENTS["layer"](model)
    receipt.check()


COPIES = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a layer": lambda model: copy.deepcopy(model.model.layers[1]),
    "deepcopy of a linear": lambda model: copy.deepcopy(model.model.layers[1].mlp.up_proj),
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("called", [True, False])
def test_copies_of_the_model_in_the_body_are_refused(model, ids, copied, called):
    with on_modules(model, scale=0.05) as receipt, torch.no_grad():
        if called:
            model(input_ids=ids)
        with pytest.raises(ModelError, match=r"is copied or pickled .* while noise is installed"):
            COPIES[copied](model)
        model(input_ids=ids)
    receipt.check()


def test_weights_and_configurations_may_be_copied_in_the_body(model, ids, tmp_path):
    with on_modules(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
        copy.deepcopy(model.state_dict()), copy.deepcopy(model.config), copy.deepcopy(model.model.embed_tokens)
        model.save_pretrained(tmp_path)
        torch.save(model.state_dict(), io.BytesIO())
    receipt.check()


def test_a_copy_after_the_context_is_clean(model, ids):
    clean = model(input_ids=ids).logits
    with on_modules(model, scale=0.05), torch.no_grad():
        model(input_ids=ids)
    assert torch.equal(copy.deepcopy(model)(input_ids=ids).logits, clean)


class Packed(Wrapper):
    """A model over packed ids [tokens], or over one dictionary."""

    def forward(self, batch):
        ids = batch["ids"] if isinstance(batch, dict) else batch
        return self.inner(input_ids=ids.reshape(-1, ids.shape[-1]))


@pytest.mark.parametrize("batch_of", [lambda ids: ids[0], lambda ids: {"ids": ids}], ids=["packed", "dictionary"])
def test_ids_may_be_packed_or_in_a_dictionary(model, ids, batch_of):
    packed = Packed(model)
    with on_modules(packed, scale=0.05) as receipt, torch.no_grad():
        packed(batch_of(ids))
    receipt.check()


def test_a_thread_may_generate_while_the_body_waits(model, ids):
    def generate():
        with torch.no_grad():
            model.generate(ids, **GENERATION)

    with on_modules(model, scale=0.05) as receipt:
        thread = Thread(target=generate)
        thread.start()
        thread.join()
    assert receipt.check().content.phases[0].forwards == 4


def test_two_threads_in_the_model_at_once_are_refused_in_one_line(model, ids):
    found = []

    def call():
        try:
            with torch.no_grad():
                model(input_ids=ids)
        except ModelError as error:
            found.append(str(error))

    def meanwhile(module, args):
        thread = Thread(target=call)
        thread.start()
        thread.join()

    with on_modules(model, scale=0.05) as receipt, torch.no_grad():
        handle = model.model.layers[1].register_forward_pre_hook(meanwhile)
        model(input_ids=ids)
        handle.remove()
        model(input_ids=ids)
    assert len(found) == 1
    assert "two threads call the model at the same time under noise" in found[0]
    # The pass of the first thread was not disturbed.
    assert receipt.check().content.phases[0].forwards == 2


def test_a_replica_of_the_model_is_refused_in_one_line(model, ids):
    with on_modules(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
        with pytest.raises(ModelError, match="a replica of it"):
            model._replicate_for_data_parallel()(input_ids=ids)
        torch.nn.DataParallel(model)(input_ids=ids)  # without a GPU it calls the model itself
    assert receipt.check().content.phases[0].forwards == 2


def test_a_forked_process_may_not_call_the_model(model, ids, monkeypatch):
    with on_modules(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
        with monkeypatch.context() as forked:
            forked.setattr("os.getpid", lambda: -1)
            with pytest.raises(ModelError, match="is called in a forked process while noise is installed"):
                model(input_ids=ids)
        model(input_ids=ids)
    assert receipt.check().content.phases[0].forwards == 2


def test_a_second_backward_pass_through_one_graph_is_refused(model, ids):
    with on_modules(model, scale=0.05, backward=True) as receipt:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        loss.backward()
    with pytest.raises(ReceiptError, match="the same noise was put on gradients twice"):
        receipt.check()


def test_a_second_backward_pass_is_refused_after_another_forward_pass_too(model, ids):
    with on_modules(model, scale=0.05, backward=True) as receipt:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        model(input_ids=ids, labels=ids)
        loss.backward()
    with pytest.raises(ReceiptError, match="the same noise was put on gradients twice"):
        receipt.check()


def test_a_backward_pass_beside_the_audited_one_is_refused(model, ids):
    with on_modules(model, scale=0.05, backward=True) as receipt:
        model(input_ids=ids, labels=ids).loss.backward()
        torch.autograd.backward(model(input_ids=ids, labels=ids).loss)
    with pytest.raises(ReceiptError, match="outside an audited backward pass"):
        receipt.check()


def test_two_passes_with_a_backward_pass_each_are_right(model, ids):
    with on_modules(model, scale=0.05, backward=True) as receipt:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        (model(input_ids=ids, labels=ids).loss + model(input_ids=ids, labels=ids).loss).backward()
    receipt.check()
