"""What code in a `noisy` context may do with the model: call it in any right way, and nothing that loses the noise."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import aqnpipe
from aqnpipe.config.noise import ModuleNoise, NoiseSpec, RelativeGaussian
from aqnpipe.errors import ReceiptError
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

    with aqnpipe.noisy(outer, scale=0.3, seed=0) as receipt, torch.no_grad():
        handle = linear.register_forward_hook(note)
        outer(input_ids=ids)
        outer.generate(input_ids=ids, **GENERATION)
        handle.remove()
    assert receipt.check().content.phases[0].forwards == len(noise) == 5
    assert not any(torch.allclose(one, other) for i, one in enumerate(noise) for other in noise[:i])


def test_a_generation_behind_adapters_alone_is_a_right_run(model, ids):
    outer = adapted(model)
    with aqnpipe.noisy(outer, scale=0.05) as receipt, torch.no_grad():
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
    with aqnpipe.noisy(model, scale=0.05) as receipt, torch.no_grad():
        if not first:
            model(input_ids=ids)
        call(model, ids)
        model(input_ids=ids)
    with pytest.raises(ReceiptError, match=f"evaluation: {what} ran outside a call of Qwen2ForCausalLM, with noise"):
        receipt.check()


def test_a_head_without_noise_may_be_called_alone(model, ids):
    with aqnpipe.noisy(model, scale=0.05, include_lm_head=False) as receipt, torch.no_grad():
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

    with aqnpipe.noisy(model, scale=0.05) as receipt, torch.no_grad():
        model(input_ids=ids)
        handle = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            model(input_ids=ids)
        model.lm_head(torch.ones(1, 2, model.config.hidden_size))
    with pytest.raises(ReceiptError, match="the output projection ran outside"):
        receipt.check()
