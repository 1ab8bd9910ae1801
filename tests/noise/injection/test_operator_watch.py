"""Forward passes without gradients use the mode in parts of a layer only; that must change nothing but the time."""

import sys
import threading
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from aqnpipe.config.noise import FakeQuantization, NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.errors import ReceiptError
from aqnpipe.noise.injection import operator_watch
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

NUM_FORWARDS = 12
KEY = NoiseKey(seed=0, step=0)
RELATIVE = RelativeGaussian(scale=0.05)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attn_implementation": "eager",
}


def recorder_for(noise):
    spec = NoiseSpec(operator_noise=noise)
    return ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=2, num_norms=5)


def noised_rollout_phase(model, noise):
    return phase_noise(model, NoiseSpec(operator_noise=noise), "rollout", KEY, recorder_for(noise))


def generation(model, noise, num_forwards=NUM_FORWARDS, inside=lambda: None, key=KEY):
    """Return all logits of a prompt and the tokens after it, and the receipt."""
    recorder = recorder_for(noise)
    ids = torch.randint(2, 64, (4, 8 + num_forwards), generator=torch.Generator().manual_seed(1))
    cache, outputs = None, []
    with torch.no_grad(), phase_noise(model, NoiseSpec(operator_noise=noise), "rollout", key, recorder):
        for step in range(num_forwards):
            tokens = ids[:, :8] if step == 0 else ids[:, 7 + step : 8 + step]
            output = model(tokens, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            outputs.append(output.logits)
            inside()
    return torch.cat(outputs, 1), recorder.receipt()


def mode_throughout(monkeypatch):
    monkeypatch.setattr(operator_watch._Survey, "is_reliable", False)


def count_mode_calls(monkeypatch):
    """Return a list that gets an entry for each torch function that the mode is requested about."""
    calls, original = [], operator_watch._OperatorMode.__torch_function__

    def counted(self, func, types, args=(), kwargs=None):
        calls.append(func)
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(operator_watch._OperatorMode, "__torch_function__", counted)
    return calls


def noise_on(operators="matmul", error=RELATIVE, **settings):
    return OperatorNoise(operators=operators, error=error, phases=("rollout",), **settings)


@pytest.fixture
def qwen2(make_model):
    return make_model(num_layers=2, intermediate_size=64)


def calls_of(receipt):
    return [(cell.where, cell.calls, cell.elements) for cell in receipt.cells]


class MatmulInMlp(nn.Module):
    """An MLP that multiplies without linear modules, by a function that may change from call to call."""

    def __init__(self, product):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 32**0.5)
        self.product, self.calls = product, 0

    def forward(self, hidden):
        self.calls += 1
        return self.product(hidden, self.weight, self.calls - 1)


@pytest.mark.parametrize(
    ("operators", "error", "largest_share"),
    [("matmul", RELATIVE, 0.26), ("all", RELATIVE, 0.75), ("matmul", FakeQuantization(format="mxfp4"), 0.26)],
)
def test_noise_and_receipt_are_those_of_the_mode_throughout(qwen2, monkeypatch, operators, error, largest_share):
    calls = count_mode_calls(monkeypatch)
    noised, receipt = generation(qwen2, noise_on(operators, error))
    calls_in_parts, calls[:] = len(calls), []
    mode_throughout(monkeypatch)
    expected, expected_receipt = generation(qwen2, noise_on(operators, error))
    assert torch.equal(noised, expected)
    assert calls_of(receipt.check()) == calls_of(expected_receipt.check())
    # 9 of 12 forwards are not measured. Of their layers nothing is left where attention runs as a copy, else what is
    # between v_proj and o_proj.
    assert calls_in_parts < largest_share * len(calls)


@pytest.mark.parametrize("architecture", ["gemma2", "qwen2_moe"])
def test_other_architectures_get_the_noise_of_the_mode_throughout(monkeypatch, architecture):
    """Experts are called in an order that changes from token to token."""
    torch.manual_seed(0)
    if architecture == "gemma2":
        model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=16)).eval()
    else:
        model = Qwen2MoeForCausalLM(
            Qwen2MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)
        ).eval()
    noised, receipt = generation(model, noise_on())
    mode_throughout(monkeypatch)
    expected, expected_receipt = generation(model, noise_on())
    assert torch.equal(noised, expected)
    assert calls_of(receipt.check()) == calls_of(expected_receipt.check())


def test_a_product_outside_linear_modules_is_noised_wherever_it_is(qwen2):
    qwen2.model.layers[1].mlp = MatmulInMlp(lambda hidden, weight, call: hidden @ weight)
    _, receipt = generation(qwen2, noise_on())
    calls = {(cell.operator, cell.layer): cell.calls for cell in receipt.check().cells}
    assert calls["matmul", 1] == 3 * NUM_FORWARDS
    assert calls["matmul", 0] == 2 * NUM_FORWARDS
    assert calls["linear", 1] == 4 * NUM_FORWARDS


