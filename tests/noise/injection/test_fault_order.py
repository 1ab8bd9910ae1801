"""Faults of a machine within phases: order relative to hidden-state noise, gradients, survival, receipts, replay."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from aqnpipe.config.noise import AdaptiveNoise, ConstantSigma, Fault, NoiseSpec
from aqnpipe.errors import ReceiptError
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.injection import faults
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

KEY = NoiseKey(seed=3, step=2)
LAYER = 1
DEAD_ZONE = Fault(type="dead_zone", layer=LAYER, magnitude=0.2)
IDS = torch.randint(2, 64, (4, 12), generator=torch.Generator().manual_seed(1))


class Run:
    """A run under `requested` faults: its specification, active faults, and a recorder that expects exactly these."""

    def __init__(self, *requested, phases=("actor_forward",), aqn=None, **settings):
        self.spec = NoiseSpec(faults=requested, aqn=aqn)
        self.faults = ActiveFaults.of(requested)
        self.recorder = ReceiptRecorder(self.spec, expected_phases=phases, num_layers=3, num_norms=7, **settings)

    def phase(self, model, phase, key=KEY, **settings):
        return phase_noise(model, self.spec, phase, key, self.recorder, faults=self.faults, **settings)

    def receipt(self):
        return self.recorder.receipt()


def layer_output(model, run=None, phase="rollout", hidden_sigmas=None, key=KEY):
    """Return the output of layer LAYER after all hooks, which is the input of the next layer."""
    seen = []
    handle = model.model.layers[LAYER + 1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        if run is None:
            model(IDS)
        else:
            with run.phase(model, phase, key, hidden_sigmas=hidden_sigmas):
                model(IDS)
    handle.remove()
    return seen[0]


def faulted(hidden, fault=DEAD_ZONE):
    return faults.ActiveFault(fault).apply(hidden, 0)


def relative_noise(model, sigma):
    """The factor that AQN's noise puts on every element of the layer's output, from a run without faults."""
    ordered = layer_output(model, Run(), hidden_sigmas={LAYER: sigma})
    return ordered / layer_output(model)


def test_the_default_order_lets_noise_lift_values_over_the_threshold(model):
    clean = layer_output(model)
    noised = layer_output(model, Run(), hidden_sigmas={LAYER: 0.5})
    found = layer_output(model, Run(DEAD_ZONE), hidden_sigmas={LAYER: 0.5})
    assert torch.equal(found, faulted(noised))
    lifted = (faulted(clean) == 0) & (found != 0)
    assert lifted.any()
    assert torch.equal(found[lifted], noised[lifted])


def test_relative_noise_after_the_fault_revives_no_exact_zero(model):
    clean = layer_output(model)
    fault = DEAD_ZONE.model_copy(update={"order": "before_noise"})
    found = layer_output(model, Run(fault), hidden_sigmas={LAYER: 0.5})
    dead = faulted(clean) == 0
    assert 0.1 < dead.float().mean() < 0.9
    assert torch.equal(found == 0, dead)
    torch.testing.assert_close(found, faulted(clean) * relative_noise(model, 0.5))


def test_around_the_noise_is_fault_noise_fault(model):
    clean = layer_output(model)
    fault = DEAD_ZONE.model_copy(update={"order": "around_noise"})
    found = layer_output(model, Run(fault), hidden_sigmas={LAYER: 0.5})
    # The noise is keyed by place, so a run whose fault comes before it gives the input of the second application.
    first = layer_output(
        model,
        Run(DEAD_ZONE.model_copy(update={"order": "before_noise"})),
        hidden_sigmas={LAYER: 0.5},
    )
    assert torch.equal(found, faulted(first))
    assert torch.equal(found[faulted(clean) == 0], torch.zeros_like(found[faulted(clean) == 0]))
    assert ((found == 0) & (faulted(clean) != 0)).any()


@pytest.mark.parametrize("order", ["after_noise", "before_noise", "around_noise"])
def test_without_noise_the_fault_is_applied_once_whatever_the_order(model, order):
    # A second saturation, with the threshold of its own call, would clamp further.
    fault = Fault(type="saturation", layer=LAYER, magnitude=0.3, order=order)
    assert torch.equal(layer_output(model, Run(fault)), faulted(layer_output(model), fault))


def test_survival_rates_are_those_counted_by_hand(model):
    clean = layer_output(model)
    noised = layer_output(model, Run(), hidden_sigmas={LAYER: 0.5})
    before = layer_output(
        model, Run(DEAD_ZONE.model_copy(update={"order": "before_noise"})), hidden_sigmas={LAYER: 0.5}
    )
    expected = {
        "after_noise": (faulted(noised) != noised).sum(),
        "before_noise": (faulted(clean) != clean).sum(),
        "around_noise": ((faulted(clean) != clean) | (faulted(before) != before)).sum(),
    }
    for order, affected in expected.items():
        run = Run(DEAD_ZONE.model_copy(update={"order": order}))
        layer_output(model, run, hidden_sigmas={LAYER: 0.5})
        (cell,) = run.receipt().fault_cells
        assert (cell.calls, cell.elements, cell.num_faulty_channels) == (1, clean.numel(), 32)
        assert cell.changed == int(affected)
        assert cell.survival_rate == 1 - int(affected) / clean.numel()
    assert len(set(map(int, expected.values()))) == 3


def gradient_run(model, *requested, sigma=0.0, phase="actor_forward"):
    """Loss, gradients of weights, and the receipt of a forward and backward pass."""
    run = Run(*requested, phases=("actor_forward", "backward"))
    model.zero_grad()
    with run.phase(model, phase, backward=True, hidden_sigmas={LAYER: sigma} if sigma else None):
        logits = model(IDS, use_cache=False).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    run.recorder.add("backward", passes=1)
    return {name: p.grad.clone() for name, p in model.named_parameters()}, run.receipt()


@pytest.mark.parametrize("order", ["after_noise", "before_noise", "around_noise"])
def test_the_gradient_is_zero_exactly_where_the_output_was_zeroed(model, order):
    _, receipt = gradient_run(model, DEAD_ZONE.model_copy(update={"order": order}), sigma=0.3)
    (cell,), (flow,) = receipt.fault_cells, receipt.gradient_flows
    assert flow.calls == 1
    assert flow.leaked == 0
    assert 0 < flow.zeroed <= cell.changed
    assert flow.zeroed_share == flow.zeroed / flow.elements
    assert 0 < flow.zeroed_squares < flow.squares


def test_the_recorded_gradient_is_that_of_autograd_by_hand(model):
    """The same network with the fault written out, its gradient taken on both sides of the fault."""
    _, receipt = gradient_run(model, DEAD_ZONE)
    sides = {}

    def written_out(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.retain_grad()
        masked = torch.where(hidden.abs() < 0.2 * hidden.abs().max(), 0.0, 1.0) * hidden
        masked.retain_grad()
        sides.update(entering=hidden, leaving=masked)
        return (masked, *output[1:]) if isinstance(output, tuple) else masked

    handle = model.model.layers[LAYER].register_forward_hook(written_out)
    logits = model(IDS, use_cache=False).logits
    handle.remove()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    arrived, passed = sides["leaving"].grad, sides["entering"].grad
    (flow,) = receipt.gradient_flows
    assert flow.elements == int((arrived != 0).sum())
    assert flow.zeroed == int(((arrived != 0) & (passed == 0)).sum())
    assert flow.squares**0.5 == pytest.approx(arrived.norm().item(), rel=1e-5)
    assert flow.zeroed_squares**0.5 == pytest.approx((arrived - passed).norm().item(), rel=1e-5)
    receipt.check()


@pytest.mark.parametrize("kind", ["noise", "bias"])
def test_faults_that_add_let_the_whole_gradient_pass(model, kind):
    _, receipt = gradient_run(model, Fault(type=kind, layer=LAYER, magnitude=0.5))
    (flow,) = receipt.check().gradient_flows
    assert flow.zeroed == 0
    assert flow.squares > 0


@pytest.mark.parametrize(
    "fault",
    [
        DEAD_ZONE,
        Fault(type="noise", layer=LAYER, magnitude=0.5, seed=4),
        Fault(type="spike", layer=0, magnitude=1.0, site="o_proj"),
    ],
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_computes_the_same_fault_again(make_model, fault, reentrant):
    model = make_model(attention_dropout=0.0).train()
    expected, plain = gradient_run(model, fault)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found, receipt = gradient_run(model, fault)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert receipt.fault_cells == plain.fault_cells
    assert receipt.gradient_flows == plain.gradient_flows
    receipt.check()


def test_the_same_key_replays_the_fault_and_another_does_not(model):
    fault = Fault(type="noise", layer=LAYER, magnitude=0.5)
    first = layer_output(model, Run(fault))
    assert torch.equal(first, layer_output(model, Run(fault)))
    for other in (NoiseKey(seed=3, step=3), NoiseKey(seed=4, step=2), NoiseKey(seed=3, step=2, rank=1)):
        assert not torch.equal(first, layer_output(model, Run(fault), key=other))


def test_a_cached_threshold_is_kept_over_the_phases_of_a_run(model):
    run = Run(DEAD_ZONE.model_copy(update={"threshold": "cached"}))
    first = layer_output(model, run)
    clean = layer_output(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.5)
    smaller = layer_output(model)
    found = layer_output(model, run, phase="reference")
    assert torch.equal(first, faulted(clean))
    assert torch.equal(found, torch.where(smaller.abs() < 0.2 * clean.abs().max(), 0.0, smaller))


def test_the_reference_check_compares_raw_outputs_under_a_fault_on_a_linear_module(model):
    run = Run(Fault(type="bias", layer=LAYER, magnitude=0.5, site="down_proj"), phases=("rollout",))
    layer_output(model, run)
    receipt = run.receipt().check()
    assert receipt.phases[0].largest_difference == 0.0
    assert receipt.phases[0].compared > 0


def test_hooks_are_gone_after_an_exception(model):
    count = sum(len(module._forward_hooks) for module in model.modules())
    with pytest.raises(RuntimeError), Run(DEAD_ZONE).phase(model, "rollout"):
        raise RuntimeError
    assert sum(len(module._forward_hooks) for module in model.modules()) == count


def test_aqn_on_hidden_states_and_a_fault_have_one_receipt(model):
    aqn = AdaptiveNoise(schedule=ConstantSigma(sigma=0.1), targets="hidden_states", layer_sigmas_from="dead_zone")
    factors = {0: 0.0, 1: 1.0, 2: 0.0}
    run = Run(DEAD_ZONE, phases=("rollout",), aqn=aqn, num_steps=1, num_epochs=1, layer_factors=factors)
    targets = target_factors(model, aqn, factors)
    with noised_rollout(model, aqn, targets, run.recorder, sigma=0.1, seed=0, step=0) as sigmas:
        layer_output(model, run, hidden_sigmas=sigmas, key=NoiseKey(seed=3, step=0))
    receipt = run.receipt().check()
    assert {cell.layer for cell in receipt.weight_cells} == {LAYER}
    assert receipt.fault_cells[0].changed > 0


def test_hidden_noise_passes_gradients_straight_through(model):
    """d(noised)/d(hidden) is 1, not the noise's factor."""
    seen = {}
    model.model.layers[LAYER].mlp.register_forward_hook(lambda *call: seen.update(entering=call[2]))
    model.model.layers[LAYER + 1].register_forward_pre_hook(lambda module, args: seen.update(leaving=args[0]))
    with Run().phase(model, "rollout", hidden_sigmas={LAYER: 0.5}):
        model(IDS, use_cache=False)
    # The layer ends with the sum of a residual and its MLP.
    gradient = torch.randn(seen["leaving"].shape)
    (passed,) = torch.autograd.grad(seen["leaving"], seen["entering"], gradient)
    assert torch.equal(passed, gradient)


