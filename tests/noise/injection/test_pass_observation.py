"""What is seen of a pass: its sequences, its number formats and dropout."""

import pytest
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.noise import NoiseSpec, OperatorNoise
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.injection.pass_observation import PassObservation
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import Row


class Pass:
    """A pass of three sequences of four tokens, seen from outside."""

    def __init__(self, model, phase="rollout", **settings):
        self.observation = PassObservation(model, phase, **({"rounds": False} | settings))
        self.cache = DynamicCache(config=model.config)
        self.logits = torch.randn(3, 4, 7)
        self.dtype = torch.float32

    def row(self, cached=None):
        ids = torch.zeros(3, 4, dtype=torch.long)
        self.observation.begin((), {"input_ids": ids, "past_key_values": self.cache})
        if cached is not None:
            self.cache.update(cached, cached, 0)
        self.observation.leave_part(torch.zeros(3, 4, 8, dtype=self.dtype), is_noised=True)
        self.observation.leave_part(torch.zeros(3, 4, 8, dtype=self.dtype), is_noised=False)
        self.observation.end(CausalLMOutputWithPast(logits=self.logits))
        return Row("rollout", **self.observation.columns)


@pytest.fixture
def one_pass(make_model):
    return Pass(make_model().eval())


def test_a_pass_that_begins_its_sequences(one_pass):
    with torch.no_grad():
        row = one_pass.row(torch.randn(3, 1, 4, 2))
    assert row.gradient_passes == 0
    assert (row.sequences, row.trained_sequences, row.noised_parts) == (3, 0, 1)
    assert row.formats == {"float32"}


def test_a_pass_behind_a_cache_begins_none(one_pass):
    with torch.no_grad():
        one_pass.row(torch.randn(3, 1, 4, 2))
        assert one_pass.row().sequences == 0


def test_the_first_pass_of_a_phase_says_where_it_begins(one_pass):
    with torch.no_grad():
        assert one_pass.row(torch.randn(3, 1, 4, 2)).largest_first_position == 0
        assert one_pass.row().largest_first_position == 0
        late = Pass(one_pass.observation._model)
        late.cache = one_pass.cache
        assert late.row().largest_first_position == 4


def test_mode_and_kernel_are_those_of_the_moment(make_model):
    model = make_model().eval()
    assert (Pass(model).row().modes, Pass(model).row().attention) == ({"evaluation"}, {"eager"})
    model.train().config._attn_implementation = "sdpa"
    assert (Pass(model).row().modes, Pass(model).row().attention) == ({"training"}, {"sdpa"})


def test_deterministic_algorithms_are_those_that_torch_is_told_to_use(make_model):
    one_pass = Pass(make_model())
    assert one_pass.row().algorithms == {"default"}
    torch.use_deterministic_algorithms(True)
    try:
        assert one_pass.row().algorithms == {"deterministic"}
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_cache_of_linear_attention_begins_once(one_pass):
    """Its layers do not count tokens."""
    one_pass.cache = Cache(layers=[LinearAttentionLayer()])
    with torch.no_grad():
        assert [one_pass.row().sequences for _ in range(3)] == [3, 0, 0]
        one_pass.cache = Cache(layers=[LinearAttentionLayer()])
        assert one_pass.row().sequences == 3


def test_a_pass_with_gradients_is_trained_on(one_pass):
    row = one_pass.row()
    assert (row.gradient_passes, row.sequences, row.trained_sequences) == (1, 0, 3)


def rounded(tensor):
    return tensor.bfloat16().float()


@pytest.mark.parametrize(
    ("changes", "cached", "found"),
    [
        ({"dtype": torch.bfloat16}, torch.randn(3, 1, 4, 2).bfloat16(), "bfloat16"),
        ({"dtype": torch.bfloat16}, torch.randn(3, 1, 4, 2), "bfloat16"),
        ({}, torch.randn(3, 1, 4, 2).bfloat16(), "float32 with a cache of bfloat16"),
        ({}, rounded(torch.randn(3, 1, 4, 2)), "float32 with a cache of bfloat16"),
        ({"logits": rounded(torch.randn(3, 4, 7))}, None, "float32 with logits of bfloat16"),
        ({}, torch.randn(3, 1, 4, 2).half().float(), "float32 with a cache of float16"),
        ({"dtype": torch.float16}, torch.randn(3, 1, 4, 2).half(), "float16"),
        ({"dtype": torch.float16, "logits": torch.randn(3, 4, 7).half().float()}, None, "float16"),
        ({"dtype": torch.float16, "logits": rounded(torch.randn(3, 4, 7))}, None, "float16 with logits of bfloat16"),
        ({"logits": torch.zeros(3, 4, 7)}, None, "float32"),
        ({"logits": torch.randn(3, 4, 7).half().float()}, None, "float32 with logits of float16"),
        ({"logits": torch.randn(3, 4, 7).half()}, None, "float32 with logits of float16"),
    ],
)
def test_the_number_format_is_that_of_the_values(one_pass, changes, cached, found):
    for name, value in changes.items():
        setattr(one_pass, name, value)
    assert one_pass.row(cached).formats == {found}


def test_autocast_is_the_format_that_is_computed_in(one_pass):
    with torch.autocast("cpu", torch.bfloat16):
        assert one_pass.row().formats == {"bfloat16"}


def test_noise_that_rounds_says_nothing_about_the_format(make_model):
    one_pass = Pass(make_model().eval(), rounds=True)
    one_pass.logits = rounded(one_pass.logits)
    assert one_pass.row().formats == {"float32"}


def test_dropout_counts_where_a_module_with_a_rate_trains(make_model):
    model = make_model()
    model.model.layers[1].self_attn.attention_dropout = 0.1
    assert Pass(model.eval()).row().formats == {"float32"}
    assert Pass(model.train()).row().formats == {"float32 with dropout"}


def test_rates_that_are_plain_attributes_count_too(make_model):
    """As of OPT, whose layers call the function."""
    model = make_model().train()
    model.model.layers[1].mlp.hidden_dropout = 0.1
    assert Pass(model).row().formats == {"float32 with dropout"}
    assert Pass(model.eval()).row().formats == {"float32"}


def test_an_error_of_a_user_s_own_may_round_to_another_format(make_model, own_module):
    """All keys and logits are numbers of bfloat16 then, as was asked for."""
    module = own_module("def rounded(values, normals):\n    return values.bfloat16().float()\n")
    error = CustomError(function=f"{module}:rounded", size=(0.0, 0.01), draws=0).planned()
    spec = NoiseSpec(operator_noise=OperatorNoise(error=error, phases=("rollout",)))
    recorder = ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=3, num_norms=7)
    model = make_model().eval()
    with torch.no_grad(), phase_noise(model, spec, "rollout", NoiseKey(seed=0, step=0), recorder):
        logits = model(input_ids=torch.arange(8)[None], past_key_values=DynamicCache(config=model.config)).logits
    assert torch.equal(logits, logits.bfloat16().float())
    (row,) = [row for row in recorder.state().rows if row.step is not None]
    assert (row.phase, row.step, row.passes, row.gradient_passes) == ("rollout", 0, 1, 0)
    assert row.formats == {"float32"}


def test_dropout_of_adapters_is_none_of_the_reference(make_model):
    model = make_model().train()
    model.model.layers[0].add_module("lora_dropout", torch.nn.Dropout(0.1))
    assert Pass(model, "reference").row().formats == {"float32"}
    assert Pass(model, "actor_forward").row().formats == {"float32 with dropout"}