def test_a_linear_weight_used_without_its_module_is_noised(qwen2):
    """The call is torch's linear, but it does not go through the module's patched forward."""
    layer = qwen2.model.layers[1]
    down = layer.mlp.down_proj
    layer.mlp.forward = lambda x: F.linear(layer.mlp.up_proj(x), down.weight)
    _, receipt = generation(qwen2, noise_on())
    calls = {(cell.operator, cell.layer): cell.calls for cell in receipt.check().cells}
    assert calls["linear", 1] == 6 * NUM_FORWARDS


def test_a_product_that_appears_only_later_where_the_mode_was_off_is_refused(qwen2):
    """Forwards 0 and 1 are surveyed and see no product in this MLP; an audit of a later forward does.

    Each of the 90 later forwards has a layer audited with a probability of 4/n at least: 14 are expected, 5 of them in
    this layer or the other one. The draws are fixed by the seed.
    """
    qwen2.model.layers[1].mlp = MatmulInMlp(lambda hidden, weight, call: hidden @ weight if call >= 5 else hidden)
    _, receipt = generation(qwen2, noise_on(), num_forwards=90)
    with pytest.raises(ReceiptError, match=r"rollout: \d calls of aten.mm in model.layers.1.mlp escaped the noise"):
        receipt.check()


def test_a_product_that_appears_only_later_is_found_by_the_next_survey(qwen2, monkeypatch):
    """No audit after the first forwards: every 16th pass of a layer is surveyed again."""
    monkeypatch.setattr("aqnpipe.noise.audit.phase_audit._EXPECTED_AUDITS", 0)
    monkeypatch.setattr("aqnpipe.noise.audit.phase_audit._LEAST_SHARE", 0)
    qwen2.model.layers[1].mlp = MatmulInMlp(lambda hidden, weight, call: hidden @ weight if call >= 5 else hidden)
    _, receipt = generation(qwen2, noise_on(), num_forwards=20)
    with pytest.raises(ReceiptError, match=r"rollout: 1 calls of matmul escaped the noise"):
        receipt.check()


def test_a_product_for_longer_inputs_only_is_noised_after_a_shorter_one(qwen2):
    """Passes over different numbers of tokens are surveyed separately."""

    def product(hidden, weight, call):
        return hidden @ weight if hidden.shape[1] > 4 else hidden

    qwen2.model.layers[1].mlp = MatmulInMlp(product)
    recorder, spec = recorder_for(noise_on()), NoiseSpec(operator_noise=noise_on())
    with torch.no_grad(), phase_noise(qwen2, spec, "rollout", KEY, recorder):
        for length in (3, 8, 8, 8):
            qwen2(torch.arange(2, 2 + length)[None])
    calls = {(cell.operator, cell.layer): cell.calls for cell in recorder.receipt().check().cells}
    assert calls["matmul", 1] == 4 * 2 + 3


def test_layers_without_their_adapters_are_no_escape(qwen2):
    """As under PEFT's `disable_adapter`: fewer linear modules than surveyed, the same products of attention."""

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.low, self.up = base, nn.Linear(32, 4, bias=False), nn.Linear(4, base.out_features)
            self.is_disabled = False

        def forward(self, hidden):
            return self.base(hidden) + (0 if self.is_disabled else self.up(self.low(hidden)))

    adapted = qwen2.model.layers[1].self_attn
    adapted.q_proj = Adapted(adapted.q_proj)
    recorder, spec = recorder_for(noise_on()), NoiseSpec(operator_noise=noise_on())
    with torch.no_grad(), phase_noise(qwen2, spec, "rollout", KEY, recorder):
        for disabled in (False, False, True, True, False):
            adapted.q_proj.is_disabled = disabled
            qwen2(torch.arange(2, 8)[None])
    calls = {(cell.operator, cell.layer): cell.calls for cell in recorder.receipt().check().cells}
    assert (calls["linear", 1], calls["matmul", 1]) == (5 * 7 + 3 * 2, 5 * 2)


def test_linear_modules_in_another_order_bring_the_mode_back(qwen2, monkeypatch):
    """From the first call on that is not where it was, a layer is under the mode again: nothing escapes."""
    gate = nn.Linear(32, 32, bias=False)

    def product(hidden, weight, call):
        return gate(hidden) @ weight if call >= 3 else hidden

    qwen2.model.layers[1].mlp = MatmulInMlp(product)
    qwen2.model.layers[1].mlp.gate = gate
    noised, receipt = generation(qwen2, noise_on())
    calls = {(cell.operator, cell.layer): cell.calls for cell in receipt.check().cells}
    assert calls["linear", 1] == 4 * NUM_FORWARDS + NUM_FORWARDS - 3
    assert calls["matmul", 1] == 2 * NUM_FORWARDS + NUM_FORWARDS - 3
    mode_throughout(monkeypatch)
    qwen2.model.layers[1].mlp.calls = 0
    assert torch.equal(noised, generation(qwen2, noise_on())[0])


