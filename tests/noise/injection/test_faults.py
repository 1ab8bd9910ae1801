import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from aqnpipe.config.noise import Fault
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import site_module
from aqnpipe.noise.injection import faults
from aqnpipe.seeding import keyed_generator

HIDDEN = torch.tensor([[[0.5, -2.0, 10.0], [-0.9, 1.0, -9.5]]])
FAULT_TYPES = ["dead_zone", "saturation", "noise", "bias", "spike"]


class Doubling(nn.Module):
    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, hidden):
        output = hidden * self.weight
        return (output, "attention") if self.as_tuple else output


class Stack(nn.Module):
    def __init__(self, num_layers: int = 3, as_tuple: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Doubling(as_tuple) for _ in range(num_layers)])

    def forward(self, hidden):
        for layer in self.layers:
            output = layer(hidden)
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden


def generator(call=0):
    return keyed_generator("cpu", 0, "test", call)


def values(kind, hidden, magnitude, reference):
    fault = Fault(type=kind, layer=0, magnitude=magnitude)
    return faults.faulty_values(hidden, fault, torch.tensor(reference), generator())


@pytest.mark.parametrize(
    ("kind", "magnitude", "reference", "hidden", "expected"),
    [
        # max|h| = 10, m = 0.1: threshold 1, and 1.0 itself is not below it
        ("dead_zone", 0.1, 10.0, HIDDEN.tolist(), [[[0.0, -2.0, 10.0], [0.0, 1.0, -9.5]]]),
        # m = 0.25: limit 7.5; the same function on a tensor with maximum 2 clamps at 1.5
        ("saturation", 0.25, 10.0, HIDDEN.tolist(), [[[0.5, -2.0, 7.5], [-0.9, 1.0, -7.5]]]),
        ("saturation", 0.25, 2.0, [2.0, -1.0], [1.5, -1.0]),
        # mean 2, deviations -1, 1, -1, 1: std 1
        ("bias", 0.5, 1.0, [1.0, 3.0, 1.0, 3.0], [1.5, 3.5, 1.5, 3.5]),
    ],
)
def test_values_with_a_fault_are_those_of_its_formula(kind, magnitude, reference, hidden, expected):
    assert torch.equal(values(kind, torch.tensor(hidden), magnitude, reference), torch.tensor(expected))