# -- what the receipt refuses ------------------------------------------------------------------------------------------


def test_a_fault_that_changes_nothing_is_refused(model):
    run = Run(Fault(type="dead_zone", layer=LAYER, magnitude=1e-12), phases=("rollout",))
    layer_output(model, run)
    with pytest.raises(
        ReceiptError, match=r"fault dead_zone in layer 1 \(layer_output\) changed none of 1536 elements"
    ):
        run.receipt().check()


def test_a_phase_without_the_fault_is_refused(model):
    run = Run(DEAD_ZONE, phases=("rollout", "reference"))
    layer_output(model, run)
    run.recorder.add("reference", passes=1)
    with pytest.raises(ReceiptError, match=r"reference: fault dead_zone in layer 1 .* did not run"):
        run.receipt().check()


def test_a_fault_that_was_not_requested_is_refused(model):
    run = Run(phases=("rollout",))
    with faults.simulated_faults(model, [DEAD_ZONE]):
        layer_output(model, run)
    with pytest.raises(ReceiptError, match=r"model\.layers\.1: a simulated fault was there, none was requested"):
        run.receipt().check()


def test_a_backward_pass_past_the_fault_is_refused(model):
    run = Run(DEAD_ZONE, phases=("rollout", "backward"))
    layer_output(model, run)
    run.recorder.add("backward", passes=1)
    with pytest.raises(ReceiptError, match="no gradient was measured at fault dead_zone"):
        run.receipt().check()


def test_a_gradient_that_leaks_through_a_dead_zone_is_refused(model, monkeypatch):
    """Straight through instead of masked."""
    monkeypatch.setattr(
        faults,
        "faulty_values",
        lambda hidden, fault, top, _: hidden - (hidden * (hidden.abs() < fault.magnitude * top)).detach(),
    )
    _, receipt = gradient_run(model, DEAD_ZONE)
    with pytest.raises(ReceiptError, match="elements that it replaced passed a gradient"):
        receipt.check()


def test_order_is_about_layer_outputs():
    with pytest.raises(ValidationError, match="order is around_noise, which needs site layer_output"):
        Fault(type="dead_zone", layer=0, magnitude=0.1, site="o_proj", order="around_noise")