def test_another_number_of_operators_brings_the_mode_back(qwen2, monkeypatch):
    """Linear modules as surveyed, but in forward 3 one product more beside those of attention."""
    calls = []

    def multiply(module, args, output):
        calls.append(1)
        return output @ torch.eye(16) if len(calls) == 4 else output

    qwen2.model.layers[1].self_attn.v_proj.register_forward_hook(multiply)
    requested, until = count_mode_calls(monkeypatch), [0]
    _, receipt = generation(qwen2, noise_on("all"), num_forwards=8, inside=lambda: until.append(len(requested)))
    assert {cell.calls for cell in receipt.check().cells if cell.operator == "matmul"} == {16, 17}
    per_forward = [after - before for before, after in pairwise(until)]
    assert per_forward[2] < per_forward[4] == per_forward[7] < per_forward[1]


def eager_with(monkeypatch, product):
    """Let transformers' eager attention multiply by `product(a, b, call)`; both are torch.matmul before call 8."""
    module, calls = sys.modules[Qwen2ForCausalLM.__module__], [0]

    def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        key, value = (states.repeat_interleave(module.num_key_value_groups, 1) for states in (key, value))
        weights = torch.matmul(query, key.transpose(2, 3)) * scaling
        weights = torch.softmax(weights if attention_mask is None else weights + attention_mask, -1)
        calls[0] += 1
        output = torch.matmul(weights, value) if calls[0] <= 8 else product(weights, value)
        return output.transpose(1, 2).contiguous(), weights

    monkeypatch.setattr(module, "eager_attention_forward", eager_attention_forward)


def test_a_product_that_a_copy_of_attention_leaves_out_is_refused(qwen2, monkeypatch):
    """Forwards 0 and 1 multiply by torch.matmul, forward 4 and all later ones by another spelling."""
    eager_with(monkeypatch, lambda weights, value: weights @ value)
    _, receipt = generation(qwen2, noise_on())
    with pytest.raises(ReceiptError, match=r"rollout: \d calls of matmul escaped the noise"):
        receipt.check()


def test_attention_that_multiplies_otherwise_from_the_start_is_under_the_mode(qwen2, monkeypatch):
    eager_with(monkeypatch, lambda weights, value: weights @ value)
    generation(qwen2, None, num_forwards=4)
    noised, receipt = generation(qwen2, noise_on())
    assert {cell.calls for cell in receipt.check().cells if cell.operator == "matmul"} == {2 * NUM_FORWARDS}
    mode_throughout(monkeypatch)
    assert torch.equal(noised, generation(qwen2, noise_on())[0])


def test_a_product_in_a_hook_within_a_copy_of_attention_is_refused_by_an_audit(qwen2):
    calls = []

    def multiply(module, args, output):
        calls.append(1)
        return output @ torch.eye(16) if len(calls) > 5 else output

    qwen2.model.layers[1].self_attn.v_proj.register_forward_hook(multiply)
    _, receipt = generation(qwen2, noise_on(), num_forwards=90)
    with pytest.raises(ReceiptError, match=r"rollout: \d calls of aten.mm in model.layers.1.self_attn.v_proj escaped"):
        receipt.check()


def test_nothing_is_left_of_a_copy_of_attention(qwen2):
    attention = qwen2.model.layers[0].self_attn
    with noised_rollout_phase(qwen2, noise_on()):
        assert "forward" in vars(attention)
    assert "forward" not in vars(attention)


def test_linear_modules_get_their_own_forward_back(qwen2):
    qwen2.model.layers[0].mlp.up_proj.forward = patched = qwen2.model.layers[0].mlp.up_proj.forward
    with pytest.raises(RuntimeError, match="boom"), noised_rollout_phase(qwen2, noise_on()):
        assert "forward" in vars(qwen2.lm_head)
        assert qwen2.model.layers[0].mlp.up_proj.forward is patched
        raise RuntimeError("boom")
    assert [name for name, module in qwen2.named_modules() if "forward" in vars(module)] == [
        "model.layers.0.mlp.up_proj"
    ]


def test_an_exception_in_a_layer_leaves_no_mode_behind(qwen2):
    """In an unmeasured forward, with the mode on since v_proj."""
    attention, seen = qwen2.model.layers[1].self_attn, []
    a = torch.randn(8, 8)

    def fail(module, args):
        seen.append(1)
        if len(seen) == 4:
            raise ZeroDivisionError

    handle = attention.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        generation(qwen2, noise_on())
    handle.remove()
    assert torch.equal(a @ a, torch.matmul(a, a))
    _, receipt = generation(qwen2, None)
    receipt.check()


def test_a_linear_module_called_by_another_thread_has_no_noise(qwen2):
    projection, inputs, results = qwen2.model.layers[0].mlp.up_proj, torch.randn(2, 32), []
    bare = F.linear(inputs, projection.weight)

    def project_in_a_thread(module, args):
        thread = threading.Thread(target=lambda: results.append(projection(inputs)))
        thread.start()
        thread.join()

    handle = qwen2.model.layers[0].self_attn.register_forward_pre_hook(project_in_a_thread)
    noised, _ = generation(qwen2, noise_on(), num_forwards=4)
    handle.remove()
    assert len(results) == 4
    assert all(torch.equal(result, bare) for result in results)
    assert torch.equal(noised, generation(qwen2, noise_on(), num_forwards=4)[0])