@pytest.mark.parametrize(
    ("kind", "magnitude", "expected"),
    [
        ("dead_zone", 0.1, [[[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]]),
        ("saturation", 0.25, [[[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]]),
        ("noise", 0.5, torch.ones_like(HIDDEN).tolist()),
        ("bias", 0.5, torch.ones_like(HIDDEN).tolist()),
    ],
)
def test_what_a_fault_replaces_has_no_gradient_and_the_rest_passes(kind, magnitude, expected):
    hidden = HIDDEN.clone().requires_grad_()
    values(kind, hidden, magnitude, 10.0).sum().backward()
    assert torch.equal(hidden.grad, torch.tensor(expected))


def test_noise_is_gaussian_with_m_times_the_mean_magnitude():
    hidden = torch.full((1, 100, 100), 4.0)
    error = values("noise", hidden, 0.1, 4.0) - hidden
    num_elements = hidden.numel()
    # sigma = 0.1 * 4; five standard errors of a standard deviation and of a mean
    assert math.isclose(error.std().item(), 0.4, rel_tol=5 / math.sqrt(2 * num_elements))
    assert abs(error.mean().item()) < 5 * 0.4 / math.sqrt(num_elements)


def test_spikes_have_the_published_rate_and_size():
    hidden = torch.full((1, 400, 1000), 3.0)
    faulted = values("spike", hidden, 0.5, 3.0)
    changed = faulted[faulted != hidden]
    rate, num_elements = 0.01 * 0.5, hidden.numel()
    assert abs(len(changed) - rate * num_elements) < 5 * math.sqrt(rate * num_elements)
    assert math.isclose(changed.std().item(), 30.0, rel_tol=5 / math.sqrt(2 * len(changed)))


def test_spikes_have_no_gradient_and_the_rest_pass():
    hidden = torch.ones(1, 100, 100, requires_grad=True)
    faulted = values("spike", hidden, 1.0, 1.0)
    faulted.sum().backward()
    assert torch.equal(hidden.grad == 0, faulted.detach() != 1)
    assert (hidden.grad == 0).any()


@given(st.integers(1, 300), st.floats(1e-6, 1), st.integers(0, 2**40))
def test_channels_are_reproducible_and_never_none(hidden_size, sparsity, seed):
    mask = faults.faulty_channels(hidden_size, sparsity, seed)
    assert mask.any()
    assert torch.equal(mask, faults.faulty_channels(hidden_size, sparsity, seed))


def test_channels_have_the_requested_share_and_depend_on_the_seed():
    mask = faults.faulty_channels(10_000, 0.1, 0)
    assert abs(mask.sum().item() - 1000) < 5 * math.sqrt(900)
    assert not torch.equal(mask, faults.faulty_channels(10_000, 0.1, 1))
    assert faults.faulty_channels(500, 1.0, 3).all()


@pytest.mark.parametrize("fault_type", FAULT_TYPES)
def test_healthy_channels_stay_bit_identical(fault_type):
    hidden = torch.randn(2, 50, 64, generator=generator())
    fault = Fault(type=fault_type, layer=0, magnitude=1.0, sparsity=0.25)
    mask = faults.faulty_channels(64, 0.25, fault.seed)
    faulted = faults.ActiveFault(fault).apply(hidden, 0)
    assert torch.equal(faulted[..., ~mask], hidden[..., ~mask])
    assert not torch.equal(faulted[..., mask], hidden[..., mask])


@pytest.mark.parametrize("fault_type", FAULT_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_shape_and_repeatability_per_call(fault_type, dtype):
    hidden = torch.randn(1, 40, 64, generator=generator()).to(dtype)
    fault = Fault(type=fault_type, layer=0, magnitude=0.5)
    first, again, later = (faults.ActiveFault(fault).apply(hidden, call) for call in (0, 0, 1))
    assert first.dtype == dtype
    assert first.shape == hidden.shape
    assert torch.equal(first, again)
    assert torch.equal(first, later) == (fault_type in {"dead_zone", "saturation", "bias"})


@pytest.mark.parametrize("as_tuple", [False, True])
def test_context_changes_only_its_layer_and_counts(as_tuple):
    model = Stack(as_tuple=as_tuple)
    clean = model(HIDDEN)
    with faults.simulated_faults(model, [Fault(type="dead_zone", layer=1, magnitude=0.1)]) as (record,):
        # the zeroed values are doubled as zeros by layer 2, all others are 8 * h as before
        expected = torch.where(HIDDEN.abs() < 1, torch.zeros(()), clean)
        assert torch.equal(model(HIDDEN), expected)
        assert (record.calls, record.elements, record.changed) == (1, 6, 2)
        assert record.survival_rate == pytest.approx(4 / 6)
        assert (record.num_faulty_channels, record.num_channels) == (3, 3)
        model(HIDDEN)
        assert (record.calls, record.elements, record.changed) == (2, 12, 4)
    assert torch.equal(model(HIDDEN), clean)
    assert record.calls == 2


def test_hook_is_removed_after_an_exception_and_weights_are_untouched():
    model = Stack()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        pytest.raises(TypeError),
        faults.simulated_faults(model, [Fault(type="noise", layer=0, magnitude=0.5)]),
    ):
        model("not a tensor")
    assert not any(layer._forward_hooks for layer in model.layers)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_noise_differs_from_call_to_call_and_replays_in_a_new_context():
    model, fault = Stack(), Fault(type="noise", layer=0, magnitude=0.5)
    with faults.simulated_faults(model, [fault]):
        first, second = model(HIDDEN), model(HIDDEN)
    with faults.simulated_faults(model, [fault]):
        replayed = model(HIDDEN)
    assert not torch.equal(first, second)
    assert torch.equal(first, replayed)


def test_layer_out_of_range_is_refused():
    with (
        pytest.raises(ModelError, match=r"fault.layer is 3, expected 0 to 2"),
        faults.simulated_faults(Stack(), [Fault(type="bias", layer=3, magnitude=0.5)]),
    ):
        pass


def test_second_fault_is_refused_and_the_first_stays():
    model = Stack()
    with faults.simulated_faults(model, [Fault(type="bias", layer=0, magnitude=0.5)]) as (record,):
        with (
            pytest.raises(ModelError, match=r"layers.0 .* has a simulated fault already"),
            faults.simulated_faults(model, [Fault(type="bias", layer=1, magnitude=0.5)]),
        ):
            pass
        model(HIDDEN)
    assert record.calls == 1


@pytest.mark.parametrize(
    ("fault_type", "reference"),
    [("dead_zone", 10), ("saturation", 10), ("spike", 10), ("noise", 23.9 / 6), ("bias", None)],
)
def test_reference_is_the_maximum_mean_or_deviation(fault_type, reference):
    # |h| sums to 23.9 over 6 values; its largest is 10
    expected = reference if reference is not None else HIDDEN.double().std(correction=0).item()
    found = faults.fault_reference(HIDDEN.clone().requires_grad_(), Fault(type=fault_type, layer=0, magnitude=0.5))
    assert found.item() == pytest.approx(expected)
    assert not found.requires_grad


def test_cached_threshold_is_that_of_the_first_call():
    model, fault = Stack(1), Fault(type="saturation", layer=0, magnitude=0.5, threshold="cached")
    with faults.simulated_faults(model, [fault]):
        # doubled to 8: limit 4, kept although the second call reaches 16
        assert torch.equal(model(torch.tensor([[4.0, 1.0]])), torch.tensor([[4.0, 2.0]]))
        assert torch.equal(model(torch.tensor([[8.0, 1.0]])), torch.tensor([[4.0, 2.0]]))
    with faults.simulated_faults(model, [fault.model_copy(update={"threshold": "dynamic"})]):
        model(torch.tensor([[4.0, 1.0]]))
        assert torch.equal(model(torch.tensor([[8.0, 1.0]])), torch.tensor([[8.0, 2.0]]))


def test_several_faults_at_once_are_counted_apart():
    model = Stack()
    requested = [Fault(type="dead_zone", layer=0, magnitude=0.1), Fault(type="saturation", layer=2, magnitude=0.25)]
    with faults.simulated_faults(model, requested) as records:
        output = model(HIDDEN.detach())
    # layer 0 zeroes |h| < 1 (two values); layer 2 clamps to 0.75 * 80 = 60 (80 and -76)
    assert [record.changed for record in records] == [2, 2]
    assert output.tolist() == [[[0.0, -16.0, 60.0], [0.0, 8.0, -60.0]]]


@pytest.mark.parametrize("site", ["attention_output", "mlp_output", "q_proj", "down_proj", "post_attention_layernorm"])
def test_the_fault_is_applied_to_the_output_of_its_site(make_model, site):
    model, fault = make_model(), Fault(type="bias", layer=1, magnitude=0.5, site=site)
    outputs = {}
    for name in ("clean", "faulty"):
        with faults.simulated_faults(model, [fault] if name == "faulty" else []), torch.no_grad():
            module = site_module(model, 1, site)
            handle = module.register_forward_hook(
                lambda module, args, output, name=name: outputs.__setitem__(
                    name, output[0] if isinstance(output, tuple) else output
                )
            )
            model(torch.tensor([[3, 4, 5]]))
            handle.remove()
    clean = outputs["clean"]
    assert torch.allclose(outputs["faulty"], clean + 0.5 * clean.std(correction=0))


def test_unknown_site_is_refused_with_those_that_exist(make_model):
    with (
        pytest.raises(ModelError, match=r"fault.site is 'q_norm', Qwen2ForCausalLM has layer_output, .*down_proj"),
        faults.simulated_faults(make_model(), [Fault(type="bias", layer=0, magnitude=0.5, site="q_norm")]),
    ):
        pass
